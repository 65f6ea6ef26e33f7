"""Allocator settings are read as PyTorch reads them, and each rule that they change, worked by hand."""

from __future__ import annotations

import pytest

from gradplan.probes.simulator.allocator import OutOfMemory, Peaks, fits, replay, required_bytes
from gradplan.probes.simulator.allocator_settings import AllocatorSettings, parse_settings
from gradplan.probes.simulator.expandable import ExpandableAllocator
from gradplan.probes.simulator.segments import CachingAllocator

MIB = 2**20
GIB = 2**30
EXPANDABLE = parse_settings("expandable_segments:True")


def test_every_option_that_changes_memory_is_read() -> None:
    text = (
        "expandable_segments:True, max_split_size_mb:64, max_non_split_rounding_mb:40, large_segment_size_mb:32,"
        "garbage_collection_threshold:0.6, per_process_memory_fraction:0.5, roundup_power2_divisions:2,"
    )
    assert parse_settings(text, device_bytes=GIB) == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=64 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        roundup_power2_divisions=(2,) * 16,
        garbage_collection_threshold=0.6,
        per_process_memory_fraction=0.5,
        large_segment_bytes=32 * MIB,
        device_bytes=GIB,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "backend:native",
        "expandable_segments:False",
        "per_process_memory_fraction:1.0",
        "pinned_use_background_threads:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:True",
    ],
)
def test_what_does_not_change_memory_is_accepted(text: str) -> None:
    assert parse_settings(text) == AllocatorSettings()


@pytest.mark.parametrize(
    ("value", "divisions"),
    [
        ("4", (4,) * 16),
        ("[256:1,512:2,1024:4,>:8]", (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8)),
        ("[256:1,1024:4]", (1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 4, 0, 0, 0, 0, 0)),
        ("[1:0,65536:8]", (0,) * 15 + (8,)),
        ("[>:8]", (0,) + (8,) * 15),
    ],
)
def test_divisions_are_read_as_torch_2_13_answers(value: str, divisions: tuple[int, ...]) -> None:
    """Expected values: what ``AcceleratorAllocatorConfig::roundup_power2_divisions`` returned for 1 MiB to 32 GiB."""
    assert parse_settings(f"roundup_power2_divisions:{value}").roundup_power2_divisions == divisions


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("backend:cudaMallocAsync", "backend:native"),
        ("nonsense:1", "unknown allocator setting 'nonsense': understood are expandable_segments,"),
        ("expandable_segments", "expected key:value"),
        ("max_split_size_mb:", "expected key:value"),
        (":5", "expected key:value"),
        ("expandable_segments:true", "neither expandable_segments:True nor"),
        ("max_split_size_mb:20.5", "not a whole number of MiB"),
        ("max_split_size_mb:19", "too small: it must be at least 20"),
        ("max_split_size_mb:20,large_segment_size_mb:64", "too small: it must be at least 64"),
        ("max_non_split_rounding_mb:20,large_segment_size_mb:64", "too small: it must be at least 64"),
        ("large_segment_size_mb:10", "more than 10"),
        ("garbage_collection_threshold:0", "not a number between 0 and 1"),
        ("garbage_collection_threshold:1.0", "not a number between 0 and 1"),
        ("garbage_collection_threshold:much", "not a number between 0 and 1"),
        ("per_process_memory_fraction:1.5", "not a number from 0 to 1"),
        ("roundup_power2_divisions:0", "not a power of 2"),
        ("roundup_power2_divisions:[256:3]", "'3' is not a power of 2"),
        ("roundup_power2_divisions:[100:2]", "'100' is not a power of 2"),
        ("roundup_power2_divisions:[256:2", "closing bracket"),
    ],
)
def test_what_pytorch_would_refuse_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is looked for below, as it is written
        parse_settings(text)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("num_bytes", "rounded_bytes"),
    [
        (1, 512),
        (1200, 1536),  # 4 divisions of 1024 are finer than 512 bytes
        (2048, 2048),
        (2049, 2560),
        (5200, 6144),  # between 4096 and 8192 in steps of 1024
        (8192, 8192),
        (33 * MIB, 40 * MIB),
        (100 * GIB, 112 * GIB),  # the last interval has no end
    ],
)
def test_a_request_is_rounded_up_to_a_division_of_its_power_of_2(num_bytes: int, rounded_bytes: int) -> None:
    settings = parse_settings("roundup_power2_divisions:4")
    assert replay([0], [num_bytes], settings=settings).allocated_bytes == rounded_bytes


