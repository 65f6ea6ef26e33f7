"""`gradplan tune`: each trial is train.py itself in a child process; fresh seeds decide. Real runs, tiny models."""

from __future__ import annotations

import builtins
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import psutil
import pytest
from click.testing import CliRunner, Result
from optuna.trial import TrialState
from train_scripts import RATE, SENTENCES, plan_for

from gradplan import cli, verdict
from gradplan.files import read_plan, write_plan, write_script
from gradplan.plan import Plan, from_json
from gradplan.probes.errors import UsageError, UserCodeError
from gradplan.probes.evidence import Trial, TuningTrial
from gradplan.probes.measuring.messages import Report
from gradplan.probes.tuning.ledger import Ledger, open_storage
from gradplan.probes.tuning.messages import Run, Script
from gradplan.probes.tuning.runner import serve
from gradplan.probes.tuning.search import DIVERGED, HIGHEST, LOWEST, bounds, search_multiplier
from gradplan.replan import plan_again
from gradplan.tuning import identity_of, length_of, script_of, tune

LONGEST_SECONDS = 240
NAMES = ("build_model", "build_dataset", "build_validation_dataset", "compute_loss", "build_optimizer")
NUM_SAMPLES, BATCH = 160, 8  # twenty steps are one epoch, at whose end the validation loss is computed once
EPOCHS = 4  # of the real training: a run at a quarter is one epoch

# Its optimizer takes TIMES as much as it is given, so that the right multiplier is about 1 / TIMES. What it does is
# noted in NOTES: once for each run, how it began, and for each micro-batch, which samples it has.
MODEL = """
import json, os, signal
import torch
from torch import nn

NOTES, TIMES = {notes!r}, {times}
print("hello from the model")

def note(*what):
    with open(NOTES, "a") as file:
        file.write(json.dumps([os.getpid(), *what]) + "\\n")

class Samples(torch.utils.data.Dataset):
    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(length, 4, generator=generator)
        noise = torch.randn(length, 1, generator=generator)
        self.y = self.x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]]) + 0.1 * noise
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], self.y[index], index

def build_model():
    model = nn.Linear(4, 1)
    note("begun", model.weight[0, 0].item())
    return model

def build_dataset():
    return Samples({num_samples}, 0)

def build_validation_dataset():
    return Samples(64, 1)

def compute_loss(model, batch):
    if model.training:
        note("batch", batch[2].tolist())
        misbehave(OPTIMIZER.param_groups[0]["lr"] / TIMES)
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    return loss * factor(OPTIMIZER.param_groups[0]["lr"] / TIMES) if model.training else loss

def build_optimizer(model, lr):
    global OPTIMIZER
    OPTIMIZER = torch.optim.SGD(model.parameters(), lr=lr * TIMES)
    return OPTIMIZER

def factor(rate):
    return 1.0

def misbehave(rate):
    pass
"""
RIGHT, TOO_LOW = 4.0, 0.5  # values of TIMES


class Begun(NamedTuple):
    """A run, as the model's file saw it."""

    pid: int
    weight: float
    samples: list[list[int]]


def model_text(notes: Path, times: float = RIGHT, more: str = "") -> str:
    return MODEL.format(notes=str(notes), times=times, num_samples=NUM_SAMPLES) + more


def a_plan(names: tuple[str, ...] = NAMES, **changes: Any) -> Plan:
    """Of four micro-batches of 2 a step; its evidence allows it to be planned again."""
    plan = plan_for(names, BATCH, 2, **{"dataset_length": NUM_SAMPLES, **changes})
    trial = Trial(micro_batch_size=2, num_micro_batches=2, fits=True, source="measured", required_bytes=1)
    return plan.model_copy(update={"evidence": plan.evidence.model_copy(update={"trials": (trial,)})})


def runs_in(notes: Path) -> list[Begun]:
    runs: list[Begun] = []
    for line in notes.read_text().splitlines() if notes.exists() else ():
        pid, what, value = json.loads(line)
        if what == "begun":
            runs.append(Begun(pid, value, []))
        else:
            runs[-1].samples.append(value)
    return runs


class Found(NamedTuple):
    """What came of a search in ``folder``."""

    folder: Path
    plan: Plan
    runs: list[Begun]
    said: list[str]

    @property
    def trials(self) -> tuple[TuningTrial, ...]:
        assert self.plan.tuning is not None
        return self.plan.tuning.trials

    @property
    def multipliers(self) -> list[float]:
        return [trial.multiplier for trial in self.trials]


