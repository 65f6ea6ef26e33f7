"""Which attention kernel CUDA takes, and that no kernel but the math one materialises the scores.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp in PyTorch (the conditions of each kernel) and its
documentation of scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gradplan.probes.simulator.attention import REAL_KERNELS
from gradplan.probes.simulator.semantics import cuda_semantics
from gradplan.probes.simulator.trace import Recorder, Trace

Operators = Callable[..., list[str]]
Traced = Callable[..., Trace]
T4, A100, RTX_4090, H100 = (7, 5), (8, 0), (8, 9), (9, 0)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
B200, RTX_5090 = (10, 0), (12, 0)
CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
BATCH, HEADS, LENGTH, SIZE = 2, 4, 64, 16
SHAPE = (BATCH, HEADS, LENGTH, SIZE)


def attend(
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = FP32,
    mask: Callable[[], Tensor] | None = None,
    key_shape: tuple[int, ...] | None = None,
    **options: Any,
) -> Callable[[], None]:
    """A function that runs attention forward and backward."""

    def run() -> None:
        query = torch.randn(shape, dtype=dtype, requires_grad=True)
        key, value = (torch.randn(key_shape or shape, dtype=dtype, requires_grad=True) for _ in range(2))
        bias = None if mask is None else mask()
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias, **options)
        out.float().sum().backward()

    return run


def kernel_of(names: list[str]) -> str:
    for kernel in (CUDNN, FLASH, EFFICIENT):
        if f"_scaled_dot_product_{kernel}_attention" in names:
            assert f"_scaled_dot_product_{kernel}_attention_backward" in names
            assert "bmm" not in names
            return kernel
    assert "bmm" in names
    return MATH


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        (A100, FP32, EFFICIENT),
        (A100, FP16, FLASH),
        (A100, BF16, FLASH),
        (A100, torch.float64, MATH),
        (RTX_4090, BF16, FLASH),
        (RTX_5090, BF16, FLASH),
        (H100, BF16, CUDNN),
        (H100, FP16, CUDNN),
        (H100, FP32, EFFICIENT),
        (B200, BF16, CUDNN),
        (T4, FP32, EFFICIENT),
        (T4, FP16, EFFICIENT),
        (T4, BF16, MATH),  # bfloat16 needs compute capability 8.0
    ],
)
def test_the_type_and_the_gpu_choose_the_kernel(
    capability: tuple[int, int], dtype: torch.dtype, kernel: str, operators: Operators
) -> None:
    assert kernel_of(operators(attend(dtype=dtype), capability)) == kernel


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"is_causal": True}, {"scale": 0.5}])
def test_dropout_a_causal_mask_and_a_scale_change_no_kernel(
    dtype: torch.dtype, options: dict[str, Any], operators: Operators
) -> None:
    assert kernel_of(operators(attend(dtype=dtype, **options))) == (EFFICIENT if dtype == FP32 else FLASH)


@pytest.mark.parametrize("mask_dtype", [torch.bool, BF16])
@pytest.mark.parametrize("mask_shape", [(LENGTH, LENGTH), (BATCH, 1, 1, LENGTH), (BATCH, HEADS, LENGTH, LENGTH)])
def test_a_mask_takes_the_memory_efficient_kernel(
    mask_dtype: torch.dtype, mask_shape: tuple[int, ...], operators: Operators
) -> None:
    names = operators(attend(dtype=BF16, mask=lambda: torch.ones(mask_shape, dtype=mask_dtype)))
    assert kernel_of(names) == EFFICIENT


@pytest.mark.parametrize(
    ("size", "dtype", "has_mask", "kernel"),
    [
        (256, BF16, False, FLASH),
        (264, BF16, False, EFFICIENT),  # flash serves heads of at most 256
        (20, BF16, False, FLASH),  # it pads heads to a multiple of 8
        (20, BF16, True, MATH),  # the memory-efficient kernel does not: 16 bytes for the tensor cores
        (20, FP32, False, EFFICIENT),
        (33, FP32, False, MATH),
    ],
)
def test_the_head_size_chooses_the_kernel(
    size: int, dtype: torch.dtype, has_mask: bool, kernel: str, operators: Operators
) -> None:
    mask = (lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool)) if has_mask else None
    assert kernel_of(operators(attend((BATCH, HEADS, LENGTH, size), dtype, mask))) == kernel


@pytest.mark.parametrize("capability", [H100, B200])
@pytest.mark.parametrize(
    ("size", "options", "kernel"),
    [
        (128, {}, CUDNN),
        (128, {"is_causal": True}, CUDNN),
        (128, {"dropout_p": 0.125}, CUDNN),
        (128, {"dropout_p": 0.1}, FLASH),  # cuDNN's dropout is in sixteenths
        (20, {}, FLASH),  # cuDNN pads no heads
        (256, {}, FLASH if torch.__version__ < (2, 14) else CUDNN),
    ],
)
def test_cudnn_comes_before_flash_where_it_takes_the_call(
    capability: tuple[int, int], size: int, options: dict[str, Any], kernel: str, operators: Operators
) -> None:
    """check_prefer_cudnn_attention and can_use_cudnn_attention in sdp_utils.cpp; torch 2.13 brings cuDNN 9.20.

    That it is so since torch 2.11: a comment in huggingface/transformers#48163.
    """
    assert kernel_of(operators(attend((BATCH, HEADS, LENGTH, size), BF16, **options), capability)) == kernel


def test_cudnn_takes_masks_and_grouped_queries(operators: Operators) -> None:
    mask = attend(dtype=BF16, mask=lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    grouped = attend(dtype=BF16, key_shape=(BATCH, HEADS // 2, LENGTH, SIZE), enable_gqa=True)
    assert {kernel_of(operators(run, H100)) for run in (mask, grouped)} == {CUDNN}


def test_cudnn_takes_no_mask_that_is_learned(operators: Operators) -> None:
    """check_attn_mask_shape in sdp_utils_cpp.h."""
    run = attend(dtype=BF16, mask=lambda: torch.zeros(LENGTH, LENGTH, dtype=BF16, requires_grad=True))
    assert kernel_of(operators(run, H100)) == EFFICIENT


def test_cudnn_can_be_turned_off(operators: Operators) -> None:
    def run() -> None:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            attend(dtype=BF16)()

    assert kernel_of(operators(run, H100)) == FLASH


@pytest.mark.parametrize(
    ("capability", "size", "dropout_p", "kernel"),
    [
        (RTX_4090, 192, 0.0, FLASH),
        (RTX_4090, 200, 0.0, EFFICIENT),
        (RTX_4090, 256, 0.0, FLASH),
        (RTX_4090, 256, 0.1, EFFICIENT),
        (RTX_5090, 200, 0.0, EFFICIENT),
        (A100, 200, 0.0, FLASH),
    ],
)
def test_gpus_with_little_shared_memory_train_wide_heads_without_flash(
    capability: tuple[int, int], size: int, dropout_p: float, kernel: str, operators: Operators
) -> None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in sdp_utils.cpp."""
    run = attend((BATCH, HEADS, LENGTH, size), BF16, dropout_p=dropout_p)
    assert kernel_of(operators(run, capability)) == kernel


