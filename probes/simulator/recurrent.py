"""Recurrent layers as one cuDNN call each, in place of the CPU's operator for every time step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

# How often the hidden size is kept for backward for a time step, a sample, a layer, a direction; layers below the
# last keep their output as well. From the sizes that cuDNN asked for in pytorch/pytorch#2895: 736,000,000 bytes for
# an LSTM and 864,000,000 for a GRU of 4 layers of 320 over 25,000 time steps of samples. For RNNs an estimate.
SAVED = {"lstm": 5, "gru": 6, "rnn_tanh": 2, "rnn_relu": 2}


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
        if torch.is_autocast_enabled("cpu"):
            input, hidden, cell, *weights = (_lower(tensor) for tensor in (input, hidden, cell, *weights))
        widest = hidden if cell is None else cell  # an LSTM's hidden state may be projected
        num_directions = 2 if bidirectional else 1
        num_saved = (factor * num_layers + num_layers - 1) * num_directions * widest.size(-1) if train else 0
        out, hidden, cell = _cudnn_rnn(num_saved, batch_first, bidirectional, input, hidden, cell, *weights)
        return (out, hidden) if cell is None else (out, hidden, cell)

    return layer


def _lower(tensor: Tensor | None) -> Any:
    """As aten/src/ATen/cudnn/AutocastRNN.cpp casts inputs, states and, anew for each call, the weights."""
    return tensor if tensor is None else tensor.to(torch.get_autocast_dtype("cpu"))


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