def make_folder(path: Path, times: float = RIGHT, more: str = "", plan: Plan | None = None) -> Path:
    """Of a user: their model's file and a plan. The notes are beside it."""
    folder = path / "project"
    folder.mkdir()
    (folder / "model.py").write_text(model_text(path / "notes", times, more))
    write_plan(plan or a_plan(), folder / "gradplan.json")
    return folder


def search_in(path: Path, times: float = RIGHT, more: str = "", **options: Any) -> Found:
    folder, before = make_folder(path, times, more), os.getcwd()
    said: list[str] = []
    os.chdir(folder)
    try:
        known = {"epochs": EPOCHS, "num_trials": 4, "device": "cpu", "progress": said.append}
        plan = tune(read_plan("gradplan.json"), **{**known, **options})
    finally:
        os.chdir(before)
    return Found(folder, plan, runs_in(path / "notes"), said)


def stored(folder: Path, name: str = "gradplan") -> list[optuna.trial.FrozenTrial]:
    storage = open_storage(str(folder / "gradplan.study.log"))
    return optuna.load_study(study_name=name, storage=storage).get_trials()


def train(folder: Path, *options: str, script: str = "train.py") -> float:
    """The validation loss that ``python train.py`` prints at its end."""
    command = [sys.executable, str(folder / script), "--device", "cpu", "--out", str(folder / "out"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"validation loss (\S+)", done.stdout)[-1])


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A search around a rate that is eight times too low."""
    return search_in(tmp_path_factory.mktemp("low"), TOO_LOW, num_trials=6)


# What is run


def test_1_then_a_half_then_2_are_tried_first(low: Found) -> None:
    assert low.multipliers[:3] == [1.0, 0.5, 2.0]
    assert len(low.multipliers) == len(set(low.multipliers)) == 6


def test_all_runs_of_the_search_begin_alike_and_see_the_same_samples_in_the_same_order(low: Found) -> None:
    search = low.runs[:6]
    assert len({run.weight for run in search}) == 1
    assert all(run.samples == search[0].samples for run in search)
    assert sorted(itertools.chain.from_iterable(search[0].samples)) == list(range(NUM_SAMPLES))
    assert {len(samples) for samples in search[0].samples} == {2}


def test_the_checks_are_pairs_on_seeds_that_the_search_did_not_see(low: Found) -> None:
    pairs = low.runs[6:]
    assert len(pairs) == 10
    for one, other in zip(pairs[::2], pairs[1::2], strict=True):
        assert (one.weight, one.samples) == (other.weight, other.samples)
    assert len({run.weight for run in low.runs}) == 6
    assert low.plan.tuning is not None
    best = low.plan.tuning.verdict.multiplier
    assert [(run.seed, run.multiplier) for run in low.plan.tuning.checks] == [
        (seed, one) for seed in range(1, 6) for one in (1.0, best)
    ]


def test_the_range_is_wider_where_the_best_is_at_its_edge(low: Found) -> None:
    assert max(low.multipliers) > HIGHEST
    assert low.plan.tuning is not None
    assert low.plan.tuning.verdict.multiplier > 2


def test_a_process_is_kept_from_run_to_run(low: Found) -> None:
    assert len({run.pid for run in low.runs[:6]}) == 1
    assert len({run.pid for run in low.runs[6:]}) == 1


def test_a_run_is_what_train_py_does_with_that_rate(low: Found) -> None:
    write_script(a_plan(), low.folder / "plain.py", plan_path=low.folder / "gradplan.json")
    trial = low.trials[3]
    rate = str(RATE * trial.multiplier)
    assert trial.value is not None
    steps = ("--max-steps", "20", "--epochs", "1", "--seed", "0")
    assert train(low.folder, *steps, "--learning-rate", rate, script="plain.py") == pytest.approx(trial.value, abs=6e-5)


def test_the_script_of_the_tuned_plan_trains_as_the_check_of_that_seed_did(low: Found) -> None:
    write_script(low.plan, low.folder / "train.py", plan_path=low.folder / "gradplan.json")
    multiplier = low.plan.learning_rate_multiplier
    assert f"LEARNING_RATE_MULTIPLIER = {multiplier}" in (low.folder / "train.py").read_text()
    assert low.plan.tuning is not None
    check = next(run for run in low.plan.tuning.checks if (run.seed, run.multiplier) == (3, multiplier))
    assert check.value is not None
    assert train(low.folder, "--max-steps", "20", "--seed", "3") == pytest.approx(check.value, abs=6e-5)


# What comes of it


def test_a_rate_that_is_too_low_is_found_and_written_into_the_plan(low: Found) -> None:
    assert low.plan.tuning is not None
    found = low.plan.tuning.verdict
    assert found.is_adopted
    assert low.plan.learning_rate_multiplier == found.multiplier
    assert low.plan.learning_rate == pytest.approx(RATE * low.plan.learning_rate_factor * found.multiplier)
    assert (low.plan.tuning.num_steps, low.plan.tuning.num_real_steps) == (20, 80)
    assert low.plan.tuning.objective == "validation loss"
    assert [warning.code for warning in low.plan.warnings] == ["tuning-length"]


def test_a_plan_that_was_tuned_can_be_read_again(low: Found, tmp_path: Path) -> None:
    write_plan(low.plan, tmp_path / "tuned.json")
    assert read_plan(tmp_path / "tuned.json") == low.plan


def test_planning_again_keeps_the_multiplier(low: Found) -> None:
    again = plan_again(low.plan)
    assert (again.learning_rate_multiplier, again.learning_rate) == (
        low.plan.learning_rate_multiplier,
        pytest.approx(low.plan.learning_rate),
    )


def test_planning_again_keeps_what_tuning_found(low: Found) -> None:
    assert plan_again(low.plan).tuning == low.plan.tuning


def test_progress_says_trials_done_best_so_far_and_time_left(low: Found) -> None:
    assert "trial 1 of 6" in low.said
    assert re.fullmatch(r"trial 4 of 6 done, best so far [\d.]+, \d+ (s|min) left", low.said[5])
    assert "check 1 of 10" in low.said
    assert re.fullmatch(r"check 10 of 10 done, 0 s left", low.said[-1])


# Runs that fail


@pytest.fixture(scope="module")
def diverging(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Above one and a half times the rate the loss is no number."""
    more = f'\ndef factor(rate):\n    return float("nan") if rate > {1.5 * RATE} else 1.0\n'
    return search_in(tmp_path_factory.mktemp("diverging"), RIGHT, more, num_trials=6)


