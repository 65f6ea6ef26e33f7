"""What CUDA does where the CPU differs, put in place of the CPU's behaviour while a step is traced.

Each row of this file is one such difference; how much memory it is worth stands beside its source.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.library import Library

from gradplan.probes.simulator import attention, autocast, optimizers, recurrent, scratch

aten = torch.ops.aten

# aten/src/ATen/cuda/CublasHandlePool.cpp. pytorch/pytorch#95668: 8519680 bytes stay allocated after one Linear.
# cuBLAS' own advice is 32 MiB from Hopper on (docs.nvidia.com/cuda/cublas, cublasSetWorkspace); PyTorch follows it on
# Blackwell since pytorch/pytorch#175344 (before torch 2.13), on compute capability 11 since #189312 (before 2.14).
# cuBLASLt shares this workspace, or has 1 MiB of its own, which is not counted.
CUBLAS_WORKSPACE_BYTES = 8_519_680
LARGE_CUBLAS_WORKSPACE_BYTES = 32 * 2**20
LARGE_SINCE = {9: (2, 0), 10: (2, 13), 11: (2, 14), 12: (2, 13)}

_MATRIX_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addmv.default,
        aten.mv.default,
    }
)


def _of_one_type(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtypes = list(dict.fromkeys(arg.dtype for arg in args if isinstance(arg, Tensor)))
        if len(dtypes) > 1:
            first, second = (str(dtype).removeprefix("torch.") for dtype in dtypes[:2])
            raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {first} and {second}")
        return operator(*args, **kwargs)

    return kernel


# For the recorder: fake tensors would multiply matrices of different types, which no device does.
KERNELS = {operator: _of_one_type(operator) for operator in _MATRIX_PRODUCTS}


class CublasWorkspace:
    """Scratch memory of a matrix product, kept for good: one for each thread's handle.

    The forward pass and autograd's device thread have a handle each: Liger-Kernel's published peaks of a bf16
    Linear and its loss (A100, benchmark/data/all_benchmark_data.csv) leave exactly 2 x 8,519,680 bytes.
    """

    def __init__(self, capability: tuple[int, int], version: Any = torch.__version__) -> None:
        since = LARGE_SINCE.get(capability[0])
        is_large = since is not None and version >= since
        self.num_bytes = LARGE_CUBLAS_WORKSPACE_BYTES if is_large else CUBLAS_WORKSPACE_BYTES
        self._threads: set[bool] = set()

    def __call__(self, operator: Any) -> int | None:
        """Bytes to allocate and keep for ``operator``, the first time a thread multiplies matrices."""
        if operator not in _MATRIX_PRODUCTS:
            return None
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward in self._threads:
            return None
        self._threads.add(in_backward)
        return self.num_bytes


def dropout(tensor: Tensor, p: float, train: bool) -> Any:
    """CUDA's fused dropout keeps a mask of one byte an element; the CPU's keeps one of the tensor's type."""
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype)
    return aten.native_dropout(tensor, p, train)[0]


@contextmanager
def cuda_semantics(capability: tuple[int, int], are_fake: bool = True) -> Iterator[Callable[[], bool]]:
    """CPU tensors behave as CUDA's would inside: kernels, autocast, optimizers' defaults.

    ``torch.compile`` runs eagerly inside; gives a function that says whether it was called. Recurrent layers are
    replaced on fake tensors only: their kernel here allocates and computes nothing.
    """
    with ExitStack() as stack:
        library = Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            library.impl("dropout", dropout, "AutogradCPU")
            library.impl("scaled_dot_product_attention", attention.attention_for(capability), "AutogradCPU")
            autocast.install(library)
            scratch.install(library)
            if are_fake:
                recurrent.install(library)
            else:
                library.impl("lstm.input", lstm_without_onednn, "AutogradCPU")
        stack.enter_context(optimizers.defaults_of_cuda())
        stack.enter_context(_autocast_on_this_device())
        stack.enter_context(autocast.cache_of_weights())
        yield stack.enter_context(eager())


def lstm_without_onednn(*args: Any) -> Any:
    """oneDNN's LSTM reserves more than CUDA's, and knows no bf16 on many CPUs; its convolutions stay."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return aten.lstm.input.decompose(*args)
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


@contextmanager
def eager() -> Iterator[Callable[[], bool]]:
    """``torch.compile`` returns the function itself; what was compiled before runs eagerly.

    Gives a function that says whether anything was or would have been compiled.

    Dynamo, whose import takes as long as torch's, is asked only where the user's file has loaded it already.
    """

    calls = []

    def as_it_is(model: Any = None, **_: Any) -> Any:
        calls.append(model)
        return (lambda function: function) if model is None else model

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", as_it_is))
        in_place = stack.enter_context(mock.patch.object(nn.Module, "compile", return_value=None))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield lambda: bool(calls) or in_place.called


@contextmanager
def _autocast_on_this_device() -> Iterator[None]:
    """``torch.autocast("cuda")`` in the user's forward means the traced device."""
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    with mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", init):
        yield
