"""Wall time and memory of the command line, as ratios to ``import torch`` in the same run.

    python benchmarks/probe_time.py [--repeats N] [--json]

The machine's noise is shared by both sides of a ratio: each round runs every command once, and the medians count.
Where transformers is installed, Llama 3 8B is probed too, less the time that importing transformers takes. The last
line is the replay of one traced GPT-2 step, in this process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
GPT2 = str(HERE.parent / "examples" / "gpt2-124m" / "model.py")
LLAMA = str(HERE / "llama3_8b.py")
PROBE = ["-m", "gradplan", "probe"]
IMPORT, IMPORT_BOTH = "import torch", "import torch and transformers"
ONE_GPU, NINE_GPUS = "probe GPT-2 124M, recipe's batch, searched", "the same, and what eight other GPUs hold"
LLAMA_ROW = "probe Llama 3 8B, less transformers' import"
COMMANDS = {
    IMPORT: ["-c", "import torch"],
    "gradplan --help": ["-m", "gradplan", "--help"],
    "probe GPT-2 124M, whole batch of 32 fits": [
        *PROBE, GPT2, "--device", "a100-80gb", "--effective-batch", "32", "--force",
    ],
    ONE_GPU: [*PROBE, GPT2, "--device", "rtx-4090", "--force"],
    NINE_GPUS: [*PROBE, GPT2, "--force"],
}  # fmt: skip
WITH_TRANSFORMERS = {
    IMPORT_BOTH: ["-c", "import torch; from transformers import LlamaConfig, LlamaForCausalLM"],
    LLAMA_ROW: [*PROBE, LLAMA, "--device", "h200", "--precision", "bf16-true", "--force"],
}


def run(arguments: list[str]) -> tuple[float, int]:
    """(wall seconds, peak resident bytes) of one process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(arguments)} failed")
    return time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def replay_seconds() -> float:
    """The median of five replays of GPT-2's two traced steps, at the size that fits an RTX 4090."""
    from gradplan.probes.simulator.allocator import replay
    from gradplan.probes.simulator.training import Setup, Tensors, trace_training
    from gradplan.probes.workload import load_workload

    trace = trace_training(Setup(load_workload(GPT2), "32-true", (8, 9)), Tensors.FAKE, 16, 2)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        replay(trace.events, trace.sizes)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the median of each command and its ratio to the import."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    commands = COMMANDS | (WITH_TRANSFORMERS if importlib.util.find_spec("transformers") else {})
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for arguments in commands.values():
            run(arguments)  # byte-compiled and in the file cache from here on
        rounds = [{name: run(arguments) for name, arguments in commands.items()} for _ in range(args.repeats)]
        os.chdir("/")
    seconds = {name: statistics.median(results[name][0] for results in rounds) for name in commands}
    if LLAMA_ROW in seconds:
        seconds[LLAMA_ROW] -= seconds[IMPORT_BOTH] - seconds[IMPORT]
    rows = {
        name: {
            "seconds": round(seconds[name], 3),
            "ratio": round(seconds[name] / seconds[IMPORT], 2),
            "peak_rss_bytes": max(results[name][1] for results in rounds),
        }
        for name in commands
    }
    replayed = replay_seconds()
    if args.json:
        print(json.dumps({"commands": rows, "replay_of_a_gpt2_step_seconds": round(replayed, 4)}, indent=2))
        return
    for name, row in rows.items():
        print(f"{name:44} {row['seconds']:7.2f} s  {row['ratio']:5.2f} x  {row['peak_rss_bytes'] / 2**20:6.0f} MiB")
    print(f"eight other GPUs cost {100 * (seconds[NINE_GPUS] / seconds[ONE_GPU] - 1):.1f} % more than one alone")
    print(f"replay of a GPT-2 step: {1000 * replayed:.1f} ms")


if __name__ == "__main__":
    main()
