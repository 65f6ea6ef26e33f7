"""Evidence from a GPU that is not here: a few traces, replayed at every size that the search asks for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from functools import cached_property

import psutil
import torch

from gradplan.probes.errors import DoesNotFitError, UserCodeError
from gradplan.probes.evidence import Anatomy, Capacity, Device, Evidence, Lever, Notice, Precision, Recipe, Trial
from gradplan.probes.search import MOST_SAMPLES, end_notices, largest
from gradplan.probes.simulator import allocator
from gradplan.probes.simulator.allocator_settings import DEFAULT_SETTINGS, AllocatorSettings
from gradplan.probes.simulator.anatomy import anatomy
from gradplan.probes.simulator.catalogue import Gpu
from gradplan.probes.simulator.curve import Curve
from gradplan.probes.simulator.forms import Forms
from gradplan.probes.simulator.levers import Levers
from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.workload import Workload

CURVE_TOLERANCE = 1.001
CERTAINTY = 1.1


class Simulation:
    """One workload on one simulated GPU.

    ``memory_bytes`` is used instead of the GPU's own total, the CUDA context being part of it;
    ``headroom_percent`` of what remains is left free. ``progress`` is told what is being done; ``settings`` are those
    of PyTorch's allocator.
    """

    def __init__(
        self,
        workload: Workload,
        gpu: Gpu,
        precision: Precision = "32-true",
        memory_bytes: int | None = None,
        headroom_percent: float = 5.0,
        progress: Callable[[str], None] = lambda _: None,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
    ) -> None:
        self.gpu = gpu
        self.total_bytes = memory_bytes or gpu.total_bytes
        self.headroom_percent = headroom_percent
        self._fraction = settings.per_process_memory_fraction
        self.limit_bytes = self._limit_of(gpu, self.total_bytes)
        if self.limit_bytes <= 0:
            raise DoesNotFitError(
                f"nothing fits: of {self.total_bytes / 2**20:.0f} MiB, the CUDA context is counted as "
                f"{gpu.context_bytes / 2**20:.0f} MiB. Take more memory, or another device"
            )
        self._workload = workload
        self._unit = workload.batch_multiple
        self._settings = dataclasses.replace(settings, per_process_memory_fraction=1.0)  # the limit has it
        self._tracer = Tracer(Setup(workload, precision, gpu.compute_capability or (8, 0)), progress)
        self._notices: list[Notice] = []
        self._trials: dict[tuple[int, int], Trial] = {}
        self._traces: dict[tuple[int, int], Trace] = {}
        self._curve_found: Curve | None = None
        if precision.startswith("bf16") and gpu.compute_capability is not None and gpu.compute_capability < (8, 0):
            self._note("slow-bf16", f"{gpu.name} has no bf16 arithmetic of its own: 16-mixed is the precision for it")

    def recipe(self) -> Recipe:
        """What the planner reads of model.py.

        Raises:
            UserCodeError: a builder failed or returned the wrong kind of thing.
        """
        return self._tracer.recipe()

    def gather(
        self, per_rank: int | None, at_most: int | None, others: tuple[Gpu, ...] = (), with_levers: bool = False
    ) -> Evidence:
        """The trials that find the largest micro-batch, the last of them traced at that size.

        ``per_rank`` is the whole batch of one optimizer step on one rank, tried first where ``at_most`` allows it;
        None where the window is one micro-batch, as large as fits. ``others`` are told what they could hold.
        ``with_levers`` asks what changes would do; it is always asked where nothing fits.

        Raises:
            UserCodeError: the user's step failed; the message names their line.
        """
        num_micro_batches = 1 if per_rank is None else 2
        small = self._tracer.trace(2 * self._unit, num_micro_batches)
        self._tracer.check_values(self._unit, small)
        self._notices += self._workload.batch_size_notices(2 * self._unit)
        ceiling = at_most or MOST_SAMPLES
        forms = self._choose_backward(small, num_micro_batches, ceiling)
        large: Trace | None = None
        if forms is not None and self._tracer.backward is not None:
            small, large = forms.traces[self._tracer.backward]
        whole_size = per_rank if per_rank == at_most else None
        try:
            curve = self._curve(small, large, num_micro_batches)
        except UserCodeError:  # some models take no other size than that of their first batch
            curve = None
            whole = None if whole_size is None else self._try_whole(whole_size, None)
            if whole is None or not whole.fits:
                raise
        else:
            whole = None if whole_size is None else self._try_whole(whole_size, curve)
        if whole is None or not whole.fits:
            below = max(self._unit, ceiling - self._unit) if whole else ceiling
            self._search(curve, num_micro_batches, below)
        self._curve_found = curve
        fits_any = any(trial.fits for trial in self._trials.values())
        return Evidence(
            kind="simulated",
            device=Device(name=self.gpu.name, total_bytes=self.total_bytes, slug=self.gpu.slug),
            limit_bytes=self.limit_bytes,
            trials=tuple(self._trials.values()),
            others=tuple(self._capacity(gpu, curve, whole, ceiling) for gpu in others) if curve else (),
            backward=self._tracer.backward or "joint",
            has_several_losses=self._workload.yields_losses,
            backward_peaks=() if forms is None else forms.peaks(self._largest_fitting(2 * self._unit)),
            anatomy=self._anatomy(),
            levers=self._levers(curve, num_micro_batches) if curve and (with_levers or not fits_any) else (),
            notices=(*self._tracer.notices, *self._notices),
        )

    def at_size(self, evidence: Evidence, size: int, num_micro_batches: int) -> Evidence:
        """The same evidence, with what the planned micro-batch needs and what is in memory then."""
        key = (size, min(2, num_micro_batches))
        if key not in self._trials and self._curve_found is not None:
            self._record(*key, self._curve_found.at(size), is_traced=False)
        if key not in self._trials or not self._trials[key].fits:
            return evidence
        trial, trace = self._trials[key], self._traces[key]
        if trial.required_bytes is None and trace.births:
            self._trials[key] = trial.model_copy(update={"required_bytes": self._required(trace)})
        changes: dict[str, object] = {"trials": tuple(self._trials.values())}
        if trace.births:
            changes["anatomy"] = anatomy(trace, size, self._settings)
        return evidence.model_copy(update=changes)

    def _levers(self, curve: Curve, num_micro_batches: int) -> tuple[Lever, ...]:
        if self._tracer.is_real:
            return ()
        levers = Levers(self._tracer, curve, self.limit_bytes, num_micro_batches, self._settings)
        return tuple(levers.all(self._largest_fitting(self._unit)))

    def _anatomy(self) -> Anatomy | None:
        """Of the largest size that fits, else of the smallest."""
        fitting = [key for key, trial in self._trials.items() if trial.fits]
        key = max(fitting) if fitting else min(self._traces, default=None)
        trace = self._traces.get(key) if key else None
        return anatomy(trace, key[0], self._settings) if key and trace and trace.births else None

    def _choose_backward(self, small: Trace, num_micro_batches: int, at_most: int) -> Forms | None:
        """For several losses: from here on, every trace is of the form that needs less."""
        if not self._workload.yields_losses:
            return None
        forms = Forms(self._tracer, self._unit, num_micro_batches, small)
        self._notices += forms.notices
        self._tracer.backward = forms.best(self.limit_bytes, at_most)
        return forms

    def _largest_fitting(self, otherwise: int) -> int:
        return max((trial.micro_batch_size for trial in self._trials.values() if trial.fits), default=otherwise)

    def _try_whole(self, per_rank: int, curve: Curve | None) -> Trial | None:
        """A trial of the whole batch at once; None where it cannot be traced, or is certain not to fit."""
        too_much = min(self.limit_bytes, psutil.virtual_memory().available // 2)
        if self._tracer.is_real or self._bytes_per_sample * per_rank > too_much:
            return None
        if curve is not None:  # its second micro-batch meets the gradients of the first, and some more
            needed_bytes = curve.peak_live_bytes(per_rank) - 2 * curve.gradient_bytes
            if needed_bytes > self.limit_bytes * CERTAINTY:
                return None
        return self._try(per_rank, 1)

    @cached_property
    def _bytes_per_sample(self) -> int:
        return _tensor_bytes(self._workload.make_batch(2 * self._unit)) // (2 * self._unit)

    def _curve(self, small: Trace, large: Trace | None, num_micro_batches: int) -> Curve | None:
        sizes = (2 * self._unit, 3 * self._unit)
        curve = Curve.fit(small, large or self._tracer.trace(sizes[1], num_micro_batches), sizes)
        return self._straight_line(num_micro_batches) if curve is None and self._tracer.is_real else curve

    def _search(self, curve: Curve | None, num_micro_batches: int, at_most: int) -> None:
        if curve is None:
            self._note("events-differ", "the step's operations change with the batch: every size was traced")
            self._search_traced(num_micro_batches, at_most, None)
            return

        def replayed(size: int) -> bool:
            return self._record(size, num_micro_batches, curve.at(size), is_traced=False).fits

        hint = curve.hint(self.limit_bytes, at_most)
        best = largest(replayed, at_most=at_most, hint=hint, multiple=self._unit)
        self._notices += end_notices(best)
        if self._tracer.is_real:
            return
        if self._bytes_per_sample * best > psutil.virtual_memory().available // 2:
            self._note("not-confirmed", f"a batch of {best} is too large for this machine's memory to be traced itself")
        elif best:
            self._confirm(best, curve, num_micro_batches, at_most)
        else:  # some models refuse the smallest size: BatchNorm has no variance over one sample
            with contextlib.suppress(UserCodeError):
                self._confirm(self._unit, curve, num_micro_batches, at_most)

    def _confirm(self, best: int, curve: Curve, num_micro_batches: int, at_most: int) -> None:
        """Trace the answer itself, or the smallest size; where the curve was wrong, trust traces alone."""
        actual, predicted = self._tracer.trace(best, num_micro_batches), curve.at(best)
        replayed = self._trials.pop((best, num_micro_batches))
        confirmed = self._record(best, num_micro_batches, actual, is_traced=True)
        if confirmed.fits == replayed.fits and actual.peak_live_bytes <= predicted.peak_live_bytes * CURVE_TOLERANCE:
            return
        self._note("curve-missed", "memory does not grow evenly with the batch: sizes were traced one by one")
        self._trials = {key: trial for key, trial in self._trials.items() if trial.source == "traced"}
        self._search_traced(num_micro_batches, at_most, best)

    def _search_traced(self, num_micro_batches: int, at_most: int, hint: int | None) -> None:
        def fits(size: int) -> bool:
            return self._try(size, num_micro_batches).fits

        largest(fits, at_most=at_most, hint=hint, multiple=self._unit)

    def _straight_line(self, num_micro_batches: int) -> Curve:
        """For real steps whose operations depend on values: a line through two requirements."""
        small, large = 4 * self._unit, 8 * self._unit
        low, high = (self._required(self._tracer.trace(size, num_micro_batches)) for size in (small, large))
        self._note(
            "straight-line",
            f"the step's operations depend on values: memory beyond {large} samples is a straight line through "
            f"{small} and {large}, so leave more headroom",
        )
        slope = max(0.0, (high - low) / (large - small))
        return Curve((0, ~0), (low - slope * small,), (slope,))

    def _try(self, size: int, num_micro_batches: int) -> Trial:
        known = self._trials.get((size, num_micro_batches))
        if known is not None:
            return known
        return self._record(size, num_micro_batches, self._tracer.trace(size, num_micro_batches), is_traced=True)

    def _record(self, size: int, num_micro_batches: int, trace: Trace, is_traced: bool) -> Trial:
        settings = self._settings
        peaks = allocator.replay(trace.events, trace.sizes, settings=settings)
        trial = Trial(
            micro_batch_size=size,
            num_micro_batches=num_micro_batches,
            fits=peaks.reserved_bytes <= self.limit_bytes
            or allocator.fits(trace.events, trace.sizes, self.limit_bytes, settings=settings),
            source="traced" if is_traced else "replayed",
            peak_allocated_bytes=peaks.allocated_bytes,
            peak_reserved_bytes=peaks.reserved_bytes,
            required_bytes=self._required(trace) if is_traced else None,
        )
        self._trials[size, num_micro_batches] = trial
        self._traces[size, num_micro_batches] = trace
        return trial

    def _required(self, trace: Trace) -> int:
        return allocator.required_bytes(trace.events, trace.sizes, settings=self._settings)

    def _limit_of(self, gpu: Gpu, total_bytes: int) -> int:
        return min(limit_of(gpu, total_bytes, self.headroom_percent), int(total_bytes * self._fraction))

    def _note(self, code: str, message: str) -> None:
        self._notices.append(Notice(code=code, message=message))

    def _capacity(self, gpu: Gpu, curve: Curve, whole: Trial | None, at_most: int) -> Capacity:
        limit = self._limit_of(gpu, gpu.total_bytes)
        if whole is not None and whole.required_bytes is not None and whole.required_bytes <= limit:
            size = at_most
        else:
            size = curve.largest(limit, at_most, self._unit, self._settings)
        device = Device(name=gpu.name, total_bytes=gpu.total_bytes, slug=gpu.slug)
        return Capacity(device=device, max_micro_batch_size=size)


def limit_of(gpu: Gpu, total_bytes: int, headroom_percent: float) -> int:
    """What the allocator may take: (memory - context) x (1 - headroom)."""
    return math.floor(max(0, total_bytes - gpu.context_bytes) * (1 - headroom_percent / 100))


def _tensor_bytes(batch: object) -> int:
    leaves = torch.utils._pytree.tree_leaves(batch)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
