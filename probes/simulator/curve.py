"""Two small traces give every batch size: the events do not change, each storage's size is affine in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from gradplan.probes.search import largest
from gradplan.probes.simulator.allocator import fits, replay
from gradplan.probes.simulator.allocator_settings import DEFAULT_SETTINGS, AllocatorSettings
from gradplan.probes.simulator.trace import GRADIENTS, Birth, Trace
from gradplan.probes.simulator.training import NUM_STEPS


@dataclass(frozen=True)
class Curve:
    """A training step at any micro-batch size: storage i takes ``bases[i] + size * slopes[i]`` bytes."""

    events: tuple[int, ...]
    bases: tuple[float, ...]
    slopes: tuple[float, ...]
    births: tuple[Birth, ...] = ()

    @classmethod
    def fit(cls, small: Trace, large: Trace, at: tuple[int, int]) -> Curve | None:
        """Through two traces of micro-batches ``at``; None where their events differ, so that no curve holds."""
        if small.events != large.events:
            return None
        distance = at[1] - at[0]
        slopes = tuple((b - a) / distance for a, b in zip(small.sizes, large.sizes, strict=True))
        bases = tuple(size - slope * at[0] for size, slope in zip(small.sizes, slopes, strict=True))
        return cls(small.events, bases, slopes, large.births)

    def at(self, micro_batch_size: int, growth: float = 1.0) -> Trace:
        """The predicted trace, with slopes ``growth`` times as large; no storage shrinks below zero."""
        samples = micro_batch_size * growth
        sizes = (max(0, round(b + samples * s)) for b, s in zip(self.bases, self.slopes, strict=True))
        return Trace(self.events, tuple(sizes), self.births)

    def largest(
        self, limit_bytes: int, at_most: int, multiple: int = 1, settings: AllocatorSettings = DEFAULT_SETTINGS
    ) -> int:
        """The largest size, a multiple of ``multiple``, whose replay succeeds within the limit; 0 where none does.

        Replays without a limit are kept: they serve every limit.
        """

        def is_fitting(size: int) -> bool:
            if self.peak_live_bytes(size) > limit_bytes:
                return False
            if self._peak_reserved_bytes(size, settings) <= limit_bytes:
                return True
            return fits(self.events, self.at(size).sizes, limit_bytes, settings=settings)

        return largest(is_fitting, at_most=at_most, hint=self.hint(limit_bytes, at_most), multiple=multiple)

    def hint(self, limit_bytes: int, at_most: int) -> int:
        """About the largest size that fits, from live bytes alone: quick, and at most some tenth too large."""
        if self.peak_live_bytes(at_most) <= limit_bytes:
            return at_most
        low, high = 0, 1
        while high < at_most and self.peak_live_bytes(high) <= limit_bytes:
            low, high = high, high * 2
        high = min(high, at_most)
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak_live_bytes(middle) <= limit_bytes else (low, middle)
        return max(1, low)

    @cached_property
    def gradient_bytes(self) -> float:
        """Of all parameters together."""
        births = zip(self.bases, self.births, strict=True) if self.births else ()
        return sum((base for base, birth in births if birth.kind == GRADIENTS), 0.0) / NUM_STEPS

    @cached_property
    def peak_live_bytes(self) -> Callable[[int], float]:
        """Of a size: the largest sum of storages alive at once, before any rounding by an allocator."""
        storages = torch.tensor([max(event, ~event) for event in self.events])
        signs = torch.tensor([1.0 if event >= 0 else -1.0 for event in self.events], dtype=torch.float64)
        bases, slopes = (torch.tensor(numbers, dtype=torch.float64) for numbers in (self.bases, self.slopes))
        bases, slopes = bases[storages], slopes[storages]

        def peak(size: int) -> float:
            live: Tensor = ((bases + size * slopes).round().clamp(min=0) * signs).cumsum(0)
            return max(0.0, float(live.max()))

        return cache(peak)

    @cached_property
    def _peak_reserved_bytes(self) -> Callable[[int, AllocatorSettings], int]:
        return cache(lambda size, settings: replay(self.events, self.at(size).sizes, settings=settings).reserved_bytes)
