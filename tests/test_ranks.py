"""Several processes train what one trains: rendered scripts under gloo on the CPU, against one large batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_scripts import NAMES, SENTENCES, plan_for, write_script

from gradplan.probes.ranks import buckets

# Sentences of 1 or 12 tokens, an embedding that only some samples use, and a loss that is a mean over tokens.
MODEL = (
    SENTENCES
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.rare = nn.Linear(1, 4), nn.Linear(1, 4)
    def forward(self, tokens):
        inputs = (tokens.clamp(min=0).unsqueeze(-1) / 4).to(self.plain.weight.dtype)
        scores = self.plain(inputs)
        uses_rare = (tokens == 3).any(1)
        return scores + uses_rare[:, None, None] * self.rare(inputs) if uses_rare.any() else scores

def build_model():
    torch.manual_seed(1)
    return Net().to({dtype})

def build_dataset():
    return Sentences({length})

def compute_loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=-100)

def build_optimizer(model, lr):
    return torch.optim.{optimizer}(model.parameters(), lr=lr)

def build_scheduler(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
"""
)
COUNTED = (*NAMES, "collate_fn", "count_items")
YIELDED = """
def count_items(tokens):
    return (tokens != -100).sum(), len(tokens)

def compute_loss(model, tokens):
    yield nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=-100)
    yield model.plain(tokens[:, :1].to(model.plain.weight.dtype)).square().mean()
"""


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def train(folder: Path, num_ranks: int, *options: str) -> tuple[dict[str, Tensor], str]:
    """As torchrun starts it, without its watcher; the weights and what the first rank printed."""
    out = folder / f"out{num_ranks}"
    command = [sys.executable, str(folder / "train.py"), "--device", "cpu", "--out", str(out), *options]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(num_ranks):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, cwd=folder, **pipes))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "".join(outputs)
    assert all("step 1/" not in output for output in outputs[1:])
    return torch.load(out / "model.pt", weights_only=True), outputs[0]


def relative_difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    ours_flat = torch.cat([ours[name].flatten() for name in reference])
    reference_flat = torch.cat([weight.flatten() for weight in reference.values()])
    return ((ours_flat - reference_flat).norm() / reference_flat.norm()).item()


@pytest.mark.parametrize(
    ("length", "window", "micro", "dtype", "optimizer", "more", "changes", "tolerance"),
    [
        (21, 8, 3, "float32", "SGD", "", {}, 1e-6),
        (21, 8, 3, "float64", "AdamW", "", {}, 1e-9),
        (17, 4, 1, "float64", "SGD", "", {}, 1e-12),  # the last step has one sample: the second rank has none
        (22, 6, 2, "float64", "AdamW", YIELDED, {"num_counts": 2, "backward": "sequential"}, 1e-9),
        (22, 6, 2, "float64", "AdamW", YIELDED, {"num_counts": 2, "backward": "joint"}, 1e-9),
    ],
)
def test_two_ranks_end_where_one_process_does(
    tmp_path: Path, length: int, window: int, micro: int, dtype: str, optimizer: str, more: str,
    changes: dict[str, Any], tolerance: float,
) -> None:  # fmt: skip
    model = MODEL.format(length=length, dtype=f"torch.{dtype}", optimizer=optimizer) + more
    write_script(tmp_path, model, plan_for(COUNTED, window, micro, **{"num_counts": 1, **changes}))
    alone, output = train(tmp_path, 1)
    together, of_ranks = train(tmp_path, 2)
    assert relative_difference(together, alone) < tolerance
    assert [line.split()[3] for line in of_ranks.splitlines() if line.startswith("step ")] == [
        line.split()[3] for line in output.splitlines() if line.startswith("step ")
    ]


def test_tokens_are_counted_over_both_ranks(tmp_path: Path) -> None:
    """One rank has a token of gradient 6, the other three of gradient 2: 12 / 4, neither 4 nor 1.5."""
    model = (
        MODEL.format(length=2, dtype="torch.float64", optimizer="SGD")
        + """
class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

def build_model(): return Weight()
def build_dataset(): return [[6.0], [2.0, 2.0, 2.0]]
def collate_fn(samples): return samples
def count_items(samples): return sum(map(len, samples))
def compute_loss(model, samples):
    values = torch.tensor([value for sample in samples for value in sample])
    return (model.weight * values).mean()
def build_optimizer(model, lr): return torch.optim.SGD(model.parameters(), lr=1.0)
"""
    )
    write_script(tmp_path, model, plan_for(COUNTED, 2, 1, num_counts=1))
    assert train(tmp_path, 2)[0]["weight"].item() == pytest.approx(-3.0)


