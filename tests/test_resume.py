"""A run that was killed and resumed ends with the same weights, bit for bit; another plan's checkpoint is refused."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_scripts import NAMES, plan_for, write_script

from gradplan.probes.checkpoints import check_same_plan, load_checkpoint, save_whole
from gradplan.probes.drawing import MicroBatches, batches_of_stream, seed_from, seed_host

# Dropout, BatchNorm, momentum, a schedule, and samples that are drawn with Python's, NumPy's and torch's numbers.
MODEL = """
import random
import time
import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

class Noisy(Dataset):
    def __len__(self):
        return 30
    def __getitem__(self, index):
        noise = torch.randn(5) + random.random() + numpy.random.rand()
        time.sleep({sleep})
        return index * torch.ones(5) / 30 + 0.1 * noise, index % 3

def build_model():
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))

def build_dataset():
    return Noisy()

def compute_loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)

def build_optimizer(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)
"""
MODEL_NAMES = tuple(name for name in NAMES if name != "build_scheduler")
WINDOW, MICRO, EPOCHS = 8, 3, 3
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in range(13):
            yield torch.randn(5) + index, index % 3

def build_dataset():
    return Stream()
"""
BATCHES = """
def build_batch(batch_size):
    return torch.randn(batch_size, 5), torch.randint(3, (batch_size,))
"""


def start(folder: Path, *options: str, **changes: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(folder / "train.py"), "--device", "cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def finish(folder: Path, *options: str) -> str:
    process = start(folder, *options)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / "model.pt", weights_only=True)
    return found


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    model = MODEL.format(sleep=0.001)
    write_script(tmp_path, model, plan_for(MODEL_NAMES, WINDOW, MICRO, has_batch_norm=True))
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_at_random_moments_and_resumed_it_ends_with_the_same_weights(project: Path, num_workers: int) -> None:
    options = ["--epochs", str(EPOCHS), "--save-every", "1", "--workers", str(num_workers)]
    finish(project, *options, "--out", str(project / "whole"))
    moments = random.Random(num_workers)
    out, num_kills, resume = project / "killed", 0, []
    while not (out / "model.pt").exists():
        process = start(project, *options, *resume, "--out", str(out))
        assert process.stdout is not None
        for _ in range(moments.randint(2, 5)):
            process.stdout.readline()
        if not (out / "model.pt").exists():
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
            num_kills += 1
        process.stdout.read()
        process.wait(timeout=60)
        if (out / "checkpoint.pt").exists():
            resume = ["--resume", str(out / "checkpoint.pt")]
    assert num_kills >= 2
    assert are_equal(weights(out), weights(project / "whole"))


def test_the_number_of_workers_changes_nothing(project: Path) -> None:
    for num_workers in ("0", "2"):
        finish(project, "--workers", num_workers, "--out", str(project / num_workers))
    assert are_equal(weights(project / "0"), weights(project / "2"))


@pytest.mark.parametrize(
    ("more", "names", "changes"),
    [
        (STREAM, (), {"is_stream": True}),
        (BATCHES, ("build_dataset",), {}),
        ("\ndef count_items(batch): return len(batch[1])\n", (), {"num_counts": 1}),
        ("", (), {"precision": "16-mixed"}),
    ],
    ids=["stream", "build_batch", "count_items", "16-mixed"],
)
def test_every_kind_of_run_resumes_exactly(tmp_path: Path, more: str, names: tuple[str, ...], changes: Any) -> None:
    kept = tuple(name for name in MODEL_NAMES if name not in names)
    kept += ("build_batch",) if names else ()
    kept += ("count_items",) if "num_counts" in changes else ()
    write_script(tmp_path, MODEL.format(sleep=0) + more, plan_for(kept, WINDOW, MICRO, has_batch_norm=True, **changes))
    finish(tmp_path, "--max-steps", "4", "--out", str(tmp_path / "whole"), "--save-every", "2")
    out = tmp_path / "part"
    process = start(tmp_path, "--max-steps", "4", "--out", str(out), "--save-every", "2")
    assert process.stdout is not None
    while not (out / "checkpoint.pt").exists() and process.poll() is None:
        process.stdout.readline()
    process.kill()
    process.communicate()
    output = finish(tmp_path, "--resume", str(out / "checkpoint.pt"), "--out", str(out))
    assert "going on after step" in output
    assert are_equal(weights(out), weights(tmp_path / "whole"))


