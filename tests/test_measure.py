"""Devices of this machine are measured: the search over made-up processes, and real ones on the CPU."""

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
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gradplan.probes import measure
from gradplan.probes.errors import DoesNotFitError, UserCodeError
from gradplan.probes.evidence import Device, Evidence, Notice
from gradplan.probes.launch import Launch
from gradplan.probes.measure import Measurement
from gradplan.probes.measuring import host_memory
from gradplan.probes.measuring.device_memory import HostMemory
from gradplan.probes.measuring.host_memory import available_bytes, peak_resident_bytes
from gradplan.probes.measuring.invented import Invented
from gradplan.probes.measuring.messages import Hello, Job, Report, Start
from gradplan.probes.measuring.trials import Trials
from gradplan.probes.prediction import Corrected
from gradplan.probes.size_search import SizeSearch
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
MIB = 2**20
CONTEXT = 200 * MIB  # of the processes that are made up
LIMIT = 1000 * MIB
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
    """Processes that need ``needs(size, num_micro_batches, backward)`` bytes beside their context.

    It stands in for the class ``Trials`` and for what that makes.
    """

    def __init__(self, needs: Callable[[int, int, str], float]) -> None:
        self.needs = needs
        self.jobs: list[Job] = []
        self.checks: list[Job] = []
        self.check = Report()
        self.trained = {"joint": ("weight",), "sequential": ("weight",)}
        self.yields_losses = False
        self.own_backwards = 0
        self.limit_bytes = LIMIT
        self.most_bytes = math.ceil(LIMIT / 0.95)  # what is left for headroom can be used, too
        self.has_peaks = True
        self.greets = True
        self.notices: list[Notice] = []
        self.instead: Callable[[Job, Report], Report] = lambda _, report: report
        self.made_with: tuple[Any, ...] = ()

    def __call__(self, *made_with: Any) -> Made:
        self.made_with = made_with
        return self

    def __enter__(self) -> Made:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lead(self, gather: Callable[[], Evidence]) -> Evidence:
        return gather()

    def hello(self) -> Hello | None:
        device = Device(name="made up", total_bytes=2 * LIMIT, slug="made")
        limit_bytes = self.limit_bytes
        hello = Hello(device=device, context_bytes=CONTEXT, limit_bytes=limit_bytes, has_peaks=self.has_peaks)
        return hello if self.greets else None

    def run(self, job: Job) -> Report:
        if job.task == "check":
            self.checks.append(job)
            return self.check
        self.jobs.append(job)
        report = self.instead(job, self.honest(job))
        if report.error is not None and report.reason is None:
            raise UserCodeError(report.error)
        return report

    def honest(self, job: Job) -> Report:
        needed = math.ceil(self.needs(job.micro_batch_size, job.num_micro_batches, job.backward))
        if needed > self.most_bytes:
            return Report(reason="out of memory")
        return Report(
            limit_bytes=self.limit_bytes,
            peak_reserved_bytes=needed if self.has_peaks else None,
            step_seconds=0.5,
            trained=self.trained[job.backward],
            yields_losses=self.yields_losses,
            own_backwards=self.own_backwards,
        )

    @property
    def sizes(self) -> list[int]:
        return [job.micro_batch_size for job in self.jobs]


@pytest.fixture
def gathered(workload: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Evidence]:
    """``gathered(made, per_rank, at_most)``: the evidence from such processes of the CPU, or of ``device``."""

    def gather(
        made: Made,
        per_rank: int | None = None,
        at_most: int | None = None,
        text: str = SMALL,
        device: str = "cpu",
        folder: str = ".",
    ) -> Evidence:
        monkeypatch.setattr(measure, "Trials", made)
        return Measurement(workload(text), device, folder=folder).gather(per_rank, at_most)

    return gather


def sizes_and_fits(evidence: Evidence) -> list[tuple[int, bool]]:
    return [(trial.micro_batch_size, trial.fits) for trial in evidence.trials]


