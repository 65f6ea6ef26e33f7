"""Several losses: a backward after each one saves memory, gives the gradients of their sum, and fails with advice."""

from __future__ import annotations

import textwrap
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradplan
from gradplan.plan import Plan
from gradplan.probes import step
from gradplan.probes.batches import settings_kept
from gradplan.probes.drawing import as_counts, shares_of
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Backward
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
Probe = Callable[[str], Plan]
CPU = torch.device("cpu")
BOTH_RUNS = pytest.mark.parametrize("run", [step.run_losses_together, step.run_loss_by_loss])

HEAD = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

BATCH_SIZE = 1024
LEARNING_RATE = 1e-3

def stack(num_layers, inputs=128, outputs=128):
    layers = [nn.Linear(inputs, 128), nn.GELU()]
    for _ in range(num_layers - 2):
        layers += [nn.Linear(128, 128), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(128, outputs))

def build_batch(n):
    return torch.randn(n, 8), torch.randn(n, 1)

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)
"""
SEPARATE = """
def build_model():
    return nn.ModuleList(stack(6, inputs=8, outputs=1) for _ in range({num_models}))

def compute_loss(model, batch):
    inputs, targets = batch
    for part in model:
        yield mse_loss(part(inputs), targets)
"""
TWO = HEAD + SEPARATE.format(num_models=2)
SIX = HEAD + SEPARATE.format(num_models=6)
TRUNK = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = stack(8, inputs=8)
        self.heads = nn.ModuleList(stack(4, outputs=1) for _ in range(4))

def build_model():
    return Net()
"""
)
SUMMED = (
    TRUNK
    + """
def compute_loss(model, batch):
    inputs, targets = batch
    features = model.trunk(inputs)
    return sum(mse_loss(head(features), targets) for head in model.heads)
"""
)
CUT = (
    TRUNK
    + """
def compute_loss(model, batch):
    inputs, targets = batch
    features = model.trunk(inputs)
    cut = features.detach().requires_grad_()
    for head in model.heads:
        yield mse_loss(head(cut), targets)
    if model.training:
        features.backward(cut.grad)
"""
)
# The names are those of the advice that gradplan shows, so that it can be pasted.
SHARED = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = stack(3, inputs=8)
        self.first = nn.Linear(128, 1)
        self.second = nn.Linear(128, 1)

def build_model():
    return Net()

first_loss = second_loss = mse_loss

def compute_loss(model, batch):
    inputs, targets = batch
"""
)
UNCUT = """
    features = model.trunk(inputs)
    yield first_loss(model.first(features), targets)
    yield second_loss(model.second(features), targets)
