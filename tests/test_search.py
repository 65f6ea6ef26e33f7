"""The search returns the exact maximum of any monotone "does it fit", has tried it, and needs few trials."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradplan.probes.search import close_in, largest

LIMITS = st.integers(0, 100_000) | st.integers(0, 16).map(lambda power: 2**power) | st.integers(0, 20)
BOUNDS = st.none() | st.integers(1, 200_000)
MULTIPLES = st.integers(1, 64)


class Device:
    """Fits sizes up to a limit, and remembers what was tried."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tried: list[int] = []

    def fits(self, size: int) -> bool:
        self.tried.append(size)
        return size <= self.limit

    def check(self, answer: int, expected: int, multiple: int = 1, at_most: int | None = None) -> None:
        """What holds for every search: exact, tried, each size once, multiples only, up to ``at_most``."""
        assert answer == expected
        assert answer == 0 or answer in self.tried
        assert len(set(self.tried)) == len(self.tried)
        assert all(size >= multiple and size % multiple == 0 for size in self.tried)
        assert at_most is None or all(size <= at_most for size in self.tried)


def most_trials(distance: int) -> float:
    """The bound for an answer that is so many multiples away from where the search starts: 0 or the hint."""
    return 2 * log2(max(1, distance)) + 3


@settings(max_examples=300, deadline=None)
@example(limit=0)
@example(limit=1)
@example(limit=65_535)
@example(limit=65_536)
@example(limit=100_000)
@given(limit=LIMITS)
def test_without_a_hint_the_maximum_is_exact_tried_and_found_in_two_log_trials(limit: int) -> None:
    device = Device(limit)
    device.check(largest(device.fits), limit)
    assert len(device.tried) <= most_trials(limit)


def test_every_small_limit_keeps_the_bound_on_trials() -> None:
    for limit in range(2000):
        device = Device(limit)
        device.check(largest(device.fits), limit)
        assert len(device.tried) <= most_trials(limit)


def test_without_a_hint_sizes_double_and_then_halve_the_gap() -> None:
    device = Device(5)
    assert largest(device.fits) == 5
    assert device.tried == [1, 2, 4, 8, 6, 5]


