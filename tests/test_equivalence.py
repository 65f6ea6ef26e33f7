"""Training with the rendered train.py equals training on the large batch, for every way to split it.

The reference is written out below, once and plainly: one big batch per optimizer step, no micro-batches.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from train_scripts import NAMES, RATE, Names, plan_for, write_script

from gradplan.probes.drawing import shuffled
from gradplan.probes.step import train_window, train_window_scaled

CLASSIFIER = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to({dtype})

def build_dataset():
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn({length}, 5, generator=generator).to({dtype})
    return TensorDataset(inputs, torch.randint(3, ({length},), generator=generator))

def compute_loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)

def build_optimizer(model, lr):
    return torch.optim.{optimizer}(model.parameters(), lr=lr)

def build_scheduler(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
"""
# Sentences of 1 to 12 tokens; the loss is a mean over target tokens, the longer ones are harder.
PADDED = """
import torch
from torch import nn

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return {length}
    def __getitem__(self, index):
        return torch.full((1 if index % 2 else 12,), 1 + index % 2)

def collate_fn(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)

def count_items(tokens):
    return (tokens != -100).sum()

def build_model():
    torch.manual_seed(1)
    return nn.Linear(1, 4).to({dtype})

def build_dataset():
    return Sentences()

def compute_loss(model, tokens):
    scores = model((tokens.clamp(min=0).unsqueeze(-1) / 4).to(model.weight.dtype))
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten(), ignore_index=-100)

def build_optimizer(model, lr):
    return torch.optim.{optimizer}(model.parameters(), lr=lr)

def build_scheduler(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
"""
PADDED_NAMES = (*NAMES, "collate_fn", "count_items")


@dataclass
class Run:
    """A finished run: the script as a module, the weights it saved, the lines it printed."""

    train: ModuleType
    weights: dict[str, Tensor]
    lines: list[str]

    @property
    def losses(self) -> list[float]:
        return [float(found[1]) for line in self.lines if (found := re.search(r"  loss (\S+)", line))]


RunScript = Callable[..., Run]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """Models this small spend their time in waking threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Render train.py for a model file, run it in this process on the CPU."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(model: str, names: Names, window: int, micro: int, *options: str, **changes: Any) -> Run:
        sys.modules.pop("model", None)
        script = write_script(tmp_path, model, plan_for(names, window, micro, **changes))
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", "--out", str(out), *options])
        train = ModuleType("train_under_test")
        train.__file__ = str(script)
        exec(compile(script.read_text(), str(script), "exec"), train.__dict__)
        train.main()
        return Run(train, torch.load(out / "model.pt"), capsys.readouterr().out.splitlines())

    yield run
    sys.modules.pop("model", None)


def large_batch_training(model_py: ModuleType, window: int, epochs: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    """One batch of the whole window per optimizer step. Returns the weights and each step's loss."""
    collate = getattr(model_py, "collate_fn", torch.utils.data.default_collate)
    dataset, model, losses = model_py.build_dataset(), model_py.build_model(), []
    optimizer = model_py.build_optimizer(model, RATE)
    for epoch in range(epochs):
        order = shuffled(len(dataset), seed=0, epoch=epoch)
        for start in range(0, len(order), window):
            batch = collate([dataset[index] for index in order[start : start + window]])
            optimizer.zero_grad()
            loss = model_py.compute_loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.state_dict(), losses


