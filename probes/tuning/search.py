"""Search the learning-rate multiplier: Optuna asks, train.py answers, each time a complete short run."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from optuna.trial import FrozenTrial, Trial

from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import TuningTrial
from gradplan.probes.measuring.child import Child
from gradplan.probes.measuring.messages import Report
from gradplan.probes.tuning.ledger import Ledger
from gradplan.probes.tuning.messages import Run, Script

FIRST = (1.0, 0.5, 2.0)
LOWEST, HIGHEST = 1 / 4, 4.0
EXTREMES = (1 / 64, 64.0)
NEAR_EDGE, EXTENSION = math.sqrt(2), 4.0
DIVERGED = 1e30  # the value of a run whose loss is no number: Optuna's samplers take only those
MOST_FAILURES = 3  # in a row
FIRST_SECONDS, LEAST_SECONDS, TIMES_SLOWER = 6 * 3600.0, 300.0, 10.0
POLL_SECONDS, HEARTBEAT_SECONDS = 0.5, 60.0
RUNNER = "gradplan.probes.tuning.runner"


Heard = Callable[[Ledger], None]  # told whenever a trial has ended


class Runners:
    """Child processes that run train.py, one for each of ``num_workers`` threads. Used in a ``with``.

    The threads live as long as this: a child ends with the thread that started it.
    """

    def __init__(self, script: Script, folder: str, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers)
        self._new: Callable[[], Child] = lambda: Child(script, folder, worker=RUNNER)
        self._own = threading.local()
        self._children: set[Child] = set()
        self._longest_seconds = 0.0
        self._is_worn = False

    def __enter__(self) -> Runners:
        return self

    def __exit__(self, *_: object) -> None:
        for child in list(self._children):
            self._close(child)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def all_do(self, work: Callable[[], None]) -> None:
        """In every thread, until all have ended."""
        for ended in [self._pool.submit(work) for _ in range(self._num_workers)]:
            ended.result()

    def run(self, run: Run) -> Report:
        """One run, in this thread's process, which is replaced where it failed.

        Where a process that has run others fails, or is killed, the run is tried once more in a new one. A file that
        can be imported only once gets a new process for every run from there on.
        """
        was_used = getattr(self._own, "child", None) is not None
        report = self._run_once(run)
        if report.reason == "killed" or (was_used and report.error is not None):
            again = self._run_once(run)
            self._is_worn |= was_used and report.error is not None and again.error is None
            report = again
        return report

    def _run_once(self, run: Run) -> Report:
        child: Child | None = getattr(self._own, "child", None)
        if child is None:
            child = self._own.child = self._new()
            self._children.add(child)
        start_seconds, longest = time.monotonic(), self._longest_seconds
        report = child.run(run, LEAST_SECONDS + TIMES_SLOWER * longest if longest else FIRST_SECONDS)
        is_sound = report.reason is None and report.error is None
        if is_sound:
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - start_seconds)
        if not is_sound or self._is_worn:
            self._close(child)
            self._own.child = None
        return report

    def _close(self, child: Child) -> None:
        child.close()
        self._children.discard(child)


def search_multiplier(
    ledger: Ledger, runners: Runners, make_run: Callable[[float], Run], num_trials: int, seed: int, heard: Heard
) -> tuple[TuningTrial, ...]:
    """All trials of the study, when ``num_trials`` are done; ``heard`` is told of each.

    Raises:
        UserCodeError: nothing works.
    """
    ledger.plan([{"multiplier": multiplier} for multiplier in FIRST[:num_trials]])

    def take() -> Trial | None:
        return ledger.take(num_trials, seed)

    def run_of(trial: Trial) -> Run:
        low, high = bounds(ledger.done())
        return make_run(trial.suggest_float("multiplier", low, high, log=True))

    def is_over() -> bool:
        return len(ledger.done()) >= num_trials

    _work(ledger, runners, take, run_of, is_over, heard)
    return tuple(map(as_trial, ledger.done()))


def run_pairs(
    ledger: Ledger, runners: Runners, make_run: Callable[[float, int], Run], wanted: list[dict[str, Any]], heard: Heard
) -> tuple[TuningTrial, ...]:
    """The runs of ``wanted``, each with a multiplier and a seed.

    Raises:
        UserCodeError: nothing works.
    """
    ledger.plan(wanted)

    def take() -> Trial | None:
        return ledger.take_planned(wanted)

    def run_of(trial: Trial) -> Run:
        multiplier = trial.suggest_float("multiplier", *EXTREMES, log=True)
        return make_run(multiplier, trial.suggest_int("seed", 0, 2**31 - 1))

    def is_over() -> bool:
        return ledger.are_settled(wanted)

    _work(ledger, runners, take, run_of, is_over, heard)
    return tuple(map(as_trial, ledger.done()))


def _work(
    ledger: Ledger,
    runners: Runners,
    take: Callable[[], Trial | None],
    run_of: Callable[[Trial], Run],
    is_over: Callable[[], bool],
    heard: Heard,
) -> None:
    """Until it is over, by whatever process: as many trials at once here as there are runners."""
    crew = Crew(ledger)

    def work() -> None:
        while not (crew.has_given_up or is_over()):
            ledger.revive()
            trial = take()
            if trial is None:
                time.sleep(POLL_SECONDS)  # the last ones run elsewhere, or wait for a process that may have died
            else:
                with crew.beating_for(trial):
                    report = runners.run(run_of(trial))
                crew.settle(trial, report)
                heard(ledger)

    runners.all_do(work)
    if crew.error is not None:
        raise crew.error


class Crew:
    """What the threads of one process know together."""

    def __init__(self, ledger: Ledger) -> None:
        self.error: UserCodeError | None = None
        self.has_given_up = False
        self._ledger = ledger
        self._num_failures = 0
        self._lock = threading.Lock()

    def settle(self, trial: Trial, report: Report) -> None:
        """Write down how a run ended. A failure is its own alone, unless nothing works, or nothing any more."""
        with self._lock:
            if report.error is None and report.reason is None:
                self._ledger.finish(trial, _value_of(report))
                self._num_failures = 0
                return
            why = report.error or f"the run ended: {report.reason}"
            self._ledger.fail(trial, why)
            self._num_failures += 1
            self.has_given_up = self._num_failures >= MOST_FAILURES
            if self.has_given_up and not self._ledger.done():
                self.error = UserCodeError(f"no run of train.py comes to its end: {why}", report.details)

    @contextlib.contextmanager
    def beating_for(self, trial: Trial) -> Iterator[None]:
        """Meanwhile, others can see that this process is alive."""
        is_over = threading.Event()

        def beat() -> None:
            while not is_over.wait(HEARTBEAT_SECONDS):
                self._ledger.keep_alive(trial)

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def _value_of(report: Report) -> float:
    value = DIVERGED if report.has_diverged or report.value is None else report.value
    return min(value, DIVERGED)


def bounds(done: list[FrozenTrial]) -> tuple[float, float]:
    """Where to look: from a quarter to four times the rate, and further where the best so far is at an edge."""
    low, high = LOWEST, HIGHEST
    tried = [trial for trial in done if trial.value is not None and trial.value < DIVERGED]
    if not tried:
        return (EXTREMES[0], high) if done else (low, high)  # all diverged: the rate is far too high
    best = min(tried, key=lambda trial: trial.value or 0.0).params["multiplier"]
    while best < low * NEAR_EDGE and low > EXTREMES[0]:
        low /= EXTENSION
    while best > high / NEAR_EDGE and high < EXTREMES[1]:
        high *= EXTENSION
    return low, high


def as_trial(trial: FrozenTrial) -> TuningTrial:
    """As the plan keeps it."""
    value = None if trial.value is None or trial.value >= DIVERGED else trial.value
    seconds = trial.duration.total_seconds() if trial.duration else None
    return TuningTrial(
        number=trial.number,
        multiplier=trial.params["multiplier"],
        seed=trial.params.get("seed"),
        value=value,
        seconds=seconds,
    )
