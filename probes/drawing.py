"""Which samples a step sees, and with which random numbers: functions of the seed and the place in the run alone.

So a run that was stopped goes on with the samples and the augmentations that it would have had, whatever the
number of processes that prepare batches. Copied word for word into train.py, where it is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from gradplan.probes.ranks import add_up


def shuffled(num_samples: int, seed: int, epoch: int) -> list[int]:
    """The order of one epoch: a function of (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(seed_from(seed, epoch))
    return torch.randperm(num_samples, generator=generator).tolist()


def cut(indices: Sequence[int], sizes: Iterable[int], start: int = 0) -> Iterator[Sequence[int]]:
    """Consecutive pieces of the given sizes, the first one at ``start``."""
    for size in sizes:
        yield indices[start : start + size]
        start += size


def seed_from(*key: int) -> int:
    """32 bits that differ for every key, where a sum of its parts would repeat itself."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big")


def seed_host(seed: int) -> None:
    """Seed Python, NumPy where the user's code has imported it, and torch on the CPU."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def seed_all(seed: int) -> None:
    """Seed whatever draws in a step: also the devices, for dropout."""
    seed_host(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def host_state_kept() -> Iterator[None]:
    """Afterwards Python, NumPy and torch on the CPU go on as if no random number had been drawn."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)


class MicroBatches(Dataset[Any]):
    """Collated micro-batches by (epoch, indices); a sample's random numbers follow from (seed, epoch, index)."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed

    def __getitem__(self, drawn: tuple[int, Sequence[int]]) -> Any:
        epoch, indices = drawn
        with host_state_kept():
            samples = []
            for index in indices:
                seed_host(seed_from(self.seed, epoch, index))
                samples.append(self.dataset[index])
            return self.collate(samples)


def batches_of_stream(
    dataset: Iterable[Any], collate: Callable[[list[Any]], Any], pieces: Iterable[tuple[int, int]], seed: int
) -> Iterator[Any]:
    """Micro-batches of a dataset that can only be read in order, which starts again at its end.

    ``pieces`` gives (samples to pass over, samples to take). Seeded as ``MicroBatches``, by (pass, position).
    """
    samples = samples_of_stream(dataset, seed)
    for num_passed, num_taken in pieces:
        with host_state_kept():
            for _ in itertools.islice(samples, num_passed):
                pass
            batch = collate(list(itertools.islice(samples, num_taken)))
        yield batch


def samples_of_stream(dataset: Iterable[Any], seed: int) -> Iterator[Any]:
    """One sample after the other, forever.

    Raises:
        ValueError: there is none.
    """
    for epoch in itertools.count():
        seed_host(seed_from(seed, epoch))
        samples = iter(dataset)
        for index in itertools.count():
            seed_host(seed_from(seed, epoch, index))
            try:
                sample = next(samples)
            except StopIteration:
                break
            yield sample
        if index == 0:
            raise ValueError("the dataset is empty: iterating over it gave no sample")


def unchanged(batch: Any) -> Any:
    """What a loader makes of a batch that is collated already."""
    return batch


def shares_of(
    counts: Sequence[Sequence[float]], num_counts: int, device: torch.device
) -> tuple[list[list[float]], bool]:
    """Each micro-batch's part of its window: items here / items of the window over all ranks, for each loss.

    ``counts`` holds ``num_counts`` numbers per micro-batch. A share of a loss without any item is 0. The
    second answer is whether the window has any item, on whatever rank.

    Raises:
        ValueError: another number of counts.
    """
    if any(len(row) != num_counts for row in counts):
        raise ValueError(f"count_items must always give {num_counts} numbers, as it did when it was probed")
    dtype = torch.float32 if device.type == "mps" else torch.float64
    table = torch.tensor([list(row) for row in counts], dtype=dtype, device=device).reshape(-1, num_counts)
    totals = table.sum(0)
    add_up(totals)
    return (table / totals.where(totals > 0, 1)).tolist(), bool(totals.any())


def as_counts(counted: Any) -> list[float]:
    """What ``count_items`` gave as numbers: one, or one per loss.

    Raises:
        ValueError: one is no number of things.
    """
    counts = [float(count) for count in (counted if isinstance(counted, (tuple, list)) else (counted,))]
    if not all(0 <= count < math.inf for count in counts):
        raise ValueError(f"count_items gave {counts}; it must give numbers of at least 0")
    return counts
