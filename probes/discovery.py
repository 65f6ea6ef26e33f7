"""Which model a model.py means, and the constants of its recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from gradplan.probes.errors import UserCodeError


def split_name(typed: str) -> tuple[str, str | None]:
    """``path.py:name`` -> (path.py, name); a drive letter or a path without a name is left whole."""
    file, colon, name = typed.rpartition(":")
    return (file, name) if colon and file.endswith(".py") and name.isidentifier() else (typed, None)


def find_builder(module: ModuleType, file: str, wanted: str | None) -> str:
    classes = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]
    if wanted is not None:
        if hasattr(module, wanted):
            return wanted
        raise UserCodeError(f"{file} has no {wanted}; it has {_listed(module, classes)}")
    for name in ("build_model", "model"):
        value = getattr(module, name, None)
        if isinstance(value, nn.Module) or (name == "build_model" and callable(value)):
            return name
        if name == "build_model" and value is not None:
            raise UserCodeError(
                f"build_model in {file} is {type(value).__name__}; it must be a function () -> nn.Module"
            )
    ready = [name for name in classes if _needs_nothing(getattr(module, name))]
    if len(ready) == 1:
        return ready[0]
    found = f"found {_listed(module, classes)}" if classes else "found no nn.Module in it"
    advice = f"gradplan probe {file}:{ready[0]}" if ready else "def build_model(): return MyModel(...)"
    raise UserCodeError(f"which model of {file}? There is no build_model(); {found}. Write for example: {advice}")


def _listed(module: ModuleType, classes: list[str]) -> str:
    functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    builders = [name for name in functions if name.startswith(("build", "make", "create", "get"))]
    return ", ".join(classes + builders) or "no model"


def _needs_nothing(kind: Callable[..., Any]) -> bool:
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError):
        return False
    return True


def positive_constant(module: ModuleType, name: str, kind: type) -> Any:
    value = getattr(module, name, None)
    if value is None:
        return None
    accepted = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, accepted) or not 0 < value < float("inf"):
        raise UserCodeError(
            f"{name} is {value!r}; it must be a positive {'number' if kind is float else 'whole number'}"
        )
    return value
