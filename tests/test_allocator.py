"""The caching allocators equal slow, obvious models of the same rules, and a few cases worked by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradplan.probes.simulator.allocator import OutOfMemory, Peaks, fits, replay, required_bytes
from gradplan.probes.simulator.allocator_settings import DEFAULT_SETTINGS, AllocatorSettings, parse_settings
from gradplan.probes.simulator.expandable import LARGE_RANGE_PIECE, ExpandableAllocator
from gradplan.probes.simulator.segments import Block, CachingAllocator

MIB = 2**20
BOUNDARIES = [512, 1024, 4096, MIB // 2, MIB, 2 * MIB, 5 * MIB, 10 * MIB, 20 * MIB, 40 * MIB]

SEGMENT_SETTINGS = [
    "max_split_size_mb:20",
    "max_split_size_mb:24,max_non_split_rounding_mb:32",
    "max_split_size_mb:33",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,4:2,8:0,>:16],max_split_size_mb:20",
    "large_segment_size_mb:13",
    "large_segment_size_mb:32,max_split_size_mb:32",
    "per_process_memory_fraction:0.7",
    "per_process_memory_fraction:0.8,garbage_collection_threshold:0.3",
    "per_process_memory_fraction:0.9,garbage_collection_threshold:0.6,max_split_size_mb:24",
]
RANGE_SETTINGS = [
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:20",
    "expandable_segments:True,roundup_power2_divisions:4,large_segment_size_mb:12",
    "expandable_segments:True,per_process_memory_fraction:0.8,garbage_collection_threshold:0.3",
]


@dataclass(eq=False)
class SlowBlock:
    size: int
    state: Literal["live", "free", "unmapped"] = "free"
    freed_at: int = 0


@dataclass(eq=False)
class SlowSegment:
    """Blocks in the order of their addresses; a range of expandable segments is one, from ``address``."""

    is_small: bool
    blocks: list[SlowBlock]
    address: int = 0

    def is_wholly_free(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].state == "free"

    def merge(self) -> None:
        """Join the first two neighbours that are both free, or both unmapped, until there are none."""
        for left, right in pairwise(self.blocks):
            if left.state == right.state != "live":
                left.size += right.size
                left.freed_at = max(left.freed_at, right.freed_at)
                self.blocks.remove(right)
                self.merge()
                return

    def split(self, block: SlowBlock, size: int) -> None:
        self.blocks.insert(self.blocks.index(block) + 1, SlowBlock(block.size - size, block.state))
        block.size = size

    def addressed(self) -> Iterator[tuple[int, SlowBlock]]:
        address = self.address
        for block in self.blocks:
            yield address, block
            address += block.size


@dataclass
class SlowAllocator:
    """The rules again, with a list of segments, each a list of blocks."""

    limit: int | None
    settings: AllocatorSettings = DEFAULT_SETTINGS
    segments: list[SlowSegment] = field(default_factory=list)
    num_requests: int = 0

    def total(self, *states: str) -> int:
        return sum(block.size for segment in self.segments for block in segment.blocks if block.state in states)

    def allocated(self) -> int:
        return self.total("live")

    def reserved(self) -> int:
        return self.total("live", "free")

    def rounded(self, num_bytes: int) -> int:
        interval = 0
        while interval < 15 and num_bytes >= 2 * MIB * 2**interval:
            interval += 1
        divisions = self.settings.roundup_power2_divisions[interval]
        if divisions > 1 and num_bytes > 512 * divisions:
            power = 512
            while power * 2 <= num_bytes:
                power *= 2
            return next(
                power + n * power // divisions
                for n in range(divisions + 1)
                if power + n * power // divisions >= num_bytes
            )
        return next(size for size in range(num_bytes, num_bytes + 512) if size % 512 == 0)

    def allocate(self, num_bytes: int) -> SlowBlock | None:
        size = self.rounded(num_bytes)
        is_small = size <= MIB
        self.num_requests += not is_small
        segment, block = self.best_fit(size, is_small) or self.new_block(size, is_small) or (None, None)
        if segment is None or block is None:
            return None
        if self.is_split(block.size - size, size, is_small):
            segment.split(block, size)
        block.state = "live"
        return block

    def is_split(self, rest: int, size: int, is_small: bool) -> bool:
        return rest >= 512 if is_small else rest > MIB and not self.is_oversize(size)

    def is_oversize(self, size: int) -> bool:
        return self.settings.max_split_bytes is not None and size >= self.settings.max_split_bytes

    def free_blocks(self, is_small: bool) -> list[tuple[SlowSegment, SlowBlock]]:
        """Those of a pool, the smallest first, then the oldest."""
        segments = [segment for segment in self.segments if segment.is_small == is_small]
        blocks = [(segment, block) for segment in segments for block in segment.blocks if block.state == "free"]
        return sorted(blocks, key=lambda pair: pair[1].size)

    def best_fit(self, size: int, is_small: bool) -> tuple[SlowSegment, SlowBlock] | None:
        for segment, block in self.free_blocks(is_small):
            if block.size >= size:
                return (segment, block) if self.is_taken(block, size) else None
        return None

    def is_taken(self, block: SlowBlock, size: int) -> bool:
        if self.is_oversize(size):
            return block.size < size + self.settings.max_non_split_rounding_bytes
        return not self.is_oversize(block.size)

    def segment_size(self, size: int, is_small: bool) -> int:
        if is_small:
            return 2 * MIB
        if size < 10 * MIB:
            return self.settings.large_segment_bytes
        return next(n * MIB for n in range(10, 10_000, 2) if n * MIB >= size)

    def new_block(self, size: int, is_small: bool) -> tuple[SlowSegment, SlowBlock] | None:
        segment_size = self.segment_size(size, is_small)
        self.collect_garbage()
        if not (self.has_room(segment_size) or (self.release_oversize(size, is_small) and self.has_room(segment_size))):
            self.segments = [segment for segment in self.segments if not segment.is_wholly_free()]
        if not self.has_room(segment_size):
            return None
        self.segments.append(SlowSegment(is_small, [SlowBlock(segment_size)]))
        return self.segments[-1], self.segments[-1].blocks[0]

    def has_room(self, num_bytes: int) -> bool:
        limits = [limit for limit in (self.limit, self.settings.allowed_bytes) if limit is not None]
        return all(self.reserved() + num_bytes <= limit for limit in limits)

    def release_oversize(self, size: int, is_small: bool) -> bool:
        if self.settings.max_split_bytes is None:
            return False
        enough = max(size, self.settings.max_split_bytes)
        oversize = [pair for pair in self.free_blocks(is_small) if self.is_oversize(pair[1].size)]
        for segment, block in oversize:
            if block.size >= enough:
                self.segments.remove(segment)
                return True
        released = 0
        for segment, block in reversed(oversize):
            if released < enough:
                self.segments.remove(segment)
                released += block.size
        return released >= enough

    def collect_garbage(self) -> None:
        if self.settings.allowed_bytes is None or not self.settings.garbage_collection_threshold:
            return
        most = int(self.settings.garbage_collection_threshold * self.settings.allowed_bytes)
        while self.reserved() > most:
            cached = [segment for segment in self.segments if not segment.is_small and segment.is_wholly_free()]
            ages = [self.num_requests - segment.blocks[0].freed_at for segment in cached]
            for segment, age in zip(cached, ages, strict=True):
                if age >= sum(ages) / len(ages):
                    self.segments.remove(segment)
            if not cached:
                return

    def free(self, block: SlowBlock) -> None:
        block.state, block.freed_at = "free", self.num_requests
        for segment in self.segments:
            segment.merge()

    def snapshot(self) -> list[list[tuple[int, bool]]]:
        return [[(block.size, block.state == "free") for block in segment.blocks] for segment in self.segments]


class SlowExpandable(SlowAllocator):
    """The rules of expandable segments: two ranges, whose last block is unmapped and endless."""

    def __init__(self, limit: int | None, settings: AllocatorSettings) -> None:
        super().__init__(limit, settings)
        self.pieces = {True: 2 * MIB, False: settings.large_segment_bytes}
        for is_small, address in ((True, 2 * MIB), (False, LARGE_RANGE_PIECE * settings.large_segment_bytes)):
            self.segments.append(
                SlowSegment(is_small, [SlowBlock(10**12 * self.pieces[is_small], "unmapped")], address)
            )

    def is_split(self, rest: int, size: int, is_small: bool) -> bool:
        return rest >= 512

    def best_fit(self, size: int, is_small: bool) -> tuple[SlowSegment, SlowBlock] | None:
        pairs = [pair for pair in self.free_blocks(is_small) if pair[1].size >= size]
        while len(pairs) > 1 and self.growth(*pairs[1]) < self.growth(*pairs[0]):
            pairs.pop(0)
        return pairs[0] if pairs and self.is_taken(pairs[0][1], size) else None

    def growth(self, segment: SlowSegment, block: SlowBlock) -> int:
        after = segment.blocks[segment.blocks.index(block) + 1]
        return block.size + (after.size if after.state == "unmapped" else 0)

    def new_block(self, size: int, is_small: bool) -> tuple[SlowSegment, SlowBlock] | None:
        segment = next(segment for segment in self.segments if segment.is_small == is_small)
        block = self.grow(segment, size)
        if block is None:
            self.unmap_all()
            block = self.grow(segment, size)
        return None if block is None else (segment, block)

    def grow(self, segment: SlowSegment, size: int) -> SlowBlock | None:
        allowed = self.settings.allowed_bytes
        if allowed is not None and self.reserved() + self.segment_size(size, segment.is_small) > allowed:
            return None
        first = next(index for index in range(len(segment.blocks)) if self.can_begin(segment.blocks[index:], size))
        while segment.blocks[first].state == "unmapped" or segment.blocks[first].size < size:
            is_mapped = segment.blocks[first].state == "free"
            missing = size - (segment.blocks[first].size if is_mapped else 0)
            hole = segment.blocks[first + is_mapped]
            piece = self.pieces[segment.is_small]
            mapped = next(n for n in range(piece, 2**40, piece) if n >= min(missing, hole.size))
            if self.limit is not None and self.reserved() + mapped > self.limit:
                return None
            if mapped < hole.size:
                segment.split(hole, mapped)
            hole.state = "free"
            segment.merge()
        return segment.blocks[first]

    def can_begin(self, blocks: list[SlowBlock], size: int) -> bool:
        """A run of free and unmapped blocks that are large enough, with an unmapped one first or second."""
        run: list[SlowBlock] = []
        for block in blocks:
            if block.state == "live":
                break
            run.append(block)
        return any(block.state == "unmapped" for block in run[:2]) and sum(block.size for block in run) >= size

    def unmap_all(self) -> None:
        for segment in self.segments:
            piece = self.pieces[segment.is_small]
            for address, block in list(segment.addressed()):
                begin = -(-address // piece) * piece
                end = (address + block.size) // piece * piece
                if block.state != "free" or begin >= end:
                    continue
                if address + block.size > end:
                    segment.split(block, end - address)
                if begin > address:
                    segment.split(block, begin - address)
                    block = segment.blocks[segment.blocks.index(block) + 1]
                block.state = "unmapped"
            segment.merge()

    def snapshot(self) -> list[list[tuple[int, bool]]]:
        """Each mapped stretch, and before it the bytes since its range's start, as if in use."""
        stretches: list[list[tuple[int, bool]]] = []
        for segment in self.segments:
            is_mapped = False
            for address, block in segment.addressed():
                if block.state != "unmapped":
                    if not is_mapped:
                        stretches.append([(address, False)])
                    stretches[-1].append((block.size, block.state == "free"))
                is_mapped = block.state != "unmapped"
        return stretches


