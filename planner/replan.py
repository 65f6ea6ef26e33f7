"""Plan again from the evidence in a plan: no device, no torch."""

from __future__ import annotations

from gradplan.goal import Goal, find_target
from gradplan.plan import make_plan
from gradplan.planfile import Plan
from gradplan.probes.errors import UsageError
from gradplan.probes.evidence import Notice, Recipe
from gradplan.version import installed_version

TUNED_ELSEWHERE = "tuned-elsewhere"


def plan_again(
    plan: Plan,
    *,
    effective_batch: int | None = None,
    base_batch: int | None = None,
    base_lr: float | None = None,
    world_size: int | None = None,
    max_micro_batch: int | None = None,
) -> Plan:
    """Another plan from the same evidence. What is None stays as the plan has it: with nothing given, the same plan.

    Micro-batches that were not tried are not promised: where larger ones may fit, the plan takes the largest that
    was tried and says so (the notice "larger-not-tried"). A multiplier that tuning found is kept with the recipe
    that it was found for.

    Args:
        effective_batch: samples of one optimizer step over all ranks.
        base_batch, base_lr: the recipe that is known to work; the learning rate is computed again.
        world_size: data-parallel ranks.
        max_micro_batch: no micro-batch is larger.

    Raises:
        UsageError: a count or a rate that cannot be, or the evidence holds no micro-batch that can be accumulated.
        DoesNotFitError: nothing that was tried fits.
    """
    recipe = _own_recipe(plan)
    recipe = recipe.model_copy(
        update={
            "base_batch_size": recipe.base_batch_size if base_batch is None else base_batch,
            "base_learning_rate": recipe.base_learning_rate if base_lr is None else base_lr,
        }
    )
    goal = Goal(
        _wanted_batch(plan, is_recipe_kept=base_batch is None) if effective_batch is None else effective_batch,
        plan.world_size if world_size is None else world_size,
        plan.precision,
        plan.asked.max_micro_batch if max_micro_batch is None else max_micro_batch,
    )
    tried_up_to = _tried_up_to(plan)
    made = make_plan(
        recipe,
        plan.evidence,
        goal,
        gradplan_version=installed_version(),
        torch_version=plan.torch_version,
        tried_up_to=tried_up_to,
    )
    return _with_tuning(made.model_copy(update={"tried_up_to": tried_up_to}), plan)


def _own_recipe(plan: Plan) -> Recipe:
    """The recipe as the plan's own keys have it, which people edit."""
    keys = ("model", "optimizer", "num_parameters", "base_batch_size", "base_learning_rate")
    return plan.recipe.model_copy(update={key: getattr(plan, key) for key in keys})


def _wanted_batch(plan: Plan, is_recipe_kept: bool) -> int | None:
    """The effective batch that was asked for; None where it is still the recipe's, or the largest that fits.

    A batch that was edited in the plan counts as asked for.
    """
    asked = Goal(plan.asked.effective_batch, plan.world_size, plan.precision, plan.asked.max_micro_batch)
    try:
        per_rank = find_target(_own_recipe(plan), asked).per_rank
    except UsageError:  # edited
        return plan.effective_batch_size
    if per_rank is None and plan.accumulation_steps == 1:
        return None
    if per_rank is None or per_rank * plan.world_size != plan.effective_batch_size:
        return plan.effective_batch_size
    return asked.effective_batch if is_recipe_kept else asked.effective_batch or plan.base_batch_size


def _tried_up_to(plan: Plan) -> int | None:
    """The largest micro-batch that the probe would have tried; None where memory stopped it."""
    trials = plan.evidence.trials
    if plan.tried_up_to is not None or not all(trial.fits for trial in trials):
        return plan.tried_up_to
    return max((trial.micro_batch_size for trial in trials), default=None)


def _with_tuning(made: Plan, plan: Plan) -> Plan:
    """``made`` with the multiplier that was found for ``plan``, where the recipe is the same."""
    found = plan.learning_rate_multiplier
    is_same_recipe = (made.base_batch_size, made.base_learning_rate) == (plan.base_batch_size, plan.base_learning_rate)
    if is_same_recipe and made.effective_batch_size == plan.effective_batch_size:
        notices = [warning for warning in plan.warnings if warning.code.startswith("tuning-")]
        made = made.model_copy(update={"tuning": plan.tuning, "warnings": (*made.warnings, *notices)})
    if found == 1:
        return made
    if not is_same_recipe:
        notice = _tuned_elsewhere(f"the multiplier {found:.3g} was found for another recipe and is dropped")
        return made.model_copy(update={"warnings": (*made.warnings, notice)})
    known = [warning for warning in plan.warnings if warning.code == TUNED_ELSEWHERE]
    if not known and made.effective_batch_size != plan.effective_batch_size:
        known = [
            _tuned_elsewhere(
                f"the multiplier {found:.3g} was found for an effective batch of {plan.effective_batch_size}"
            )
        ]
    rate = None if made.learning_rate is None else made.learning_rate * found
    changes = {"learning_rate": rate, "learning_rate_multiplier": found, "warnings": (*made.warnings, *known)}
    return made.model_copy(update=changes)


def _tuned_elsewhere(what: str) -> Notice:
    return Notice(code=TUNED_ELSEWHERE, message=f"{what}; 'gradplan tune' searches again")