NEEDS = {
    "a line": lambda size, *_: (50 + 17 * size) * MIB,
    "steep": lambda size, *_: (50 + 300 * size) * MIB,
    "a heap that small sizes leave in pieces": lambda size, *_: (50 + 64 * min(size, 5) + 25 * max(0, size - 5)) * MIB,
    "a jump": lambda size, *_: (50 + 17 * size + 300 * (size > 20)) * MIB,
    "quadratic": lambda size, *_: (50 + 0.3 * size**2) * MIB,
    "many samples": lambda size, *_: (43 + 3 * size) * MIB,
    "with noise": lambda size, *_: (50 + 17 * size + size * 7 % 5) * MIB,
}


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_the_largest_that_fits_is_found_in_few_trials(needs: Any, gathered: Callable[..., Evidence]) -> None:
    made = Made(needs)
    evidence = gathered(made)
    assert evidence.largest_fitting == max(size for size in range(1, 400) if needs(size) <= LIMIT)
    assert len(made.sizes) == len(set(made.sizes)) <= 9
    assert [trial.micro_batch_size for trial in evidence.trials] == made.sizes


def test_where_a_sample_is_small_the_answer_is_as_fine_as_measurements_are(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, *_: (50 + 0.01 * size) * MIB)
    assert 0.98 * 95_000 <= gathered(made).largest_fitting <= 95_000
    assert len(made.sizes) <= 12


def test_the_answer_is_as_fine_as_a_64th_of_it(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, *_: (980.015 + 0.01 * size + (size > 1800)) * MIB)
    assert 1898 * 63 / 64 <= gathered(made).largest_fitting <= 1898


def test_memory_that_hardly_grows_ends_the_search_somewhere(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(lambda size, *_: 50 * MIB))
    assert evidence.largest_fitting == 2**20
    assert [notice.code for notice in evidence.notices] == ["search-ended"]


@pytest.mark.parametrize("per_rank", [None, 1000])
def test_no_size_above_the_bound_is_tried_however_coarse_the_search(
    per_rank: int | None, gathered: Callable[..., Evidence]
) -> None:
    made = Made(lambda size, *_: 50 * MIB)
    assert gathered(made, per_rank, 71).largest_fitting <= 71
    assert max(made.sizes) <= 71


def test_a_whole_batch_is_tried_as_one_micro_batch(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, num, _: (50 + 17 * size + 60 * (num == 2)) * MIB)
    evidence = gathered(made, 55, 55)  # 985 MiB as one, 1045 MiB as the first of two
    assert evidence.largest_fitting == 55
    assert {trial.micro_batch_size: trial.num_micro_batches for trial in evidence.trials}[55] == 1
    assert gathered(made, 1000, 55).largest_fitting == 52


def test_a_whole_batch_that_does_not_fit_still_leaves_the_largest_part(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, num, _: (50 + 17 * size + 60 * (num == 2)) * MIB)
    evidence = gathered(made, 60, 60)
    assert evidence.largest_fitting == 52
    assert dict(sizes_and_fits(evidence))[60] is False


