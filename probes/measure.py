"""Evidence from a device of this machine: real training steps in child processes, few of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

from gradplan.probes.errors import DoesNotFitError, UserCodeError
from gradplan.probes.evidence import Backward, BackwardPeak, Evidence, Notice, Precision, Recipe
from gradplan.probes.launch import Launch
from gradplan.probes.measuring.device_memory import INVENTED
from gradplan.probes.measuring.host_memory import IS_LIMIT_ENFORCED, available_bytes
from gradplan.probes.measuring.messages import Hello, Start
from gradplan.probes.measuring.trials import Trials
from gradplan.probes.prediction import Corrected, foresee
from gradplan.probes.search import MOST_SAMPLES, end_notices
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.size_search import SizeSearch
from gradplan.probes.workload import Workload

NOTHING_FITS = "nothing fits: of {memory:.0f} MiB, {holders} take {context}. Take more memory"
ON_THE_CPU = "Python, torch and {model} with its data"
ON_AN_ACCELERATOR = "the driver, and whatever else uses the device,"
NOT_ENFORCED = (
    "this system does not limit a process's memory: trials were watched instead, and an allocation that is far too "
    "large may get through before one is stopped"
)
NO_PEAKS = (
    "this device does not say how much memory was in use: a size fits where it ran under the limit that PyTorch was "
    "given, and one that was moved to the host's memory without an error would not be noticed"
)


class Measurement:
    """One workload on a device of this machine.

    ``device`` is a name of torch's, or ``test:FILE``. ``memory_bytes`` is what the whole training process may have of
    its memory; None means what is free when the trials begin. ``headroom_percent`` of what the context leaves is left
    free: on an accelerator that is the driver's, on the CPU Python, torch and the user's file. ``folder`` is the
    working folder that model.py is read in. ``launch`` is which rank this is: each has an accelerator by its number on
    this machine, or its share of the memory. ``progress`` is told what is being done.
    """

    def __init__(
        self,
        workload: Workload,
        device: str = "cpu",
        precision: Precision = "32-true",
        memory_bytes: int | None = None,
        headroom_percent: float = 5.0,
        world_size: int = 1,
        launch: Launch = Launch(),  # noqa: B008 (it cannot change)
        folder: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._workload = workload
        self._is_host = device == "cpu"
        self._launch = launch
        if not (self._is_host or device.startswith(INVENTED) or launch.local_rank is None):
            device = f"{device.partition(':')[0]}:{launch.local_rank}"
        gc.collect()
        self._start = Start(
            model=workload.typed,
            device=device,
            parent_pid=os.getpid(),
            precision=precision,
            memory_bytes=memory_bytes or (available_bytes() // launch.num_local_ranks if self._is_host else None),
            headroom_percent=headroom_percent,
            world_size=world_size,
            largest_first=self._largest_first(),
        )
        self._folder = folder or os.getcwd()
        self._progress = progress
        self._tracer = Tracer(Setup(workload, precision, (8, 0)), progress, may_be_real=self._is_host)
        self._notices: list[Notice] = []

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
        most_resident_bytes = self._start.memory_bytes if self._is_host else None
        with Trials(self._start, self._folder, not self._is_host, most_resident_bytes, self._launch) as processes:
            return processes.lead(lambda: self._gather(processes, per_rank, at_most or MOST_SAMPLES))

    def _gather(self, processes: Trials, per_rank: int | None, ceiling: int) -> Evidence:
        hello = self._open(processes)
        search = SizeSearch(
            processes=processes,
            unit=self._workload.batch_multiple,
            per_rank=per_rank,
            backward="sequential" if self._workload.yields_losses else "joint",
            limit_bytes=hello.limit_bytes,
            is_host=self._is_host,
            foreseen=self._foreseen(hello, per_rank),
            progress=self._progress,
        )
        best = search.largest(ceiling)
        peaks = compare_forms(search, best) if search.backward == "sequential" and best else ()
        return Evidence(
            kind="measured",
            device=hello.device,
            limit_bytes=search.limit_bytes,
            trials=tuple(search.trials.values()),
            backward=search.backward,
            backward_peaks=peaks,
            has_several_losses=search.has_several_losses,
            notices=(
                *self._notices,
                *search.notices,
                *end_notices(best, self._workload.batch_multiple),
                *processes.notices,
            ),
        )

    def _open(self, processes: Trials) -> Hello:
        """A process on the device, and what it leaves for tensors."""
        self._progress("opening the device")
        hello = processes.hello()
        if hello is None:
            raise self._nothing_fits(self._start.memory_bytes or 0, "more")
        if hello.limit_bytes == 0:
            context = f"{hello.context_bytes / 2**20:.0f} MiB" if self._is_host else "all"
            raise self._nothing_fits(hello.device.total_bytes, context)
        if not hello.has_peaks:
            self._note("peaks-unknown", NO_PEAKS)
        if self._is_host and not IS_LIMIT_ENFORCED:
            self._note("limit-not-enforced", NOT_ENFORCED)
        return hello

    def _foreseen(self, hello: Hello, per_rank: int | None) -> Corrected | None:
        """What a simulation of an accelerator says; the CPU's measurements waver more than it could tell."""
        if self._is_host:
            return None
        num_micro_batches = 1 if per_rank is None else 2
        return foresee(self._start, self._folder, hello, self._tracer, self._workload.batch_multiple, num_micro_batches)

    def _largest_first(self) -> tuple[int, ...] | None:
        has_own_batches = self._workload.dataset is None or "build_batch" in vars(self._workload.module)
        return None if has_own_batches else tuple(self._workload.largest_first)

    def _note(self, code: str, message: str) -> None:
        self._notices.append(Notice(code=code, message=message))

    def _nothing_fits(self, total_bytes: int, context: str) -> DoesNotFitError:
        holders = (ON_THE_CPU if self._is_host else ON_AN_ACCELERATOR).format(model=self._workload.path.name)
        return DoesNotFitError(NOTHING_FITS.format(memory=total_bytes / 2**20, holders=holders, context=context))


def compare_forms(search: SizeSearch, size: int) -> tuple[BackwardPeak, ...]:
    """Both forms at one size; from here on joint, one backward, where that needs no more.

    A trunk that was cut at its output has no joint form: its sum alone would not train the trunk.
    """
    sequential = search.trials[size]
    if search.has_own_backwards:
        return ()
    try:
        report = search.run(size, "joint")
    except UserCodeError:
        return ()
    peak_bytes, least_bytes = report.peak_reserved_bytes, sequential.required_bytes
    if report.num_retries or peak_bytes is None or least_bytes is None or set(report.trained) != set(search.trained):
        return ()
    if peak_bytes <= min(search.limit_bytes, least_bytes):
        search.backward = "joint"
        search.record(size, report)
    forms: tuple[tuple[Backward, int], ...] = (("sequential", least_bytes), ("joint", peak_bytes))
    return tuple(
        BackwardPeak(backward=form, micro_batch_size=size, peak_allocated_bytes=needed, peak_reserved_bytes=needed)
        for form, needed in forms
    )
