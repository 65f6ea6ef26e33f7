"""Does tuning claim gains that are none, and does it find the ones that are?

    python benchmarks/tuning_honesty.py [--repeats 20] [--trials 8] [--json]

A small network on data whose best rate is known from a sweep over many seeds. The whole of ``gradplan tune`` is
repeated with different seeds where the base rate is right, where it is 4 times too low and where it is 4 times too
high. Whatever it adopts is compared with the base rate in trainings of full length, on seeds that no procedure ever
saw. Beside it stands what people often do: Optuna with as many runs in all, a new seed for each, judged at a tenth of
the training, and the best value taken for the gain. Both train with the same train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import optuna

import gradplan
from gradplan.probes.tuning.messages import Run, Script
from gradplan.probes.tuning.search import DIVERGED, Runners
from gradplan.tuning import script_of, tune
from gradplan.verdict import FEWEST_PAIRS

RIGHT_RATE = 0.02  # see `--sweep`
MODEL = """
import torch
from torch import nn

BATCH_SIZE = 32
LEARNING_RATE = {rate}
TEACHER = torch.randn(16, 4, generator=torch.Generator().manual_seed(99))


class Rows(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, 16, generator=generator)
        noise = torch.randn(length, 4, generator=generator)
        self.labels = (self.inputs @ TEACHER + noise / 2).argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


def build_dataset():
    return Rows(2048, 1)


def build_validation_dataset():
    return Rows(512, 2)


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def build_optimizer(model, lr):
    return torch.optim.Adam(model.parameters(), lr)


def compute_loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
"""
CASES = {"the base rate is right": 1.0, "4 times too low": 1 / 4, "4 times too high": 4.0}
EPOCHS, NUM_STEPS = 4, 256
UNSEEN = range(10_000, 10_005)
NAIVE_HORIZON = 0.1


@dataclass
class Row:
    """What one way of tuning did in one case, over all repeats; gains are in the loss of a whole training."""

    way: str
    case: str
    repeats: int
    adopted: int
    median_multiplier: float
    claimed_gain: float | None
    true_gain: float | None
    worse_than_one: int

    def line(self) -> str:
        claimed, true = ("-" if gain is None else f"{gain:+.4f}" for gain in (self.claimed_gain, self.true_gain))
        return (
            f"{self.way:9} {self.case:24} {self.adopted:4} of {self.repeats:<4} {self.median_multiplier:10.3g} "
            f"{claimed:>9} {true:>9} {self.worse_than_one:6}"
        )


def main() -> None:
    """Print a line for each way and case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--trials", type=int, default=8, help="of each search (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="show from where the right rate is known, and end")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    if not args.json and not args.sweep:
        print(f"{'':34} {'adopted':12} {'multiplier':>10} {'claimed':>9} {'true':>9} {'worse':>6}")
    for case, share in {"sweep": 1.0}.items() if args.sweep else CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            Path("model.py").write_text(MODEL.format(rate=RIGHT_RATE * share))
            plan = gradplan.probe("model.py", device="rtx-4090")
            with script_of(plan, Path("model.py")) as path:
                script = Script(script=str(path), model_folder=folder, parent_pid=os.getpid(), device="cpu")
                with Runners(script, folder, 1) as runners:
                    run = cache(lambda *which, runners=runners: value_of(runners, *which))
                    if args.sweep:
                        sweep(run)
                        continue
                    for way in (ours, naive):
                        found = [way(plan, run, args.trials, seed) for seed in range(args.repeats)]
                        rows.append(row_of(way.__name__, case, found, run))
                        if not args.json:
                            print(rows[-1].line(), flush=True)
            os.chdir("/")
    if args.json:
        print(json.dumps({"torch": torch_version(), "rows": [asdict(row) for row in rows]}))


def torch_version() -> str:
    import torch

    return str(torch.__version__)


def value_of(runners: Runners, multiplier: float, seed: int, num_steps: int) -> float:
    """The validation loss of one run of train.py; a large number where it diverges."""
    report = runners.run(Run(multiplier=multiplier, seed=seed, num_steps=num_steps, epochs=EPOCHS))
    if report.error is not None:
        sys.exit(report.error)
    return DIVERGED if report.value is None else report.value


Found = tuple[float, float | None]  # the multiplier that is taken, and the gain that is claimed for it


def ours(plan: gradplan.Plan, _: Callable[..., float], num_trials: int, seed: int) -> Found:
    """``gradplan tune`` from beginning to end."""
    with tempfile.TemporaryDirectory() as folder:
        found = tune(
            plan,
            epochs=EPOCHS,
            num_trials=num_trials,
            device="cpu",
            storage=f"{folder}/study.log",
            seed=100 * seed,
        )
    assert found.tuning is not None
    return found.learning_rate_multiplier, found.tuning.verdict.gain if found.tuning.verdict.is_adopted else None


def naive(_: gradplan.Plan, run: Callable[..., float], num_trials: int, seed: int) -> Found:
    """The best of as many runs in all, as the study has it."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial({"multiplier": 1.0})
    num_steps = round(NUM_STEPS * NAIVE_HORIZON)

    def objective(trial: optuna.Trial) -> float:
        multiplier = trial.suggest_float("multiplier", 1 / 4, 4, log=True)
        return run(multiplier, 100 * seed + trial.number, num_steps)

    study.optimize(objective, n_trials=num_trials + 2 * FEWEST_PAIRS)
    claimed = (study.trials[0].value or 0.0) - study.best_value
    return study.best_params["multiplier"], claimed


def row_of(way: str, case: str, found: list[Found], run: Callable[..., float]) -> Row:
    """What was taken, beside 1, in whole trainings on unseen seeds."""
    taken = [(multiplier, claimed) for multiplier, claimed in found if multiplier != 1]
    gains = [
        statistics.fmean(run(1.0, seed, NUM_STEPS) - run(multiplier, seed, NUM_STEPS) for seed in UNSEEN)
        for multiplier, _ in taken
    ]
    claims = [claimed for _, claimed in taken if claimed is not None]
    return Row(
        way=way,
        case=case,
        repeats=len(found),
        adopted=len(taken),
        median_multiplier=statistics.median(multiplier for multiplier, _ in found),
        claimed_gain=statistics.fmean(claims) if claims else None,
        true_gain=statistics.fmean(gains) if gains else None,
        worse_than_one=sum(gain < 0 for gain in gains),
    )


def sweep(run: Callable[..., float]) -> None:
    """Validation loss over multipliers of the right rate, of a whole training and of a quarter of it."""
    print(f"{'multiplier':>10} {'whole':>9} {'quarter':>9}")
    for half_octave in range(-4, 5):
        multiplier = 2 ** (half_octave / 2)
        means = (
            statistics.fmean(run(multiplier, seed, num_steps) for seed in UNSEEN)
            for num_steps in (NUM_STEPS, NUM_STEPS // 4)
        )
        print(f"{multiplier:10.3g}", *(f"{mean:9.4f}" for mean in means), flush=True)


if __name__ == "__main__":
    main()
