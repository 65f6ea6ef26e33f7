"""What a model.py's functions may return; all else is refused with what to write instead."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from gradplan.probes.errors import UserCodeError


def checked_model(model: Any, what: str) -> nn.Module:
    """The model that ``what`` returned.

    Raises:
        UserCodeError: it is not one module, or nothing in it can be trained.
    """
    if isinstance(model, (tuple, list)) and any(isinstance(part, nn.Module) for part in model):
        raise UserCodeError(
            f"{what} returned a {type(model).__name__} of {len(model)} models; return one module that holds "
            "them: torch.nn.ModuleList([...]) or torch.nn.ModuleDict({...})"
        )
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"{what} returned {_kind(model)}; it must return one torch.nn.Module")
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UserCodeError(
            f"{what} returned a model with lazy modules, whose sizes are not known yet; run it once on a small input "
            "before returning it"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserCodeError(f"{what} returned a model in which no parameter requires grad: nothing to train")
    return model


def checked_optimizer(optimizer: Any, model: nn.Module) -> Optimizer:
    """The optimizer that the file built for the model.

    Raises:
        UserCodeError: it is not one first-order optimizer of that model's parameters.
    """
    if isinstance(optimizer, (tuple, list)):
        raise UserCodeError(
            f"build_optimizer returned {len(optimizer)} optimizers; return one optimizer with a parameter group "
            "for each part (alternating updates of several optimizers cannot be accumulated)"
        )
    if not isinstance(optimizer, Optimizer):
        raise UserCodeError(f"build_optimizer returned {_kind(optimizer)}; it must return one torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserCodeError(
            "build_optimizer returned LBFGS, whose step() evaluates the whole batch again and again; "
            "accumulated micro-batches cannot serve it. Use a first-order optimizer, for example torch.optim.AdamW"
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UserCodeError("build_optimizer returned an optimizer of other parameters than those of the model it got")
    return optimizer


def learning_rates(optimizer: Optimizer) -> list[float | None]:
    """Each group's rate; None where the optimizer has none, or finds its own.

    Raises:
        UserCodeError: one is not finite.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    for rate in rates:
        if rate is not None and not math.isfinite(rate):
            raise UserCodeError(f"build_optimizer returned an optimizer whose learning rate is {float(rate)}")
    return [None if rate is None else float(rate) for rate in rates]


def checked_dataset(dataset: Any, has_build_batch: bool, builder: str = "build_dataset") -> Any:
    """The dataset that ``builder`` returned.

    Raises:
        UserCodeError: it is not one dataset, or samples cannot be picked from it and there is no ``build_batch``.
    """
    if isinstance(dataset, (tuple, list)) and any(isinstance(part, Dataset) for part in dataset):
        kind = type(dataset).__name__
        raise UserCodeError(f"{builder}() returned a {kind} of {len(dataset)} datasets; return the one to train on")
    if isinstance(dataset, IterableDataset):
        if not has_build_batch:
            remedy = (
                "define build_batch(batch_size) as well" if builder == "build_dataset" else "return one of a length"
            )
            raise UserCodeError(f"{builder}() returned an IterableDataset: {remedy}")
    elif isinstance(dataset, type) or not hasattr(dataset, "__getitem__"):
        raise UserCodeError(f"{builder}() returned {_kind(dataset)}; it must return a torch.utils.data.Dataset")
    return dataset


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}, not an instance" if isinstance(value, type) else type(value).__name__
