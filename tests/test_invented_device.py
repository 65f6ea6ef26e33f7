"""An accelerator that a file describes: real training steps in real processes, under invented accounts of memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from click.testing import CliRunner, Result

import gradplan
from gradplan import cli
from gradplan.plan import to_json
from gradplan.probes.errors import UsageError
from gradplan.probes.measuring import trials as trials_module
from gradplan.probes.measuring.device_memory import open_device
from gradplan.probes.measuring.messages import Start

MIB = 2**20
MOST = 1337
LONGEST_SECONDS = 150  # of a command, which would otherwise wait for ever
on_posix = pytest.mark.skipif(os.name == "nt", reason="no signals")

# It notes which process was asked for a batch of which size, and which sizes then were trained with. For an optimizer
# of torch's, torch imports its compiler, which would take half the time of all these processes.
MODEL = """
import os
import torch
from torch import nn

BATCH_SIZE = 100_000
LEARNING_RATE = 0.1
RANK = int(os.environ.get("RANK", "0"))

def note(what, size):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{what} {size} {os.getpid()}\\n")

def build_model():
    return nn.Linear(4, 1)

class Descent(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.param_groups[0]["lr"] * parameter.grad

def build_optimizer(model, lr):
    return Descent(model.parameters(), lr)

def build_batch(n):
    note("built", n)
    return torch.ones(n, 4)

def compute_loss(model, batch):
    note("trained", len(batch))
    return model(batch).square().mean()
"""


def a_device(samples: float = MOST + 0.5, **changes: Any) -> dict[str, Any]:
    """One that holds so many samples; it starts too full for the check of the loss, which has sizes of its own."""
    fields = {"fixed_bytes": 500 * MIB, "optimizer_bytes": 20 * MIB, "gradient_bytes": 10 * MIB}
    fields |= {"bytes_per_sample": MIB}
    resident_bytes = sum(fields[name] for name in ("fixed_bytes", "optimizer_bytes", "gradient_bytes"))
    return {"total_bytes": resident_bytes + int(samples * MIB), **fields, **changes}


@dataclass(frozen=True)
class Note:
    """A line of the model's: a batch of that size was built, or trained with, in that process."""

    what: str
    size: int
    pid: int


@dataclass(frozen=True)
class Found:
    plan: dict[str, Any]
    notes: tuple[Note, ...]

    @property
    def answer(self) -> int:
        return int(self.plan["max_micro_batch_size"])

    @property
    def trials(self) -> dict[int, dict[str, Any]]:
        """By size."""
        return {trial["micro_batch_size"]: trial for trial in self.plan["evidence"]["trials"]}

    @property
    def unfit(self) -> dict[int, str]:
        """Why a size did not fit."""
        return {size: trial["reason"] for size, trial in self.trials.items() if not trial["fits"]}

    @property
    def warnings(self) -> list[str]:
        return [warning["code"] for warning in self.plan["warnings"]]

    def sizes(self, what: str) -> set[int]:
        return {note.size for note in self.notes if note.what == what}


def write(folder: Path, device: dict[str, Any], model: str = MODEL) -> None:
    (folder / "model.py").write_text(model)
    (folder / "device.json").write_text(json.dumps(device))


def read_notes(path: Path) -> tuple[Note, ...]:
    lines = path.read_text().splitlines() if path.exists() else []
    return tuple(Note(what, int(size), int(pid)) for what, size, pid in map(str.split, lines))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


CHECKED = {2, 3, 4, 8}  # with so many samples a small model's loss is looked at, beside the trials


def check_it_ran(found: Found) -> None:
    """All that is said to have run did, all that ran is said, and the answer is the largest that came to its end."""
    trials = found.trials
    assert len(trials) == len(found.plan["evidence"]["trials"])
    assert {trial["source"] for trial in trials.values()} == {"measured"}
    assert set(trials) <= found.sizes("built") <= set(trials) | CHECKED
    fitting = trials.keys() - found.unfit.keys()
    assert fitting <= found.sizes("trained") <= set(trials) | CHECKED
    assert found.answer == max(fitting)
    assert all(trials[size]["step_seconds"] > 0 for size in fitting)


def check_exact(found: Found, answer: int = MOST) -> None:
    """And the next larger was tried too."""
    check_it_ran(found)
    assert found.answer == answer
    assert answer + 1 in found.unfit


def check_nothing_is_left(found: Found) -> None:
    assert found.notes
    assert not any(psutil.pid_exists(note.pid) for note in found.notes if note.pid != os.getpid())


# In this process: the children are real all the same


@pytest.fixture
def notes_path(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Outside the working folder, in which nothing but the user's files and gradplan's belongs."""
    path = tmp_path_factory.mktemp("notes") / "notes"
    monkeypatch.setenv("NOTES", str(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return path


@pytest.fixture
def probe(tmp_path: Path, notes_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """``probe(device)``: what is found on it, without headroom unless asked for."""
    monkeypatch.chdir(tmp_path)

    def probe_here(device: dict[str, Any], text: str = MODEL, model: str = "model.py", **options: Any) -> Found:
        write(tmp_path, device, text)
        notes_path.unlink(missing_ok=True)
        plan = gradplan.probe(model, device="test:device.json", **{"headroom_percent": 0.0, **options})
        found = Found(json.loads(to_json(plan)), read_notes(notes_path))
        check_nothing_is_left(found)
        return found

    return probe_here


@pytest.fixture
def invoke(tmp_path: Path, notes_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``invoke(device, *options)``: how the command ends, in this process."""
    monkeypatch.chdir(tmp_path)

    def invoke_here(device: dict[str, Any], *options: str, text: str = MODEL) -> Result:
        write(tmp_path, device, text)
        command = ["probe", "model.py", "--device", "test:device.json", "--headroom", "0", *options]
        return CliRunner().invoke(cli.main, command, prog_name="gradplan")

    return invoke_here


# As a person types it


def start(folder: Path, *options: str, launcher: tuple[str, ...] = ("-m", "gradplan")) -> subprocess.Popen[str]:
    command = ["probe", "model.py", "--device", "test:device.json", "--headroom", "0", *options]
    shared = {"NOTES": str(notes_of(folder)), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if os.name != "nt":  # a job in the background would ignore Ctrl-C
        pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, *launcher, *command]
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **shared}, start_new_session=True, **pipes)


