"""A study that was killed goes on, and several commands share one: `gradplan tune` on files, SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.trial import FrozenTrial, TrialState
from train_scripts import plan_for

from gradplan.files import read_plan, write_plan
from gradplan.plan import Plan
from gradplan.probes.errors import UsageError
from gradplan.probes.evidence import TuningTrial
from gradplan.probes.measuring.messages import Report
from gradplan.probes.tuning import ledger as ledgers
from gradplan.probes.tuning.ledger import ALIVE, OWNER, PLANNED, Ledger, open_storage
from gradplan.probes.tuning.messages import Run
from gradplan.probes.tuning.search import run_pairs, search_multiplier
from gradplan.tuning import tune

LONGEST_SECONDS = 240
NAMES = ("build_model", "build_dataset", "build_validation_dataset", "compute_loss", "build_optimizer")
LEFT = "left to wait"  # a file: while it is there, the third run waits

# A line in NOTES as each run begins, with its process, and as it ends: there is one validation, at its end.
MODEL = """
import json, os, time
import torch
from torch import nn

NOTES, LEFT = {notes!r}, {left!r}

def note(*what):
    with open(NOTES, "a") as file:
        file.write(json.dumps([os.getpid(), *what]) + "\\n")

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 160
    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0) * index)
        return x, x.sum(0, keepdim=True)

build_dataset = build_validation_dataset = Samples

def build_model():
    note("begun")
    with open(NOTES) as file:
        number = sum("begun" in line for line in file)
    while number == 3 and os.path.exists(LEFT):
        time.sleep(0.05)
    return nn.Linear(4, 1)

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr * 8)

