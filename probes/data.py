"""The data of a model.py: its dataset, its batches, and over how many items their loss is a mean."""

from __future__ import annotations

import contextlib
import inspect
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from gradplan.probes.batches import SEED, num_elements, seed_everything
from gradplan.probes.contract import checked_dataset
from gradplan.probes.drawing import as_counts
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Notice
from gradplan.probes.loading import load_module, user_code

MOST_DRAWS = 4096
NO_DATA = "{file} has neither build_dataset() nor build_batch(batch_size): gradplan needs one of them to make a batch"


@dataclass
class UserData:
    """What a file says about its data. Calls into the user's code raise :class:`UserCodeError` with the user's line.

    ``typed`` is the path as the user wrote it, with ``:name`` where another builder was named.
    """

    typed: str
    path: Path
    module: ModuleType
    batch_multiple: int
    notices: list[Notice] = field(default_factory=list, kw_only=True)

    def _find(self, name: str) -> Any:
        return getattr(self.module, name, None)

    def _has(self, name: str) -> bool:
        return self._find(name) is not None

    def line_of(self, name: str) -> str:
        """``model.py:12: `` where the function of that name begins; nothing where nobody knows."""
        try:
            return f"{self.path}:{inspect.getsourcelines(self._find(name))[1]}: "
        except (OSError, TypeError):
            return ""

    def reload(self) -> None:
        """Import the file anew, for what its code keeps between calls; all stays where that fails."""
        with contextlib.suppress(UserCodeError):
            self.module = load_module(Path(str(self.module.__file__)))

    def count_items(self, batch: Any) -> list[float] | None:
        """Over how many items each loss of this batch is a mean, as the file says; None where it does not.

        One number serves every loss.
        """
        count = self._find("count_items")
        if count is None:
            return None
        with user_code("count_items(batch)"):
            counted = count(batch)
        with user_code("count_items(batch), which must return a number, or one per loss,"):
            return as_counts(counted)

    @cached_property
    def num_counts(self) -> int | None:
        """How many numbers ``count_items`` gives; None where the file has none."""
        counts = self.count_items(self.make_batch(2 * self.batch_multiple)) if self._has("count_items") else None
        return None if counts is None else len(counts)

    def make_batch(self, batch_size: int) -> Any:
        """A batch on the CPU: ``build_batch``'s, or the largest samples of the dataset, collated."""
        build_batch = self._find("build_batch")
        if build_batch is None:
            return self._collate(self.dataset, self.largest_first, batch_size, self._find("collate_fn"))
        what = f"build_batch({batch_size})"
        seed_everything()
        with user_code(what):
            return _something(build_batch(batch_size), what)

    def make_validation_batch(self, batch_size: int) -> Any:
        """As ``make_batch``, of the validation set; None where the file has none."""
        if self.validation_dataset is None:
            return None
        collate = self._find("collate_fn_validation") or self._find("collate_fn")
        return self._collate(self.validation_dataset, self._largest_first_of_validation, batch_size, collate)

    def _collate(self, dataset: Any, largest: list[int], batch_size: int, collate: Any) -> Any:
        what = "PyTorch's default collate (there is no collate_fn)" if collate is None else "collate_fn(samples)"
        seed_everything()
        with user_code("the dataset"):
            samples = [dataset[largest[i % len(largest)]] for i in range(batch_size)]
        with user_code(what):
            return _something((collate or default_collate)(samples), what)

    def batch_size_notices(self, size: int) -> list[Notice]:
        """Whether ``build_batch`` gives more for more samples; without that, memory says nothing about sizes."""
        if not self._has("build_batch"):
            return []
        larger = size + self.batch_multiple
        small, large = num_elements(self.make_batch(size)), num_elements(self.make_batch(larger))
        if small != large or small <= 1:  # 1: of a kind that cannot be counted
            return []
        message = (
            f"build_batch({size}) and build_batch({larger}) are of equal size: where it does not follow "
            "batch_size, what is planned here means nothing"
        )
        return [Notice(code="batch-size-ignored", message=message)]

    @cached_property
    def dataset(self) -> Any:
        """The training data, or None where the file has no ``build_dataset``."""
        if not self._has("build_dataset"):
            return None
        with user_code("build_dataset()"):
            dataset = self.module.build_dataset()
        return checked_dataset(dataset, has_build_batch=self._has("build_batch"))

    @cached_property
    def validation_dataset(self) -> Any:
        """The data to evaluate on, or None where the file has no ``build_validation_dataset``."""
        if not self._has("build_validation_dataset"):
            return None
        with user_code("build_validation_dataset()"):
            dataset = checked_dataset(self.module.build_validation_dataset(), False, "build_validation_dataset")
            if len(dataset) == 0:
                raise UserCodeError("build_validation_dataset() returned a dataset of length 0: nothing to evaluate on")
        return dataset

    @property
    def is_stream(self) -> bool:
        """Whether the training data can only be read in order."""
        return isinstance(self.dataset, IterableDataset)

    @cached_property
    def dataset_length(self) -> int | None:
        """Samples in the dataset; None without one, or where it has no length."""
        if self.dataset is None or self.is_stream:
            return None
        with user_code("len() of the dataset"):
            length = len(self.dataset)
        if length == 0:
            raise UserCodeError("build_dataset() returned a dataset of length 0: nothing to train on")
        return length

    @cached_property
    def largest_first(self) -> list[int]:
        """Indices of the dataset's samples, the largest first; of at most 4096, drawn by the seed."""
        if self.dataset_length is None:
            raise UserCodeError(NO_DATA.format(file=self.path.name))
        return _largest_first(self.dataset, self.dataset_length)

    @cached_property
    def _largest_first_of_validation(self) -> list[int]:
        return _largest_first(self.validation_dataset, len(self.validation_dataset))


def _largest_first(dataset: Any, length: int) -> list[int]:
    some = random.Random(SEED).sample(range(length), min(length, MOST_DRAWS))
    seed_everything()
    with user_code("the dataset"):
        return sorted(sorted(some), key=lambda index: -num_elements(dataset[index]))


def _something(batch: Any, what: str) -> Any:
    if batch is None:
        raise UserCodeError(f"{what} returned None; it must return a batch")
    return batch
