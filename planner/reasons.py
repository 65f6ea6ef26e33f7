"""Each setting of a plan in a few words, and where it comes from. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from gradplan import verdict
from gradplan.planfile import Plan
from gradplan.probes.evidence import Anatomy, Capacity, Trial
from gradplan.units import format_bytes
from gradplan.window import split_window

MUCH_SMALLER = 1.5  # times smaller: nearer sizes differ by chance
SAME_SPEED = 0.97  # of the samples per second: a difference that a second measurement may turn round


def window(plan: Plan) -> str:
    """``22, 21, 21``; one number where all are equal; ``9 x 8, 4 x 7`` where there are many."""
    sizes = plan.micro_batch_sizes
    if len(set(sizes)) == 1:
        return str(sizes[0])
    if len(sizes) <= 3:
        return ", ".join(map(str, sizes))
    runs = [(len(list(run)), size) for size, run in itertools.groupby(sizes)]
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def window_reason(plan: Plan) -> str:
    largest = plan.max_micro_batch_size
    if has_warning(plan, "larger-not-tried"):
        return f"{largest} is the largest that was tried"
    if plan.limited_by == "memory":
        return f"{largest} is the largest that fits"
    if plan.limited_by == "operator":
        return f"{largest} is the largest that every operator takes"
    if plan.limited_by == "option":
        return f"up to {largest} was asked for, and fits"
    return "all samples of a step fit at once"


def accumulation_reason(plan: Plan) -> str:
    each = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    many = "micro-batch" if plan.accumulation_steps == 1 else "micro-batches"
    return f"{many} per optimizer step{each}"


def batch_reason(plan: Plan) -> str:
    if has_warning(plan, "no-effective-batch"):
        return "not given: the largest without accumulation"
    if plan.effective_batch_size == plan.base_batch_size:
        return "kept from the recipe"
    if has_warning(plan, "dataset-shorter"):
        return "the dataset has no more"
    if has_warning(plan, "batch-multiple"):
        return "the nearest multiple of BATCH_MULTIPLE"
    known = "" if plan.base_batch_size is None else f"; the recipe has {plan.base_batch_size}"
    return f"as asked for{known}"


def learning_rate(plan: Plan) -> str:
    return "unknown" if plan.learning_rate is None else f"{plan.learning_rate:.3g}"


def learning_rate_reason(plan: Plan) -> str:
    known = plan.base_learning_rate
    base = "yours" if known is None else f"{known:.3g}"
    multiplier = plan.learning_rate_multiplier
    tuned = "" if multiplier == 1 else f" x {multiplier:.3g} (tuned)"
    if plan.learning_rate_factor != 1:
        scaled = f"{base} x {plan.learning_rate_factor:.3g} ({plan.learning_rate_rule} rule)"
        return f"{scaled}{tuned}, confidence {plan.confidence}"
    if tuned:
        return base + tuned
    if known is None:
        return "nobody said"
    if plan.base_batch_size is None:
        return "as given, not scaled"
    if plan.base_batch_size == plan.effective_batch_size:
        return "kept from the recipe"
    no_rule = plan.learning_rate_rule == "none"
    return f"as in the recipe: {'no rule is known' if no_rule else 'no scaling'} for {plan.optimizer}"


def memory(plan: Plan) -> tuple[str, str]:
    """What the chosen micro-batch needs, else what the largest that fits needs; and of how much."""
    limit = f"of {format_bytes(plan.evidence.limit_bytes)} usable"
    for trial in _trials_of_interest(plan):
        if trial.needed_bytes is not None:
            reason = f"{limit}; {how(plan)} for size {trial.micro_batch_size}"
            needed, reserved = format_bytes(trial.needed_bytes), format_bytes(trial.peak_reserved_bytes or 0)
            if trial.required_bytes is not None and trial.peak_reserved_bytes is not None and needed != reserved:
                reason += f"; with room to spare it takes {reserved}"
            return format_bytes(trial.needed_bytes), reason
    return "unknown", limit


def _trials_of_interest(plan: Plan) -> Iterator[Trial]:
    """Those that fit: first of the chosen micro-batch, then of the largest."""
    for size in (plan.micro_batch_size, plan.max_micro_batch_size):
        yield from (trial for trial in plan.evidence.trials if trial.fits and trial.micro_batch_size == size)


def anatomy_title(anatomy: Anatomy) -> str:
    """At which moment most memory is in use."""
    where = {
        "forward": f"the forward pass of micro-batch {anatomy.micro_batch}",
        "backward": f"the backward pass of micro-batch {anatomy.micro_batch}",
        "optimizer step": "the optimizer's step",
        "evaluation": "the evaluation",
    }.get(anatomy.moment, "the building of the model")
    inside = f" (in {anatomy.module})" if anatomy.module else ""
    step = f", optimizer step {anatomy.step}" if anatomy.step else ""
    return f"Most memory is in use in {where}{inside}{step}, for size {anatomy.micro_batch_size} (predicted)"


def anatomy_rows(anatomy: Anatomy) -> Iterator[tuple[str, int, bool]]:
    """(name, bytes, whether it is a part of the row before), without what is less than a thousandth."""
    least = sum(part.num_bytes for part in anatomy.parts) / 1000
    for part in anatomy.parts:
        if part.num_bytes < least:
            continue
        yield part.name, part.num_bytes, False
        if part.name == "activations":
            shown = [module for module in anatomy.modules if module.num_bytes >= least]
            yield from ((module.name, module.num_bytes, True) for module in shown)
            rest = part.num_bytes - sum(module.num_bytes for module in shown)
            if rest >= least:
                yield "others", rest, True
    yield "reserved beyond that, with room to spare", anatomy.unused_bytes, False


def how(plan: Plan) -> str:
    return "predicted" if plan.evidence.kind == "simulated" else "measured"


def tuning(plan: Plan) -> tuple[str, str] | None:
    """What became of the multiplier that was searched for."""
    if plan.tuning is None:
        return None
    found = plan.tuning.verdict
    return f"x {found.multiplier:.3g}" if found.is_adopted else "keep 1", verdict.sentence(plan.tuning)


def backward(plan: Plan) -> tuple[str, str] | None:
    """For several losses: the form that is used, and what both need; None for one loss."""
    peaks = {peak.backward: peak for peak in plan.evidence.backward_peaks}
    used = peaks.get(plan.backward)
    if len(peaks) < 2 or used is None:
        return ("loss by loss", "one backward for each loss") if plan.backward == "sequential" else None
    needs, other_needs = (
        format_bytes(peaks[form].peak_reserved_bytes) for form in (plan.backward, *(peaks.keys() - {plan.backward}))
    )
    size = "" if used.micro_batch_size == plan.micro_batch_size else f" for size {used.micro_batch_size}"
    if plan.backward == "sequential":
        return "loss by loss", f"{needs}, against {other_needs} for their sum ({how(plan)}{size})"
    return "all losses at once", f"{needs}, against {other_needs} loss by loss ({how(plan)}{size})"


def step_time(plan: Plan) -> tuple[str, str] | None:
    """What an optimizer step took where it was measured, at the chosen micro-batch or else at the largest."""
    for trial in _trials_of_interest(plan):
        if trial.step_seconds is not None:
            return format_seconds(trial.step_seconds), f"measured with {micro_batches(trial)}"
    return None


def throughput(plan: Plan) -> tuple[str, str] | None:
    """Samples per second at the chosen micro-batch or else at the largest, and whether fewer at once do as well."""
    timed = [trial for trial in plan.evidence.trials if trial.fits and trial.step_seconds]
    chosen = next((trial for trial in _trials_of_interest(plan) if trial in timed), None)
    if chosen is None:
        return None
    smaller = sorted(
        (trial for trial in timed if MUCH_SMALLER * trial.micro_batch_size <= chosen.micro_batch_size),
        key=lambda trial: trial.micro_batch_size,
    )
    if not smaller:
        return None
    value = _format_rate(_samples_per_second(chosen))
    as_fast = [trial for trial in smaller if _samples_per_second(trial) >= SAME_SPEED * _samples_per_second(chosen)]
    if as_fast:
        return value, f"measured; a micro-batch of {as_fast[0].micro_batch_size} is as fast"
    other = smaller[-1]
    return value, f"measured; {_format_rate(_samples_per_second(other))} with micro-batches of {other.micro_batch_size}"


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _samples_per_second(trial: Trial) -> float:
    return trial.micro_batch_size * trial.num_micro_batches / (trial.step_seconds or math.inf)


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def micro_batches(trial: Trial) -> str:
    """``2 micro-batches of 27``: the optimizer step that was tried."""
    many = "micro-batch" if trial.num_micro_batches == 1 else "micro-batches"
    return f"{trial.num_micro_batches} {many} of {trial.micro_batch_size}"


def size_on(other: Capacity, plan: Plan) -> str:
    """The largest micro-batch there; "at least" where the probe tried no larger one and this plan could use it."""
    size = other.max_micro_batch_size
    if not size:
        return "does not fit"
    if not has_warning(plan, "no-effective-batch"):
        size = min(size, plan.effective_batch_size // plan.world_size)
    return f"at least {size}" if _is_open(other, plan) else str(size)


def _is_open(other: Capacity, plan: Plan) -> bool:
    size, tried_up_to = other.max_micro_batch_size, plan.tried_up_to
    return tried_up_to is not None and tried_up_to <= size < plan.effective_batch_size // plan.world_size


def steps_on(other: Capacity, plan: Plan) -> str:
    """Accumulation steps there, for the same effective batch on as many ranks."""
    multiple, size = plan.recipe.batch_multiple, other.max_micro_batch_size
    per_rank = plan.effective_batch_size // plan.world_size
    if size < multiple:
        return ""
    steps = len(split_window(per_rank, size, multiple))
    return f"at most {steps}" if _is_open(other, plan) else str(steps)


def has_warning(plan: Plan, code: str) -> bool:
    return any(warning.code == code for warning in plan.warnings)