def compute_loss(model, batch):
    if not model.training and len(batch[0]) == 160:
        note("ended", [round(weight, 5) for weight in model.weight[0].tolist()])
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def a_plan(**changes: Any) -> Plan:
    return plan_for(NAMES, 8, 160, dataset_length=160).model_copy(update=changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    text = MODEL.format(notes=str(tmp_path / "notes"), left=str(tmp_path / LEFT))
    (folder / "model.py").write_text(text)
    write_plan(a_plan(), folder / "gradplan.json")
    return folder


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start("--trials", "4")``: the command, as another terminal runs it; its plan goes to a file of its own."""
    started: list[subprocess.Popen[str]] = []

    def start_here(*options: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        fixed = ["--epochs", "4", "--device", "cpu", "--plan", f"tuned{len(started)}.json"]
        command = [sys.executable, "-m", "gradplan", "tune", "gradplan.json", *fixed, *options]
        started.append(subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes))
        return started[-1]

    yield start_here
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, err = process.communicate(timeout=LONGEST_SECONDS)
        assert process.returncode == 0, err
        assert "Traceback" not in err


def noted(folder: Path, what: str) -> list[Any]:
    """(process, more) of each such line."""
    path = folder.parent / "notes"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(pid, *more) for pid, kind, *more in lines if kind == what]


def wait_for(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trials_in(where: str, name: str = "gradplan") -> list[FrozenTrial]:
    return optuna.load_study(study_name=name, storage=open_storage(where)).get_trials()


def states(trials: list[FrozenTrial]) -> Counter[TrialState]:
    return Counter(trial.state for trial in trials)


def check_search(where: str, num_trials: int) -> None:
    """So many are done, all with rates of their own, and none is left behind."""
    found = states(trials_in(where))
    assert found[TrialState.COMPLETE] == num_trials
    assert found[TrialState.RUNNING] == found[TrialState.WAITING] == 0
    done = [trial.params["multiplier"] for trial in trials_in(where) if trial.state == TrialState.COMPLETE]
    assert len(set(done)) == num_trials
    assert {1.0, 0.5, 2.0} <= set(done)


def check_each_ended_once(folder: Path, num_runs: int) -> None:
    """Runs of one seed that end with the same weights had the same rate."""
    ended = [tuple(weights) for _, weights in noted(folder, "ended")]
    assert len(ended) == len(set(ended)) == num_runs


def check_nothing_lives(folder: Path) -> None:
    wait_for(lambda: not any(psutil.pid_exists(pid) for (pid,) in noted(folder, "begun")))


# Killed, and begun again


def test_a_command_that_was_killed_goes_on_where_it_was(folder: Path, start: Callable[..., Any]) -> None:
    (folder.parent / LEFT).touch()
    killed = start("--trials", "4")
    wait_for(lambda: len(noted(folder, "begun")) == 3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    check_nothing_lives(folder)
    where = str(folder / "gradplan.study.log")
    complete, running = TrialState.COMPLETE, TrialState.RUNNING
    assert [trial.state for trial in trials_in(where)] == [complete, complete, running]
    (folder.parent / LEFT).unlink()
    finish(start("--trials", "4"))
    check_search(where, 4)
    check_nothing_lives(folder)
    plan = read_plan(folder / "tuned1.json")
    assert plan.tuning is not None
    assert len(plan.tuning.trials) == 4
    search = [tuple(weights) for _, weights in noted(folder, "ended")][:4]
    assert len(set(search)) == 4
    assert len(noted(folder, "ended")) == 4 + len(plan.tuning.checks)
    check_optuna_reads(where)


def check_optuna_reads(where: str) -> None:
    """As a dashboard does."""
    study = optuna.load_study(study_name="gradplan", storage=open_storage(where))
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert study.best_trial.value == min(trial.value for trial in study.trials if trial.value is not None)
    assert set(study.best_params) == {"multiplier"}
    assert "gradplan" in [summary.study_name for summary in optuna.get_all_study_summaries(open_storage(where))]
    if importlib.util.find_spec("pandas") is not None:
        assert list(study.trials_dataframe()["state"]) == [trial.state.name for trial in study.trials]


# Several at once


@pytest.mark.parametrize(("where", "num_commands"), [("study.log", 2), ("sqlite:///study.db", 4)])
def test_commands_that_start_together_share_the_trials(
    folder: Path, start: Callable[..., Any], where: str, num_commands: int
) -> None:
    finish(*[start("--trials", "5", "--storage", where) for _ in range(num_commands)])
    place = where.replace("study.", f"{folder}/study.")
    check_search(place, 5)
    check_nothing_lives(folder)
    plans = [read_plan(folder / f"tuned{number}.json") for number in range(num_commands)]
    assert len({plan.model_dump_json() for plan in plans}) == 1
    assert plans[0].tuning is not None
    assert len(noted(folder, "ended")) == 5 + len(plans[0].tuning.checks)


def test_two_workers_of_one_command_share_the_trials(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plan = tune(a_plan(), num_trials=6, num_workers=2, epochs=4, device="cpu")
    check_search("gradplan.study.log", 6)
    assert plan.tuning is not None
    runs = noted(folder, "begun")
    assert len(runs) == len(noted(folder, "ended")) == 6 + len(plan.tuning.checks)
    assert len({pid for (pid,) in runs[:6]}) == 2
    check_nothing_lives(folder)


# What is shared, without processes

WANTED = [{"multiplier": multiplier, "seed": seed} for seed in (1, 2, 3) for multiplier in (1.0, 3.0)]


class Pretended:
    """In the place of the processes: a run with multiplier m has the loss |m - 1|."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def all_do(self, work: Callable[[], None]) -> None:
        work()

    def run(self, run: Run) -> Report:
        self.runs.append(run)
        return Report(value=abs(run.multiplier - 1))


def make_run(multiplier: float, seed: int = 0) -> Run:
    return Run(multiplier=multiplier, seed=seed, num_steps=1)


def a_ledger(path: Path, **identity: str) -> Ledger:
    return Ledger(open_storage(str(path / "study.log")), "gradplan", {"model": "1", **identity})


def search(path: Path, num_trials: int) -> tuple[tuple[TuningTrial, ...], list[Run]]:
    runners = Pretended()
    found = search_multiplier(a_ledger(path), runners, make_run, num_trials, 7, lambda _: None)  # type: ignore[arg-type]
    return found, runners.runs


def check_pairs_end(path: Path, wanted: list[dict[str, Any]]) -> tuple[TuningTrial, ...]:
    """In a thread, as a mistake here is to wait forever."""
    found: list[tuple[TuningTrial, ...]] = []

    def work() -> None:
        found.append(run_pairs(a_ledger(path), Pretended(), make_run, wanted, lambda _: None))  # type: ignore[arg-type]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert found, "the pairs are run, and it still waits"
    return found[0]


def test_a_search_that_goes_on_tries_new_multipliers_although_it_is_seeded(tmp_path: Path) -> None:
    first, _ = search(tmp_path, 5)
    second, runs = search(tmp_path, 9)
    assert second[:5] == first
    assert len({trial.multiplier for trial in second}) == 9
    assert len(runs) == 4


@pytest.mark.parametrize("state", [TrialState.COMPLETE, TrialState.FAIL])
def test_each_process_that_goes_on_draws_numbers_of_its_own(tmp_path: Path, state: TrialState) -> None:
    drawn = []
    for _ in range(3):
        ledger = a_ledger(tmp_path)
        trial = ledger.take(9, 7)
        assert trial is not None
        drawn.append(trial.suggest_float("multiplier", 0.25, 4, log=True))
        ledger.study.tell(trial, 1.0 if state == TrialState.COMPLETE else None, state)
    assert len(set(drawn)) == 3


def test_a_search_that_is_done_runs_nothing_again(tmp_path: Path) -> None:
    first, _ = search(tmp_path, 4)
    assert search(tmp_path, 4) == (first, [])
    assert search(tmp_path, 2) == (first, [])


def test_a_search_is_reproducible(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = search(tmp_path, 6)[0], search(tmp_path / "other", 6)[0]
    assert [trial.multiplier for trial in one] == [trial.multiplier for trial in other]


def test_a_trial_that_failed_is_not_done(tmp_path: Path) -> None:
    ledger = a_ledger(tmp_path)
    trial = ledger.take(3, 0)
    assert trial is not None
    ledger.fail(trial, "a reason")
    assert ledger.done() == []
    found, runs = search(tmp_path, 3)
    assert (len(found), len(runs)) == (3, 3)


def test_two_that_take_the_last_trial_run_it_once(tmp_path: Path) -> None:
    search(tmp_path, 3)
    one, other = a_ledger(tmp_path), a_ledger(tmp_path)
    trials = other.study.get_trials()
    first = one.take(4, 7)
    assert first is not None
    with pytest.MonkeyPatch.context() as patch:  # the other looked before the first had taken it
        answers = [trials]
        original = other.study.get_trials
        patch.setattr(other.study, "get_trials", lambda *a, **more: answers.pop() if answers else original(*a, **more))
        assert other.take(4, 7) is None
    one.finish(first, 1.0)
    found = states(one.study.get_trials())
    assert (found[TrialState.COMPLETE], found[TrialState.RUNNING]) == (4, 0)


def test_pairs_that_two_commands_planned_at_the_same_moment_are_run_once(tmp_path: Path) -> None:
    ledger = a_ledger(tmp_path)
    ledger.plan(WANTED)
    for params in WANTED:  # another one's, who did not see these yet
        ledger.study.enqueue_trial(params, user_attrs={PLANNED: params})
    assert len(check_pairs_end(tmp_path, WANTED)) == len(WANTED)


def test_fewer_seeds_than_before_are_enough(tmp_path: Path) -> None:
    ledger = a_ledger(tmp_path)
    ledger.plan(WANTED)
    for _ in WANTED[:5]:
        trial = ledger.take_planned(WANTED)
        assert trial is not None
        multiplier = trial.suggest_float("multiplier", 0.01, 100, log=True)
        ledger.finish(trial, multiplier + trial.suggest_int("seed", 0, 9))
    check_pairs_end(tmp_path, WANTED[:4])


def test_each_pair_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    assert len(check_pairs_end(tmp_path, WANTED[:2])) == 2
    found = check_pairs_end(tmp_path, WANTED)
    assert [(trial.seed, trial.multiplier) for trial in found] == [(w["seed"], w["multiplier"]) for w in WANTED]


def left_behind(path: Path, **owner: Any) -> Ledger:
    """A study in which somebody's trial is running."""
    ledger = a_ledger(path)
    ledger.plan([{"multiplier": 0.5}])
    trial = ledger.take(3, 0)
    assert trial is not None
    trial.set_user_attr(OWNER, {**trial.user_attrs[OWNER], **owner})
    return ledger


def gone() -> dict[str, Any]:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return {"pid": process.pid}


def test_the_trial_of_a_process_that_is_gone_is_tried_again(tmp_path: Path) -> None:
    ledger = left_behind(tmp_path, **gone())
    ledger.revive()
    ledger.revive()
    assert [trial.state for trial in ledger.study.get_trials()] == [TrialState.FAIL, TrialState.WAITING]
    assert [trial.multiplier for trial in search(tmp_path, 3)[0]].count(0.5) == 1


def test_the_trial_of_another_process_with_that_number_is_tried_again(tmp_path: Path) -> None:
    ledger = left_behind(tmp_path, started=0.0)
    ledger.revive()
    assert ledger.study.get_trials()[0].state == TrialState.FAIL


def test_the_trial_of_a_process_that_lives_is_left_to_it(tmp_path: Path) -> None:
    ledger = left_behind(tmp_path)
    ledger.revive()
    assert ledger.study.get_trials()[0].state == TrialState.RUNNING


@pytest.mark.parametrize("is_silent", [False, True])
def test_the_trial_of_another_machine_is_tried_again_once_that_is_silent(tmp_path: Path, is_silent: bool) -> None:
    ledger = left_behind(tmp_path, host="elsewhere", **gone())
    (trial,) = ledger.study.get_trials()
    heard = time.time() - (2 * ledgers.SILENT_SECONDS if is_silent else 1)
    ledger.study._storage.set_trial_user_attr(trial._trial_id, ALIVE, heard)
    ledger.revive()
    assert (ledger.study.get_trials()[0].state == TrialState.FAIL) is is_silent


def test_a_trial_that_others_gave_up_does_not_end_the_one_who_runs_it(tmp_path: Path) -> None:
    ledger = a_ledger(tmp_path)
    trial = ledger.take(3, 0)
    assert trial is not None
    a_ledger(tmp_path).study.tell(trial.number, state=TrialState.FAIL)
    ledger.finish(trial, 1.0)
    assert ledger.done() == []


# Another study


@pytest.mark.parametrize(
    ("changes", "options", "word"),
    [
        ({"optimizer": "Adam"}, {}, "optimizer: SGD there, Adam here"),
        ({"base_learning_rate": 0.2, "learning_rate": 0.2}, {}, "base_learning_rate: 0.1 there, 0.2 here"),
        ({"precision": "bf16-mixed"}, {}, "precision"),
        ({}, {"seed": 1}, "seed: 0 there, 1 here"),
        ({}, {"horizon": 0.5}, "steps: 20 there, 40 here"),
    ],
    ids=["optimizer", "rate", "precision", "seed", "horizon"],
)
def test_a_study_of_another_plan_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], options: dict[str, Any], word: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("gradplan.probes.tuning.search.Runners.run", lambda self, run: Report(value=1.0))
    tune(a_plan(), num_trials=1, epochs=4)
    with pytest.raises(UsageError, match=r"is of another plan \(.*--study NAME") as caught:
        tune(a_plan(**changes), num_trials=2, epochs=4, **options)
    assert word in str(caught.value)
    assert len(trials_in("gradplan.study.log")) == 1
    assert tune(a_plan(**changes), num_trials=1, epochs=4, study="another", **options).tuning is not None


def test_a_study_of_another_model_file_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("gradplan.probes.tuning.search.Runners.run", lambda self, run: Report(value=1.0))
    tune(a_plan(), num_trials=1, epochs=4)
    with open("model.py", "a") as file:
        file.write("# changed\n")
    with pytest.raises(UsageError, match="model: "):
        tune(a_plan(), num_trials=1, epochs=4)


def test_a_study_that_is_not_gradplans_is_refused(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "study.log"))
    study = optuna.create_study(storage=storage, study_name="gradplan")
    study.optimize(lambda trial: trial.suggest_float("multiplier", 0, 1), n_trials=1)
    with pytest.raises(UsageError, match="is not gradplan's; give another name with --study"):
        a_ledger(tmp_path)
    assert "gradplan" not in study.user_attrs


