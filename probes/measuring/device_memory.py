"""What a trial asks of a device's memory: how much is left, how much was used at most, and to keep to a limit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gradplan.probes.evidence import Device
from gradplan.probes.measuring.host_memory import growth_limited, peak_resident_bytes, resident_bytes
from gradplan.probes.measuring.messages import Hello, Start
from gradplan.probes.simulator.allocator_settings import settings_of_environment
from gradplan.probes.simulator.catalogue import CONTEXT_BYTES_PER_MULTIPROCESSOR, UNKNOWN_CONTEXT_BYTES

MAPPED_FACTOR = 2  # an LSTM of oneDNN was seen to map two thirds more than it touches
SLACK_BYTES = 256 * 2**20  # mapped and never touched: stacks of threads, the allocator's spare room
INVENTED = "test:"


@dataclass(frozen=True)
class Peaks:
    """The most that was in use, and that the allocator held, since a limit was set; None where nobody counts it."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    num_retries: int = 0


class DeviceMemory(Protocol):
    """One device's memory, as this process sees it."""

    device: torch.device
    is_host: bool

    def hello(self) -> Hello:
        """What the device is; said when the file is loaded."""
        ...

    def limit_bytes(self) -> int:
        """What tensors of this process may take in all, with nothing cached: what is really free, less the headroom."""
        ...

    def limited(self, limit_bytes: int) -> AbstractContextManager[None]:
        """Inside, an allocation beyond fails where the device can be told so. Peaks are counted from here on."""
        ...

    def peaks(self) -> Peaks: ...

    def in_use_bytes(self) -> int:
        """By tensors, now."""
        ...

    def synchronize(self) -> None: ...

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` as it is, for the micro-batches of one window; an invented device does its accounts around it."""
        ...


def open_device(start: Start) -> DeviceMemory:
    """The device of a child process, its context created.

    Raises:
        UsageError: there is no such file, or PyTorch would refuse the environment's settings of its allocator.
    """
    if start.device.startswith(INVENTED):
        from gradplan.probes.measuring.invented import InventedMemory, read_device

        return InventedMemory(read_device(start.device.removeprefix(INVENTED)), start)
    device = torch.device(start.device)
    if device.type == "cpu":
        return HostMemory(start)
    return MpsMemory(start) if device.type == "mps" else AcceleratorMemory(device, start)


class BaseMemory:
    """What all devices have in common."""

    is_host = False

    def __init__(self, start: Start) -> None:
        self._start = start

    def left_bytes(self) -> int:
        """What tensors may take without any headroom."""
        raise NotImplementedError

    def limit_bytes(self) -> int:
        return math.floor(max(0, self.left_bytes()) * (1 - self._start.headroom_percent / 100))

    def _within_fraction(self, limit_bytes: int, total_bytes: int) -> int:
        """No more than the environment lets PyTorch's allocator take of the device."""
        settings, _ = settings_of_environment(total_bytes)
        return min(limit_bytes, math.floor(total_bytes * settings.per_process_memory_fraction))

    def watched(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run

    def in_use_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass


class HostMemory(BaseMemory):
    """The CPU's: all that this process holds in RAM, beyond what it held when the file was loaded.

    A process holds on to its peak: it is good for one trial.
    """

    is_host = True
    device = torch.device("cpu")

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        assert start.memory_bytes is not None, "the CPU is given an amount of memory"
        self._total_bytes = start.memory_bytes
        self._context_bytes = 0

    def hello(self) -> Hello:
        self._context_bytes = resident_bytes()
        device = Device(name="CPU of this machine", total_bytes=self._total_bytes, slug="cpu")
        return Hello(device=device, context_bytes=self._context_bytes, limit_bytes=self.limit_bytes())

    def left_bytes(self) -> int:
        return max(0, self._total_bytes - self._context_bytes)

    @contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        with growth_limited(MAPPED_FACTOR * self.left_bytes() + SLACK_BYTES):
            yield

    def peaks(self) -> Peaks:
        return Peaks(reserved_bytes=peak_resident_bytes() - self._context_bytes)


class AcceleratorMemory(BaseMemory):
    """A GPU's through PyTorch's caching allocator: NVIDIA's, AMD's (which torch calls cuda too) and Intel's."""

    def __init__(self, device: torch.device, start: Start) -> None:
        super().__init__(start)
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        torch.accelerator.set_device_index(index)
        torch.empty(1, device=self.device)  # creates the context
        self._module: Any = torch.get_device_module(self.device)
        self._properties = self._module.get_device_properties(self.device)
        self._num_retries = 0

    def hello(self) -> Hello:
        total_bytes = self._total_bytes
        if self._start.memory_bytes is not None:
            total_bytes = min(total_bytes, self._start.memory_bytes)
        capability = self._module.get_device_capability(self.device) if self._is_cuda else None
        return Hello(
            device=Device(name=self._properties.name, total_bytes=total_bytes, slug=self._start.device),
            context_bytes=self._context_bytes,
            limit_bytes=self.limit_bytes(),
            capability=capability,
        )

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda" and torch.version.hip is None

    @property
    def _context_bytes(self) -> int:
        """Estimated: what the device reports as free is without it already."""
        multiprocessors = getattr(self._properties, "multi_processor_count", None)
        return (multiprocessors or 0) * CONTEXT_BYTES_PER_MULTIPROCESSOR or UNKNOWN_CONTEXT_BYTES

    def left_bytes(self) -> int:
        gc.collect()
        torch.accelerator.empty_cache()
        left_bytes = self._free_bytes() + torch.accelerator.memory_reserved(self.device)
        if self._start.memory_bytes is None:
            return left_bytes
        return max(0, min(left_bytes, self._start.memory_bytes - self._context_bytes))

    def limit_bytes(self) -> int:
        return self._within_fraction(super().limit_bytes(), self._total_bytes)

    @property
    def _total_bytes(self) -> int:
        return int(self._properties.total_memory)

    def _free_bytes(self) -> int:
        """Of all processes; some of Intel's drivers do not tell, and then it is what this one does not hold."""
        try:
            return torch.accelerator.get_memory_info(self.device)[0]
        except RuntimeError:
            return self._total_bytes - torch.accelerator.memory_reserved(self.device) - self._context_bytes

    @contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        torch.accelerator.reset_peak_memory_stats(self.device)
        self._num_retries = self._count_retries()
        self._module.set_per_process_memory_fraction(min(1.0, limit_bytes / self._total_bytes), self.device)
        yield

    def _count_retries(self) -> int:
        return int(torch.accelerator.memory_stats(self.device).get("num_alloc_retries", 0))

    def peaks(self) -> Peaks:
        allocated_bytes = torch.accelerator.max_memory_allocated(self.device)
        reserved_bytes = torch.accelerator.max_memory_reserved(self.device)
        return Peaks(allocated_bytes, reserved_bytes, self._count_retries() - self._num_retries)

    def in_use_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self.device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


class MpsMemory(BaseMemory):
    """Apple's: the driver says how much it holds now, nobody how much it held at most."""

    device = torch.device("mps")

    def hello(self) -> Hello:
        total_bytes = self._start.memory_bytes or torch.mps.recommended_max_memory()
        device = Device(name="GPU of this machine (MPS)", total_bytes=total_bytes, slug="mps")
        return Hello(device=device, context_bytes=0, limit_bytes=self.limit_bytes(), has_peaks=False)

    def left_bytes(self) -> int:
        gc.collect()
        torch.mps.empty_cache()
        most_bytes = torch.mps.recommended_max_memory()
        return min(most_bytes, self._start.memory_bytes or most_bytes)

    @contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        torch.mps.set_per_process_memory_fraction(limit_bytes / torch.mps.recommended_max_memory())
        yield

    def peaks(self) -> Peaks:
        return Peaks()

    def in_use_bytes(self) -> int:
        return torch.mps.current_allocated_memory()

    def synchronize(self) -> None:
        torch.mps.synchronize()
