"""The published training loops, statement by statement: what stays alive from one iteration to the next counts.

Source: exp/trainer/train_loop.py and trainer.py of github.com/Stone-ResearchLife/xMem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from truth_models import IMAGE_SIZE, SEQUENCE_LENGTH, Rebuilt, num_parameters
from truth_stage import Stage, images, integers, play

from gradplan.probes.simulator.trace import Trace

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
    """Births and deaths over four iterations, and the model's number of parameters."""
    found: list[int] = []

    def build() -> nn.Module:
        model = rebuilt.build()
        found.append(num_parameters(model))
        return model

    counting = Rebuilt(build, rebuilt.family)
    return play(xmem_script(counting, optimizer, zero_grad_mode, batch_size), capability).trace, found[-1]


def xmem_script(rebuilt: Rebuilt, optimizer: str, zero_grad_mode: int, batch_size: int) -> Callable[[Stage], None]:
    """The training loop of a model's family.

    A batch is made on the device: what the loader holds in host memory is no part of the trace.
    """

    def script(stage: Stage) -> None:
        model = stage.built(rebuilt.build)
        train = _train_on_images if rebuilt.family == "CNN" else _train_on_text
        train(stage, model, getattr(torch.optim, optimizer), zero_grad_mode, batch_size)

    return script


def _train_on_images(
    stage: Stage, model: nn.Module, optimizer_class: OptimizerClass, zero_grad_mode: int, batch_size: int
) -> None:
    stage.recorder.adopt_module(model)
    model.train()
    optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss()
    with stage.stepping(optimizer):
        for _ in range(NUM_ITERATIONS):
            if zero_grad_mode == BEFORE_FORWARD:
                optimizer.zero_grad()
            inputs, labels = images(batch_size, 3, IMAGE_SIZE, IMAGE_SIZE), integers(batch_size)
            outputs = model(inputs)
            loss_value = criterion(outputs, labels)
            if zero_grad_mode == BEFORE_BACKWARD:
                optimizer.zero_grad()
            loss_value.backward()
            optimizer.step()
            _, preds = torch.max(outputs, 1)
            if zero_grad_mode == AFTER_STEP:
                optimizer.zero_grad()
            stage.collect()
        del inputs, labels, outputs, loss_value, preds


def _train_on_text(
    stage: Stage, model: nn.Module, optimizer_class: OptimizerClass, zero_grad_mode: int, batch_size: int
) -> None:
    optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)
    kernels = stage.recorder.kernels
    stage.recorder.adopt_module(model)
    with stage.stepping(optimizer):
        kernels[scalar] = _padded(kernels[scalar])
        for _ in range(NUM_ITERATIONS):
            if zero_grad_mode == BEFORE_FORWARD:
                optimizer.zero_grad()
            batch = {key: integers(batch_size, SEQUENCE_LENGTH) for key in TEXT_KEYS}
            outputs = model(**batch)
            if zero_grad_mode == BEFORE_BACKWARD:
                optimizer.zero_grad()
            loss = outputs.loss
            loss.backward()
            optimizer.step()
            if zero_grad_mode == AFTER_STEP:
                optimizer.zero_grad()
            stage.collect()
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
