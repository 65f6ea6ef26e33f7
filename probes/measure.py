"""Evidence from the CPU of this machine: real training steps, each size in a child process of its own."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from typing import Literal

from gradplan.probes.child import run_in_child
from gradplan.probes.errors import DoesNotFitError, UserCodeError
from gradplan.probes.evidence import Backward, BackwardPeak, Device, Evidence, Notice, Precision, Recipe, Trial
from gradplan.probes.host_memory import IS_LIMIT_ENFORCED, available_bytes
from gradplan.probes.search import MOST_SAMPLES, end_notices, largest
from gradplan.probes.simulator.forms import NOT_EXACT
from gradplan.probes.simulator.losses import VALUE_CHECK_BYTES
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.worker import Job, Report
from gradplan.probes.workload import Workload

MOST_GROWTH = 32  # a line through two sizes is not followed further than this many times the larger
NEAR = 0.03  # the line is followed again until its next guess differs by less than this
GRAIN_BYTES = 2 * 2**20  # by about this much the peak of one size differs between processes
NOTHING_FITS = (
    "nothing fits: of {memory:.0f} MiB, Python, torch and {model} with its data take {context}. Take more memory"
)
NOT_ENFORCED = (
    "this system does not limit a process's memory: trials were watched instead, and an allocation that is far too "
    "large may get through before one is stopped"
)


class Measurement:
    """One workload on the CPU of this machine.

    ``memory_bytes`` is what the whole training process may have; None means what is available when the trials
    begin. ``headroom_percent`` of what it leaves beside Python, torch and the user's file is left free.
    ``folder`` is the working folder that model.py is read in. ``progress`` is told what is being done.

    A trial's ``peak_reserved_bytes`` is the most that its process held in RAM at once, less what it held before
    the model was built; so is its ``required_bytes``.
    """

    def __init__(
        self,
        workload: Workload,
        precision: Precision = "32-true",
        memory_bytes: int | None = None,
        headroom_percent: float = 5.0,
        folder: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._workload = workload
        self._unit = workload.batch_multiple
        self._precision: Precision = precision
        self._given_bytes = memory_bytes
        self._headroom_percent = headroom_percent
        self._folder = folder or os.getcwd()
        self._progress = progress
        self._tracer = Tracer(Setup(workload, precision, (8, 0)), progress)
        self._backward: Backward = "sequential" if workload.yields_losses else "joint"
        self._per_rank: int | None = None
        self._trials: dict[int, Trial] = {}
        self._notices: list[Notice] = []
        self._trained: tuple[str, ...] = ()
        self._has_several_losses = self._has_own_backwards = False
        self.total_bytes = 0
        self.limit_bytes = 0

    def recipe(self) -> Recipe:
        """What the planner reads of model.py.

        Raises:
            UserCodeError: a builder failed or returned the wrong kind of thing.
        """
        return self._tracer.recipe()

    def gather(
        self, per_rank: int | None, at_most: int | None, others: tuple[object, ...] = (), with_levers: bool = False
    ) -> Evidence:
        """The trials that find the largest micro-batch; every size that counts was run.

        ``per_rank`` is the whole batch of one optimizer step on one rank, tried as one micro-batch where
        ``at_most`` allows it; None where the window is one micro-batch, as large as fits. ``others``
        and levers are not measured.

        Raises:
            UserCodeError: the user's step failed; the message names their line.
            DoesNotFitError: nothing is left for the model.
        """
        gc.collect()
        self.total_bytes = self._given_bytes or available_bytes()
        self._per_rank = per_rank
        if not IS_LIMIT_ENFORCED:
            self._notices.append(Notice(code="limit-not-enforced", message=NOT_ENFORCED))
        ceiling = at_most or MOST_SAMPLES
        self._begin(min(2 * self._unit, ceiling))
        best = self._search(ceiling)
        self._notices += end_notices(best)
        peaks = self._compare_forms(best) if self._backward == "sequential" and best else ()
        return Evidence(
            kind="measured",
            device=Device(name="CPU of this machine", total_bytes=self.total_bytes, slug="cpu"),
            limit_bytes=self.limit_bytes,
            trials=tuple(self._trials.values()),
            backward=self._backward,
            backward_peaks=peaks,
            has_several_losses=self._has_several_losses,
            notices=tuple(self._notices),
        )

    def _begin(self, size: int) -> None:
        """The first trial, and what only a call shows: are there several losses, may they go one by one?"""
        report = self._run(size, self._backward)
        self._has_several_losses = report.yields_losses
        if report.yields_losses and self._backward == "joint":
            self._backward = "sequential"
            report = self._run(size, self._backward)
        left = self.total_bytes - report.context_bytes
        self.limit_bytes = math.floor(max(0, left) * (1 - self._headroom_percent / 100))
        if self.limit_bytes == 0:
            raise self._nothing_fits(f"{report.context_bytes / 2**20:.0f} MiB")
        if report.peak_bytes is not None and report.peak_bytes - report.context_bytes <= VALUE_CHECK_BYTES:
            checked = self._run(size, self._backward, "check")
            self._notices += checked.notices
            if not checked.is_exact_loss_by_loss and not report.own_backwards:
                self._notices.append(Notice(code="sequential-not-exact", message=NOT_EXACT))
                self._backward = "joint"
                report = self._run(size, self._backward)
        self._record(size, report)

    def _search(self, at_most: int) -> int:
        """The largest size that fits, 0 where none does."""
        smallest = min(2 * self._unit, at_most)
        if not self._trials[smallest].fits:
            return largest(self._fits, at_most=smallest, multiple=self._unit)
        hint = self._near(at_most)
        # A whole batch as one micro-batch needs less than the line through windows of two says.
        may_fit = hint == at_most or (self._per_rank == at_most and hint >= 0.8 * at_most)
        if may_fit and self._try(at_most).fits:
            return at_most
        grain = self._grain(hint)
        return largest(self._fits, at_most=at_most, hint=max(hint, grain), multiple=grain)

    def _near(self, at_most: int) -> int:
        """A size near the answer: a line through the two largest sizes that ran, followed until it settles."""
        size, below = min(4 * self._unit, at_most), at_most
        while True:
            if self._try(size).peak_reserved_bytes is None:
                below = size - self._unit
                fitting = max(known for known, trial in self._trials.items() if trial.fits and known < size)
                following = self._rounded((fitting + size) / 2)
            else:
                following = self._where_line_meets_limit(below)
            if following in self._trials or abs(following - size) <= NEAR * size:
                return following
            size = following

    def _where_line_meets_limit(self, at_most: int) -> int:
        (low, low_bytes), (high, high_bytes) = self._two_largest()
        most = min(at_most, MOST_GROWTH * high)
        if high_bytes <= low_bytes:
            return self._rounded(most)
        meets = high + (self.limit_bytes - high_bytes) * (high - low) / (high_bytes - low_bytes)
        return self._rounded(min(most, meets))

    def _rounded(self, size: float) -> int:
        return max(1, math.floor(size / self._unit)) * self._unit

    def _two_largest(self) -> list[tuple[int, int]]:
        """(size, peak) of the two largest that ran to their end; the same twice where there is one."""
        ran = sorted((s, t.peak_reserved_bytes) for s, t in self._trials.items() if t.peak_reserved_bytes is not None)
        return [ran[0], *ran][-2:]

    def _grain(self, hint: int) -> int:
        """The step of the search: no finer than measurements are, and than a 64th of the answer."""
        (low, low_bytes), (high, high_bytes) = self._two_largest()
        slope = max(0, high_bytes - low_bytes) / max(1, high - low)
        in_noise = GRAIN_BYTES / slope if slope else math.inf
        return self._unit * max(1, math.floor(min(hint / 64, in_noise) / self._unit))

    def _fits(self, size: int) -> bool:
        """As tried, or as it follows from a smaller size that does not fit or a larger one that does."""
        if size in self._trials:
            return self._trials[size].fits
        if any(known > size and trial.fits for known, trial in self._trials.items() if known != self._per_rank):
            return True
        if any(known < size and not trial.fits for known, trial in self._trials.items()):
            return False
        return self._try(size).fits

    def _try(self, size: int) -> Trial:
        known = self._trials.get(size)
        return self._record(size, self._run(size, self._backward)) if known is None else known

    def _record(self, size: int, report: Report) -> Trial:
        peak = self._peak(report)
        trial = Trial(
            micro_batch_size=size,
            num_micro_batches=self._num_micro_batches(size),
            fits=peak is not None and peak <= self.limit_bytes,
            source="measured",
            peak_reserved_bytes=peak,
            required_bytes=peak,
            step_seconds=report.step_seconds,
        )
        self._trials[size] = trial
        self._trained = report.trained or self._trained
        self._has_own_backwards |= report.own_backwards > 0
        return trial

    def _peak(self, report: Report) -> int | None:
        return None if report.peak_bytes is None else report.peak_bytes - report.context_bytes

    def _num_micro_batches(self, size: int) -> int:
        return min(2, self._num_in_window(size))

    def _num_in_window(self, size: int) -> int:
        return 1 if self._per_rank is None else -(-self._per_rank // size)

    def _run(self, size: int, backward: Backward, task: Literal["train", "check"] = "train") -> Report:
        self._progress(f"training with a micro-batch of {size}" if task == "train" else "checking the loss")
        job = Job(
            task=task,
            model=self._workload.typed,
            parent_pid=os.getpid(),
            memory_bytes=self.total_bytes,
            precision=self._precision,
            backward=backward,
            micro_batch_size=size,
            num_micro_batches=self._num_micro_batches(size),
            num_in_window=self._num_in_window(size),
            largest_first=self._largest_first(),
        )
        report = run_in_child(job, self._folder)
        if report is None or not report.context_bytes:
            raise self._nothing_fits("more")
        return report

    def _largest_first(self) -> tuple[int, ...] | None:
        has_own_batches = self._workload.dataset is None or "build_batch" in vars(self._workload.module)
        return None if has_own_batches else tuple(self._workload.largest_first)

    def _nothing_fits(self, context: str) -> DoesNotFitError:
        memory = self.total_bytes / 2**20
        return DoesNotFitError(NOTHING_FITS.format(memory=memory, model=self._workload.path.name, context=context))

    def _compare_forms(self, size: int) -> tuple[BackwardPeak, ...]:
        """Both forms at one size; from here on joint, one backward, where that needs no more.

        A trunk that was cut at its output has no joint form: its sum alone would not train the trunk.
        """
        sequential = self._trials[size]
        if self._has_own_backwards:
            return ()
        try:
            report = self._run(size, "joint")
        except UserCodeError:
            return ()
        peak = self._peak(report)
        if peak is None or sequential.required_bytes is None or set(report.trained) != set(self._trained):
            return ()
        if peak <= min(self.limit_bytes, sequential.required_bytes):
            self._backward = "joint"
            self._record(size, report)
        forms: tuple[tuple[Backward, int], ...] = (("sequential", sequential.required_bytes), ("joint", peak))
        return tuple(
            BackwardPeak(backward=form, micro_batch_size=size, peak_allocated_bytes=needed, peak_reserved_bytes=needed)
            for form, needed in forms
        )
