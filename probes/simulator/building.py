"""Models without memory: built under FakeTensorMode where that works, else built for real and converted."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_modes: weakref.WeakSet[FakeTensorMode] = weakref.WeakSet()


def new_mode() -> FakeTensorMode:
    """A mode of its own for each run, in which real tensors may appear."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _modes.add(mode)
    return mode


def are_fakes_left() -> bool:
    """Whether somebody kept a fake tensor, which keeps its mode, since the last answer."""
    are_left = len(_modes) > 0
    _modes.clear()
    return are_left


def own_copy(model: nn.Module) -> nn.Module:
    """A copy to train: what the file built on import, once, stays as it is. The model itself where it has no copy."""
    with suppress(Exception):
        return copy.deepcopy(model)
    return model


def is_fake(model: nn.Module) -> bool:
    """Whether the model was built without memory, all of it."""
    return all(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers()))


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy with fake parameters and buffers; tied ones stay tied. In place where the model has no copy."""
    fakes: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, FakeTensor):
            fakes[id(tensor)] = mode.from_tensor(tensor)
            fakes[id(tensor)].__dict__.update(tensor.__dict__)  # marks that a file's build_optimizer looks for
    with suppress(Exception):
        return copy.deepcopy(model, fakes)
    return as_fake(model, mode)


def as_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The same modules with fake parameters and buffers in place of the real ones; tied ones stay tied."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = mode.from_tensor(tensor)
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    tensors[name] = fake(tensor)  # type: ignore[assignment]
    return model


@contextmanager
def fake_models(mode: FakeTensorMode) -> Iterator[None]:
    """``mode``, in which modules can also be built, converted and copied as users do.

    Fake parameters cannot be swapped (``model.to(dtype)`` fails), copying one reads memory that is not there,
    and some initialisers ask for values. None of it matters to the sizes of storages.
    """
    with ExitStack() as stack:
        patch: Callable[..., Any] = mock.patch.object
        stack.enter_context(patch(torch.utils, "swap_tensors", _take_data))
        stack.enter_context(patch(Tensor, "__deepcopy__", _copied))
        stack.enter_context(patch(nn.Parameter, "__deepcopy__", _copied))
        stack.enter_context(patch(nn.init, "trunc_normal_", _untouched))
        # What fails is reported by whoever catches it, once and with the user's line.
        stack.enter_context(patch(logging.getLogger(FakeTensorMode.__module__), "disabled", True))
        stack.enter_context(mode)
        yield


def _take_data(old: Tensor, new: Tensor) -> None:
    old.data = new.data


def _untouched(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _copied(self: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(self) not in memo:
        copy = self.detach().clone(memory_format=torch.preserve_format)
        is_parameter = isinstance(self, nn.Parameter)
        memo[id(self)] = (
            nn.Parameter(copy, self.requires_grad) if is_parameter else copy.requires_grad_(self.requires_grad)
        )
    return memo[id(self)]  # type: ignore[no-any-return]
