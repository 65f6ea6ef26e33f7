"""The largest size that fits, in few trials: doubling, then bisection, over any "does it fit". Pure."""

from __future__ import annotations

from collections.abc import Callable

from gradplan.probes.evidence import MOST_SAMPLES, Notice

__all__ = ["MOST_SAMPLES", "close_in", "end_notices", "largest"]

STRIDE_FACTOR = 4


def largest(
    fits: Callable[[int], bool], *, at_most: int | None = None, hint: int | None = None, multiple: int = 1
) -> int:
    """The largest multiple of ``multiple``, up to ``at_most``, that fits; 0 where not even ``multiple`` does.

    ``fits`` is taken to be monotone: what fits still fits when made smaller. A size is returned only after it
    was tried and fitted, and no size is tried twice. Where ``at_most`` is None, some size must fail, or this
    never ends.

    Trials, for an answer of L multiples: at most 2 log2(max(1, L)) + 3, starting at one ``multiple``. With a
    ``hint``, the expected answer, which is tried first: at most two where it is right, one where it is
    ``at_most`` and fits, and 2 log2(d) + 3 where it is d multiples off.

    ``at_most`` and ``hint`` are rounded down to multiples. A ``hint`` above ``at_most`` counts as
    ``at_most``, one below ``multiple`` as none.

    Raises:
        ValueError: ``at_most``, ``hint`` or ``multiple`` is below 1.
    """
    for name, value in (("at_most", at_most), ("hint", hint), ("multiple", multiple)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    ceiling = None if at_most is None else at_most // multiple

    def fits_multiples(count: int) -> bool:
        return fits(count * multiple)

    start = 0 if hint is None else hint // multiple
    if ceiling is not None:
        start = min(start, ceiling)
    if start == 0 or fits_multiples(start):
        fitting, failing = _gallop_up(fits_multiples, start, ceiling)
    else:
        fitting, failing = _gallop_down(fits_multiples, start)
    return _bisect(fits_multiples, fitting, failing) * multiple


def _gallop_up(fits: Callable[[int], bool], start: int, ceiling: int | None) -> tuple[int, int]:
    """(fits, does not) around the limit, from ``start``, which fits, up to ``ceiling``."""
    fitting, step = start, 1
    while ceiling is None or fitting < ceiling:
        candidate = start + step if ceiling is None else min(start + step, ceiling)
        if not fits(candidate):
            return fitting, candidate
        fitting, step = candidate, 2 * step
    return fitting, fitting + 1


def _gallop_down(fits: Callable[[int], bool], start: int) -> tuple[int, int]:
    """(fits, does not) around the limit, from ``start``, which does not fit, down to 0, which does."""
    failing, step = start, 1
    while start - step > 0:
        candidate = start - step
        if fits(candidate):
            return candidate, failing
        failing, step = candidate, 2 * step
    return 0, failing


def _bisect(fits: Callable[[int], bool], fitting: int, failing: int) -> int:
    """The largest count that fits between one that does and one that does not."""
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


def close_in(
    fits: Callable[[int], bool],
    guess: Callable[[], int | None],
    *,
    at_most: int,
    multiple: int = 1,
    grain: Callable[[], int] = lambda: 1,
) -> int:
    """As ``largest``, by guesses that may get better with every trial; both the answer and what does not fit are tried.

    ``guess`` gives a size, or None where nobody knows. ``fits`` may know the answer without a trial. The search ends
    when no size that fails is further than ``grain()`` above one that fits, or when ``at_most`` fits.

    Trials: without a guess at most 2 log2(max(1, L)) + 3 for an answer of L multiples. With one, where it is right,
    two; from there on steps of growing length, then bisection.
    """
    top = at_most // multiple * multiple
    fitting, failing, stride, num_raised, was_above = 0, None, 1, 0, False
    while fitting < top:
        unit = max(1, grain() // multiple) * multiple
        if failing is not None and failing - fitting <= unit:
            break
        beyond = top + multiple if failing is None else failing
        wanted = guess()
        if wanted is None:
            candidate = 2 * fitting if failing is None else (fitting + failing) // 2
        elif fitting < wanted < beyond:  # and further each time that it was too low again
            candidate = max(wanted, fitting + 2**num_raised // 4 * unit)
            stride = 1
        else:  # it says that nothing between them is the answer
            stride = 1 if was_above != (wanted >= beyond) else stride
            was_above = wanted >= beyond
            candidate = beyond - stride * unit if was_above else fitting + stride * unit
            stride *= STRIDE_FACTOR
        if failing is not None and not fitting < candidate < failing:
            candidate = (fitting + failing) // 2
        candidate = min(max(fitting + unit, candidate // unit * unit), top)
        if fits(candidate):
            fitting, num_raised = candidate, num_raised + 1
        else:
            failing, num_raised = candidate, 0
    return fitting


def end_notices(best: int, multiple: int = 1) -> list[Notice]:
    """Where nothing but ``MOST_SAMPLES`` ended a search for multiples of ``multiple``."""
    if best != MOST_SAMPLES // multiple * multiple:
        return []
    message = f"the search ended at {best} samples: memory hardly grows with the batch"
    return [Notice(code="search-ended", message=message)]
