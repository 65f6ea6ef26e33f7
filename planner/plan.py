"""Evidence and a goal become a plan: micro-batches, accumulation, learning rate. Pure, without torch."""

from __future__ import annotations

from gradplan.advice import (
    batch_notices,
    evidence_notices,
    nothing_to_accumulate,
    rate_confidence,
    rate_notices,
    what_would_fit,
    window_notices,
)
from gradplan.goal import Goal, Limit, Target, find_target, per_rank_target
from gradplan.planfile import Asked, Plan, from_json, is_untouched, to_json
from gradplan.probes.errors import DoesNotFitError, UsageError
from gradplan.probes.evidence import Evidence, Recipe, Trial
from gradplan.scaling import factor, rule_for
from gradplan.window import split_window

__all__ = [
    "Goal",
    "Plan",
    "Target",
    "find_target",
    "from_json",
    "is_untouched",
    "make_plan",
    "per_rank_target",
    "to_json",
]

MOST_ACCUMULATION_STEPS = 1_000_000


def make_plan(
    recipe: Recipe,
    evidence: Evidence,
    goal: Goal,
    *,
    gradplan_version: str,
    torch_version: str,
    tried_up_to: int | None = None,
) -> Plan:
    """The settings that keep the effective batch within what the evidence says fits.

    ``tried_up_to`` is the largest micro-batch that the probe would have tried; None means that it was asked for
    this very goal.

    Raises:
        UsageError, UserCodeError: as ``find_target``; UsageError also where the evidence holds no micro-batch that
            can be accumulated.
        DoesNotFitError: no trial fits; the message says what would help.
    """
    target = find_target(recipe, goal)
    tried_up_to = tried_up_to or target.at_most
    fits = _largest_that_fits(recipe, evidence, goal)
    is_whole = target.per_rank is None or min(fits, target.at_most or fits) >= target.per_rank
    largest = fits if is_whole else _largest_to_accumulate(recipe, evidence, goal)
    at_most = largest if target.at_most is None else min(largest, target.at_most)
    whole = at_most // recipe.batch_multiple * recipe.batch_multiple
    _check_steps(target.per_rank or whole, whole)
    sizes = split_window(target.per_rank or whole, at_most, recipe.batch_multiple)
    effective = sum(sizes) * goal.world_size
    is_bound = at_most == target.at_most
    is_untried = not is_bound and (largest < fits or _reaches(largest, tried_up_to))

    rule, base, base_rate = rule_for(recipe.optimizer), recipe.base_batch_size, recipe.base_learning_rate
    scale = 1.0 if base is None else factor(rule, base, effective)
    notices = (
        *target.notices,
        *batch_notices(target, effective),
        *(evidence_notices(recipe, evidence, goal, largest) if is_untried and target.per_rank else ()),
        *rate_notices(recipe, rule, effective, scale),
        *window_notices(recipe, goal, sizes),
        *recipe.notices,
        *evidence.notices,
    )
    return Plan(
        gradplan_version=gradplan_version,
        torch_version=torch_version,
        model=recipe.model,
        precision=goal.precision,
        optimizer=recipe.optimizer,
        num_parameters=recipe.num_parameters,
        micro_batch_size=sizes[0],
        micro_batch_sizes=tuple(sizes),
        accumulation_steps=len(sizes),
        world_size=goal.world_size,
        effective_batch_size=effective,
        max_micro_batch_size=largest,
        limited_by=_limit(target, evidence, is_bound, is_ended=_reaches(fits, tried_up_to)),
        base_batch_size=base,
        base_learning_rate=base_rate,
        learning_rate=None if base_rate is None else base_rate * scale,
        learning_rate_rule="none" if rule is None else rule.name,
        learning_rate_factor=scale,
        confidence=rate_confidence(recipe, rule, effective),
        backward=evidence.backward,
        evidence=evidence,
        warnings=tuple(dict.fromkeys(notices)),
        recipe=recipe,
        asked=Asked(effective_batch=goal.effective_batch, max_micro_batch=goal.max_micro_batch),
        tried_up_to=tried_up_to,
    )


def _reaches(size: int, tried_up_to: int | None) -> bool:
    return tried_up_to is not None and size >= tried_up_to


def _limit(target: Target, evidence: Evidence, is_bound: bool, is_ended: bool) -> Limit:
    """Memory only where a larger micro-batch would have been tried and did not fit."""
    if is_bound and target.bound is not None:
        return target.bound
    if is_ended:
        return "option"
    above = [trial for trial in evidence.trials if trial.micro_batch_size > evidence.largest_fitting]
    nearest = min(above, key=lambda trial: trial.micro_batch_size, default=None)
    return "operator" if nearest is not None and nearest.reason == "operator limit" else "memory"


def _check_steps(per_rank: int, at_most: int) -> None:
    num_steps = -(-per_rank // at_most)
    if num_steps > MOST_ACCUMULATION_STEPS:
        raise UsageError(
            f"a batch of {per_rank} in micro-batches of at most {at_most} takes {num_steps} accumulation steps, more "
            f"than {MOST_ACCUMULATION_STEPS}; give a smaller --effective-batch"
        )


def _largest_that_fits(recipe: Recipe, evidence: Evidence, goal: Goal) -> int:
    if evidence.largest_fitting < recipe.batch_multiple:
        raise DoesNotFitError(what_would_fit(recipe, evidence, goal))
    return evidence.largest_fitting


def _largest_to_accumulate(recipe: Recipe, evidence: Evidence, goal: Goal) -> int:
    """The largest that is known to fit while the gradients of earlier micro-batches are there."""
    gradient_bytes = recipe.num_parameters * (2 if goal.precision == "bf16-true" else 4)
    fitting = [
        trial.micro_batch_size
        for trial in evidence.trials
        if trial.fits and (trial.num_micro_batches > 1 or _leaves_room(trial, evidence.limit_bytes - gradient_bytes))
    ]
    if max(fitting, default=0) < recipe.batch_multiple:
        raise UsageError(nothing_to_accumulate(recipe, evidence, goal))
    return max(fitting)


def _leaves_room(trial: Trial, limit_bytes: int) -> bool:
    return trial.needed_bytes is not None and trial.needed_bytes <= limit_bytes
