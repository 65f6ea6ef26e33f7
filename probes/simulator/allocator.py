"""Traces of births and deaths, replayed through PyTorch's CUDA caching allocator. Standard library only.

A trace is ``events``, where i >= 0 is the birth of storage i (in the order 0, 1, 2, ...) and ~i its death, and
``sizes``, the bytes of each storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradplan.probes.simulator.allocator_settings import (
    DEFAULT_SETTINGS,
    SEGMENT_GRANULARITY_BYTES,
    AllocatorSettings,
    round_up,
)
from gradplan.probes.simulator.expandable import ExpandableAllocator
from gradplan.probes.simulator.segments import CachingAllocator, OutOfMemory

__all__ = ["OutOfMemory", "Peaks", "fits", "replay", "required_bytes"]

NUM_LIMITS = 16


@dataclass(frozen=True)
class Peaks:
    """The largest bytes in use and the largest bytes taken from the device, over a whole replay."""

    allocated_bytes: int
    reserved_bytes: int


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    limit_bytes: int | None = None,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> Peaks:
    """The peaks of a trace, in bytes, under a limit on the reserved bytes; None is no limit.

    Raises:
        OutOfMemory: the trace does not fit under the limit, or under the memory fraction of the settings.
        ValueError: the settings have a memory fraction, but not the bytes that it is of.
    """
    allocator = (ExpandableAllocator if settings.expandable_segments else CachingAllocator)(limit_bytes, settings)
    allocate, free = allocator.allocate, allocator.free
    handles: list[int] = []
    for event in events:
        if event < 0:
            free(handles[~event])
            continue
        handles.append(allocate(sizes[event]))
    return Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


def fits(
    events: Sequence[int],
    sizes: Sequence[int],
    limit_bytes: int,
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> bool:
    """Whether a trace runs to its end under a limit on the reserved bytes."""
    return _peaks_within(events, sizes, limit_bytes, settings) is not None


def required_bytes(
    events: Sequence[int],
    sizes: Sequence[int],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> int:
    """The smallest limit, a multiple of 2 MiB, under which a trace fits, found by a search.

    At most the peak reserved without a limit; below it as far as giving cached segments back helps. A limit may fit
    where a larger one does not, because blocks fall into other places: so a few limits between the live bytes and
    the peak are tried from below, and the bisection goes on under the first that fits. The limit that is returned
    was replayed and fits, and 2 MiB less does not. Where ``large_segment_size_mb`` is odd, 1 MiB takes the place of 2.

    Raises:
        OutOfMemory: the trace does not fit under the memory fraction of the settings.
    """
    step = math.gcd(SEGMENT_GRANULARITY_BYTES, settings.large_segment_bytes)
    fitting = replay(events, sizes, None, settings).reserved_bytes
    failing = round_up(_peak_live_bytes(events, sizes, settings), step) - step
    stride = max(step, (fitting - failing) // NUM_LIMITS // step * step)
    while failing + stride < fitting:
        peaks = _peaks_within(events, sizes, failing + stride, settings)
        if peaks is not None:
            fitting = peaks.reserved_bytes
            break
        failing += stride
    while fitting - failing > step:
        middle = failing + (fitting - failing) // step // 2 * step
        peaks = _peaks_within(events, sizes, middle, settings)
        if peaks is None:
            failing = middle
        else:
            fitting = peaks.reserved_bytes  # under this limit the very same segments are granted
    return fitting


def _peaks_within(
    events: Sequence[int],
    sizes: Sequence[int],
    limit_bytes: int,
    settings: AllocatorSettings,
) -> Peaks | None:
    try:
        return replay(events, sizes, limit_bytes, settings)
    except OutOfMemory:
        return None


def _peak_live_bytes(events: Sequence[int], sizes: Sequence[int], settings: AllocatorSettings) -> int:
    """The largest sum of live requests, each rounded: no allocator with these blocks needs less."""
    live = peak = 0
    for event in events:
        size = settings.rounded_bytes(sizes[event if event >= 0 else ~event])
        live += size if event >= 0 else -size
        peak = max(peak, live)
    return peak
