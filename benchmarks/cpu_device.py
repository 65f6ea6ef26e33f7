"""The size that ``gradplan probe --device cpu`` finds, and 1.1 times it, trained and measured from outside.

    python benchmarks/cpu_device.py [--only REGEX] [--memory MIB] [--steps N] [--json]

Four models of at least 16 MiB a sample. Each is probed from the command line; then the train.py that this wrote is
run in a process of its own, with micro-batches of the size found and of 1.1 times it, and the kernel tells the
most that the process ever held in RAM. The first must stay inside the memory that was given. The second must exceed
the column "planned": that memory less the headroom, the limit that the probe keeps to. What the C library's heap
holds differs by some percent from run to run and from step to step, which is what the headroom is for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

BATCH_SIZE = 1024
LEARNING_RATE = 1e-3
"""
MODELS = {
    "wide MLP on long rows": """
def build_model():
    return nn.Sequential(nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))

def build_batch(batch_size):
    return torch.randn(batch_size, 3072, 512), torch.randint(8, (batch_size, 3072))

def compute_loss(model, batch):
    rows, targets = batch
    return F.cross_entropy(model(rows).flatten(0, 1), targets.flatten())
""",
    "convolutions": """
def block(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )

def build_model():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(block(3, 16, 1), block(16, 16, 1), block(16, 32, 2), block(32, 32, 1), head)

def build_batch(batch_size):
    return torch.randn(batch_size, 3, 224, 224), torch.randint(10, (batch_size,))

def compute_loss(model, batch):
    images, targets = batch
    return F.cross_entropy(model(images), targets)
""",
    "transformer encoder": """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 192)
        layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(192, 1000)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))

def build_model():
    return Encoder()

def build_batch(batch_size):
    return torch.randint(1000, (batch_size, 384)), torch.randint(1000, (batch_size, 384))

def compute_loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
""",
    "LSTM": """
class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 32)

    def forward(self, rows):
        return self.head(self.lstm(rows)[0])

def build_model():
    return Lstm()

def build_batch(batch_size):
    return torch.randn(batch_size, 1500, 128), torch.randint(32, (batch_size, 1500))

def compute_loss(model, batch):
    rows, targets = batch
    return F.cross_entropy(model(rows).flatten(0, 1), targets.flatten())
""",
}


def probed(folder: Path, memory_mib: int) -> dict[str, Any]:
    """The plan of the model.py in ``folder``; train.py is written beside it."""
    command = ["-m", "gradplan", "probe", "model.py", "--device", "cpu", "--memory", f"{memory_mib}MiB", "--json", "-q"]
    done = subprocess.run([sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def peak_of_training(folder: Path, micro_batch_size: int, num_steps: int) -> int:
    """Peak resident bytes of train.py with windows of two micro-batches of this size, as the kernel tells it."""
    text = (folder / "train.py").read_text()
    for name, value in (("EFFECTIVE_BATCH_SIZE", 2 * micro_batch_size), ("MAX_MICRO_BATCH_SIZE", micro_batch_size)):
        text, found = re.subn(rf"^{name} = \d+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1, f"train.py has no {name}"
    (folder / "train_at.py").write_text(text)
    command = [sys.executable, "train_at.py", "--device", "cpu", "--max-steps", str(num_steps)]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, "train.py failed"
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measured(model: str, memory_mib: int, num_steps: int) -> dict[str, Any]:
    """The plan and both runs of one model. All bytes but those of a sample are of the whole process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.py").write_text(HEAD + model)
        plan = probed(folder, memory_mib)
        evidence = plan["evidence"]
        total, usable = evidence["device"]["total_bytes"], evidence["limit_bytes"]
        planned = total - round(usable * 5 / 95)
        size = plan["max_micro_batch_size"]
        larger = math.ceil(1.1 * size)
        at_size, at_larger = (peak_of_training(folder, each, num_steps) for each in (size, larger))
        trial = next(one for one in evidence["trials"] if one["micro_batch_size"] == size)
    return {
        "size": size,
        "trials": len(evidence["trials"]),
        "memory_bytes": total,
        "planned_bytes": planned,
        "probe_bytes": trial["required_bytes"] + planned - usable,
        "bytes_per_sample": trial["required_bytes"] // size,
        "peak_bytes": at_size,
        "larger": larger,
        "larger_peak_bytes": at_larger,
        "is_right": at_size <= total and at_larger > planned,
    }


def main() -> None:
    """Print a line for each model; exit with 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="models whose name matches")
    parser.add_argument("--memory", type=int, default=1536, metavar="MIB", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of train.py (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = {}
    columns = "size  trials  MiB/sample  planned  probe's peak  train.py's   at 1.1 x: size   peak"
    if not args.json:
        print(f"{'in MiB':22} {columns}")
    for name, model in MODELS.items():
        if not re.search(args.only, name):
            continue
        row = rows[name] = measured(model, args.memory, args.steps)
        mib = {key.removesuffix("_bytes"): value / 2**20 for key, value in row.items() if key.endswith("_bytes")}
        if not args.json:
            print(
                f"{name:22} {row['size']:4}  {row['trials']:6}  {row['bytes_per_sample'] / 2**20:10.1f}  "
                f"{mib['planned']:7.0f}  {mib['probe']:12.0f}  {mib['peak']:10.0f}  {row['larger']:15}  "
                f"{mib['larger_peak']:5.0f}  {'right' if row['is_right'] else 'WRONG'}",
                flush=True,
            )
    if args.json:
        print(json.dumps(rows, indent=2))
    if not all(row["is_right"] for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
