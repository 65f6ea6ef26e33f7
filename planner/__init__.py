"""Find the largest micro-batch that fits, plan gradient accumulation and the learning rate, write train.py.

The names below are imported when they are first asked for: ``import gradplan`` alone imports neither torch
nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradplan.files import write_plan, write_script
    from gradplan.goal import Goal
    from gradplan.plan import Plan, make_plan
    from gradplan.probes.errors import DoesNotFitError, GradplanError, UsageError, UserCodeError
    from gradplan.probes.evidence import Evidence, Recipe
    from gradplan.probes.simulator.catalogue import gpus
    from gradplan.verbs import probe

    __version__: str

__all__ = [
    "DoesNotFitError",
    "Evidence",
    "Goal",
    "GradplanError",
    "Plan",
    "Recipe",
    "UsageError",
    "UserCodeError",
    "__version__",
    "gpus",
    "make_plan",
    "probe",
    "write_plan",
    "write_script",
]

_HOMES = {
    "gradplan.files": ("write_plan", "write_script"),
    "gradplan.goal": ("Goal",),
    "gradplan.plan": ("Plan", "make_plan"),
    "gradplan.probes.errors": ("DoesNotFitError", "GradplanError", "UsageError", "UserCodeError"),
    "gradplan.probes.evidence": ("Evidence", "Recipe"),
    "gradplan.probes.simulator.catalogue": ("gpus",),
    "gradplan.verbs": ("probe",),
}


if not TYPE_CHECKING:  # a type checker that saw this would believe in every name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return _version()
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(home), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gradplan")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"
