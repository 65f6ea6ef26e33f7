"""A plan as the arguments of another trainer, as text to paste. Pure, without any of them.

Those trainers know only micro-batches of one size, and most weight them equally; what they do otherwise than the
plan is said in notes.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradplan.equal import Equal, equal_split
from gradplan.probes.errors import UsageError
from gradplan.units import format_bytes

if TYPE_CHECKING:
    from gradplan.planfile import Plan


@dataclass(frozen=True)
class Arguments:
    """``text`` to paste, and ``notes`` on it; they stand in the text as well, where its format has comments."""

    text: str
    notes: tuple[str, ...]
    has_comments: bool


def arguments_for(plan: Plan, trainer: str) -> Arguments:
    """The arguments that make ``trainer``, one of ``TRAINERS``, train as planned, or as nearly as it can.

    Raises:
        UsageError: no such trainer, or it does not have the plan's precision.
    """
    if trainer not in TRAINERS:
        raise UsageError(f"no trainer is called {trainer!r}; there are {', '.join(TRAINERS)}")
    equal = equal_split(plan)
    text, notes = TRAINERS[trainer](plan, equal)
    notes = [*_split_notes(plan, equal, trainer), *notes, *_plan_notes(plan, trainer)]
    has_comments = not text.startswith("{")
    comments = "".join(f"{_comment(note)}\n" for note in notes) if has_comments else ""
    return Arguments(comments + text, tuple(notes), has_comments)


def _comment(note: str) -> str:
    return textwrap.fill(note, 88, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


# What a trainer does otherwise


def _split_notes(plan: Plan, equal: Equal, trainer: str) -> list[str]:
    sizes = plan.micro_batch_sizes
    if len(set(sizes)) == 1:
        return []
    split = f"{equal.num_micro_batches} of {equal.micro_batch}"
    known = (
        f"the plan has {len(sizes)} micro-batches of {sizes[0]} and {sizes[-1]}; {trainer} takes equal ones: {split}"
    )
    if equal.effective_batch == plan.effective_batch_size:
        return [f"{known}, the same {equal.effective_batch} samples per optimizer step"]
    rate = "" if equal.learning_rate == plan.learning_rate else ", and the learning rate follows"
    return [
        f"{known}, so an optimizer step sees {equal.effective_batch} samples, NOT {plan.effective_batch_size}{rate}"
    ]


def _plan_notes(plan: Plan, trainer: str) -> list[str]:
    notes = []
    if plan.world_size > 1:
        notes.append(f"start it with {plan.world_size} processes: the numbers hold for that many")
    if plan.learning_rate is None:
        notes.append("the learning rate is unknown, so none is given")
    if plan.backward == "sequential":
        notes.append(_joint_note(plan, trainer))
    if "count_items" in plan.recipe.names:
        notes.append(
            "the loss is a mean over what count_items counts: micro-batches that differ in it must be weighted by it, "
            f"as train.py does; see how {trainer} averages"
        )
    return notes


def _joint_note(plan: Plan, trainer: str) -> str:
    note = f"the plan runs backward after each loss; {trainer} runs it once for their sum, which "
    for peak in plan.evidence.backward_peaks:
        if peak.backward == "joint":
            fits = "fits" if peak.peak_reserved_bytes <= plan.evidence.limit_bytes else "DOES NOT FIT"
            return note + f"needs {format_bytes(peak.peak_reserved_bytes)} at {peak.micro_batch_size} samples: {fits}"
    return note + "is not known to fit"


def _optimizer_note(plan: Plan, how: str) -> list[str]:
    return [] if plan.optimizer == "AdamW" else [f"the plan was made with {plan.optimizer}, not AdamW: {how}"]


def _autocast(plan: Plan) -> str | None:
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(plan.precision)


def _true_bf16_note(plan: Plan) -> list[str]:
    if plan.precision != "bf16-true":
        return []
    return ["bf16-true: build the model in bfloat16, model.to(torch.bfloat16), and switch no mixed precision on"]


def _refuse(plan: Plan, trainer: str, *precisions: str) -> None:
    if plan.precision not in precisions:
        raise UsageError(
            f"{trainer} does not train in {plan.precision}; probe with --precision {' or '.join(precisions)}"
        )


# The trainers


def _transformers(plan: Plan, equal: Equal) -> tuple[str, list[str]]:
    lines = {
        "per_device_train_batch_size": equal.micro_batch,
        "gradient_accumulation_steps": equal.num_micro_batches,
        **_rate("learning_rate", equal),
        **({autocast: True} if (autocast := _autocast(plan)) else {}),
    }
    text = "arguments = TrainingArguments(\n" + "".join(f"    {key}={value},\n" for key, value in lines.items()) + ")\n"
    return text, [*_true_bf16_note(plan), *_optimizer_note(plan, "give it as Trainer(optimizers=(optimizer, None))")]


def _lightning(plan: Plan, equal: Equal) -> tuple[str, list[str]]:
    ranks = f", devices={plan.world_size}" if plan.world_size > 1 else ""
    precision = f'precision="{plan.precision}"'
    trainer = f"trainer = Trainer(accumulate_grad_batches={equal.num_micro_batches}, {precision}{ranks})\n"
    return _loader(equal) + trainer + _rate_line(equal, "in configure_optimizers"), []


def _accelerate(plan: Plan, equal: Equal) -> tuple[str, list[str]]:
    precision = f'mixed_precision="{_autocast(plan) or "no"}"'
    text = f"accelerator = Accelerator(gradient_accumulation_steps={equal.num_micro_batches}, {precision})\n"
    return text + _loader(equal) + _rate_line(equal, "of the optimizer"), _true_bf16_note(plan)


def _deepspeed(plan: Plan, equal: Equal) -> tuple[str, list[str]]:
    config: dict[str, Any] = {
        "train_batch_size": equal.effective_batch,
        "train_micro_batch_size_per_gpu": equal.micro_batch,
        "gradient_accumulation_steps": equal.num_micro_batches,
    }
    half = "bf16" if plan.precision == "bf16-true" else _autocast(plan)
    notes = []
    if half:
        config[half] = {"enabled": True}
        notes.append(
            f"DeepSpeed's {half} keeps the weights in 16 bits and float32 copies in its optimizer: it needs other "
            "memory than the plan's"
        )
    if equal.learning_rate is not None:
        notes.append(f"the learning rate of your optimizer: {_number(equal.learning_rate)}")
    return json.dumps(config, indent=2) + "\n", notes


def _torchtitan(plan: Plan, equal: Equal) -> tuple[str, list[str]]:
    _refuse(plan, "torchtitan", "32-true", "bf16-mixed", "bf16-true")
    flags = {
        "training.local_batch_size": equal.micro_batch,
        "training.global_batch_size": equal.effective_batch,
        "training.dtype": "bfloat16" if plan.precision == "bf16-true" else "float32",
        "training.mixed_precision_param": "float32" if plan.precision == "32-true" else "bfloat16",
        **_rate("optimizer.lr", equal),
    }
    text = " \\\n".join(f"--{key} {value}" for key, value in flags.items()) + "\n"
    return text, _optimizer_note(plan, "choose it with --optimizer.name")


def _torchtune(plan: Plan, equal: Equal) -> tuple[str, list[str]]:
    _refuse(plan, "torchtune", "32-true", "bf16-true")
    lines = {
        "batch_size": equal.micro_batch,
        "gradient_accumulation_steps": equal.num_micro_batches,
        "dtype": "bf16" if plan.precision == "bf16-true" else "fp32",
    }
    rate = _yaml(_rate("  lr", equal))
    return _yaml(lines) + (f"optimizer:\n{rate}" if rate else ""), []


def _llama_factory(plan: Plan, equal: Equal) -> tuple[str, list[str]]:
    half = "pure_bf16" if plan.precision == "bf16-true" else _autocast(plan)
    lines = {
        "per_device_train_batch_size": equal.micro_batch,
        "gradient_accumulation_steps": equal.num_micro_batches,
        **_rate("learning_rate", equal),
        **({half: "true"} if half else {}),
    }
    return _yaml(lines), _optimizer_note(plan, "choose it with optim")


def _rate(key: str, equal: Equal) -> dict[str, str]:
    return {} if equal.learning_rate is None else {key: _number(equal.learning_rate)}


def _number(value: float) -> str:
    """``1.0e-05``: YAML 1.1 takes 1e-05 for text."""
    digits, e, exponent = f"{value:.6g}".partition("e")
    return f"{digits}.0e{exponent}" if e and "." not in digits else digits + e + exponent


def _rate_line(equal: Equal, where: str) -> str:
    return "" if equal.learning_rate is None else f"learning_rate = {_number(equal.learning_rate)}  # {where}\n"


def _loader(equal: Equal) -> str:
    return f"loader = DataLoader(dataset, batch_size={equal.micro_batch}, shuffle=True)\n"


def _yaml(lines: dict[str, Any]) -> str:
    return "".join(f"{key}: {value}\n" for key, value in lines.items())


TRAINERS: dict[str, Callable[[Plan, Equal], tuple[str, list[str]]]] = {
    "transformers": _transformers,
    "lightning": _lightning,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "torchtune": _torchtune,
    "llama-factory": _llama_factory,
}
