"""A traced step holds what each of torch's optimizers keeps and takes on CUDA.

Facts: torch/optim of the installed torch. ``_init_group`` makes the states, ``_multi_tensor_*`` the temporaries of
all parameters at once, ``_single_tensor_*`` those of one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from gradplan.probes.errors import UserCodeError
from gradplan.probes.simulator.optimizers import defaults_of_cuda
from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.training import Setup, Tensors, trace_training
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
A100 = (8, 0)
ROWS, COLUMNS, NUM_WEIGHTS = 8, 1000, 3
WEIGHT_BYTES = ROWS * COLUMNS * 4
MARK_BYTES = 77
A_SAMPLE = 0.15  # the batch and its products, as a part of a weight
MODEL = """
import torch
from torch import nn

def build_model():
    return nn.ParameterList([nn.Parameter(torch.zeros(8, 1000)) for _ in range(3)])

def build_batch(n):
    return torch.randn(n, 8), torch.zeros(n, 77, dtype=torch.uint8)  # whose size tells where a window starts

def compute_loss(model, batch):
    return sum((batch[0] @ weight).mean() for weight in model)

def build_optimizer(model, lr):
    return torch.optim.OPTIMIZER
"""


def traced(workload: Load, optimizer: str, precision: str = "32-true", model: str = MODEL) -> Trace:
    job = workload(model.replace("OPTIMIZER", optimizer))
    return trace_training(Setup(job, precision, A100), Tensors.FAKE, 1, 1)


def weights_at_the_peak(trace: Trace, weight_bytes: int = WEIGHT_BYTES) -> float:
    """Live bytes at the peak as so many weights, the workspaces of cuBLAS apart."""
    return (trace.peak_live_bytes - 2 * 8_519_680) / weight_bytes


def kept(trace: Trace, size: int = WEIGHT_BYTES) -> int:
    """How many storages of that size are alive as the second window starts, its gradients not yet made."""
    starts = [index for index, num_bytes in enumerate(trace.sizes) if num_bytes == MARK_BYTES]
    so_far = trace.events[: trace.events.index(starts[1])]
    died = {~event for event in so_far if event < 0}
    return sum(1 for event in so_far if event >= 0 and event not in died and trace.sizes[event] == size)


ALL, ONE = NUM_WEIGHTS, 1
# Moments for each weight; temporaries inside step() with foreach, and with a for-loop.
FACTS = {
    "SGD()": (0, None, None),
    "SGD(momentum=0.9)": (1, 0, 0),
    "SGD(momentum=0.9, nesterov=True)": (1, 0, ONE),
    "SGD(momentum=0.9, weight_decay=0.1)": (1, ALL, ONE),  # _foreach_add of gradients and weights
    "SGD(maximize=True)": (0, ALL, 2 * ONE),  # the negative gradient; a Python name still holds the one before
    "Adam()": (2, ALL, 2 * ONE + ONE),  # _foreach_sqrt; the for-loop also divides it
    "Adam(amsgrad=True)": (3, ALL, 2 * ONE + ONE),
    "Adam(weight_decay=0.1)": (2, ALL, 2 * ONE + 2 * ONE),
    "AdamW()": (2, ALL, 2 * ONE + ONE),
    "AdamW(maximize=True)": (2, ALL, 2 * ONE + 2 * ONE),  # foreach: the negative gradient is gone before the root
    "Adagrad()": (1, 2 * ALL, 2 * ONE),  # the root, and the gradient times the rate
    "RMSprop()": (1, ALL, 2 * ONE),
    "RMSprop(momentum=0.9)": (2, ALL, 2 * ONE),
    "RMSprop(centered=True)": (2, ALL, 2 * ONE),
    "Adadelta()": (2, 2 * ALL, 3 * ONE),  # the root and the delta
    "Adamax()": (2, ALL, None),  # the absolute gradient
    "NAdam()": (2, ALL, 3 * ONE),
    "RAdam()": (2, ALL, 2 * ONE),
    "ASGD()": (1, ALL, None),
    "Rprop()": (2, ALL + 1.25, 3 * ONE),  # the signs; for one weight a comparison of one byte an element, a choice
}


@pytest.mark.parametrize("call", FACTS)
def test_by_default_a_step_holds_what_foreach_does(call: str, workload: Load) -> None:
    num_moments, temporaries, _ = FACTS[call]
    trace = traced(workload, call.replace("(", "(model.parameters(), lr=lr, "))
    assert kept(trace) == NUM_WEIGHTS * (1 + num_moments)
    if temporaries is not None:
        beyond = weights_at_the_peak(trace) - NUM_WEIGHTS * (2 + num_moments) - temporaries
        assert 0 <= beyond < A_SAMPLE


@pytest.mark.parametrize("call", [call for call, (_, foreach, loop) in FACTS.items() if None not in (foreach, loop)])
def test_without_foreach_a_step_holds_less(call: str, workload: Load) -> None:
    num_moments, _, loop = FACTS[call]
    trace = traced(workload, call.replace("(", "(model.parameters(), lr=lr, foreach=False, "))
    beyond = weights_at_the_peak(trace) - NUM_WEIGHTS * (2 + num_moments)
    assert 0 <= beyond <= loop + A_SAMPLE


@pytest.mark.parametrize(
    "call", ["SGD(momentum=0.9)", "Adam()", "Adam(amsgrad=True)", "AdamW(maximize=True)", "Adagrad()"]
)
def test_fused_takes_no_temporaries(call: str, workload: Load) -> None:
    """Documentation of torch.optim: the fused implementation does the whole step in one kernel."""
    trace = traced(workload, call.replace("(", "(model.parameters(), lr=lr, fused=True, "))
    num_moments = FACTS[call][0]
    beyond = weights_at_the_peak(trace) - NUM_WEIGHTS * (2 + num_moments)
    assert 0 <= beyond < A_SAMPLE


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "NAdam", "ASGD", "Adadelta"])
def test_capturable_optimizers_step(name: str, workload: Load) -> None:
    trace = traced(workload, f"{name}(model.parameters(), lr=lr, capturable=True)")
    assert kept(trace, 4) >= NUM_WEIGHTS, "step counts, on the device"


def test_capturable_is_for_cuda_alone_outside() -> None:
    adam = importlib.import_module("torch.optim.adam")
    before = adam._get_capturable_supported_devices()
    with defaults_of_cuda():
        assert "cpu" in adam._get_capturable_supported_devices(supports_xla=False)
    assert adam._get_capturable_supported_devices() == before


def test_adafactor_keeps_a_row_and_a_column(workload: Load) -> None:
    """row_var is (8, 1), col_var is (1, 1000): documentation of torch.optim.Adafactor, "sublinear memory"."""
    trace = traced(workload, "Adafactor(model.parameters(), lr=lr)")
    assert kept(trace, COLUMNS * 4) == NUM_WEIGHTS
    assert kept(trace) == NUM_WEIGHTS, "the weights"


def test_muon_keeps_one_moment_and_orthogonalises_in_bf16(workload: Load) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    trace = traced(workload, "Muon(model.parameters(), lr=lr)")
    assert kept(trace) == 2 * NUM_WEIGHTS
    assert WEIGHT_BYTES // 2 in trace.sizes, "zeropower_via_newtonschulz runs in bfloat16"


SPARSE = MODEL.replace(
    "sum((batch[0] @ weight).mean() for weight in model)",
    "sum(nn.functional.embedding(torch.tensor([1, 2, 2]), weight, sparse=True).sum() for weight in model)",
)


@pytest.mark.parametrize(
    ("call", "num_moments"), [("SparseAdam(list(model.parameters()), lr=lr)", 2), ("SGD(model.parameters(), lr=lr)", 0)]
)
def test_a_sparse_gradient_holds_only_the_rows_that_were_used(call: str, num_moments: int, workload: Load) -> None:
    trace = traced(workload, call, model=SPARSE)
    assert kept(trace) == NUM_WEIGHTS * (1 + num_moments)
    assert trace.sizes.count(3 * COLUMNS * 4) >= NUM_WEIGHTS, "values of three rows"


def test_a_complex_weight_counts_twice(workload: Load) -> None:
    text = MODEL.replace("torch.zeros(8, 1000)", "torch.zeros(8, 1000, dtype=torch.complex64)").replace(
        "(batch[0] @ weight).mean()", "(batch[0].to(weight.dtype) @ weight).abs().mean()"
    )
    trace = traced(workload, "Adam(model.parameters(), lr=lr)", model=text)
    assert kept(trace, 2 * WEIGHT_BYTES) == 3 * NUM_WEIGHTS
    assert 0 <= weights_at_the_peak(trace, 2 * WEIGHT_BYTES) - 5 * NUM_WEIGHTS < A_SAMPLE


@pytest.mark.parametrize(("precision", "each"), [("bf16-true", 2), ("bf16-mixed", 4), ("16-mixed", 4)])
def test_moments_have_the_type_of_the_weights(precision: str, each: int, workload: Load) -> None:
    trace = traced(workload, "AdamW(model.parameters(), lr=lr, fused=True)", precision)
    assert kept(trace, ROWS * COLUMNS * each) == 3 * NUM_WEIGHTS


def test_lbfgs_is_refused_in_words(workload: Load) -> None:
    with pytest.raises(UserCodeError, match=r"LBFGS, whose step\(\) evaluates the whole batch again"):
        traced(workload, "LBFGS(model.parameters(), lr=lr)")


# Counters


@pytest.mark.parametrize("name", ["NAdam", "Adam", "Adagrad", "RMSprop", "Adadelta", "Adamax", "RAdam", "Rprop"])
def test_step_counts_are_in_the_hosts_memory(name: str, workload: Load) -> None:
    trace = traced(workload, f"{name}(model.parameters(), lr=lr)")
    assert kept(trace, 4) == 1, "the loss of the window"


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_a_fused_step_counts_on_the_device(name: str, workload: Load) -> None:
    trace = traced(workload, f"{name}(model.parameters(), lr=lr, fused=True)")
    plain = traced(workload, f"{name}(model.parameters(), lr=lr)")
    assert kept(trace, 4) == kept(plain, 4) + NUM_WEIGHTS
