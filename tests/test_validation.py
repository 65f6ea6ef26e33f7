"""Evaluation: without gradients, in evaluation mode, weighted by items, and counted by the probe."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_scripts import NAMES, plan_for, write_script

import gradplan
from gradplan.probes.step import evaluate

CPU = torch.device("cpu")
MODEL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

seen, modes = [], []

def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.5))

def build_dataset():
    return TensorDataset(torch.arange(10.0).reshape(10, 1), torch.arange(10) % 3)

def compute_loss(model, batch):
    inputs, targets = batch
    seen.append((model.training, torch.is_grad_enabled(), inputs.flatten().tolist()))
    return nn.functional.cross_entropy(model(inputs), targets)

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=0.0)

def build_scheduler(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
"""
VALIDATION = """
def build_validation_dataset():
    return TensorDataset(torch.arange(100.0, 107.0).reshape(7, 1), torch.arange(7) % 3)
"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, model: str, names: Any, *options: str, **changes: Any) -> Any:
    """train.py in this process; it returns model.py as a module."""
    script = write_script(folder, model, plan_for(names, 4, 2, **changes))
    monkeypatch.setattr("sys.argv", ["train.py", "--device", "cpu", "--out", str(folder / "out"), *options])
    namespace: dict[str, Any] = {"__name__": "train_under_test", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    namespace["main"]()
    return namespace["model_py"]


def joined(lists: Iterable[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(lists))


def validation_losses(output: str) -> list[float]:
    return [float(line.split("validation loss ")[1]) for line in output.splitlines() if "validation loss" in line]


def test_after_every_epoch_the_whole_set_is_evaluated_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (*NAMES, "build_validation_dataset")
    model_py = run(tmp_path, monkeypatch, MODEL + VALIDATION, names, "--epochs", "2")
    evaluated = [samples for training, has_gradients, samples in model_py.seen if not training and not has_gradients]
    assert [sum(map(len, evaluated[:4])), sum(map(len, evaluated[4:]))] == [7, 7]
    assert sorted(joined(evaluated[:4])) == [100.0 + index for index in range(7)]
    assert max(map(len, evaluated)) == 2  # no larger than what was probed
    assert all(training and has_gradients for training, has_gradients, samples in model_py.seen if samples[0] < 100)
    losses = validation_losses(capsys.readouterr().out)
    dataset, model = model_py.build_validation_dataset(), model_py.build_model().eval()
    expected = model_py.compute_loss(model, dataset.tensors).item()
    assert losses == pytest.approx([expected, expected], abs=1e-4)


def test_a_share_of_the_dataset_is_held_out_by_the_seed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = []
    for seed in ("0", "0", "1"):
        model_py = run(tmp_path, monkeypatch, MODEL, NAMES, "--validation-share", "0.3", "--seed", seed)
        trained = joined(samples for training, _, samples in model_py.seen if training)
        evaluated = joined(samples for training, _, samples in model_py.seen if not training)
        assert sorted(trained + evaluated) == list(range(10))
        held_out.append(sorted(evaluated))
    assert held_out[0] == held_out[1] != held_out[2]
    assert len(held_out[0]) == 3
    assert "held out for validation: 3 samples, drawn by the seed" in capsys.readouterr().out


def test_the_validation_set_has_its_own_collate_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = VALIDATION + (
        "\ncollated = []\n"
        "def collate_fn(samples): return torch.utils.data.default_collate(samples)\n"
        "def collate_fn_validation(samples):\n    collated.append(len(samples))\n    return collate_fn(samples)\n"
    )
    names = (*NAMES, "build_validation_dataset", "collate_fn", "collate_fn_validation")
    assert run(tmp_path, monkeypatch, MODEL + more, names).collated == [2, 2, 2, 1]


def test_a_dataset_without_a_full_step_is_no_empty_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODEL.replace("10", "3")
    with pytest.raises(SystemExit, match="the dataset is too small: 3 samples make no step"):
        run(tmp_path, monkeypatch, model, NAMES, "--drop-last")


def test_the_last_short_step_is_left_out_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model_py = run(tmp_path, monkeypatch, MODEL, NAMES, "--drop-last", "--epochs", "2")
    output = capsys.readouterr().out
    assert "left out of each epoch: 2 of 10 samples" in output
    assert output.count("step ") == 4
    assert [len(samples) for _, _, samples in model_py.seen] == [2] * 8


# The function


def value(model: nn.Module, batch: Tensor) -> Tensor:
    return batch.sum()


def test_every_item_weighs_the_same_and_none_means_none() -> None:
    """Means 6 over 1 item and 2 over 3: 12 / 4. A batch without items is NaN and stays out."""
    batches = [(torch.tensor(6.0), [1]), (torch.tensor(2.0), [3]), (torch.tensor(float("nan")), [0])]
    assert evaluate(nn.Identity(), batches, value, CPU).item() == 3.0


def test_losses_are_summed_each_over_its_own_items() -> None:
    def values(model: nn.Module, batch: Tensor) -> Iterator[Tensor]:
        yield batch.sum()
        yield 10 * batch.sum()

    batches = [(torch.tensor(6.0), [1, 1]), (torch.tensor(2.0), [3, 1])]
    assert evaluate(nn.Identity(), batches, values, CPU, num_counts=2).item() == 3.0 + 40.0
    assert evaluate(nn.Identity(), [(batch, counts[:1]) for batch, counts in batches], values, CPU).item() == 33.0


def test_the_model_is_as_it_was_afterwards() -> None:
    model = nn.Dropout()
    modes = []
    evaluate(model, [(torch.ones(1), [1])], lambda m, b: (modes.append(m.training), b.sum())[1], CPU)
    assert modes == [False]
    assert model.training
    evaluate(model.eval(), [(torch.ones(1), [1])], value, CPU)
    assert not model.training


# The probe


PROBED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
BATCH_SIZE, LEARNING_RATE = 8, 0.1
def build_dataset(): return TensorDataset(torch.zeros(8, 1, 16, 16), torch.zeros(8).long())
def compute_loss(model, batch): return nn.functional.cross_entropy(model(batch[0]).mean((2, 3)), batch[1])
def build_model(): return nn.Conv2d(1, 8, 3, padding=1)
"""