def notes_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-notes")


def ended(process: subprocess.Popen[str], seconds: float = LONGEST_SECONDS) -> subprocess.CompletedProcess[str]:
    """Its end, or a failure: nothing waits for ever."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def found_in(folder: Path) -> Found:
    return Found(json.loads((folder / "gradplan.json").read_text()), read_notes(notes_of(folder)))


def working_child(folder: Path, process: subprocess.Popen[str]) -> psutil.Process:
    """The process of a trial that has its first window, and now waits for the device."""
    while process.poll() is None:
        notes = read_notes(notes_of(folder))
        if notes:
            assert notes[0].pid != process.pid
            return psutil.Process(notes[0].pid)
        time.sleep(0.01)
    raise AssertionError(ended(process).stderr)


Command = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A folder in which a device with a hint that is 5 % too high was probed, and what that printed."""
    folder = tmp_path_factory.mktemp("command")
    write(folder, a_device(hint=round(1.05 * MOST)))
    return folder, ended(start(folder, "-v"))


def test_a_hint_that_is_too_high_costs_no_more_than_four_trials(command: Command) -> None:
    folder, done = command
    assert done.returncode == 0, done.stderr
    found = found_in(folder)
    check_exact(found)
    assert len(found.trials) <= 4
    assert found.unfit == {MOST + 1: "out of memory"}
    assert found.plan["limited_by"] == "memory"


