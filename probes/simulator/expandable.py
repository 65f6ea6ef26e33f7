"""PyTorch's CUDA caching allocator with ``expandable_segments:True``. Standard library only.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.13) for one stream, where they differ from
those of whole segments:

- Each pool has one range of addresses without an end, mapped in pieces of 2 MiB (small pool) or 20 MiB (large
  pool, or ``large_segment_size_mb``). What is mapped is what is reserved.
- Best fit counts a free block that lies before unmapped addresses as large as it could grow; so a block at the
  end of the range is taken last. A block is split wherever a rest remains, in the large pool too.
- Where nothing fits: of all stretches of unmapped addresses, the lowest that has room, together with the free
  blocks that touch it, is mapped as far as needed.
- Where the device refuses, every piece that is wholly free is unmapped, wherever it lies, and the request is tried
  again; then out of memory. Pieces that were mapped before a refusal stay.
- A memory fraction is held against the segment that the request would have had, not against the pieces: it may
  be passed by less than a piece, and it may refuse what pieces had room for.
- ``garbage_collection_threshold`` does nothing, and neither does ``max_split_size`` to splitting.

In PyTorch a range ends at 9/8 of the device's memory, and another one begins: only a trace that fragments the
addresses that far would tell.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from gradplan.probes.simulator.allocator_settings import (
    DEFAULT_SETTINGS,
    MAX_SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    round_up,
)
from gradplan.probes.simulator.segments import Block, CachingAllocator, OutOfMemory, Pool

LARGE_RANGE_PIECE = 2**32  # the large pool's first piece, counted in pieces: far above any small block


@dataclass
class Range:
    """Addresses from ``start``; mapped up to ``end`` but for holes, all of them whole pieces."""

    piece_bytes: int
    start: int
    end: int
    holes: dict[int, int] = field(default_factory=dict)  # bytes by address

    def unmapped_bytes(self, address: int) -> int:
        """How far the unmapped addresses reach that begin at ``address``; 0 where none do."""
        return sys.maxsize if address == self.end else self.holes.get(address, 0)

    def map(self, address: int, num_bytes: int) -> None:
        """Map the first ``num_bytes`` of a hole, or of what lies beyond the end."""
        if address == self.end:
            self.end += num_bytes
            return
        rest = self.holes.pop(address) - num_bytes
        if rest:
            self.holes[address + num_bytes] = rest

    def unmap(self, stretches: list[tuple[int, int]]) -> None:
        """Make holes of (address, bytes) stretches, joined to the holes and the end that they touch."""
        joined: dict[int, int] = {}
        last = self.start
        for address, num_bytes in sorted([*self.holes.items(), *stretches]):
            if last + joined.get(last, 0) == address and last in joined:
                joined[last] += num_bytes
            else:
                last = address
                joined[last] = num_bytes
        if last in joined and last + joined[last] == self.end:
            self.end = last
            del joined[last]
        self.holes = joined

    def mapped(self) -> list[tuple[int, int]]:
        """The mapped stretches as (address, end)."""
        begins = [self.start, *(hole + self.holes[hole] for hole in sorted(self.holes))]
        ends = [*sorted(self.holes), self.end]
        return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


class ExpandableAllocator(CachingAllocator):
    """The state of an allocator with expandable segments; ``snapshot`` shows each mapped stretch as a segment."""

    def __init__(self, limit_bytes: int | None = None, settings: AllocatorSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(limit_bytes, settings)
        self._has_choice = True
        self._most_rest_bytes = 0
        self._unsplit_from_bytes = sys.maxsize
        self._small_range = Range(SMALL_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, SMALL_SEGMENT_BYTES)
        start = LARGE_RANGE_PIECE * settings.large_segment_bytes
        self._large_range = Range(settings.large_segment_bytes, start, start)

    def snapshot(self) -> list[list[Block]]:
        """The blocks of each mapped stretch by address, those of the small pool first."""
        stretches = [*self._small_range.mapped(), *self._large_range.mapped()]
        return [self._blocks_of(address, end) for address, end in stretches]

    def _choose(self, pool: Pool, index: int, size: int) -> int:
        range_ = self._range_for(size)
        while index + 1 < len(pool) and _room(range_, pool[index + 1]) < _room(range_, pool[index]):
            index += 1
        return super()._choose(pool, index, size)

    def _new_block(self, size: int, num_bytes: int) -> tuple[int, int]:
        if block := self._grow(size):
            return block
        self._release_cached()
        if block := self._grow(size):
            return block
        raise OutOfMemory(num_bytes)

    def _grow(self, size: int) -> tuple[int, int] | None:
        """(address, bytes) of a block of at least ``size`` bytes, out of the pool; None where the device refused."""
        if self.reserved_bytes + self._settings.segment_bytes(size) > self._allowed_bytes:
            return None
        address = self._lowest_room(size)
        block_bytes = self._map_from(address, size)
        if block_bytes >= size:
            return address, block_bytes
        self._put(address, block_bytes, size)
        return None

    def _lowest_room(self, size: int) -> int:
        """The first address of a stretch with room for ``size``: unmapped, with the free blocks that touch it."""
        range_ = self._range_for(size)
        for unmapped in sorted(range_.holes):
            address = unmapped - self._free_bytes_before.get(unmapped, 0)
            end = address
            while end < address + size and (more := self._free_bytes_from.get(end) or range_.unmapped_bytes(end)):
                end += more
            if end >= address + size:
                return address
        return range_.end - self._free_bytes_before.get(range_.end, 0)

    def _map_from(self, address: int, size: int) -> int:
        """Make one block of up to ``size`` bytes or some more from ``address``; its bytes, out of the pool.

        Fewer than ``size`` where the device refused.
        """
        range_ = self._range_for(size)
        block_bytes = self._take(address, size)
        while block_bytes < size:
            end = address + block_bytes
            missing_bytes = min(size - block_bytes, range_.unmapped_bytes(end))
            mapped_bytes = round_up(missing_bytes, range_.piece_bytes)
            if self.reserved_bytes + mapped_bytes > self._limit_bytes:
                break
            range_.map(end, mapped_bytes)
            self._reserve(mapped_bytes)
            block_bytes += mapped_bytes
            block_bytes += self._take(address + block_bytes, size)
        return block_bytes

    def _release_cached(self) -> None:
        for size, range_ in ((0, self._small_range), (sys.maxsize, self._large_range)):
            unmapped = []
            for free_bytes, address in self._pool_for(size)[:]:
                begin = round_up(address, range_.piece_bytes)
                end = (address + free_bytes) // range_.piece_bytes * range_.piece_bytes
                if begin < end:
                    self._take(address, size)
                    self._put(address, begin - address, size)
                    self._put(end, address + free_bytes - end, size)
                    unmapped.append((begin, end - begin))
            range_.unmap(unmapped)
            self.reserved_bytes -= sum(num_bytes for _, num_bytes in unmapped)

    def _take(self, address: int, size: int) -> int:
        """The bytes of the free block at ``address``, which leaves the pool; 0 where there is none."""
        free_bytes = self._free_bytes_from.pop(address, 0)
        if free_bytes:
            del self._free_bytes_before[address + free_bytes]
            pool = self._pool_for(size)
            del pool[bisect_left(pool, (free_bytes, address))]
        return free_bytes

    def _put(self, address: int, free_bytes: int, size: int) -> None:
        if free_bytes:
            insort(self._pool_for(size), (free_bytes, address))
            self._free_bytes_from[address] = free_bytes
            self._free_bytes_before[address + free_bytes] = free_bytes

    def _pool_for(self, size: int) -> Pool:
        return self._small_pool if size <= MAX_SMALL_BYTES else self._large_pool

    def _range_for(self, size: int) -> Range:
        return self._small_range if size <= MAX_SMALL_BYTES else self._large_range


def _room(range_: Range, block: tuple[int, int]) -> int:
    """The bytes of a free block, with the unmapped ones after it."""
    free_bytes, address = block
    return free_bytes + range_.unmapped_bytes(address + free_bytes)
