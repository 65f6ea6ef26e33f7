"""Compare simulated GPU memory with what others measured on GPUs: python benchmarks/memory_truth.py

Everything is rebuilt offline on fake tensors and played as the published script did; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import truth_measured
import truth_xmem
from truth_records import read_records

DATA = Path(__file__).parent / "data"
# What CI runs in a minute, by id: it needs torch, and torchvision for what names it. Each has its kind's target.
CI_SUBSET = r"^(liger-|yolov5-focus|rasbt-gpt124m-0[17]$|gpumemnet-mobilenet_v2)"
SUBSETS = {"ci": CI_SUBSET}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        metavar="FILE",
        help="in the format of xmem.json or of measured.json; may be repeated (default: both)",
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only what has an id that matches")
    parser.add_argument(
        "--subset", choices=SUBSETS, help="a few of measured.json; exits with 1 if one misses its target"
    )
    parser.add_argument("--json", action="store_true", help="print rows and summary as JSON instead of tables")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    files = [DATA / "measured.json"] if arguments.subset else [DATA / "xmem.json", DATA / "measured.json"]
    pattern = SUBSETS[arguments.subset] if arguments.subset else arguments.only
    found: dict[str, Any] = {"rows": [], "summary": {}}
    for path in arguments.data or files:
        if _is_xmem(path):
            rows, summary = _run_xmem(path, pattern, arguments.json)
        else:
            rows, summary = _run_measured(path, pattern, arguments.json, is_strict=arguments.subset is not None)
        found["rows"] += rows
        found["summary"] |= summary
    if not found["rows"]:
        sys.exit("nothing was rebuilt; README.md says what to install")
    if arguments.json:
        print(json.dumps(found, indent=1))
    if arguments.subset and any(row.get("is_within") is False for row in found["rows"]):
        sys.exit("a row misses its target")


def _is_xmem(path: Path) -> bool:
    return all("ground_bytes" in entry for entry in json.loads(path.read_text(encoding="utf-8")))


def _run_xmem(path: Path, pattern: str, is_quiet: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    runs = [run for run in truth_xmem.read_runs(path) if re.search(pattern, run.id)]
    if runs and not is_quiet:
        print(truth_xmem.HEADER)
    pairs = []
    for run, prediction in truth_xmem.pairs_of(runs):
        pairs.append((run, prediction))
        if not is_quiet:
            print(truth_xmem.row(run, prediction), flush=True)
    if pairs and not is_quiet:
        print("\n".join(truth_xmem.tables(pairs)))
    return truth_xmem.as_json(pairs), truth_xmem.summary(pairs)


def _run_measured(
    path: Path, pattern: str, is_quiet: bool, is_strict: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    records = [record for record in read_records(path) if re.search(pattern, record.id)]
    rows = list(truth_measured.rows_of(records, is_strict))
    if rows and not is_quiet:
        print("\n".join(truth_measured.tables(rows)))
    return truth_measured.as_json(rows), truth_measured.summary(rows)


if __name__ == "__main__":
    main()