def test_resuming_in_the_middle_of_an_epoch_sees_each_sample_once(project: Path, tmp_path: Path) -> None:
    spy = '\nimport pathlib\ndef note(i): open(pathlib.Path(__file__).parent / "seen.txt", "a").write(f"{i}\\n")\n'
    model = MODEL.format(sleep=0).replace("        noise =", "        note(index)\n        noise =")
    write_script(tmp_path, model + spy, plan_for(MODEL_NAMES, WINDOW, MICRO, has_batch_norm=True))
    out = tmp_path / "out"
    finish(tmp_path, "--max-steps", "2", "--out", str(out))
    seen_before = (tmp_path / "seen.txt").read_text().split()
    checkpoint = torch.load(out / "checkpoint.pt", weights_only=True)
    checkpoint["plan"]["steps"], checkpoint["arguments"]["max_steps"] = 4, None
    torch.save(checkpoint, out / "checkpoint.pt")
    finish(tmp_path, "--resume", str(out / "checkpoint.pt"), "--out", str(out))
    seen = (tmp_path / "seen.txt").read_text().split()
    assert len(seen_before) == 2 * WINDOW
    assert sorted(map(int, seen)) == list(range(30))


def test_what_was_given_is_taken_from_the_checkpoint(project: Path) -> None:
    out = project / "out"
    finish(project, "--epochs", "2", "--seed", "7", "--max-grad-norm", "0.5", "--out", str(out))
    checkpoint = load_checkpoint(out / "checkpoint.pt")
    assert checkpoint["step"] == 8
    assert {"epochs": 2, "seed": 7, "max_grad_norm": 0.5}.items() <= checkpoint["arguments"].items()
    output = finish(project, "--resume", str(out / "checkpoint.pt"), "--out", str(out))
    assert "8 optimizer steps" in output
    assert "going on after step 8" in output


@pytest.mark.parametrize(
    ("options", "changes", "difference"),
    [
        ((), {"window": 6}, r"effective batch 8.* there, effective batch 6.* here"),
        ((), {"micro": 4}, "largest micro-batch 3 there, largest micro-batch 4 here"),
        ((), {"precision": "bf16-mixed"}, "precision 32-true there, precision bf16-mixed here"),
        (("--seed", "3"), {}, "seed 0 there, seed 3 here"),
        (("--learning-rate", "7"), {}, "learning rate 0.1 there, learning rate 7.0 here"),
        (("--epochs", "5"), {}, "steps 4 there, steps 20 here"),
    ],
)
def test_the_checkpoint_of_another_plan_is_refused(
    project: Path, options: tuple[str, ...], changes: dict[str, Any], difference: str
) -> None:
    out = project / "out"
    finish(project, "--out", str(out))
    before = (out / "checkpoint.pt").read_bytes()
    sizes = {"window": WINDOW, "micro": MICRO, **changes}
    write_script(project, MODEL.format(sleep=0), plan_for(MODEL_NAMES, has_batch_norm=True, **sizes))
    process = start(project, "--resume", str(out / "checkpoint.pt"), "--out", str(out), *options)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(rf"checkpoint\.pt is of another plan: {difference}; start it as", output), output
    assert (out / "checkpoint.pt").read_bytes() == before


SHUFFLED = """
def build_dataset():
    indices = list(range(30))
    random.shuffle(indices)
    return torch.utils.data.Subset(Noisy(), indices)
"""


def test_a_dataset_that_is_shuffled_when_it_is_built_is_the_same_in_every_process(project: Path) -> None:
    write_script(project, MODEL.format(sleep=0) + SHUFFLED, plan_for(MODEL_NAMES, WINDOW, MICRO, has_batch_norm=True))
    for name in ("one", "other"):
        finish(project, "--out", str(project / name))
    assert are_equal(weights(project / "one"), weights(project / "other"))


