"""What train.py's docstring and comments say of a plan: what was decided, and why. Pure."""

from __future__ import annotations

import itertools

from gradplan.plan import Plan
from gradplan.units import format_bytes

LIMIT_REASONS = {
    "memory": "the most that fits",
    "operator": "an operator refuses more",
    "target": "one optimizer step needs no more",
    "dataset": "the dataset has no more",
    "option": "no more was asked for",
}


def headline(plan: Plan, model_name: str) -> str:
    batch = f"{plan.effective_batch_size} samples per optimizer step"
    if plan.accumulation_steps > 1:
        batch += f", in micro-batches of at most {plan.max_micro_batch_size}"
    return f"Train {model_name}: {batch}."


def decisions(plan: Plan) -> list[tuple[str, str]]:
    """(what, why) for the docstring."""
    return [
        ("device", _device(plan)),
        ("memory", _memory(plan)),
        ("window", _window(plan)),
        ("learning rate", _learning_rate(plan)),
        ("precision", plan.precision),
    ]


def _device(plan: Plan) -> str:
    evidence = plan.evidence
    limit, total = format_bytes(evidence.limit_bytes), format_bytes(evidence.device.total_bytes)
    return f"{evidence.device.name}, {evidence.kind}: {limit} of its {total} for tensors"


def _memory(plan: Plan) -> str:
    size = plan.max_micro_batch_size
    peak: int | None = None
    for trial in plan.evidence.trials:
        if trial.fits and trial.micro_batch_size == size:
            peak = trial.needed_bytes
    needs = "" if peak is None else f" needs {format_bytes(peak)}"
    return f"a micro-batch of {size}{needs}: {LIMIT_REASONS[plan.limited_by]}"


def _window(plan: Plan) -> str:
    runs = [(size, len(list(group))) for size, group in itertools.groupby(plan.micro_batch_sizes)]
    sizes = " + ".join(str(size) if count == 1 else f"{count} x {size}" for size, count in runs)
    batch = plan.effective_batch_size
    if plan.world_size > 1:
        return f"{sizes} samples on each of {plan.world_size} ranks, {batch} in all; other numbers of ranks work too"
    if plan.accumulation_steps == 1:
        return f"{sizes} samples at once"
    return f"{sizes} samples, weighted so that their gradients add up to that of the mean over all {batch}"


def _learning_rate(plan: Plan) -> str:
    if plan.base_learning_rate is None or plan.learning_rate is None:
        return "unknown: give --learning-rate, or set LEARNING_RATE in the model's file and probe again"
    if not rate_factors(plan):
        return f"{plan.base_learning_rate:.3g}, as in the recipe"
    reasons = [f"{plan.learning_rate_rule} rule for {plan.optimizer}", f"confidence: {plan.confidence}"]
    if plan.learning_rate_multiplier != 1:
        reasons.insert(1, f"x {plan.learning_rate_multiplier:.3g} found by tuning")
    base = f"{plan.base_learning_rate:.3g}"
    if plan.base_batch_size is not None:
        base += f" for a batch of {plan.base_batch_size}"
    return f"{base} becomes {plan.learning_rate:.3g} for {plan.effective_batch_size} ({'; '.join(reasons)})"


def factor_reason(plan: Plan) -> str:
    ratio = f"{plan.effective_batch_size} / {plan.base_batch_size}"
    return f"sqrt({ratio})" if plan.learning_rate_rule == "sqrt" else ratio


def rate_factors(plan: Plan) -> list[str]:
    factors = {
        "LEARNING_RATE_FACTOR": plan.learning_rate_factor,
        "LEARNING_RATE_MULTIPLIER": plan.learning_rate_multiplier,
    }
    return [name for name, factor in factors.items() if factor != 1]
