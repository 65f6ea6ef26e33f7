"""What a size needs, from what was measured: the simulator's curve corrected, or a straight line without one."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from functools import cache, partial

from gradplan.probes.errors import UserCodeError
from gradplan.probes.measuring.device_memory import INVENTED
from gradplan.probes.measuring.invented import read_device
from gradplan.probes.measuring.messages import Hello, Start
from gradplan.probes.search import largest
from gradplan.probes.simulator import allocator
from gradplan.probes.simulator.allocator_settings import AllocatorSettings, settings_of_environment
from gradplan.probes.simulator.curve import Curve
from gradplan.probes.simulator.tracer import Tracer

MOST_GROWTH = 32  # a line through two sizes is not followed further than this many times the larger
ROUNDING = 1 + 1e-9  # a size that takes the limit to the byte fits
APART = 0.9  # two sizes that are nearer say little about what a sample needs
GROWTHS = (1e-4, 1e4)
HALVINGS = 28  # of its logarithm: a ten-millionth is left


class Line:
    """Through the two largest sizes that were measured; half-way to the smallest that failed where it leads beyond."""

    def __init__(self) -> None:
        self._measured: dict[int, int] = {}
        self._failed = math.inf

    def learn(self, size: int, num_bytes: int) -> None:
        """That a trial of this size was seen to need so much."""
        self._measured[size] = num_bytes

    def learn_failure(self, size: int) -> None:
        """That this size did not fit, and nobody could say what it needs."""
        self._failed = min(size, self._failed)

    @property
    def bytes_per_sample(self) -> float:
        (low, low_bytes), (high, high_bytes) = self._two_largest()
        return max(0, high_bytes - low_bytes) / max(1, high - low)

    def largest(self, limit_bytes: int, at_most: int, multiple: int) -> int | None:
        """The largest size that should fit, a multiple of ``multiple`` and at least that; None where nobody knows."""
        if not self._measured:
            return None
        high, high_bytes = self._two_largest()[1]
        most = min(at_most, MOST_GROWTH * high)
        slope = self.bytes_per_sample
        meets = min(most, high + (limit_bytes - high_bytes) / slope) if slope else most
        if meets >= self._failed:
            meets = (self._failed + max((known for known in self._measured if known < self._failed), default=0)) / 2
        return max(1, math.floor(meets / multiple)) * multiple

    def _two_largest(self) -> list[tuple[int, int]]:
        """The same twice where there is one."""
        ran = sorted(self._measured.items())
        return [ran[0], *ran][-2:]


class Corrected:
    """``needed(size, growth)`` bytes, with every allocation that grows with the batch ``growth`` times as large.

    ``gradient_bytes`` are those of earlier micro-batches, which a window of one does not need. Measured peaks correct
    it allocation by allocation, so that it still is a floor and a slope: two of them give the growth and a constant,
    one of them the constant alone.
    """

    def __init__(self, needed: Callable[[int, float], float], gradient_bytes: float = 0.0) -> None:
        self._needed = cache(needed)
        self._gradient_bytes = gradient_bytes
        self._measured: dict[int, int] = {}
        self._growth = 1.0
        self._constant_bytes = 0.0

    def learn(self, size: int, num_bytes: int) -> None:
        """As ``Line.learn``."""
        self._measured[size] = num_bytes
        high = max(self._measured)
        low = max((known for known in self._measured if known <= APART * high), default=None)
        if low is not None:
            self._growth = self._growth_between(low, high)
        self._constant_bytes = self._measured[high] - self._needed(high, self._growth)

    def learn_failure(self, size: int) -> None:
        """Nothing: it says on which side of the limit the size is, which the search knows."""

    def bytes_at(self, size: int) -> float:
        """Corrected by what was measured until now."""
        return self._needed(size, self._growth) + self._constant_bytes

    def bytes_alone_at(self, size: int) -> float:
        """Of a window of one micro-batch."""
        return self.bytes_at(size) - self._gradient_bytes

    def uncorrected_bytes_at(self, size: int) -> float:
        """As before anything was measured."""
        return self._needed(size, 1.0)

    def largest(self, limit_bytes: int, at_most: int, multiple: int) -> int | None:
        """As ``Line.largest``."""
        most_bytes = limit_bytes * ROUNDING
        return largest(lambda size: self.bytes_at(size) <= most_bytes, at_most=at_most, multiple=multiple) or multiple

    def _growth_between(self, low: int, high: int) -> float:
        """That which the two measurements differ by; as it was where no growth explains them."""
        wanted = self._measured[high] - self._measured[low]

        def excess(growth: float) -> float:
            return self._needed(high, growth) - self._needed(low, growth) - wanted

        below, above = GROWTHS
        if not excess(below) < 0 < excess(above):
            return self._growth
        for _ in range(HALVINGS):
            middle = math.sqrt(below * above)
            below, above = (middle, above) if excess(middle) < 0 else (below, middle)
        return math.sqrt(below * above)


def foresee(
    start: Start, folder: str, hello: Hello, tracer: Tracer, unit: int, num_micro_batches: int
) -> Corrected | None:
    """What a simulation of this device says of every size; None where the step cannot be traced without being run.

    An invented device has a prediction of its own, or none.
    """
    if start.device.startswith(INVENTED):
        invented = read_device(os.path.join(folder, start.device.removeprefix(INVENTED)))
        if invented.hint is None:
            return None
        return Corrected(
            lambda size, growth: invented.predicted_bytes(size, growth, hello.limit_bytes), invented.gradient_bytes
        )
    if hello.capability is not None:
        tracer.setup = dataclasses.replace(tracer.setup, capability=hello.capability)
    sizes = (2 * unit, 3 * unit)
    try:
        small, large = (tracer.trace(size, num_micro_batches) for size in sizes)
    except UserCodeError:  # the device will say whether it is wrong
        return None
    curve = Curve.fit(small, large, sizes)
    settings, _ = settings_of_environment(hello.device.total_bytes)
    return None if curve is None else Corrected(partial(_reserved_bytes, curve, settings), curve.gradient_bytes)


def _reserved_bytes(curve: Curve, settings: AllocatorSettings, size: int, growth: float) -> int:
    trace = curve.at(size, growth)
    return allocator.replay(trace.events, trace.sizes, settings=settings).reserved_bytes
