"""Kill train.py at random moments, resume it, and compare the weights with those of a run that nobody disturbed.

    python benchmarks/kill_and_resume.py [--kills N] [--seed N] [--json]

The model has dropout, BatchNorm and AdamW, its samples are augmented with Python's, NumPy's and torch's random
numbers, its batches are prepared by no, then by two worker processes. Every kill is SIGKILL to the whole process
group, after a time drawn between the start and a little more than the undisturbed run took to get going and train.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

MODEL = """
import random

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

BATCH_SIZE, LEARNING_RATE = 16, 1e-3


class Augmented(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        image = torch.full((1, 12, 12), index / 200) + 0.1 * torch.randn(1, 12, 12)
        if random.random() < 0.5:
            image = image.flip(2)
        return image * numpy.random.uniform(0.5, 1.5), index % 4


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(1600, 4)
    )


def build_dataset():
    return Augmented()


def compute_loss(model, batch):
    images, targets = batch
    return nn.functional.cross_entropy(model(images.float()), targets)
"""


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "train.py", "--device", "cpu", "--epochs", "12", "--save-every", "1", *options]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **quiet)


def disturbed(folder: Path, num_workers: int, num_kills: int, moments: random.Random) -> dict[str, Any]:
    """A run that is killed ``num_kills`` times, beside one that is not."""
    workers = ("--workers", str(num_workers))
    began = time.monotonic()
    assert start(folder, *workers, "--out", "whole").wait() == 0
    whole_seconds = time.monotonic() - began
    out, resume, steps = folder / "killed", [], []
    for _ in range(num_kills):
        process = start(folder, *workers, *resume, "--out", "killed")
        time.sleep(moments.uniform(0, 0.4 * whole_seconds))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if (out / "checkpoint.pt").exists():
            resume = ["--resume", "killed/checkpoint.pt"]
            steps.append(torch.load(out / "checkpoint.pt", weights_only=True)["step"])
        if (out / "model.pt").exists():  # it got to its end: begin again
            for file in out.iterdir():
                file.unlink()
            resume = []
    assert start(folder, *workers, *resume, "--out", "killed").wait() == 0
    one, other = (torch.load(folder / name / "model.pt", weights_only=True) for name in ("whole", "killed"))
    are_equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return {"workers": num_workers, "kills": num_kills, "steps_at_kills": steps, "are_equal": are_equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    moments, rows = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text(MODEL)
        command = [sys.executable, "-m", "gradplan", "probe", "model.py", "--device", "t4", "--max-micro-batch", "6"]
        subprocess.run([*command, "-q"], cwd=folder, stdout=subprocess.DEVNULL, check=True)
        for num_workers in (0, 2):
            rows.append(disturbed(folder, num_workers, args.kills, moments))
            for file in (folder / "killed").iterdir():
                file.unlink()
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        verdict = "equal, bit for bit" if row["are_equal"] else "DIFFERENT"
        steps = " ".join(map(str, row["steps_at_kills"]))
        print(
            f"{row['workers']} workers, {row['kills']} kills: weights {verdict}; last checkpoint at each kill: {steps}"
        )


if __name__ == "__main__":
    main()
