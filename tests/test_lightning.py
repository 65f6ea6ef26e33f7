"""Lightning modules without a Trainer: loss, optimizer and schedule, whatever form they come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR

import gradplan
from gradplan.probes.errors import UserCodeError
from gradplan.probes.lightning import configure_optimizer
from gradplan.probes.step import scale_learning_rates


class Module(nn.Linear):
    """Has what a LightningModule has; ``configured`` makes what configure_optimizers returns of an optimizer."""

    def __init__(self, configured: Any) -> None:
        super().__init__(2, 1)
        self.configured = configured
        self._trainer: Any = None

    def configure_optimizers(self) -> Any:
        return self.configured(SGD(self.parameters(), lr=1.0))


def halving(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


CONFIGURED = {
    "an optimizer": (lambda optimizer: optimizer, None),
    "a list of one": (lambda optimizer: [optimizer], None),
    "two lists": (lambda optimizer: ([optimizer], [halving(optimizer)]), 10),
    "a dict": (lambda optimizer: {"optimizer": optimizer, "lr_scheduler": halving(optimizer)}, 10),
    "a list of a dict": (lambda optimizer: [{"optimizer": optimizer, "lr_scheduler": halving(optimizer)}], 10),
    "by step": (
        lambda optimizer: {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": halving(optimizer), "interval": "step"},
        },
        1,
    ),
    "by three steps": (
        lambda optimizer: ([optimizer], [{"scheduler": halving(optimizer), "interval": "step", "frequency": 3}]),
        3,
    ),
    "by two epochs": (
        lambda optimizer: ([optimizer], [{"scheduler": halving(optimizer), "interval": "epoch", "frequency": 2}]),
        20,
    ),
}


@pytest.mark.parametrize("form", CONFIGURED)
def test_every_form_gives_the_optimizer_and_its_schedule_in_optimizer_steps(form: str) -> None:
    configured, unit = CONFIGURED[form]
    optimizer, schedule = configure_optimizer(Module(configured), num_steps=100, steps_per_epoch=10)
    assert isinstance(optimizer, SGD)
    assert (schedule is None) == (unit is None)
    if schedule is not None and unit is not None:
        for _ in range(unit - 1):
            optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 1.0
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "configured",
    [
        lambda optimizer: [optimizer, SGD(optimizer.param_groups[0]["params"], lr=0.1)],
        lambda optimizer: ([optimizer], [halving(optimizer), halving(optimizer)]),
        lambda optimizer: ([optimizer], [ReduceLROnPlateau(optimizer)]),
        lambda optimizer: None,
    ],
)
def test_what_cannot_be_accumulated_is_refused(configured: Any) -> None:
    with pytest.raises(TypeError, match="configure_optimizers returned"):
        configure_optimizer(Module(configured), num_steps=100, steps_per_epoch=10)


def test_the_usual_question_to_the_trainer_is_answered() -> None:
    class Asking(Module):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [LinearLR(optimizer, total_iters=self._trainer.estimated_stepping_batches)]

    module = Asking(None)
    _, schedule = configure_optimizer(module, num_steps=37, steps_per_epoch=10)
    assert schedule is not None
    assert schedule.scheduler.total_iters == 37
    assert module._trainer is None


@pytest.mark.parametrize("make", [halving, lambda optimizer: OneCycleLR(optimizer, max_lr=4.0, total_steps=10)])
def test_a_schedule_that_was_built_first_follows_the_scaled_rate(make: Any) -> None:
    rates = []
    for factor in (1.0, 3.0):
        optimizer, schedule = configure_optimizer(
            Module(lambda o: ([o], [{"scheduler": make(o), "interval": "step"}])), 10, 5
        )
        assert schedule is not None
        scale_learning_rates(optimizer, factor)
        schedule.scale(factor)
        rates.append([])
        for _ in range(8):
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert rates[1] == pytest.approx([3.0 * rate for rate in rates[0]])


def test_where_it_stands_is_saved() -> None:
    configured = CONFIGURED["by three steps"][0]
    optimizer, schedule = configure_optimizer(Module(configured), 100, 10)
    assert schedule is not None
    for _ in range(4):
        optimizer.step()
        schedule.step()
    other, resumed = configure_optimizer(Module(configured), 100, 10)
    assert resumed is not None
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(2):
        other.step()
        resumed.step()
    assert other.param_groups[0]["lr"] == 0.25


MODEL = """
import torch
from torch import nn

class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
    def training_step(self, batch, batch_idx):
        return {"loss": nn.functional.cross_entropy(self.net(batch[0]), batch[1]), "shown": 1}
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]

def build_model():
    return Lit()

def build_dataset():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

BATCH_SIZE = 8
"""


def test_a_module_is_probed_and_trained_with_its_own_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    plan = gradplan.probe("model.py", device="t4", effective_batch=16)
    assert (plan.optimizer, plan.base_learning_rate, plan.learning_rate) == ("SGD", 0.5, 1.0)
    assert plan.recipe.lightning == ("training_step", "configure_optimizers", "schedule")
    gradplan.write_script(plan, "train.py")
    monkeypatch.setattr("sys.argv", ["train.py", "--device", "cpu", "--epochs", "3"])
    namespace = {"__name__": "train_under_test", "__file__": str(tmp_path / "train.py")}
    exec(compile(Path("train.py").read_text(), "train.py", "exec"), namespace)
    namespace["main"]()
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [float(line.split("  lr ")[1].split()[0]) for line in steps] == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    torch.load("checkpoints/model.pt")


def test_two_optimizers_are_refused_with_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL.replace("return [optimizer], [", "return [optimizer, optimizer], ["))
    with pytest.raises(UserCodeError, match="configure_optimizers returned 2 optimizers; return one optimizer"):
        gradplan.probe("model.py", device="t4")