def test_the_command_prints_the_answer_and_every_trial_with_its_reason(command: Command) -> None:
    _, done = command
    assert f"{MOST} is the largest that fits" in done.stdout
    assert "invented" in done.stdout
    assert f"micro-batch of {MOST}: fits, needs " in done.stderr
    assert f"micro-batch of {MOST + 1}: does not fit (out of memory)" in done.stderr


def test_the_command_leaves_two_files_and_no_process(command: Command) -> None:
    folder, _ = command
    assert files(folder) == ["device.json", "gradplan.json", "model.py", "train.py"]
    check_nothing_is_left(found_in(folder))


# How many trials


def test_a_hint_that_is_too_low_costs_no_more_than_four_trials(probe: Callable[..., Found]) -> None:
    found = probe(a_device(hint=round(0.95 * MOST)))
    check_exact(found)
    assert len(found.trials) <= 4
    assert len(found.unfit) == 1


def test_peaks_alone_lead_to_the_answer_in_few_trials(probe: Callable[..., Found]) -> None:
    found = probe(a_device())
    check_exact(found)
    assert len(found.trials) <= 6
    assert len(found.unfit) == 1


def test_a_device_that_only_raises_is_searched_by_doubling_and_halving(probe: Callable[..., Found]) -> None:
    found = probe(a_device(reports_peaks=False, is_sticky=True))  # and has to be opened anew after every failure
    check_exact(found)
    assert len(found.trials) <= math.floor(2 * math.log2(MOST) + 3)
    assert len(found.unfit) >= 2
    assert set(found.unfit.values()) == {"out of memory"}
    assert "peaks-unknown" in found.warnings
    assert all(trial["peak_reserved_bytes"] is None for trial in found.trials.values())


@pytest.mark.parametrize(("size", "hint", "num_flat"), [(100, None, 50), (MOST, 1404, 670)])
def test_small_sizes_that_all_need_the_same_mislead_nobody(
    size: int, hint: int | None, num_flat: int, probe: Callable[..., Found]
) -> None:
    found = probe(a_device(size + 0.5, hint=hint, floor_bytes=(530 + num_flat) * MIB))
    check_exact(found, size)
    assert len(found.unfit) <= 2


# What a size needs


@pytest.mark.parametrize("name", ["optimizer_bytes", "gradient_bytes"])
def test_what_stays_from_step_to_step_counts(name: str, probe: Callable[..., Found]) -> None:
    device = a_device(hint=MOST)
    check_exact(probe({**device, name: device[name] + 300 * MIB}), MOST - 300)


def test_a_size_that_spills_is_known_by_its_peak(probe: Callable[..., Found]) -> None:
    found = probe(a_device(hint=MOST, raises=False))
    check_exact(found)
    assert found.unfit == {MOST + 1: "above the limit"}
    assert found.trials[MOST + 1]["peak_reserved_bytes"] > found.plan["evidence"]["limit_bytes"]
    assert "peaks-unknown" not in found.warnings


def test_that_a_size_may_spill_unnoticed_is_said(probe: Callable[..., Found]) -> None:
    found = probe(a_device(raises=False, reports_peaks=False), max_micro_batch=2 * MOST)
    check_it_ran(found)
    assert found.answer == 2 * MOST
    assert "peaks-unknown" in found.warnings


def test_needs_that_waver_move_the_answer_by_no_more(probe: Callable[..., Found]) -> None:
    found = probe(a_device(hint=MOST, jitter_percent=1))
    check_it_ran(found)
    # A percent of all that is in memory, which is more than the samples.
    assert abs(found.answer - MOST) <= 0.01 * (MOST + 530) + 1


def test_sizes_that_do_not_fit_below_ones_that_do_give_an_answer_that_fits(probe: Callable[..., Found]) -> None:
    found = probe(a_device(hint=MOST, unfit=[MOST, MOST - 2]))
    check_it_ran(found)
    assert found.answer not in (MOST, MOST - 2)
    assert 0.9 * MOST <= found.answer < MOST


