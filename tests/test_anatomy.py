"""What the peak is made of, on models whose memory can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from model_files import TWO_LOSSES

from gradplan.probes.simulator.anatomy import anatomy
from gradplan.probes.simulator.trace import Birth, Trace
from gradplan.probes.simulator.training import Setup, Tensors, trace_training
from gradplan.probes.step import run_loss_by_loss
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
SAMPLES, WIDTH, DEPTH = 64, 512, 6

BLOCKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(self.linear(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

build_model = Model

def build_batch(n):
    return torch.ones(n, WIDTH)

def compute_loss(model, batch):
    return model(batch).mean()

def build_optimizer(model, lr):
    return torch.optim.OPTIMIZER(model.parameters(), lr=lr)
""".replace("WIDTH", str(WIDTH))


def traced(workload: Load, samples: int, optimizer: str = "AdamW") -> Trace:
    job = workload(BLOCKS.replace("OPTIMIZER", optimizer))
    return trace_training(Setup(job, "32-true", (8, 0)), Tensors.FAKE, samples, 2)


def by_name(parts: object) -> dict[str, int]:
    return {part.name: part.num_bytes for part in parts}  # type: ignore[attr-defined]


def test_the_parts_add_up_to_the_peak(workload: Load) -> None:
    trace = traced(workload, SAMPLES)
    assert sum(by_name(anatomy(trace, SAMPLES).parts).values()) == trace.peak_live_bytes


def test_a_large_batch_peaks_in_a_pass_over_the_second_micro_batch(workload: Load) -> None:
    found = anatomy(traced(workload, 4096), 4096)
    parameters = DEPTH * WIDTH * WIDTH * 4
    parts = by_name(found.parts)
    assert (found.step, found.micro_batch, found.micro_batch_size) == (2, 2, 4096)
    assert found.moment in ("forward", "backward")
    assert parts["parameters and buffers"] == parameters
    assert parts["gradients"] == parameters
    assert parts["optimizer state"] == 2 * parameters
    assert parts["batch"] == 4096 * WIDTH * 4
    assert parts["activations"] >= DEPTH * 4096 * WIDTH * 4


def test_activations_are_those_of_modules_and_blocks_that_are_alike_are_one(workload: Load) -> None:
    modules = by_name(anatomy(traced(workload, 4096), 4096).modules)
    assert modules["blocks.*.act"] == DEPTH * 4096 * WIDTH * 4
    assert set(modules) <= {"blocks.*.act", "blocks.*.linear", "the loss"}


def test_a_small_batch_peaks_in_the_optimizers_step(workload: Load) -> None:
    found = anatomy(traced(workload, 1), 1)
    assert found.moment == "optimizer step"
    assert by_name(found.parts)["temporaries of the optimizer step"] >= DEPTH * WIDTH * WIDTH * 4, "foreach"


def test_plain_sgd_keeps_no_state(workload: Load) -> None:
    assert "optimizer state" not in by_name(anatomy(traced(workload, 4096, "SGD"), 4096).parts)


def test_what_the_allocator_holds_beyond_is_said_apart() -> None:
    births = (Birth("batch", "forward", "", 1, 1),)
    assert anatomy(Trace((0, ~0), (15 * 2**20,), births), 1).unused_bytes == 2**20, "segments are multiples of 2 MiB"


def test_the_moment_of_each_birth_is_known(workload: Load) -> None:
    moments = {birth.moment for birth in traced(workload, SAMPLES).births}
    assert moments == {"building", "forward", "backward", "optimizer step"}


def test_clipping_is_no_part_of_the_forward_pass(workload: Load) -> None:
    job = workload(BLOCKS.replace("OPTIMIZER", "AdamW"))

    def num_births(max_grad_norm: float | None, moment: str) -> int:
        trace = trace_training(Setup(job, "32-true", (8, 0), max_grad_norm), Tensors.FAKE, 2, 2)
        return sum(birth.moment == moment for birth in trace.births)

    assert num_births(1.0, "forward") == num_births(None, "forward")
    assert num_births(1.0, "optimizer step") > num_births(None, "optimizer step")


def test_a_trace_without_births_has_no_anatomy() -> None:
    with pytest.raises(ValueError, match="how its storages came about"):
        anatomy(Trace((0, ~0), (1,)), 1)


def test_what_follows_a_backward_in_a_micro_batch_is_still_its_forward(workload: Load) -> None:
    setup = Setup(workload(TWO_LOSSES), "32-true", (8, 0), run=run_loss_by_loss)
    trace = trace_training(setup, Tensors.FAKE, 512, 2)
    activation = 512 * 4096 * 4
    born = [birth for birth, size in zip(trace.births, trace.sizes, strict=True) if size == activation]
    assert {birth.moment for birth in born} == {"forward", "backward"}
    assert {birth.module for birth in born if birth.moment == "forward"} == {f"{i}.{j}" for i in (0, 1) for j in (0, 1)}


def test_the_roots_own_forward_is_told_from_the_loss(workload: Load) -> None:
    text = BLOCKS.replace("OPTIMIZER", "SGD").replace("x = block(x)", "x = block(x) + 1")
    setup = Setup(workload(text), "32-true", (8, 0))
    modules = {birth.module for birth in trace_training(setup, Tensors.FAKE, 64, 1).births}
    assert modules >= {"the model itself", "blocks.0.act", ""}
