"""How a window is split into micro-batches: the rules of INTERFACE, one test each."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradplan import window
from gradplan.window import split_window


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, int]:
    """(samples, at most, multiple) that can be split."""
    multiple = draw(st.integers(1, 9))
    units = draw(st.integers(1, 3000))
    at_most = multiple * draw(st.integers(1, 3000)) + draw(st.integers(0, multiple - 1))
    return units * multiple, at_most, multiple


@pytest.mark.parametrize(
    ("num_samples", "at_most", "sizes"),
    [
        (64, 27, [22, 21, 21]),
        (100, 8, [8] * 9 + [7] * 4),
        (256, 230, [128, 128]),
        (97, 8, [8] * 6 + [7] * 7),
        (64, 64, [64]),
        (64, 1000, [64]),
        (5, 1, [1] * 5),
        (1, 1, [1]),
    ],
)
def test_known_windows(num_samples: int, at_most: int, sizes: list[int]) -> None:
    assert split_window(num_samples, at_most) == sizes


def test_sizes_are_multiples_of_what_the_file_asks_for() -> None:
    assert split_window(64, 27, multiple=8) == [24, 24, 16]
    assert split_window(12, 5, multiple=2) == [4, 4, 4]


def test_a_tenth_more_micro_batches_are_taken_where_that_makes_all_equal() -> None:
    assert split_window(210, 11) == [10] * 21  # the fewest are 20, of unequal sizes; 22 are the most


def test_more_than_a_tenth_is_not_taken() -> None:
    assert split_window(25, 7) == [7, 6, 6, 6]  # five of 5 would be 1.25 times as many
    assert split_window(100, 8) == [8] * 9 + [7] * 4  # twenty of 5 would be 1.54 times as many


@given(windows())
def test_sizes_add_up_to_the_window(case: tuple[int, int, int]) -> None:
    assert sum(split_window(*case)) == case[0]


@given(windows())
def test_no_size_is_above_the_most_and_each_is_a_multiple(case: tuple[int, int, int]) -> None:
    _, at_most, multiple = case
    assert all(0 < size <= at_most and size % multiple == 0 for size in split_window(*case))


@given(windows())
def test_sizes_differ_by_at_most_one_multiple_the_larger_first(case: tuple[int, int, int]) -> None:
    sizes = split_window(*case)
    assert max(sizes) - min(sizes) in (0, case[2])
    assert sizes == sorted(sizes, reverse=True)


@given(windows())
def test_the_count_is_the_fewest_or_a_tenth_more_where_all_are_equal(case: tuple[int, int, int]) -> None:
    num_samples, at_most, multiple = case
    sizes = split_window(*case)
    units, largest = num_samples // multiple, at_most // multiple
    fewest = next(count for count in range(1, units + 1) if count * largest >= units)
    if len(sizes) == fewest:
        in_reach = [count for count in range(fewest, units + 1) if 10 * count <= 11 * fewest]
        assert units % fewest == 0 or all(units % count for count in in_reach)
    else:
        assert 10 * fewest < 10 * len(sizes) <= 11 * fewest
        assert len(set(sizes)) == 1
        assert all(units % count for count in range(fewest, len(sizes)))


@pytest.mark.parametrize("arguments", [(0, 1), (-4, 2), (4, 0), (4, -1), (4, 4, 0), (3, 4, 2), (4, 1, 2), (1, 8, 2)])
def test_what_cannot_be_split_is_an_error(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not split"):
        split_window(*arguments)


def test_the_docstring_example_is_true() -> None:
    results = doctest.testmod(window)
    assert results.attempted > 0
    assert results.failed == 0
