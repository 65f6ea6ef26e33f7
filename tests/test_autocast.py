"""Under autocast each operator takes the type that CUDA's lists give it, on CPU tensors.

Source: "Autocast Op Reference" in PyTorch's documentation of torch.amp, CUDA's lists, and
aten/src/ATen/autocast_mode.h for those that the page leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from gradplan.probes.simulator import autocast
from gradplan.probes.simulator.semantics import cuda_semantics
from gradplan.probes.simulator.trace import Recorder, Trace

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Traced = Callable[..., Trace]


def registered(key: str) -> set[str]:
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def packet_of(name: str) -> str:
    """sum, for aten::sum.dim_IntList."""
    return name.removeprefix("aten::").partition(".")[0]


def result(function: Callable[..., Any], *shapes_and_types: tuple[Any, ...], low: torch.dtype = BF16) -> Tensor:
    """What ``function`` gives on fake tensors of these shapes and types inside autocast, CUDA's lists in place."""
    with cuda_semantics((8, 0)), FakeTensorMode(), Recorder(kernels=autocast.KERNELS):
        inputs = [torch.ones(shape, dtype=dtype) for shape, dtype in shapes_and_types]
        with torch.autocast("cpu", dtype=low):
            out: Tensor = function(*inputs)
        return out


MATRIX, BATCHED, VECTOR, IMAGE = (4, 4), (2, 4, 4), (4,), (1, 4, 8, 8)
LOWER: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matmul": (torch.matmul, (MATRIX, MATRIX)),
    "addbmm": (torch.addbmm, (MATRIX, BATCHED, BATCHED)),
    "addmm": (torch.addmm, (MATRIX, MATRIX, MATRIX)),
    "addmv": (torch.addmv, (VECTOR, MATRIX, VECTOR)),
    "addr": (torch.addr, (MATRIX, VECTOR, VECTOR)),
    "baddbmm": (torch.baddbmm, (BATCHED, BATCHED, BATCHED)),
    "bmm": (torch.bmm, (BATCHED, BATCHED)),
    "chain_matmul": (lambda *m: torch.linalg.multi_dot(m), (MATRIX, MATRIX, MATRIX)),
    "conv1d": (functional.conv1d, ((1, 4, 8), (4, 4, 3))),
    "conv2d": (functional.conv2d, (IMAGE, (4, 4, 3, 3))),
    "conv3d": (functional.conv3d, ((1, 4, 8, 8, 8), (4, 4, 3, 3, 3))),
    "conv_transpose2d": (functional.conv_transpose2d, (IMAGE, (4, 4, 3, 3))),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (MATRIX, MATRIX)),
    "linear": (functional.linear, (MATRIX, MATRIX, VECTOR)),
    "mm": (torch.mm, (MATRIX, MATRIX)),
    "mv": (torch.mv, (MATRIX, VECTOR)),
    "prelu": (functional.prelu, (MATRIX, VECTOR)),
    "attention": (functional.scaled_dot_product_attention, ((1, 2, 8, 8),) * 3),
    "GRUCell": (lambda x: nn.GRUCell(4, 4)(x), (MATRIX,)),
    "LSTMCell": (lambda x: nn.LSTMCell(4, 4)(x)[0], (MATRIX,)),
    "RNNCell": (lambda x: nn.RNNCell(4, 4)(x), (MATRIX,)),
}
HIGHER: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "pow": (lambda x: x**3, (MATRIX,)),
    "pow of a number": (lambda x: 2.0**x, (MATRIX,)),
    "division of a number": (lambda x: 1.0 / x, (MATRIX,)),
    "acos": (torch.acos, (MATRIX,)),
    "asin": (torch.asin, (MATRIX,)),
    "binary_cross_entropy_with_logits": (functional.binary_cross_entropy_with_logits, (MATRIX, MATRIX)),
    "cosh": (torch.cosh, (MATRIX,)),
    "cosine_embedding_loss": (functional.cosine_embedding_loss, (MATRIX, MATRIX, VECTOR)),
    "cdist": (torch.cdist, (MATRIX, MATRIX)),
    "cosine_similarity": (functional.cosine_similarity, (MATRIX, MATRIX)),
    "cross_entropy": (lambda x: functional.cross_entropy(x, torch.ones(4, dtype=torch.long)), (MATRIX,)),
    "cumprod": (lambda x: torch.cumprod(x, 0), (MATRIX,)),
    "cumsum": (lambda x: torch.cumsum(x, 0), (MATRIX,)),
    "dist": (torch.dist, (MATRIX, MATRIX)),
    "erfinv": (torch.erfinv, (MATRIX,)),
    "exp": (torch.exp, (MATRIX,)),
    "expm1": (torch.expm1, (MATRIX,)),
    "group_norm": (lambda x: nn.GroupNorm(2, 4)(x), (IMAGE,)),
    "hinge_embedding_loss": (functional.hinge_embedding_loss, (MATRIX, MATRIX)),
    "kl_div": (lambda x, y: functional.kl_div(x, y, reduction="sum"), (MATRIX, MATRIX)),
    "l1_loss": (functional.l1_loss, (MATRIX, MATRIX)),
    "layer_norm": (lambda x: nn.LayerNorm(4)(x), (MATRIX,)),
    "log": (torch.log, (MATRIX,)),
    "log10": (torch.log10, (MATRIX,)),
    "log_softmax": (lambda x: functional.log_softmax(x, -1), (MATRIX,)),
    "log1p": (torch.log1p, (MATRIX,)),
    "log2": (torch.log2, (MATRIX,)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (MATRIX,)),
    "margin_ranking_loss": (functional.margin_ranking_loss, (VECTOR, VECTOR, VECTOR)),
    "mse_loss": (functional.mse_loss, (MATRIX, MATRIX)),
    "multi_margin_loss": (lambda x: functional.multi_margin_loss(x, torch.ones(4, dtype=torch.long)), (MATRIX,)),
    "nll_loss": (lambda x: functional.nll_loss(x, torch.ones(4, dtype=torch.long)), (MATRIX,)),
    "norm": (torch.linalg.vector_norm, (MATRIX,)),
    "normalize": (functional.normalize, (MATRIX,)),
    "poisson_nll_loss": (functional.poisson_nll_loss, (MATRIX, MATRIX)),
    "prod": (torch.prod, (MATRIX,)),
    "prod along a dimension": (lambda x: torch.prod(x, 0), (MATRIX,)),
    "reciprocal": (torch.reciprocal, (MATRIX,)),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), (MATRIX,)),
    "rms_norm": (lambda x: nn.RMSNorm(4)(x), (MATRIX,)),
    "rsqrt": (torch.rsqrt, (MATRIX,)),
    "sinh": (torch.sinh, (MATRIX,)),
    "smooth_l1_loss": (functional.smooth_l1_loss, (MATRIX, MATRIX)),
    "soft_margin_loss": (functional.soft_margin_loss, (MATRIX, MATRIX)),
    "softmax": (lambda x: functional.softmax(x, -1), (MATRIX,)),
    "softmax of a module": (lambda x: nn.Softmax(-1)(x), (MATRIX,)),
    "softmin": (lambda x: functional.softmin(x, -1), (MATRIX,)),
    "softplus": (functional.softplus, (MATRIX,)),
    "sum": (torch.sum, (MATRIX,)),
    "sum along a dimension": (lambda x: x.sum(0), (MATRIX,)),
    "tan": (torch.tan, (MATRIX,)),
    "triplet_margin_loss": (functional.triplet_margin_loss, (MATRIX, MATRIX, MATRIX)),
    "upsample_bilinear2d": (lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,)),
}
WIDEST: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "addcdiv": (torch.addcdiv, (MATRIX, MATRIX, MATRIX)),
    "addcmul": (torch.addcmul, (MATRIX, MATRIX, MATRIX)),
    "atan2": (torch.atan2, (MATRIX, MATRIX)),
    "bilinear": (functional.bilinear, (MATRIX, MATRIX, (5, 4, 4))),
    "cross": (lambda a, b: torch.cross(a, b, dim=1), ((4, 3), (4, 3))),
    "dot": (torch.dot, (VECTOR, VECTOR)),
    "grid_sample": (lambda a, b: functional.grid_sample(a, b, align_corners=False), (IMAGE, (1, 8, 8, 2))),
    "index_put": (lambda a, b: a.index_put((torch.arange(4),), b), (MATRIX, MATRIX)),
    "scatter_add": (lambda a, b: a.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), b), (MATRIX, MATRIX)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (MATRIX, MATRIX)),
    "vdot": (torch.vdot, (VECTOR, VECTOR)),
}
UNTOUCHED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (torch.add, (MATRIX, MATRIX)),
    "mean": (torch.mean, (MATRIX,)),
    "gelu": (functional.gelu, (MATRIX,)),
    "embedding": (lambda x: functional.embedding(torch.ones(4, dtype=torch.long), x), (MATRIX,)),
    "batch_norm": (lambda x: nn.BatchNorm2d(4, dtype=BF16)(x), (IMAGE,)),
    "max_pool2d": (lambda x: functional.max_pool2d(x, 2), (IMAGE,)),
    # The CPU's own autocast touches these, CUDA's does not.
    "avg_pool3d": (lambda x: functional.avg_pool3d(x, 2), ((1, 4, 8, 8, 8),)),
    "adaptive_avg_pool3d": (lambda x: functional.adaptive_avg_pool3d(x, 1), ((1, 4, 8, 8, 8),)),
    "reflection_pad2d": (lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"), (IMAGE,)),
    "trace": (torch.trace, (MATRIX,)),
    "stack": (lambda a, b: torch.stack([a, b]), (MATRIX, MATRIX)),
    "cat": (lambda a, b: torch.cat([a, b]), (MATRIX, MATRIX)),
}