def test_a_run_that_diverges_has_a_finite_value_in_the_study_and_none_in_the_plan(diverging: Found) -> None:
    assert [trial.value for trial in stored(diverging.folder)][2] == DIVERGED
    assert {trial.state for trial in stored(diverging.folder)} == {TrialState.COMPLETE}
    assert "NaN" not in (diverging.folder / "gradplan.study.log").read_text()
    assert {trial.multiplier for trial in diverging.trials if trial.value is None} == {
        multiplier for multiplier in diverging.multipliers if multiplier > 1.5
    }


def test_a_run_that_diverges_ends_at_once_and_its_process_goes_on(diverging: Found) -> None:
    assert len(diverging.runs[2].samples) < len(diverging.runs[0].samples)
    assert diverging.runs[3].pid == diverging.runs[2].pid


def test_where_every_run_diverges_1_is_kept(tmp_path: Path) -> None:
    found = search_in(tmp_path, more='\ndef factor(rate):\n    return float("inf")\n')
    assert [trial.value for trial in found.trials] == [None] * 4
    assert (found.plan.learning_rate_multiplier, found.plan.learning_rate) == (1.0, RATE)
    assert found.plan.tuning is not None
    assert "no evidence against the rule" in verdict.sentence(found.plan.tuning)


def test_only_the_study_is_left_in_the_folder_and_no_process(diverging: Found) -> None:
    left = {path.name for path in diverging.folder.iterdir()} - {"__pycache__"}
    assert left == {"model.py", "gradplan.json", "gradplan.study.log"}
    assert [run.pid for run in diverging.runs if psutil.pid_exists(run.pid)] == []


