"""Traced live bytes beside those measured on the CPU, for a folder of model files with a table of measurements.

    python benchmarks/live_bytes.py FOLDER [--only REGEX] [--json]

FOLDER/README.md holds a table whose rows read ``| name | ... | batch: bytes; batch: bytes |``: the peak bytes of live
tensor storages over two optimizer steps without accumulation, in fp32, on the CPU. So nothing of CUDA is put in
place here: this checks the recorder, on fake tensors where they go and on real ones elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradplan.probes import step
from gradplan.probes.errors import GradplanError
from gradplan.probes.simulator.building import as_fake, fake_models
from gradplan.probes.simulator.trace import Recorder, Trace, steady_garbage
from gradplan.probes.simulator.training import HostBatch, Tensors
from gradplan.probes.workload import Workload, load_workload


def measured(folder: Path) -> Iterator[tuple[str, dict[int, int]]]:
    """(file's stem, batch -> bytes) for each row of the table that has measurements."""
    for line in (folder / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| \n").split("|")]
        pairs = re.findall(r"(\d+): (\d+)", cells[-1]) if line.startswith("|") else []
        if pairs:
            yield cells[0], {int(batch): int(num_bytes) for batch, num_bytes in pairs}


def trace(workload: Workload, batch_size: int, tensors: Tensors) -> Trace:
    """Two optimizer steps of one micro-batch each, with the CPU's own behaviour."""
    real = workload.build_model() if tensors is not Tensors.FAKE else None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder()
    batch = HostBatch(workload.make_batch(batch_size), "32-true", recorder)
    with steady_garbage() as collect, contextlib.nullcontext() if tensors is Tensors.REAL else fake_models(mode):
        model = real if tensors is Tensors.REAL else workload.build_model() if real is None else as_fake(real, mode)
        with recorder:
            recorder.adopt_module(model)
            optimizer = workload.build_optimizer(model)
            for _ in range(2):
                step.train_window(model, optimizer, [(batch, 1.0)], workload.compute_loss, torch.device("cpu"))
                collect()
    return recorder.trace()


def cheapest(workload: Workload, batch_size: int) -> tuple[Tensors, Trace]:
    """The trace on the first kind of tensors that the step can run on."""
    for tensors in Tensors:
        try:
            return tensors, trace(workload, batch_size, tensors)
        except Exception:
            if tensors is Tensors.REAL:
                raise
    raise AssertionError("unreachable")


def main() -> None:
    """Print one line a point, and how many are within 1 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a regular expression on the file's name")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name, points in measured(args.folder):
        if not re.search(args.only, name):
            continue
        try:
            workload = load_workload(str(args.folder / f"{name}.py"))
            for batch_size, num_bytes in points.items():
                tensors, traced = cheapest(workload, batch_size)
                error = traced.peak_live_bytes / num_bytes - 1
                row = {"file": name, "batch": batch_size, "on": tensors.value, "measured": num_bytes}
                rows.append({**row, "traced": traced.peak_live_bytes, "error_percent": round(100 * error, 3)})
                if not args.json:
                    print(
                        "{file:24} {batch:3} {on:9} {measured:>12} {traced:>12} {error_percent:+8.3f} %".format(
                            **rows[-1]
                        )
                    )
        except GradplanError as error:
            print(f"{name:24} {str(error).splitlines()[0]}", file=sys.stderr)
    within = sum(abs(row["error_percent"]) <= 1 for row in rows)
    if args.json:
        print(json.dumps({"rows": rows, "within_1_percent": within, "points": len(rows)}, indent=2))
    else:
        print(f"{within} of {len(rows)} points within 1 %")


if __name__ == "__main__":
    main()