def test_one_who_comes_while_the_study_is_being_made_is_let_in(tmp_path: Path) -> None:
    attributes = optuna.Study.user_attrs
    seen: list[dict[str, Any]] = []

    def read_before_the_other(self: optuna.Study) -> dict[str, Any]:
        known = dict(attributes.__get__(self))
        if not seen:
            seen.append(known)
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(optuna.Study, "user_attrs", attributes)
                a_ledger(tmp_path).plan([{"multiplier": 1.0}])
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.Study, "user_attrs", property(read_before_the_other))
        ledger = a_ledger(tmp_path)
    assert len(ledger.study.get_trials()) == 1


# A database server


def postgres_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


DRIVER = next((name for name in ("psycopg2", "psycopg") if importlib.util.find_spec(name)), None)


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of an empty database, on a server of this test's own. It refuses to run as root."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed")
    if DRIVER is None:
        pytest.skip("neither psycopg2 nor psycopg is installed")
    user = "nobody" if os.geteuid() == 0 else getpass.getuser()
    as_user: dict[str, Any] = {"user": user, "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
    as_user |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": "/"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, socket.socket() as free:
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, user)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        make = [str(binaries / "initdb"), "-D", str(folder / "data"), "-U", "me", "-A", "trust", "--no-sync"]
        made = subprocess.run(make, check=False, timeout=LONGEST_SECONDS, **as_user)
        assert made.returncode == 0, made.stdout.decode()
        listen = ["-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-F"]
        run = [str(binaries / "postgres"), "-D", str(folder / "data"), *listen]
        process = subprocess.Popen(run, **{**as_user, "stdout": subprocess.DEVNULL})
        try:
            wait_for(lambda: process.poll() is not None or answers(port))
            assert process.poll() is None, "the server does not start"
            yield f"postgresql+{DRIVER}://me@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # ends what is connected, too
            process.wait(LONGEST_SECONDS)