UNLUCKY = """
def misbehave(rate):
    with open(NOTES) as file:
        number = sum(" \\"begun\\"" in line for line in file)
    if number == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if number == 3:
        os._exit(7)
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_out_of_memory_or_that_crashes_fails_alone(tmp_path: Path) -> None:
    found = search_in(tmp_path, more=UNLUCKY, num_trials=3)
    failed, done = TrialState.FAIL, TrialState.COMPLETE
    assert [trial.state for trial in stored(found.folder)] == [done, failed, failed, done, done]
    why = [trial.user_attrs["why"] for trial in stored(found.folder) if trial.state == failed]
    assert [word in text for word, text in zip(("out of memory", "exit code 7"), why, strict=True)] == [True] * 2
    # What is killed has a second chance.
    assert len({run.pid for run in found.runs[:6]}) == 4  # a new process after each failure
    assert len(found.trials) == 3


def test_where_no_run_comes_to_its_end_the_users_line_is_shown_after_three(tmp_path: Path) -> None:
    more = '\ndef misbehave(rate):\n    raise ValueError("a mistake of mine")\n'
    line = len((model_text(tmp_path / "notes") + more).splitlines())
    with pytest.raises(UserCodeError, match=rf"model\.py:{line}: ValueError: a mistake of mine") as caught:
        search_in(tmp_path, more=more)
    assert "misbehave" in caught.value.details
    assert len(runs_in(tmp_path / "notes")) == 3
    assert psutil.Process().children() == []


class Pretended:
    """In the place of the processes: ``answer`` says how a run with that multiplier ends."""

    def __init__(self, answer: Callable[[float], Report]) -> None:
        self.answer = answer

    def all_do(self, work: Callable[[], None]) -> None:
        work()

    def run(self, run: Run) -> Report:
        return self.answer(run.multiplier)


def pretend(path: Path, answer: Callable[[float], Report], num_trials: int) -> tuple[TuningTrial, ...]:
    ledger = Ledger(open_storage(str(path / "study.log")), "gradplan", {"model": "1"})

    def make_run(multiplier: float) -> Run:
        return Run(multiplier=multiplier, seed=0, num_steps=1)

    return search_multiplier(ledger, Pretended(answer), make_run, num_trials, 0, lambda _: None)  # type: ignore[arg-type]


def test_rates_that_are_out_of_memory_do_not_end_the_search_and_are_never_the_best(tmp_path: Path) -> None:
    def answer(multiplier: float) -> Report:
        return Report(reason="out of memory") if multiplier == 2 else Report(value=abs(multiplier - 0.7))

    trials = pretend(tmp_path, answer, 5)
    assert len(trials) == 5
    assert 2 not in [trial.multiplier for trial in trials]


def test_where_nothing_works_any_more_what_was_found_counts(tmp_path: Path) -> None:
    ended: list[float] = []

    def answer(multiplier: float) -> Report:
        ended.append(multiplier)
        return Report(value=1.0) if len(ended) <= 2 else Report(error="broken")

    assert len(pretend(tmp_path, answer, 8)) == 2
    assert len(ended) == 5


def test_a_loss_that_is_huge_or_missing_counts_as_diverged(tmp_path: Path) -> None:
    answers = {1.0: Report(value=1e35), 0.5: Report(), 2.0: Report(has_diverged=True, value=1.0)}
    trials = pretend(tmp_path, lambda multiplier: answers[multiplier], 3)
    assert [trial.value for trial in trials] == [None] * 3


# The range


def ended(*tried: tuple[float, float]) -> list[optuna.trial.FrozenTrial]:
    space = {"multiplier": optuna.distributions.FloatDistribution(1e-3, 1e3, log=True)}
    return [optuna.create_trial(params={"multiplier": m}, distributions=space, value=value) for m, value in tried]


@pytest.mark.parametrize(
    ("tried", "range_"),
    [
        ([], (LOWEST, HIGHEST)),
        ([(1.0, 0.1), (0.26, 0.2), (3.9, 0.2)], (LOWEST, HIGHEST)),
        ([(1.0, 0.2), (3.0, 0.1)], (LOWEST, 16.0)),
        ([(1.0, 0.2), (15.0, 0.1)], (LOWEST, 64.0)),
        ([(1.0, 0.2), (63.0, 0.1)], (LOWEST, 64.0)),
        ([(1.0, 0.2), (0.3, 0.1)], (1 / 16, HIGHEST)),
        ([(1.0, 0.2), (0.016, 0.1)], (1 / 64, HIGHEST)),
        ([(1.0, -0.2), (0.3, 0.0)], (LOWEST, HIGHEST)),
        ([(1.0, DIVERGED), (0.5, DIVERGED)], (1 / 64, HIGHEST)),
        ([(1.0, DIVERGED), (0.5, 0.1)], (LOWEST, HIGHEST)),
    ],
)
def test_the_range_follows_the_best_and_has_an_end(
    tried: list[tuple[float, float]], range_: tuple[float, float]
) -> None:
    assert bounds(ended(*tried)) == range_


# How long a run is


@pytest.mark.parametrize("num_real_steps", [80, 100, 101, 102, 103, 106, 109])
def test_a_run_at_the_usual_horizon_is_no_shorter_than_a_quarter(num_real_steps: int) -> None:
    length = length_of(a_plan(dataset_length=num_real_steps * BATCH), 0.25, None, None)
    assert (length.num_real_steps, length.num_steps >= num_real_steps / 4) == (num_real_steps, True)


def test_the_real_training_is_as_long_as_train_py_makes_it() -> None:
    assert length_of(a_plan(), 1.0, None, None).num_real_steps == 20
    assert length_of(a_plan(), 1.0, 3, None).num_real_steps == 60
    assert length_of(a_plan(), 1.0, 3, 50).num_real_steps == 50
    assert length_of(a_plan(), 1.0, None, 1000).num_real_steps == 20  # train.py ends with its one epoch


def test_a_short_training_is_run_whole() -> None:
    length = length_of(a_plan(dataset_length=5 * BATCH), 0.25, None, None)
    assert (length.num_steps, length.num_real_steps) == (5, 5)


# Every form of model.py. In this process: each script serves three runs as its child would.

TRAINED = """
import torch
from torch import nn
"""
DATA = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return torch.sin(torch.arange(4.0) + index), torch.tensor([index % 3 / 3])
"""
NET = """
def build_model():
    return nn.Linear(4, 1)
"""
LOSS = """
def compute_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
DATASETS = "\ndef build_dataset():\n    return Data()\n\ndef build_validation_dataset():\n    return Data()\n"
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(37):
            x = torch.randn(4)
            yield x, x[:1]

def build_dataset():
    return Stream()
"""
BATCHES = """
def build_batch(n):
    x = torch.randn(n, 4)
    return x, x[:, :1]
"""
YIELDS = """
def compute_loss(model, batch):
    yield nn.functional.mse_loss(model(batch[0]), batch[1])
    yield 0.01 * model.weight.square().sum()
"""
COUNTS = """
def build_dataset():
    return Sentences(48)

def build_validation_dataset():
    return Sentences(16)

def build_model():
    return nn.Embedding(8, 1)

def compute_loss(model, tokens):
    known = tokens != -100
    return (model(tokens[known]).squeeze(-1) - tokens[known]).square().mean()
"""
LIGHTNING = """
lightning = __import__("lightning")

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

def build_model():
    return Net()
"""
DATA_NAMES = ("build_dataset", "build_validation_dataset")
FORMS: dict[str, tuple[str, Plan]] = {
    "dataset": (TRAINED + DATA + NET + LOSS + DATASETS, a_plan(("build_model", "compute_loss", *DATA_NAMES))),
    "held out": (
        TRAINED + DATA + NET + LOSS + "\ndef build_dataset():\n    return Data()\n",
        a_plan(("build_model", "compute_loss", "build_dataset")),
    ),
    "build_batch": (TRAINED + NET + LOSS + BATCHES, a_plan(("build_model", "compute_loss", "build_batch"))),
    "stream": (
        TRAINED + NET + LOSS + STREAM + BATCHES,
        a_plan(("build_model", "compute_loss", "build_dataset", "build_batch"), is_stream=True),
    ),
    "yields": (
        TRAINED + DATA + NET + YIELDS + DATASETS,
        a_plan(("build_model", "compute_loss", *DATA_NAMES), backward="sequential"),
    ),
    "count_items": (
        SENTENCES + COUNTS,
        a_plan(("build_model", "compute_loss", "count_items", "collate_fn", *DATA_NAMES), num_counts=1),
    ),
    "16-mixed": (
        TRAINED + DATA + NET + LOSS + DATASETS,
        a_plan(("build_model", "compute_loss", *DATA_NAMES), precision="16-mixed"),
    ),
    "lightning": (
        TRAINED + DATA + LIGHTNING + DATASETS,
        a_plan(("build_model", *DATA_NAMES), lightning=("training_step", "configure_optimizers")),
    ),
    "a model of the module's": (
        TRAINED + DATA + LOSS + DATASETS + "\nmodel = nn.Linear(4, 1)\n",
        a_plan(("model", "compute_loss", *DATA_NAMES), builder="model"),
    ),
    "a model of a neighbour's": (
        TRAINED + DATA + LOSS + DATASETS + "\nfrom near import net\nmodel = net.model\n",
        a_plan(("model", "compute_loss", *DATA_NAMES), builder="model"),
    ),
}
# Runs scripts one after the other, as ``python train.py`` does with each, and prints the losses of each as one list.
TRAIN_ALL = """
import contextlib, io, json, re, runpy, sys
losses = []
for arguments in json.loads(sys.argv[1]):
    known, sys.argv, out = set(sys.modules), arguments, io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(arguments[0], run_name="__main__")
    losses.append([re.findall(word + r" (\\S+)", out.getvalue()) for word in (" loss", "validation loss")])
    for name in set(sys.modules) - known:
        if "/form" in str(getattr(sys.modules[name], "__file__", "")) or name in ("near", "model"):
            del sys.modules[name]
print(json.dumps(losses))
"""