def test_a_validation_batch_that_needs_more_than_a_training_step_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    peaks = SimpleNamespace()
    validation = (
        "\ndef build_validation_dataset():\n"
        "    return TensorDataset(torch.zeros(4, 1, {size}, {size}), torch.zeros(4).long())\n"
    )
    for name, size in (("without", None), ("small", 16), ("large", 256)):
        more = "" if size is None else validation.format(size=size)
        Path("model.py").write_text(PROBED + more)
        plan = gradplan.probe("model.py", device="t4")
        setattr(peaks, name, max(trial.peak_allocated_bytes or 0 for trial in plan.evidence.trials))
    assert peaks.small == peaks.without
    assert peaks.large > 8 * 8 * 256 * 256 * 4 > peaks.without  # the activations of 8 large images


def test_an_error_in_evaluation_names_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = VALIDATION.replace("100.0, 107.0", "7.0").replace("reshape(7, 1)", "reshape(7, 1, 1, 1)")
    Path("model.py").write_text(PROBED + more.replace("torch.arange(7) % 3", "torch.zeros(7, 2)"))
    with pytest.raises(gradplan.UserCodeError, match=r"model\.py"):
        gradplan.probe("model.py", device="t4")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--validation-share", "-0.1"), "--validation-share is a part, from 0 to below 1, not -0.1"),
        (("--validation-share", "1"), "--validation-share is a part"),
        (("--max-grad-norm", "-1"), "--max-grad-norm must be above 0, not -1"),
        (("--max-grad-norm", "nan"), "--max-grad-norm must be above 0, not nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, str], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        run(tmp_path, monkeypatch, MODEL, NAMES, *option)


def test_the_smallest_share_holds_out_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, MODEL, NAMES, "--validation-share", "0.001")
    assert "held out for validation: 1 samples" in capsys.readouterr().out


def test_a_loss_of_one_element_is_evaluated_with_counts() -> None:
    batches = [(torch.tensor([6.0]), [1]), (torch.tensor([2.0]), [3])]
    assert evaluate(nn.Identity(), batches, lambda m, b: iter([b, b]), CPU).item() == 6.0
