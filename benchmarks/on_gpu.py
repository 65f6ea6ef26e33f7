"""Five models on the GPU of this machine, with all of its memory and with less: predicted and measured peaks.

    python benchmarks/on_gpu.py [--device cuda] [--only REGEX] [--fractions 1,0.5,0.25,0.1] [--out FILE] [--json]

Each is probed from the command line, under the fraction of the memory that PyTorch's allocator is told to keep to
(PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction, the setting of torch.cuda.set_per_process_memory_fraction). A
row is a trial: a micro-batch that was trained for some steps, the peak that the simulator had foretold before
anything was measured, and the peak that the allocator reports. "Survived" counts real out-of-memory errors after
which the probe went on to a plan. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

BATCH_SIZE = 65536
LEARNING_RATE = 1e-3
"""
CLASSIFY = """
def compute_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)
"""
MODELS = {
    "gpt2": "",  # the example's own file
    "resnet": """
def block(inputs, outputs, stride):
    layers = [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)

def build_model():
    widths = [3, 64, 64, 128, 128, 256, 256, 512]
    blocks = [block(a, b, 1 if a == b else 2) for a, b in zip(widths, widths[1:])]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))

def build_batch(batch_size):
    return torch.randn(batch_size, 3, 224, 224), torch.randint(1000, (batch_size,))
"""
    + CLASSIFY,
    "encoder": """
def build_model():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), nn.Linear(512, 1000))

def build_batch(batch_size):
    return torch.randn(batch_size, 256, 512), torch.randint(1000, (batch_size, 256))

def compute_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
""",
    "lstm": """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20000, 512), nn.LSTM(512, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 50)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])

def build_model():
    return Tagger()

def build_batch(batch_size):
    return torch.randint(20000, (batch_size, 128)), torch.randint(50, (batch_size, 128))

def compute_loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
""",
    "wide-mlp": """
def build_model():
    layers = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(4096, 10))

def build_batch(batch_size):
    return torch.randn(batch_size, 4096), torch.randint(10, (batch_size,))
"""
    + CLASSIFY,
}
GPT2 = HERE.parent / "examples" / "gpt2-124m" / "model.py"
GIB = 2**30


def probe(name: str, fraction: float, device: str) -> dict[str, Any]:
    """The plan, or {"error": last line} where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = GPT2 if name == "gpt2" else Path(folder, "model.py")
        if name != "gpt2":
            path.write_text(HEAD + MODELS[name])
        command = [sys.executable, "-m", "gradplan", "probe", str(path), "--device", device, "--json"]
        command += ["--effective-batch", "65536", "--plan", f"{folder}/plan.json", "--script", f"{folder}/train.py"]
        settings = f"per_process_memory_fraction:{fraction}"
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows_of(name: str, fraction: float, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each trial, the smallest first."""
    if "error" in plan:
        return [{"model": name, "fraction": fraction, "error": plan["error"]}]
    largest, evidence = plan["max_micro_batch_size"], plan["evidence"]
    rows = []
    for trial in sorted(evidence["trials"], key=lambda trial: int(trial["micro_batch_size"])):
        predicted, measured = trial["predicted_bytes"], trial["peak_reserved_bytes"]
        rows.append(
            {
                "model": name,
                "fraction": fraction,
                "limit_bytes": evidence["limit_bytes"],
                "micro_batch_size": trial["micro_batch_size"],
                "is_answer": trial["micro_batch_size"] == largest,
                "outcome": trial["reason"] or "fits",
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                "error_percent": 100 * (predicted / measured - 1) if predicted and measured else None,
                "step_seconds": trial["step_seconds"],
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """As the table has it."""
    start = f"{row['model']:10} {row['fraction']:8.0%}"
    if "error" in row:
        return f"{start}  {row['error']}"
    sizes = [row["limit_bytes"], row["predicted_bytes"], row["measured_bytes"]]
    limit, predicted, measured = ("-" if size is None else f"{size / GIB:.2f}" for size in sizes)
    error = "" if row["error_percent"] is None else f"{row['error_percent']:+.1f} %"
    mark = "*" if row["is_answer"] else " "
    return (
        f"{start} {limit:>9} {row['micro_batch_size']:>12}{mark} {predicted:>10} {measured:>10} {error:>9}  "
        f"{row['outcome']}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all trials that were measured."""
    errors = [abs(row["error_percent"]) for row in rows if row.get("error_percent") is not None]
    return {
        "num_probes": len({(row["model"], row["fraction"]) for row in rows}),
        "num_failed_probes": sum("error" in row for row in rows),
        "num_trials": sum("error" not in row for row in rows),
        "num_out_of_memory_survived": sum(row.get("outcome") == "out of memory" for row in rows),
        "median_error_percent": statistics.median(errors) if errors else None,
        "largest_error_percent": max(errors, default=None),
    }


def describe(device: str) -> dict[str, str]:
    """Where and when this was measured."""
    import torch

    is_here = torch.accelerator.is_available() and not device.startswith("test:")
    name = torch.get_device_module(device).get_device_name(device) if is_here else device
    today = datetime.date.today().isoformat()
    return {"date": today, "torch": str(torch.__version__), "device": name}


def main() -> None:
    """Probe, print, and write the rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", metavar="REGEX", help="models whose name matches")
    parser.add_argument("--fractions", default="1,0.5,0.25,0.1", help="of the memory (default: %(default)s)")
    parser.add_argument("--out", default=str(HERE / "data" / "gpu.json"), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    where, rows = describe(args.device), []
    if not args.json:
        print(f"{where['device']}, torch {where['torch']}, {where['date']}; GiB; * is the answer\n")
        print(f"{'model':10} {'memory':>8} {'limit':>9} {'micro-batch':>12}  {'predicted':>10} {'measured':>10}")
    for name in filter(re.compile(args.only).search, MODELS):
        for fraction in map(float, args.fractions.split(",")):
            found = rows_of(name, fraction, probe(name, fraction, args.device))
            rows += found
            if not args.json:
                print("\n".join(map(line, found)), flush=True)
    result = {**where, "summary": summary(rows), "rows": rows}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else "\n" + json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
