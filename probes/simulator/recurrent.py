"""Recurrent layers as one cuDNN call each, in place of the CPU's operator for every time step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

# An estimate: cuDNN does not publish the size of its reserve. Backward needs each gate's activation, the cell
# state and the layer's output: this many times the hidden size for a time step, a sample, a layer, a direction.
SAVED = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}


def install(library: Library) -> None:
    """Replace LSTM, GRU and RNN on fake tensors for as long as ``library`` lives."""
    for name, num_saved in SAVED.items():
        library.impl(f"{name}.input", _layer(num_saved), "AutogradCPU")


def _layer(factor: int) -> Callable[..., tuple[Tensor, ...]]:
    def layer(
        input: Tensor,
        states: Tensor | list[Tensor],
        weights: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        hidden, cell = (states, None) if isinstance(states, Tensor) else states
        widest = hidden if cell is None else cell  # an LSTM's hidden state may be projected
        num_saved = factor * widest.size(-1) * widest.size(0) if train else 0
        out, hidden, cell = _cudnn_rnn(num_saved, batch_first, bidirectional, input, hidden, cell, *weights)
        return (out, hidden) if cell is None else (out, hidden, cell)

    return layer


class _CudnnRnn(torch.autograd.Function):
    """Allocates what cuDNN does: outputs and a reserve forward; gradients, the weights' in one buffer, backward.

    ``num_saved`` elements of the input's type are reserved for each time step of each sample.
    """

    @staticmethod
    def forward(
        ctx: Any,
        num_saved: int,
        batch_first: bool,
        bidirectional: bool,
        input: Tensor,
        hidden: Tensor,
        cell: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        steps = (input.transpose(0, 1) if batch_first else input).contiguous()
        width = hidden.size(-1) * (2 if bidirectional else 1)
        out = steps.new_empty(*steps.shape[:-1], width)
        reserve = steps.new_empty(steps.numel() // steps.size(-1) * num_saved)
        ctx.save_for_backward(input, hidden, cell, out, reserve, *weights)
        ctx.batch_first = batch_first
        states = (torch.empty_like(hidden), None if cell is None else torch.empty_like(cell))
        return (out.transpose(0, 1) if batch_first else out), *states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        input, hidden, cell, _, _, *weights = ctx.saved_tensors
        steps = (input.transpose(0, 1) if ctx.batch_first else input).contiguous()
        grad_input = torch.empty_like(steps)
        flat = steps.new_empty(sum(weight.numel() for weight in weights))
        pieces = torch.split(flat, [weight.numel() for weight in weights])
        return (
            None,
            None,
            None,
            grad_input.transpose(0, 1) if ctx.batch_first else grad_input,
            torch.empty_like(hidden),
            None if cell is None else torch.empty_like(cell),
            *(piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)),
        )


_cudnn_rnn: Callable[..., Any] = _CudnnRnn.apply
