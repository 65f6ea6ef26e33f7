"""Memory that CUDA's kernels take for the length of one call, and the CPU's do not.

The kernels are torch's own, wrapped: what they allocate besides their outputs is born after these and dies on return.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional

aten = torch.ops.aten
Sizes = Callable[..., "list[int]"]
WIDEST_HALF = 2  # bytes: types up to here are summed in fp32


def install(library: Library) -> None:
    """Let backward kernels allocate on fake or real CPU tensors as CUDA's do, for as long as ``library`` lives."""
    for name, sizes in OF_ATTENTION.items():
        library.impl(name, _with_scratch(getattr(aten, name).default, sizes), "AutogradCPU")
    library.impl("embedding_dense_backward", _embedding_backward, "AutogradCPU")


def _with_scratch(operator: Any, sizes: Sizes) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            raise NotImplementedError(f"derivative for {operator.name()} is not implemented")  # as torch says
        with torch._C._AutoDispatchBelowAutograd():
            out = operator(*args, **kwargs)
        _allocate_for_a_moment(sizes(*args))
        return out

    return kernel


def _allocate_for_a_moment(sizes: list[int]) -> None:
    scratch = [torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in sizes]
    del scratch


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def flash_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> list[int]:
    """mha_bwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: softmax_d, dq_accum, both fp32.

    Where queries share a key, the keys' and values' gradients of each query's head too: dk_expanded, dv_expanded.
    """
    batch, heads, length, size = query.shape
    rows = batch * heads * _multiple(length, 128)
    shared = key.size(1) != heads
    expanded = batch * key.size(2) * heads * size * query.element_size()
    return [rows * 4, rows * _multiple(size, 32 if size <= 128 else 64) * 4, *([expanded] * 2 if shared else [])]


def efficient_backward(grad: Tensor, query: Tensor, *_: Any) -> list[int]:
    """delta and workspace_gq of mem_eff_attention/kernel_backward.h (in torch's own headers), both fp32.

    The blocks' sizes are those of kernels/cutlassB.h for sm80. Heads above 128 take some 10 MiB more, left out.
    """
    batch, heads, length, size = query.shape
    wide = 64 if size <= 64 else 128
    columns = wide if query.element_size() <= WIDEST_HALF and size <= 128 else 64
    blocks = batch * heads * math.ceil(length / wide) * math.ceil(size / columns)
    return [batch * heads * length * 4, blocks * (wide * columns * 4 + 16)]


def cudnn_backward(grad: Tensor, query: Tensor, *_: Any) -> list[int]:
    """dQ_accum, fp32, in cudnn-frontend's node/scaled_dot_product_flash_attention.h, since cuDNN 9.0.

    What the plan itself takes is not published; its softmax_sum is counted, as the other kernels have it.
    """
    batch, heads, length, size = query.shape
    return [batch * heads * length * 4, batch * heads * length * size * 4]


OF_ATTENTION: dict[str, Sizes] = {
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


def embedding_backward(grad: Tensor, indices: Tensor) -> list[int]:
    """embedding_dense_backward_cuda in Embedding.cu, then embedding_backward_cuda_kernel.

    Two sorted copies of the indices, where each row's part begins, and a sum for each part, fp32 for 16-bit types.
    A part is up to 10 equal indices, so there are at most as many as indices: that many are counted, which keeps
    every size linear in the batch. Up to 3072 indices another kernel takes nothing; they are counted alike, so that
    small batches have the events of large ones.
    """
    num_indices, each = indices.numel(), indices.element_size()
    part = grad.size(-1) * max(4, grad.element_size())
    return [num_indices * each] * 6 + [num_indices * part]


class _EmbeddingBackward(torch.autograd.Function):
    """The gradient of an embedding's weight, which a gradient penalty differentiates once more."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, indices: Tensor, *options: Any) -> Any:
        ctx.save_for_backward(indices)
        with torch._C._AutoDispatchBelowAutograd():
            out = aten.embedding_dense_backward.default(grad, indices, *options)
        _allocate_for_a_moment(embedding_backward(grad, indices))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        return functional.embedding(indices, grads[0]), None, None, None, None


_embedding_backward: Callable[..., Any] = _EmbeddingBackward.apply
