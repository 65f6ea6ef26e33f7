"""Wall time and memory of the command line, as ratios to ``import torch`` in the same run.

    python benchmarks/probe_time.py [--repeats N] [--json]

The machine's noise is shared by both sides of a ratio: each round runs every command once, and the medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GPT2 = str(Path(__file__).resolve().parent.parent / "examples" / "gpt2-124m" / "model.py")
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "gradplan --help": ["-m", "gradplan", "--help"],
    "probe GPT-2 124M, whole batch of 32 fits": [
        "-m", "gradplan", "probe", GPT2, "--device", "a100-80gb", "--effective-batch", "32", "--force",
    ],
    "probe GPT-2 124M, recipe's batch, searched": ["-m", "gradplan", "probe", GPT2, "--device", "a100-80gb", "--force"],
}  # fmt: skip


def run(arguments: list[str]) -> tuple[float, int]:
    """(wall seconds, peak resident bytes) of one process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(arguments)} failed")
    return time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Print the median of each command and its ratio to the import."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for arguments in COMMANDS.values():
            run(arguments)  # byte-compiled and in the file cache from here on
        rounds = [{name: run(arguments) for name, arguments in COMMANDS.items()} for _ in range(args.repeats)]
        os.chdir("/")
    base = statistics.median(results["import torch"][0] for results in rounds)
    rows = {}
    for name in COMMANDS:
        seconds = statistics.median(results[name][0] for results in rounds)
        peak_bytes = max(results[name][1] for results in rounds)
        rows[name] = {"seconds": round(seconds, 3), "ratio": round(seconds / base, 2), "peak_rss_bytes": peak_bytes}
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        print(f"{name:44} {row['seconds']:7.2f} s  {row['ratio']:5.2f} x  {row['peak_rss_bytes'] / 2**20:6.0f} MiB")


if __name__ == "__main__":
    main()
