"""What a backward after each loss saves, against one backward of their sum: traced, and measured on the CPU.

    python benchmarks/loss_by_loss.py [--json]

Transient memory is what a step needs at its peak besides parameters and gradients. Traced, it is the simulator's peak
of live bytes. Measured, it is the growth of a fresh process' resident memory over one real step (Linux only).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradplan.probes import step
from gradplan.probes.evidence import Backward
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.workload import load_workload

BATCH_SIZE = 8192
MIB = 2**20

COMMON = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def stack(num_layers, inputs=256, outputs=256):
    layers = [nn.Linear(inputs, 256), nn.GELU()]
    for _ in range(num_layers - 2):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, outputs))

def build_batch(batch_size):
    return torch.randn(batch_size, 8), torch.randn(batch_size, 1)

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)
"""
SEPARATE = """
def build_model():
    return nn.ModuleList(stack({num_layers}, inputs=8, outputs=1) for _ in range({num_models}))

def compute_loss(model, batch):
    inputs, targets = batch
    for part in model:
        yield mse_loss(part(inputs), targets)
"""
TRUNK = """
def build_model():
    trunk, heads = stack(8, inputs=8), nn.ModuleList(stack(4, outputs=1) for _ in range(4))
    return nn.ModuleDict({"trunk": trunk, "heads": heads})
"""
SUMMED = """
def compute_loss(model, batch):
    inputs, targets = batch
    features = model["trunk"](inputs)
    return sum(mse_loss(head(features), targets) for head in model["heads"])
"""
CUT = """
def compute_loss(model, batch):
    inputs, targets = batch
    features = model["trunk"](inputs)
    cut = features.detach().requires_grad_()
    for head in model["heads"]:
        yield mse_loss(head(cut), targets)
    if model.training:
        features.backward(cut.grad)
"""


@dataclass(frozen=True)
class Case:
    """Two model files with the same loss: one for a single backward, one for a backward after each loss."""

    name: str
    joint: str
    sequential: str
    least_saving_percent: int


def separate(num_models: int, num_layers: int) -> str:
    return COMMON + SEPARATE.format(num_models=num_models, num_layers=num_layers)


CASES = (
    Case("two separate models", separate(2, 9), separate(2, 9), least_saving_percent=40),
    Case("six separate models", separate(6, 4), separate(6, 4), least_saving_percent=70),
    Case("trunk, four heads, cut", COMMON + TRUNK + SUMMED, COMMON + TRUNK + CUT, least_saving_percent=35),
)


def num_parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def traced_bytes(file: Path, backward: Backward) -> int:
    """The simulator's transient peak of one micro-batch, on an A100: what the probe compares."""
    workload = load_workload(str(file))
    trace = Tracer(Setup(workload, "32-true", (8, 0)), lambda _: None).trace(BATCH_SIZE, 1, backward)
    return trace.peak_live_bytes - 2 * num_parameter_bytes(workload.build_model())


def measured_bytes(file: Path, backward: Backward, gradients_file: Path) -> int:
    """Growth of this process' resident memory over one real step, and the step's gradients in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = load_workload(str(file))
    model, run = workload.build_model(), step.run_loss_by_loss if backward == "sequential" else step.run_losses_together

    def one_step(batch: Any) -> None:
        model.zero_grad(set_to_none=False)  # the first step allocates them
        run(model, batch, workload.compute_loss, 1.0, nullcontext())

    one_step(workload.make_batch(16))
    batch = workload.make_batch(BATCH_SIZE)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far becomes what is resident now
    before = resident_bytes("VmRSS")
    one_step(batch)
    growth = resident_bytes("VmHWM") - before
    torch.save(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), gradients_file)
    return growth


def resident_bytes(key: str) -> int:
    """VmRSS, what is resident now, or VmHWM, its peak."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def in_fresh_process(function: Any, *args: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def saving_percent(joint: int, sequential: int) -> float:
    return round(100 * (1 - sequential / joint), 1)


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Both forms of one case, traced and measured, and how far their gradients are apart."""
    row: dict[str, Any] = {"case": case.name, "least_saving_percent": case.least_saving_percent}
    gradients: list[Tensor] = []
    for number, (backward, text) in enumerate({"joint": case.joint, "sequential": case.sequential}.items()):
        file, gradients_file = folder / f"form{number}.py", folder / f"form{number}.pt"
        file.write_text(text)
        row[f"traced_{backward}_bytes"] = in_fresh_process(traced_bytes, file, backward)
        row[f"measured_{backward}_bytes"] = in_fresh_process(measured_bytes, file, backward, gradients_file)
        gradients.append(torch.load(gradients_file).double())
    for how in ("traced", "measured"):
        row[f"{how}_saving_percent"] = saving_percent(row[f"{how}_joint_bytes"], row[f"{how}_sequential_bytes"])
    joint, sequential = gradients
    row["gradient_difference"] = float((joint - sequential).norm() / joint.norm())
    return row


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # the children's glibc gives tensors back when they are freed
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(case, Path(folder)) for case in CASES]
    if args.json:
        print(json.dumps({"batch_size": BATCH_SIZE, "rows": rows}, indent=2))
        return
    print(f"{'transient MiB':24}{'traced':^28}{'measured':^28}  gradients")
    print(f"{'':24}{'joint  by loss   saving':>28}{'joint  by loss   saving':>28}  differ by")
    for row in rows:
        line = f"{row['case']:24}"
        for how in ("traced", "measured"):
            joint, sequential = (row[f"{how}_{form}_bytes"] / MIB for form in ("joint", "sequential"))
            line += f"{joint:10.1f}{sequential:9.1f}{row[f'{how}_saving_percent']:7.1f} %"
        print(f"{line}  {row['gradient_difference']:.1e}")


if __name__ == "__main__":
    main()
