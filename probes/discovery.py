"""Which model a model.py means, and the constants of its recipe."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
from types import ModuleType
from typing import Any

from torch import nn

from gradplan.probes.errors import UserCodeError

_OTHER_BUILDERS = ("build_batch", "build_dataset", "build_optimizer", "build_scheduler", "build_validation_dataset")


def split_name(typed: str) -> tuple[str, str | None]:
    """``path.py:name`` -> (path.py, name); a drive letter or a path without a name is left whole."""
    file, colon, name = typed.rpartition(":")
    return (file, name) if colon and file.endswith(".py") and name.isidentifier() else (typed, None)


def find_builder(module: ModuleType, file: str, wanted: str | None) -> str:
    """The name in the file that gives the model: a function, a class or a module.

    Raises:
        UserCodeError: there is none, or more than one; the message lists what was found and what to type.
    """
    classes = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]
    if wanted is not None:
        if callable(getattr(module, wanted, None)):
            return wanted
        missing = f"{wanted} in {file} is no model" if hasattr(module, wanted) else f"{file} has no {wanted}"
        raise UserCodeError(f"{missing}; it has {', '.join(classes + _functions(module)) or 'no model'}")
    builder = getattr(module, "build_model", None)
    if callable(builder) and not isinstance(builder, nn.Module):
        return "build_model"
    if builder is not None:
        remedy = "name it model" if isinstance(builder, nn.Module) else "it must be a function () -> nn.Module"
        raise UserCodeError(f"build_model in {file} is {type(builder).__name__}; {remedy}")
    if isinstance(getattr(module, "model", None), nn.Module):
        return "model"
    ready = [name for name in classes if _needs_nothing(getattr(module, name))]
    if len(ready) == 1:
        return ready[0]
    candidates = classes + _functions(module)
    found = f"found {', '.join(candidates)}" if candidates else "found no nn.Module in it"
    choice = (ready or _functions(module))[:1]
    advice = f"gradplan probe {file}:{choice[0]}" if choice else "def build_model(): return MyModel(...)"
    raise UserCodeError(f"which model of {file}? There is no build_model(); {found}. Write for example: {advice}")


def _functions(module: ModuleType) -> list[str]:
    """Those that sound like model builders."""
    verbs = ("build", "make", "create", "get")
    functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    return [name for name in functions if name.startswith(verbs) and name not in _OTHER_BUILDERS]


def _needs_nothing(kind: Callable[..., Any]) -> bool:
    try:
        inspect.signature(kind).bind()
    except (TypeError, ValueError):
        return False
    return True


def positive_constant(module: ModuleType, name: str, kind: type) -> Any:
    """The file's constant as ``kind``, float or int; None where it has none.

    Raises:
        UserCodeError: it is not a positive, finite number of that kind.
    """
    value: Any = getattr(module, name, None)
    if value is None:
        return None
    accepted = Real if kind is float else Integral  # NumPy's too
    is_number = isinstance(value, accepted) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise UserCodeError(
            f"{name} is {value!r}; it must be a positive {'number' if kind is float else 'whole number'}"
        )
    return kind(value)
