"""How the samples of one optimizer step are split into micro-batches.

Standard library only: pasted into train.py.
"""

from __future__ import annotations


def split_window(num_samples: int, at_most: int, multiple: int = 1) -> list[int]:
    """Sizes of the micro-batches that sum to ``num_samples``, the larger ones first.

    As few as possible of at most ``at_most`` samples, all multiples of ``multiple``, and their sizes differ
    by at most one ``multiple``; up to a tenth more micro-batches are taken only where that makes all sizes
    equal.

    >>> split_window(64, 27), split_window(256, 230), split_window(100, 8)
    ([22, 21, 21], [128, 128], [8, 8, 8, 8, 8, 8, 8, 8, 8, 7, 7, 7, 7])

    Raises:
        ValueError: a size below ``multiple``, or ``num_samples`` is not a multiple of it.
    """
    if multiple < 1 or num_samples < multiple or at_most < multiple or num_samples % multiple:
        raise ValueError(f"{num_samples} do not split into multiples of {multiple}, at most {at_most}")
    units, largest = num_samples // multiple, at_most // multiple
    fewest = -(-units // largest)
    equal = (count for count in range(fewest, fewest * 11 // 10 + 1) if units % count == 0)
    count = next(equal, fewest)
    size, num_larger = divmod(units, count)
    return [(size + 1) * multiple] * num_larger + [size * multiple] * (count - num_larger)


def split_over_ranks(num_samples: int, num_ranks: int, at_most: int, multiple: int = 1) -> list[list[int]]:
    """Sizes of the micro-batches of one optimizer step, for every rank.

    The ranks' parts differ by at most one ``multiple``, the first ranks have the larger ones; where there are
    too few samples, the last have none.

    >>> split_over_ranks(7, 2, 2)
    [[2, 2], [2, 1]]

    Raises:
        ValueError: as ``split_window``, or no rank.
    """
    if num_ranks < 1 or num_samples % multiple:
        raise ValueError(f"{num_samples} do not split into multiples of {multiple} over {num_ranks} ranks")
    units, num_larger = divmod(num_samples // multiple, num_ranks)
    parts = [(units + 1) * multiple] * num_larger + [units * multiple] * (num_ranks - num_larger)
    return [split_window(part, at_most, multiple) if part else [] for part in parts]
