"""One window of training: draw it, run it, step once.

The simulator, trials on a device, the tests and train.py all run these functions: train.py holds the ones it
needs as a verbatim copy, so this file imports only torch and the standard library, and every function stands
alone or calls others of this file.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def move_to(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The same batch on ``device``, its floating-point tensors as ``dtype`` where one is given.

    Goes through dicts, lists, tuples and dataclasses; anything else with a ``.to`` moves itself.
    """
    if isinstance(batch, Tensor):
        wanted = dtype if batch.is_floating_point() else None
        return batch.to(device=device, dtype=wanted, non_blocking=device.type == "cuda")
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: move_to(value, device, dtype) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return moved
        same_kind = copy.copy(batch)  # a defaultdict cannot be made from a dict
        same_kind.update(moved)
        return same_kind
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(value, device, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_to(value, device, dtype) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **move_to(values, device, dtype))
    return batch


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model itself returns: a 0-d tensor, ``.loss`` or ``["loss"]``."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (list, tuple)) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor):
        kind = type(output).__name__
        raise TypeError(f"the model returned {kind} without a loss; define compute_loss(model, batch)")
    return loss


def check_loss(loss: Any) -> Tensor:
    """The loss, if one scalar tensor with a gradient.

    Raises:
        TypeError: it is something else; the message says what to write instead.
    """
    if inspect.isgenerator(loss):
        raise TypeError("compute_loss yields several losses; return one scalar, for example their sum")
    if isinstance(loss, (tuple, list, dict)):
        raise TypeError(
            f"compute_loss returned a {type(loss).__name__} of {len(loss)}; return one scalar tensor, "
            "for example the sum of the losses"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"compute_loss returned {type(loss).__name__}; return one scalar tensor")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise TypeError(f"compute_loss returned a tensor of shape {shape}; return one scalar: .mean()?")
    if not loss.requires_grad:
        raise TypeError("the loss has no gradient: it does not depend on a parameter that requires grad")
    return loss


def run_micro_batch(
    model: nn.Module,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], Any],
    share: float,
    autocast: AbstractContextManager[Any],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Forward and backward of one micro-batch, whose graph is freed on return.

    ``share`` is its part of the window: samples here / samples of the window. Returns the loss times
    ``share``, a detached scalar, so that a window's results add up to the mean over all its samples.
    """
    with autocast:
        loss = check_loss(compute_loss(model, batch)) * share
    backward(loss)
    return loss.detach().float().reshape(())


def accumulate(
    model: nn.Module,
    window: Iterable[tuple[Any, float]],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    precision: str = "32-true",
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Gradients of the whole window's mean loss, summed in ``.grad`` one micro-batch at a time.

    ``window`` gives (batch on the CPU, share); the shares sum to 1. Returns the mean loss over the window's
    samples, a scalar on ``device``.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else None
    window_loss = torch.zeros((), device=device)
    for batch, share in window:
        autocast = autocast_for(device, precision)
        # The batch on the device has no name here, so that it is freed before the next one is moved.
        loss = run_micro_batch(model, move_to(batch, device, dtype), compute_loss, share, autocast, backward)
        window_loss += loss
    return window_loss


def autocast_for(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Mixed precision for forward and loss only; backward runs outside it, as PyTorch asks."""
    if not precision.endswith("-mixed"):
        return nullcontext()
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    return torch.autocast(device.type, dtype=dtype)


def step_optimizer(model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None = None) -> None:
    """Clip the window's gradient once, step once."""
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()


def train_window(
    model: nn.Module,
    optimizer: Optimizer,
    window: Iterable[tuple[Any, float]],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    precision: str = "32-true",
    max_grad_norm: float | None = None,
) -> Tensor:
    """One optimizer step over a window. Returns the window's mean loss, a scalar on ``device``."""
    optimizer.zero_grad(set_to_none=True)
    window_loss = accumulate(model, window, compute_loss, device, precision)
    step_optimizer(model, optimizer, max_grad_norm)
    return window_loss


def step_optimizer_scaled(
    model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler, max_grad_norm: float | None = None
) -> bool:
    """Unscale, clip, step, update: once per window. False where a gradient overflowed: no step was taken."""
    scaler.unscale_(optimizer)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    scale_before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale_before


def train_window_scaled(
    model: nn.Module,
    optimizer: Optimizer,
    window: Iterable[tuple[Any, float]],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float | None = None,
) -> tuple[Tensor, bool]:
    """One optimizer step in 16-mixed, whose small gradients need a scaled loss.

    Returns the window's mean loss, and whether the step was taken.
    """

    def backward(loss: Tensor) -> None:
        torch.autograd.backward(scaler.scale(loss))

    optimizer.zero_grad(set_to_none=True)
    window_loss = accumulate(model, window, compute_loss, device, "16-mixed", backward)
    return window_loss, step_optimizer_scaled(model, optimizer, scaler, max_grad_norm)


def shares_of(counts: Sequence[float]) -> list[float]:
    """Each micro-batch's part of its window: items here / items of the window; zeros for an empty window."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def shuffled(num_samples: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch: a function of (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


def cut(indices: list[int], sizes: Iterable[int]) -> Iterator[list[int]]:
    """Consecutive pieces of the given sizes."""
    start = 0
    for size in sizes:
        yield indices[start : start + size]
        start += size


def build_adamw(model: nn.Module, lr: float) -> Optimizer:
    """AdamW on the parameters that train: for files without a ``build_optimizer``."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply every group's learning rate, so that the groups keep their ratios."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor  # not in place: groups may share one tensor


def warm_up_then_cosine(optimizer: Optimizer, num_steps: int) -> LambdaLR:
    """Linear warm-up, then a cosine down to zero after ``num_steps`` optimizer steps.

    The warm-up (Goyal et al. 2017) takes 2000 steps, the 2 / (1 - beta2) that Adam's second moment needs to
    settle (Ma and Yarats 2019), but at most a tenth of the run.
    """
    num_warm_up = min(2000, num_steps // 10)

    def factor(step: int) -> float:
        if step < num_warm_up:
            return (step + 1) / num_warm_up
        progress = (step - num_warm_up) / (num_steps - num_warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory so far: what the device's allocator reserved; on the CPU, of this whole process.

    None where nobody counts it.
    """
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()  # no peak is kept; this is the present
    if device.type != "cpu":
        return torch.accelerator.max_memory_reserved(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
