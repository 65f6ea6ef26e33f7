"""The published training loops, statement by statement: what stays alive from one iteration to the next counts.

Source: exp/trainer/train_loop.py and trainer.py of github.com/Stone-ResearchLife/xMem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from truth_models import IMAGE_SIZE, SEQUENCE_LENGTH, Rebuilt, num_parameters

from gradplan.probes.simulator import autocast
from gradplan.probes.simulator.building import as_fake, fake_models
from gradplan.probes.simulator.semantics import CublasWorkspace, cuda_semantics
from gradplan.probes.simulator.trace import Recorder, Trace, steady_garbage
from gradplan.probes.simulator.training import optimizer_scalars

NUM_ITERATIONS = 4
LEARNING_RATE = 1e-3
# Where gradients are dropped: first thing in the iteration, after the forward pass, after the optimizer's step.
BEFORE_FORWARD, BEFORE_BACKWARD, AFTER_STEP = range(3)

scalar = torch.ops.aten._local_scalar_dense.default
TEXT_KEYS = ("input_ids", "attention_mask", "labels")  # in the order in which they are moved to the device
OptimizerClass = Callable[..., torch.optim.Optimizer]


def trace_run(
    rebuilt: Rebuilt, optimizer: str, zero_grad_mode: int, batch_size: int, capability: tuple[int, int]
) -> tuple[Trace, int]:
    """Births and deaths over four iterations, and the model's number of parameters.

    A batch is made on the device: what the loader holds in host memory is no part of the trace.
    """
    recorder = Recorder(CublasWorkspace(capability), autocast.KERNELS)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    optimizer_class: OptimizerClass = getattr(torch.optim, optimizer)
    with cuda_semantics(capability), steady_garbage() as collect:
        model = _build(rebuilt, mode)
        with fake_models(mode):
            if rebuilt.family == "CNN":
                _train_on_images(model, optimizer_class, zero_grad_mode, batch_size, recorder, collect)
            else:
                _train_on_text(model, optimizer_class, zero_grad_mode, batch_size, recorder, collect)
    return recorder.trace(), num_parameters(model)


def _build(rebuilt: Rebuilt, mode: FakeTensorMode) -> nn.Module:
    try:
        with fake_models(mode):
            return rebuilt.build()
    except (DataDependentOutputException, RuntimeError):  # its construction reads values
        return as_fake(rebuilt.build(), mode)


def _train_on_images(
    model: nn.Module,
    optimizer_class: OptimizerClass,
    zero_grad_mode: int,
    batch_size: int,
    recorder: Recorder,
    collect: Callable[[], None],
) -> None:
    with recorder:
        recorder.adopt_module(model)
        model.train()
        optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)
        criterion = nn.CrossEntropyLoss()
        with optimizer_scalars(recorder, optimizer):
            for _ in range(NUM_ITERATIONS):
                if zero_grad_mode == BEFORE_FORWARD:
                    optimizer.zero_grad()
                inputs, labels = _images(batch_size), _integers(batch_size)
                outputs = model(inputs)
                loss_value = criterion(outputs, labels)
                if zero_grad_mode == BEFORE_BACKWARD:
                    optimizer.zero_grad()
                loss_value.backward()
                optimizer.step()
                _, preds = torch.max(outputs, 1)
                if zero_grad_mode == AFTER_STEP:
                    optimizer.zero_grad()
                collect()
            del inputs, labels, outputs, loss_value, preds


def _train_on_text(
    model: nn.Module,
    optimizer_class: OptimizerClass,
    zero_grad_mode: int,
    batch_size: int,
    recorder: Recorder,
    collect: Callable[[], None],
) -> None:
    with recorder:
        optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)
        recorder.adopt_module(model)
        with optimizer_scalars(recorder, optimizer):
            recorder.kernels[scalar] = _padded(recorder.kernels[scalar])
            for _ in range(NUM_ITERATIONS):
                if zero_grad_mode == BEFORE_FORWARD:
                    optimizer.zero_grad()
                batch = {key: _integers(batch_size, SEQUENCE_LENGTH) for key in TEXT_KEYS}
                outputs = model(**batch)
                if zero_grad_mode == BEFORE_BACKWARD:
                    optimizer.zero_grad()
                loss = outputs.loss
                loss.backward()
                optimizer.step()
                if zero_grad_mode == AFTER_STEP:
                    optimizer.zero_grad()
                collect()
            del batch, outputs, loss


def _padded(scalar_of: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Some models ask whether the mask is all ones. WikiText has empty lines, so every batch holds padding."""

    def answer(tensor: Tensor) -> Any:
        try:
            return scalar_of(tensor)
        except DataDependentOutputException:
            if tensor.dtype is torch.bool:
                return False
            raise

    return answer


def _images(batch_size: int) -> Tensor:
    return torch.empty(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)
