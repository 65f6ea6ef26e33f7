"""PyTorch's CUDA caching allocator, replayed over the births and deaths of storages. Standard library only.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, for one stream: no
expandable segments, no ``max_split_size``, no rounding to powers of two, no garbage collection threshold.

- Every request is rounded up to 512 bytes.
- Up to 1 MiB it is served from the small pool, in segments of 2 MiB; above, from the large pool, in segments
  of 20 MiB below 10 MiB and of the request rounded up to 2 MiB from there.
- Best fit: the smallest free block of the pool that is large enough, then the lowest address. It is split
  where the rest is at least 512 bytes (small pool) or more than 1 MiB (large pool); a block that is not split
  counts whole as allocated.
- A freed block merges at once with the free neighbours of its segment.
- Where nothing fits: a new segment; where that would pass the limit, every wholly free segment is given back
  first; where that is not enough, out of memory.

A trace is ``events``, where i >= 0 is the birth of storage i (in the order 0, 1, 2, ...) and ~i its death,
and ``sizes``, the bytes of each storage.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIB = 2**20
MIN_BLOCK_BYTES = 512
MAX_SMALL_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_GRANULARITY_BYTES = 2 * MIB

EMPTY_HANDLE = 0


class OutOfMemory(Exception):  # noqa: N818 - the name of the event that is simulated, which is no mistake
    """A request of ``requested_bytes`` found no room under the limit."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(f"out of memory: no room for {requested_bytes} bytes")
        self.requested_bytes = requested_bytes


@dataclass(frozen=True)
class Peaks:
    """The largest bytes in use and the largest bytes taken from the device, over a whole replay."""

    allocated_bytes: int
    reserved_bytes: int


class Block(NamedTuple):
    """A stretch of a segment: in use or free as a whole."""

    address: int
    size_bytes: int
    is_free: bool