# Why a size fails


# CUDA's own words are those of every other test.
@pytest.mark.parametrize("wording", ["cuda-late", "cublas", "hip", "xpu", "mps", "host"])
def test_every_way_to_say_that_memory_ran_out_is_understood(wording: str, probe: Callable[..., Found]) -> None:
    found = probe(a_device(hint=1404, out_of_memory=wording))
    check_exact(found)
    assert found.unfit == {MOST + 1: "out of memory"}


# Memory alone would allow 700.
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("operator_limit", "operator limit"),
        ("retries_from", "allocator retried"),
        pytest.param("killed_from", "killed", marks=on_posix),
    ],
)
def test_what_goes_wrong_from_a_size_on_bounds_the_answer(name: str, reason: str, probe: Callable[..., Found]) -> None:
    found = probe(a_device(700.5, hint=700, **{name: 700}))
    check_exact(found, 699)
    assert found.unfit == {700: reason}
    assert found.plan["limited_by"] == ("operator" if name == "operator_limit" else "memory")


def test_an_operator_that_refuses_far_below_the_memory_is_found_and_named(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    result = invoke(a_device(20.5, operator_limit=12))
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "gradplan.json").read_text())
    assert (plan["max_micro_batch_size"], plan["limited_by"]) == (11, "operator")
    reasons = {trial["micro_batch_size"]: trial["reason"] for trial in plan["evidence"]["trials"]}
    assert (reasons[11], reasons[12]) == (None, "operator limit")
    assert "an operator refuses a micro-batch of 12" in result.stdout


def test_an_operator_that_refuses_every_size_is_an_error_in_its_words(invoke: Callable[..., Result]) -> None:
    result = invoke(a_device(hint=2, operator_limit=1))
    assert result.exit_code == 1
    assert "not supported for tensors with more than INT_MAX elements" in result.stderr
    assert files(Path()) == ["device.json", "model.py"]


def test_a_size_that_never_ends_does_not_fit(probe: Callable[..., Found], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "LEAST_SECONDS", 3.0)
    found = probe(a_device(700.5, hint=700, hangs_from=700))
    check_exact(found, 699)
    assert found.unfit == {700: "not in time"}
    assert "not-in-time" in found.warnings


def test_a_bug_that_only_large_sizes_have_ends_the_probe(invoke: Callable[..., Result]) -> None:
    result = invoke(a_device(hint=MOST, bug_from=700))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: a training step with a micro-batch of " in result.stderr
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)" in result.stderr
    assert files(Path()) == ["device.json", "model.py"]


def test_a_bug_of_the_users_is_shown_with_their_lines_alone(invoke: Callable[..., Result]) -> None:
    broken = MODEL.replace('    note("trained"', '    raise ValueError("mine")\n    note("trained"')
    result = invoke(a_device(hint=MOST), text=broken)
    assert result.exit_code == 1
    assert 'raise ValueError("mine")' in result.stderr
    assert "error: a training step with a micro-batch of 334 failed at model.py:" in result.stderr
    assert "measuring" not in result.stderr


def test_where_nothing_fits_the_command_says_what_would_help(invoke: Callable[..., Result]) -> None:
    result = invoke(a_device(0.5, hint=1))
    assert result.exit_code == 3
    assert result.stderr.startswith("error: a micro-batch of 1 does not fit in the ")
    assert "What can make it fit: mixed precision (--precision bf16-mixed); " in result.stderr
    assert files(Path()) == ["device.json", "model.py"]


def test_a_device_that_the_driver_fills_is_said_to_be_full(invoke: Callable[..., Result]) -> None:
    result = invoke(a_device(20.5, context_bytes=900 * MIB))
    assert result.exit_code == 3
    assert "nothing fits" in result.stderr
    assert "of 0 MiB" not in result.stderr
    assert "Python" not in result.stderr


