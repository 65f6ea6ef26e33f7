"""Several losses, summed for one backward or with one after each: which form needs less, and by how much."""

from __future__ import annotations

from contextlib import suppress

from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Backward, BackwardPeak, Notice
from gradplan.probes.simulator import allocator, losses
from gradplan.probes.simulator.curve import Curve
from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.tracer import Tracer

NOT_EXACT = (
    "running backward after each loss gives other gradients than running it on their sum, so the losses are summed: "
    "does a loss depend on .grad, or on what an earlier backward changed?"
)


class Forms:
    """Both forms of one workload, from two small traces of each; ``small`` is the first, loss by loss.

    A trunk that was cut at its output has no joint form: the sum alone would not train the trunk, or not by all.
    """

    def __init__(self, tracer: Tracer, unit: int, num_micro_batches: int, small: Trace) -> None:
        self._sizes = (2 * unit, 3 * unit)
        self.notices: list[Notice] = []
        self.traces: dict[Backward, tuple[Trace, Trace]] = {}
        workload = tracer.setup.workload
        self.traces["sequential"] = (small, tracer.trace(self._sizes[1], num_micro_batches, "sequential"))
        if small.own_backwards:
            return
        with suppress(UserCodeError):
            joint, larger = (tracer.trace(size, num_micro_batches, "joint") for size in self._sizes)
            self.traces["joint"] = (joint, larger)
        if "joint" not in self.traces or not self._train_the_same():
            self.traces.pop("joint", None)
        elif self._is_small() and not losses.is_exact_loss_by_loss(workload, unit):
            self.notices.append(Notice(code="sequential-not-exact", message=NOT_EXACT))
            del self.traces["sequential"]

    def _train_the_same(self) -> bool:
        return self.traces["joint"][0].trained == self.traces["sequential"][0].trained

    def _is_small(self) -> bool:
        return self.traces["joint"][0].peak_live_bytes <= losses.VALUE_CHECK_BYTES

    def best(self, limit_bytes: int, at_most: int) -> Backward:
        """The form that needs less at about the largest size that fits; joint, one backward, where neither does."""
        if len(self.traces) == 1:
            return next(iter(self.traces))
        curve = self._curve("sequential")
        size = self._sizes[1] if curve is None else curve.hint(limit_bytes, at_most)
        needs = {peak.backward: peak.peak_reserved_bytes for peak in self.peaks(size)}
        return "sequential" if needs["sequential"] < needs["joint"] else "joint"

    def peaks(self, size: int) -> tuple[BackwardPeak, ...]:
        """Both forms side by side: at ``size``, or at the largest that was traced where no curve leads there."""
        if len(self.traces) == 1:
            return ()
        if any(self._curve(backward) is None for backward in self.traces):
            size = self._sizes[1]
        found = []
        for backward in self.traces:
            trace = self._at(backward, size)
            peak = allocator.replay(trace.events, trace.sizes)
            found.append(
                BackwardPeak(
                    backward=backward,
                    micro_batch_size=size,
                    peak_allocated_bytes=peak.allocated_bytes,
                    peak_reserved_bytes=peak.reserved_bytes,
                )
            )
        return tuple(found)

    def _curve(self, backward: Backward) -> Curve | None:
        small, large = self.traces[backward]
        return Curve.fit(small, large, self._sizes)

    def _at(self, backward: Backward, size: int) -> Trace:
        curve = self._curve(backward)
        return self.traces[backward][1] if curve is None else curve.at(size)