BATCH_NORM = """
def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, momentum=None), nn.Linear(7, 3)).double()

def build_dataset():
    inputs = torch.arange(80.0, dtype=torch.float64).reshape(16, 5).sin()
    return torch.utils.data.TensorDataset(inputs, torch.arange(16) % 3)

def build_validation_dataset():
    return build_dataset()

def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=0.0)
"""


def test_batch_norm_is_averaged_before_evaluation_and_saving(tmp_path: Path) -> None:
    """With a plain average over equal micro-batches and no learning, two ranks have the mean that one has."""
    names = (*NAMES, "build_validation_dataset")
    model = MODEL.format(length=2, dtype="torch.float64", optimizer="SGD") + BATCH_NORM
    write_script(tmp_path, model, plan_for(names, 8, 4, has_batch_norm=True))
    alone, output = train(tmp_path, 1)
    together, of_ranks = train(tmp_path, 2)
    torch.testing.assert_close(together["1.running_mean"], alone["1.running_mean"])
    losses = [[line.split("validation loss ")[1] for line in text.splitlines() if "validation" in line] for text in
              (output, of_ranks)]  # fmt: skip
    assert losses[0] == losses[1]
    assert len(losses[0]) == 1


def test_a_number_of_ranks_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    model = MODEL.format(length=9, dtype="torch.float32", optimizer="SGD")
    write_script(tmp_path, model, plan_for(COUNTED, 5, 2, num_counts=1))
    with pytest.raises(AssertionError, match="2 ranks cannot share a batch of 5 equally"):
        train(tmp_path, 2)


STOPS = """
import os
calls = 0
compute_plainly = compute_loss
def compute_loss(model, tokens):
    global calls
    calls += 1
    if os.environ.get("STOP_AT") == str(calls):
        os._exit(9)
    return compute_plainly(model, tokens)
"""


def test_two_ranks_that_were_stopped_go_on_as_they_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODEL.format(length=21, dtype="torch.float64", optimizer="AdamW") + STOPS
    write_script(tmp_path, model, plan_for(COUNTED, 8, 3, num_counts=1))
    whole, _ = train(tmp_path, 2, "--epochs", "2")
    monkeypatch.setenv("STOP_AT", "8")
    with pytest.raises(AssertionError):
        train(tmp_path, 2, "--epochs", "2", "--save-every", "2")
    monkeypatch.delenv("STOP_AT")
    checkpoint = tmp_path / "out2" / "checkpoint.pt"
    assert torch.load(checkpoint, weights_only=True)["step"] < 6
    resumed, output = train(tmp_path, 2, "--resume", str(checkpoint))
    assert "going on after step" in output
    assert relative_difference(resumed, whole) == 0.0


def test_sparse_gradients_are_refused_with_what_to_do(tmp_path: Path) -> None:
    model = MODEL.format(length=4, dtype="torch.float32", optimizer="SparseAdam") + (
        "\ndef build_model(): return nn.Embedding(5, 2, sparse=True)\n"
        "def compute_loss(model, tokens): return model(tokens.clamp(min=0)).sum()\n"
    )
    write_script(tmp_path, model, plan_for((*NAMES, "collate_fn"), 2, 1))
    with pytest.raises(AssertionError, match="sparse gradients cannot be added up over ranks"):
        train(tmp_path, 2)
    assert train(tmp_path, 1)[0]["weight"].abs().sum() > 0


def test_buckets_hold_neighbours_of_one_type() -> None:
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(9), torch.zeros(2, dtype=torch.float64), torch.zeros(1)]
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors, num_bytes=32)] == [
        [4, 4],
        [9],
        [2],
        [1],
    ]
    assert list(buckets([])) == []


OWN_BUFFERS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(1, 4)
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("kinds", torch.arange(3, dtype=torch.int16))
    def forward(self, tokens):
        inputs = tokens.clamp(min=0).unsqueeze(-1).to(self.mean.dtype)
        if self.training:
            self.mean.lerp_(inputs.mean(), 0.1)
        return self.plain(inputs - self.mean.clone())

def build_model():
    torch.manual_seed(1)
    return Net().double()
"""


def test_buffers_of_the_models_own_are_those_of_the_first_rank_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODEL.format(length=32, dtype="torch.float64", optimizer="SGD") + OWN_BUFFERS + STOPS
    write_script(tmp_path, model, plan_for(COUNTED, 8, 4, num_counts=1))
    whole, _ = train(tmp_path, 2, "--save-every", "2")
    monkeypatch.setenv("STOP_AT", "4")
    with pytest.raises(AssertionError):
        train(tmp_path, 2, "--save-every", "2")
    monkeypatch.delenv("STOP_AT")
    resumed, output = train(tmp_path, 2, "--resume", str(tmp_path / "out2" / "checkpoint.pt"))
    assert "going on after step 2" in output
    assert relative_difference(resumed, whole) == 0.0
