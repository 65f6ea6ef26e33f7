"""What a trial asks of an accelerator, with torch's functions replaced by ones of the same signatures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from gradplan.probes.errors import UsageError
from gradplan.probes.evidence import Precision
from gradplan.probes.measuring import device_memory
from gradplan.probes.measuring.device_memory import AcceleratorMemory, HostMemory, MpsMemory, Peaks, open_device
from gradplan.probes.measuring.messages import Start

GIB, MIB = 2**30, 2**20
TOTAL = 24 * GIB
CONTEXT = 4 * MIB * 128
OTHERS = 3 * GIB  # another process's


class Gpu:
    """Torch's view of one, as far as memory goes; ``limits`` are the fractions that it was given."""

    def __init__(self) -> None:
        self.reserved, self.allocated, self.peak, self.retries = 0, 0, 0, 0
        self.cached = 0
        self.limits: list[float] = []
        self.log: list[str] = []

    def module(self) -> Any:
        properties = SimpleNamespace(name="A card", total_memory=TOTAL, multi_processor_count=128)

        def keep(fraction: float, device: Any = None) -> None:
            assert isinstance(fraction, float)  # torch refuses anything else
            assert 0 <= fraction <= 1
            assert torch.device(device).index == 1
            self.limits.append(fraction)

        return SimpleNamespace(
            get_device_properties=create_autospec(torch.cuda.get_device_properties, return_value=properties),
            get_device_capability=create_autospec(torch.cuda.get_device_capability, return_value=(8, 9)),
            set_per_process_memory_fraction=create_autospec(
                torch.cuda.set_per_process_memory_fraction, side_effect=keep
            ),
        )

    def empty_cache(self) -> None:
        self.reserved, self.cached = self.reserved - self.cached, 0

    def info(self, _: Any) -> tuple[int, int]:
        return TOTAL - CONTEXT - OTHERS - self.reserved, TOTAL

    def stats(self, _: Any) -> dict[str, int]:
        return {"num_alloc_retries": self.retries}

    def reset(self, _: Any) -> None:
        self.peak = self.reserved


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    functions = {
        "set_device_index": lambda index: gpu.log.append(f"device {index}"),
        "empty_cache": gpu.empty_cache,
        "get_memory_info": gpu.info,
        "memory_reserved": lambda _: gpu.reserved,
        "memory_allocated": lambda _: gpu.allocated,
        "memory_stats": gpu.stats,
        "max_memory_allocated": lambda _: gpu.peak - MIB,
        "max_memory_reserved": lambda _: gpu.peak,
        "reset_peak_memory_stats": gpu.reset,
        "synchronize": lambda _: gpu.log.append("synchronized"),
    }
    for name, function in functions.items():
        monkeypatch.setattr(
            torch.accelerator, name, create_autospec(getattr(torch.accelerator, name), side_effect=function)
        )
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu.module())
    monkeypatch.setattr(torch, "empty", lambda *_, **__: gpu.log.append("context"))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return gpu


def start(device: str = "cuda:1", precision: Precision = "32-true", **changes: Any) -> Start:
    return Start(model="model.py", device=device, parent_pid=1, precision=precision, **changes)


def opened(**changes: Any) -> AcceleratorMemory:
    memory = open_device(start(**changes))
    assert isinstance(memory, AcceleratorMemory)
    return memory


def test_the_context_is_created_on_that_device_before_free_memory_is_read(gpu: Gpu) -> None:
    opened()
    assert gpu.log == ["device 1", "context"]


def test_the_limit_is_what_is_really_free_less_the_headroom(gpu: Gpu) -> None:
    hello = opened(headroom_percent=5.0).hello()
    assert hello.limit_bytes == int((TOTAL - CONTEXT - OTHERS) * 0.95)
    assert (hello.device.name, hello.device.total_bytes, hello.device.slug) == ("A card", TOTAL, "cuda:1")
    assert hello.context_bytes == CONTEXT
    assert hello.capability == (8, 9)
    assert hello.has_peaks


def test_what_this_process_holds_already_is_its_own_and_what_is_cached_is_free(gpu: Gpu) -> None:
    memory = opened()
    free = memory.limit_bytes()
    gpu.reserved, gpu.cached = 5 * GIB, 2 * GIB
    assert memory.limit_bytes() == free
    assert gpu.reserved == 3 * GIB


def test_memory_that_was_given_has_the_context_in_it_and_is_never_more_than_is_free(gpu: Gpu) -> None:
    given = opened(memory_bytes=8 * GIB)
    assert given.hello().device.total_bytes == 8 * GIB
    assert given.limit_bytes() == 8 * GIB - CONTEXT
    assert opened(memory_bytes=80 * GIB).limit_bytes() == TOTAL - CONTEXT - OTHERS
    assert opened(memory_bytes=CONTEXT // 2).limit_bytes() == 0


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_fraction_in_the_environment_is_kept_to(gpu: Gpu, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "per_process_memory_fraction:0.25")
    assert opened(headroom_percent=5.0).limit_bytes() == TOTAL // 4
    monkeypatch.setenv(variable, "per_process_memory_fraction:7")
    with pytest.raises(UsageError, match=variable):
        opened().limit_bytes()


def test_the_allocator_is_held_to_the_limit_and_peaks_count_from_there(gpu: Gpu) -> None:
    memory = opened()
    gpu.peak, gpu.retries = 20 * GIB, 3
    with memory.limited(6 * GIB):
        assert gpu.limits == [0.25]
        gpu.peak = max(gpu.peak, 5 * GIB)
        assert memory.peaks() == Peaks(5 * GIB - MIB, 5 * GIB, 0)
        gpu.retries = 5
        assert memory.peaks().num_retries == 2


def test_a_driver_that_does_not_tell_what_is_free_is_taken_at_its_total(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> tuple[int, int]:
        raise RuntimeError("The device (Intel) doesn't support querying its available free memory.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    gpu.reserved = GIB
    assert opened().limit_bytes() == TOTAL - CONTEXT


def test_late_errors_are_waited_for(gpu: Gpu) -> None:
    opened().synchronize()
    assert gpu.log[-1] == "synchronized"


def test_apples_gpu_is_limited_and_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    functions = {"recommended_max_memory": lambda: 16 * GIB, "empty_cache": lambda: None}
    for name, function in functions.items():
        monkeypatch.setattr(torch.mps, name, function)
    monkeypatch.setattr(
        torch.mps,
        "set_per_process_memory_fraction",
        create_autospec(torch.mps.set_per_process_memory_fraction, side_effect=fractions.append),
    )
    memory = open_device(start("mps", headroom_percent=50.0))
    assert isinstance(memory, MpsMemory)
    hello = memory.hello()
    assert (hello.limit_bytes, hello.has_peaks) == (8 * GIB, False)
    with memory.limited(hello.limit_bytes):
        assert fractions == [0.5]
        assert memory.peaks() == Peaks(None, None, 0)


def test_on_the_cpu_the_context_is_what_was_resident_when_the_file_was_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_memory, "resident_bytes", lambda: 200 * MIB)
    monkeypatch.setattr(device_memory, "peak_resident_bytes", lambda: 500 * MIB)
    memory = open_device(start("cpu", memory_bytes=GIB, headroom_percent=50.0))
    assert isinstance(memory, HostMemory)
    assert memory.hello().limit_bytes == (GIB - 200 * MIB) // 2
    assert memory.peaks() == Peaks(None, 300 * MIB, 0)
