"""What train.py can be written with: which parts exist, which go together, and what they cost. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from gradplan.probes.errors import UsageError
from gradplan.units import format_bytes

if TYPE_CHECKING:  # the command line reads the names of the parts before it needs a plan
    from gradplan.planfile import Plan

PARTS = ("ddp", "fsdp", "noise", "tensorboard", "compile", "ema")


def as_parts(text: str) -> tuple[str, ...]:
    """The parts in ``ddp,ema``.

    Raises:
        UsageError: as ``check_names``.
    """
    parts = tuple(part.strip() for part in text.split(","))
    check_names(parts)
    return parts


def check_names(parts: Iterable[str]) -> None:
    """Every part exists, and they go together.

    Raises:
        UsageError: they do not.
    """
    parts = tuple(parts)
    for part in parts:
        if part not in PARTS:
            nearest = difflib.get_close_matches(part, PARTS, n=1)
            meant = f" (did you mean {nearest[0]}?)" if nearest else ""
            raise UsageError(f"there is no part {part!r}{meant}; there are {', '.join(PARTS)}")
    if {"ddp", "fsdp"} <= {*parts}:
        raise UsageError("ddp and fsdp exclude each other: both add up the gradients of all ranks; choose one")


def check_parts(plan: Plan, parts: Collection[str]) -> None:
    """The parts fit the plan's losses.

    Raises:
        UsageError: as ``check_names``, or one does not fit, with the reason.
    """
    check_names(parts)
    for part in ("ddp", "fsdp", "noise"):
        if part in parts and plan.backward == "sequential":
            raise UsageError(f"{part} does not work with a backward after each loss, as planned: {_ONE_BACKWARD[part]}")
    if "noise" in parts and (plan.recipe.num_counts or 1) > 1:
        raise UsageError(
            "noise does not work where count_items gives several numbers: a micro-batch's gradient is then a sum with "
            "several shares, which cannot be undone"
        )


_ONE_BACKWARD = {
    "ddp": "it sends the gradients in the backward of one forward; without it the script adds them up over ranks, too",
    "fsdp": "it gathers and frees the parameters around one forward and its backward",
    "noise": "a micro-batch's gradient then arrives in pieces, whose norms do not add up to its own",
}


def notes(plan: Plan, parts: Collection[str]) -> list[str]:
    """What to watch out for: for each part what it costs beyond what was probed."""
    size = 2 if plan.precision == "bf16-true" else 4
    copy = format_bytes(plan.num_parameters * size)
    alone = "noise" in parts and plan.accumulation_steps * plan.world_size < 2
    found = {
        "ddp": f"DistributedDataParallel keeps a second copy of the gradients, {copy} more than was probed; "
        "with one process there is no wrapper",
        "fsdp": "FSDP shards parameters, gradients and optimizer state: each of several ranks needs less than was "
        "probed, and larger micro-batches may fit. Gradients are reduced after each micro-batch, so that no rank keeps "
        "all of them. Every rank must call the same blocks, and a layer that no sample of a step used gets a gradient "
        "of zero, on which momentum and weight decay act. A last step with fewer samples than ranks is left out",
        "noise": "the noise scale takes a norm of every gradient: some time, and no memory to speak of. It needs two "
        "micro-batches in a step, over all ranks"
        + ("; this plan has one, so it stays unknown unless more ranks are started" if alone else ""),
        "tensorboard": "TensorBoard takes no memory of the device; look with: tensorboard --logdir checkpoints",
        "compile": "compiled kernels need other memory than was probed, often less, sometimes more; the first step of "
        "each micro-batch size takes minutes, and compiling needs memory of its own on the host",
        "ema": f"the averaged weights are a copy of the model on the device, {copy} more than was probed",
    }
    return [found[part] for part in PARTS if part in parts]
