"""The CPU is measured: child processes that train for real, under a limit that the kernel enforces."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from gradplan import verbs
from gradplan.probes import host_memory, measure
from gradplan.probes.child import run_in_child
from gradplan.probes.errors import DoesNotFitError, UsageError, UserCodeError
from gradplan.probes.evidence import Evidence, Notice
from gradplan.probes.host_memory import available_bytes, peak_resident_bytes
from gradplan.probes.measure import Measurement
from gradplan.probes.worker import Job, Report, is_out_of_memory
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
MIB = 2**20
CONTEXT = 200 * MIB  # of the processes that are made up
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's limit is Linux's")

SMALL = """
import os
import torch
from torch import nn

def build_model():
    return nn.Linear(4, 1)

def build_batch(n):
    return torch.ones(n, 4)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""
TWO_LOSSES = (
    SMALL
    + """
def compute_loss(model, batch):
    yield model(batch).square().mean()
    yield model(batch).abs().mean()
"""
)


# The search, over processes that are made up


class Made:
    """Processes that need ``needs(size, num_micro_batches, backward)`` bytes beside their context."""

    def __init__(self, needs: Callable[[int, int, str], float]) -> None:
        self.needs = needs
        self.jobs: list[Job] = []
        self.check = Report(context_bytes=CONTEXT)
        self.trained = {"joint": ("weight",), "sequential": ("weight",)}
        self.yields_losses = False

    def __call__(self, job: Job, folder: str) -> Report | None:
        if job.task == "check":
            return self.check
        self.jobs.append(job)
        needed = math.ceil(self.needs(job.micro_batch_size, job.num_micro_batches, job.backward))
        if CONTEXT + needed > job.memory_bytes:
            return Report(context_bytes=CONTEXT, is_out_of_memory=True)
        return Report(
            context_bytes=CONTEXT,
            peak_bytes=CONTEXT + needed,
            step_seconds=0.5,
            trained=self.trained[job.backward],
            yields_losses=self.yields_losses,
        )

    @property
    def sizes(self) -> list[int]:
        return [job.micro_batch_size for job in self.jobs]


@pytest.fixture
def gathered(workload: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Evidence]:
    """``gathered(made, per_rank, at_most)``: the evidence from such processes, with 1000 MiB beside the context."""

    def gather(made: Made, per_rank: int | None = None, at_most: int | None = None, text: str = SMALL) -> Evidence:
        monkeypatch.setattr(measure, "run_in_child", made)
        memory_bytes = CONTEXT + math.ceil(1000 * MIB / 0.95)
        return Measurement(workload(text), memory_bytes=memory_bytes).gather(per_rank, at_most)

    return gather


def answer(evidence: Evidence) -> int:
    return max((trial.micro_batch_size for trial in evidence.trials if trial.fits), default=0)


NEEDS = {
    "a line": lambda size, *_: (50 + 17 * size) * MIB,
    "steep": lambda size, *_: (50 + 300 * size) * MIB,
    "a heap that small sizes leave in pieces": lambda size, *_: (50 + 64 * min(size, 5) + 25 * max(0, size - 5)) * MIB,
    "a jump": lambda size, *_: (50 + 17 * size + 300 * (size > 20)) * MIB,
    "quadratic": lambda size, *_: (50 + 0.3 * size**2) * MIB,
    "with noise": lambda size, *_: (50 + 17 * size + size * 7 % 5) * MIB,
}


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_the_largest_that_fits_is_found_in_few_trials(needs: Any, gathered: Callable[..., Evidence]) -> None:
    made = Made(needs)
    evidence = gathered(made)
    assert answer(evidence) == max(size for size in range(1, 200) if needs(size) <= 1000 * MIB)
    assert len(made.sizes) == len(set(made.sizes)) <= 9
    assert [trial.micro_batch_size for trial in evidence.trials] == made.sizes


def test_where_a_sample_is_small_the_answer_is_as_fine_as_measurements_are(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, *_: (50 + 0.01 * size) * MIB)
    assert 0.98 * 95_000 <= answer(gathered(made)) <= 95_000
    assert len(made.sizes) <= 12


