"""Which attention kernel CUDA takes, and what it allocates: no kernel but the math one materialises the scores.

Source: the order and the conditions in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (on Hopper and
data-centre Blackwell cuDNN first; then flash, memory-efficient, math) and PyTorch's documentation of
scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gradplan.probes.simulator import attention_on_cpu

aten = torch.ops.aten
Capability = tuple[int, int]
MAX_FLASH_HEAD_SIZE = 256
HALVES = (torch.float16, torch.bfloat16)
TORCH: Any = torch.__version__


class Call(NamedTuple):
    """What chooses the kernel. Queries, keys and values are (batch, heads, length, size of a head)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_grad(self) -> bool:
        """Whether a backward may follow, which needs the log of the sums of exponentials."""
        tensors = (self.query, self.key, self.value, self.mask)
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def is_plain(self, *dtypes: torch.dtype) -> bool:
        """What every fused kernel asks for: one type of these, four dimensions of the same batch, rows in one piece."""
        tensors = (self.query, self.key, self.value)
        return (
            self.query.dtype in dtypes
            and all(tensor.dtype == self.query.dtype and tensor.dim() == 4 for tensor in tensors)
            and all(tensor.size(0) == self.query.size(0) and tensor.stride(-1) == 1 for tensor in tensors)
            and self.query.size(-1) == self.key.size(-1)
            and self.query.size(-2) > 0
            and self.key.size(-2) > 0
            and (self.enable_gqa or self.query.size(1) == self.key.size(1) == self.value.size(1))
        )


def attention_for(capability: Capability) -> Callable[..., Any]:
    """A kernel for ``aten::scaled_dot_product_attention`` that allocates what a GPU of ``capability`` would."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        options = (dropout_p, is_causal)
        if _takes_cudnn(call, capability):
            bias = None if attn_mask is None else _as_bias(attn_mask, query.dtype)
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, call.needs_grad, *options, False, scale=scale
            )[0]
        if _takes_flash(call, capability):
            return _flash(query, key, value, *options, scale)
        if _takes_efficient(call, capability):
            bias = None if attn_mask is None else _aligned(_as_bias(attn_mask, query.dtype), query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, call.needs_grad, *options, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, *options, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def _takes_cudnn(call: Call, capability: Capability) -> bool:
    """cuDNN comes first on compute capability 9 and 10 from cuDNN 9.15.1 on; torch 2.13 comes with 9.20.

    Elsewhere it comes after kernels that take whatever it takes. Its dropout is in sixteenths.
    """
    if capability[0] not in (9, 10) or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return (
        call.is_plain(*HALVES)
        and not (is_deterministic and not torch.is_deterministic_algorithms_warn_only_enabled())
        and (call.mask is None or (not call.mask.requires_grad and call.mask.dim() in (2, 4)))
        and _has_cudnn_heads(call.query.size(-1), call.value.size(-1), call.needs_grad)
        and (call.dropout_p * 16).is_integer()
        and call.key.size(-2) > 1
        and not (call.dropout_p and call.query.size(-2) == 1)
    )


def _has_cudnn_heads(size: int, value_size: int, needs_grad: bool) -> bool:
    """Up to 128, or 192 with values of 128; torch 2.14 comes with a cuDNN (9.24) for more: 256 with a backward."""
    sizes = (size, value_size)
    if any(one % 8 for one in sizes):
        return False
    if max(sizes) <= 128 or sizes == (192, 128):
        return True
    return TORCH >= (2, 14) and (sizes == (256, 256) or (not needs_grad and max(sizes) <= 256))


def _takes_flash(call: Call, capability: Capability) -> bool:
    size = call.query.size(-1)
    # With a backward, these GPUs have too little shared memory for some heads.
    is_small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    is_too_wide = size > 192 and (size <= 224 or call.dropout_p > 0)
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and call.mask is None
        and call.is_plain(*HALVES)
        and size == call.value.size(-1) <= MAX_FLASH_HEAD_SIZE
        and not (is_small and is_too_wide and call.needs_grad)
        and not (call.is_causal and call.query.size(-2) != call.key.size(-2))
    )


def _takes_efficient(call: Call, capability: Capability) -> bool:
    dtypes = (torch.float32, torch.float16, *((torch.bfloat16,) if capability >= (8, 0) else ()))
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and call.is_plain(*dtypes)
        and not call.enable_gqa
        and call.query.size(-1) % _alignment(call.query.dtype, capability) == 0
        and call.value.size(-1) % _alignment(call.query.dtype, capability) == 0
    )


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Of which number of elements a head must be a multiple: 16 bytes where tensor cores serve the type."""
    if capability < (7, 0) or (capability < (8, 0) and dtype == torch.float32):
        return 1
    return 16 // dtype.itemsize


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    head_size = query.size(-1)
    scale = 1 / math.sqrt(head_size) if scale is None else scale
    if head_size % 8:
        query, key, value = (functional.pad(x, (0, 8 - head_size % 8)) for x in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head_size]


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    length = bias.size(-1)
    if length % 16:  # the kernel reads the bias in aligned pieces
        bias = functional.pad(bias, (0, 16 - length % 16))[..., :length]
    return bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))


REAL_KERNELS = attention_on_cpu.KERNELS  # for steps on real CPU tensors
