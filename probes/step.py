"""One window of training: draw it, run it, step once.

The simulator, trials on a device, the tests and train.py all run these functions: train.py holds the ones it
needs as a verbatim copy, so this file imports only torch and the standard library, and every function stands
alone or calls others that are copied with it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gradplan.probes.ranks import add_up, add_up_over_ranks


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
    if isinstance(loss, (tuple, list, dict)):
        raise TypeError(
            f"compute_loss returned a {type(loss).__name__} of {len(loss)}; yield the losses one by one, "
            "which needs the memory of one graph at a time, or return their sum"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"compute_loss gave {type(loss).__name__}; it must be one scalar tensor")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise TypeError(f"compute_loss gave a tensor of shape {shape}; it must be one scalar: .mean()?")
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
    """Forward and backward of a micro-batch, whose graph is freed on return.

    ``share`` is its part of the window: items here / items of the window. Returns the loss times its share, a
    detached scalar, so that a window's results add up to the mean over its items.
    """
    with autocast:
        loss = check_loss(compute_loss(model, batch)) * share
    backward(loss)
    return loss.detach().float().reshape(())


def share_of_each(share: float | Sequence[float]) -> Iterator[float]:
    """One share per loss; a single one serves every loss."""
    if isinstance(share, Sequence):
        return iter(share) if len(share) > 1 else itertools.repeat(share[0])
    return itertools.repeat(share)


def next_share(shares: Iterator[float]) -> float:
    """The share of the loss that has just been yielded.

    Raises:
        TypeError: count_items gave fewer numbers than there are losses.
    """
    try:
        return next(shares)
    except StopIteration:
        raise TypeError("compute_loss yields more losses than count_items gives numbers") from None


def check_shares_are_used(share: float | Sequence[float], left: Iterator[float]) -> None:
    """Every number that count_items gave belonged to a loss.

    Raises:
        TypeError: there are more.
    """
    if isinstance(share, Sequence) and len(share) > 1 and next(left, None) is not None:
        raise TypeError("count_items gives more numbers than compute_loss gives losses")


def run_losses_together(
    model: nn.Module,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], Any],
    share: float | Sequence[float],
    autocast: AbstractContextManager[Any],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """As ``run_micro_batch``, for the sum of the losses that ``compute_loss`` yields: one backward for all.

    ``share`` may be one number per loss. A loss without items here is a mean over nothing, and stays out.
    """
    shares = share_of_each(share)
    with autocast:
        losses = compute_loss(model, batch)
        weighted = [
            check_loss(loss) * part
            for loss in (losses if isinstance(losses, Iterator) else (losses,))
            if (part := next_share(shares)) > 0
        ]
        check_shares_are_used(share, shares)
        if not weighted:
            raise TypeError("compute_loss yielded no loss")
        loss = functools.reduce(torch.add, weighted)
    backward(loss)
    return loss.detach().float().reshape(())


def run_loss_by_loss(
    model: nn.Module,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], Any],
    share: float | Sequence[float],
    autocast: AbstractContextManager[Any],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """As ``run_losses_together``, with a backward after each loss that ``compute_loss`` yields.

    A graph is freed before the next one is built, so that only one is in memory; the gradients are equal.
    What follows the last ``yield`` runs too: it carries the gradient back through a trunk that was cut.
    """
    shares = share_of_each(share)
    losses = compute_loss(model, batch)
    results: list[Tensor] = []
    end: Any = object()
    while True:
        with autocast:
            loss = next(losses, end)
            if loss is end:
                break
            part = next_share(shares)
            if part > 0:  # a mean over no items is NaN, and stays out
                loss = check_loss(loss) * part
        if part > 0:
            backward(loss)
            results.append(loss.detach().float().reshape(()))
        del loss  # one that stayed out has had no backward, which would have freed its graph
    check_shares_are_used(share, shares)
    if not results:
        raise TypeError("compute_loss yielded no loss")
    return torch.stack(results).sum()


def accumulate(
    model: nn.Module,
    window: Iterable[tuple[Any, float | Sequence[float]]],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    precision: str = "32-true",
    run: Callable[..., Tensor] = run_micro_batch,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Gradients of the whole window's mean loss, summed in ``.grad`` one micro-batch at a time.

    ``window`` gives (batch on the CPU, share), as ``run`` takes them; the shares sum to 1 over the window and
    all ranks. Returns the sum of the results, a scalar on ``device``.
    """
    dtype = torch.bfloat16 if precision == "bf16-true" else None
    window_loss = torch.zeros((), device=device)
    for batch, share in window:
        autocast = autocast_for(device, precision)
        # The batch on the device has no name here, so that it is freed before the next one is moved.
        loss = run(model, move_to(batch, device, dtype), compute_loss, share, autocast, backward)
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
    window: Iterable[tuple[Any, float | Sequence[float]]],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    precision: str = "32-true",
    max_grad_norm: float | None = None,
    run: Callable[..., Tensor] = run_micro_batch,
) -> Tensor:
    """One optimizer step over a window, of which every rank runs its part.

    Returns the window's mean loss over all ranks, a scalar on ``device``.
    """
    optimizer.zero_grad(set_to_none=True)
    window_loss = accumulate(model, window, compute_loss, device, precision, run)
    add_up_over_ranks(model, window_loss)
    step_optimizer(model, optimizer, max_grad_norm)
    return window_loss


