"""An accelerator that is described in a file, for tests: real steps on the CPU, with invented accounts of memory."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from gradplan.probes.errors import UsageError
from gradplan.probes.evidence import Device, Frozen
from gradplan.probes.measuring.device_memory import INVENTED, BaseMemory, Peaks
from gradplan.probes.measuring.messages import Hello, Start

GIB = 2**30
OUT_OF_MEMORY: dict[str, Callable[[], BaseException]] = {
    "cuda": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"
    ),
    "cuda-late": lambda: torch.AcceleratorError("CUDA error: out of memory"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "hip": lambda: torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
    "xpu": lambda: torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
    "mps": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GiB, other allocations: 1.00 GiB"),
    "host": MemoryError,
}
OPERATOR_LIMIT = "nonzero is not supported for tensors with more than INT_MAX elements, See https://github.com/pytorch/pytorch/issues/51871"
MOST_BYTES = 2**60
Bytes = Field(default=0, ge=0, le=MOST_BYTES)
From = Field(default=None, ge=1)


class Invented(Frozen):
    """A device on which a micro-batch of n samples needs ``fixed_bytes + n * bytes_per_sample``, and besides

    ``optimizer_bytes`` from the first optimizer step on, and ``gradient_bytes`` under all but the first micro-batch of
    a window; and never less than ``floor_bytes``. The last ``context_bytes`` and ``other_bytes`` of ``total_bytes`` are
    the driver's and another process's.

    ``hint`` is the largest size as a prediction has it, None without one. ``reports_peaks`` is false for a device that
    only raises, ``raises`` for one that spills into the host's memory. Every need wavers by up to ``jitter_percent``.
    ``unfit`` are sizes that do not fit although larger ones do. ``out_of_memory`` says in whose words it raises; with
    ``is_sticky``, everything after fails too. From these sizes on, ``operator_limit`` refuses, ``retries_from`` makes
    the allocator retry, ``hangs_from`` never ends, ``killed_from`` kills the process, ``bug_from`` is a bug of the
    user's. ``leaks_bytes`` stay in use after each trial.
    """

    name: str = "invented device"
    total_bytes: int = Field(gt=0, le=MOST_BYTES)
    bytes_per_sample: float = Field(gt=0, le=MOST_BYTES)
    fixed_bytes: int = Bytes
    optimizer_bytes: int = Bytes
    gradient_bytes: int = Bytes
    floor_bytes: int = Bytes
    context_bytes: int = Bytes
    other_bytes: int = Bytes
    leaks_bytes: int = Bytes
    hint: int | None = From
    reports_peaks: bool = True
    raises: bool = True
    jitter_percent: float = Field(default=0, ge=0, lt=100)
    unfit: tuple[int, ...] = ()
    out_of_memory: Literal["cuda", "cuda-late", "cublas", "hip", "xpu", "mps", "host"] = "cuda"
    is_sticky: bool = False
    operator_limit: int | None = From
    retries_from: int | None = From
    hangs_from: int | None = From
    killed_from: int | None = From
    bug_from: int | None = From
    seconds_per_sample: float = Field(default=0, ge=0)
    seconds_per_micro_batch: float = Field(default=0, ge=0)

    def needed_bytes(self, size: int, has_state: bool = True, has_gradients: bool = True) -> int:
        extra_bytes = has_state * self.optimizer_bytes + has_gradients * self.gradient_bytes
        return max(self.floor_bytes, self.fixed_bytes + round(size * self.bytes_per_sample) + extra_bytes)

    def predicted_bytes(self, size: int, growth: float, limit_bytes: int) -> float:
        """As ``needed_bytes``, by somebody who takes ``hint`` for the largest that fits; ``growth`` corrects that."""
        resident_bytes = self.fixed_bytes + self.optimizer_bytes + self.gradient_bytes
        per_sample = (limit_bytes - resident_bytes) / (self.hint or 1)
        return max(self.floor_bytes, resident_bytes + growth * size * per_sample)


def read_device(path: str) -> Invented:
    """The device of that file.

    Raises:
        UsageError: there is none.
    """
    try:
        return Invented.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"{INVENTED}{path}: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        unknown = first["type"] == "extra_forbidden"
        problem = f"no such key; there are {', '.join(Invented.model_fields)}" if unknown else first["msg"]
        raise UsageError(f"{INVENTED}{path}: {where}: {problem}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{INVENTED}{path} is not JSON: {error}") from None


class InventedMemory(BaseMemory):
    """What the child of a trial sees of it; its tensors are the CPU's."""

    device = torch.device("cpu")

    def __init__(self, invented: Invented, start: Start) -> None:
        super().__init__(start)
        self._invented = invented
        self._limit_bytes = 0
        self._peak_bytes = 0
        self._num_windows = 0
        self._num_retries = 0
        self._leaked_bytes = 0
        self._late: BaseException | None = None
        self._is_broken = False

    def hello(self) -> Hello:
        invented = self._invented
        total_bytes = min(invented.total_bytes, self._start.memory_bytes or invented.total_bytes)
        return Hello(
            device=Device(name=invented.name, total_bytes=total_bytes, slug=self._start.device),
            context_bytes=invented.context_bytes,
            limit_bytes=self.limit_bytes(),
            has_peaks=invented.reports_peaks,
        )

    def left_bytes(self) -> int:
        invented = self._invented
        left_bytes = invented.total_bytes - invented.context_bytes - invented.other_bytes
        asked_bytes = self._start.memory_bytes or invented.total_bytes
        return max(0, min(left_bytes, asked_bytes - invented.context_bytes))

    def limit_bytes(self) -> int:
        return self._within_fraction(super().limit_bytes(), self._invented.total_bytes)

    @contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        self._limit_bytes, self._peak_bytes, self._num_windows, self._num_retries = limit_bytes, 0, 0, 0
        yield
        self._leaked_bytes += self._invented.leaks_bytes if self._num_windows else 0

    def peaks(self) -> Peaks:
        if not self._invented.reports_peaks:
            return Peaks()
        return Peaks(self._peak_bytes, self._peak_bytes, self._num_retries)

    def in_use_bytes(self) -> int:
        return self._leaked_bytes

    def synchronize(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            raise late

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        self._num_windows += 1
        numbers = count()

        def run_and_account(model: Any, batch: Any, *arguments: Any) -> Any:
            self._account(_batch_size(batch), next(numbers))
            return run(model, batch, *arguments)

        return run_and_account

    def _account(self, size: int, number: int) -> None:
        invented = self._invented
        if self._is_broken:
            raise OUT_OF_MEMORY[invented.out_of_memory]()
        time.sleep(invented.seconds_per_micro_batch + size * invented.seconds_per_sample)
        self._misbehave(size)
        needed_bytes = invented.needed_bytes(size, self._num_windows > 1, number > 0) + self._leaked_bytes
        needed_bytes += round(needed_bytes * invented.jitter_percent / 100 * _noise(size, self._num_windows, number))
        if invented.raises and (needed_bytes > self._limit_bytes or size in invented.unfit):
            self._run_out()
        self._peak_bytes = max(self._peak_bytes, needed_bytes)

    def _misbehave(self, size: int) -> None:
        def reaches(first: int | None) -> bool:
            return first is not None and size >= first

        if reaches(self._invented.hangs_from):
            time.sleep(10**6)
        if reaches(self._invented.killed_from):
            os.kill(os.getpid(), signal.SIGKILL)
        if reaches(self._invented.operator_limit):
            raise RuntimeError(OPERATOR_LIMIT)
        if reaches(self._invented.bug_from):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")
        self._num_retries += reaches(self._invented.retries_from)

    def _run_out(self) -> None:
        self._is_broken = self._invented.is_sticky
        error = OUT_OF_MEMORY[self._invented.out_of_memory]()
        if self._invented.out_of_memory != "cuda-late":
            raise error
        self._late = error


def _batch_size(batch: Any) -> int:
    """As the model sees it."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 1)


def _noise(size: int, window: int, number: int) -> float:
    """From -1 to 1, and the same in every run."""
    return (size * 7919 + window * 104729 + number * 1299709) % 2001 / 1000 - 1
