"""How large a sample is, and random numbers that are the same in every run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradplan.probes.drawing import host_state_kept, seed_all

SEED = 0


def num_elements(sample: Any, depth: int = 6) -> int:
    """How large a sample is: elements of its tensors and arrays, lengths of its texts, 1 for anything else.

    Goes ``depth`` levels into dicts, lists, tuples and objects.
    """
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, (str, bytes)):
        return len(sample)
    size = getattr(sample, "size", None)
    if isinstance(size, int):
        return size
    if isinstance(size, tuple) and all(isinstance(side, int) for side in size):  # an image's
        return math.prod(size)
    parts = _parts(sample) if depth else None
    return 1 if parts is None else sum(num_elements(part, depth - 1) for part in parts)


def _parts(sample: Any) -> Iterable[Any] | None:
    if isinstance(sample, Mapping):
        return sample.values()
    if isinstance(sample, (list, tuple)):
        return sample
    if dataclasses.is_dataclass(sample):
        return [getattr(sample, field.name, None) for field in dataclasses.fields(sample)]
    return vars(sample).values() if hasattr(sample, "__dict__") else None


def seed_everything() -> None:
    """The same random numbers from here on, whatever was drawn before."""
    seed_all(SEED)


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Afterwards the caller's random numbers, and torch's settings that a file may change, are what they were."""
    dtype, is_grad_enabled = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with host_state_kept():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(is_grad_enabled)
