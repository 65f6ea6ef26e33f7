"""CUDA's attention kernels on real CPU tensors, for steps that read values.

They compute what the kernels do and give storages of the same sizes. There is no dropout: only sizes must be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


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
    """The memory-efficient kernel's outputs."""
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
    """Gradients of :func:`efficient_forward`."""
    of_query, of_key, of_value, of_scores = _gradients(grad, query, key, value, out, bias, is_causal, scale)
    of_bias = of_scores if bias is not None and needs[3] else None
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
    """The flash kernel's outputs."""
    out = _shared(query, key, value, None, is_causal, scale)
    logsumexp = query.new_zeros(query.shape[:3], dtype=torch.float32)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, logsumexp, None, None, query.size(2), key.size(2), seed, offset, query.new_zeros(0)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Gradients of :func:`flash_forward`; heads that share a key add theirs up."""
    return _shared_gradients(grad, query, key, value, out, None, rest[5], options.get("scale"))


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    needs_logsumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """cuDNN's outputs."""
    out = _shared(query, key, value, bias, is_causal, scale)
    logsumexp = query.new_zeros(*query.shape[:3], 1, dtype=torch.float32)
    seed = torch.zeros((), dtype=torch.long)
    return out, logsumexp, None, None, query.size(2), key.size(2), seed, seed.clone(), None


def cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, ...]:
    """Gradients of :func:`cudnn_forward`."""
    return _shared_gradients(grad, query, key, value, out, rest[2], rest[8], options.get("scale"))


def _shared(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """The output in the query's layout; several queries' heads may share a key's."""
    out = _probabilities(query, _for_each_head(key, query), bias, is_causal, scale) @ _for_each_head(value, query)
    return torch.empty_like(query).copy_(out) if out.shape == query.shape else _by_position(out)


def _shared_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    keys, values = _for_each_head(key, query), _for_each_head(value, query)
    of_query, of_keys, of_values, _ = _gradients(grad, query, keys, values, out, bias, is_causal, scale)
    return (
        torch.empty_like(query).copy_(of_query),
        torch.empty_like(key).copy_(of_keys.unflatten(1, (key.size(1), -1)).sum(2)),
        torch.empty_like(value).copy_(of_values.unflatten(1, (value.size(1), -1)).sum(2)),
    )


def _for_each_head(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.size(1) // tensor.size(1), 1)


def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of query, key, value and scores: dS = P * (dO V' - sum(dO * O)), as in the FlashAttention paper."""
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    probabilities = _probabilities(query, key, bias, is_causal, scale)
    scores = probabilities * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    return scores @ key * factor, scores.mT @ query * factor, probabilities.mT @ grad, scores


def _probabilities(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Any:
    scores = query @ key.mT * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype).triu(1)
    return scores.softmax(-1)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}