@settings(max_examples=300, deadline=None)
@given(limit=LIMITS, at_most=st.integers(1, 200_000), multiple=MULTIPLES)
def test_without_a_hint_at_most_and_multiple_bound_what_is_tried(limit: int, at_most: int, multiple: int) -> None:
    device = Device(limit)
    expected = min(limit, at_most) // multiple * multiple
    device.check(largest(device.fits, at_most=at_most, multiple=multiple), expected, multiple, at_most)
    assert len(device.tried) <= most_trials(expected // multiple)


@pytest.mark.parametrize("at_most", [1, 2, 3, 4, 100, 128, 129])
def test_without_a_hint_at_most_is_tried_last_where_all_of_it_fits(at_most: int) -> None:
    device = Device(at_most)
    assert largest(device.fits, at_most=at_most) == at_most
    assert device.tried[0] == 1
    assert device.tried[-1] == at_most
    assert device.tried == sorted(device.tried)


@settings(max_examples=300, deadline=None)
@given(limit=st.integers(1, 100_000), at_most=BOUNDS, multiple=MULTIPLES)
def test_a_right_hint_costs_at_most_two_trials(limit: int, at_most: int | None, multiple: int) -> None:
    device = Device(limit)
    expected = (limit if at_most is None else min(limit, at_most)) // multiple * multiple
    answer = largest(device.fits, hint=max(1, expected), at_most=at_most, multiple=multiple)
    device.check(answer, expected, multiple, at_most)
    assert len(device.tried) <= 2


@settings(max_examples=500, deadline=None)
@example(limit=0, hint=1, at_most=None, multiple=1)
@example(limit=0, hint=100_000, at_most=100_000, multiple=1)
@example(limit=100_000, hint=1, at_most=None, multiple=1)
@given(limit=LIMITS, hint=st.integers(1, 200_000), at_most=BOUNDS, multiple=MULTIPLES)
def test_any_hint_gives_the_exact_maximum_in_trials_by_its_distance(
    limit: int, hint: int, at_most: int | None, multiple: int
) -> None:
    device = Device(limit)
    ceiling = limit if at_most is None else min(limit, at_most)
    expected = ceiling // multiple * multiple
    answer = largest(device.fits, hint=hint, at_most=at_most, multiple=multiple)
    device.check(answer, expected, multiple, at_most)
    start = (hint if at_most is None else min(hint, at_most)) // multiple
    assert len(device.tried) <= most_trials(abs(start - expected // multiple))


@settings(deadline=None)
@given(near=st.integers(-3, 3), limit=st.integers(10, 100_000))
def test_a_hint_that_is_nearly_right_costs_at_most_five_trials(near: int, limit: int) -> None:
    device = Device(limit)
    device.check(largest(device.fits, hint=limit + near), limit)
    assert len(device.tried) <= 5


@settings(deadline=None)
@given(at_most=st.integers(1, 100_000), multiple=MULTIPLES)
def test_a_hint_of_at_most_that_fits_is_the_only_trial(at_most: int, multiple: int) -> None:
    device = Device(at_most)
    expected = at_most // multiple * multiple
    answer = largest(device.fits, at_most=at_most, hint=at_most, multiple=multiple)
    device.check(answer, expected, multiple, at_most)
    assert len(device.tried) == (1 if expected else 0)


def test_a_hint_is_the_first_trial_rounded_down_and_inside_the_bounds() -> None:
    for hint, at_most, first in [(256, None, 256), (13, None, 12), (2, None, 4), (500, 103, 100), (4, 4, 4)]:
        device = Device(1)
        largest(device.fits, hint=hint, at_most=at_most, multiple=4)
        assert device.tried[0] == first


def test_a_hint_far_above_the_limit_is_left_in_growing_steps() -> None:
    device = Device(5)
    assert largest(device.fits, hint=256) == 5
    assert device.tried[:9] == [256, 255, 254, 252, 248, 240, 224, 192, 128]
    assert len(device.tried) <= most_trials(256)


def test_at_most_below_one_multiple_is_zero_without_a_trial() -> None:
    device = Device(100)
    assert largest(device.fits, at_most=7, multiple=8) == 0
    assert largest(device.fits, at_most=7, hint=100, multiple=8) == 0
    assert device.tried == []


@settings(deadline=None)
@given(st.sets(st.integers(1, 300)), st.none() | st.integers(1, 300), st.integers(1, 300), st.integers(1, 5))
def test_even_what_is_not_monotone_gives_only_a_size_that_fitted(
    fitting: set[int], hint: int | None, at_most: int, multiple: int
) -> None:
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size in fitting

    answer = largest(fits, hint=hint, at_most=at_most, multiple=multiple)
    assert answer == 0 or (answer in fitting and answer in tried)
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", ["at_most", "hint", "multiple"])
def test_a_bound_below_one_is_refused_before_any_trial(name: str, value: int) -> None:
    device = Device(100)
    with pytest.raises(ValueError, match=name):
        largest(device.fits, **{name: value})
    assert device.tried == []


def test_what_fits_raises_comes_through() -> None:
    def fits(size: int) -> bool:
        raise RuntimeError(f"the user's own bug at {size}")

    with pytest.raises(RuntimeError, match="bug at 1"):
        largest(fits)


# Guesses that may get better


class Closing(Device):
    """The same device under ``close_in``, which asks ``guess`` knowing what was tried."""

    def close_in(
        self,
        guess: Callable[[list[int]], int | None] = lambda _: None,
        at_most: int = 2**20,
        multiple: int = 1,
        grain: int | None = None,
    ) -> int:
        given = {} if grain is None else {"grain": lambda: grain}
        return close_in(self.fits, lambda: guess(self.tried), at_most=at_most, multiple=multiple, **given)


def test_without_a_guess_every_small_limit_is_found_in_two_log_trials() -> None:
    for limit in range(2000):
        device = Closing(limit)
        device.check(device.close_in(), limit)
        assert len(device.tried) <= most_trials(limit)


@settings(max_examples=300, deadline=None)
@example(limit=0, at_most=1, multiple=2)
@example(limit=100_000, at_most=65_536, multiple=1)
@given(limit=LIMITS, at_most=st.integers(1, 200_000), multiple=MULTIPLES)
def test_without_a_guess_at_most_and_multiple_bound_what_is_tried(limit: int, at_most: int, multiple: int) -> None:
    device = Closing(limit)
    expected = min(limit, at_most) // multiple * multiple
    device.check(device.close_in(at_most=at_most, multiple=multiple), expected, multiple, at_most)
    assert len(device.tried) <= most_trials(expected // multiple)


@settings(max_examples=300, deadline=None)
@example(limit=7, at_most=7, multiple=1)
@given(limit=st.integers(1, 100_000), at_most=st.integers(1, 200_000), multiple=MULTIPLES)
def test_a_right_guess_costs_two_trials_the_answer_and_what_does_not_fit(
    limit: int, at_most: int, multiple: int
) -> None:
    device = Closing(limit)
    expected = min(limit, at_most) // multiple * multiple
    answer = device.close_in(lambda _: max(1, expected), at_most, multiple)
    device.check(answer, expected, multiple, at_most)
    above = [expected + multiple] if expected + multiple <= at_most else []
    assert device.tried == ([expected] if expected else []) + above


@settings(max_examples=500, deadline=None)
@example(limit=2, guess=1, at_most=100, multiple=1)
@example(limit=0, guess=100_000, at_most=100_000, multiple=1)
@example(limit=100_000, guess=1, at_most=200_000, multiple=1)
@given(limit=LIMITS, guess=st.integers(1, 400_000), at_most=st.integers(1, 200_000), multiple=MULTIPLES)
def test_a_wrong_guess_still_ends_at_the_exact_maximum_in_trials_by_its_distance(
    limit: int, guess: int, at_most: int, multiple: int
) -> None:
    device = Closing(limit)
    expected = min(limit, at_most) // multiple * multiple
    device.check(device.close_in(lambda _: guess, at_most, multiple), expected, multiple, at_most)
    assert len(device.tried) <= most_trials(abs(min(guess, at_most) // multiple - expected // multiple)) + 2


@settings(max_examples=300, deadline=None)
@given(limit=st.integers(1, 100_000), first=st.integers(1, 400_000), multiple=MULTIPLES)
def test_a_guess_that_is_right_after_one_trial_costs_three(limit: int, first: int, multiple: int) -> None:
    device = Closing(limit)
    expected = limit // multiple * multiple
    answer = device.close_in(lambda tried: expected if tried else first, 2**19, multiple)
    device.check(answer, expected, multiple, 2**19)
    assert len(device.tried) <= 3


@settings(deadline=None)
@given(limit=st.integers(1, 100_000), factor=st.floats(0.1, 10))
def test_a_guess_whose_error_shrinks_tenfold_with_every_trial_needs_few(limit: int, factor: float) -> None:
    device = Closing(limit)
    answer = device.close_in(lambda tried: max(1, round(limit * (1 + (factor - 1) / 10 ** len(tried)))))
    device.check(answer, limit)
    assert len(device.tried) <= 10


@settings(deadline=None)
@given(at_most=st.integers(1, 100_000), beyond=st.integers(0, 1000), multiple=MULTIPLES)
def test_a_guess_of_at_most_or_more_that_fits_is_the_only_trial(at_most: int, beyond: int, multiple: int) -> None:
    device = Closing(at_most)
    expected = at_most // multiple * multiple
    answer = device.close_in(lambda _: at_most + beyond, at_most, multiple)
    device.check(answer, expected, multiple, at_most)
    assert len(device.tried) == (1 if expected else 0)


def test_steps_away_from_a_wrong_guess_grow_and_the_gap_is_halved() -> None:
    device = Closing(1030)
    assert device.close_in(lambda _: 1000) == 1030
    assert device.tried[:5] == [1000, 1001, 1005, 1021, 1085]
    assert device.tried[5:] == [1053, 1037, 1029, 1033, 1031, 1030]


@settings(max_examples=500, deadline=None)
@example(limit=100, at_most=100, multiple=1, grain=64, guess=None)
@example(limit=100, at_most=71, multiple=1, grain=35, guess=71)
@given(
    limit=LIMITS,
    at_most=st.integers(1, 200_000),
    multiple=MULTIPLES,
    grain=st.integers(1, 5000),
    guess=st.none() | st.integers(1, 200_000),
)
def test_the_answer_is_as_fine_as_the_grain_and_no_size_above_at_most_is_tried(
    limit: int, at_most: int, multiple: int, grain: int, guess: int | None
) -> None:
    device = Closing(limit)
    answer = device.close_in(lambda _: guess, at_most, multiple, grain)
    device.check(answer, answer, multiple, at_most)
    top = min(limit, at_most) // multiple * multiple
    assert top - max(grain, multiple) < answer <= top


def test_no_two_sizes_nearer_than_the_grain_are_tried() -> None:
    device = Closing(1234)
    assert device.close_in(lambda _: 1230, 10**6, 2, 50) == 1200
    assert device.tried == [1200, 1250]


def test_a_grain_that_becomes_finer_is_followed() -> None:
    device = Closing(1234)
    grains = iter([100, 100, 10, 10, 1])
    answer = close_in(device.fits, lambda: None, at_most=2000, grain=lambda: next(grains, 1))
    device.check(answer, 1234)


def test_guesses_with_at_most_below_one_multiple_give_zero_without_a_trial() -> None:
    device = Closing(100)
    assert device.close_in(lambda _: 16, at_most=7, multiple=8) == 0
    assert device.tried == []


@settings(max_examples=300, deadline=None)
@given(
    fitting=st.sets(st.integers(1, 300)),
    guesses=st.lists(st.none() | st.integers(1, 400), min_size=1),
    at_most=st.integers(1, 300),
    multiple=st.integers(1, 5),
)
def test_guesses_where_it_is_not_monotone_give_only_a_size_that_fitted(
    fitting: set[int], guesses: list[int | None], at_most: int, multiple: int
) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size in fitting

    answer = close_in(fits, lambda: guesses[len(tried) % len(guesses)], at_most=at_most, multiple=multiple)
    assert answer == 0 or (answer in fitting and answer in tried)
    assert len(set(tried)) == len(tried) <= 300
