"""Births and deaths of storages while a step runs, on fake tensors or on real ones.

A trace is what the caching allocator would have been asked to do: ``events`` holds i for the birth of storage i
and ~i for its death, ``sizes`` the bytes of each storage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE_OF = torch.ops.prim.device.default


class Birth(NamedTuple):
    """How a storage came about. ``kind`` is empty where only the moment tells what it is.

    ``module`` is the path of the innermost module that was running forward; ``step`` and ``micro_batch`` count
    from 1, and are 0 before the first.
    """

    kind: str
    moment: str
    module: str
    step: int
    micro_batch: int


PARAMETERS, BATCH, WORKSPACES, GRADIENTS, STATE = (
    "parameters and buffers",
    "batch",
    "workspaces of kernels",
    "gradients",
    "optimizer state",
)
BUILD, FORWARD, BACKWARD, OPTIMIZER_STEP, EVALUATION = (
    "building",
    "forward",
    "backward",
    "optimizer step",
    "evaluation",
)


@dataclass(frozen=True)
class Trace:
    """What one run asked of the allocator, in order.

    ``trained`` names the parameters that got a gradient; ``own_backwards`` counts those that the user's code ran;
    ``is_compiled`` says that ``torch.compile`` was called, and did nothing; ``has_sparse_fakes``, that
    gradients were sparse, which have no elements on fake tensors. ``births`` says of each storage how it came about.
    """

    events: tuple[int, ...]
    sizes: tuple[int, ...]
    births: tuple[Birth, ...] = field(default=(), compare=False, repr=False)
    trained: frozenset[str] = field(default=frozenset(), compare=False)
    own_backwards: int = field(default=0, compare=False)
    is_compiled: bool = field(default=False, compare=False)
    has_sparse_fakes: bool = field(default=False, compare=False)

    @property
    def peak_live_bytes(self) -> int:
        """The largest sum of storages alive at once, before any rounding by an allocator."""
        live = peak = 0
        for event in self.events:
            live += self.sizes[event] if event >= 0 else -self.sizes[~event]
            peak = max(peak, live)
        return peak


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that knows which storage of the trace it watches."""

    __slots__ = ("index", "key", "num_bytes")
    index: int
    key: int
    num_bytes: int


Workspace = Callable[[Any], "int | None"]
Kernel = Callable[..., Any]


class Recorder(TorchDispatchMode):
    """Watches every operator below autograd and notes each storage's birth and death.

    ``workspace(operator)`` gives the bytes of scratch memory that the device allocates for it and keeps, or
    None. ``kernels`` replaces operators that have no kernel for the tensors at hand.
    """

    def __init__(self, workspace: Workspace | None = None, kernels: Mapping[Any, Kernel] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[int] = []
        self.sizes: list[int] = []
        self._alive: dict[int, _StorageRef] = {}
        self._births: list[Birth] = []
        self._workspace = workspace
        self._is_paused = False
        self.kernels = dict(kernels or {})
        self.moment = BUILD
        self.step = self.micro_batch = 0
        self.has_sparse_fakes = False
        self.modules: list[str] = []  # paths of those that are running, the innermost last

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked so often that a full dispatch would take a fifth of the time
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        for value in args:
            self._see(value)
        out = self.kernels.get(func, func)(*args, **(kwargs or {}))
        self._see(out)
        if self._workspace is not None and (num_bytes := self._workspace(func)) is not None:
            self._born(
                num_bytes, WORKSPACES
            )  # after the output, which PyTorch allocates before it asks for cuBLAS' handle
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is noted inside: for work on the host, whose memory is not the device's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def adopt(self, tensor: Tensor, kind: str) -> None:
        """Note a tensor that existed before: a parameter, a batch that has just been moved to the device."""
        self._see(tensor)
        self.mark(tensor, kind)

    def mark(self, tensor: Tensor, kind: str) -> None:
        """Say what a tensor is, where the moment of its birth does not tell."""
        for index in self._indexes(tensor):
            self._births[index] = self._births[index]._replace(kind=kind)

    def mark_on_host(self, tensor: Tensor) -> None:
        """Say that a tensor is no device's: it takes no memory there."""
        for index in self._indexes(tensor):
            self.sizes[index] = 0

    def begin_optimizer_step(self) -> None:
        """From here on, births are the optimizer's."""
        self.moment = OPTIMIZER_STEP
        self.modules.clear()

    def begin_micro_batch(self, moment: str = FORWARD) -> None:
        """From here on, births belong to the next micro-batch."""
        self.moment, self.micro_batch = moment, self.micro_batch + 1
        self.modules.clear()

    def adopt_module(self, module: nn.Module) -> None:
        """Parameters and buffers in the order in which ``module.to(device)`` moves them."""
        for child in module.children():
            self.adopt_module(child)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                self.adopt(tensor, PARAMETERS)

    def trace(self) -> Trace:
        """The trace so far."""
        births = tuple(self._births)
        return Trace(tuple(_in_order(self.events)), tuple(self.sizes), births, has_sparse_fakes=self.has_sparse_fakes)

    def _see(self, value: Any) -> None:
        if isinstance(value, Tensor):
            for part in _dense_parts(value):
                self._see_storage(part.untyped_storage())
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._see(item)

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if known is not None and known.num_bytes == num_bytes:
            return
        ref = _StorageRef(storage, self._died)
        ref.index, ref.key, ref.num_bytes = self._born(num_bytes), key, num_bytes
        if known is not None:
            self._died(known)  # resized in place: CUDA copies to the new memory, then gives the old back
        self._alive[key] = ref

    def _died(self, ref: _StorageRef) -> None:
        if self._alive.get(ref.key) is ref:
            del self._alive[ref.key]
            self.events.append(~ref.index)

    def _indexes(self, tensor: Tensor) -> Iterator[int]:
        for part in _dense_parts(tensor):
            known = self._alive.get(part.untyped_storage()._cdata)
            if known is not None:
                yield known.index

    def _born(self, num_bytes: int, kind: str = "") -> int:
        index = len(self.sizes)
        self.sizes.append(num_bytes)
        self.events.append(index)
        module = self.modules[-1] if self.modules else ""
        moment = self.moment if torch._C._current_graph_task_id() == -1 else BACKWARD
        self._births.append(Birth(kind, moment, module, self.step, self.micro_batch))
        return index


def _in_order(events: list[int]) -> Iterator[int]:
    """Deaths between two births sorted: a cache that is cleared at once frees by address, which varies."""
    deaths: list[int] = []
    for event in events:
        if event < 0:
            deaths.append(event)
        else:
            yield from sorted(deaths)
            deaths.clear()
            yield event
    yield from sorted(deaths)


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


@contextmanager
def steady_garbage() -> Iterator[Callable[[], None]]:
    """No collection by chance inside; gives a function that collects now, so that equal runs die equally."""
    was_enabled = gc.isenabled()
    gc.freeze()  # what is garbage already stays, too: a full collection takes as long as a small trace
    gc.disable()
    try:
        yield lambda: (gc.collect(), None)[1]
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