def test_what_one_trial_leaves_behind_does_not_shrink_the_next(probe: Callable[..., Found]) -> None:
    found = probe(a_device(2.5, hint=1, leaks_bytes=100 * MIB))
    check_exact(found, 2)
    assert len({note.pid for note in found.notes}) >= len(found.trials)


# The limit


@pytest.mark.parametrize(
    ("context_mib", "other_mib", "memory_mib", "headroom_percent", "limit_mib"),
    [
        (0, 0, None, 0, 2000),
        (0, 0, None, 5, 1900),
        (400, 0, None, 0, 1600),
        (0, 300, None, 0, 1700),
        (400, 300, None, 10, 1170),
        (400, 0, 1500, 10, 990),
        (400, 0, 9000, 0, 1600),
        (400, 300, 1900, 0, 1300),
        (400, 0, 300, 0, 0),
    ],
)
def test_the_limit_is_what_is_free_less_the_headroom(
    context_mib: int, other_mib: int, memory_mib: int | None, headroom_percent: float, limit_mib: int, tmp_path: Path
) -> None:
    write(tmp_path, a_device(total_bytes=2000 * MIB, context_bytes=context_mib * MIB, other_bytes=other_mib * MIB))
    device = f"test:{tmp_path / 'device.json'}"
    opened = open_device(
        Start(
            model="model.py",
            device=device,
            parent_pid=os.getpid(),
            precision="32-true",
            memory_bytes=None if memory_mib is None else memory_mib * MIB,
            headroom_percent=headroom_percent,
        )
    )
    hello = opened.hello()
    assert hello.limit_bytes == opened.limit_bytes() == limit_mib * MIB
    assert hello.context_bytes == context_mib * MIB
    assert hello.device.total_bytes == min(2000, memory_mib or 2000) * MIB
    assert hello.device.slug == device


def test_the_options_of_the_command_set_the_limit_and_so_the_answer(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    device = a_device(total_bytes=3000 * MIB, context_bytes=200 * MIB, hint=1100)
    result = invoke(device, "--memory", "2200MiB", "--headroom", "10")
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "gradplan.json").read_text())
    assert plan["evidence"]["limit_bytes"] == 1800 * MIB
    assert plan["max_micro_batch_size"] == 1800 - 530


# The file