def pair_of(limit: int | None, chosen: AllocatorSettings) -> tuple[CachingAllocator, SlowAllocator]:
    if chosen.expandable_segments:
        return ExpandableAllocator(limit, chosen), SlowExpandable(limit, chosen)
    return CachingAllocator(limit, chosen), SlowAllocator(limit, chosen)


def sizes() -> st.SearchStrategy[int]:
    """Bytes around every boundary of the rules, in the small pool, in the large one, and anywhere."""
    offsets = st.sampled_from([0, 0, 0, -1, 1, 512, -512, 513, 1024])
    near = st.builds(lambda base, offset: max(1, base + offset), st.sampled_from(BOUNDARIES), offsets)
    return st.one_of(near, st.integers(1, 2 * MIB), st.integers(MIB, 30 * MIB))


# One operation: (bytes to allocate, None) or (None, which of the live blocks to free).
Operations = list[tuple[int | None, int]]


def operations() -> st.SearchStrategy[Operations]:
    """A few that shrink well, or many from a seed: lists that are drawn one by one are seldom long."""
    allocation = st.tuples(sizes(), st.just(0))
    release = st.tuples(st.none(), st.integers(0, 1000))
    few = st.lists(st.one_of(allocation, release), min_size=1, max_size=10)
    return st.integers(0, 2**32).map(many_operations) | few


