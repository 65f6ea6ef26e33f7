"""Whether a user's loss runs a backward of its own: such a file has no joint form."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from gradplan.probes import step


@contextmanager
def own_backwards() -> Iterator[Callable[[], int]]:
    """Gives a function that says how many backwards the user's code has run inside.

    Not counted are those of the training step, and what runs inside another backward (a reentrant checkpoint).
    """
    original, depth, count = torch.autograd.backward, 0, 0

    def counting(*args: Any, **kwargs: Any) -> None:
        nonlocal depth, count
        count += depth == 0 and _caller() != step.__file__
        depth += 1
        try:
            original(*args, **kwargs)
        finally:
            depth -= 1

    with mock.patch.object(torch.autograd, "backward", counting):
        yield lambda: count


def _caller() -> str:
    """The file that called backward, past torch's own methods."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame.f_code.co_filename
