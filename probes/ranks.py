"""Several processes that train one model: what each must tell the others.

There is no wrapper around the model: ``compute_loss`` gets the user's own module on every rank, and a loss may
run several backwards. Parts of this file are copied word for word into train.py.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def start_ranks(device_name: str) -> tuple[int, int, torch.device]:
    """This process's rank, how many there are, and its device: as torchrun says, else one process.

    Each rank of an accelerator gets a device of its own, by its number on this machine.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(device_name)
    if world_size == 1:
        return 0, 1, device
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    # Defaults of its functions keep a group that is there when it is imported, as by an optimizer: its threads would
    # live on while Python ends, which aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    return dist.get_rank(), world_size, device


def are_ranks() -> bool:
    """Whether there is anybody to talk to."""
    return dist.is_available() and dist.is_initialized()


def stop_ranks() -> None:
    """Part from the others, when all have come to their end: the first one may still be saving."""
    if are_ranks():
        dist.barrier()
        dist.destroy_process_group()


def add_up(tensor: Tensor) -> None:
    """The sum over all ranks, in place, on every rank."""
    if are_ranks():
        dist.all_reduce(tensor)


def copy_from_first(model: nn.Module) -> None:
    """Every rank starts from the parameters and buffers of the first."""
    for tensor in (*model.parameters(), *model.buffers()):
        copy_tensor_from_first(tensor.detach())


def copy_tensor_from_first(tensor: Tensor) -> None:
    """The first rank's values on every rank, as bytes: not every type can be sent."""
    if are_ranks() and tensor.numel():
        flat = tensor.reshape(-1).contiguous()
        dist.broadcast(flat.view(torch.uint8), src=0)
        tensor.copy_(flat.view_as(tensor))


def add_up_over_ranks(model: nn.Module, loss: Tensor) -> None:
    """Gradients and the loss become their sums over all ranks; alone, nothing happens.

    A rank that has no gradient where another has one takes part with zeros: with a layer that only some
    samples use, and with a last window too short for everybody. Nobody's gradient stays None.

    Raises:
        TypeError: a gradient is sparse.
    """
    if not are_ranks():
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    have = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=loss.device)
    sums = torch.cat([loss.reshape(1).float(), have])
    dist.all_reduce(sums)
    loss.copy_(sums[0])
    used = [parameter for parameter, count in zip(parameters, sums[1:].tolist(), strict=True) if count > 0]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            raise TypeError("sparse gradients cannot be added up over ranks; train on one, or densely")
    for bucket in buckets(parameter.grad for parameter in used if parameter.grad is not None):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def buckets(tensors: Iterable[Tensor], num_bytes: int = 64 * 2**20) -> Iterable[list[Tensor]]:
    """Neighbours of one type, together at most ``num_bytes`` unless a single one is larger."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > num_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def agree_on_buffers(model: nn.Module) -> None:
    """Buffers that saw other samples on each rank: BatchNorm's statistics become their mean over ranks.

    All others become what the first rank has, whose buffers a checkpoint holds.
    """
    if not are_ranks():
        return
    averaged: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None and buffer not in averaged:
                    averaged.add(buffer)
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()
    for buffer in model.buffers():
        if buffer not in averaged:
            copy_tensor_from_first(buffer)