def test_without_tensor_cores_any_head_size_takes_the_memory_efficient_kernel(operators: Operators) -> None:
    assert kernel_of(operators(attend((BATCH, HEADS, LENGTH, 33)), T4)) == EFFICIENT


def test_inputs_without_a_dimension_of_heads_take_the_math_kernel(operators: Operators) -> None:
    assert kernel_of(operators(attend((HEADS, LENGTH, SIZE)))) == MATH


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_key_broadcast_over_heads_takes_the_math_kernel(dtype: torch.dtype, operators: Operators) -> None:
    assert kernel_of(operators(attend(dtype=dtype, key_shape=(BATCH, 1, LENGTH, SIZE)))) == MATH


def test_grouped_queries_take_flash_or_else_the_math_kernel(operators: Operators) -> None:
    """ "It currently works only for Flash_attention and math kernel on CUDA tensor": torch 2.13's documentation."""
    key_shape = (BATCH, HEADS // 2, LENGTH, SIZE)
    assert kernel_of(operators(attend(dtype=BF16, key_shape=key_shape, enable_gqa=True))) == FLASH
    assert kernel_of(operators(attend(dtype=FP32, key_shape=key_shape, enable_gqa=True))) == MATH


def test_causal_queries_fewer_than_keys_do_not_take_flash(operators: Operators) -> None:
    longer = (BATCH, HEADS, 2 * LENGTH, SIZE)
    assert kernel_of(operators(attend(dtype=BF16, key_shape=longer, is_causal=True))) == EFFICIENT
    assert kernel_of(operators(attend(dtype=BF16, key_shape=longer))) == FLASH


def test_a_kernel_that_the_user_turned_off_is_not_taken(operators: Operators) -> None:
    def only(*backends: SDPBackend) -> str:
        def run() -> None:
            with sdpa_kernel(list(backends)):
                attend(dtype=BF16)()

        return kernel_of(operators(run))

    assert only(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH) == EFFICIENT
    assert only(SDPBackend.FLASH_ATTENTION) == FLASH
    assert only(SDPBackend.MATH) == MATH


def test_a_multi_head_attention_layer_takes_a_fused_kernel(operators: Operators) -> None:
    def run() -> None:
        layer = nn.MultiheadAttention(32, 4, batch_first=True, dtype=BF16)
        x = torch.randn(2, 10, 32, dtype=BF16, requires_grad=True)
        layer(x, x, x, need_weights=False)[0].sum().backward()

    assert "_scaled_dot_product_flash_attention" in operators(run)


# Memory

SCORES = BATCH * HEADS * LENGTH * LENGTH


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_scores_are_never_in_memory(dtype: torch.dtype, dropout_p: float, traced: Traced) -> None:
    shape = (BATCH, HEADS, 512, SIZE)
    scores = BATCH * HEADS * 512 * 512
    sizes = traced(attend(shape, dtype, dropout_p=dropout_p, is_causal=True)).sizes
    assert max(sizes) < scores  # not even as one byte for each, a mask of dropout


def test_the_scores_are_in_memory_with_the_math_kernel(traced: Traced) -> None:
    assert traced(attend(dtype=torch.float64)).sizes.count(SCORES * 8) >= 2


@pytest.mark.parametrize("length", [64, 65])
def test_logsumexp_is_fp32_for_each_query_of_each_head(length: int, traced: Traced) -> None:
    """The memory-efficient kernel rounds the queries up to 32, flash does not."""
    shape = (BATCH, HEADS, length, SIZE)
    rounded = {64: 64, 65: 96}[length]
    assert BATCH * HEADS * length * 4 in traced(attend(shape, BF16)).sizes
    assert BATCH * HEADS * rounded * 4 in traced(attend(shape, FP32)).sizes


def test_without_a_gradient_there_is_no_logsumexp(traced: Traced) -> None:
    def run() -> None:
        with torch.no_grad():
            query, key, value = (torch.randn(SHAPE, requires_grad=True) for _ in range(3))
            scaled_dot_product_attention(query, key, value)

    assert BATCH * HEADS * LENGTH * 4 not in traced(run).sizes


def test_flash_pads_heads_to_a_multiple_of_8(traced: Traced) -> None:
    """pad_last_dim<8> in aten/src/ATen/native/transformers/attention.cpp."""
    sizes = traced(attend((BATCH, HEADS, LENGTH, 20), BF16)).sizes
    assert sizes.count(BATCH * HEADS * LENGTH * 24 * 2) >= 4, "query, key, value, output"


@pytest.mark.parametrize(("length", "aligned"), [(64, 64), (65, 80)])
def test_a_mask_is_padded_to_a_multiple_of_16_keys(length: int, aligned: int, traced: Traced) -> None:
    shape = (BATCH, HEADS, length, SIZE)
    sizes = traced(attend(shape, mask=lambda: torch.ones(length, length, dtype=torch.bool))).sizes
    assert sizes.count(length * length) == 2, "the mask, and its negation for the bias"
    assert sizes.count(length * length * 4) == 1, "the bias: fp32 as the query is"
    assert sizes.count(length * aligned * 4) == 1, "the bias as the kernel reads it"


def test_a_mask_is_not_copied_for_each_sample_and_head(traced: Traced) -> None:
    run = attend((BATCH, HEADS, 512, SIZE), mask=lambda: torch.ones(512, 512, dtype=torch.bool))
    assert max(traced(run).sizes) < BATCH * HEADS * 512 * 512 * 4


# Memory that a backward takes for a moment


@pytest.mark.parametrize(
    ("length", "size", "rows", "columns"),
    [(128, 64, 128, 64), (100, 64, 128, 64), (128, 72, 128, 96), (64, 160, 128, 192)],
)
def test_flashs_backward_sums_the_queries_gradient_in_fp32(
    length: int, size: int, rows: int, columns: int, traced: Traced
) -> None:
    """mha_bwd in flash_api.cpp: dq_accum and softmax_d, for rows to a multiple of 128, heads to one of 32 or 64."""
    sizes = traced(attend((BATCH, HEADS, length, size), BF16)).sizes
    assert BATCH * HEADS * rows * columns * 4 in sizes
    assert BATCH * HEADS * rows * 4 in sizes


def test_flashs_backward_makes_a_shared_keys_gradient_for_each_query(traced: Traced) -> None:
    """mha_bwd in flash_api.cpp: dk_expanded and dv_expanded."""
    shape, key_shape = (BATCH, HEADS, LENGTH, SIZE), (BATCH, 1, LENGTH, SIZE)
    grouped = traced(attend(shape, BF16, key_shape=key_shape, enable_gqa=True)).sizes
    assert grouped.count(BATCH * HEADS * LENGTH * SIZE * 2) == 4 + 2, "query, output, gradients; and for a moment two"


@pytest.mark.parametrize(
    ("dtype", "size", "rows", "columns"),
    [(FP32, 64, 64, 64), (FP32, 96, 128, 128), (FP16, 96, 128, 128), (FP32, 16, 64, 64)],
)
def test_the_memory_efficient_backward_sums_the_queries_gradient_in_fp32_blocks(
    dtype: torch.dtype, size: int, rows: int, columns: int, traced: Traced
) -> None:
    """workspace_elements_gq in mem_eff_attention/kernel_backward.h: blocks of 16 bytes and their fp32 elements."""
    wide, high = (128 if dtype == FP16 else 64) if size > 64 else 64, 64 if size <= 64 else 128
    blocks = BATCH * HEADS * (128 // high) * (columns // wide)
    mask = (lambda: torch.ones(128, 128, dtype=torch.bool)) if dtype == FP16 else None
    sizes = traced(attend((BATCH, HEADS, 128, size), dtype, mask)).sizes
    assert blocks * (high * wide * 4 + 16) in sizes
    assert BATCH * HEADS * 128 * 4 in sizes


def test_cudnns_backward_sums_the_queries_gradient_in_fp32(traced: Traced) -> None:
    """dQ_accum_size in cudnn-frontend's scaled_dot_product_flash_attention.h."""
    run = attend((BATCH, HEADS, 100, 72), BF16)
    cudnns, flashs = (traced(run, capability).sizes.count(BATCH * HEADS * 100 * 72 * 4) for capability in (H100, A100))
    assert cudnns == flashs + 1, "flash rounds its rows up"


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("capability", [A100, H100])
def test_what_a_backward_takes_is_gone_when_it_returns(
    dtype: torch.dtype, capability: tuple[int, int], traced: Traced
) -> None:
    trace = traced(attend((BATCH, HEADS, 128, 64), dtype), capability)
    scratch = max(index for index, size in enumerate(trace.sizes) if size >= BATCH * HEADS * 128 * 64 * 4)
    born, died = trace.events.index(scratch), trace.events.index(~scratch)
    assert all(event < 0 for event in trace.events[born + 1 : died])


def test_attention_says_that_it_has_no_second_derivative(traced: Traced) -> None:
    def run() -> None:
        query = torch.randn(SHAPE, requires_grad=True)
        out = scaled_dot_product_attention(query, query, query)
        torch.autograd.grad(out.sum(), query, create_graph=True)

    with pytest.raises(
        NotImplementedError, match="derivative for aten::_scaled_dot_product_efficient_attention_backward"
    ):
        traced(run)


# Real tensors: for steps that read values


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("capability", [A100, H100])
@pytest.mark.parametrize(
    "case", ["plain", "causal", "scale", "boolean mask", "bias", "short queries", "grouped", "odd"]
)
def test_real_kernels_compute_what_the_math_kernel_computes(
    dtype: torch.dtype, case: str, capability: tuple[int, int]
) -> None:
    options: dict[str, Any] = {"causal": {"is_causal": True}, "scale": {"scale": 0.3}, "grouped": {"enable_gqa": True}}
    options = options.get(case, {})
    num_queries = 7 if case == "short queries" else 20
    num_key_heads = 2 if case == "grouped" else HEADS
    size = 12 if case == "odd" else SIZE
    torch.manual_seed(0)
    inputs = [
        torch.randn(BATCH, heads, length, size, dtype=dtype)
        for heads, length in ((HEADS, num_queries), (num_key_heads, 20), (num_key_heads, 20))
    ]
    if case == "boolean mask":
        options["attn_mask"] = torch.rand(BATCH, 1, num_queries, 20) > 0.2
    if case == "bias":
        inputs.append(torch.randn(HEADS, num_queries, 20, dtype=dtype))
    grad = torch.randn(BATCH, HEADS, num_queries, size, dtype=dtype)

    def results() -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = scaled_dot_product_attention(*leaves, **options)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    with sdpa_kernel(SDPBackend.MATH):
        expected = results()
    with cuda_semantics(capability, are_fake=False), Recorder(kernels=REAL_KERNELS):
        actual = results()
    tolerance = 1e-5 if dtype == FP32 else 5e-2
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("capability", [A100, H100])
def test_real_kernels_allocate_what_fake_ones_do(
    dtype: torch.dtype, has_mask: bool, capability: tuple[int, int], traced: Traced
) -> None:
    mask = (lambda: torch.ones(LENGTH, LENGTH, dtype=torch.bool)) if has_mask else None
    run = attend(dtype=dtype, mask=mask, dropout_p=0.1)
    fake, real = traced(run, capability), traced(run, capability, is_real=True)
    assert real.peak_live_bytes == pytest.approx(fake.peak_live_bytes, abs=64)