@pytest.mark.parametrize("name", LOWER)
@pytest.mark.parametrize("low", [BF16, FP16])
def test_products_run_in_the_lower_precision(name: str, low: torch.dtype) -> None:
    function, shapes = LOWER[name]
    assert result(function, *((shape, FP32) for shape in shapes), low=low).dtype == low


@pytest.mark.parametrize("name", HIGHER)
def test_sums_losses_and_powers_run_in_fp32(name: str) -> None:
    function, shapes = HIGHER[name]
    assert result(function, *((shape, BF16) for shape in shapes)).dtype == FP32


@pytest.mark.parametrize("name", WIDEST)
def test_operators_of_several_inputs_run_in_the_widest_of_their_types(name: str) -> None:
    function, shapes = WIDEST[name]
    assert result(function, *((shape, BF16) for shape in shapes)).dtype == BF16
    types = [FP32, *[BF16] * (len(shapes) - 1)]
    assert result(function, *zip(shapes, types, strict=True)).dtype == FP32
    assert result(function, *zip(shapes, reversed(types), strict=True)).dtype == FP32


@pytest.mark.parametrize("name", UNTOUCHED)
def test_all_else_runs_in_the_type_that_it_is_given(name: str) -> None:
    function, shapes = UNTOUCHED[name]
    assert result(function, *((shape, BF16) for shape in shapes)).dtype == BF16