def many_operations(seed: int) -> Operations:
    random = Random(seed)
    largest = random.choice([3, 12, 30, 60]) * MIB
    chosen: Operations = []
    for _ in range(random.randint(10, 80)):
        near = random.choice(BOUNDARIES) + random.choice([0, 0, -1, 1, 512, -511])
        size = random.choice([near, random.randint(1, 2 * MIB), random.randint(MIB, largest), largest])
        chosen.append((size, 0) if random.random() < 0.6 else (None, random.randint(0, 1000)))
    return chosen


def limits() -> st.SearchStrategy[int | None]:
    return st.integers(0, 60).map(lambda n: n * 2 * MIB) | st.integers(0, 100 * MIB) | st.none()


def allocator_settings(*texts: str) -> st.SearchStrategy[AllocatorSettings]:
    """As parsed, on devices so small that a memory fraction matters."""
    device_bytes = st.integers(20, 70).map(lambda n: n * 2 * MIB)
    return st.builds(parse_settings, st.sampled_from(texts), device_bytes)


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
    """Sizes and whether they are free; of expandable segments, the address of each mapped stretch too."""
    stretches = [[(block.size_bytes, block.is_free) for block in segment] for segment in allocator.snapshot()]
    if isinstance(allocator, ExpandableAllocator):
        addresses = [segment[0].address for segment in allocator.snapshot()]
        return [[(address, False), *stretch] for address, stretch in zip(addresses, stretches, strict=True)]
    return stretches


