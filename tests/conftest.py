"""What tests of the simulator share: a way to trace any function, and model.py files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradplan.probes.simulator import attention, autocast
from gradplan.probes.simulator.building import fake_models
from gradplan.probes.simulator.semantics import CublasWorkspace, cuda_semantics
from gradplan.probes.simulator.trace import Recorder, Trace, steady_garbage
from gradplan.probes.workload import Workload, load_workload

A100 = (8, 0)


@pytest.fixture(autouse=True)
def _files_of_a_test_are_forgotten(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The next test may load another model.py."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, folder = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(folder):
            del sys.modules[name]


@pytest.fixture
def traced() -> Callable[..., Trace]:
    """``traced(function)``: what it would ask of a GPU's allocator, on fake tensors or on real ones."""

    def trace(function: Callable[[], object], capability: tuple[int, int] = A100, is_real: bool = False) -> Trace:
        kernels = {**autocast.KERNELS, **(attention.REAL_KERNELS if is_real else {})}
        recorder = Recorder(CublasWorkspace(capability), kernels)
        with cuda_semantics(capability, not is_real), steady_garbage():
            with nullcontext() if is_real else fake_models(FakeTensorMode()), recorder:
                function()
            return recorder.trace()

    return trace


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func).removeprefix("aten.").partition(".")[0])
        return out


@pytest.fixture
def operators() -> Callable[..., list[str]]:
    """``operators(function)``: names of the operators that it runs on the GPU, in order."""

    def run(function: Callable[[], object], capability: tuple[int, int] = A100) -> list[str]:
        with cuda_semantics(capability), fake_models(FakeTensorMode()), _Log() as log:
            function()
        return log.names

    return run


@pytest.fixture
def on_cpu() -> Callable[..., list[str]]:
    """``on_cpu(function)``: names of the operators that it runs as things stand, with nothing replaced."""

    def run(function: Callable[[], object]) -> list[str]:
        with FakeTensorMode(), _Log() as log:
            function()
        return log.names

    return run


@pytest.fixture
def workload(tmp_path: Path) -> Callable[[str], Workload]:
    """``workload(text)``: a model.py of that text, loaded."""

    def load(text: str) -> Workload:
        path = tmp_path / f"model{len(list(tmp_path.glob('*.py')))}.py"
        path.write_text(text)
        return load_workload(str(path))

    return load