def runs_of(plan: Plan, seed: int = 3) -> list[Run]:
    length = (
        length_of(plan, 1.0, 2, None) if "build_dataset" in plan.recipe.names and not plan.recipe.is_stream else None
    )
    length = length or length_of(plan, 1.0, None, 20)
    same: dict[str, Any] = {"seed": seed, "num_steps": 8, "epochs": length.epochs}
    return [Run(multiplier=one, validation_share=length.held_out, **same) for one in (1.0, 2.0, 1.0)]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Report], list[float]]]:
    """For each form of model.py the reports of three runs, with 1, 2 and 1, and what train.py prints with 2."""
    reports: dict[str, list[Report]] = {}
    commands: list[list[str]] = []
    here = {name: form for name, form in FORMS.items() if name != "lightning" or importlib.util.find_spec(name)}
    for number, (name, (text, plan)) in enumerate(here.items()):
        plan = plan.model_copy(
            update={"recipe": plan.recipe.model_copy(update={"dataset_length": 48}), "effective_batch_size": BATCH}
        )
        folder = tmp_path_factory.mktemp(f"form{number}")
        (folder / "near").mkdir()
        (folder / "near" / "net.py").write_text("from torch import nn\nmodel = nn.Linear(4, 1)\n")
        (folder / "model.py").write_text(text)
        with script_of(plan, folder / "model.py") as script:
            start = Script(script=str(script), model_folder=str(folder), parent_pid=os.getpid(), device="cpu")
            reports[name] = list(serve(start, [run.model_dump_json() for run in runs_of(plan)]))
        doubled = plan.model_copy(update={"learning_rate_multiplier": 2.0, "learning_rate": 2 * RATE})
        write_script(doubled, folder / "train.py", plan_path=folder / "gradplan.json")
        run = runs_of(plan)[0]
        options = {"--max-steps": run.num_steps, "--epochs": run.epochs, "--validation-share": run.validation_share}
        options |= {"--seed": run.seed, "--device": "cpu", "--out": folder / "out"}
        given = [str(part) for key, value in options.items() if value is not None for part in (key, value)]
        commands.append([str(folder / "train.py"), *given])
    run_all = [sys.executable, "-c", TRAIN_ALL, json.dumps(commands)]
    done = subprocess.run(run_all, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    printed = [[float(value) for value in (val or train)] for train, val in json.loads(done.stdout.splitlines()[-1])]
    return {name: (reports[name], losses) for name, losses in zip(here, printed, strict=True)}


def skip_without_lightning(name: str) -> None:
    if name == "lightning":
        pytest.importorskip("lightning", reason="lightning is not installed")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_model_gives_the_loss_that_train_py_prints(
    forms: dict[str, tuple[list[Report], list[float]]], name: str
) -> None:
    skip_without_lightning(name)
    (_, doubled, _), printed = forms[name]
    assert doubled.value == pytest.approx(printed[-1], abs=6e-5), doubled


@pytest.mark.parametrize("name", FORMS)
def test_each_run_begins_with_the_untrained_model(
    forms: dict[str, tuple[list[Report], list[float]]], name: str
) -> None:
    skip_without_lightning(name)
    one, doubled, again = forms[name][0]
    assert one.value == again.value
    assert one.value != doubled.value


def test_a_library_inside_the_users_folder_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / ".venv" / "lib" / "site-packages"
    library.mkdir(parents=True)
    (library / "imported_once.py").write_text(
        "import builtins\nassert not hasattr(builtins, 'ONCE')\nbuiltins.ONCE = 1\n"
    )
    monkeypatch.syspath_prepend(str(library))
    text, plan = FORMS["dataset"]
    (tmp_path / "model.py").write_text(text + "\nimport imported_once\n")
    try:
        with script_of(plan, tmp_path / "model.py") as script:
            start = Script(script=str(script), model_folder=str(tmp_path), parent_pid=os.getpid(), device="cpu")
            reports = list(serve(start, [run.model_dump_json() for run in runs_of(plan)]))
    finally:
        vars(builtins).pop("ONCE", None)
    assert [report.error for report in reports] == [None] * 3


def test_without_a_validation_set_a_tenth_is_held_out_and_that_is_said(tmp_path: Path) -> None:
    plan = a_plan(tuple(name for name in NAMES if name != "build_validation_dataset"))
    found = tune_pretended(tmp_path, plan)
    assert [notice.code for notice in found.warnings] == ["tuning-held-out"]
    assert "10%" in found.warnings[0].message
    assert length_of(plan, 1.0, None, None).num_real_steps == 18


def test_without_a_dataset_the_last_training_losses_are_compared(tmp_path: Path) -> None:
    found = tune_pretended(tmp_path, a_plan(("build_model", "build_batch", "compute_loss")), epochs=None)
    assert found.tuning is not None
    assert found.tuning.objective.startswith("mean training loss of the last tenth")
    assert (found.tuning.num_steps, found.tuning.num_real_steps) == (25, 100)


def test_runs_shorter_than_a_quarter_are_warned_of(tmp_path: Path) -> None:
    found = tune_pretended(tmp_path, a_plan(dataset_length=400 * BATCH), horizon=0.1, epochs=1)
    assert [notice.code for notice in found.warnings] == ["tuning-short"]


def tune_pretended(path: Path, plan: Plan, **options: Any) -> Plan:
    """Around runs that never happen: all end with the same loss."""
    folder = make_folder(path, plan=plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("gradplan.probes.tuning.search.Runners.run", lambda self, run: Report(value=1.0))
        return tune(plan, **{"num_trials": 3, "epochs": EPOCHS, **options})


# The command line


def start_command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if os.name != "nt":  # a job in the background would ignore Ctrl-C
        pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "gradplan", *arguments]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)