def refused(folder: Path, text: str | None) -> str:
    """What is said of a file of that text; None where there is none."""
    (folder / "model.py").write_text(MODEL)
    if text is not None:
        (folder / "device.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        gradplan.probe("model.py", device="test:device.json")
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "test:device.json: No such file or directory"),
        ("{", "test:device.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("[]", "test:device.json: the file: "),
        (
            '{"total_bytes": 9, "bytes_per_sample": 1, "colour": 2}',
            "test:device.json: colour: no such key; there are name, total_bytes",
        ),
        ('{"total_bytes": 9}', "test:device.json: bytes_per_sample: Field required"),
        ('{"total_bytes": "much", "bytes_per_sample": 1}', "test:device.json: total_bytes: Input should be"),
        ('{"total_bytes": 9, "bytes_per_sample": 1, "unfit": [1, "x"]}', "test:device.json: unfit.1: Input should be"),
        ('{"total_bytes": 9, "bytes_per_sample": 1, "hint": 0}', "test:device.json: hint: Input should be greater"),
    ],
)
def test_a_file_that_describes_no_device_is_refused_with_the_place(
    text: str | None, message: str, tmp_path: Path, notes_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(tmp_path, text).startswith(message)
    assert not notes_path.exists()


def test_the_command_refuses_such_a_file_as_wrong_usage(invoke: Callable[..., Result]) -> None:
    result = invoke({"total_bytes": 9, "bytes_per_sample": 1, "colour": 2})
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: test:device.json: colour: no such key; there are")
    assert files(Path()) == ["device.json", "model.py"]


# What the probe leaves behind


def test_the_callers_model_and_random_numbers_stay_as_they_were(probe: Callable[..., Found], tmp_path: Path) -> None:
    text = MODEL + "\nimport copy\nmodel = build_model()\nbefore = copy.deepcopy(model.state_dict())\n"
    text = text.replace("    return model(", "    model(batch + torch.rand(1)).mean()\n    return model(")
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    children = psutil.Process().children(recursive=True)
    probe(a_device(20.5, hint=20), text, "model.py:model")
    assert psutil.Process().children(recursive=True) == children
    assert random.getstate() == states[0]
    numpy.testing.assert_equal(numpy.random.get_state(), states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    path = str(tmp_path / "model.py")
    module = next(one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == path)
    after = module.model.state_dict()
    assert after.keys() == module.before.keys()
    assert all(torch.equal(after[name], module.before[name]) for name in after)
    assert all(parameter.grad is None for parameter in module.model.parameters())
    assert files(tmp_path) == ["device.json", "model.py"]


@on_posix
def test_ctrl_c_during_a_trial_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    write(folder, a_device(hint=MOST, seconds_per_micro_batch=60))
    process = start(folder)
    child = working_child(folder, process)
    process.send_signal(signal.SIGINT)
    try:
        done = ended(process, 20)  # a child that lives holds the pipes open
        assert psutil.wait_procs([child], timeout=10)[1] == []
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith("interrupted\n")
    assert "Traceback" not in done.stderr
    assert files(folder) == ["device.json", "model.py"]


@on_posix
def test_a_child_that_somebody_kills_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    write(folder, a_device(5.5, hint=5, seconds_per_micro_batch=0.1))
    process = start(folder)
    child = working_child(folder, process)
    child.kill()
    done = ended(process)
    assert done.returncode == 0, done.stderr
    found = found_in(folder)
    check_exact(found, 5)
    check_nothing_is_left(found)
    assert found.unfit == {6: "out of memory"}
    killed, *later = dict.fromkeys(note.pid for note in found.notes)
    assert killed == child.pid
    assert set(found.trials) <= {note.size for note in found.notes if note.pid in later} <= set(found.trials) | CHECKED


# Several ranks


def torchrun(folder: Path, device: dict[str, Any], model: str = MODEL) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    write(folder, device, model)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gradplan")
    return ended(start(folder, launcher=launcher))


def test_two_ranks_write_one_plan_for_both(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    # Memory would hold 41 on each, were there not something else that takes the second rank's.
    text = MODEL.replace(
        '    note("trained"',
        """    if RANK == 1 and len(batch) > 40:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity")
    note("trained\"""",
    )
    done = torchrun(folder, a_device(41.5, hint=41), text)
    assert done.returncode == 0, done.stderr
    found = found_in(folder)
    check_it_ran(found)
    check_nothing_is_left(found)
    assert found.answer == 40
    assert found.unfit == {41: "out of memory"}
    assert (found.plan["world_size"], found.plan["effective_batch_size"]) == (2, 100_000)
    assert len({note.pid for note in found.notes if note.size == 40}) == 2
    assert done.stdout.count("is the largest that fits") == 1
    assert done.stdout.endswith(
        "wrote gradplan.json and train.py; now type\n\n    torchrun --nproc-per-node 2 train.py\n\n"
    )
    assert files(folder) == ["device.json", "gradplan.json", "model.py", "train.py"]


def test_a_bug_on_one_rank_ends_both_and_is_shown_once(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    bug = '    if RANK == 1:\n        raise ValueError("only on this rank")\n    note("trained"'
    done = torchrun(folder, a_device(41.5, hint=41), MODEL.replace('    note("trained"', bug))
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("error: a training step with a micro-batch of ") == 1
    assert done.stderr.count("ValueError: only on this rank") == 1
    assert files(folder) == ["device.json", "model.py"]
    assert not any(psutil.pid_exists(note.pid) for note in read_notes(notes_of(folder)))
