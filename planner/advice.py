"""What the user should know about a plan, or can change where there is none. Pure, without torch."""

from __future__ import annotations

import math
import os
import shlex

from gradplan.goal import Goal, Target
from gradplan.probes.evidence import Evidence, Notice, Recipe
from gradplan.scaling import Confidence, Rule, confidence
from gradplan.units import format_bytes

_COMPARE = "compare half and twice the rate in short, complete runs"


def what_would_fit(recipe: Recipe, evidence: Evidence, goal: Goal) -> str:
    """Why not even the smallest micro-batch fits, and what can be changed."""
    smallest = min(evidence.trials, key=lambda trial: trial.micro_batch_size, default=None)
    size = recipe.batch_multiple if smallest is None else smallest.micro_batch_size
    required = None if smallest is None else smallest.required_bytes
    total = format_bytes(evidence.device.total_bytes)
    limit = f"{format_bytes(max(evidence.limit_bytes, 0))} that {evidence.device.name} can give of its {total}"
    predicted = None if smallest is None else smallest.predicted_bytes
    if required is None and predicted is not None and predicted > evidence.limit_bytes:
        problem = f"a micro-batch of {size} does not fit: {format_bytes(predicted)} predicted, more than the {limit}"
    elif required is None or required <= evidence.limit_bytes:
        problem = f"a micro-batch of {size} does not fit in the {limit}"
    else:
        problem = f"a micro-batch of {size} needs {format_bytes(required)}, more than the {limit}"
    holds = [other for other in evidence.others if other.max_micro_batch_size >= size]
    larger = min(holds, key=lambda other: other.device.total_bytes, default=None)
    changes = evidence.levers[1:]
    enough = [
        f"{lever.name} ({lever.how}), for a micro-batch of {lever.max_micro_batch_size}"
        for lever in changes
        if lever.max_micro_batch_size >= size
    ]
    if changes and not enough:
        nearest = sorted(changes, key=lambda lever: lever.required_bytes)[:3]
        needs = "; ".join(f"{lever.name} ({lever.how}) needs {format_bytes(lever.required_bytes)}" for lever in nearest)
        problem += f". No single change of these is enough: {needs}"
    remedies = enough or [
        *(["mixed precision (--precision bf16-mixed)"] if goal.precision == "32-true" else []),
        "activation checkpointing in the model",
        *(["an optimizer with less state (SGD, 8-bit)"] if "adam" in recipe.optimizer.lower() else []),
    ]
    remedies += [
        "a smaller model or smaller inputs",
        *(["closing what else uses the device"] if evidence.kind == "measured" else []),
        "more memory (--memory SIZE)"
        if evidence.device.slug == "cpu"
        else "a device with more memory" + (f", such as {larger.device.name}" if larger else ""),
    ]
    return f"{problem}. What can make it fit: {'; '.join(remedies)}"


def rate_confidence(recipe: Recipe, rule: Rule | None, effective: int) -> Confidence:
    """How far to trust the learning rate for an effective batch; low where the base batch is unknown."""
    base = recipe.base_batch_size
    if base is None or (base != effective and _is_fine_tuning(recipe)):
        return "low"
    return confidence(rule, base, effective)


def _is_fine_tuning(recipe: Recipe) -> bool:
    """The rules were found by training from scratch; a file that loads weights does something else."""
    return "load_weights" in recipe.names


def batch_notices(target: Target, effective: int) -> list[Notice]:
    """Where the effective batch is nobody's choice."""
    if target.per_rank is not None:
        return []
    message = (
        f"no effective batch was given: planned for {effective}, the largest possible without accumulation; "
        "set BATCH_SIZE or --effective-batch"
    )
    return [Notice(code="no-effective-batch", message=message)]


def evidence_notices(recipe: Recipe, evidence: Evidence, goal: Goal, largest: int) -> list[Notice]:
    """Where larger micro-batches than ``largest`` may fit, and nobody tried."""
    message = (
        f"micro-batches larger than {largest} were not tried for this batch; to try them: "
        f"{_probe_again(recipe, evidence, goal)}"
    )
    return [Notice(code="larger-not-tried", message=message)]


