"""CUDA's autocast lists in place of the CPU's, for a trace on CPU tensors.

Source: "Autocast Op Reference" in PyTorch's documentation of torch.amp. Which operators CUDA's autocast touches
at all is asked from the installed torch, whose CPU-only build answers too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

# fmt: off
LOWER_PRECISION = frozenset({
    "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "addmv",
    "addr", "chain_matmul", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell",
    "linalg_multi_dot", "lstm_cell", "mv", "rnn_relu_cell", "rnn_tanh_cell",
})
PROMOTE = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
    "tensordot", "vdot",
})
SET_DTYPE = frozenset({
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "prod", "softmax", "sum",
})
# fmt: on
BANNED = frozenset({"binary_cross_entropy"})
# In the words of aten/src/ATen/autocast_mode.cpp.
BAN = """torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.
Many models use a sigmoid layer right before the binary cross entropy layer.
In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits
or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are
safe to autocast."""
aten = torch.ops.aten
# CUDA's kernels write the fp32 result straight from the lower-precision input; the CPU would copy it first.
FUSED_CAST = {"softmax": aten._softmax.default, "log_softmax": aten._log_softmax.default}

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_HALVES = (torch.float16, torch.bfloat16)
_cached: dict[int, tuple[Tensor, Tensor]] = {}  # a weight's id: the weight, its lower-precision copy


def install(library: Library) -> None:
    """Give the CPU's autocast key the behaviour of CUDA's, for as long as ``library`` lives."""
    on_cuda = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    on_cpu = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))
    # Both name these, but on the CPU everything becomes fp32.
    differing = {name for name in on_cuda & on_cpu if _packet(name) in PROMOTE | SET_DTYPE | BANNED}
    for name in sorted(on_cuda - on_cpu | differing):
        operator = _overload(name)
        if operator is not None:
            library.impl(operator, _policy(name, operator), "AutocastCPU")
    for name in sorted(on_cpu - on_cuda):
        operator = _overload(name)
        if operator is not None:
            library.impl(operator, fallthrough_kernel, "AutocastCPU")


def _fused(operator: Any) -> Callable[..., Any]:
    def kernel(tensor: Tensor, dim: int, half_to_float: bool) -> Any:
        return operator(tensor.float() if half_to_float else tensor, dim, False)

    return kernel


def _fused_backward(operator: Any) -> Callable[..., Any]:
    def kernel(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        return operator(grad, out, dim, out.dtype).to(input_dtype)

    return kernel


# For the recorder: what the CPU refuses to do in one operator, its temporaries unseen.
KERNELS: dict[Any, Callable[..., Any]] = {
    **{operator: _fused(operator) for operator in FUSED_CAST.values()},
    **{
        operator: _fused_backward(operator)
        for operator in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
    },
}


def _packet(name: str) -> str:
    return name.removeprefix("aten::").partition(".")[0]


def _overload(name: str) -> Any:
    overload = name.partition(".")[2] or "default"
    return getattr(getattr(aten, _packet(name), None), overload, None)


def _policy(name: str, operator: Any) -> Callable[..., Any]:
    packet = _packet(name)
    if packet in BANNED:
        return _banned
    if packet in LOWER_PRECISION:
        return _casting(operator, lambda values: torch.get_autocast_dtype("cpu"))
    if packet in PROMOTE:
        return _casting(operator, _widest)
    if packet in SET_DTYPE:
        return _setting_dtype(operator, FUSED_CAST.get(packet))
    return _casting(operator, lambda values: torch.float32)


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(BAN)


def _casting(operator: Any, choose: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            dtype = choose(list(_eligible(args)))
            return operator(*_cast(args, dtype), **{key: _cast(value, dtype) for key, value in kwargs.items()})

    return kernel


def _setting_dtype(operator: Any, fused: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            given = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
            if given or not any(True for _ in _eligible(args)):
                return operator(*args, **kwargs)
            if fused is not None and args[0].dtype in _HALVES and len(args) >= 2:
                return fused(args[0], args[1], True)
            return operator(*args, **{**kwargs, "dtype": torch.float32})

    return kernel


def _eligible(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.dtype != torch.float64:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _eligible(value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        wanted = value.is_floating_point() and value.dtype not in (torch.float64, dtype)
        return _copy(value, dtype) if wanted else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value as ``dtype``; of a weight one copy for the whole region, as ``cached_cast`` in ATen keeps it."""
    is_weight = value.requires_grad and value.is_leaf and not value._is_view() and value.dtype == torch.float32
    if not (is_weight and dtype == torch.get_autocast_dtype("cpu") and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    if id(value) not in _cached:
        _cached[id(value)] = (value, value.to(dtype))
    return _cached[id(value)][1]


@contextmanager
def cache_of_weights() -> Iterator[None]:
    """Inside, the copies of weights die with PyTorch's own cache, at the end of the outermost region."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _cached.clear()
        clear()

    with mock.patch.object(torch, "clear_autocast_cache", clear_both):
        try:
            yield
        finally:
            _cached.clear()


def _widest(values: list[Tensor]) -> torch.dtype:
    is_wide = any(value.dtype == torch.float32 for value in values)
    return torch.float32 if is_wide else torch.get_autocast_dtype("cpu")