def relative_difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of the reference, over all weights."""
    ours_flat = torch.cat([ours[name].flatten() for name in reference])
    reference_flat = torch.cat([weight.flatten() for weight in reference.values()])
    return ((ours_flat - reference_flat).norm() / reference_flat.norm()).item()


# The grid

KINDS = [("float32", "SGD", 1e-6), ("float64", "SGD", 1e-12), ("float64", "AdamW", 1e-12)]
SPLITS = [(window, micro) for window in (1, 4, 6, 12, 40) for micro in (1, 3, 7, 50)]


@pytest.mark.parametrize(("dtype", "optimizer", "tolerance"), KINDS)
@pytest.mark.parametrize("length", [1, 5, 12, 13, 29])
def test_weights_after_an_epoch_are_those_of_the_large_batch(
    run_script: RunScript, length: int, dtype: str, optimizer: str, tolerance: float
) -> None:
    model = CLASSIFIER.format(length=length, dtype=f"torch.{dtype}", optimizer=optimizer)
    for window, micro in SPLITS:
        run = run_script(model, NAMES, window, micro)
        weights, losses = large_batch_training(run.train.model_py, window)
        assert relative_difference(run.weights, weights) < tolerance, (window, micro)
        assert len(run.losses) == math.ceil(length / window)
        assert run.losses == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize(("dtype", "optimizer", "tolerance"), KINDS)
def test_with_count_items_every_item_weighs_the_same(
    run_script: RunScript, dtype: str, optimizer: str, tolerance: float
) -> None:
    model = PADDED.format(length=21, dtype=f"torch.{dtype}", optimizer=optimizer)
    for window, micro in ((8, 1), (8, 3), (8, 8), (5, 2), (40, 4)):
        run = run_script(model, PADDED_NAMES, window, micro)
        weights, losses = large_batch_training(run.train.model_py, window)
        assert relative_difference(run.weights, weights) < tolerance, (window, micro)
        assert run.losses == pytest.approx(losses, abs=1e-4)


def test_a_mean_of_means_would_be_seen(run_script: RunScript) -> None:
    """The data of the test above has teeth: sample counts as weights are 20 % off and more."""
    model = PADDED.format(length=21, dtype="torch.float64", optimizer="SGD")
    by_samples = run_script(model, PADDED_NAMES[:-1], 8, 1)
    weights, _ = large_batch_training(by_samples.train.model_py, 8)
    start = by_samples.train.model_py.build_model().state_dict()
    moved = {name: weights[name] - start[name] for name in weights}
    moved_by_samples = {name: by_samples.weights[name] - start[name] for name in weights}
    assert relative_difference(moved_by_samples, moved) > 0.2


# Epochs, steps and what is left over


@pytest.mark.parametrize(
    ("length", "micro", "window", "epochs", "num_steps"), [(11, 1, 4, 3, 9), (2, 1, 3, 1, 1), (8, 2, 8, 1, 1)]
)
def test_the_scheduler_steps_once_per_optimizer_step_as_planned(
    run_script: RunScript, length: int, micro: int, window: int, epochs: int, num_steps: int
) -> None:
    model = CLASSIFIER.format(length=length, dtype="torch.float64", optimizer="SGD") + SPY_SCHEDULER
    run = run_script(model, NAMES, window, micro, "--epochs", str(epochs))
    assert len(run.losses) == num_steps
    assert run.train.model_py.planned == num_steps
    assert run.train.model_py.steps == num_steps
    weights, _ = large_batch_training(run.train.model_py, window, epochs)
    assert relative_difference(run.weights, weights) < 1e-12


SPY_SCHEDULER = """
steps = 0
class Spy(torch.optim.lr_scheduler.LambdaLR):
    def step(self):
        global steps
        steps += 1
        super().step()

def build_scheduler(optimizer, num_steps):
    global planned, steps
    scheduler = Spy(optimizer, lambda step: 1.0)
    planned, steps = num_steps, 0  # it steps once when it is built
    return scheduler
"""


def test_max_steps_ends_the_run_inside_an_epoch(run_script: RunScript) -> None:
    model = CLASSIFIER.format(length=12, dtype="torch.float32", optimizer="SGD") + SPY_SCHEDULER
    run = run_script(model, NAMES, 4, 2, "--epochs", "5", "--max-steps", "4")
    assert len(run.losses) == run.train.model_py.planned == 4


def test_every_epoch_has_all_samples_in_an_order_of_its_own(run_script: RunScript) -> None:
    model = CLASSIFIER.format(length=10, dtype="torch.float32", optimizer="SGD") + SPY_DATASET
    run = run_script(model, NAMES, 4, 3, "--epochs", "2")
    first, second = run.train.model_py.drawn[:10], run.train.model_py.drawn[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    other_seed = run_script(model, NAMES, 4, 3, "--seed", "1").train.model_py.drawn
    assert sorted(other_seed) == list(range(10))
    assert other_seed not in (first, second)


SPY_DATASET = """
drawn = []
class Spied(torch.utils.data.Dataset):
    def __init__(self, dataset): self.dataset = dataset
    def __len__(self): return len(self.dataset)
    def __getitem__(self, index):
        drawn.append(index)
        return self.dataset[index]

