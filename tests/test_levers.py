"""What a change would do to the largest micro-batch is what the changed model.py itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_files import TWO_LOSSES
from torch import nn

from gradplan.probes.evidence import Evidence
from gradplan.probes.simulate import Simulation
from gradplan.probes.simulator.allocator_settings import AllocatorSettings, parse_settings
from gradplan.probes.simulator.catalogue import find
from gradplan.probes.simulator.curve import Curve
from gradplan.probes.simulator.levers import Levers, checkpoint_blocks, eight_bit, repeated_blocks, stateless
from gradplan.probes.simulator.trace import OPTIMIZER_STEP, STATE, Birth
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
MIB = 2**20

BLOCKS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Tanh(), nn.Linear(1024, 256))

    def forward(self, x):
        return x + self.layers(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = CALL
        return x

build_model = Model

def build_batch(n):
    return torch.ones(n, 256)

def compute_loss(model, batch):
    return model(batch).mean()

def build_optimizer(model, lr):
    return torch.optim.OPTIMIZER
"""
LEVERS: dict[str, int] = {}  # of the model as it is, found once
ADAMW = "AdamW(model.parameters(), lr=lr)"


def a_model(call: str = "block(x)", optimizer: str = ADAMW) -> str:
    return BLOCKS.replace("CALL", call).replace("OPTIMIZER", optimizer)


def probed(job: Workload, memory_mib: int = 800, with_levers: bool = False, **options: Any) -> Evidence:
    simulation = Simulation(job, find("rtx-4090"), memory_bytes=memory_mib * MIB, headroom_percent=0, **options)
    return simulation.gather(None, None, with_levers=with_levers)


@pytest.mark.parametrize(
    ("lever", "call", "optimizer", "options"),
    [
        ("bf16-mixed", "block(x)", ADAMW, {"precision": "bf16-mixed"}),
        ("bf16-true", "block(x)", ADAMW, {"precision": "bf16-true"}),
        ("activation checkpointing of 8 blocks", "checkpoint(block, x, use_reentrant=False)", ADAMW, {}),
        ("SGD without momentum, by arithmetic", "block(x)", "SGD(model.parameters(), lr=lr)", {}),
        ("Adafactor", "block(x)", "Adafactor(model.parameters(), lr=lr)", {}),
        ("expandable segments", "block(x)", ADAMW, {"settings": AllocatorSettings(expandable_segments=True)}),
    ],
)
def test_a_lever_is_what_the_changed_file_gives(
    lever: str, call: str, optimizer: str, options: dict[str, Any], workload: Load
) -> None:
    if not LEVERS:
        evidence = probed(workload(a_model()), with_levers=True)
        LEVERS.update({found.name: found.max_micro_batch_size for found in evidence.levers})
    changed = probed(workload(a_model(call, optimizer)), **options)
    assert LEVERS[lever] == changed.largest_fitting


@pytest.mark.parametrize(
    ("lever", "flag"), [("fused optimizer", "fused=True"), ("optimizer one tensor at a time", "foreach=False")]
)
def test_implementations_are_offered_where_the_optimizers_step_takes_most(
    lever: str, flag: str, workload: Load
) -> None:
    memory_mib = 620  # room for the step's temporaries, and for few samples
    levers = {found.name: found for found in probed(workload(a_model()), memory_mib, with_levers=True).levers}
    changed = probed(workload(a_model(optimizer=f"AdamW(model.parameters(), lr=lr, {flag})")), memory_mib)
    assert levers[lever].max_micro_batch_size == changed.largest_fitting
    assert not {"fused optimizer", "optimizer one tensor at a time"} & LEVERS.keys()


def test_state_of_eight_bits_holds_more_than_adamw_and_less_than_sgd(workload: Load) -> None:
    evidence = probed(workload(a_model()), 620, with_levers=True)
    sizes = {lever.name: lever.max_micro_batch_size for lever in evidence.levers}
    assert (
        evidence.largest_fitting
        < sizes["8-bit optimizer state, by arithmetic"]
        < sizes["SGD without momentum, by arithmetic"]
    )


def test_arithmetic_is_of_state_and_of_the_steps_temporaries_alone() -> None:
    births = [Birth(kind, moment, "", 1, 1) for kind, moment in ((STATE, ""), (STATE, ""), ("", OPTIMIZER_STEP))]
    births += [Birth("", "forward", "", 1, 1)]
    bases = (MIB, 4 * 4095, MIB, MIB)
    curve = Curve((0, 1, 2, 3), bases, (0, 0, 0, 5), tuple(births))
    assert eight_bit(curve).bases == (MIB / 4 + MIB / 4 / 256 * 4, 4 * 4095, 0, MIB), "small state stays in fp32"
    assert stateless(curve).bases == (0, 0, 0, MIB)
    assert stateless(curve).slopes == curve.slopes


def test_levers_are_asked_for_or_there_is_nothing_that_fits(workload: Load) -> None:
    assert probed(workload(a_model())).levers == ()
    evidence = probed(workload(a_model()), 592)
    assert evidence.largest_fitting == 0
    assert {lever.name for lever in evidence.levers if lever.max_micro_batch_size} >= {
        "SGD without momentum, by arithmetic"
    }


def test_a_lever_that_is_used_is_not_offered(workload: Load) -> None:
    settings = parse_settings("expandable_segments:True")
    job = workload(a_model(optimizer="SGD(model.parameters(), lr=lr, fused=True)"))
    names = {lever.name for lever in probed(job, with_levers=True, precision="bf16-true", settings=settings).levers}
    assert names == {"as it is", "activation checkpointing of 8 blocks"}


def test_levers_of_several_losses_are_of_the_form_that_is_used(workload: Load) -> None:
    tracer = Tracer(Setup(workload(TWO_LOSSES), "32-true", (8, 9)), lambda _: None)
    sizes: dict[str, int] = {}
    for backward in ("joint", "sequential"):
        tracer.backward = backward
        curve = Curve.fit(*(tracer.trace(size, 1) for size in (2, 3)), (2, 3))
        assert curve is not None
        levers = Levers(tracer, curve, 200 * MIB, 1, AllocatorSettings()).all(1000)
        sizes[backward] = next(lever.max_micro_batch_size for lever in levers if lever.name == "bf16-mixed")
    assert sizes["sequential"] > 1.2 * sizes["joint"]


def test_blocks_are_the_outermost_lists_of_modules_that_are_alike() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    encoder, decoder = nn.ModuleList([block(), block()]), nn.Sequential(block(), block(), block())
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "head": nn.Sequential(nn.ReLU(), nn.ReLU())})
    assert repeated_blocks(model) == [*encoder, *decoder]
    assert repeated_blocks(nn.Linear(2, 2)) == []


def test_checkpointed_blocks_give_the_same_gradients(workload: Load) -> None:
    def gradients(change: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = workload(a_model()).build_model()
        if change:
            checkpoint_blocks(model)
        model(torch.ones(3, 256)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other)