def test_memory_that_hardly_grows_ends_the_search_somewhere(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(lambda size, *_: 50 * MIB))
    assert answer(evidence) == 2**20
    assert [notice.code for notice in evidence.notices] == ["search-ended"]


def test_a_whole_batch_is_tried_as_one_micro_batch(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, num, _: (50 + 17 * size + 60 * (num == 2)) * MIB)
    evidence = gathered(made, 55, 55)  # 985 MiB as one, 1045 MiB as the first of two
    assert answer(evidence) == 55
    assert {trial.micro_batch_size: trial.num_micro_batches for trial in evidence.trials}[55] == 1
    assert max(trial.micro_batch_size for trial in gathered(made, 1000, 55).trials if trial.fits) == 52


def test_a_batch_far_beyond_what_fits_is_not_tried_whole(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    assert answer(gathered(made, 10_000, 10_000)) == 55
    assert max(made.sizes) < 140


def test_every_size_is_a_multiple(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    assert answer(gathered(made, 600, 600, SMALL + "\nBATCH_MULTIPLE = 6")) == 54
    assert all(size % 6 == 0 for size in made.sizes)


def test_the_smallest_is_tried_where_two_do_not_fit(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, *_: 600 * size * MIB)
    evidence = gathered(made)
    assert [(trial.micro_batch_size, trial.fits) for trial in evidence.trials] == [(2, False), (1, True)]
    nothing = gathered(Made(lambda size, *_: 6000 * size * MIB))
    assert [(trial.micro_batch_size, trial.fits) for trial in nothing.trials] == [(2, False), (1, False)]


def test_the_limit_is_the_memory_less_context_and_headroom(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(NEEDS["a line"]))
    assert abs(evidence.limit_bytes - 1000 * MIB) <= 1
    assert evidence.device.total_bytes == CONTEXT + math.ceil(1000 * MIB / 0.95)
    trial = evidence.trials[0]
    assert (trial.source, trial.peak_allocated_bytes, trial.step_seconds) == ("measured", None, 0.5)
    assert trial.peak_reserved_bytes == trial.required_bytes == 84 * MIB


def test_a_context_that_takes_all_memory_is_an_error_that_says_so(workload: Load, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "run_in_child", Made(NEEDS["a line"]))
    with pytest.raises(DoesNotFitError, match=r"of 100 MiB, Python, torch and model0\.py .* take 200 MiB"):
        Measurement(workload(SMALL), memory_bytes=100 * MIB).gather(None, None)
    monkeypatch.setattr(measure, "run_in_child", lambda *_: None)
    with pytest.raises(DoesNotFitError, match="take more"):
        Measurement(workload(SMALL), memory_bytes=100 * MIB).gather(None, None)


def test_both_forms_of_several_losses_are_measured_at_the_size_found(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, _, form: (50 + 17 * size + 20 * (form == "joint")) * MIB)
    evidence = gathered(made, text=TWO_LOSSES)
    assert evidence.backward == "sequential"
    size = answer(evidence)
    peaks = {peak.backward: peak.peak_reserved_bytes for peak in evidence.backward_peaks}
    assert peaks == {"sequential": (50 + 17 * size) * MIB, "joint": (70 + 17 * size) * MIB}
    assert [job.backward for job in made.jobs].count("joint") == 1


def test_one_backward_is_taken_where_it_needs_no_more(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(NEEDS["a line"]), text=TWO_LOSSES)
    assert evidence.backward == "joint"
    assert len(evidence.backward_peaks) == 2


def test_a_cut_trunk_has_no_joint_form(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    made.trained["sequential"] = ("trunk", "weight")
    evidence = gathered(made, text=TWO_LOSSES)
    assert (evidence.backward, evidence.backward_peaks) == ("sequential", ())


def test_losses_that_only_the_call_shows_are_tried_one_by_one(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, _, form: (50 + 17 * size + 20 * (form == "joint")) * MIB)
    made.yields_losses = True
    assert gathered(made).backward == "sequential"


def test_losses_that_may_not_go_one_by_one_are_summed(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    notice = Notice(code="odd", message="odd")
    made.check = Report(context_bytes=CONTEXT, is_exact_loss_by_loss=False, notices=(notice,))
    evidence = gathered(made, text=TWO_LOSSES)
    assert evidence.backward == "joint"
    assert {job.backward for job in made.jobs[1:]} == {"joint"}
    assert [one.code for one in evidence.notices] == ["odd", "sequential-not-exact"]


# Real processes


def job(text: str, folder: Path, free_mib: int | None, **changes: Any) -> Job:
    """A trial that may have so much beside the context, which is measured."""
    (folder / "model.py").write_text(text)
    values: dict[str, Any] = {
        "task": "train",
        "model": "model.py",
        "parent_pid": os.getpid(),
        "memory_bytes": 2**40 if free_mib is None else context_bytes() + free_mib * MIB,
        "precision": "32-true",
        "backward": "joint",
        "micro_batch_size": 2,
        "num_micro_batches": 2,
        "num_in_window": 2,
    }
    return Job(**{**values, **changes})


@functools.cache
def context_bytes() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = run_in_child(job(SMALL, Path(folder), None), folder)
    assert report is not None
    return report.context_bytes


def test_a_trial_reports_what_the_training_held(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = SMALL.replace(
        "    return model(", "    os.write(1, b'loud')\n    kept = torch.ones(2**26)\n    return model("
    )
    report = run_in_child(job(text, tmp_path, 2000), str(tmp_path))
    assert report is not None
    assert report.peak_bytes is not None
    assert 256 * MIB <= report.peak_bytes - report.context_bytes < 512 * MIB  # some of it is what torch imports late
    assert report.trained == ("weight", "bias")
    out, err = capfd.readouterr()
    assert (out, "loud" in err) == ("", True)


@on_linux
def test_the_kernel_refuses_what_is_far_too_large(tmp_path: Path) -> None:
    # Never touched, so that no watcher from outside would see it.
    text = SMALL.replace("    return model(", "    torch.empty(2**29)\n    return model(")
    report = run_in_child(job(text, tmp_path, 100), str(tmp_path))
    assert report is not None
    assert report.is_out_of_memory
    assert report.peak_bytes is None


def test_what_grows_before_there_is_a_limit_is_killed_from_outside(tmp_path: Path) -> None:
    text = "import time, torch\nheld = torch.ones(2**28)\ntime.sleep(60)\n" + SMALL
    assert run_in_child(job(text, tmp_path, 100), str(tmp_path)) is None


@pytest.mark.skipif(os.name == "nt", reason="no signals")
@pytest.mark.parametrize(("number", "is_memory"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_a_process_that_dies_is_out_of_memory_only_if_it_was_killed(
    number: int, is_memory: bool, tmp_path: Path
) -> None:
    text = SMALL.replace("    return model(", f"    os.kill(os.getpid(), {int(number)})\n    return model(")
    trial = job(text, tmp_path, 1000)
    if is_memory:
        report = run_in_child(trial, str(tmp_path))
        assert report is not None
        assert report.is_out_of_memory
    else:
        with pytest.raises(UserCodeError, match="ended its process without an exception"):
            run_in_child(trial, str(tmp_path))


def test_an_error_of_the_users_is_theirs_with_its_line(tmp_path: Path) -> None:
    text = SMALL.replace("    return model(", "    raise RuntimeError('my memory fails me')\n    return model(")
    with pytest.raises(UserCodeError, match=r"model\.py:13: RuntimeError: my memory fails me") as caught:
        run_in_child(job(text, tmp_path, 1000), str(tmp_path))
    assert "raise RuntimeError('my memory fails me')" in caught.value.details
    assert "worker.py" not in caught.value.details


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("[enforce fail] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("I ran out of memory"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (OSError(2, "no memory of this file"), False),
    ],
)
def test_only_a_failed_allocation_is_out_of_memory(error: Exception, expected: bool) -> None:
    wrapped = UserCodeError("build_batch(2) failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(error) is is_out_of_memory(wrapped) is expected


SLOW = SMALL.replace(
    "    return model(",
    "    print('losing', os.getpid(), flush=True)\n    while True:\n        model(batch)\n    return model(",
)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_child_outlives_the_command(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(SLOW)
    command = [sys.executable, "-m", "gradplan", "probe", "model.py", "--device", "cpu"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    children: list[psutil.Process] = []
    for line in process.stderr:
        if line.startswith("losing") and int(line.split()[1]) != process.pid:
            children.append(psutil.Process(int(line.split()[1])))
            break
    process.send_signal(number)
    try:
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert len(children) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["model.py"]


# Every activation of several samples is above 32 MiB, and so outside glibc's heap: what that holds differs by some
# percent from process to process.
LARGE = """
import torch
from torch import nn

BATCH_SIZE = 64
LEARNING_RATE = 1e-3

def build_model():
    return nn.Sequential(nn.Linear(256, 64), nn.ReLU())

def build_batch(n):
    return torch.ones(n, 2**14, 256)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""
TRAIN = """
import importlib.util, os, sys, torch
from gradplan.probes import step
import model
built = model.build_model()
optimizer = torch.optim.AdamW(built.parameters())
for _ in range(3):
    window = ((model.build_batch(int(sys.argv[1])), 0.5) for _ in range(2))
    step.train_window(built, optimizer, window, model.compute_loss, torch.device("cpu"))
"""


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="the kernel is asked for the peak of a child")
def test_the_size_found_stays_inside_the_memory_and_a_tenth_more_does_not(tmp_path: Path) -> None:
    memory_mib = context_bytes() // MIB + 1200  # room for so many samples that a tenth of them is several
    (tmp_path / "model.py").write_text(LARGE)
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["-m", "gradplan", "probe", "model.py", "--device", "cpu", "--headroom", "2"]
    options = ["--memory", f"{memory_mib}MiB", "--plan", "plan.json", "--script", "script.py", "--json"]
    done = subprocess.run([sys.executable, *command, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    size, memory_bytes = plan["max_micro_batch_size"], plan["evidence"]["device"]["total_bytes"]
    assert plan["evidence"]["kind"] == "measured"
    assert peak_from_outside(tmp_path, size) <= memory_bytes < peak_from_outside(tmp_path, math.ceil(1.1 * size))


def peak_from_outside(folder: Path, size: int) -> int:
    """Peak resident bytes of a training process, started by a small one: a child inherits the size of its parent."""
    launcher = (
        "import os, subprocess, sys\n"
        "process = subprocess.Popen([sys.executable, *sys.argv[1:]])\n"
        "_, status, usage = os.wait4(process.pid, 0)\n"
        "print(usage.ru_maxrss)\n"
        "sys.exit(status != 0)\n"
    )
    command = [sys.executable, "-c", launcher, "train.py", str(size)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


# The machine, and the command


def test_what_a_control_group_leaves_counts_what_it_can_give_back(tmp_path: Path) -> None:
    group = tmp_path / "root" / "a" / "b"
    group.mkdir(parents=True)
    for folder, most in ((group, "max\n"), (group.parent, "1000\n")):
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    assert host_memory._left_in_control_groups(tmp_path / "root", membership) == [400]
    first = tmp_path / "root" / "memory" / "c"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("5000\n")
    (first / "memory.usage_in_bytes").write_text("3000\n")
    (first / "memory.stat").write_text("total_inactive_file 0\n")
    membership.write_text("5:cpu:/c\n4:cpuacct,memory:/c\n0::/\n")
    assert host_memory._left_in_control_groups(tmp_path / "root", membership) == [2000]
    assert host_memory._left_in_control_groups(tmp_path / "root", tmp_path / "nothing") == []


def test_memory_of_this_process_and_of_this_machine() -> None:
    assert 0 < host_memory.resident_bytes() <= peak_resident_bytes() + 4 * MIB
    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_accelerators_are_refused_as_before() -> None:
    for device in ("cuda", "cuda:1", "mps"):
        with pytest.raises(UsageError, match="cannot measure"):
            verbs.probe("nothing.py", device=device)
