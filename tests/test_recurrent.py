"""A recurrent layer is one call with a reserve kept for backward, as cuDNN makes it, not an operator a time step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradplan.probes.simulator.recurrent import SAVED
from gradplan.probes.simulator.semantics import cuda_semantics
from gradplan.probes.simulator.trace import Trace

Traced = Callable[..., Trace]
STEPS, BATCH, INPUT, HIDDEN = 6, 3, 8, 16
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
NUM_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def layer_of(kind: str, **options: Any) -> nn.RNNBase:
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind.removeprefix("rnn_")
    return KINDS[kind](INPUT, HIDDEN, **options)


def trained(kind: str, steps: int = STEPS, is_training: bool = True, **options: Any) -> Callable[[], None]:
    def run() -> None:
        layer = layer_of(kind, **options).train(is_training)
        output, _ = layer(torch.randn(steps, BATCH, INPUT, requires_grad=True))
        output.backward(torch.ones_like(output))

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_forward_keeps_a_reserve_of_each_gate_at_each_step_of_each_sample(kind: str, traced: Traced) -> None:
    sizes = traced(trained(kind)).sizes
    reserve_bytes = SAVED[kind] * HIDDEN * STEPS * BATCH * 4
    assert sizes.count(reserve_bytes) == 1
    assert sizes.count(STEPS * BATCH * HIDDEN * 4) == 2, "the output and its gradient"


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"num_layers": 3}, 3 * SAVED["lstm"] + 2),  # the outputs of the lower two
        ({"bidirectional": True}, 2 * SAVED["lstm"]),
        ({"num_layers": 2, "bidirectional": True}, 2 * (2 * SAVED["lstm"] + 1)),
    ],
)
def test_the_reserve_counts_layers_and_directions(options: dict[str, Any], factor: int, traced: Traced) -> None:
    assert factor * HIDDEN * STEPS * BATCH * 4 in traced(trained("lstm", **options)).sizes


@pytest.mark.parametrize(
    ("kind", "num_parameters", "reserve"), [(nn.LSTM, 3_034_880, 736e6), (nn.GRU, 2_276_160, 864e6)]
)
def test_the_reserve_is_as_large_as_cudnn_said(
    kind: type[nn.RNNBase], num_parameters: int, reserve: float, traced: Traced
) -> None:
    """A comment in pytorch/pytorch#2895, on a P100. The number of parameters there tells the layers' sizes."""

    def run() -> None:
        layer = kind(123, 320, 4)
        assert sum(parameter.numel() for parameter in layer.parameters()) == num_parameters
        layer(torch.randn(500, 50, 123))[0].sum().backward()

    assert int(reserve) in traced(run).sizes


@pytest.mark.parametrize("kind", KINDS)
def test_backward_makes_the_weights_gradients_in_one_buffer(kind: str, traced: Traced) -> None:
    num_weights = NUM_GATES[kind] * HIDDEN * (INPUT + HIDDEN + 2)
    assert traced(trained(kind)).sizes.count(num_weights * 4) == 1


def test_the_reserve_lives_until_backward_has_passed(traced: Traced) -> None:
    trace = traced(trained("lstm"))
    reserve = trace.sizes.index(SAVED["lstm"] * HIDDEN * STEPS * BATCH * 4)
    grads = trace.sizes.index(4 * HIDDEN * (INPUT + HIDDEN + 2) * 4)
    assert trace.events.index(reserve) < trace.events.index(grads) < trace.events.index(~reserve)


def test_evaluation_keeps_no_reserve(traced: Traced) -> None:
    assert SAVED["lstm"] * HIDDEN * STEPS * BATCH * 4 not in traced(trained("lstm", is_training=False)).sizes


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_allocations_does_not_grow_with_the_sequence(kind: str, traced: Traced) -> None:
    assert len(traced(trained(kind, steps=5)).sizes) == len(traced(trained(kind, steps=50)).sizes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"bidirectional": True}, {"num_layers": 2, "dropout": 0.5}, {"bias": False}]
)
def test_shapes_and_gradients_are_those_of_torch(kind: str, options: dict[str, Any], traced: Traced) -> None:
    def shapes() -> list[object]:
        layer = layer_of(kind, **options)
        inputs = torch.randn(STEPS, BATCH, INPUT, requires_grad=True)
        output, states = layer(inputs)
        (output.sum() + sum(state.sum() for state in (states if isinstance(states, tuple) else [states]))).backward()
        tensors = [output, *(states if isinstance(states, tuple) else [states])]
        grads = [inputs.grad, *(parameter.grad for parameter in layer.parameters())]
        return [(tensor.shape, tensor.dtype) for tensor in (*tensors, *grads) if tensor is not None]

    simulated: list[object] = []
    traced(lambda: simulated.extend(shapes()))
    assert simulated == shapes()


def test_a_projected_lstm_has_a_smaller_output(traced: Traced) -> None:
    assert STEPS * BATCH * 5 * 4 in traced(trained("lstm", proj_size=5)).sizes


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_layer_runs_on_what_autocast_made(kind: str, traced: Traced) -> None:
    kept: list[Tensor] = []

    def run() -> None:
        before, layer = nn.Linear(INPUT, INPUT), layer_of(kind)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = layer(before(torch.randn(STEPS, BATCH, INPUT)))
        output.float().sum().backward()
        kept.extend(parameter.grad for parameter in (*before.parameters(), *layer.parameters()))

    assert SAVED[kind] * HIDDEN * STEPS * BATCH * 2 in traced(run).sizes
    assert {grad.dtype for grad in kept} == {torch.float32}


def test_under_autocast_each_call_copies_the_weights(traced: Traced) -> None:
    """aten/src/ATen/cudnn/AutocastRNN.cpp: no cache, unlike for other layers; the gradients are in one buffer."""

    def run() -> None:
        layer, inputs = nn.LSTM(24, 40), torch.randn(3, 2, 24)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(inputs)[0] + layer(inputs)[0]
        output.float().sum().backward()

    sizes = traced(run).sizes
    assert sizes.count(4 * 40 * 40 * 2) == 2, "the larger weight's copy"
    assert sizes.count(4 * 40 * (24 + 40 + 2) * 2) == 2, "all gradients"


@pytest.mark.parametrize("kind", KINDS)
def test_real_layers_compute_as_ever(kind: str) -> None:
    """A step that reads values runs on real tensors, whose values must be right."""
    torch.manual_seed(0)
    layer, inputs = layer_of(kind), torch.randn(STEPS, BATCH, INPUT)
    expected, _ = layer(inputs)
    with cuda_semantics((8, 0), are_fake=False):
        actual, _ = layer(inputs)
    torch.testing.assert_close(actual, expected)
