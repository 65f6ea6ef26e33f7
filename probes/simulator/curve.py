"""Two small traces give every batch size: the events do not change, each storage's size is affine in it."""

from __future__ import annotations

from dataclasses import dataclass

from gradplan.probes.simulator.allocator import fits
from gradplan.probes.simulator.trace import Trace


@dataclass(frozen=True)
class Curve:
    """A training step at any micro-batch size: storage i takes ``bases[i] + size * slopes[i]`` bytes."""

    events: tuple[int, ...]
    bases: tuple[float, ...]
    slopes: tuple[float, ...]

    @classmethod
    def fit(cls, small: Trace, large: Trace, at: tuple[int, int]) -> Curve | None:
        """Through two traces of micro-batches ``at``; None where their events differ, so that no curve holds."""
        if small.events != large.events:
            return None
        distance = at[1] - at[0]
        slopes = tuple((b - a) / distance for a, b in zip(small.sizes, large.sizes, strict=True))
        bases = tuple(size - slope * at[0] for size, slope in zip(small.sizes, slopes, strict=True))
        return cls(small.events, bases, slopes)

    def at(self, micro_batch_size: int) -> Trace:
        """The predicted trace; no storage shrinks below zero."""
        sizes = (max(0, round(b + micro_batch_size * s)) for b, s in zip(self.bases, self.slopes, strict=True))
        return Trace(self.events, tuple(sizes))

    def fits(self, micro_batch_size: int, limit_bytes: int) -> bool:
        """Does a replay at that size succeed within the limit?"""
        return fits(self.events, self.at(micro_batch_size).sizes, limit_bytes)

    def hint(self, limit_bytes: int, at_most: int) -> int:
        """About the largest size that fits, from live bytes alone: quick, and at most some tenth too large."""
        if self.at(at_most).peak_live_bytes <= limit_bytes:
            return at_most
        low, high = 0, 1
        while high < at_most and self.at(high).peak_live_bytes <= limit_bytes:
            low, high = high, high * 2
        high = min(high, at_most)
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if self.at(middle).peak_live_bytes <= limit_bytes else (low, middle)
        return max(1, low)
