"""A loss that runs a backward of its own, and what that means for the form of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradplan
from gradplan.probes.backwards import own_backwards
from gradplan.probes.step import run_loss_by_loss, run_losses_together


def test_only_the_users_own_backwards_are_counted() -> None:
    model = nn.Linear(2, 2)

    def plain(model: nn.Module, batch: torch.Tensor) -> object:
        yield model(batch).sum()
        yield checkpoint(model, batch, use_reentrant=True).sum()

    def cut(model: nn.Module, batch: torch.Tensor) -> object:
        features = model(batch)
        leaf = features.detach().requires_grad_()
        yield leaf.sum()
        features.backward(leaf.grad)

    autocast, batch = torch.autocast("cpu", enabled=False), torch.ones(1, 2, requires_grad=True)
    for run, loss, expected in (
        (run_loss_by_loss, plain, 0),
        (run_losses_together, plain, 0),
        (run_loss_by_loss, cut, 1),
    ):
        with own_backwards() as num_own_backwards:
            run(model, batch, loss, 1.0, autocast)
        assert num_own_backwards() == expected
    with own_backwards() as num_own_backwards:
        torch.autograd.backward(model(batch).sum())
    assert num_own_backwards() == 1


PARTLY_CUT = """
import torch
from torch import nn
BATCH_SIZE, LEARNING_RATE = 64, 0.1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, {width}), nn.GELU(), nn.Linear({width}, 8))
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)

def build_model():
    return Net()

def build_batch(batch_size):
    return torch.randn(batch_size, 8)

def compute_loss(model, batch):
    yield model.first(model.trunk(batch)).square().mean()
    features = model.trunk(batch)
    cut = features.detach().requires_grad_()
    yield model.second(cut).square().mean()
    if cut.grad is not None:
        features.backward(cut.grad)

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)
"""


@pytest.mark.parametrize("width", [64, 4_000_000])
def test_a_trunk_that_is_cut_for_one_loss_only_has_no_joint_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Both forms give every parameter a gradient; only loss by loss it is the whole one, whatever the size."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(PARTLY_CUT.format(width=width))
    plan = gradplan.probe("model.py", device="a100-80gb")
    assert plan.backward == "sequential"
    assert plan.evidence.backward_peaks == ()
    assert not any(warning.code == "sequential-not-exact" for warning in plan.warnings)
