"""The split of an optimizer step for trainers that know only micro-batches of one size. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradplan.scaling import factor, rule_for

if TYPE_CHECKING:
    from gradplan.planfile import Plan


@dataclass(frozen=True)
class Equal:
    """An optimizer step of equal micro-batches on each rank; ``effective_batch`` is over all ranks."""

    micro_batch: int
    num_micro_batches: int
    effective_batch: int
    learning_rate: float | None


def equal_split(plan: Plan) -> Equal:
    """The equal split nearest to the plan's window that fits: at most three times as many micro-batches.

    The same effective batch where some such split has it; else the nearest, its learning rate by the plan's rule.
    No micro-batch is larger than the window's largest.
    """
    sizes, multiple = plan.micro_batch_sizes, plan.recipe.batch_multiple
    per_rank, fewest = sum(sizes), len(sizes)
    splits = [(sizes[0], fewest)] if len(set(sizes)) == 1 else []
    for count in range(fewest, 3 * fewest + 1) if not splits else ():
        below = per_rank // (count * multiple) * multiple
        splits += [(size, count) for size in (below, below + multiple) if size]
    size, count = min(splits, key=lambda split: (abs(split[0] * split[1] - per_rank), split[1]))
    effective = size * count * plan.world_size
    return Equal(size, count, effective, _rate_for(plan, effective))


def _rate_for(plan: Plan, effective: int) -> float | None:
    if plan.learning_rate is None or plan.base_batch_size is None or effective == plan.effective_batch_size:
        return plan.learning_rate
    return plan.learning_rate * factor(rule_for(plan.optimizer), plan.effective_batch_size, effective)