def test_each_interval_of_sizes_has_its_own_divisions() -> None:
    settings = parse_settings("roundup_power2_divisions:[4:1,8:2,>:4]")
    sizes = [5 * MIB + 1, 9 * MIB, 17 * MIB]
    assert [settings.rounded_bytes(size) // MIB for size in sizes] == [5, 12, 20]
    last = parse_settings("roundup_power2_divisions:[16384:1,32768:4]")
    assert [last.rounded_bytes(size * GIB) // GIB for size in (17, 33, 65)] == [17, 40, 80]


def test_a_request_of_0_bytes_takes_no_memory_under_any_rounding() -> None:
    assert replay([0], [0], settings=parse_settings("roundup_power2_divisions:4")) == Peaks(0, 0)


def test_a_block_from_max_split_size_on_serves_only_large_requests_and_whole() -> None:
    allocator = CachingAllocator(settings=parse_settings("max_split_size_mb:32"))
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(2 * MIB)  # not from the 64 MiB
    assert allocator.reserved_bytes == 84 * MIB
    allocator.allocate(44 * MIB)  # nor is this: 64 is 20 MiB more
    assert allocator.reserved_bytes == 128 * MIB
    allocator.allocate(44 * MIB + 1)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (128 * MIB, 110 * MIB)


def test_max_non_split_rounding_says_how_much_larger_a_whole_block_may_be() -> None:
    settings = parse_settings("max_split_size_mb:32,max_non_split_rounding_mb:30")
    events, born = [0, ~0, 1], [64 * MIB, 35 * MIB]
    assert replay(events, born, settings=settings) == Peaks(64 * MIB, 64 * MIB)
    assert replay(events, [64 * MIB, 34 * MIB], settings=settings) == Peaks(64 * MIB, 98 * MIB)


def test_under_max_split_size_one_large_block_goes_back_where_it_is_enough() -> None:
    allocator = CachingAllocator(180 * MIB, parse_settings("max_split_size_mb:32"))
    for handle in [allocator.allocate(size * MIB) for size in (40, 60, 80)]:
        allocator.free(handle)
    allocator.allocate(20 * MIB)
    assert [segment[0].size_bytes // MIB for segment in allocator.snapshot()] == [60, 80, 20]


def test_under_max_split_size_the_largest_blocks_go_back_where_none_is_enough() -> None:
    allocator = CachingAllocator(150 * MIB, parse_settings("max_split_size_mb:32"))
    for handle in [allocator.allocate(size * MIB) for size in (40, 50, 60)]:
        allocator.free(handle)
    allocator.allocate(100 * MIB)
    assert [segment[0].size_bytes // MIB for segment in allocator.snapshot()] == [40, 100]


def test_requests_below_10_mib_share_segments_of_large_segment_size() -> None:
    settings = parse_settings("large_segment_size_mb:64")
    assert replay([0, 1], [2 * MIB, 12 * MIB], settings=settings) == Peaks(14 * MIB, 64 * MIB)
    assert replay([0], [12 * MIB], settings=settings) == Peaks(12 * MIB, 12 * MIB)


def test_a_memory_fraction_is_a_limit_of_its_own() -> None:
    settings = parse_settings("per_process_memory_fraction:0.5", device_bytes=100 * MIB)
    assert fits([0], [50 * MIB], 100 * MIB, settings=settings)
    assert not fits([0], [52 * MIB], 100 * MIB, settings=settings)
    assert not fits([0], [50 * MIB], 48 * MIB, settings=settings)
    with pytest.raises(OutOfMemory):
        required_bytes([0], [52 * MIB], settings=settings)


def test_a_memory_fraction_needs_to_know_what_it_is_of() -> None:
    with pytest.raises(ValueError, match="device_bytes"):
        replay([], [], settings=parse_settings("per_process_memory_fraction:0.5"))


def test_garbage_collection_gives_back_what_has_been_free_for_longest() -> None:
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8"
    allocator = CachingAllocator(settings=parse_settings(text, device_bytes=250 * MIB))  # so from 100 MiB on
    old, young = allocator.allocate(40 * MIB), allocator.allocate(50 * MIB)
    allocator.free(old)
    allocator.allocate(20 * MIB)  # from the old one: 20 of 40 MiB
    allocator.free(young)
    for _ in range(2):
        allocator.free(allocator.allocate(60 * MIB))
    assert allocator.reserved_bytes == 150 * MIB  # at 90 MiB, nothing was given back before the 60
    allocator.allocate(70 * MIB)  # 50 free for two more requests than the 60: it is older than the average
    assert [segment[0].size_bytes // MIB for segment in allocator.snapshot()] == [20, 60, 70]
    assert allocator.peak_reserved_bytes == 170 * MIB


def test_what_is_older_than_the_average_goes_at_once_and_only_large_requests_age_it() -> None:
    text = "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8"
    allocator = CachingAllocator(settings=parse_settings(text, device_bytes=500 * MIB))  # so from 160 MiB on
    allocator.allocate(512)
    allocator.allocate(3 * MIB)  # the other 17 MiB serve the requests that only pass the time
    blocks = [allocator.allocate(size * MIB) for size in (40, 50, 60)]
    for block, size, num_requests in zip(blocks, (2 * MIB, 512, 2 * MIB), (1, 9, 0), strict=True):
        allocator.free(block)
        for _ in range(num_requests):
            allocator.free(allocator.allocate(size))
    assert allocator.reserved_bytes == 172 * MIB
    allocator.allocate(100 * MIB)  # of ages 2, 1 and 1: the 40 MiB alone, which are enough
    assert allocator.reserved_bytes == 232 * MIB


def test_without_a_memory_fraction_nothing_is_collected() -> None:
    events, born = [0, ~0, 1, ~1, 2], [40 * MIB, 50 * MIB, 60 * MIB]
    settings = parse_settings("garbage_collection_threshold:0.1", device_bytes=200 * MIB)
    assert replay(events, born, 200 * MIB, settings=settings).reserved_bytes == 150 * MIB
    settings = parse_settings("garbage_collection_threshold:0.1,per_process_memory_fraction:0.9", 200 * MIB)
    assert replay(events, born, 200 * MIB, settings=settings).reserved_bytes == 60 * MIB


def test_expandable_segments_grow_by_pieces_of_20_mib_where_a_larger_batch_needs_more() -> None:
    events, born = [0, ~0, 1, ~1], [100 * MIB, 110 * MIB]
    assert replay(events, born) == Peaks(110 * MIB, 210 * MIB)
    assert replay(events, born, settings=EXPANDABLE) == Peaks(110 * MIB, 120 * MIB)


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (11 * MIB, 11 * MIB, 20 * MIB),  # split, though no more than 1 MiB would be left of a segment of its own
        (20 * MIB - 512, 20 * MIB - 512, 20 * MIB),
        (41 * MIB, 41 * MIB, 60 * MIB),
    ],
)
def test_one_request_alone_in_expandable_segments(num_bytes: int, allocated: int, reserved: int) -> None:
    assert replay([0], [num_bytes], settings=EXPANDABLE) == Peaks(allocated, reserved)


def test_blocks_of_expandable_segments_lie_across_pieces() -> None:
    assert replay([0, 1, 2, 3], [15 * MIB] * 4, settings=EXPANDABLE) == Peaks(60 * MIB, 60 * MIB)
    assert replay([0, 1, 2], [MIB - 512] * 3, settings=EXPANDABLE).reserved_bytes == 4 * MIB


def test_best_fit_leaves_the_block_at_the_end_that_can_grow() -> None:
    allocator = ExpandableAllocator()
    wide, _ = allocator.allocate(30 * MIB), allocator.allocate(15 * MIB)  # 15 MiB are left at the end
    allocator.free(wide)
    assert allocator.allocate(12 * MIB) == wide


def test_wholly_free_pieces_are_unmapped_anywhere_and_mapped_again_from_the_lowest() -> None:
    allocator = ExpandableAllocator(170 * MIB, EXPANDABLE)
    handles = [allocator.allocate(size * MIB) for size in (50, 5, 50, 5)]
    allocator.free(handles[0])
    allocator.free(handles[2])
    base = handles[0]
    allocator.allocate(60 * MIB)  # 2 pieces of the first 50 MiB and 2 of the second go, 3 come at the end
    spans = [[(block.address - base) // MIB for block in segment] for segment in allocator.snapshot()]
    assert spans == [[40, 50, 55], [100, 105, 110, 170]]
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (100 * MIB, 120 * MIB)
    assert allocator.allocate(15 * MIB) == base
    assert [(segment[0].address - base) // MIB for segment in allocator.snapshot()] == [0, 40, 100]
    allocator.free(handles[1])
    assert allocator.allocate(45 * MIB) == base + 15 * MIB  # 5 free, 20 unmapped, 20 free
    assert allocator.reserved_bytes == 140 * MIB


def test_a_piece_that_is_partly_in_use_is_never_unmapped() -> None:
    events, born = [0, 1, ~0, 2], [19 * MIB, 2 * MIB, 21 * MIB]
    assert not fits(events, born, 40 * MIB, settings=EXPANDABLE)
    assert required_bytes(events, born, settings=EXPANDABLE) == 60 * MIB


def test_small_requests_use_a_range_of_their_own() -> None:
    allocator = ExpandableAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_a_memory_fraction_may_be_passed_by_less_than_a_piece() -> None:
    text = "expandable_segments:True,per_process_memory_fraction:0.5"
    assert replay([0], [11 * MIB], settings=parse_settings(text, 24 * MIB)).reserved_bytes == 20 * MIB
    with pytest.raises(OutOfMemory):
        replay([0], [13 * MIB], settings=parse_settings(text, 24 * MIB))
