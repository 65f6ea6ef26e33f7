"""The main job as a person does it, from the command line to a loss that falls: separate processes throughout."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gradplan.probes.simulator.catalogue import find

# Thirty-two steps of 64 numbers through a wide layer: about half a mebibyte of activations a sample.
MODEL = '''
"""A small sequence model on data that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from planner import WIDTH

BATCH_SIZE = 64
LEARNING_RATE = 3e-3
print("importing the model")


@dataclass
class Batch:
    inputs: Tensor
    targets: Tensor


class Sequences(Dataset):
    """Which of three waves is it?"""

    def __init__(self) -> None:
        self.names = (Path(__file__).parent / "waves.txt").read_text().split()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind = index % len(self.names)
        times = torch.arange(32).unsqueeze(1) + torch.linspace(0, 1 + kind, 64)
        return torch.sin(times * (kind + 1) + index), kind


def build_dataset() -> Dataset:
    return Sequences()


def collate_fn(samples: list[tuple[Tensor, int]]) -> Batch:
    return Batch(torch.stack([inputs for inputs, _ in samples]), torch.tensor([kind for _, kind in samples]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.wide(inputs).mean(1))


def build_model() -> nn.Module:
    return Net()


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    print("computing the loss")
    return nn.functional.cross_entropy(model(batch.inputs), batch.targets)
'''
# Ctrl-C as an exception would end up here, or in a C++ function of torch that aborts.
STUBBORN = MODEL.replace(
    'print("computing the loss")',
    """print("computing the loss", flush=True)
    while True:
        try:
            model(batch.inputs)
        except BaseException:
            pass""",
)


def write_project(folder: Path, model: str = MODEL) -> Path:
    folder.mkdir()
    (folder / "model.py").write_text(model)
    (folder / "planner.py").write_text("WIDTH = 1024\n")
    (folder / "waves.txt").write_text("slow middle fast")
    return folder


def command(*extra: str) -> list[str]:
    # 48 MiB besides the CUDA context: some twenty samples at once.
    memory = find("rtx-4090").context_bytes // 2**20 + 48
    probe = ["-m", "gradplan", "probe", "model.py", "--device", "rtx-4090", "--memory", f"{memory}MiB"]
    return [sys.executable, *probe, *extra]


def run(folder: Path, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder in which the main job was done, and what that printed."""
    folder = write_project(tmp_path_factory.mktemp("main") / "job")
    return folder, run(folder, *command())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


Project = tuple[Path, subprocess.CompletedProcess[str]]


def test_one_command_shows_the_settings_and_writes_the_plan_and_the_script(project: Project) -> None:
    folder, done = project
    assert files(folder) == ["gradplan.json", "model.py", "planner.py", "train.py", "waves.txt"]
    plan = json.loads((folder / "gradplan.json").read_text())
    assert plan["accumulation_steps"] > 1
    assert sum(plan["micro_batch_sizes"]) == plan["effective_batch_size"] == 64
    assert plan["micro_batch_size"] <= plan["max_micro_batch_size"] < 64
    assert plan["limited_by"] == "memory"
    assert (plan["learning_rate"], plan["learning_rate_factor"]) == (0.003, 1)
    assert plan["recipe"]["dataset_length"] == 1000
    assert str(plan["micro_batch_size"]) in done.stdout
    assert done.stdout.endswith("now type\n\n    python train.py\n\n")


def test_what_the_user_prints_is_on_standard_error_alone(project: Project) -> None:
    _, done = project
    for said in ("importing the model", "computing the loss"):
        assert said in done.stderr
        assert said not in done.stdout


def test_the_size_was_traced_and_the_next_was_tried(project: Project) -> None:
    plan = json.loads((project[0] / "gradplan.json").read_text())
    trials = {trial["micro_batch_size"]: trial for trial in plan["evidence"]["trials"]}
    largest = plan["max_micro_batch_size"]
    assert (trials[largest]["fits"], trials[largest]["source"]) == (True, "traced")
    assert trials[largest]["required_bytes"] <= plan["evidence"]["limit_bytes"]
    assert not trials[largest + 1]["fits"]


def test_the_script_that_was_written_lowers_the_loss(project: Project, tmp_path: Path) -> None:
    folder, _ = project
    moved = tmp_path / "elsewhere"  # the script finds its model from wherever it is started, without gradplan
    shutil.copytree(folder, moved)
    hidden = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    script = str(moved / "train.py")
    options = ["--epochs", "2", "--max-steps", "25", "--device", "cpu"]
    done = run(tmp_path, sys.executable, script, *options, env={**os.environ, **hidden})
    losses = [float(loss) for loss in re.findall(r"^step \d+/25  loss ([0-9.]+)  lr ", done.stdout, re.MULTILINE)]
    assert len(losses) == 25
    assert sum(losses[-3:]) / 3 < 0.7 * losses[0]
    assert files(tmp_path / "checkpoints") == ["checkpoint.pt", "model.pt"]


def test_the_same_command_gives_the_same_bytes_and_json_prints_the_plan_alone(project: Project, tmp_path: Path) -> None:
    folder, _ = project
    again = write_project(tmp_path / "job")
    printing = MODEL.replace('print("importing the model")', 'import os; os.system("echo from a child process")')
    (again / "model.py").write_text(printing)
    done = run(again, *command("--json", "-q"), env={**os.environ, "PYTHONHASHSEED": "7"})
    for name in ("gradplan.json", "train.py"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert done.stdout == (folder / "gradplan.json").read_text()
    assert "from a child process" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_while_tracing_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    folder = write_project(tmp_path / "job", STUBBORN)
    process = subprocess.Popen(
        command("-v"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "computing the loss" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert files(folder) == ["model.py", "planner.py", "waves.txt"]
    assert not any(child.is_running() for child in children)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