def test_new_checkpoints_go_to_the_folder_of_the_old_one(project: Path) -> None:
    finish(project, "--out", str(project / "run"))
    before = (project / "run" / "checkpoint.pt").stat().st_mtime_ns
    finish(project, "--resume", str(project / "run" / "checkpoint.pt"), "--epochs", "1")
    assert (project / "run" / "model.pt").stat().st_mtime_ns > before


# Checkpoint files


def test_a_file_that_is_no_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(ValueError, match=r"is a folder: name the checkpoint\.pt"):
        load_checkpoint(tmp_path)
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ValueError, match="damaged, or no checkpoint"):
        load_checkpoint(tmp_path / "text.pt")
    torch.save({"weight": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"is no checkpoint .* called checkpoint\.pt"):
        load_checkpoint(tmp_path / "model.pt")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this code ran",)


def test_loading_a_checkpoint_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": Evil(), "optimizer": {}, "step": 1, "plan": {}}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(tmp_path / "evil.pt")
    assert "this code ran" not in capsys.readouterr().out


def test_a_checkpoint_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_whole({"step": 1}, path)

    class Failing:
        def __reduce__(self) -> Any:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        save_whole({"step": Failing()}, path)
    assert torch.load(path) == {"step": 1}


def test_only_what_differs_is_named() -> None:
    check_same_plan(Path("c.pt"), {"a": 1, "b": 2}, {"a": 1, "b": 2})
    with pytest.raises(
        ValueError, match=r"^c\.pt is of another plan: b 2 there, b 3 here; start it as it was, or anew$"
    ):
        check_same_plan(Path("c.pt"), {"a": 1, "b": 2}, {"a": 1, "b": 3})


def test_numpy_numbers_in_a_state_can_be_loaded_again(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    rate = numpy.float64(0.1)
    state = {"model": {}, "optimizer": {"param_groups": [{"lr": rate, "betas": (rate, 0.9)}]}, "step": 1, "plan": {}}
    save_whole(state, tmp_path / "checkpoint.pt")
    assert load_checkpoint(tmp_path / "checkpoint.pt") == state


# Random numbers


class Drawn:
    def __getitem__(self, index: int) -> tuple[float, float]:
        return random.random(), torch.rand(()).item()


def test_a_samples_numbers_follow_from_seed_epoch_and_index_alone() -> None:
    batches = MicroBatches(Drawn(), list, seed=1)
    alone = batches[0, [5]][0]
    assert batches[0, [2, 5, 7]][1] == alone
    assert batches[1, [5]][0] != alone
    assert MicroBatches(Drawn(), list, seed=2)[0, [5]][0] != alone
    assert batches[0, [6]][0] != alone


def test_drawing_samples_leaves_the_outer_numbers_as_they_were() -> None:
    seed_host(3)
    expected = random.random(), torch.rand(()).item()
    seed_host(3)
    MicroBatches(Drawn(), list, seed=1)[0, [1, 2]]
    next(batches_of_stream([1.0, 2.0], list, [(1, 1)], seed=1))
    assert (random.random(), torch.rand(()).item()) == expected


def test_the_collate_function_is_seeded_too() -> None:
    batches = MicroBatches([0, 1, 2], lambda samples: torch.rand(()).item(), seed=1)
    assert batches[0, [0, 1]] == batches[0, [0, 1]] != batches[0, [0, 2]]


def test_seeds_of_neighbours_differ() -> None:
    seeds = {seed_from(seed, epoch, index) for seed in range(20) for epoch in range(20) for index in range(20)}
    assert len(seeds) == 20**3


def test_a_stream_starts_again_and_goes_on_where_it_was() -> None:
    pieces = [(0, 2), (1, 2), (0, 3)]
    whole = list(batches_of_stream(range(5), list, pieces, seed=0))
    assert whole == [[0, 1], [3, 4], [0, 1, 2]]
    assert list(batches_of_stream(range(5), list, [(5, 3)], seed=0)) == whole[2:]
    with pytest.raises(ValueError, match="dataset is empty"):
        list(batches_of_stream([], list, pieces, seed=0))