"""


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    """``probe(text)``: the plan for a model.py of that text on an RTX 4090."""
    path = tmp_path / "model.py"

    def plan(text: str) -> Plan:
        path.write_text(text)
        return gradplan.probe(str(path), device="rtx-4090")

    with settings_kept():
        yield plan


def gradients(job: Workload, run: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """All gradients of one micro-batch, one after the other; the same parameters and batch at each call."""
    torch.manual_seed(0)
    model = job.build_model().to(dtype)
    batch = step.move_to(job.make_batch(16), CPU, dtype)
    run(model, batch, job.compute_loss, 1.0, nullcontext())
    assert all(parameter.grad is not None for parameter in model.parameters())
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


# What it saves


def transient_bytes(job: Workload, backward: Backward) -> int:
    """The traced peak besides parameters and gradients; SGD keeps nothing else."""
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in job.build_model().parameters())
    trace = Tracer(Setup(job, "32-true", (8, 0)), lambda _: None).trace(16384, 1, backward)
    return trace.peak_live_bytes - 2 * parameters


@pytest.mark.parametrize(
    ("joint", "by_loss", "least"),
    [(TWO, TWO, 0.40), (SIX, SIX, 0.70), (SUMMED, CUT, 0.35)],
    ids=["two models", "six models", "trunk with four heads"],
)
def test_a_backward_after_each_loss_saves_memory(workload: Load, joint: str, by_loss: str, least: float) -> None:
    needed = transient_bytes(workload(by_loss), "sequential")
    assert needed < (1 - least) * transient_bytes(workload(joint), "joint")


# Its gradients are those of the sum


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("joint", "by_loss"), [(TWO, TWO), (SUMMED, CUT)], ids=["two models", "cut trunk"])
def test_the_gradients_are_those_of_the_sum(
    workload: Load, joint: str, by_loss: str, dtype: torch.dtype, tolerance: float
) -> None:
    expected = gradients(workload(joint), step.run_losses_together, dtype)
    found = gradients(workload(by_loss), step.run_loss_by_loss, dtype)
    assert expected.norm() > 0
    assert (found - expected).norm() <= tolerance * expected.norm()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)


def classified(targets: Tensor) -> Callable[[Pair, Tensor], Iterator[Tensor]]:
    """Two losses, each a mean over those ``targets`` (batch, 2) that are not -100."""

    def compute_loss(model: Pair, inputs: Tensor) -> Iterator[Tensor]:
        yield cross_entropy(model.first(inputs), targets[:, 0])
        yield cross_entropy(model.second(inputs), targets[:, 1])

    return compute_loss


@BOTH_RUNS
def test_a_loss_without_items_stays_out_and_the_others_train(run: Callable[..., Tensor]) -> None:
    model, inputs = Pair(), torch.randn(2, 4)
    targets = torch.tensor([[-100, 1], [-100, 2]])
    assert next(classified(targets)(model, inputs)).isnan()
    loss = run(model, inputs, classified(targets), [0.0, 0.5], nullcontext())
    expected = cross_entropy(model.second(inputs), targets[:, 1])
    assert loss == pytest.approx(0.5 * expected.item())
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None
    assert torch.allclose(model.second.weight.grad, 0.5 * torch.autograd.grad(expected, model.second.weight)[0])


@BOTH_RUNS
def test_each_loss_has_its_share_and_a_single_share_serves_all(run: Callable[..., Tensor]) -> None:
    model, inputs, compute_loss = Pair(), torch.randn(2, 4), classified(torch.tensor([[0, 1], [2, 2]]))
    first, second = (loss.item() for loss in compute_loss(model, inputs))
    for share, expected in (
        (as_counts(torch.tensor(0.25)), 0.25 * first + 0.25 * second),
        (0.25, 0.25 * first + 0.25 * second),
        (as_counts((torch.tensor(0.25), 0.75)), 0.25 * first + 0.75 * second),
    ):
        assert run(model, inputs, compute_loss, share, nullcontext()) == pytest.approx(expected)


# How the generator is run


@BOTH_RUNS
@pytest.mark.parametrize("shares", [1.0, [1.0, 0.0], [0.0, 1.0]])
def test_the_generator_is_exhausted(run: Callable[..., Tensor], shares: Any) -> None:
    after: list[bool] = []

    def compute_loss(model: Pair, inputs: Tensor) -> Iterator[Tensor]:
        yield model.first(inputs).mean()
        yield model.second(inputs).mean()
        after.append(True)

    run(Pair(), torch.ones(1, 4), compute_loss, shares, nullcontext())
    assert after == [True]


@BOTH_RUNS
def test_the_losses_are_computed_inside_autocast_and_backward_runs_outside(run: Callable[..., Tensor]) -> None:
    inside: list[bool] = []
    outside: list[bool] = []

    def compute_loss(model: Pair, inputs: Tensor) -> Iterator[Tensor]:
        for layer in (model.first, model.second):
            inside.append(torch.is_autocast_enabled("cpu"))
            yield layer(inputs).mean()
        inside.append(torch.is_autocast_enabled("cpu"))

    def backward(loss: Tensor) -> None:
        outside.append(torch.is_autocast_enabled("cpu"))
        loss.backward()

    autocast = step.autocast_for(CPU, "bf16-mixed")
    run(Pair(), torch.ones(1, 4), compute_loss, 1.0, autocast, backward)
    assert inside == [True] * 3
    assert outside
    assert not any(outside)


@pytest.mark.parametrize(
    ("run", "shares", "are_alive"),
    [
        (step.run_loss_by_loss, [1.0, 1.0], [False, False]),
        (step.run_loss_by_loss, [0.0, 1.0], [False, False]),  # without a backward that would free it
        (step.run_losses_together, [1.0, 1.0], [True, True]),
    ],
)
def test_one_graph_is_alive_at_a_time(run: Callable[..., Tensor], shares: list[float], are_alive: list[bool]) -> None:
    seen: list[bool] = []

    def loss_of(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Any]:
        activation = layer(inputs)
        return activation.square().mean(), weakref.ref(activation.untyped_storage())  # square keeps it for backward

    def compute_loss(model: Pair, inputs: Tensor) -> Iterator[Tensor]:
        for layer in (model.first, model.second):
            loss, activation = loss_of(layer, inputs)
            assert activation() is not None
            yield loss
            del loss
            seen.append(activation() is not None)

    run(Pair(), torch.ones(1, 4), compute_loss, shares, nullcontext())
    assert seen == are_alive


# What the plan says


def test_two_separate_models_run_loss_by_loss_and_the_evidence_compares_both(probe: Probe) -> None:
    plan = probe(TWO)
    peaks = {peak.backward: peak for peak in plan.evidence.backward_peaks}
    assert plan.backward == plan.evidence.backward == "sequential"
    assert set(peaks) == {"joint", "sequential"}
    assert peaks["sequential"].micro_batch_size == peaks["joint"].micro_batch_size == 1024
    assert peaks["sequential"].peak_allocated_bytes < peaks["joint"].peak_allocated_bytes


def test_losses_that_save_nothing_are_summed(probe: Probe) -> None:
    plan = probe(HEAD + SEPARATE.format(num_models=1))
    assert plan.backward == plan.evidence.backward == "joint"
    assert len({peak.peak_allocated_bytes for peak in plan.evidence.backward_peaks}) == 1


@pytest.mark.parametrize("condition", ["model.training", "cut.grad is not None"])
def test_a_cut_trunk_has_no_joint_form(probe: Probe, condition: str) -> None:
    plan = probe(CUT.replace("model.training", condition))
    assert plan.backward == "sequential"
    assert plan.evidence.backward_peaks == ()


def test_a_function_that_returns_a_generator_is_as_good_as_a_generator(probe: Probe) -> None:
    returning = TWO.replace("def compute_loss", "def losses") + "\ndef compute_loss(*args):\n    return losses(*args)\n"
    direct, returned = probe(TWO), probe(returning)
    assert returned.backward == "sequential"
    assert returned.evidence.backward_peaks == direct.evidence.backward_peaks
    assert returned.evidence.trials == direct.evidence.trials


@pytest.mark.parametrize(("counts", "num_counts"), [("16", 1), ("(16, 8)", 2)])
def test_count_items_gives_one_number_for_all_losses_or_one_for_each(
    probe: Probe, counts: str, num_counts: int
) -> None:
    assert probe(f"{TWO}\ndef count_items(batch):\n    return {counts}\n").recipe.num_counts == num_counts


# What is refused


@pytest.mark.parametrize(("num_models", "counts"), [(3, "(16, 8)"), (2, "(16, 8, 8)"), (2, "(0, 8, 8)")])
def test_another_number_of_counts_than_of_losses_is_refused(probe: Probe, num_models: int, counts: str) -> None:
    text = HEAD + SEPARATE.format(num_models=num_models) + f"\ndef count_items(batch):\n    return {counts}\n"
    with pytest.raises(UserCodeError, match=r"count_items"):
        probe(text)


@pytest.mark.parametrize("losses", ["first, second", "{'a': first, 'b': second}", "[first, second]"])
def test_several_losses_at_once_are_refused_with_the_word_yield(probe: Probe, losses: str) -> None:
    text = SHARED + (
        "    features = model.trunk(inputs)\n"
        "    first, second = (mse_loss(head(features), targets) for head in (model.first, model.second))\n"
        f"    return {losses}\n"
    )
    with pytest.raises(UserCodeError, match="yield the losses one by one"):
        probe(text)


def test_a_trunk_shared_without_a_cut_is_refused_with_advice_that_works(probe: Probe) -> None:
    with pytest.raises(UserCodeError) as refused:
        probe(SHARED + UNCUT)
    message = str(refused.value)
    assert "graphs share model.trunk:" in message
    advice = textwrap.dedent(message[message.index("    features =") :])
    plan = probe(SHARED + textwrap.indent(advice, "    "))
    assert plan.backward == "sequential"
    assert not {"evaluation-fails", "sequential-not-exact"} & {warning.code for warning in plan.warnings}


def test_a_graph_kept_from_the_step_before_shows_the_users_own_error(probe: Probe) -> None:
    text = SHARED + (
        "    if not KEPT:\n"
        "        KEPT.append(model.trunk(inputs))\n"
        "    return mse_loss(model.first(KEPT[0]), targets)\n\nKEPT = []\n"
    )
    with pytest.raises(UserCodeError, match="backward through the graph a second time") as refused:
        probe(text)
    assert "cut" not in str(refused.value).lower()
    assert "fit" not in str(refused.value)


@BOTH_RUNS
def test_a_loss_that_is_none_does_not_end_the_micro_batch(run: Callable[..., Tensor]) -> None:
    def compute_loss(model: Pair, inputs: Tensor) -> Iterator[Tensor | None]:
        yield model.first(inputs).sum()
        yield None
        yield model.second(inputs).sum()

    with pytest.raises(TypeError, match="compute_loss gave NoneType"):
        run(Pair(), torch.randn(2, 4), compute_loss, 1.0, nullcontext())


@BOTH_RUNS
def test_a_loss_without_items_needs_no_gradient(run: Callable[..., Tensor]) -> None:
    def compute_loss(model: Pair, inputs: Tensor) -> Iterator[Tensor]:
        yield torch.zeros(())
        yield model.second(inputs).sum()

    model = Pair()
    run(model, torch.ones(2, 4), compute_loss, [0.0, 1.0], nullcontext())
    assert model.second.weight.grad is not None


@BOTH_RUNS
def test_more_counts_than_losses_are_an_error(run: Callable[..., Tensor]) -> None:
    with pytest.raises(TypeError, match="count_items gives more numbers"):
        run(Pair(), torch.randn(2, 4), classified(torch.tensor([[0, 1], [2, 2]])), [0.5] * 3, nullcontext())


@pytest.mark.parametrize("count", [float("nan"), -1, float("inf"), (1, -2)])
def test_a_count_is_a_number_of_things(count: Any) -> None:
    with pytest.raises(ValueError, match=r"count_items gave .* it must give numbers of at least 0"):
        as_counts(count)
    with pytest.raises(ValueError, match="must always give 2 numbers"):
        shares_of([[1.0, 2.0], [1.0]], 2, CPU)
