"""Where a published script is played: on fake tensors, with what CUDA does put in place, every storage noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from truth_release import Release

from gradplan.probes.simulator import autocast
from gradplan.probes.simulator.allocator import Peaks
from gradplan.probes.simulator.building import as_fake, fake_models
from gradplan.probes.simulator.segments import CachingAllocator
from gradplan.probes.simulator.semantics import CublasWorkspace, cuda_semantics
from gradplan.probes.simulator.trace import Recorder, Trace, steady_garbage
from gradplan.probes.simulator.training import optimizer_steps


@dataclass(frozen=True)
class Recording:
    """A trace, and how many of its events came before the peaks were reset (0: they never were)."""

    trace: Trace
    num_events_before: int = 0

    def peaks(self) -> Peaks:
        """The most bytes allocated since the reset, and reserved at all; nothing limits them."""
        allocator = CachingAllocator()
        handles: list[int] = []
        for number, event in enumerate(self.trace.events):
            if number == self.num_events_before:
                allocator.peak_allocated_bytes = allocator.allocated_bytes
            if event >= 0:
                handles.append(allocator.allocate(self.trace.sizes[event]))
            else:
                allocator.free(handles[~event])
        return Peaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


class Stage:
    """What a script plays on. A tensor that it makes lies on the device; what it builds in ``built`` on the host."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode, collect: Callable[[], None], release: Release) -> None:
        self.recorder = recorder
        self.collect = collect  # what Python's garbage collector would have freed by now
        self.num_events_before = 0
        self._mode = mode
        self._release = release

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        """A model in host memory, without memory; where its construction reads values, built and converted."""
        with self.recorder.paused():
            try:
                return build()
            except (DataDependentOutputException, RuntimeError):
                with unset_fake_temporarily():
                    model = build()
                return as_fake(model, self._mode)

    def moved(self, build: Callable[[], nn.Module]) -> nn.Module:
        """A model as ``build().to(device)`` leaves it."""
        model = self.built(build)
        self.recorder.adopt_module(model)
        return model

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, ``optimizer.step()`` may read scalars, and allocates as its release did."""
        with optimizer_steps(self.recorder, optimizer), self._release.optimizers(optimizer):
            yield

    def reset_peaks(self) -> None:
        """As ``torch.cuda.reset_peak_memory_stats()``."""
        self.num_events_before = len(self.recorder.events)


def play(script: Callable[[Stage], None], capability: tuple[int, int], release: Release | None = None) -> Recording:
    """The births and deaths of storages while ``script`` runs on a GPU of ``capability``, on a release of torch."""
    release = release or Release.of(torch.__version__)
    recorder = Recorder(CublasWorkspace(capability, release.version), autocast.KERNELS)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with cuda_semantics(capability), steady_garbage() as collect, fake_models(mode), recorder:
        stage = Stage(recorder, mode, collect, release)
        script(stage)
    return Recording(recorder.trace(), stage.num_events_before)


def images(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """New pixels on the device."""
    return torch.empty(shape, dtype=dtype)


def integers(*shape: int) -> Tensor:
    """New labels or tokens on the device."""
    return torch.empty(shape, dtype=torch.int64)
