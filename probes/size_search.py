"""The largest size that fits, by trials: what was run, what it took, and which size to try next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Backward, Notice, Reason, Trial
from gradplan.probes.measuring.messages import Job, Report
from gradplan.probes.measuring.trials import Trials
from gradplan.probes.prediction import Corrected, Line
from gradplan.probes.search import MOST_SAMPLES, close_in
from gradplan.probes.simulator.forms import NOT_EXACT
from gradplan.probes.simulator.losses import VALUE_CHECK_BYTES

OF_MEMORY: tuple[Reason, ...] = ("out of memory", "above the limit")
STOPPED: dict[Reason, str] = {
    "operator limit": "an operator refuses a micro-batch of {size}, with any amount of memory: {error}",
    "killed": "the process that trained with a micro-batch of {size} was killed, twice: it counts as one that does not "
    "fit",
    "allocator retried": "with a micro-batch of {size}, PyTorch's allocator had to give its cache back to find room, "
    "which slows every step: it counts as one that does not fit",
}
GRAIN_BYTES = 2 * 2**20  # by about this much the peak of one size differs between processes on the CPU
ACTIVATIONS = 8  # about so many times its parameters does a model hold in a step of a few samples
ROOMY = 0.9  # a prediction below this share of the limit is trusted to fit at the first trial
ALL_BUT_WHOLE = 0.8  # of the whole batch: as one micro-batch it needs less than a line through windows of two says


class SizeSearch:
    """Trials of one workload at one size after the other, in ``processes``.

    ``unit`` is what sizes are multiples of, ``per_rank`` the whole batch of one optimizer step on one rank, None where
    the window is one micro-batch. ``backward`` is the form to begin with; what a call shows may change it.
    ``limit_bytes`` may shrink as trials find less memory free. Without a ``foreseen`` curve, a straight line leads the
    search, on the host as coarse as measurements are there.
    """

    def __init__(
        self,
        processes: Trials,
        unit: int,
        per_rank: int | None,
        backward: Backward,
        limit_bytes: int,
        is_host: bool,
        foreseen: Corrected | None,
        progress: Callable[[str], None],
    ) -> None:
        self.trials: dict[int, Trial] = {}
        self.notices: list[Notice] = []
        self.backward: Backward = backward
        self.limit_bytes = limit_bytes
        self.trained: tuple[str, ...] = ()
        self.has_several_losses = self.has_own_backwards = False
        self._processes = processes
        self._unit = unit
        self._per_rank = per_rank
        self._is_host = is_host
        self._foreseen = self._uncorrected = foreseen
        self._line = Line()
        self._refused: dict[int, str] = {}
        self._progress = progress

    def largest(self, at_most: int) -> int:
        """The largest size that fits, 0 where none does."""
        at_most = at_most // self._unit * self._unit
        self._scout(at_most)
        if self._foreseen and not any(trial.fits for trial in self.trials.values()):
            self._foreseen = None  # it is of no use
            self._scout(at_most)

        def guess() -> int | None:
            if self._nearest_failure() not in (None, *OF_MEMORY):
                return None  # what is predicted is memory
            wanted = self._guess(at_most)
            return at_most if self._may_fit_whole(at_most, wanted) else wanted

        best = close_in(self._fits, guess, at_most=at_most, multiple=self._unit, grain=self._grain)
        self._say_what_stopped(best)
        return best

    def _say_what_stopped(self, best: int) -> None:
        """Where it was not memory."""
        size = min((size for size, trial in self.trials.items() if size > best and not trial.fits), default=0)
        reason = self.trials[size].reason if size else None
        if reason is not None and reason in STOPPED:
            message = STOPPED[reason].format(size=size, error=self._refused.get(size))
            self.notices.append(Notice(code=reason.replace(" ", "-"), message=message))

    def _nearest_failure(self) -> Reason | None:
        """Why the smallest of the sizes that failed did."""
        failed = [size for size, trial in self.trials.items() if not trial.fits]
        return self.trials[min(failed)].reason if failed else None

    def _scout(self, at_most: int) -> None:
        first, *others = self._scouts(at_most)
        if not self.trials:
            self._begin(first)
        if self._foreseen and not others and not self.trials[first].fits:
            others = self._below(first)
        smallest_failed = min((size for size, trial in self.trials.items() if not trial.fits), default=math.inf)
        for size in (first, *others):
            if self._foreseen or size < smallest_failed:
                smallest_failed = smallest_failed if self._try(size).fits else min(size, smallest_failed)

    def _may_fit_whole(self, at_most: int, wanted: int | None) -> bool:
        """Whether to try the whole batch as one micro-batch, which no gradients of others lie beside."""
        if wanted is None or self._per_rank != at_most or at_most in self.trials:
            return False
        if self._foreseen is not None and self._foreseen.bytes_alone_at(at_most) <= self.limit_bytes:
            return True
        return wanted >= ALL_BUT_WHOLE * at_most

    def _guess(self, at_most: int) -> int | None:
        return (self._foreseen or self._line).largest(self.limit_bytes, at_most, self._unit)

    def _foreseen_bytes(self, size: int) -> int | None:
        return None if self._uncorrected is None else math.ceil(self._uncorrected.uncorrected_bytes_at(size))

    def _scouts(self, at_most: int) -> list[int]:
        """Sizes to begin with: what a prediction calls easy, else a few below, from which it learns."""
        wanted = self._guess(at_most)
        if wanted is None:
            sizes = [2 * self._unit, 4 * self._unit]
        elif wanted == at_most and (self._foreseen_bytes(at_most) or math.inf) <= ROOMY * self.limit_bytes:
            return [at_most]
        else:
            return self._below(wanted)
        return sorted({min(size, at_most) for size in sizes})

    def _below(self, size: int) -> list[int]:
        """A quarter and a half of it; one alone may fail where a larger size does not, and many models refuse 1."""
        least = min(2 * self._unit, size)
        return sorted({max(least, part // self._unit * self._unit) for part in (size // 4, size // 2)})

    def _grain(self) -> int:
        """The step of the search: on the CPU no finer than measurements are, and than a 64th of the answer."""
        hint = self._guess(MOST_SAMPLES) if self._is_host else None
        if hint is None:
            return self._unit
        slope = self._line.bytes_per_sample
        return max(self._unit, math.floor(min(hint / 64, GRAIN_BYTES / slope if slope else math.inf)))

    def _fits(self, size: int) -> bool:
        """As tried, or as it follows from a larger size that fits, or from one below it and above all that fit."""
        if size in self.trials:
            return self.trials[size].fits
        if any(known > size and trial.fits for known, trial in self.trials.items() if known != self._per_rank):
            return True
        fitting = max((known for known, trial in self.trials.items() if trial.fits), default=0)
        if any(fitting < known < size for known in self.trials):
            return False
        try:
            return self._try(size).fits
        except UserCodeError:
            if size > self._unit or fitting or self._nearest_failure() not in OF_MEMORY:
                raise
            return False  # larger ones ran out of memory, and many models refuse a batch of one

    # Trials

    def _begin(self, size: int) -> None:
        """The first trial, and what only a call shows: are there several losses, may they go one by one?"""
        report = self.run(size, self.backward)
        self.has_several_losses = report.yields_losses
        if report.yields_losses and self.backward == "joint":
            self.backward = "sequential"
            report = self.run(size, self.backward)
        if self._is_small(report):
            checked = self.run(size, self.backward, "check")
            self.notices += checked.notices
            if not checked.is_exact_loss_by_loss and not report.own_backwards:
                self.notices.append(Notice(code="sequential-not-exact", message=NOT_EXACT))
                self.backward = "joint"
                report = self.run(size, self.backward)
        self.record(size, report)

    def _is_small(self, report: Report) -> bool:
        """So that a loss can be looked at on the CPU: by all that was in use there, elsewhere by the model alone."""
        in_use_bytes = report.peak_reserved_bytes if self._is_host else report.model_bytes * ACTIVATIONS
        return report.reason is None and in_use_bytes is not None and in_use_bytes <= VALUE_CHECK_BYTES

    def _try(self, size: int) -> Trial:
        known = self.trials.get(size)
        return self.record(size, self.run(size, self.backward)) if known is None else known

    def record(self, size: int, report: Report) -> Trial:
        peak_bytes, reason = report.peak_reserved_bytes, report.reason
        if reason == "operator limit":
            if size <= self._unit:
                raise UserCodeError(report.error or "", report.details)
            self._refused[size] = report.error or ""
        if report.limit_bytes is not None:
            self.limit_bytes = min(self.limit_bytes, report.limit_bytes)
        if report.num_retries:
            reason = reason or "allocator retried"
        elif peak_bytes is not None and peak_bytes > self.limit_bytes:
            reason = reason or "above the limit"
        trial = Trial(
            micro_batch_size=size,
            num_micro_batches=self._num_micro_batches(size),
            fits=reason is None,
            reason=reason,
            source="measured",
            peak_allocated_bytes=report.peak_allocated_bytes,
            peak_reserved_bytes=peak_bytes,
            required_bytes=peak_bytes,
            step_seconds=report.step_seconds,
            predicted_bytes=self._foreseen_bytes(size),
        )
        self.trials[size] = trial
        if reason is not None:
            self._progress(f"a micro-batch of {size} does not fit: {reason}")
        self._learn(trial)
        self.trained = report.trained or self.trained
        self.has_own_backwards |= report.own_backwards > 0
        return trial

    def _learn(self, trial: Trial) -> None:
        """A window of one micro-batch is another step: nothing is learned from one among those of several."""
        size, peak_bytes, prediction = trial.micro_batch_size, trial.peak_reserved_bytes, self._foreseen or self._line
        if trial.num_micro_batches != self._num_micro_batches(self._unit):
            return
        if peak_bytes is not None and trial.reason != "allocator retried":
            prediction.learn(size, peak_bytes)
        elif not trial.fits:
            prediction.learn_failure(size)

    def _num_micro_batches(self, size: int) -> int:
        return min(2, self._num_in_window(size))

    def _num_in_window(self, size: int) -> int:
        return 1 if self._per_rank is None else -(-self._per_rank // size)

    def run(self, size: int, backward: Backward, task: Literal["train", "check"] = "train") -> Report:
        self._progress(f"training with a micro-batch of {size}" if task == "train" else "checking the loss")
        job = Job(
            task=task,
            backward=backward,
            micro_batch_size=size,
            num_micro_batches=self._num_micro_batches(size),
            num_in_window=self._num_in_window(size),
        )
        return self._processes.run(job)
