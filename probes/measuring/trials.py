"""Trials in a child process that is kept while it is sound, and replaced when it is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from gradplan.probes.errors import GradplanError, UserCodeError
from gradplan.probes.evidence import Evidence, Notice
from gradplan.probes.launch import Launch
from gradplan.probes.measuring.child import Child
from gradplan.probes.measuring.messages import Hello, Job, Report, Start
from gradplan.probes.measuring.ranks_in_step import ALONE, FollowerError, Ranks, common_hello, common_report

FIRST_SECONDS = 1800.0  # for importing the file, and for the first trial of all
LEAST_SECONDS = 30.0
TIMES_SLOWER = 10.0  # than trials before it say; a device that spills into the host's memory is about that slow
LEFTOVER_BYTES = 64 * 2**20  # cuBLAS keeps a workspace of up to 32 MiB, and so do others


class Trials:
    """The child process of one measurement, and how long a trial may take. Used in a ``with``.

    ``is_kept`` says whether one process serves several trials. ``most_resident_bytes`` is as in :class:`Child`.
    With several ranks, each has a child of its own, and all run the first rank's jobs.
    """

    def __init__(
        self,
        start: Start,
        folder: str,
        is_kept: bool,
        most_resident_bytes: int | None = None,
        launch: Launch = ALONE,
    ) -> None:
        self.notices: list[Notice] = []
        self.ranks = Ranks(launch)
        self._new: Callable[[], Child] = lambda: Child(start, folder, most_resident_bytes)
        self._is_kept = is_kept
        self._child: Child | None = None
        self._is_used = False
        self._seconds: dict[int, float] = {}

    def __enter__(self) -> Trials:
        self.ranks.__enter__()
        self._child = self._new()  # now, as it takes a while to start
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.ranks.__exit__()

    def lead(self, gather: Callable[[], Evidence]) -> Evidence:
        """``gather`` on the first rank, whose jobs the others run too; its evidence on all.

        Raises:
            GradplanError: ``gather`` failed; on the others FollowerError.
        """
        if not self.ranks.is_first:
            return self._follow()
        try:
            evidence = gather()
        except GradplanError as error:
            self.ranks.share(error.exit_code)
            raise
        return self.ranks.share(evidence)

    def _follow(self) -> Evidence:
        while True:
            message: Job | Literal["hello"] | Evidence | int = self.ranks.share("hello")
            if isinstance(message, Evidence):
                return message
            if isinstance(message, int):
                raise FollowerError(message)
            if isinstance(message, Job):
                self.ranks.collect(self._run(message))
            else:
                self.ranks.collect(self._hello())

    def hello(self) -> Hello | None:
        """What the device is; None where the process ran out of memory before it could say so.

        Raises:
            UserCodeError: the user's file failed.
        """
        self.ranks.share("hello")
        found = self.ranks.collect(self._hello())
        failed = [one for one in found if isinstance(one, Report)]
        self._check(next((one for one in failed if one.error is not None or one.reason == "not in time"), None))
        return common_hello([one if isinstance(one, Hello) else None for one in found])

    def run(self, job: Job) -> Report:
        """One job.

        Raises:
            UserCodeError: the user's code failed, or hangs before anything has run.
        """
        self.ranks.share(job)
        report = common_report(self.ranks.collect(self._run(job)))
        self._check(report)
        return report

    def _check(self, report: Report | None) -> None:
        if report is not None and report.error is not None and report.reason is None:
            raise UserCodeError(report.error, report.details)
        if report is not None and report.reason == "not in time" and not self._seconds:
            raise UserCodeError(
                f"the first trial had not ended after {FIRST_SECONDS:.0f} s: does the model's file hang?"
            )

    def _hello(self) -> Hello | Report:
        """A process that was killed before it had said anything is given a second chance."""
        for _ in range(2):
            self._child = self._child or self._new()
            message = self._child.hello(FIRST_SECONDS)
            if isinstance(message, Hello):
                return message
            self._close()
            if message.reason != "killed":
                break
        return message

    def _run(self, job: Job) -> Report:
        """A job, and once more in a new process where the old one may have been to blame, or somebody's mistake."""
        was_used = self._is_used
        report = self._run_once(job)
        is_worn = was_used and (report.reason == "not in time" or (report.error is not None and report.reason is None))
        return self._run_once(job) if is_worn or report.reason == "killed" else report

    def _run_once(self, job: Job) -> Report:
        hello = self._hello()
        if isinstance(hello, Report):
            return hello
        assert self._child is not None
        self._is_used = True
        work = job.micro_batch_size * job.num_micro_batches
        start_seconds, most_seconds = time.monotonic(), self._most_seconds(work)
        report = self._child.run(job, most_seconds)
        if report.reason is None:
            self._seconds[work] = time.monotonic() - start_seconds
        elif report.reason == "not in time" and self._seconds:
            self._say_not_in_time(job.micro_batch_size, most_seconds)
        has_failed = report.reason is not None or report.error is not None
        if not self._is_kept or has_failed or report.leftover_bytes > LEFTOVER_BYTES:
            self._close()
        return report

    def _say_not_in_time(self, size: int, most_seconds: float) -> None:
        message = (
            f"a micro-batch of {size} had not ended after {most_seconds:.0f} s, far longer than smaller ones let "
            "expect: it counts as one that does not fit"
        )
        self.notices = [Notice(code="not-in-time", message=message)]

    def _most_seconds(self, work: int) -> float:
        """From the trial before that is nearest in work."""
        if not self._seconds:
            return FIRST_SECONDS
        nearest = min(self._seconds, key=lambda known: abs(known - work))
        return LEAST_SECONDS + TIMES_SLOWER * self._seconds[nearest] * max(1.0, work / nearest)

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child, self._is_used = None, False
