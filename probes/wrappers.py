"""DistributedDataParallel and FSDP2 around a whole ``compute_loss``, with the gradients that one process has.

A wrapper acts in its own forward. So that forward runs any function on the user's module, which keeps its
attributes. Gradients are summed over ranks: the shares of a window sum to 1 over all of them. Parts of this
file are copied word for word into train.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradplan.probes.ranks import add_up, add_up_over_ranks, are_ranks
from gradplan.probes.step import accumulate, run_losses_together


class AsForward(nn.Module):
    """Its forward is any function on the model: a wrapper around it sees whatever the function calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


def weighted_loss(
    model: nn.Module,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], Any],
    share: float | Sequence[float],
    autocast: AbstractContextManager[Any],
) -> Tensor:
    """The loss that ``run_losses_together`` would run backward on, with its graph."""
    losses: list[Tensor] = []
    run_losses_together(model, batch, compute_loss, share, autocast, losses.append)
    return losses[0]


def run_as_forward(
    wrapper: nn.Module,
    model: nn.Module,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], Any],
    share: float | Sequence[float],
    autocast: AbstractContextManager[Any],
    backward: Callable[[Tensor], Any],
) -> Tensor:
    """As ``run_losses_together``, through the forward of the wrapper around the model."""
    loss: Tensor = wrapper(weighted_loss, batch, compute_loss, share, autocast)
    backward(loss)
    return loss.detach().float().reshape(())


def in_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The model as all ranks train it; None for one process, which has nobody to send gradients to.

    Buffers stay each rank's own: BatchNorm is averaged where it is read. A parameter may be used on some ranks
    only, so that unused ones are looked for.
    """
    if not are_ranks():
        return None
    ddp = DistributedDataParallel(AsForward(model), forward_sync_buffers=False, find_unused_parameters=True)
    ddp.register_comm_hook(None, lambda _, bucket: summed(bucket.buffer()))
    return ddp


def summed(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """What DistributedDataParallel does with some of the gradients: their sum over ranks, not their mean."""
    work = dist.all_reduce(gradients, async_op=True)
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return done


def accumulate_in_ddp(
    ddp: DistributedDataParallel | None,
    model: nn.Module,
    window: Iterable[tuple[Any, float | Sequence[float]]],
    num_micro_batches: int,
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    precision: str,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Gradients of the window's mean loss over all ranks, sent while the last micro-batch's backward runs.

    ``num_micro_batches`` are in this rank's part of the window. Where a rank has none, its part of a wrapped
    backward would be missing: then all ranks add up their gradients afterwards. Returns the window's loss.
    """
    if ddp is None or extreme_over_ranks(num_micro_batches, dist.ReduceOp.MIN, device) == 0:
        loss = accumulate(model, window, compute_loss, device, precision, run_losses_together, backward)
        add_up_over_ranks(model, loss)
        return loss
    run = functools.partial(run_as_forward, ddp)
    sent = sent_at_last(ddp, window, num_micro_batches)
    loss = accumulate(model, sent, compute_loss, device, precision, run, backward)
    add_up(loss)
    return loss


def sent_at_last(
    ddp: DistributedDataParallel, window: Iterable[tuple[Any, Any]], num_micro_batches: int
) -> Iterator[tuple[Any, Any]]:
    """The window; while its last micro-batch runs, and only then, gradients are sent."""
    for number, micro_batch in enumerate(window, 1):
        with nullcontext() if number == num_micro_batches else ddp.no_sync():
            yield micro_batch


def extreme_over_ranks(number: int, extreme: dist.ReduceOp.RedOpType, device: torch.device) -> int:
    """The least or the largest of the ranks' numbers."""
    tensor = torch.tensor(number, device=device)
    dist.all_reduce(tensor, extreme)
    return int(tensor)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the largest list or sequence of modules of one class: a transformer's layers, for example."""
    lists = [
        list(module.children())
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(child) for child in module}) == 1
    ]
    sizes = [sum(parameter.numel() for block in blocks for parameter in block.parameters()) for blocks in lists]
    return lists[sizes.index(max(sizes))] if any(sizes) else []


