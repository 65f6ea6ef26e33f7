"""PyTorch's CUDA caching allocator with its usual segments, one allocation of the device each. Standard library only.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.13) for one stream.

- Every request is rounded up to 512 bytes, or as ``roundup_power2_divisions`` says.
- Up to 1 MiB it is served from the small pool, in segments of 2 MiB; above, from the large pool, in segments
  of 20 MiB below 10 MiB and of the request rounded up to 2 MiB from there.
- Best fit: the smallest free block of the pool that is large enough, then the lowest address. It is split
  where the rest is at least 512 bytes (small pool) or more than 1 MiB (large pool); a block that is not split
  counts whole as allocated. With ``max_split_size``, requests from that size on are not split and take no
  block that is 20 MiB larger or more, and smaller requests take no block from that size on.
- A freed block merges at once with the free neighbours of its segment.
- Where nothing fits: a new segment; where that would pass the limit, every wholly free segment is given back
  first; where that is not enough, out of memory. With ``max_split_size``, before every segment is given back,
  the smallest free block of at least that size and the request's is, or the largest such blocks.
- With ``garbage_collection_threshold``, before a new segment, while more than that share of what the memory
  fraction allows is reserved: of the free segments of the large pool, those go back that have been free for at
  least the average number of large requests.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from typing import NamedTuple

from gradplan.probes.simulator.allocator_settings import (
    DEFAULT_SETTINGS,
    MAX_SMALL_BYTES,
    MIN_BLOCK_BYTES,
    SEGMENT_GRANULARITY_BYTES,
    AllocatorSettings,
)

EMPTY_HANDLE = 0

Pool = list[tuple[int, int]]  # free blocks as (bytes, address), in order


class OutOfMemory(Exception):  # noqa: N818 - the name of the event that is simulated, which is no mistake
    """A request of ``requested_bytes`` found no room under the limit."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(f"out of memory: no room for {requested_bytes} bytes")
        self.requested_bytes = requested_bytes


class Block(NamedTuple):
    """A stretch of a segment: in use or free as a whole."""

    address: int
    size_bytes: int
    is_free: bool


class CachingAllocator:
    """The allocator's state under a limit in bytes on what it reserves; None is no limit.

    All sizes are bytes. Addresses are invented: each segment lies above all earlier ones, apart from them.

    Raises:
        ValueError: the settings have a memory fraction, but not the bytes that it is of.
    """

    def __init__(self, limit_bytes: int | None = None, settings: AllocatorSettings = DEFAULT_SETTINGS) -> None:
        self._settings = settings
        self._rounds = max(settings.roundup_power2_divisions) > 1
        self._allowed_bytes = sys.maxsize if settings.allowed_bytes is None else settings.allowed_bytes
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self._max_split_bytes = settings.max_split_bytes or sys.maxsize
        self._unsplit_from_bytes = self._max_split_bytes
        self._most_rest_bytes = MAX_SMALL_BYTES
        self._collects = settings.garbage_collection_threshold > 0 and settings.allowed_bytes is not None
        self._has_choice = self._collects or settings.max_split_bytes is not None
        self._next_address = SEGMENT_GRANULARITY_BYTES
        self._segment_bytes: dict[int, int] = {}  # by address, as all dicts here
        self._live_bytes: dict[int, int] = {}
        self._free_bytes_from: dict[int, int] = {}
        self._free_bytes_before: dict[int, int] = {}
        self._freed_at: dict[int, int] = {}  # counted in large requests
        self._num_large_requests = 0
        self._small_pool: Pool = []
        self._large_pool: Pool = []
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
        if self._rounds:
            size = self._settings.rounded_bytes(num_bytes)
        else:
            size = (num_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        is_small = size <= MAX_SMALL_BYTES
        pool = self._small_pool if is_small else self._large_pool
        index = bisect_left(pool, (size, 0))
        if self._has_choice:
            index = self._choose(pool, index, size)
        if index < len(pool):
            block_bytes, address = pool.pop(index)
            del self._free_bytes_from[address]
        else:
            address, block_bytes = self._new_block(size, num_bytes)
        rest = block_bytes - size
        if (rest > self._most_rest_bytes and size < self._unsplit_from_bytes) or (is_small and rest):
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
        if self._collects:
            self._freed_at[address] = self._num_large_requests

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

    def _choose(self, pool: Pool, index: int, size: int) -> int:
        """Where in the pool the block to take is, ``index`` being the best fit; the pool's length for none."""
        self._num_large_requests += size > MAX_SMALL_BYTES
        if index == len(pool):
            return index
        too_large_bytes = self._max_split_bytes
        if size >= too_large_bytes:
            too_large_bytes = size + self._settings.max_non_split_rounding_bytes
        return index if pool[index][0] < too_large_bytes else len(pool)

    def _new_block(self, size: int, num_bytes: int) -> tuple[int, int]:
        """(address, bytes) of a fresh segment for a rounded request of ``size``."""
        if self._collects:
            self._collect_garbage()
        segment_bytes = self._settings.segment_bytes(size)
        most_bytes = min(self._limit_bytes, self._allowed_bytes) - segment_bytes
        if self.reserved_bytes > most_bytes:
            pool = self._small_pool if size <= MAX_SMALL_BYTES else self._large_pool
            if not self._release_oversize(pool, size) or self.reserved_bytes > most_bytes:
                self._release_cached()
            if self.reserved_bytes > most_bytes:
                raise OutOfMemory(num_bytes)
        address = self._next_address
        self._next_address += segment_bytes + SEGMENT_GRANULARITY_BYTES  # the gap keeps segments from merging
        self._segment_bytes[address] = segment_bytes
        self._reserve(segment_bytes)
        return address, segment_bytes

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_cached(self) -> None:
        for pool in (self._small_pool, self._large_pool):
            for size, address in pool[:]:
                if self._segment_bytes.get(address) == size:
                    self._release(pool, size, address)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back what ``max_split_size`` kept whole: one block as large as the request, or the largest ones.

        Whether that is as much as the request, or ``max_split_size``. Such blocks are segments: none is split.
        """
        least_bytes = max(size, self._max_split_bytes)
        index = bisect_left(pool, (least_bytes, 0))
        if index < len(pool):
            self._release(pool, *pool[index])
            return True
        released_bytes = 0
        while pool and released_bytes < least_bytes and pool[-1][0] >= self._max_split_bytes:
            released_bytes += pool[-1][0]
            self._release(pool, *pool[-1])
        return released_bytes >= least_bytes

    def _collect_garbage(self) -> None:
        surplus_bytes = self.reserved_bytes - int(self._settings.garbage_collection_threshold * self._allowed_bytes)
        if surplus_bytes <= 0:
            return
        pool = self._large_pool
        ages = {
            (size, address): self._num_large_requests - self._freed_at[address]
            for size, address in pool
            if self._segment_bytes.get(address) == size
        }
        while surplus_bytes > 0 and ages:
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                del ages[block]
                self._release(pool, *block)
                surplus_bytes -= block[0]

    def _release(self, pool: Pool, size: int, address: int) -> None:
        del pool[bisect_left(pool, (size, address))]
        del self._segment_bytes[address], self._free_bytes_from[address], self._free_bytes_before[address + size]
        self.reserved_bytes -= size