def check_invariants(allocator: CachingAllocator) -> None:
    """Blocks tile their segment without two free neighbours, and the totals are the sums over the blocks."""
    segments = allocator.snapshot()
    blocks = [block for segment in segments for block in segment]
    assert allocator.reserved_bytes == sum(block.size_bytes for block in blocks)
    assert allocator.allocated_bytes == sum(block.size_bytes for block in blocks if not block.is_free)
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    for segment in segments:
        assert sum(block.size_bytes for block in segment) % MIB == 0
        for left, right in pairwise(segment):
            assert left.address + left.size_bytes == right.address
            assert not (left.is_free and right.is_free)
    for left_segment, right_segment in pairwise(segments):
        assert left_segment[-1].address + left_segment[-1].size_bytes < right_segment[0].address


@settings(max_examples=200, deadline=None)
@given(chosen=operations(), limit=limits())
def test_every_step_equals_the_slow_model(chosen: Operations, limit: int | None) -> None:
    check_every_step(chosen, limit, DEFAULT_SETTINGS)


@pytest.mark.parametrize("text", [*SEGMENT_SETTINGS, *RANGE_SETTINGS])
def test_every_step_equals_the_slow_model_under_settings(text: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(chosen=operations(), limit=limits(), options=allocator_settings(text))
    def check(chosen: Operations, limit: int | None, options: AllocatorSettings) -> None:
        check_every_step(chosen, limit, options)

    check()


def check_every_step(chosen: Operations, limit: int | None, options: AllocatorSettings) -> None:
    allocator, slow = pair_of(limit, options)
    live: list[tuple[int, SlowBlock]] = []
    peak_allocated = 0
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
        assert shape_of(allocator) == slow.snapshot()
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (slow.allocated(), slow.reserved())
        assert allocator.peak_allocated_bytes == peak_allocated


@settings(deadline=None)
@given(chosen=operations(), limit=limits(), options=allocator_settings("", *SEGMENT_SETTINGS, *RANGE_SETTINGS))
def test_blocks_tile_their_segments_and_freeing_all_leaves_whole_segments(
    chosen: Operations, limit: int | None, options: AllocatorSettings
) -> None:
    allocator, _ = pair_of(limit, options)
    live: list[int] = []
    most_reserved = 0
    for size, which in chosen:
        if size is None:
            if live:
                allocator.free(live.pop(which % len(live)))
        else:
            try:
                live.append(allocator.allocate(size))
            except OutOfMemory:
                assert limit is not None or options.allowed_bytes is not None
        check_invariants(allocator)
        most_reserved = max(most_reserved, allocator.reserved_bytes)
        assert limit is None or allocator.peak_reserved_bytes <= limit
        if options.allowed_bytes is not None and not options.expandable_segments:
            assert allocator.peak_reserved_bytes <= options.allowed_bytes
    assert options.expandable_segments or allocator.peak_reserved_bytes == most_reserved
    reserved = allocator.reserved_bytes
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    assert allocator.reserved_bytes == reserved
    assert all(len(segment) == 1 and segment[0].is_free for segment in allocator.snapshot())


@settings(max_examples=200, deadline=None)
@given(
    chosen=operations(),
    options=allocator_settings("", "", *SEGMENT_SETTINGS[:-3], *RANGE_SETTINGS[:-1]),
)
def test_required_bytes_was_replayed_and_the_next_smaller_limit_fails(
    chosen: Operations, options: AllocatorSettings
) -> None:
    events, born = trace_of(chosen)
    step = MIB if options.large_segment_bytes == 13 * MIB else 2 * MIB
    required = required_bytes(events, born, options)
    peaks = replay(events, born, None, options)
    assert required % step == 0
    assert required <= peaks.reserved_bytes
    assert fits(events, born, required, options)
    assert required == 0 or not fits(events, born, required - 1, options)
    assert required == 0 or not fits(events, born, required - step, options)


@settings(max_examples=200, deadline=None)
@given(
    chosen=operations(),
    limit=st.integers(0, 100 * MIB),
    options=allocator_settings("", "", *SEGMENT_SETTINGS, *RANGE_SETTINGS),
)
def test_a_replay_is_what_the_slow_model_does_with_the_whole_trace(
    chosen: Operations, limit: int, options: AllocatorSettings
) -> None:
    events, born = trace_of(chosen)
    slow = pair_of(limit, options)[1]
    blocks: list[SlowBlock | None] = []
    peak_allocated = 0
    for event in events:
        if event < 0:
            if (block := blocks[~event]) is not None:
                slow.free(block)
            continue
        blocks.append(slow.allocate(born[event]))
        peak_allocated = max(peak_allocated, slow.allocated())
    assert fits(events, born, limit, options) == (None not in blocks)
    if None in blocks:
        with pytest.raises(OutOfMemory):
            replay(events, born, limit, options)
        return
    peaks = replay(events, born, limit, options)
    assert peaks.allocated_bytes == peak_allocated <= peaks.reserved_bytes <= limit
    assert replay(events, born, peaks.reserved_bytes, options) == peaks


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


def test_a_smaller_limit_that_fits_is_found_though_larger_ones_do_not() -> None:
    """Under 54 to 64 MiB the blocks fall into other places, and the last one finds no room."""
    events, born = [0, ~0, 1, ~1, 2, ~2, 3, 4, 5, ~4, ~5], [14 * MIB, 8 * MIB, 40 * MIB, 9 * MIB, 30 * MIB, 12 * MIB]
    fitting = [limit for limit in range(40, 70, 2) if fits(events, born, limit * MIB)]
    assert fitting == [52, 66, 68]
    assert replay(events, born).reserved_bytes == 66 * MIB
    assert required_bytes(events, born) == 52 * MIB
