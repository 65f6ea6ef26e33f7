"""The caching allocator equals a slow, obvious model of the same rules, and a few cases worked by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradplan.probes.simulator.allocator import (
    Block,
    CachingAllocator,
    OutOfMemory,
    Peaks,
    fits,
    replay,
    required_bytes,
)

MIB = 2**20
BOUNDARIES = [512, 1024, 4096, MIB // 2, MIB, 2 * MIB, 5 * MIB, 10 * MIB, 20 * MIB, 40 * MIB]


@dataclass(eq=False)
class SlowBlock:
    size: int
    is_free: bool = True


@dataclass(eq=False)
class SlowSegment:
    is_small: bool
    blocks: list[SlowBlock]

    def is_wholly_free(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].is_free

    def merge(self) -> None:
        """Join the first two neighbours that are free, until there are none."""
        for left, right in pairwise(self.blocks):
            if left.is_free and right.is_free:
                left.size += right.size
                self.blocks.remove(right)
                self.merge()
                return


@dataclass
class SlowAllocator:
    """The rules again, with a list of segments, each a list of blocks in the order of their addresses."""

    limit: int | None
    segments: list[SlowSegment] = field(default_factory=list)

    def allocated(self) -> int:
        return sum(block.size for segment in self.segments for block in segment.blocks if not block.is_free)

    def reserved(self) -> int:
        return sum(block.size for segment in self.segments for block in segment.blocks)

    def allocate(self, num_bytes: int) -> SlowBlock | None:
        size = num_bytes
        while size % 512:
            size += 1
        is_small = size <= MIB
        segment, block = self.best_fit(size, is_small) or self.new_segment(size, is_small) or (None, None)
        if segment is None or block is None:
            return None
        rest = block.size - size
        if (is_small and rest >= 512) or (not is_small and rest > MIB):
            segment.blocks.insert(segment.blocks.index(block) + 1, SlowBlock(rest))
            block.size = size
        block.is_free = False
        return block

    def best_fit(self, size: int, is_small: bool) -> tuple[SlowSegment, SlowBlock] | None:
        best = None
        for segment in self.segments:
            for block in segment.blocks:
                is_large_enough = segment.is_small == is_small and block.is_free and block.size >= size
                if is_large_enough and (best is None or block.size < best[1].size):
                    best = segment, block
        return best

    def new_segment(self, size: int, is_small: bool) -> tuple[SlowSegment, SlowBlock] | None:
        if is_small:
            segment_size = 2 * MIB
        elif size < 10 * MIB:
            segment_size = 20 * MIB
        else:
            segment_size = next(n * MIB for n in range(10, 10_000, 2) if n * MIB >= size)
        if not self.has_room(segment_size):
            self.segments = [segment for segment in self.segments if not segment.is_wholly_free()]
        if not self.has_room(segment_size):
            return None
        self.segments.append(SlowSegment(is_small, [SlowBlock(segment_size)]))
        return self.segments[-1], self.segments[-1].blocks[0]

    def has_room(self, segment_size: int) -> bool:
        return self.limit is None or self.reserved() + segment_size <= self.limit

    def free(self, block: SlowBlock) -> None:
        block.is_free = True
        for segment in self.segments:
            segment.merge()

    def snapshot(self) -> list[list[tuple[int, bool]]]:
        return [[(block.size, block.is_free) for block in segment.blocks] for segment in self.segments]


def sizes() -> st.SearchStrategy[int]:
    """Bytes around every boundary of the rules, in the small pool, in the large one, and anywhere."""
    offsets = st.sampled_from([0, 0, 0, -1, 1, 512, -512, 513, 1024])
    near = st.builds(lambda base, offset: max(1, base + offset), st.sampled_from(BOUNDARIES), offsets)
    return st.one_of(near, st.integers(1, 2 * MIB), st.integers(MIB, 30 * MIB))


# One operation: (bytes to allocate, None) or (None, which of the live blocks to free).
Operations = list[tuple[int | None, int]]


def operations() -> st.SearchStrategy[Operations]:
    allocation = st.tuples(sizes(), st.just(0))
    release = st.tuples(st.none(), st.integers(0, 1000))
    return st.lists(st.one_of(allocation, release), min_size=1, max_size=60)


def limits() -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, 60).map(lambda n: n * 2 * MIB) | st.integers(0, 100 * MIB)


def trace_of(chosen: Operations) -> tuple[list[int], list[int]]:
    """Operations as (events, sizes); a death that finds nothing alive is left out."""
    events: list[int] = []
    born: list[int] = []
    live: list[int] = []
    for size, which in chosen:
        if size is not None:
            events.append(len(born))
            live.append(len(born))
            born.append(size)
        elif live:
            events.append(~live.pop(which % len(live)))
    return events, born


def shape_of(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    return [[(block.size_bytes, block.is_free) for block in segment] for segment in allocator.snapshot()]


def check_invariants(allocator: CachingAllocator) -> None:
    """Blocks tile their segment without two free neighbours, and the totals are the sums over the blocks."""
    segments = allocator.snapshot()
    blocks = [block for segment in segments for block in segment]
    assert allocator.reserved_bytes == sum(block.size_bytes for block in blocks)
    assert allocator.allocated_bytes == sum(block.size_bytes for block in blocks if not block.is_free)
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    for segment in segments:
        assert sum(block.size_bytes for block in segment) % (2 * MIB) == 0
        for left, right in pairwise(segment):
            assert left.address + left.size_bytes == right.address
            assert not (left.is_free and right.is_free)
    for left_segment, right_segment in pairwise(segments):
        assert left_segment[-1].address + left_segment[-1].size_bytes < right_segment[0].address


@settings(max_examples=400, deadline=None)
@given(chosen=operations(), limit=limits())
def test_every_step_equals_the_slow_model(chosen: Operations, limit: int | None) -> None:
    allocator, slow = CachingAllocator(limit), SlowAllocator(limit)
    live: list[tuple[int, SlowBlock]] = []
    peak_allocated = peak_reserved = 0
    for size, which in chosen:
        if size is not None:
            block = slow.allocate(size)
            if block is None:
                with pytest.raises(OutOfMemory) as error:
                    allocator.allocate(size)
                assert error.value.requested_bytes == size
            else:
                handle = allocator.allocate(size)
                assert Block(handle, block.size, False) in chain.from_iterable(allocator.snapshot())
                live.append((handle, block))
        elif live:
            handle, block = live.pop(which % len(live))
            allocator.free(handle)
            slow.free(block)
        peak_allocated = max(peak_allocated, slow.allocated())
        peak_reserved = max(peak_reserved, slow.reserved())
        assert shape_of(allocator) == slow.snapshot()
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (slow.allocated(), slow.reserved())
        assert allocator.peak_allocated_bytes == peak_allocated
        assert allocator.peak_reserved_bytes == peak_reserved


@settings(deadline=None)
@given(chosen=operations(), limit=limits())
def test_blocks_tile_their_segments_and_freeing_all_leaves_whole_segments(
    chosen: Operations, limit: int | None
) -> None:
    allocator = CachingAllocator(limit)
    live: list[int] = []
    for size, which in chosen:
        if size is None:
            if live:
                allocator.free(live.pop(which % len(live)))
        else:
            try:
                live.append(allocator.allocate(size))
            except OutOfMemory:
                assert limit is not None
        check_invariants(allocator)
        assert limit is None or allocator.reserved_bytes <= limit
    reserved = allocator.reserved_bytes
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == reserved
    assert all(len(segment) == 1 and segment[0].is_free for segment in allocator.snapshot())


@settings(deadline=None)
@given(chosen=operations())
def test_required_bytes_was_replayed_and_the_next_smaller_limit_fails(chosen: Operations) -> None:
    events, born = trace_of(chosen)
    required = required_bytes(events, born)
    peaks = replay(events, born)
    assert required % (2 * MIB) == 0
    assert required <= peaks.reserved_bytes
    assert fits(events, born, required)
    assert required == 0 or not fits(events, born, required - 1)
    assert required == 0 or not fits(events, born, required - 2 * MIB)


@settings(deadline=None)
@given(chosen=operations(), limit=st.integers(0, 100 * MIB))
def test_fits_says_whether_the_replay_ends_and_the_peaks_keep_to_the_limit(chosen: Operations, limit: int) -> None:
    events, born = trace_of(chosen)
    try:
        peaks = replay(events, born, limit)
    except OutOfMemory:
        assert not fits(events, born, limit)
    else:
        assert fits(events, born, limit)
        assert peaks.allocated_bytes <= peaks.reserved_bytes <= limit
        assert fits(events, born, peaks.reserved_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # exactly 1 MiB would be left: not split, so it counts whole
        (40_960 * MIB, 40_960 * MIB, 40_960 * MIB),
    ],
)
def test_one_request_alone(num_bytes: int, allocated: int, reserved: int) -> None:
    assert replay([0], [num_bytes]) == Peaks(allocated, reserved)


def test_zero_bytes_take_no_memory_and_many_may_live_at_once() -> None:
    allocator = CachingAllocator(limit_bytes=0)
    for handle in [allocator.allocate(0), allocator.allocate(0)]:
        allocator.free(handle)
    assert allocator.snapshot() == []
    assert replay([0, 1, ~0, 2, ~2, ~1], [0, 1, 0], limit_bytes=2 * MIB) == Peaks(512, 2 * MIB)


def test_a_large_block_is_split_only_where_more_than_one_mib_is_left() -> None:
    for rest, counted in [(MIB, 20 * MIB), (MIB + 512, 19 * MIB - 512)]:
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(20 * MIB))
        allocator.allocate(20 * MIB - rest)
        assert allocator.allocated_bytes == counted


def test_a_small_block_is_split_even_where_only_512_bytes_are_left() -> None:
    allocator = CachingAllocator()
    allocator.allocate(MIB)
    allocator.allocate(MIB - 512)
    assert shape_of(allocator) == [[(MIB, False), (MIB - 512, False), (512, True)]]


def test_a_cached_large_block_of_any_size_is_taken_before_a_new_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(1000 * MIB))
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 1000 * MIB


def test_best_fit_is_the_smallest_block_then_the_lowest_address() -> None:
    allocator = CachingAllocator()
    first, second, largest = (allocator.allocate(n * MIB) for n in (12, 12, 30))
    for handle in (largest, second, first):
        allocator.free(handle)
    assert allocator.allocate(11 * MIB) == first
    assert allocator.allocate(11 * MIB) == second
    assert allocator.allocate(11 * MIB) == largest


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)
    allocator.free(allocator.allocate(2 * MIB))
    assert shape_of(allocator) == [[(20 * MIB, True)], [(MIB, False), (MIB, True)]]


def test_freed_neighbours_merge_on_both_sides() -> None:
    allocator = CachingAllocator()
    left, middle, right, last = (allocator.allocate(512) for _ in range(4))
    allocator.free(left)
    allocator.free(right)
    allocator.free(middle)
    assert shape_of(allocator) == [[(3 * 512, True), (512, False), (2 * MIB - 4 * 512, True)]]
    allocator.free(last)
    assert shape_of(allocator) == [[(2 * MIB, True)]]


def test_cached_segments_are_given_back_before_the_memory_is_out() -> None:
    allocator = CachingAllocator(limit_bytes=32 * MIB)
    cached_small = allocator.allocate(1)
    cached_large = allocator.allocate(10 * MIB)
    allocator.allocate(2 * MIB)
    allocator.free(cached_small)
    allocator.free(cached_large)
    assert allocator.reserved_bytes == 32 * MIB
    allocator.allocate(12 * MIB)  # from the 18 MiB left of the 20 MiB segment: nothing is given back
    assert allocator.reserved_bytes == 32 * MIB
    allocator.allocate(11 * MIB)  # 20 + 12: both cached segments had to go
    assert shape_of(allocator) == [
        [(2 * MIB, False), (12 * MIB, False), (6 * MIB, True)],
        [(12 * MIB, False)],
    ]
    assert allocator.peak_reserved_bytes == 32 * MIB


def test_a_segment_that_is_partly_in_use_is_never_given_back() -> None:
    allocator = CachingAllocator(limit_bytes=20 * MIB)
    kept, freed = allocator.allocate(2 * MIB), allocator.allocate(9 * MIB)
    allocator.free(freed)
    with pytest.raises(OutOfMemory) as error:
        allocator.allocate(19 * MIB)
    assert error.value.requested_bytes == 19 * MIB
    allocator.free(kept)
    allocator.allocate(19 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_limit_counts_segments_not_live_bytes() -> None:
    assert not fits([0], [1], 2 * MIB - 1)
    assert fits([0], [1], 2 * MIB)
    assert not fits([0], [MIB + 1], 20 * MIB - 1)
    assert fits([0], [MIB + 1], 20 * MIB)


def test_required_bytes_is_below_the_peak_reserved_where_cached_segments_can_be_given_back() -> None:
    events, born = [0, ~0, 1, ~1, 2], [30 * MIB, 40 * MIB, 50 * MIB]
    assert replay(events, born) == Peaks(50 * MIB, 120 * MIB)
    assert required_bytes(events, born) == 50 * MIB
    assert required_bytes([], []) == 0


def test_a_handle_is_freed_once() -> None:
    allocator = CachingAllocator()
    handle = allocator.allocate(1)
    allocator.free(handle)
    with pytest.raises(KeyError):
        allocator.free(handle)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        CachingAllocator().allocate(-1)


def test_a_step_of_12_000_storages_replays_in_a_tenth_of_a_second() -> None:
    kept = [(n * 7919) % (40 * MIB) + 1 for n in range(6000)]
    passing = [(n * 104_729) % (8 * MIB) + 1 for n in range(6000)]
    events: list[int] = []
    for n in range(6000):
        events += [2 * n, 2 * n + 1, ~(2 * n + 1)]
    events += [~(2 * n) for n in reversed(range(6000))]
    born = [size for pair in zip(kept, passing, strict=True) for size in pair]

    def seconds() -> float:
        start = time.process_time()
        replay(events, born)
        return time.process_time() - start

    assert len(events) == 24_000
    assert min(seconds() for _ in range(5)) < 0.1
