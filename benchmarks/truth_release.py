"""What releases of torch before the one installed did otherwise, where it shows in a published number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

EAGER_CONTEXT_BYTES = 1343 * 2**20
FEWER_INTERMEDIATES = 20230710  # github.com/pytorch/pytorch/pull/104780 and 104898, between torch 2.0 and 2.1


@dataclass(frozen=True)
class Release:
    """A release of torch, and the day of a nightly build (0: none)."""

    version: tuple[int, int]
    nightly: int = 0
    cuda: int = 124  # as in the name of the build: 124 is CUDA 12.4

    @classmethod
    def of(cls, text: str) -> Release:
        """What a record says: "2.1.0.dev20230623+cu118", "1.12 + cu113", ">=2.1"; a recent one where it says none."""
        found = re.search(r"\b(\d)\.(\d+)", text)
        nightly = re.search(r"dev(\d{8})", text)
        version = (int(found[1]), int(found[2])) if found else (2, 6)
        cuda = re.search(r"cu(\d{3})", text)
        return cls(version, int(nightly[1]) if nightly else 0, int(cuda[1]) if cuda else 124)

    @property
    def has_foreach_by_default(self) -> bool:
        """Optimizers take the foreach implementation on CUDA since torch 2.0."""
        return self.version >= (2, 0)

    @property
    def has_fused_attention(self) -> bool:
        """scaled_dot_product_attention came with torch 2.0; before, models had the scores in memory."""
        return self.version >= (2, 0)

    @property
    def has_denominator(self) -> bool:
        """Adam's foreach step made a list of its own of the second moments' root plus epsilon."""
        return self.version <= (2, 0) or 0 < self.nightly < FEWER_INTERMEDIATES

    @property
    def least_context_bytes(self) -> int:
        """What a CUDA context and all kernels took in this release; since CUDA 11.7 kernels are loaded lazily.

        Measured on a V100 before a model was loaded: docs/source/en/perf_train_gpu_one.mdx of huggingface/transformers.
        """
        return 0 if self.cuda >= 117 else EAGER_CONTEXT_BYTES

    @contextmanager
    def optimizers(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, ``optimizer.step()`` allocates what it did in this release."""
        if not (self.has_denominator and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)):
            yield
            return
        original, held = torch._foreach_add_, []

        def add(tensors: list[Tensor], *args: Any, **kwargs: Any) -> None:
            if isinstance(args[0], float):  # epsilon: the only float that Adam adds
                held.append([torch.empty_like(tensor) for tensor in tensors])
            else:
                original(tensors, *args, **kwargs)

        handle = optimizer.register_step_post_hook(lambda *_: held.clear())
        with mock.patch.object(torch, "_foreach_add_", add):
            yield
        handle.remove()
