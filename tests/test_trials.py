"""Trials run in a child process that is kept while it is sound, replaced when it is not, and never left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Device, Notice
from gradplan.probes.measuring import trials
from gradplan.probes.measuring.child import Child
from gradplan.probes.measuring.messages import Hello, Job, Report, Start
from gradplan.probes.measuring.ranks_in_step import common_hello, common_report
from gradplan.probes.measuring.trials import FIRST_SECONDS, LEAST_SECONDS, LEFTOVER_BYTES, TIMES_SLOWER, Trials

MIB = 2**20
posix_only = pytest.mark.skipif(os.name == "nt", reason="no signals, and no groups of processes")

MODEL = """
import os
import signal
import sys
import torch
from torch import nn

pids = open("pids", "a")
print(os.getpid(), file=pids, flush=True)

def build_model():
    return nn.Linear(4, 1)

def build_batch(n):
    return torch.ones(n, 4)

def compute_loss(model, batch):
    if len(batch) == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    if len(batch) == 12:
        os.kill(os.getpid(), signal.SIGSEGV)
    if len(batch) == 13:
        print("printed:", sys.stdin.read(), os.read(0, 1), flush=True)
        os.write(1, b"written")
    return model(batch).square().mean()
"""
KILLS, CRASHES, PRINTS = 11, 12, 13
DEVICE = {"total_bytes": 1000 * MIB, "bytes_per_sample": MIB, "fixed_bytes": 100 * MIB}


def start_in(folder: Path, text: str = MODEL, device: dict[str, Any] = DEVICE) -> Start:
    """A model in that folder, on a device that is described there."""
    (folder / "model.py").write_text(text)
    (folder / "device.json").write_text(json.dumps(device))
    return Start(model="model.py", device="test:device.json", parent_pid=os.getpid(), precision="32-true")


def job(size: int, num_micro_batches: int = 2) -> Job:
    return Job(backward="joint", micro_batch_size=size, num_micro_batches=num_micro_batches, num_in_window=2)


def pids(folder: Path) -> list[int]:
    """Of every process that read the model, in order."""
    return [int(line) for line in (folder / "pids").read_text().split()]


def running(numbers: list[int]) -> list[int]:
    """Those that do not end."""
    processes = []
    for number in numbers:
        try:
            processes.append(psutil.Process(number))
        except psutil.NoSuchProcess:
            continue
    alive = psutil.wait_procs(processes, timeout=10)[1]
    return [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# Real processes on an invented device


@posix_only
def test_one_process_serves_until_a_trial_fails_and_is_then_replaced(tmp_path: Path) -> None:
    device = {**DEVICE, "bug_from": 2000}
    used: list[int] = []
    with Trials(start_in(tmp_path, device=device), str(tmp_path), is_kept=True) as processes:
        hello = processes.hello()
        assert hello is not None
        assert (hello.limit_bytes, hello.device.name) == (1000 * MIB, "invented device")
        for size in (2, 4, 3):
            report = processes.run(job(size))
            assert (report.reason, report.peak_reserved_bytes) == (None, (100 + size) * MIB)
            used.append(len(pids(tmp_path)))
        assert processes.run(job(901)).reason == "out of memory"
        used.append(len(pids(tmp_path)))
        with pytest.raises(UserCodeError, match=r"mat1 and mat2 shapes cannot be multiplied"):
            processes.run(job(2000))
        used.append(len(pids(tmp_path)))
        assert processes.run(job(KILLS)).reason == "killed"
        used.append(len(pids(tmp_path)))
        assert processes.run(job(2)).peak_reserved_bytes == 102 * MIB
        used.append(len(pids(tmp_path)))
    assert used == [1, 1, 1, 1, 2, 4, 5]  # what is killed has a second chance, and no third
    assert len(set(pids(tmp_path))) == 5
    assert running(pids(tmp_path)) == []


def test_a_process_that_keeps_memory_after_a_trial_is_replaced(tmp_path: Path) -> None:
    device = {**DEVICE, "leaks_bytes": LEFTOVER_BYTES + 1}
    with Trials(start_in(tmp_path, device=device), str(tmp_path), is_kept=True) as processes:
        peaks = [processes.run(job(2)).peak_reserved_bytes for _ in range(2)]
    assert peaks == [102 * MIB] * 2
    assert len(set(pids(tmp_path))) == 2


def test_what_the_users_code_prints_goes_to_standard_error_and_its_input_is_empty(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Trials(start_in(tmp_path), str(tmp_path), is_kept=True) as processes:
        assert processes.run(job(PRINTS)).reason is None
        assert processes.run(job(2)).reason is None
    out, err = capfd.readouterr()
    assert out == ""
    assert "printed:  b''\n" in err
    assert "written" in err
    assert len(pids(tmp_path)) == 1


@posix_only
def test_a_crash_is_the_users_error(tmp_path: Path) -> None:
    with Trials(start_in(tmp_path), str(tmp_path), is_kept=True) as processes:
        expected = r"a training step with a micro-batch of 12 ended its process without an exception \(SIGSEGV\);"
        with pytest.raises(UserCodeError, match=expected):
            processes.run(job(CRASHES))


@posix_only
def test_a_trial_that_takes_far_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MODEL + "\nimport subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid, file=pids, flush=True)\n"
    start = start_in(tmp_path, text, {**DEVICE, "hangs_from": 5})
    with Trials(start, str(tmp_path), is_kept=True) as processes:
        assert processes.run(job(2)).reason is None
        monkeypatch.setattr(trials, "LEAST_SECONDS", 0.5)
        monkeypatch.setattr(trials, "TIMES_SLOWER", 0.0)
        report = processes.run(job(5))
        assert (report.reason, report.peak_reserved_bytes) == ("not in time", None)
        assert len(pids(tmp_path)) == 4  # once more in a new process: the old one may have been to blame
        assert running(pids(tmp_path)) == []
    assert [notice.code for notice in processes.notices] == ["not-in-time"]


@posix_only
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_no_process_is_left_when_an_error_leaves_the_block(error: type[BaseException], tmp_path: Path) -> None:
    text = "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n" + MODEL
    text = text.replace("print(os.getpid()", "print(child.pid, os.getpid()")

    def fail() -> None:
        with Trials(start_in(tmp_path, text), str(tmp_path), is_kept=True) as processes:
            processes.hello()
            assert [psutil.pid_exists(number) for number in pids(tmp_path)] == [True, True]
            raise error

    with pytest.raises(error):
        fail()
    assert running(pids(tmp_path)) == []


def test_a_file_that_fails_to_load_is_the_users_error_with_its_line(tmp_path: Path) -> None:
    start = start_in(tmp_path, "import torch\n\nraise ValueError('no data here')\n")
    with Trials(start, str(tmp_path), is_kept=True) as processes:
        for ask in (processes.hello, lambda: processes.run(job(2))):
            with pytest.raises(UserCodeError, match=r"model\.py:3: ValueError: no data here") as caught:
                ask()
            assert "raise ValueError('no data here')" in caught.value.details
            assert "worker.py" not in caught.value.details


def test_an_error_in_a_step_is_the_users_with_its_line(tmp_path: Path) -> None:
    text = MODEL.replace("    return model(", "    raise RuntimeError('my memory fails me')\n    return model(")
    line = text.split("\n").index("    raise RuntimeError('my memory fails me')") + 1
    child = Child(start_in(tmp_path, text), str(tmp_path))
    try:
        report = child.run(job(2)) if isinstance(child.hello(), Hello) else None
    finally:
        child.close()
    assert report is not None
    assert report.reason is None
    assert f"model.py:{line}: RuntimeError: my memory fails me" in (report.error or "")
    assert "raise RuntimeError('my memory fails me')" in report.details
    assert "worker.py" not in report.details
    assert running(pids(tmp_path)) == []


# Children that are made up

DEVICE_SEEN = Device(name="made up", total_bytes=1000 * MIB)
HELLO = Hello(device=DEVICE_SEEN, context_bytes=0, limit_bytes=900 * MIB)
FITS = Report(limit_bytes=900 * MIB, peak_reserved_bytes=100 * MIB)


class MadeUp:
    """Stands in for the class ``Child``: each one that is made remembers what was asked of it."""

    def __init__(self, *reports: Report, hello: Hello | Report = HELLO) -> None:
        self.reports = list(reports)
        self.greeting = hello
        self.made: list[MadeUpChild] = []

    def __call__(self, *_: Any) -> MadeUpChild:
        self.made.append(MadeUpChild(self))
        return self.made[-1]

    @property
    def num_open(self) -> int:
        return sum(not child.is_closed for child in self.made)

    def num_jobs(self) -> list[int]:
        """Of each child."""
        return [len(child.seconds) for child in self.made]


class MadeUpChild:
    def __init__(self, family: MadeUp) -> None:
        self.family = family
        self.seconds: list[float | None] = []
        self.is_closed = False

    def hello(self, seconds: float | None = None) -> Hello | Report:
        return self.family.greeting

    def run(self, job: Job, seconds: float | None = None) -> Report:
        assert not self.is_closed
        self.seconds.append(seconds)
        return self.family.reports.pop(0) if self.family.reports else FITS

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trials]:
    """``processes(family)``: trials in such children; not entered."""

    def make(family: MadeUp, is_kept: bool = True) -> Trials:
        monkeypatch.setattr(trials, "Child", family)
        return Trials(Start(model="m.py", device="cpu", parent_pid=1, precision="32-true"), ".", is_kept)

    return make


KILLED, TOO_LARGE = Report(reason="killed"), Report(reason="out of memory")


@pytest.mark.parametrize(
    ("reports", "is_kept", "num_jobs"),
    [
        ([FITS, FITS, FITS], True, [3]),
        ([FITS, FITS, FITS], False, [1, 1, 1]),
        ([TOO_LARGE, FITS, FITS], True, [1, 2]),
        ([FITS, Report(reason="not in time"), FITS, FITS], True, [2, 2]),
        ([FITS, Report(error="it is worn"), FITS, FITS], True, [2, 2]),
        ([Report(reason="operator limit", error="INT_MAX"), FITS, FITS], True, [1, 2]),
        ([FITS.model_copy(update={"leftover_bytes": LEFTOVER_BYTES}), FITS, FITS], True, [3]),
        ([FITS.model_copy(update={"leftover_bytes": LEFTOVER_BYTES + 1}), FITS, FITS], True, [1, 2]),
        ([KILLED, FITS, FITS, FITS], True, [1, 3]),
        ([KILLED, KILLED, FITS, FITS], True, [1, 1, 2]),
    ],
)
def test_a_process_serves_as_long_as_it_is_sound(
    reports: list[Report], is_kept: bool, num_jobs: list[int], processes: Callable[..., Trials]
) -> None:
    family = MadeUp(*reports)
    with processes(family, is_kept) as made:
        for _ in range(3):
            made.run(job(2))
        assert family.num_open == is_kept
    assert family.num_jobs() == num_jobs
    assert family.num_open == 0


@pytest.mark.parametrize(
    ("reports", "reason"),
    [([KILLED, FITS], None), ([KILLED, KILLED, FITS], "killed"), ([KILLED, TOO_LARGE, FITS], "out of memory")],
)
def test_what_is_killed_has_a_second_chance_and_no_third(
    reports: list[Report], reason: str | None, processes: Callable[..., Trials]
) -> None:
    family = MadeUp(*reports)
    with processes(family) as made:
        assert made.run(job(2)).reason == reason
    assert family.num_jobs() == [1, 1]


def test_a_users_error_is_raised_and_a_size_that_an_operator_refuses_is_not(processes: Callable[..., Trials]) -> None:
    family = MadeUp(Report(error="theirs", details="line 3"), Report(reason="operator limit", error="INT_MAX"))
    with processes(family) as made:
        with pytest.raises(UserCodeError, match="theirs") as caught:
            made.run(job(2))
        assert caught.value.details == "line 3"
        assert made.run(job(4)).error == "INT_MAX"


def test_a_process_without_a_greeting_says_why(processes: Callable[..., Trials]) -> None:
    with processes(MadeUp(hello=TOO_LARGE)) as made:
        assert made.hello() is None
        assert made.run(job(2)).reason == "out of memory"
    with processes(MadeUp(hello=Report(error="theirs"))) as made, pytest.raises(UserCodeError, match="theirs"):
        made.hello()


def test_a_trial_may_take_so_many_times_as_long_as_those_before_it_say(
    processes: Callable[..., Trials], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count(step=7)  # seconds that every trial takes
    monkeypatch.setattr(trials.time, "monotonic", lambda: float(next(ticks)))
    hangs = Report(reason="not in time")
    family = MadeUp(FITS, FITS, FITS, FITS, hangs, hangs, FITS)
    with processes(family) as made:
        made.run(job(10, 1))
        made.run(job(10, 2))
        made.run(job(30, 2))
        made.run(job(2, 2))
        made.run(job(400, 1))
        made.run(job(400, 1))
    first, *others = [seconds for child in family.made for seconds in child.seconds]
    assert first == FIRST_SECONDS
    work = [
        20 / 10,
        60 / 20,
        1,
        400 / 60,
        400 / 60,
        400 / 60,
    ]  # of a trial, by that of the nearest that came to its end
    assert others == [pytest.approx(LEAST_SECONDS + TIMES_SLOWER * 7 * each) for each in work]
    assert [notice.code for notice in made.notices] == ["not-in-time"]
    assert "micro-batch of 400" in made.notices[0].message


def test_what_hangs_before_anything_has_run_says_nothing_about_memory(processes: Callable[..., Trials]) -> None:
    with processes(MadeUp(Report(reason="not in time"), FITS)) as made, pytest.raises(UserCodeError, match="hang"):
        made.run(job(2))


def test_an_error_of_a_new_process_is_the_users_at_once(processes: Callable[..., Trials]) -> None:
    family = MadeUp(Report(error="theirs"), FITS)
    with processes(family) as made, pytest.raises(UserCodeError, match="theirs"):
        made.run(job(2))
    assert family.num_jobs() == [1]


# What holds on every rank


def test_a_device_of_all_ranks_leaves_what_the_smallest_leaves() -> None:
    small = HELLO.model_copy(update={"limit_bytes": 5, "device": Device(name="another", total_bytes=10)})
    mute = HELLO.model_copy(update={"has_peaks": False})
    common = common_hello([HELLO, small, mute])
    assert common == HELLO.model_copy(update={"limit_bytes": 5, "has_peaks": False})
    assert common_hello([HELLO]) == HELLO
    assert common_hello([HELLO, None]) is None


def report(peak_bytes: int | None, limit_bytes: int, num_retries: int = 0, seconds: float = 1) -> Report:
    return Report(
        limit_bytes=limit_bytes,
        peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_bytes,
        num_retries=num_retries,
        step_seconds=seconds,
        trained=("weight",),
        notices=(Notice(code="odd", message="odd"),),
    )


def test_a_trial_of_all_ranks_takes_the_most_and_has_the_least() -> None:
    common = common_report([report(10, 50, seconds=3), report(20, 70, 1), report(15, 40)])
    assert common == report(20, 40, 1, 3)
    assert common_report([report(10, 50)]) == report(10, 50)


def test_what_one_rank_does_not_know_nobody_knows() -> None:
    assert common_report([report(10, 50), report(None, 50)]) == report(None, 50)


def test_a_trial_that_fails_on_one_rank_fails_on_all() -> None:
    assert common_report([report(10, 50), TOO_LARGE, KILLED]) == TOO_LARGE


def test_a_users_error_counts_more_than_a_lack_of_memory() -> None:
    theirs = Report(error="theirs")
    refused = Report(reason="operator limit", error="INT_MAX")
    assert common_report([TOO_LARGE, refused, report(10, 50), theirs]) == theirs
    assert common_report([report(10, 50), refused, TOO_LARGE]) == refused