def test_concatenation_widens_by_itself() -> None:
    assert result(lambda a, b: torch.cat([a, b]), (MATRIX, BF16), (MATRIX, FP32)).dtype == FP32


def test_a_type_that_is_asked_for_is_given() -> None:
    assert result(lambda x: torch.sum(x, dtype=FP16), (MATRIX, BF16)).dtype == FP16
    assert result(lambda x: functional.softmax(x, -1, dtype=torch.float64), (MATRIX, BF16)).dtype == torch.float64


@pytest.mark.parametrize("function", [torch.exp, lambda x: x.sum(), lambda x: functional.softmax(x, 0), torch.mm])
def test_fp64_is_never_cast(function: Callable[..., Any]) -> None:
    arguments = 2 if function is torch.mm else 1
    assert result(function, *[(MATRIX, torch.float64)] * arguments).dtype == torch.float64


@pytest.mark.parametrize("function", [torch.sum, torch.prod, lambda x: torch.cumsum(x, 0)])
def test_whole_numbers_are_never_cast(function: Callable[..., Any]) -> None:
    assert result(function, (MATRIX, torch.long)).dtype == torch.long


def test_in_place_operators_are_never_cast() -> None:
    assert result(lambda x: x.exp_(), (MATRIX, BF16)).dtype == BF16
    assert result(lambda x: x.pow_(2), (MATRIX, BF16)).dtype == BF16