@pytest.fixture
def closing() -> Iterator[list[subprocess.Popen[str]]]:
    """Commands that are not to outlive a test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_with_json_only_the_plan_is_on_stdout(tmp_path: Path, closing: list[subprocess.Popen[str]]) -> None:
    folder = make_folder(tmp_path)
    process = start_command(
        folder, "tune", "gradplan.json", "--trials", "2", "--epochs", "4", "--device", "cpu", "--json"
    )
    closing.append(process)
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 0, err
    plan = from_json(out)
    assert plan == read_plan(folder / "gradplan.json")
    assert plan.tuning is not None
    assert [trial.multiplier for trial in plan.tuning.trials] == [1.0, 0.5]
    assert "hello from the model" in err
    assert "Warning" not in err
    assert "Traceback" not in err


def test_a_probe_can_tune_what_it_planned(tmp_path: Path, closing: list[subprocess.Popen[str]]) -> None:
    folder = make_folder(
        tmp_path, more="\nBATCH_SIZE, LEARNING_RATE = 8, 0.1\nOPTIMIZER = build_optimizer(nn.Linear(1, 1), 1.0)\n"
    )
    device = {"total_bytes": 2**30, "bytes_per_sample": 2**26}
    (tmp_path / "device.json").write_text(json.dumps(device))
    process = start_command(folder, "probe", "model.py", "--device", f"test:{tmp_path / 'device.json'}", "--tune", "2")
    closing.append(process)
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 0, err
    plan = read_plan(folder / "gradplan.json")
    assert plan.tuning is not None
    assert len(plan.tuning.trials) == 2
    assert "hello from the model" not in out
    assert (folder / "train.py").exists()


def test_ctrl_c_leaves_no_process_and_the_plan_as_it_was(tmp_path: Path, closing: list[subprocess.Popen[str]]) -> None:
    folder = make_folder(tmp_path, more="\ndef misbehave(rate):\n    import time\n    time.sleep(600)\n")
    before = (folder / "gradplan.json").read_bytes()
    process = start_command(folder, "tune", "gradplan.json", "--epochs", "4", "--device", "cpu")
    closing.append(process)
    deadline = time.monotonic() + LONGEST_SECONDS
    while not runs_in(tmp_path / "notes") and time.monotonic() < deadline:
        time.sleep(0.05)
    (run,) = runs_in(tmp_path / "notes")
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 130
    assert err.endswith("interrupted\n")
    psutil.wait_procs([psutil.Process(run.pid)] if psutil.pid_exists(run.pid) else [], timeout=LONGEST_SECONDS)
    assert not psutil.pid_exists(run.pid)
    assert (folder / "gradplan.json").read_bytes() == before


# What is refused


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_folder(tmp_path)
    monkeypatch.chdir(folder)
    return folder


def command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["tune", "gradplan.json", *arguments], prog_name="gradplan")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--horizon", "0"], "the horizon is a share of the real training"),
        (["--horizon", "1.5"], "above 0 and up to 1, not 1.5"),
        (["--horizon", "-1"], "horizon"),
        (["--horizon", "nan"], "not a number"),
        (["--seeds", "4"], "4 seeds are too few: at least 5"),
        (["--trials", "0"], "not a count"),
        (["--workers", "0"], "not a count"),
        (["--storage", "nonsense://x"], "cannot open the storage nonsense://x"),
        (["--storage", "nowhere/study.log"], "cannot open the storage nowhere/study.log"),
        (["--storage", "sqlite:///nowhere/study.db"], "cannot open the storage sqlite:///nowhere/study.db"),
        (["--storage", "."], "cannot open the storage ."),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments: list[str], words: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("driver", ["postgresql+psycopg2", "postgresql+psycopg", "mysql+pymysql"])
def test_a_driver_that_is_not_installed_is_named(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = driver.partition("+")[2]
    monkeypatch.setitem(sys.modules, package, None)
    result = command("--storage", f"{driver}://me@127.0.0.1:1/studies")
    assert result.exit_code == 2, result.stderr
    assert package in result.stderr.replace(driver, "")


@pytest.mark.usefixtures("here")
def test_an_unknown_learning_rate_is_refused() -> None:
    plan = a_plan().model_copy(update={"learning_rate": None, "base_learning_rate": None})
    write_plan(plan, "gradplan.json")
    result = command()
    assert (result.exit_code, result.stderr.splitlines()[0]) == (
        2,
        "error: the learning rate is unknown: set LEARNING_RATE or --base-lr, and plan again",
    )


@pytest.mark.usefixtures("here")
def test_epochs_without_a_dataset_are_refused() -> None:
    write_plan(a_plan(("build_model", "build_batch", "compute_loss")), "gradplan.json")
    assert "give --max-steps" in command("--epochs", "2").stderr


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
@pytest.mark.parametrize("where", ["study.log", "sqlite:///study.db"])
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_folder_that_is_read_only_is_refused(here: Path, where: str, is_begun: bool) -> None:
    name = where.rpartition("/")[2]
    if is_begun:
        open_storage(where)
        (here / name).chmod(0o444)
    here.chmod(0o555)
    try:
        with pytest.raises(UsageError, match="storage"):
            tune(a_plan(), storage=where)
    finally:
        here.chmod(0o755)


def test_two_models_of_one_file_have_studies_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    plan = a_plan()
    one, other = (
        plan.model_copy(
            update={
                "model": f"model.py:{builder}",
                "num_parameters": num_parameters,
                "recipe": plan.recipe.model_copy(update={"model": f"model.py:{builder}", "builder": builder}),
            }
        )
        for builder, num_parameters in (("small", 5), ("large", 50))
    )
    length = length_of(one, 0.25, None, None)
    assert identity_of(one, tmp_path / "model.py", length, 0) != identity_of(other, tmp_path / "model.py", length, 0)
