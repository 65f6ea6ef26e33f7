"""What the user asked for, and the per-rank batch that follows from it before anything is tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradplan.probes.errors import UsageError, UserCodeError
from gradplan.probes.evidence import Notice, Precision, Recipe

Limit = Literal["memory", "operator", "target", "dataset", "option"]


@dataclass(frozen=True)
class Goal:
    """What the user asked for.

    ``effective_batch`` counts the samples of one optimizer step over all ranks; None means the recipe's.
    ``max_micro_batch`` is the largest micro-batch to look for; None means what the target needs.
    """

    effective_batch: int | None = None
    world_size: int = 1
    precision: Precision = "32-true"
    max_micro_batch: int | None = None


@dataclass(frozen=True)
class Target:
    """What one rank should see.

    ``per_rank`` is the samples of one optimizer step on one rank, None where nobody said. ``at_most`` is the
    largest micro-batch worth a trial and ``bound`` is what sets it; both are None where only memory decides.
    """

    per_rank: int | None
    at_most: int | None
    bound: Limit | None
    notices: tuple[Notice, ...]


def find_target(recipe: Recipe, goal: Goal) -> Target:
    """The per-rank batch after the rules on ranks, multiples and the dataset's length.

    The effective batch is the goal's, else the recipe's; a multiple of ranks x ``batch_multiple``; no larger
    than the dataset.

    Raises:
        UsageError: a count or a rate that is not above 0, or an effective batch that the ranks cannot share
            equally.
        UserCodeError: the dataset is too short for one micro-batch on every rank.
    """
    _check_numbers(recipe, goal)
    available = _available_samples(recipe, goal)
    wanted = goal.effective_batch or recipe.base_batch_size
    bounds: list[tuple[int, Limit]] = []
    per_rank: int | None = None
    notices: tuple[Notice, ...] = ()
    if wanted is not None:
        effective, limit, notices = _achievable(wanted, available, recipe, goal)
        per_rank = effective // goal.world_size
        bounds.append((per_rank, limit))
    elif available is not None:
        bounds.append((available // goal.world_size, "dataset"))
    if goal.max_micro_batch is not None:
        bounds.append((goal.max_micro_batch // recipe.batch_multiple * recipe.batch_multiple, "option"))
    at_most, bound = min(bounds, key=lambda candidate: candidate[0]) if bounds else (None, None)
    return Target(per_rank, at_most, bound, notices)


def per_rank_target(recipe: Recipe, goal: Goal) -> int | None:
    """The per-rank batch that a probe tries whole first; None where nobody named a batch.

    Raises:
        UsageError, UserCodeError: as ``find_target``.
    """
    return find_target(recipe, goal).per_rank


def _check_numbers(recipe: Recipe, goal: Goal) -> None:
    counts = {
        "the effective batch": goal.effective_batch,
        "the world size": goal.world_size,
        "the base batch": recipe.base_batch_size,
        "BATCH_MULTIPLE": recipe.batch_multiple,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1, not {count}")
    rate = recipe.base_learning_rate
    if rate is not None and rate <= 0:
        raise UsageError(f"the learning rate must be above 0, not {rate:g}; set LEARNING_RATE or --base-lr")
    if goal.max_micro_batch is not None and goal.max_micro_batch < recipe.batch_multiple:
        least = "1" if recipe.batch_multiple == 1 else f"BATCH_MULTIPLE, which is {recipe.batch_multiple}"
        raise UsageError(f"the largest micro-batch must be at least {least}, not {goal.max_micro_batch}")


def _available_samples(recipe: Recipe, goal: Goal) -> int | None:
    """The largest effective batch that the dataset can fill; None where its length is unknown."""
    if recipe.dataset_length is None:
        return None
    unit = goal.world_size * recipe.batch_multiple
    if recipe.dataset_length < unit:
        ranks = f" on each of {goal.world_size} ranks" if goal.world_size > 1 else ""
        raise UserCodeError(
            f"the dataset has {_samples(recipe.dataset_length)}, too few for a micro-batch of "
            f"{recipe.batch_multiple}{ranks}"
        )
    return recipe.dataset_length // unit * unit


def _achievable(
    wanted: int, available: int | None, recipe: Recipe, goal: Goal
) -> tuple[int, Limit, tuple[Notice, ...]]:
    """The effective batch nearest to ``wanted`` that can be had, what limits it, and why it differs."""
    unit = goal.world_size * recipe.batch_multiple
    lower = wanted // unit * unit
    if wanted % goal.world_size:
        nearest = f"{lower} or {lower + unit}" if lower else f"{unit}"
        raise UsageError(f"{goal.world_size} ranks cannot share an effective batch of {wanted} equally; take {nearest}")
    rounded = lower or unit
    if available is not None and available < rounded:
        message = (
            f"the dataset has {_samples(recipe.dataset_length)}, fewer than the effective batch of {wanted}: "
            f"planned for {available}"
        )
        return available, "dataset", (Notice(code="dataset-shorter", message=message),)
    if rounded == wanted:
        return wanted, "target", ()
    ranks = f" on each of {goal.world_size} ranks" if goal.world_size > 1 else ""
    message = (
        f"an effective batch of {wanted} is not a multiple of BATCH_MULTIPLE {recipe.batch_multiple}{ranks}: "
        f"planned for {rounded}"
    )
    return rounded, "target", (Notice(code="batch-multiple", message=message),)


def _samples(count: int | None) -> str:
    return "1 sample" if count == 1 else f"{count} samples"