@pytest.mark.parametrize("function", [functional.binary_cross_entropy, lambda x, y: nn.BCELoss()(x, y)])
def test_binary_cross_entropy_of_probabilities_is_refused_with_cudas_advice(function: Callable[..., Any]) -> None:
    """ "F.binary_cross_entropy and BCELoss ... raise an error in autocast-enabled regions": PyTorch's page."""
    with pytest.raises(RuntimeError, match="unsafe to autocast") as error:
        result(function, (MATRIX, FP32), (MATRIX, FP32))
    assert "binary_cross_entropy_with_logits" in str(error.value)


def test_binary_cross_entropy_is_computed_where_autocast_is_off() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return functional.binary_cross_entropy(x.float(), y.float())

    assert result(function, (MATRIX, BF16), (MATRIX, BF16)).dtype == FP32


# Tables


def test_no_operator_has_two_policies_and_each_is_one_of_cudas() -> None:
    tables = [autocast.LOWER_PRECISION, autocast.PROMOTE, autocast.SET_DTYPE]
    assert len(frozenset().union(*tables)) == sum(map(len, tables))
    on_cuda = set(map(packet_of, registered("AutocastCUDA")))
    assert frozenset().union(*tables) <= on_cuda


def test_what_no_table_names_runs_in_fp32() -> None:
    """The rest, by name: an operator that a new torch adds is seen here before a user meets it."""
    tables = autocast.LOWER_PRECISION | autocast.PROMOTE | autocast.SET_DTYPE
    in_a_cuda_build, since_torch_2_14 = "_cudnn_rnn", "linalg_matrix_sqrth"
    rest = {packet_of(name) for name in registered("AutocastCUDA") - registered("AutocastCPU")}
    rest -= {*tables, in_a_cuda_build, since_torch_2_14}
    assert {name for name in rest if "upsample" not in name} == {
        *("acos", "asin", "cosh", "cosine_similarity", "dist", "erfinv", "exp", "expm1", "frobenius_norm"),
        *("group_norm", "layer_norm", "log", "log10", "log1p", "log2", "logsumexp", "native_layer_norm", "norm"),
        *("nuclear_norm", "pdist", "pow", "reciprocal", "renorm", "rms_norm", "rsqrt", "sinh", "softplus", "tan"),
    }


def test_cudas_lists_are_in_place_only_inside() -> None:
    cpu_before = registered("AutocastCPU")
    with cuda_semantics((8, 0)):
        assert registered("AutocastCUDA") <= registered("AutocastCPU")
    assert registered("AutocastCPU") == cpu_before
    with torch.autocast("cpu", dtype=BF16):
        assert functional.layer_norm(torch.ones(3, 4, dtype=BF16), (4,)).dtype == BF16


# Memory


