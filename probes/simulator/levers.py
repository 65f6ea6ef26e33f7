"""What would make room: a few changes, each traced as the step itself is, and the largest micro-batch with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Lever
from gradplan.probes.search import MOST_SAMPLES
from gradplan.probes.simulator.allocator import required_bytes
from gradplan.probes.simulator.allocator_settings import AllocatorSettings
from gradplan.probes.simulator.anatomy import anatomy
from gradplan.probes.simulator.curve import Curve
from gradplan.probes.simulator.trace import OPTIMIZER_STEP, STATE, Birth
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup

# bitsandbytes (functional.py, optim/optimizer.py): one byte an element and an fp32 scale for every 256; state of fewer
# than 4096 elements stays as it is.
IN_EIGHT_BITS = ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD")
EIGHT_BIT_BLOCK = 256
EIGHT_BIT_LEAST_BYTES = 4096 * 4
AS_IT_IS = "as it is"
Change = tuple[str, str, Setup]


class Levers:
    """Changes to the workload of ``tracer``, on one GPU. ``limit_bytes`` is what its allocator may take.

    ``curve`` is the workload's own, without a change.
    """

    def __init__(
        self, tracer: Tracer, curve: Curve, limit_bytes: int, num_micro_batches: int, settings: AllocatorSettings
    ) -> None:
        self._tracer, self._setup, self._curve = tracer, tracer.setup, curve
        self._limit_bytes = limit_bytes
        self._num_micro_batches = num_micro_batches
        self._settings = settings
        self._unit = tracer.setup.workload.batch_multiple

    def all(self, size: int) -> Iterator[Lever]:
        """What fits as it is, then each lever that applies at about a micro-batch size, all without another bound.

        A lever that cannot be traced is left out.
        """
        yield self._lever(AS_IT_IS, "", self._curve)
        model, optimizer = self._tracer.build()
        is_step_largest = anatomy(self._curve.at(size), size, self._settings).moment == OPTIMIZER_STEP
        for name, how, setup in (
            *_precisions(self._setup),
            *_checkpointing(self._setup, model),
            *(_implementations(self._setup, optimizer) if is_step_largest else ()),
            *_adafactor(self._setup, optimizer),
        ):
            curve = self._traced(setup)
            if curve is not None:
                yield self._lever(name, how, curve)
        if any(birth.kind == STATE for birth in self._curve.births):
            kind = type(optimizer).__name__
            if kind in IN_EIGHT_BITS:
                how = f"bitsandbytes' {kind}8bit in build_optimizer"
                yield self._lever("8-bit optimizer state, by arithmetic", how, eight_bit(self._curve))
            how = "torch.optim.SGD in build_optimizer"
            yield self._lever("SGD without momentum, by arithmetic", how, stateless(self._curve))
        if not self._settings.expandable_segments:
            expandable = dataclasses.replace(self._settings, expandable_segments=True)
            how = "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
            yield self._lever("expandable segments", how, self._curve, expandable)

    def _traced(self, setup: Setup) -> Curve | None:
        sizes = (2 * self._unit, 3 * self._unit)
        try:
            tracer = Tracer(setup, lambda _: None)
            tracer.backward = self._tracer.backward
            small, large = (tracer.trace(size, self._num_micro_batches) for size in sizes)
        except UserCodeError:
            return None
        return None if tracer.is_real else Curve.fit(small, large, sizes)

    def _lever(self, name: str, how: str, curve: Curve, settings: AllocatorSettings | None = None) -> Lever:
        settings = settings or self._settings
        smallest = curve.at(self._unit)
        return Lever(
            name=name,
            how=how,
            max_micro_batch_size=curve.largest(self._limit_bytes, MOST_SAMPLES, self._unit, settings),
            required_bytes=required_bytes(smallest.events, smallest.sizes, settings),
        )


def _precisions(setup: Setup) -> Iterator[Change]:
    others = ("bf16-mixed", "bf16-true") if setup.capability >= (8, 0) else ("16-mixed",)
    for precision in others:
        if setup.precision not in (precision, "bf16-true"):
            yield precision, f"--precision {precision}", dataclasses.replace(setup, precision=precision)


def _checkpointing(setup: Setup, model: nn.Module) -> Iterator[Change]:
    blocks = repeated_blocks(model)
    if blocks:
        name = f"activation checkpointing of {len(blocks)} blocks"
        how = f"torch.utils.checkpoint around {_names(model, blocks)}"
        yield name, how, dataclasses.replace(setup, change_model=checkpoint_blocks)


def _implementations(setup: Setup, optimizer: Optimizer) -> Iterator[Change]:
    """For where the optimizer's step takes most: other implementations take fewer temporaries."""
    group = optimizer.param_groups[0]
    if "fused" in group and not group["fused"]:
        yield "fused optimizer", "fused=True in build_optimizer", _with(setup, _set_flags(fused=True, foreach=False))
    if "foreach" in group and group["foreach"] is None and not group.get("fused"):
        change = _with(setup, _set_flags(foreach=False))
        yield "optimizer one tensor at a time", "foreach=False in build_optimizer", change


