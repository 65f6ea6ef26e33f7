"""Find the largest micro-batch that fits, plan gradient accumulation and the learning rate, write train.py.

The names below are imported when they are first asked for: ``import gradplan`` alone imports neither torch
nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradplan.files import read_plan, write_page, write_plan, write_script
    from gradplan.goal import Goal
    from gradplan.init import write_model
    from gradplan.plan import make_plan
    from gradplan.planfile import Plan
    from gradplan.probes.errors import DoesNotFitError, GradplanError, UsageError, UserCodeError
    from gradplan.probes.evidence import Evidence, Recipe
    from gradplan.probes.simulator.catalogue import gpus
    from gradplan.replan import plan_again
    from gradplan.report import describe
    from gradplan.trainers import arguments_for
    from gradplan.tuning import tune
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
    "arguments_for",
    "describe",
    "gpus",
    "make_plan",
    "plan_again",
    "probe",
    "read_plan",
    "tune",
    "write_model",
    "write_page",
    "write_plan",
    "write_script",
]

_HOMES = {
    "gradplan.files": ("read_plan", "write_page", "write_plan", "write_script"),
    "gradplan.goal": ("Goal",),
    "gradplan.init": ("write_model",),
    "gradplan.plan": ("make_plan",),
    "gradplan.planfile": ("Plan",),
    "gradplan.probes.errors": ("DoesNotFitError", "GradplanError", "UsageError", "UserCodeError"),
    "gradplan.probes.evidence": ("Evidence", "Recipe"),
    "gradplan.probes.simulator.catalogue": ("gpus",),
    "gradplan.replan": ("plan_again",),
    "gradplan.report": ("describe",),
    "gradplan.trainers": ("arguments_for",),
    "gradplan.tuning": ("tune",),
    "gradplan.verbs": ("probe",),
}


if not TYPE_CHECKING:  # a type checker that saw this would believe in every name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("gradplan.version").installed_version()
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(home), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