@pytest.mark.parametrize("is_real", [False, True], ids=["fake", "real"])
def test_softmax_writes_fp32_from_bf16_without_a_copy(is_real: bool, traced: Traced) -> None:
    """aten/src/ATen/native/cuda/SoftMax.cu: half_to_float in one kernel, forward and backward."""

    def attend() -> None:
        scores = torch.randn(1000, dtype=BF16, requires_grad=True)
        with torch.autocast("cpu", dtype=BF16):
            output = functional.softmax(scores, -1)
        output.backward(torch.ones_like(output))

    sizes = traced(attend, is_real=is_real).sizes
    assert sorted(sizes) == [2000, 2000, 4000, 4000], "scores, their gradient, output and its gradient"


def test_a_weight_is_cast_once_for_a_region(traced: Traced) -> None:
    """ "Autocast maintains a cache of the FP16 casts of model parameters (leaves)": PyTorch's notes on AMP."""

    def forward() -> None:
        layer = nn.Linear(10, 10, bias=False)
        inputs = torch.randn(3, 10)
        with torch.autocast("cpu", dtype=BF16):
            layer(layer(layer(inputs))).sum().backward()

    assert traced(forward).sizes.count(10 * 10 * 2) == 1 + 3 + 2, "one copy, a gradient of each use, their sums"


def test_a_cell_that_is_called_for_each_time_step_casts_its_weights_once(traced: Traced) -> None:
    """cached_cast in aten/src/ATen/autocast_mode.cpp serves every operator of the list."""

    def forward() -> None:
        cell, state = nn.LSTMCell(24, 40), (torch.zeros(2, 40), torch.zeros(2, 40))
        with torch.autocast("cpu", dtype=BF16):
            for _ in range(5):
                state = cell(torch.randn(2, 24), state)

    assert traced(forward).sizes.count(4 * 40 * 40 * 2) == 1
    with torch.no_grad():
        assert traced(forward).sizes.count(4 * 40 * 40 * 2) == 1, "a weight requires grad whatever the mode"


def test_only_weights_are_cached(traced: Traced) -> None:
    def forward() -> None:
        frozen, weight = torch.randn(30, 30), torch.randn(50, 50, requires_grad=True)
        with torch.autocast("cpu", dtype=BF16):
            for _ in range(3):
                torch.mv(frozen, torch.randn(30))
                torch.mv(weight * 1, torch.randn(50))
        with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
            for _ in range(3):
                torch.mv(weight, torch.randn(50))

    sizes = traced(forward).sizes
    assert sizes.count(30 * 30 * 2) == 3
    assert sizes.count(50 * 50 * 2) == 6


def test_a_weight_of_a_list_that_the_cpu_lacks_is_cast_anew_in_each_region(traced: Traced) -> None:
    def forward() -> None:
        weight = torch.randn(50, 50, requires_grad=True)
        for _ in range(2):
            with torch.autocast("cpu", dtype=BF16):
                torch.mv(weight, torch.randn(50)), torch.mv(weight, torch.randn(50))

    trace = traced(forward)
    first, second = (index for index, size in enumerate(trace.sizes) if size == 50 * 50 * 2)
    assert trace.events.index(~first) < trace.events.index(second)


def test_the_cast_weights_die_with_the_region(traced: Traced) -> None:
    def forwards() -> None:
        layer = nn.Linear(10, 10, bias=False)
        for _ in range(2):
            with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
                layer(torch.randn(3, 10, dtype=BF16))

    trace = traced(forwards)
    first, second = (index for index, size in enumerate(trace.sizes) if size == 200)
    assert trace.events.index(~first) < trace.events.index(second)


def test_layer_norm_keeps_an_fp32_copy_of_its_input(traced: Traced) -> None:
    def normalise() -> None:
        inputs = torch.randn(7, 100, dtype=BF16, requires_grad=True)
        norm = nn.LayerNorm(100)
        with torch.autocast("cpu", dtype=BF16):
            output = norm(inputs)
        assert output.dtype == FP32
        output.backward(torch.ones_like(output))

    sizes = traced(normalise).sizes
    assert sizes.count(7 * 100 * 2) == 2, "the input and its gradient"
    assert sizes.count(7 * 100 * 4) == 4, "its copy, the output, and the gradient of each"
