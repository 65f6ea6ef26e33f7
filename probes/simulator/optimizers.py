"""What torch's optimizers do on CUDA, on CPU tensors. Source: torch/optim of the installed torch.

- ``foreach`` is the default (``_default_to_fused_or_foreach`` in torch/optim/optimizer.py), and takes temporaries of
  all parameters at once where the for-loop takes those of one.
- ``capturable=True`` is allowed (``_get_capturable_supported_devices``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils


@contextmanager
def defaults_of_cuda() -> Iterator[None]:
    """Inside, torch's optimizers treat the CPU as they treat CUDA."""
    supported: Any = [*optimizer._foreach_supported_types, FakeTensor]
    with ExitStack() as stack:
        patch: Callable[..., Any] = mock.patch.object
        stack.enter_context(patch(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"]))
        stack.enter_context(patch(optimizer, "_foreach_supported_types", supported))
        stack.enter_context(patch(_foreach_utils, "_foreach_supported_types", [Tensor, FakeTensor]))
        for module in _importing("_get_capturable_supported_devices"):
            stack.enter_context(patch(module, "_get_capturable_supported_devices", lambda **_: ["cuda", "cpu"]))
        yield


def _importing(name: str) -> list[Any]:
    """torch's optimizers' modules that have ``name``, each as a variable of its own."""
    modules = [module for key, module in sys.modules.items() if key.startswith("torch.optim.")]
    return [module for module in modules if hasattr(module, name)]
