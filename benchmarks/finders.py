"""Trials that each batch-size finder needs to find a maximum that is known, and what it answers.

    pip install lightning accelerate batch-finder
    python benchmarks/finders.py [--limits N,N,...] [--json]

The others run on the CPU, each in a process and a folder of its own. Their code is what was installed; the model's
forward raises CUDA's out-of-memory error for more samples than the true maximum. A trial is what the finder itself
takes for one: three training steps in Lightning, one call of the decorated function in accelerate, a forward and
backward in batch-finder. The models write down each batch that they see, and "ever run" asks them: did a forward with
just the size that was answered go through?

batch-finder starts at 512, as it does on a GPU, and does not wait between trials. The row with peaks invents one
thing more, the readings of torch.cuda, from the same line as gradplan's device. The row without takes its plain
doubling: it would else go by the free memory of the machine that this runs on.

gradplan is run from the command line on an invented device with the same maximum. A hint is what its simulation
would have said, here 5 % off (by one sample at least). A trial is two whole optimizer steps. Memory grows by the same
bytes with each sample here, which is the best case for whoever reads peaks.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.20 GiB is free."
)
SEEN, RESULT = "seen.txt", "result.json"  # in the folder of one finder
FIXED, PER_SAMPLE, OPTIMIZER, GRADIENT = 2**30, 2**24, 2**29, 2**28
COLUMNS = f"{'':32} trials  out of memory  answer  of the maximum  ever run"
MODEL = f"""
import torch
from torch import nn

BATCH_SIZE = 262144
LEARNING_RATE = 1e-3

def build_model():
    return nn.Linear(4, 1)

def build_batch(batch_size):
    return torch.randn(batch_size, 4)

def compute_loss(model, batch):
    loss = model(batch).square().mean()
    if type(batch) is torch.Tensor:  # not one that is only traced
        with open("{SEEN}", "a") as seen:
            print(len(batch), 1, file=seen)
    return loss
"""


@dataclass(frozen=True)
class Row:
    """What one finder did. ``forward_passes`` counts those that went through."""

    trials: int
    out_of_memory: int
    answer: int
    ever_run: bool
    forward_passes: int

    def line(self, limit: int) -> str:
        share, ever_run = 100 * self.answer / limit, "yes" if self.ever_run else "no"
        return f"{self.trials:6}  {self.out_of_memory:13}  {self.answer:6}  {share:12.1f} %  {ever_run:>8}"


class FinderError(Exception):
    """A finder failed; the message is the last line that it wrote."""


class Tiny(torch.nn.Module):
    """A linear layer for up to ``limit`` samples. Each forward adds a line to a file: samples, 1 if they fitted."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        fits = len(rows) <= self.limit
        with open(SEEN, "a") as seen:
            print(len(rows), int(fits), file=seen)
        if not fits:
            raise torch.OutOfMemoryError(MESSAGE)
        outputs: torch.Tensor = self.layer(rows)
        return outputs


def seen_batches(folder: Path) -> list[tuple[int, bool]]:
    """(samples, did they fit) of every forward pass."""
    file = folder / SEEN
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(size), fitted == "1") for size, fitted in (line.split() for line in lines)]


def needed_bytes(size: int) -> int:
    """Of the invented devices."""
    return FIXED + PER_SAMPLE * size + OPTIMIZER + GRADIENT


def total_bytes(limit: int) -> int:
    """Of a device where ``limit`` samples fit, with half a sample to spare."""
    return needed_bytes(limit) + PER_SAMPLE // 2


def lightning(limit: int, mode: str) -> tuple[int, int | None]:
    """(trials, answer) of PyTorch Lightning's BatchSizeFinder."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import batch_size_scaling
    from lightning.pytorch.tuner.tuning import Tuner

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2  # the finder's default start: its first trial runs what stands here, whatever the start
            self.model = Tiny(limit)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch[0]).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
            rows = torch.utils.data.TensorDataset(torch.zeros(2**16, 4))
            return torch.utils.data.DataLoader(rows, self.batch_size)

    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(shown, False)
    trainer = pl.Trainer(accelerator="cpu", **quiet)
    trial = batch_size_scaling._try_loop_run
    with mock.patch.object(batch_size_scaling, "_try_loop_run", wraps=trial) as counted:
        answer = Tuner(trainer).scale_batch_size(Module(), mode=mode)
    return counted.call_count, answer


def accelerate(limit: int, start: int) -> tuple[int, int | None]:
    """(trials, answer) of accelerate's decorator."""
    from accelerate.utils import find_executable_batch_size

    tried = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        Tiny(limit)(torch.zeros(batch_size, 4)).mean().backward()
        return batch_size

    answer = find_executable_batch_size(train, starting_batch_size=start)()
    return len(tried), answer