build_plain = build_dataset
def build_dataset():
    return Spied(build_plain())
"""


def test_every_micro_batch_is_a_multiple_and_the_rest_is_left_out_aloud(run_script: RunScript) -> None:
    model = CLASSIFIER.format(length=23, dtype="torch.float32", optimizer="SGD") + SPY_SIZES
    run = run_script(model, NAMES, 12, 10, batch_multiple=4)
    assert run.train.model_py.sizes == [8, 4, 8]
    assert "left out of each epoch: 3 of 23 samples" in run.lines


SPY_SIZES = """
sizes = []
compute_plainly = compute_loss
def compute_loss(model, batch):
    sizes.append(len(batch[0]))
    return compute_plainly(model, batch)
"""


def test_a_dataset_too_small_for_a_multiple_is_said(run_script: RunScript) -> None:
    model = CLASSIFIER.format(length=3, dtype="torch.float32", optimizer="SGD")
    with pytest.raises(SystemExit, match="the dataset is too small: 3 samples"):
        run_script(model, NAMES, 12, 10, batch_multiple=4)


@pytest.mark.parametrize(("window", "micro", "sizes"), [(32, 32, [32, 32]), (64, 32, [32, 32]), (5, 2, [2, 2] * 13)])
def test_batch_norm_never_meets_a_lone_sample(run_script: RunScript, window: int, micro: int, sizes: list[int]) -> None:
    model = CLASSIFIER.format(length=65, dtype="torch.float32", optimizer="SGD")
    model = model.replace("nn.Tanh()", "nn.BatchNorm1d(7)")
    run = run_script(model + SPY_SIZES, NAMES, window, micro, has_batch_norm=True)
    assert run.train.model_py.sizes == sizes
    assert any(line.startswith("left out of each epoch:") for line in run.lines)


def test_batch_norm_that_was_probed_with_one_sample_keeps_it(run_script: RunScript) -> None:
    model = CLASSIFIER.format(length=3, dtype="torch.float32", optimizer="SGD")
    assert len(run_script(model, NAMES, 2, 1, has_batch_norm=True).losses) == 2


# One window


WEIGHT = """
import torch

class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros({width}))

def build_model():
    return Weight()

def build_dataset():
    return {samples}

def collate_fn(samples):
    return samples

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=1.0)