class CachingAllocator:
    """The allocator's state under a limit in bytes on what it reserves; None is no limit.

    All sizes are bytes. Addresses are invented: each segment lies above all earlier ones, apart from them.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self._next_address = SEGMENT_GRANULARITY_BYTES
        self._segment_bytes: dict[int, int] = {}  # by address, as all dicts here
        self._live_bytes: dict[int, int] = {}
        self._free_bytes_from: dict[int, int] = {}
        self._free_bytes_before: dict[int, int] = {}
        self._small_pool: list[tuple[int, int]] = []  # free blocks as (bytes, address), in order
        self._large_pool: list[tuple[int, int]] = []
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    def allocate(self, num_bytes: int) -> int:
        """The address of a block of at least ``num_bytes``; for 0 bytes a handle that takes no memory.

        Raises:
            OutOfMemory: no room under the limit, even with every wholly free segment given back.
            ValueError: ``num_bytes`` is negative.
        """
        if num_bytes <= 0:
            if num_bytes < 0:
                raise ValueError(f"cannot allocate {num_bytes} bytes")
            return EMPTY_HANDLE
        size = (num_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        is_small = size <= MAX_SMALL_BYTES
        pool = self._small_pool if is_small else self._large_pool
        index = bisect_left(pool, (size, 0))
        if index < len(pool):
            block_bytes, address = pool.pop(index)
            del self._free_bytes_from[address]
        else:
            address, block_bytes = self._new_segment(size, num_bytes)
        rest = block_bytes - size
        if rest > MAX_SMALL_BYTES or (is_small and rest):
            insort(pool, (rest, address + size))
            self._free_bytes_from[address + size] = rest
            self._free_bytes_before[address + block_bytes] = rest
        else:
            self._free_bytes_before.pop(address + block_bytes, None)
            size = block_bytes
        self._live_bytes[address] = size
        self.allocated_bytes += size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return address

    def free(self, handle: int) -> None:
        """Give a block back to its pool.

        Raises:
            KeyError: ``handle`` is not in use.
        """
        if handle == EMPTY_HANDLE:
            return
        size = self._live_bytes.pop(handle)
        self.allocated_bytes -= size
        # The size tells the pool: a small block in use has at most 1 MiB, since any rest of it is split off.
        pool = self._small_pool if size <= MAX_SMALL_BYTES else self._large_pool
        address, end = handle, handle + size
        after = self._free_bytes_from.pop(end, 0)
        if after:
            del pool[bisect_left(pool, (after, end))]
            end += after
        before = self._free_bytes_before.pop(address, 0)
        if before:
            address -= before
            del pool[bisect_left(pool, (before, address))]
        size = end - address
        insort(pool, (size, address))
        self._free_bytes_from[address] = size
        self._free_bytes_before[end] = size

    def snapshot(self) -> list[list[Block]]:
        """The blocks of each segment by address, the oldest segment first."""
        return [self._blocks_of(start, start + size) for start, size in self._segment_bytes.items()]

    def _blocks_of(self, address: int, end: int) -> list[Block]:
        blocks = []
        while address < end:
            is_free = address in self._free_bytes_from
            size = self._free_bytes_from[address] if is_free else self._live_bytes[address]
            blocks.append(Block(address, size, is_free))
            address += size
        return blocks

    def _new_segment(self, size: int, num_bytes: int) -> tuple[int, int]:
        """(address, bytes) of a fresh segment for a rounded request of ``size``."""
        segment_bytes = segment_bytes_for(size)
        if self.reserved_bytes + segment_bytes > self._limit_bytes:
            self._release_cached_segments()
            if self.reserved_bytes + segment_bytes > self._limit_bytes:
                raise OutOfMemory(num_bytes)
        address = self._next_address
        self._next_address += segment_bytes + SEGMENT_GRANULARITY_BYTES  # the gap keeps segments from merging
        self._segment_bytes[address] = segment_bytes
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return address, segment_bytes

    def _release_cached_segments(self) -> None:
        for pool in (self._small_pool, self._large_pool):
            kept = []
            for size, address in pool:
                if self._segment_bytes.get(address) != size:
                    kept.append((size, address))
                    continue
                del self._segment_bytes[address], self._free_bytes_from[address]
                del self._free_bytes_before[address + size]
                self.reserved_bytes -= size
            pool[:] = kept


def segment_bytes_for(size: int) -> int:
    """Bytes of a new segment for a request of ``size`` bytes, already rounded to blocks."""
    if size <= MAX_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size, SEGMENT_GRANULARITY_BYTES)


def round_up(num_bytes: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``num_bytes``."""
    return -(-num_bytes // multiple) * multiple


def replay(events: Sequence[int], sizes: Sequence[int], limit_bytes: int | None = None) -> Peaks:
    """The peaks of a trace, in bytes, under a limit on the reserved bytes; None is no limit.

    Raises:
        OutOfMemory: the trace does not fit under the limit.
    """
    allocator = CachingAllocator(limit_bytes)
    allocate, free = allocator.allocate, allocator.free
    handles: list[int] = []
    for event in events:
        if event >= 0:
            handles.append(allocate(sizes[event]))
        else:
            free(handles[~event])
    return Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


def fits(events: Sequence[int], sizes: Sequence[int], limit_bytes: int) -> bool:
    """Whether a trace runs to its end under a limit on the reserved bytes."""
    return _peaks_within(events, sizes, limit_bytes) is not None


def required_bytes(events: Sequence[int], sizes: Sequence[int]) -> int:
    """The smallest limit, a multiple of 2 MiB, under which a trace fits, found by bisection.

    At most the peak reserved without a limit; below it as far as giving cached segments back helps. The limit
    that is returned was replayed and fits, and 2 MiB less does not. In rare traces a still smaller limit fits
    again, because blocks fall into other places.
    """
    fitting = replay(events, sizes).reserved_bytes
    failing = round_up(_peak_live_bytes(events, sizes), SEGMENT_GRANULARITY_BYTES) - SEGMENT_GRANULARITY_BYTES
    while fitting - failing > SEGMENT_GRANULARITY_BYTES:
        middle = failing + (fitting - failing) // SEGMENT_GRANULARITY_BYTES // 2 * SEGMENT_GRANULARITY_BYTES
        peaks = _peaks_within(events, sizes, middle)
        if peaks is None:
            failing = middle
        else:
            fitting = peaks.reserved_bytes  # under this limit the very same segments are granted
    return fitting


def _peaks_within(events: Sequence[int], sizes: Sequence[int], limit_bytes: int) -> Peaks | None:
    try:
        return replay(events, sizes, limit_bytes)
    except OutOfMemory:
        return None


def _peak_live_bytes(events: Sequence[int], sizes: Sequence[int]) -> int:
    """The largest sum of live requests, each rounded: no allocator with these blocks needs less."""
    live = peak = 0
    for event in events:
        size = round_up(sizes[event if event >= 0 else ~event], MIN_BLOCK_BYTES)
        live += size if event >= 0 else -size
        peak = max(peak, live)
    return peak
