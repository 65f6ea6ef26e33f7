"""Trace the user's training: two optimizer steps of the very functions that train.py runs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from gradplan.probes import step
from gradplan.probes.backwards import own_backwards
from gradplan.probes.batches import seed_everything
from gradplan.probes.simulator import attention, autocast, semantics
from gradplan.probes.simulator.building import are_fakes_left, fake_copy, fake_models, is_fake, new_mode, own_copy
from gradplan.probes.simulator.semantics import CublasWorkspace, cuda_semantics
from gradplan.probes.simulator.trace import (
    BATCH,
    BUILD,
    EVALUATION,
    FORWARD,
    GRADIENTS,
    OPTIMIZER_STEP,
    STATE,
    Recorder,
    Trace,
    steady_garbage,
)
from gradplan.probes.workload import Workload

ROOT = "the model itself"  # its own forward, outside its children's
COUNTERS = ("step", "mu_product")  # torch's optimizers keep them in host memory
NUM_STEPS = 2  # optimizer state appears in the first, the second shows the steady state
aten = torch.ops.aten


class Tensors(Enum):
    """What the step runs on; each next kind takes more models and more memory."""

    FAKE = "fake"  # the model is built without memory
    CONVERTED = "converted"  # built for real, since its construction reads values; then as fake
    REAL = "real"  # the step itself reads values


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a trace depends on besides the micro-batch. ``capability`` is CUDA's, for the kernels it chooses.

    ``run`` is how a micro-batch is run: ``step.run_micro_batch``, or one of those for several losses.
    ``change_model`` and ``change_optimizer`` are done to what the user's file builds.
    """

    workload: Workload
    precision: str
    capability: tuple[int, int]
    max_grad_norm: float | None = None
    run: Callable[..., Tensor] = step.run_micro_batch
    change_model: Callable[[nn.Module], None] = lambda model: None
    change_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer


def trace_training(setup: Setup, tensors: Tensors, micro_batch_size: int, num_micro_batches: int) -> Trace:
    """Births and deaths over two optimizer steps of ``num_micro_batches`` micro-batches each.

    Raises:
        UserCodeError: the user's functions failed.
        Exception: whatever the step raised, among it what fake tensors cannot do.
    """
    host_batches = (setup.workload.make_batch(micro_batch_size), setup.workload.make_validation_batch(micro_batch_size))
    is_real = tensors is Tensors.REAL
    if is_real:
        gc.collect()  # the model of the trace before
    with cuda_semantics(setup.capability, not is_real) as is_compiled, steady_garbage() as collect:
        seed_everything()
        trace = _trace(setup, tensors, host_batches, num_micro_batches, collect)
        trace = dataclasses.replace(trace, is_compiled=is_compiled() or setup.workload.is_compiled)
        collect()
        were_kept = are_fakes_left()
    if were_kept:
        setup.workload.reload()
    return trace


def _trace(
    setup: Setup, tensors: Tensors, host_batches: tuple[Any, Any], num_micro_batches: int, collect: Any
) -> Trace:
    workload, is_real = setup.workload, tensors is Tensors.REAL
    kernels = {**autocast.KERNELS, **semantics.KERNELS, **(attention.REAL_KERNELS if is_real else {})}
    recorder = Recorder(CublasWorkspace(setup.capability), kernels)
    model = workload.build_model() if tensors is not Tensors.FAKE else None
    mode = new_mode()
    with nullcontext() if is_real else fake_models(mode):
        if is_real and model is not None:
            model = own_copy(model)
        elif model is None:
            model = workload.build_model()
        if not is_real and not is_fake(model):
            model = fake_copy(model, mode)
        if setup.precision == "bf16-true":
            model = model.to(torch.bfloat16)
        setup.change_model(model)
        with recorder, own_backwards() as num_own_backwards, running_modules(model, recorder):
            recorder.adopt_module(model)
            batch, validation = (HostBatch(batch, setup.precision, recorder) for batch in host_batches)
            _run(setup, model, recorder, batch, num_micro_batches, collect)
            if host_batches[1] is not None:
                _evaluate(setup, model, validation)
            trained = frozenset(name for name, parameter in model.named_parameters() if parameter.grad is not None)
    return dataclasses.replace(recorder.trace(), trained=trained, own_backwards=num_own_backwards())


def _run(
    setup: Setup, model: nn.Module, recorder: Recorder, batch: HostBatch, num_micro_batches: int, collect: Any
) -> None:
    optimizer = setup.change_optimizer(setup.workload.build_optimizer(model))
    scaler = SteadyScaler("cpu")
    with optimizer_steps(recorder, optimizer):
        for number in range(1, NUM_STEPS + 1):
            recorder.step, recorder.micro_batch = number, 0
            window = _window(batch, num_micro_batches, recorder)
            arguments = (model, optimizer, window, setup.workload.compute_loss, torch.device("cpu"))
            if setup.precision == "16-mixed":
                step.train_window_scaled(*arguments, scaler, setup.max_grad_norm, setup.run)
            else:
                step.train_window(*arguments, setup.precision, setup.max_grad_norm, setup.run)
            collect()