def test_a_batch_far_beyond_what_fits_is_not_tried_whole(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    assert gathered(made, 10_000, 10_000).largest_fitting == 55
    assert max(made.sizes) < 140


def test_a_window_of_several_is_tried_as_two_and_its_length_is_told(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    gathered(made, 100, 100)
    assert {job.micro_batch_size: (job.num_micro_batches, job.num_in_window) for job in made.jobs}[2] == (2, 50)
    alone = Made(NEEDS["a line"])
    gathered(alone, None, 10)
    assert {(job.num_micro_batches, job.num_in_window) for job in alone.jobs} == {(1, 1)}


def test_every_size_is_a_multiple(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    assert gathered(made, 600, 600, SMALL + "\nBATCH_MULTIPLE = 6").largest_fitting == 54
    assert all(size % 6 == 0 for size in made.sizes)


def test_the_smallest_is_tried_where_two_do_not_fit(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(lambda size, *_: 600 * size * MIB))
    assert sizes_and_fits(evidence) == [(2, False), (1, True)]
    nothing = gathered(Made(lambda size, *_: 6000 * size * MIB))
    assert sizes_and_fits(nothing) == [(2, False), (1, False)]


def test_the_evidence_says_what_the_device_said_and_what_a_trial_took(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(NEEDS["a line"]))
    assert (evidence.kind, evidence.limit_bytes, evidence.device.name) == ("measured", LIMIT, "made up")
    trial = evidence.trials[0]
    assert (trial.source, trial.peak_allocated_bytes, trial.step_seconds) == ("measured", None, 0.5)
    assert trial.peak_reserved_bytes == trial.required_bytes == 84 * MIB
    assert {trial.reason for trial in evidence.trials if not trial.fits} == {"above the limit"}  # 1002 MiB
    steep = gathered(Made(NEEDS["steep"]))
    assert {trial.reason for trial in steep.trials if not trial.fits} == {"out of memory"}


def test_processes_of_the_cpu_serve_one_trial_and_are_watched(
    workload: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Made(NEEDS["a line"])
    monkeypatch.setattr(measure, "Trials", made)
    Measurement(workload(SMALL), memory_bytes=300 * MIB, folder=str(tmp_path)).gather(None, 8)
    start, folder, is_kept, most_resident_bytes, _ = made.made_with
    assert (start.memory_bytes, start.parent_pid, folder) == (300 * MIB, os.getpid(), str(tmp_path))
    assert (is_kept, most_resident_bytes) == (False, 300 * MIB)


def test_a_context_that_takes_all_memory_is_an_error_that_says_so(
    workload: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(NEEDS["a line"])
    made.limit_bytes = 0
    monkeypatch.setattr(measure, "Trials", made)
    measurement = Measurement(workload(SMALL), memory_bytes=100 * MIB)
    with pytest.raises(DoesNotFitError, match=r"of 2000 MiB, Python, torch and model0\.py .* take 200 MiB"):
        measurement.gather(None, None)
    made.greets = False
    with pytest.raises(DoesNotFitError, match=r"of 100 MiB, .* take more"):
        measurement.gather(None, None)
    assert made.jobs == []


def test_a_small_step_has_the_values_of_its_loss_checked_once(gathered: Callable[..., Evidence]) -> None:
    small = Made(NEEDS["a line"])
    small.check = Report(notices=(Notice(code="odd", message="odd"),))
    assert [notice.code for notice in gathered(small).notices] == ["odd"]
    assert len(small.checks) == 1
    large = Made(lambda size, *_: (300 + 17 * size) * MIB)
    assert gathered(large).notices == ()
    assert large.checks == []


def test_what_the_processes_noticed_is_told(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    made.notices = [Notice(code="not-in-time", message="slow")]
    assert [notice.code for notice in gathered(made).notices] == ["not-in-time"]


# Several losses


def test_both_forms_of_several_losses_are_measured_at_the_size_found(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, _, form: (50 + 17 * size + 20 * (form == "joint")) * MIB)
    made.yields_losses = True
    evidence = gathered(made, text=TWO_LOSSES)
    assert (evidence.backward, evidence.has_several_losses) == ("sequential", True)
    size = evidence.largest_fitting
    peaks = {peak.backward: peak.peak_reserved_bytes for peak in evidence.backward_peaks}
    assert peaks == {"sequential": (50 + 17 * size) * MIB, "joint": (70 + 17 * size) * MIB}
    assert [job.backward for job in made.jobs].count("joint") == 1


def test_one_backward_is_taken_where_it_needs_no_more(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(NEEDS["a line"]), text=TWO_LOSSES)
    assert evidence.backward == "joint"
    assert len(evidence.backward_peaks) == 2


def test_a_joint_form_that_does_not_fit_is_no_choice(gathered: Callable[..., Evidence]) -> None:
    evidence = gathered(Made(lambda size, _, form: (50 + 17 * size + 900 * (form == "joint")) * MIB), text=TWO_LOSSES)
    assert (evidence.backward, evidence.backward_peaks) == ("sequential", ())
    assert evidence.largest_fitting == 55


def test_a_joint_form_that_fails_is_no_choice(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    made.instead = lambda job, report: Report(error="no") if job.backward == "joint" else report
    evidence = gathered(made, text=TWO_LOSSES)
    assert (evidence.backward, evidence.backward_peaks) == ("sequential", ())


def test_a_cut_trunk_has_no_joint_form(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    made.trained["sequential"] = ("trunk", "weight")
    evidence = gathered(made, text=TWO_LOSSES)
    assert (evidence.backward, evidence.backward_peaks) == ("sequential", ())


def test_backwards_of_the_users_own_have_no_joint_form(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    made.own_backwards = 1
    made.check = Report(is_exact_loss_by_loss=False)
    evidence = gathered(made, text=TWO_LOSSES)
    assert (evidence.backward, evidence.backward_peaks) == ("sequential", ())
    assert {job.backward for job in made.jobs} == {"sequential"}


def test_losses_that_only_the_call_shows_are_tried_one_by_one(gathered: Callable[..., Evidence]) -> None:
    made = Made(lambda size, _, form: (50 + 17 * size + 20 * (form == "joint")) * MIB)
    made.yields_losses = True
    evidence = gathered(made)
    assert (evidence.backward, evidence.has_several_losses) == ("sequential", True)
    assert [job.backward for job in made.jobs[:2]] == ["joint", "sequential"]


def test_losses_that_may_not_go_one_by_one_are_summed(gathered: Callable[..., Evidence]) -> None:
    made = Made(NEEDS["a line"])
    made.check = Report(is_exact_loss_by_loss=False, notices=(Notice(code="odd", message="odd"),))
    evidence = gathered(made, text=TWO_LOSSES)
    assert evidence.backward == "joint"
    assert {job.backward for job in made.jobs[1:]} == {"joint"}
    assert [one.code for one in evidence.notices] == ["odd", "sequential-not-exact"]


# Accelerators that are made up: they say what was in use, and a prediction leads


def on(invented: Invented) -> Made:
    """Processes on that device."""

    def needs(size: int, num_micro_batches: int, _: str) -> float:
        return invented.needed_bytes(size, has_gradients=num_micro_batches > 1)

    made = Made(needs)
    made.limit_bytes = made.most_bytes = invented.total_bytes
    return made


def search_on(made: Made, foreseen: Corrected | None, per_rank: int | None = None, unit: int = 1) -> SizeSearch:
    processes: Any = made
    return SizeSearch(processes, unit, per_rank, "joint", made.limit_bytes, False, foreseen, lambda _: None)


def accelerator(answer: int, slope: float = MIB, fixed: int = 100 * MIB, **more: Any) -> Invented:
    """On which ``answer`` is the largest size that fits, with half a sample to spare."""
    total_bytes = max(fixed + math.floor((answer + 0.5) * slope), more.get("floor_bytes", 0))
    return Invented(total_bytes=total_bytes, bytes_per_sample=slope, fixed_bytes=fixed, **more)


def hinted(invented: Invented) -> Corrected:
    return Corrected(lambda size, growth: invented.predicted_bytes(size, growth, invented.total_bytes))


def sizes_tried(search: SizeSearch) -> list[tuple[int, bool]]:
    return [(trial.micro_batch_size, trial.fits) for trial in search.trials.values()]


@settings(max_examples=300, deadline=None)
@example(answer=20, slope=1.0, fixed=0, floor_share=0, error=5, per_rank=None)
@example(answer=5000, slope=1.0, fixed=2000, floor_share=20, error=-5, per_rank=2**20)
@given(
    answer=st.integers(20, 5000),
    slope=st.floats(0.1, 100),
    fixed=st.integers(0, 8000),
    floor_share=st.floats(0, 20),
    error=st.floats(-5, 5),
    per_rank=st.sampled_from([None, 2**20]),
)
def test_a_prediction_within_a_twentieth_ends_in_four_trials_of_which_one_fails(
    answer: int, slope: float, fixed: int, floor_share: float, error: float, per_rank: int | None
) -> None:
    floor_bytes = math.floor((fixed + floor_share / 100 * answer * slope) * MIB)
    hint = max(1, round(answer * (1 + error / 100)))
    assume(abs(hint - answer) <= 0.05 * answer)
    made = on(device := accelerator(answer, slope * MIB, fixed * MIB, floor_bytes=floor_bytes, hint=hint))
    search = search_on(made, hinted(device), per_rank)
    assert search.largest(2**20) == answer
    assert len(made.jobs) == len(search.trials) <= 4
    assert [size for size, fits in sizes_tried(search) if not fits] == [answer + 1]
    assert search.trials[answer].fits


@pytest.mark.parametrize("factor", [None, 0.001, 0.01, 0.1, 0.2, 0.3, 0.5, 0.8, 1.3, 2, 3.9, 10, 100, 1000])
@pytest.mark.parametrize("answer", [1, 2, 3, 77, 512, 3001])
def test_a_prediction_however_wrong_costs_hardly_more_than_none(answer: int, factor: float | None) -> None:
    device = accelerator(answer, hint=None if factor is None else max(1, round(factor * answer)))
    made = on(device)
    search = search_on(made, hinted(device) if factor else None)
    assert search.largest(2**20) == answer
    assert search.trials[answer + 1].reason == "out of memory"
    assert len(made.jobs) == len(search.trials) <= 2 * math.log2(max(answer, device.hint or 1)) + 4


def test_a_roomy_target_is_tried_first_and_alone() -> None:
    device = accelerator(1000, hint=1000)
    made = on(device)
    search = search_on(made, hinted(device), per_rank=800)
    assert search.largest(800) == 800
    assert [(job.micro_batch_size, job.num_micro_batches) for job in made.jobs] == [(800, 1)]


def test_a_target_that_is_predicted_to_fit_barely_is_come_at_from_below() -> None:
    device = accelerator(1000, hint=1000)
    made = on(device)
    search = search_on(made, hinted(device), per_rank=990)
    assert search.largest(990) == 990
    assert made.sizes == [247, 495, 990]


def test_a_roomy_target_that_does_not_fit_after_all_is_searched_below() -> None:
    device = accelerator(300, hint=1000)
    search = search_on(on(device), hinted(device))
    assert search.largest(800) == 300
    assert sizes_tried(search)[0] == (800, False)


def test_an_accelerator_is_searched_to_the_last_sample() -> None:
    device = accelerator(95_001, slope=0.01 * MIB, hint=95_500)
    assert search_on(on(device), hinted(device)).largest(2**20) == 95_001


def test_a_device_that_exceeds_the_limit_without_an_error_does_not_fit() -> None:
    device = accelerator(300, hint=310)
    made = on(device)
    made.most_bytes = 10**15  # it spills
    search = search_on(made, hinted(device))
    assert search.largest(2**20) == 300
    assert {trial.reason for trial in search.trials.values() if not trial.fits} == {"above the limit"}
    assert search.trials[301].peak_reserved_bytes == device.needed_bytes(301) - device.gradient_bytes
    assert len(made.jobs) <= 4


def test_a_device_that_gives_its_cache_back_to_find_room_does_not_fit() -> None:
    device = accelerator(300, hint=300)
    made = on(device)
    made.instead = lambda job, report: report.model_copy(update={"num_retries": int(job.micro_batch_size >= 290)})
    search = search_on(made, hinted(device))
    assert search.largest(2**20) == 289
    assert search.trials[290].reason == "allocator retried"


def test_a_limit_that_shrinks_between_trials_is_kept_to(tmp_path: Path, gathered: Callable[..., Evidence]) -> None:
    device = accelerator(300, hint=300)
    (tmp_path / "device.json").write_text(device.model_dump_json())
    made = on(device)
    shrunk = device.total_bytes - 50 * MIB  # another process took some, and nothing raises
    made.instead = lambda job, report: report.model_copy(update={"limit_bytes": shrunk})
    made.needs = lambda size, *_: min(device.total_bytes, device.needed_bytes(size))
    evidence = gathered(made, device="test:device.json", folder=str(tmp_path))
    assert (evidence.largest_fitting, evidence.limit_bytes) == (250, shrunk)


def test_a_limit_that_grows_again_is_not_believed() -> None:
    device = accelerator(300, hint=300)
    made = on(device)
    made.instead = lambda job, report: report.model_copy(update={"limit_bytes": 2 * device.total_bytes})
    search = search_on(made, hinted(device))
    assert search.largest(2**20) == 300
    assert search.limit_bytes == device.total_bytes


def refusing(first: int) -> Callable[[Job, Report], Report]:
    """An operator refuses sizes from ``first``."""
    refused = Report(reason="operator limit", error="INT_MAX", details="model.py, line 3")
    return lambda job, report: refused if job.micro_batch_size >= first else report


@pytest.mark.parametrize("unit", [1, 8])
def test_an_operator_that_refuses_the_smallest_size_is_the_users_error(unit: int) -> None:
    made = on(accelerator(300))
    made.instead = refusing(1)
    with pytest.raises(UserCodeError, match="INT_MAX") as caught:
        search_on(made, None, unit=unit).largest(2**20)
    assert caught.value.details == "model.py, line 3"
    assert made.sizes == [2 * unit, unit]


@pytest.mark.parametrize("hint", [None, 300])
def test_an_operator_that_refuses_a_larger_size_is_a_bound(hint: int | None) -> None:
    device = accelerator(300, hint=hint)
    made = on(device)
    made.instead = refusing(100)
    search = search_on(made, hinted(device) if hint else None)
    assert search.largest(2**20) == 99
    assert search.trials[100].reason == "operator limit"
    assert ["100" in notice.message for notice in search.notices if notice.code == "operator-limit"] == [True]


@pytest.mark.parametrize("reason", ["killed", "not in time"])
def test_a_trial_that_was_ended_does_not_fit_and_says_why(reason: str) -> None:
    device = accelerator(300, hint=300)
    made = on(device)
    made.instead = lambda job, report: Report(reason=reason) if job.micro_batch_size >= 200 else report  # type: ignore[arg-type]
    search = search_on(made, hinted(device))
    assert search.largest(2**20) == 199
    assert search.trials[200].reason == reason


def test_trials_carry_what_was_predicted_before_anything_was_measured(
    tmp_path: Path, gathered: Callable[..., Evidence]
) -> None:
    device = accelerator(300, hint=285)
    (tmp_path / "device.json").write_text(device.model_dump_json())
    evidence = gathered(on(device), device="test:device.json", folder=str(tmp_path))
    assert evidence.largest_fitting == 300
    for trial in evidence.trials:
        assert trial.predicted_bytes == math.ceil(device.predicted_bytes(trial.micro_batch_size, 1, device.total_bytes))
    without = accelerator(300)
    (tmp_path / "device.json").write_text(without.model_dump_json())
    evidence = gathered(on(without), device="test:device.json", folder=str(tmp_path))
    assert {trial.predicted_bytes for trial in evidence.trials} == {None}


def test_a_window_of_one_teaches_nothing_about_windows_of_several() -> None:
    device = accelerator(300, hint=300, gradient_bytes=50 * MIB)
    search = search_on(on(device), hinted(device), per_rank=300)
    assert search.largest(300) == 300  # alone, it needs no room for the gradients of another
    assert search.trials[300].num_micro_batches == 1
    assert search_on(on(device), hinted(device), per_rank=10**4).largest(10**4) == 250
    made = on(device)
    made.most_bytes = 10**15  # what is too large has a peak, too
    assert search_on(made, hinted(device), per_rank=301).largest(301) == 250
    assert made.sizes == [75, 150, 301, 250, 251]


def test_what_is_foreseen_is_the_window_that_is_tried(
    workload: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "device.json").write_text(accelerator(10).model_dump_json())
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(measure, "Trials", on(accelerator(10)))
    monkeypatch.setattr(measure, "foresee", lambda *arguments: seen.append(arguments[-2:]))
    measurement = Measurement(workload(SMALL), "test:device.json", folder=str(tmp_path))
    measurement.gather(None, None)
    measurement.gather(100, 100)
    assert seen == [(1, 1), (1, 2)]  # of multiples, and of micro-batches


def test_a_device_without_peaks_is_searched_by_what_fails_and_says_so(
    tmp_path: Path, gathered: Callable[..., Evidence]
) -> None:
    device = accelerator(300, hint=290, reports_peaks=False)
    (tmp_path / "device.json").write_text(device.model_dump_json())
    made = on(device)
    made.has_peaks = False
    evidence = gathered(made, device="test:device.json", folder=str(tmp_path))
    assert evidence.largest_fitting == 300
    assert "peaks-unknown" in [notice.code for notice in evidence.notices]
    assert {trial.required_bytes for trial in evidence.trials} == {None}


def test_processes_of_an_accelerator_are_kept_and_have_what_is_free(
    tmp_path: Path, gathered: Callable[..., Evidence]
) -> None:
    device = accelerator(10)
    (tmp_path / "device.json").write_text(device.model_dump_json())
    made = on(device)
    gathered(made, device="test:device.json", folder=str(tmp_path))
    start, _, is_kept, most_resident_bytes, launch = made.made_with
    assert (start.device, start.memory_bytes) == ("test:device.json", None)
    assert (is_kept, most_resident_bytes, launch) == (True, None, Launch())


# Real processes on the CPU


def started(text: str, folder: Path, memory_bytes: int) -> Trials:
    """Processes of the CPU with that model."""
    (folder / "model.py").write_text(text)
    start = Start(
        model="model.py", device="cpu", parent_pid=os.getpid(), precision="32-true", memory_bytes=memory_bytes
    )
    return Trials(start, str(folder), is_kept=False, most_resident_bytes=memory_bytes)


JOB = Job(backward="joint", micro_batch_size=2, num_micro_batches=2, num_in_window=2)


@functools.cache
def context_bytes() -> int:
    with tempfile.TemporaryDirectory() as folder, started(SMALL, Path(folder), 2**40) as processes:
        hello = processes.hello()
    assert hello is not None
    return hello.context_bytes


def test_a_trial_reports_what_the_training_held(tmp_path: Path) -> None:
    text = SMALL.replace("    return model(", "    kept = torch.ones(2**26)\n    return model(")
    with started(text, tmp_path, context_bytes() + 2000 * MIB) as processes:
        report = processes.run(JOB)
    assert report.peak_reserved_bytes is not None
    assert 256 * MIB <= report.peak_reserved_bytes < 512 * MIB  # some of it is what torch imports late
    assert report.trained == ("weight", "bias")


@on_linux
def test_the_kernel_refuses_what_is_far_too_large(tmp_path: Path) -> None:
    # Never touched, so that no watcher from outside would see it.
    text = SMALL.replace("    return model(", "    torch.empty(2**29)\n    return model(")
    with started(text, tmp_path, context_bytes() + 100 * MIB) as processes:
        report = processes.run(JOB)
    assert (report.reason, report.peak_reserved_bytes) == ("out of memory", None)


def test_what_grows_before_there_is_a_limit_is_killed_from_outside(tmp_path: Path) -> None:
    text = "import time, torch\nheld = torch.ones(2**28)\ntime.sleep(60)\n" + SMALL
    with started(text, tmp_path, context_bytes() + 100 * MIB) as processes:
        assert processes.hello() is None


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


# Batches of two are above 32 MiB, and so outside glibc's heap: what that holds differs by some percent from process to
# process. All else is small, there is little to compute, and a line through two small sizes leads to the answer.
LARGE = """
import torch
from torch import nn

BATCH_SIZE = 64
LEARNING_RATE = 1e-3

def build_model():
    return nn.Linear(256, 1)

def build_batch(n):
    return torch.ones(n, 2**14, 256)

def compute_loss(model, batch):
    return model(batch.mean(1)).square().mean()
"""
TRAIN = """
import sys, torch
from gradplan.probes import step
import model
built = model.build_model()
optimizer = torch.optim.AdamW(built.parameters())
for _ in range(2):
    window = ((model.build_batch(int(sys.argv[1])), 0.5) for _ in range(2))
    step.train_window(built, optimizer, window, model.compute_loss, torch.device("cpu"))
"""


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="the kernel is asked for the peak of a child")
def test_the_size_found_stays_inside_the_memory_and_a_tenth_more_does_not(tmp_path: Path) -> None:
    memory_mib = context_bytes() // MIB + 1300  # room for so many samples that a tenth of them is several
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


# The machine


def test_the_limit_is_the_memory_less_context_and_headroom() -> None:
    start = Start(
        model="model.py",
        device="cpu",
        parent_pid=os.getpid(),
        precision="32-true",
        memory_bytes=2**40,
        headroom_percent=20,
    )
    memory = HostMemory(start)
    hello = memory.hello()
    assert hello.device.total_bytes == 2**40
    assert 0 < hello.context_bytes <= peak_resident_bytes() + 4 * MIB
    assert hello.limit_bytes == memory.limit_bytes() == math.floor(0.8 * (2**40 - hello.context_bytes))
    assert HostMemory(start.model_copy(update={"memory_bytes": MIB})).hello().limit_bytes == 0


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