def step_optimizer_scaled(
    model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler, max_grad_norm: float | None = None
) -> bool:
    """Unscale, clip, step, update: once per window. False where no step was taken, as a gradient overflowed.

    A window without items has no gradients, and nothing to do.
    """
    if all(parameter.grad is None for parameter in model.parameters()):
        return True
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
    window: Iterable[tuple[Any, float | Sequence[float]]],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float | None = None,
    run: Callable[..., Tensor] = run_micro_batch,
) -> tuple[Tensor, bool]:
    """One optimizer step in 16-mixed, whose small gradients need a scaled loss.

    Returns the window's mean loss over all ranks, and whether the step was taken.
    """

    def backward(loss: Tensor) -> None:
        torch.autograd.backward(scaler.scale(loss))

    optimizer.zero_grad(set_to_none=True)
    window_loss = accumulate(model, window, compute_loss, device, "16-mixed", run, backward)
    add_up_over_ranks(model, window_loss)
    return window_loss, step_optimizer_scaled(model, optimizer, scaler, max_grad_norm)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Any, Sequence[float]]],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    precision: str = "32-true",
    num_counts: int = 1,
) -> Tensor:
    """The mean loss over all items of all ranks, without gradients; several losses are summed.

    ``batches`` gives (batch on the CPU, counts): over how many items each loss is a mean, ``num_counts``
    numbers; a single one serves every loss. The model is in evaluation mode inside, and as before afterwards.
    """
    was_training = model.training
    model.eval()
    dtype = torch.bfloat16 if precision == "bf16-true" else None
    sums = torch.zeros(2, num_counts, device=device)  # losses x items, items
    for batch, counts in batches:
        with autocast_for(device, precision):
            losses = compute_loss(model, move_to(batch, device, dtype))
            values = [loss.float().reshape(()) for loss in (losses if isinstance(losses, Iterator) else (losses,))]
        if num_counts == 1:
            values = [torch.stack(values).sum()]
        for index, (value, count) in enumerate(zip(values, counts, strict=True)):
            if count > 0:  # a mean over no items is NaN, and stays out
                sums[0, index] += value * count
                sums[1, index] += count
    model.train(was_training)
    add_up(sums)
    return (sums[0] / sums[1].clamp(min=1e-30)).sum()


def build_adamw(model: nn.Module, lr: float) -> Optimizer:
    """AdamW on the parameters that train: for files without a ``build_optimizer``."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def scale_learning_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply every group's learning rate, so that the groups keep their ratios.

    Also the rates that a schedule has put there already.
    """
    for group in optimizer.param_groups:
        for key in {"lr", "initial_lr", "max_lr", "min_lr"} & group.keys():
            group[key] = group[key] * factor  # not in place: groups may share one tensor


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