def _window(batch: HostBatch, num_micro_batches: int, recorder: Recorder) -> Iterator[tuple[HostBatch, float]]:
    for _ in range(num_micro_batches):
        yield batch, 1 / num_micro_batches
    recorder.begin_optimizer_step()  # gradients are unscaled and clipped before step() itself


def _evaluate(setup: Setup, model: nn.Module, batch: HostBatch) -> None:
    """As train.py does after an epoch: the gradients are still there, and the batches are as large."""
    batch.moment = EVALUATION
    counts = [1.0] * (setup.workload.num_counts or 1)
    arguments = (model, [(batch, counts)], setup.workload.compute_loss_to_evaluate, torch.device("cpu"))
    step.evaluate(*arguments, setup.precision, len(counts))


class HostBatch:
    """A batch in host memory: each move to the device is a new allocation there, as in training."""

    def __init__(self, batch: Any, precision: str, recorder: Recorder) -> None:
        self._batch = batch
        self._dtype = torch.bfloat16 if precision == "bf16-true" else None
        self._recorder = recorder
        self.moment = FORWARD

    def to(self, device: torch.device) -> Any:
        """The batch as new tensors on the traced device."""
        self._recorder.begin_micro_batch(self.moment)
        return self._moved(self._batch)

    def _moved(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return self._new(batch)
        if isinstance(batch, Mapping):
            moved = {key: self._moved(value) for key, value in batch.items()}
            if not isinstance(batch, MutableMapping):
                return moved
            same_kind = copy.copy(batch)
            same_kind.update(moved)
            return same_kind
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*map(self._moved, batch))
        if isinstance(batch, (list, tuple)):
            return type(batch)(map(self._moved, batch))
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            fields = {f.name: self._moved(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
            return dataclasses.replace(batch, **fields)
        if hasattr(batch, "to"):
            with self._recorder.paused(), contextlib.suppress(Exception):
                return copy.deepcopy(batch)  # as new tensors, noted when they are first used
        return batch

    def _new(self, tensor: Tensor) -> Tensor:
        wanted = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        with self._recorder.paused():
            moved = tensor.detach().to(wanted, copy=True).requires_grad_(tensor.requires_grad)
        self._recorder.adopt(moved, BATCH)
        return moved


class SteadyScaler(torch.amp.GradScaler):
    """A scaler that never sees an overflow: fake gradients have no values to check."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    def get_scale(self) -> float:
        """The initial scale."""
        return float(self._init_scale)

    def update(self, new_scale: Any = None) -> None:
        """Ready for the next window."""
        self._per_optimizer_states.clear()


class optimizer_steps:  # noqa: N801 - reads as a statement
    """Watches ``optimizer.step()``: what it works on has a name, and its scalars have a value.

    A scalar that a fake tensor cannot tell reads as 1 there: step counts and norms. Step counts that are kept in
    host memory, as torch's optimizers do unless they are fused or capturable, take no memory of the device.
    """

    def __init__(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        self._recorder, self._optimizer = recorder, optimizer
        recorder.kernels[aten._local_scalar_dense.default] = self._scalar
        self._handles = (
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        )

    def _begin(self, *_: Any) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._recorder.mark(parameter.grad, GRADIENTS)
                self._recorder.has_sparse_fakes |= parameter.grad.is_sparse and isinstance(parameter.grad, FakeTensor)
        self._recorder.begin_optimizer_step()

    def _end(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            is_counted_on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    for tensor in torch.utils._pytree.tree_leaves(value):
                        if isinstance(tensor, Tensor):
                            self._recorder.mark(tensor, STATE)
                            if name in COUNTERS and not is_counted_on_device:
                                self._recorder.mark_on_host(tensor)
        self._recorder.moment = BUILD

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def _scalar(self, tensor: Tensor) -> Any:
        try:
            return aten._local_scalar_dense.default(tensor)
        except DataDependentOutputException:
            if self._recorder.moment == OPTIMIZER_STEP:
                return 1.0 if tensor.is_floating_point() else 1
            raise

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def running_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """The recorder knows inside which module's forward it is."""
    paths = {id(module): path or ROOT for path, module in model.named_modules()}
    original = nn.Module.__call__

    def _call_and_watch(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = recorder.modules[-1] if recorder.modules else ""
        recorder.modules.append(paths.get(id(module), outer))
        try:
            return original(module, *args, **kwargs)
        finally:
            if recorder.modules:  # cleared where a new micro-batch began inside
                recorder.modules.pop()

    with mock.patch.object(nn.Module, "__call__", _call_and_watch):
        yield