def nothing_to_accumulate(recipe: Recipe, evidence: Evidence, goal: Goal) -> str:
    """Why evidence of a whole batch in one micro-batch does not do for several, and what to type."""
    return (
        "the step was only tried with one micro-batch, and the gradients that accumulation keeps may not fit beside "
        f"it; type: {_probe_again(recipe, evidence, goal)}"
    )


def _probe_again(recipe: Recipe, evidence: Evidence, goal: Goal) -> str:
    options = {
        "--device": evidence.device.slug,
        "--precision": "" if goal.precision == "32-true" else goal.precision,
        "--effective-batch": str(goal.effective_batch or ""),
        "--world-size": "" if goal.world_size == 1 else str(goal.world_size),
    }
    given = [part for name, value in options.items() if value for part in (name, quoted(value))]
    return " ".join(["gradplan probe", quoted(recipe.model), *given])


def quoted(argument: str) -> str:
    """As the shell needs it."""
    if os.name == "nt":
        return f'"{argument}"' if " " in argument else argument
    return shlex.quote(argument)


def rate_notices(recipe: Recipe, rule: Rule | None, effective: int, scale: float) -> list[Notice]:
    """What is unknown or uncertain about the learning rate."""
    notices = []
    base, batches = recipe.base_batch_size, f"from a batch of {recipe.base_batch_size} to {effective}"
    if recipe.base_learning_rate is None:
        otherwise = "" if scale == 1 else f", or multiply your own by {scale:.2g}"
        message = f"the learning rate is unknown; set LEARNING_RATE or --base-lr{otherwise}"
        notices.append(Notice(code="no-base-lr", message=message))
    if base is None:
        message = (
            "the batch that the learning rate was tuned for is unknown, so the rate is not scaled; "
            "set BATCH_SIZE or --base-batch"
        )
        notices.append(Notice(code="no-base-batch", message=message))
    elif rule is None and base != effective:
        message = (
            f"no learning-rate rule is known for {recipe.optimizer}, so the rate is not scaled ({batches}); {_COMPARE}"
        )
        notices.append(Notice(code="unknown-optimizer", message=message))
    elif rule is not None and rate_confidence(recipe, rule, effective) == "low":
        doubt = f"the {rule.name} rule for {recipe.optimizer} is {_doubt(recipe, rule)} ({batches})"
        message = f"{doubt}; {_COMPARE}"
        notices.append(Notice(code="learning-rate-confidence", message=message))
    return notices


def _doubt(recipe: Recipe, rule: Rule) -> str:
    if _is_fine_tuning(recipe):
        return "not tested for fine-tuning"
    return "not tested that far" if rule.well_tested else "little tested"


def window_notices(recipe: Recipe, goal: Goal, sizes: list[int]) -> list[Notice]:
    """Where accumulating is not the same as the large batch."""
    notices = []
    count = len(sizes)
    if recipe.has_batch_norm and count > 1:
        step = f"{sum(sizes)} of a step" + (" on each rank" if goal.world_size > 1 else "")
        message = (
            f"BatchNorm sees micro-batches of {sizes[0]}, not the {step}, and updates its running statistics "
            f"{count} times per step"
        )
        alone = "; it may refuse the micro-batch of one sample: choose another effective batch"
        message += alone if sizes[-1] == 1 < sizes[0] else ""
        notices.append(Notice(code="batch-norm", message=message))
    if goal.precision == "bf16-true" and count >= 16:
        error = f"about {0.0012 * math.sqrt(count):.1%}{', more where they agree' if count >= 128 else ''}"
        message = (
            f"bf16-true sums {count} gradients in bfloat16, with a relative error of {error}; "
            "bf16-mixed sums them in float32"
        )
        notices.append(Notice(code="bf16-accumulation", message=message))
    return notices
