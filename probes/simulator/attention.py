"""Which attention kernel CUDA takes, and what it allocates: no kernel but the math one materialises the scores.

Source: the order and the conditions of sdp_utils in PyTorch (flash, then memory-efficient, then math) and its
documentation of scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
MAX_FLASH_HEAD_SIZE = 256


def attention_for(capability: tuple[int, int]) -> Callable[..., Any]:
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
        if _takes_flash(query, key, value, attn_mask, is_causal, enable_gqa, capability):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if _takes_efficient(query, key, value, enable_gqa, capability):
            bias = None if attn_mask is None else _aligned(_as_bias(attn_mask, query.dtype), query, key)
            needs_grad = torch.is_grad_enabled() and any(
                tensor.requires_grad for tensor in (query, key, value, *((bias,) if bias is not None else ()))
            )
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def _takes_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    capability: tuple[int, int],
) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == key.dim() == value.dim() == 4
        and query.size(-1) == key.size(-1) == value.size(-1) <= MAX_FLASH_HEAD_SIZE
        and query.size(0) == key.size(0) == value.size(0)
        and (enable_gqa or query.size(1) == key.size(1) == value.size(1))
        and not (is_causal and query.size(-2) != key.size(-2))
    )


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, capability: tuple[int, int]) -> bool:
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and (query.dtype in (torch.float32, torch.float16) or (query.dtype == torch.bfloat16 and capability >= (8, 0)))
        and query.dim() == key.dim() == value.dim() == 4
        and query.size(-1) == key.size(-1)
        and query.size(-1) % _alignment(query.dtype, capability) == 0
        and value.size(-1) % _alignment(query.dtype, capability) == 0
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and not enable_gqa
        and query.size(-2) > 0
        and key.size(-2) > 0
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


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    needs_logsumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The memory-efficient kernel's outputs from real CPU tensors (no dropout: only the sizes must be right)."""
    out = _probabilities(query, key, bias, is_causal, scale) @ value
    rows = math.ceil(query.size(2) / 32) * 32 if needs_logsumexp else 0
    logsumexp = query.new_zeros(query.size(0), query.size(1), rows, dtype=torch.float32)
    seed = torch.zeros((), dtype=torch.long)
    return _by_position(out), logsumexp, seed, seed.clone()


def efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    needs: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`efficient_forward`: dS = P * (dO V' - sum(dO * O)), as in the FlashAttention paper."""
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    probabilities = _probabilities(query, key, bias, is_causal, scale)
    scores = probabilities * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    of_query, of_key, of_value = scores @ key * factor, scores.mT @ query * factor, probabilities.mT @ grad
    of_bias = scores if bias is not None and needs[3] else None
    return _by_position(of_query), _by_position(of_key), _by_position(of_value), of_bias


def _by_position(tensor: Tensor) -> Tensor:
    """(batch, heads, length, size) laid out as (batch, length, heads, size): which copies follow depends on it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The flash kernel's outputs from real CPU tensors (no dropout: only the sizes must be right)."""
    out = _probabilities(query, _for_each_head(key, query), None, is_causal, scale) @ _for_each_head(value, query)
    logsumexp = query.new_zeros(query.shape[:3], dtype=torch.float32)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    out = torch.empty_like(query).copy_(out)  # in the query's layout, as the kernel does
    return out, logsumexp, None, None, query.size(2), key.size(2), seed, offset, query.new_zeros(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`flash_forward`; heads that share a key add theirs up."""
    is_causal = rest[5]
    keys, values = _for_each_head(key, query), _for_each_head(value, query)
    needs = [True, True, True, False]
    of_query, of_keys, of_values, _ = efficient_backward(
        grad, query, keys, values, None, out, logsumexp, out, out, 0.0, needs, is_causal, scale=scale
    )
    return (
        torch.empty_like(query).copy_(of_query),
        torch.empty_like(key).copy_(of_keys.unflatten(1, (key.size(1), -1)).sum(2)),
        torch.empty_like(value).copy_(of_values.unflatten(1, (value.size(1), -1)).sum(2)),
    )


def _for_each_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.size(1) // tensor.size(1), 1)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Any:
    scores = query @ key.mT * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype).triu(1)
    return scores.softmax(-1)


REAL_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