def answers(port: int) -> bool:
    """Whether a client is let in."""
    assert DRIVER is not None
    driver: Any = importlib.import_module(DRIVER)
    with contextlib.suppress(driver.OperationalError):
        driver.connect(host="127.0.0.1", port=port, user="me", dbname="postgres").close()
        return True
    return False


def test_commands_share_a_postgresql_server_with_a_machine_that_died(
    folder: Path, start: Callable[..., Any], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("gradplan.probes.tuning.search.Runners.run", lambda self, run: Report(reason="killed"))
    with contextlib.suppress(Exception):  # makes the study, of this plan
        tune(a_plan(), num_trials=5, epochs=4, storage=server)
    study = optuna.load_study(study_name="gradplan", storage=open_storage(server))
    num_before = len(study.get_trials())
    study.enqueue_trial({"multiplier": 0.7}, user_attrs={PLANNED: {"multiplier": 0.7}})
    trial = study.ask()
    trial.suggest_float("multiplier", 0.25, 4, log=True)
    trial.set_user_attr(OWNER, {"host": "elsewhere", "pid": 1, "started": 0.0})
    trial.set_user_attr(ALIVE, time.time() - 2 * ledgers.SILENT_SECONDS)

    finish(*[start("--trials", "5", "--storage", server) for _ in range(2)])
    check_search(server, 5)
    check_nothing_lives(folder)
    trials = trials_in(server)
    assert trials[num_before].state == TrialState.FAIL
    done = [one.params["multiplier"] for one in trials if one.state == TrialState.COMPLETE]
    assert done.count(0.7) == 1
    check_optuna_reads(server)
