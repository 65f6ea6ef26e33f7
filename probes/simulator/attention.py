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
        if _takes_flash(query, key, value, attn_mask, capability):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if _takes_efficient(query, key, value, enable_gqa):
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


def _takes_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, capability: tuple[int, int]) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == key.dim() == value.dim() == 4
        and query.size(-1) == key.size(-1) == value.size(-1) <= MAX_FLASH_HEAD_SIZE
    )


def _takes_efficient(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and query.dim() == key.dim() == value.dim() == 4
        and query.size(-1) == key.size(-1)
        and not enable_gqa
        and query.size(-2) > 0
        and key.size(-2) > 0
    )


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
    return out.transpose(1, 2).contiguous().transpose(1, 2), logsumexp, seed, seed.clone()


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
    grads = (scores @ key * factor, scores.mT @ query * factor, probabilities.mT @ grad)
    return (*grads, scores if bias is not None and needs[3] else None)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Any:
    scores = query @ key.mT * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype).triu(1)
    return scores.softmax(-1)


REAL_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