def build_scheduler(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
"""
LINEAR_LOSS = """
def compute_loss(model, samples):
    return torch.stack([(model.weight * torch.tensor(sample)).sum() for sample in samples]).mean()
"""


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_a_short_last_window_is_divided_by_its_own_size(run_script: RunScript, micro: int) -> None:
    """10 samples with gradient 1 in windows of 4: three steps of 1, not 1, 1 and a half."""
    model = WEIGHT.format(width=1, samples=[[1.0]] * 10) + LINEAR_LOSS
    assert run_script(model, (*NAMES, "collate_fn"), 4, micro).weights["weight"].item() == pytest.approx(-3.0)


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_a_constant_loss_is_logged_as_it_is(run_script: RunScript, micro: int) -> None:
    model = WEIGHT.format(width=1, samples=[[0.0]] * 13) + (
        "\ndef compute_loss(model, samples): return 2.0 + 0.0 * model.weight.sum()\n"
    )
    assert run_script(model, (*NAMES, "collate_fn"), 8, micro).losses == [2.0, 2.0]


def test_gradients_of_an_earlier_window_are_gone(run_script: RunScript) -> None:
    """Two windows of gradient 1 move the weight by 2; kept gradients would move it by 3."""
    model = WEIGHT.format(width=1, samples=[[1.0]] * 4) + LINEAR_LOSS
    assert run_script(model, (*NAMES, "collate_fn"), 2, 1).weights["weight"].item() == pytest.approx(-2.0)


def test_the_norm_is_clipped_once_per_window(run_script: RunScript) -> None:
    """Micro-batches [4, 0] and [0, 4] average to [2, 2], which is clipped to [0.7071, 0.7071]."""
    model = WEIGHT.format(width=2, samples=[[4.0, 0.0], [0.0, 4.0]]) + LINEAR_LOSS
    clipped = run_script(model, (*NAMES, "collate_fn"), 2, 1, "--max-grad-norm", "1")
    assert clipped.weights["weight"].tolist() == pytest.approx([-0.70711, -0.70711], abs=1e-4)
    unclipped = run_script(model, (*NAMES, "collate_fn"), 2, 1)
    assert unclipped.weights["weight"].tolist() == [-2.0, -2.0]


COUNTED = (
    WEIGHT
    + """
def count_items(samples):
    return sum(sample != -100 for sample in samples)

def compute_loss(model, samples):
    kept = [sample for sample in samples if sample != -100]
    return (model.weight * torch.tensor(kept)).sum() / len(kept) if kept else model.weight.sum() * torch.nan
"""
)
COUNTED_NAMES = (*NAMES, "collate_fn", "count_items")


def test_a_micro_batch_without_items_does_not_poison_the_window(run_script: RunScript) -> None:
    """One micro-batch has only ignored labels, and its loss is NaN; the other two hold the items 6 and 2."""
    run = run_script(COUNTED.format(width=1, samples=[6.0, -100, 2.0]), COUNTED_NAMES, 3, 1)
    assert run.weights["weight"].item() == pytest.approx(-4.0)


def test_a_window_without_items_is_skipped_and_said(run_script: RunScript) -> None:
    run = run_script(COUNTED.format(width=1, samples=[-100] * 3), COUNTED_NAMES, 2, 1)
    assert run.weights["weight"].item() == 0.0
    steps = [line.partition("  peak")[0] for line in run.lines if line.startswith("step ")]
    assert steps == [f"step {step}/2  skipped: there are no items in it to learn from" for step in (1, 2)]
    assert run.losses == []


def test_items_are_counted_on_the_cpu_before_any_forward(run_script: RunScript) -> None:
    spy = (
        "\nevents = []\n"
        "def count_items(samples):\n    events.append('count')\n    return len(samples)\n"
        "def compute_loss(model, samples):\n    events.append('loss')\n    return model.weight.sum()\n"
    )
    run = run_script(WEIGHT.format(width=1, samples=[1.0] * 4) + spy, COUNTED_NAMES, 4, 2)
    assert run.train.model_py.events == ["count", "count", "loss", "loss"]


def test_a_graph_is_freed_before_the_next_micro_batch(run_script: RunScript) -> None:
    """Peak memory does not grow with accumulation: nothing of a micro-batch outlives it."""
    spy = """
import weakref

graphs, alive = [], []

class Activations: pass

class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.activations = Activations()
        graphs.append(weakref.ref(ctx.activations))
        return weight.sum()
    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(1)

def compute_loss(model, samples):
    alive.append(sum(graph() is not None for graph in graphs))
    return Layer.apply(model.weight)
"""
    run = run_script(WEIGHT.format(width=1, samples=[1.0] * 8) + spy, (*NAMES, "collate_fn"), 4, 1)
    assert run.train.model_py.alive == [0] * 8


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_loss_that_is_not_finite_stops_the_run(run_script: RunScript, tmp_path: Path, bad: str) -> None:
    model = WEIGHT.format(width=1, samples=[1.0] * 3) + (
        "\ncalls = 0\ndef compute_loss(model, samples):\n"
        "    global calls\n    calls += 1\n"
        f"    return model.weight.sum() + (float('{bad}') if calls == 2 else 0)\n"
    )
    with pytest.raises(SystemExit, match=f"step 2/3: the loss is {bad}, nothing is saved"):
        run_script(model, (*NAMES, "collate_fn"), 1, 1)
    assert list((tmp_path / "out").iterdir()) == []


# Precision


def test_16_mixed_unscales_and_steps_once_per_window() -> None:
    calls: list[str] = []

    class Spy(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            calls.append("unscale")
            super().unscale_(optimizer)

        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().step(optimizer, *args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            calls.append("update")
            super().update(new_scale)

    def compute_loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).float().mean()
        return loss

    model, device = torch.nn.Linear(2, 1), torch.device("cpu")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), Spy("cpu", init_scale=1024.0)
    window = [(torch.ones(2, 2), 0.25)] * 4
    for _ in range(3):
        loss, stepped = train_window_scaled(model, optimizer, window, compute_loss, device, scaler, 1e9)
        assert stepped
        assert not loss.requires_grad
        scaled = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        plain_loss = train_window(model, optimizer, window, compute_loss, device, "bf16-mixed")
        plain = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(scaled, plain, rtol=1e-2, atol=1e-2)
        assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-2, abs=1e-2)
    assert calls == ["unscale", "step", "update"] * 3


def test_a_step_that_overflowed_is_not_one_for_the_scheduler(run_script: RunScript) -> None:
    """The first scale of 65536 overflows half precision here; it is halved, until a step fits."""
    model = CLASSIFIER.format(length=8, dtype="torch.float32", optimizer="SGD").replace(
        "cross_entropy(model(inputs), targets)", "cross_entropy(model(inputs) * 16, targets) * 64"
    )
    run = run_script(model + SPY_SCHEDULER, NAMES, 2, 1, "--epochs", "3", precision="16-mixed")
    skipped = [line for line in run.lines if "  no step: a gradient overflowed" in line]
    assert 0 < len(skipped) < 12
    assert run.train.model_py.steps == 12 - len(skipped)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_trains_close_to_the_large_batch(run_script: RunScript, precision: str) -> None:
    model = CLASSIFIER.format(length=13, dtype="torch.float32", optimizer="SGD")
    run = run_script(model, NAMES, 6, 4, precision=precision)
    kept = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {weight.dtype for weight in run.weights.values()} == {kept}
    weights, _ = large_batch_training(run.train.model_py, 6)
    assert 1e-6 < relative_difference({name: w.float() for name, w in run.weights.items()}, weights) < 2e-2


# The default schedule


@pytest.mark.parametrize(
    ("num_steps", "rates"),
    [
        (1, [1.0]),
        (2, [1.0, 0.5]),
        (10, [1.0, *(0.5 * (1 + math.cos(math.pi * k / 9)) for k in range(9))]),
        (20, [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * k / 18)) for k in range(18))]),
    ],
)
def test_warm_up_is_a_tenth_of_the_run_then_a_cosine(run_script: RunScript, num_steps: int, rates: list[float]) -> None:
    model = CLASSIFIER.format(length=num_steps, dtype="torch.float32", optimizer="SGD")
    run = run_script(model, NAMES[:-1], 1, 1)
    logged = [float(line.split("  lr ")[1].split()[0]) for line in run.lines if "  lr " in line]
    assert logged == pytest.approx([RATE * rate for rate in rates], rel=6e-3)


# Whole processes


def test_two_spawned_workers_train_the_same_weights(tmp_path: Path, run_script: RunScript) -> None:
    """Each worker imports the script again: nothing may run there, and the dataset must unpickle."""
    model = PADDED.format(length=13, dtype="torch.float32", optimizer="SGD")
    expected = run_script(model, PADDED_NAMES, 6, 4).weights
    script = write_script(tmp_path, model, plan_for(PADDED_NAMES, 6, 4))
    code = (
        "import multiprocessing, runpy, sys\nmultiprocessing.set_start_method('spawn')\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    options = ["--device", "cpu", "--workers", "2", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", code, str(script), *options]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step 1/3") == 1
    assert relative_difference(torch.load(tmp_path / "out" / "model.pt"), expected) == 0.0


def test_a_failed_run_exits_with_1_and_one_line(tmp_path: Path) -> None:
    model = WEIGHT.format(width=1, samples=[1.0]) + (
        "\ndef compute_loss(model, samples): return model.weight.sum() * float('nan')\n"
    )
    script = write_script(tmp_path, model, plan_for((*NAMES, "collate_fn"), 1, 1))
    command = [sys.executable, str(script), "--device", "cpu"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "step 1/1: the loss is nan, nothing is saved; a lower --learning-rate may help\n"