def shard(model: nn.Module, device: torch.device) -> nn.Module | None:
    """FSDP2 around the repeated blocks and the rest, in place; what runs the model, or None for one process.

    Everything is sharded again after each forward, so that the parameters are whole in nobody's sight but the
    forward's and backward's.
    """
    if not are_ranks():
        return None
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded = AsForward(model)
    for module in (*repeated_blocks(model), sharded):
        fsdp = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        fsdp.set_gradient_divide_factor(1.0)  # a sum over ranks, not a mean
        fsdp.set_reduce_scatter_unused_params(True)  # a parameter may be used on some ranks only
    return sharded


def accumulate_in_fsdp(
    sharded: nn.Module | None,
    model: nn.Module,
    window: Iterable[tuple[Any, float | Sequence[float]]],
    num_micro_batches: int,
    spare: list[Any],
    compute_loss: Callable[[nn.Module, Any], Any],
    device: torch.device,
    precision: str,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Gradients of the window's mean loss over all ranks, of which every rank keeps its shard.

    They are reduced after each micro-batch: nobody holds all of them. All ranks must gather parameters equally
    often, so one with fewer micro-batches runs the batch in ``spare`` without weight. Returns the window's loss.
    """
    if sharded is None:
        return accumulate(model, window, compute_loss, device, precision, run_losses_together, backward)
    num_more = extreme_over_ranks(num_micro_batches, dist.ReduceOp.MAX, device) - num_micro_batches
    run = functools.partial(run_as_forward, sharded)
    loss = accumulate(model, filled_up(window, num_more, spare), compute_loss, device, precision, run, backward)
    add_up(loss)
    return loss


def filled_up(
    window: Iterable[tuple[Any, Any]], num_more: int, spare: list[Any]
) -> Iterator[tuple[Any, float | Sequence[float]]]:
    """The window, then the last batch that there was, with the smallest weight that is not zero."""
    for batch, share in window:
        spare[:] = [batch]
        yield batch, share
    for _ in range(num_more):
        yield spare[0], sys.float_info.min


def losses_at_once(model: nn.Module, batch: Any, compute_loss: Callable[[nn.Module, Any], Any]) -> Any:
    """What ``compute_loss`` returns; a list of what it yields."""
    losses = compute_loss(model, batch)
    return list(losses) if isinstance(losses, Iterator) else losses


def evaluated_in(
    wrapper: nn.Module | None, compute_loss: Callable[[nn.Module, Any], Any]
) -> Callable[[nn.Module, Any], Any]:
    """``compute_loss`` through the forward of the wrapper around the model."""
    if wrapper is None:
        return compute_loss

    def compute(_: nn.Module, batch: Any) -> Any:
        losses = wrapper(losses_at_once, batch, compute_loss)
        return iter(losses) if isinstance(losses, list) else losses

    return compute


def whole_states() -> states.StateDictOptions:
    """State dicts without shards, on the CPU of the first rank: any number of ranks can load them."""
    return states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """As ``model.state_dict()`` was before sharding. All ranks must ask; the first one gets it."""
    return states.get_model_state_dict(model, options=whole_states())


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by the names of the parameters. All ranks must ask; the first one gets it."""
    return states.get_optimizer_state_dict(model, optimizer, options=whole_states())


def load_whole_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Every rank takes its shards of what ``whole_state`` gave."""
    states.set_model_state_dict(model, state, options=whole_states())


def load_whole_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Every rank takes its shards of what ``whole_optimizer_state`` gave."""
    states.set_optimizer_state_dict(model, optimizer, state, options=whole_states())


def see_whole_gradients(model: nn.Module, see: Callable[[Tensor], None]) -> None:
    """Show each micro-batch's gradient of each parameter to ``see``, before it is added or reduced.

    The parameters of an FSDP module are whole from its forward on, as tensors that stay the same ones.
    """
    seen: set[Tensor] = set()

    def hook(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor) and parameter not in seen:
                seen.add(parameter)
                parameter.register_hook(see)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(hook)