def batch_finder(limit: int, has_peaks: bool) -> tuple[int, int | None]:
    """(trials, answer) of batch-finder, whose trials may be processes: they are counted by what the model wrote."""
    finder = importlib.import_module("batch_finder.batch_finder")
    settings: dict[str, Any] = {"use_subprocess": False} if has_peaks else {"memory_guided": False}
    readings: dict[str, Any] = {
        "reset_peak_memory_stats": lambda device: None,
        "synchronize": lambda device: None,
        "max_memory_allocated": lambda device: needed_bytes(seen_batches(Path())[-1][0]),
        "get_device_properties": lambda device: SimpleNamespace(total_memory=total_bytes(limit)),
    }
    gpus = mock.patch.object(finder, "_resolve_cuda_mem_devices", return_value=[0] if has_peaks else [])
    with gpus, mock.patch.multiple(torch.cuda, **readings):
        shape = finder.find_max_minibatch(
            functools.partial(Tiny, limit),
            device=torch.device("cpu"),
            input_shapes=(-1, 4),
            initial_value=512,
            delay=0,
            **settings,
        )
    return len(seen_batches(Path())), shape and shape[0]


OTHERS: dict[str, tuple[str, Callable[[int], tuple[int, int | None]]]] = {
    "Lightning, power": ("lightning", functools.partial(lightning, mode="power")),
    "Lightning, binsearch": ("lightning", functools.partial(lightning, mode="binsearch")),
    "accelerate from 2048": ("accelerate", functools.partial(accelerate, start=2048)),
    "accelerate from 8192": ("accelerate", functools.partial(accelerate, start=8192)),
    "batch-finder, errors only": ("batch-finder", functools.partial(batch_finder, has_peaks=False)),
    "batch-finder, peaks": ("batch-finder", functools.partial(batch_finder, has_peaks=True)),
}
GRADPLAN: dict[str, tuple[bool, Callable[[int], int | None]]] = {
    "gradplan, errors only": (False, lambda limit: None),
    "gradplan, peaks": (True, lambda limit: None),
    "gradplan, peaks, hint 5 % high": (True, lambda limit: math.ceil(1.05 * limit)),
    "gradplan, peaks, hint 5 % low": (True, lambda limit: max(1, math.floor(0.95 * limit))),
}


def run(folder: Path, *arguments: str) -> str:
    """What a Python process in ``folder`` writes to standard output.

    Raises:
        FinderError: it failed.
    """
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise FinderError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


def row_of_other(name: str, limit: int, folder: Path) -> Row:
    run(folder, str(Path(__file__).resolve()), "--limits", str(limit), "--one", name)
    trials, answer = json.loads((folder / RESULT).read_text())
    if answer is None:
        raise FinderError(f"no answer after {trials} trials")
    seen = seen_batches(folder)
    passes = sum(fitted for _, fitted in seen)
    return Row(trials, len(seen) - passes, answer, (answer, True) in seen, passes)


def row_of_gradplan(name: str, limit: int, folder: Path) -> Row:
    reports_peaks, hint = GRADPLAN[name]
    device = {
        "name": "invented",
        "total_bytes": total_bytes(limit),
        "fixed_bytes": FIXED,
        "bytes_per_sample": PER_SAMPLE,
        "optimizer_bytes": OPTIMIZER,
        "gradient_bytes": GRADIENT,
        "reports_peaks": reports_peaks,
        "hint": hint(limit),
    }
    (folder / "device.json").write_text(json.dumps(device))
    (folder / "model.py").write_text(MODEL)
    options = "--device test:device.json --headroom 0 --json --plan plan.json --script train.py"
    plan = json.loads(run(folder, "-m", "gradplan", "probe", "model.py", *options.split()))
    answer, trials = plan["max_micro_batch_size"], plan["evidence"]["trials"]
    seen = seen_batches(folder)
    return Row(len(trials), sum(not trial["fits"] for trial in trials), answer, (answer, True) in seen, len(seen))


def main() -> None:
    """Print a line for each finder and limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", default="1337", metavar="N,N,...", help="true maxima (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=OTHERS, help=argparse.SUPPRESS)  # what row_of_other runs
    args = parser.parse_args()
    limits = [int(limit) for limit in args.limits.split(",")]
    if min(limits) < 1:
        parser.error("a true maximum is at least 1")
    if args.one:
        Path(RESULT).write_text(json.dumps(OTHERS[args.one][1](limits[0])))
        return
    found = {distribution.name.replace("_", "-"): distribution.version for distribution in distributions()}
    packages = dict.fromkeys(package for package, _ in OTHERS.values())
    left_out = [package for package in packages if package not in found]
    versions = {package: found[package] for package in ("torch", "gradplan", *packages) if package in found}
    names = [*(name for name, (package, _) in OTHERS.items() if package not in left_out), *GRADPLAN]
    if not args.json:
        print(", ".join(f"{package} {number}" for package, number in versions.items()))
        if left_out:
            print(f"left out: {', '.join(left_out)} (pip install {' '.join(left_out)})")
    rows: dict[int, dict[str, Any]] = {limit: {} for limit in limits}
    for limit in limits:
        if not args.json:
            print(f"\ntrue maximum {limit}\n{COLUMNS}")
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row = (row_of_other if name in OTHERS else row_of_gradplan)(name, limit, Path(folder))
                    rows[limit][name], line = asdict(row), row.line(limit)
                except FinderError as error:
                    rows[limit][name], line = {"error": str(error)}, f"failed: {error}"
            if not args.json:
                print(f"{name:32} {line}", flush=True)
    if args.json:
        print(json.dumps({"versions": versions, "left_out": left_out, "limits": rows}, indent=2))


if __name__ == "__main__":
    main()