def _adafactor(setup: Setup, optimizer: Optimizer) -> Iterator[Change]:
    kind = getattr(torch.optim, "Adafactor", None)  # since torch 2.5
    if kind is not None and not isinstance(optimizer, (kind, torch.optim.SGD)):
        yield "Adafactor", "torch.optim.Adafactor in build_optimizer", _with(setup, _another(kind))


def _with(setup: Setup, change_optimizer: Callable[[Optimizer], Optimizer]) -> Setup:
    return dataclasses.replace(setup, change_optimizer=change_optimizer)


def _set_flags(**flags: bool) -> Callable[[Optimizer], Optimizer]:
    def change(optimizer: Optimizer) -> Optimizer:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update({key: value for key, value in flags.items() if key in group})
        return optimizer

    return change


def _another(kind: Callable[..., Optimizer]) -> Callable[[Optimizer], Optimizer]:
    def change(optimizer: Optimizer) -> Optimizer:
        return kind([parameter for group in optimizer.param_groups for parameter in group["params"]], lr=1e-3)

    return change


# Activation checkpointing


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of each outermost list of at least two modules of one class that have modules of their own."""
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        children = list(model)
        if len(children) > 1 and len({type(child) for child in children}) == 1 and list(children[0].children()):
            return children
    return [block for child in model.children() for block in repeated_blocks(child)]


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep only what goes into each repeated block, whose forward runs again in the backward pass."""
    for block in repeated_blocks(model):
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _names(model: nn.Module, blocks: list[nn.Module]) -> str:
    """``model.blocks.0`` and so on, of the lists that hold the blocks."""
    paths = {id(module): path for path, module in model.named_modules()}
    owners = dict.fromkeys(paths[id(block)].rpartition(".")[0] for block in blocks)
    names = [f"each of model.{owner}" if owner else "each child of the model" for owner in owners]
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


def eight_bit(curve: Curve) -> Curve:
    """The same training with optimizer state of one byte an element, updated one parameter at a time."""

    def change(base: float, birth: Birth) -> float:
        if birth.kind == STATE and base >= EIGHT_BIT_LEAST_BYTES:
            return base / 4 * (1 + 4 / EIGHT_BIT_BLOCK)
        return 0 if _is_temporary(birth) else base

    return _with_bases(curve, change)


def stateless(curve: Curve) -> Curve:
    """The same training with an optimizer that keeps nothing and updates in place."""
    return _with_bases(curve, lambda base, birth: 0 if birth.kind == STATE or _is_temporary(birth) else base)


def _is_temporary(birth: Birth) -> bool:
    return not birth.kind and birth.moment == OPTIMIZER_STEP


def _with_bases(curve: Curve, change: Callable[[float, Birth], float]) -> Curve:
    bases = tuple(change(base, birth) for base, birth in zip(curve.bases, curve.births, strict=True))
    return dataclasses.replace(curve, bases=bases)
