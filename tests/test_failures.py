"""Why a step failed is told apart: real errors where a CPU can raise them, and the exact words of all others."""

from __future__ import annotations

import builtins
import errno
import mmap
import sys
from collections.abc import Callable
from itertools import starmap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import DistBackendError
from torch.utils.data import DataLoader

from gradplan.probes.measuring.failures import Failure, failure_of

MEMORY, LIMIT, OTHER = Failure.OUT_OF_MEMORY, Failure.OPERATOR_LIMIT, Failure.OTHER
TOO_MUCH = 2**60
HELP = (
    "\nSearch for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8 GiB.")


def raised_by(function: Callable[[], object]) -> BaseException:
    """What ``function`` raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it is
        function()
    return caught.value


def cases(*named: tuple[str, object]) -> pytest.MarkDecorator:
    """A test for each, with its name."""
    return pytest.mark.parametrize("case", list(starmap(lambda name, case: pytest.param(case, id=name), named)))


# Real errors


def allocate() -> object:
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


class TooLarge:
    """A dataset whose only sample does not fit."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> object:
        return allocate()


def scripted() -> object:
    unit = torch.jit.CompilationUnit("def allocate(n: int):\n    return torch.empty(n)\n")
    return unit.allocate(TOO_MUCH)


def compiled() -> object:
    """Compile with a backend that lacks memory."""

    def backend(graph: object, inputs: object) -> object:
        return allocate()

    torch.compiler.reset()
    return torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


@cases(
    ("torch", allocate),
    ("numpy", lambda: np.empty(TOO_MUCH, np.uint8)),
    ("python", lambda: bytearray(2**62)),
    ("mmap", lambda: mmap.mmap(-1, TOO_MUCH)),
    ("torchscript", scripted),
    ("compiled", compiled),
)
def test_a_failed_allocation_of_the_host_is_out_of_memory(case: Callable[[], object]) -> None:
    assert failure_of(raised_by(case)) is MEMORY


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork, where threads run
def test_an_allocation_that_failed_in_a_worker_of_the_loader_is_out_of_memory() -> None:
    error = raised_by(lambda: list(DataLoader(TooLarge(), num_workers=1)))
    assert str(error).startswith("Caught RuntimeError in DataLoader worker process 0.")
    assert failure_of(error) is MEMORY


@cases(
    ("quantile", lambda: torch.quantile(torch.ones(1).expand(2**25), 0.5)),
    ("multinomial", lambda: torch.multinomial(torch.ones(1).expand(2**25), 1)),
    ("storage", lambda: torch.empty(2**62, 4)),
)
def test_a_size_that_an_operator_of_the_cpu_refuses_is_its_limit(case: Callable[[], object]) -> None:
    refused: list[BaseException] = []
    try:
        case()
    except RuntimeError as error:
        refused.append(error)
    if not refused:  # torch 2.14 takes quantiles of any number
        pytest.skip("this release of torch takes that size")
    assert failure_of(refused[0]) is LIMIT


def twice() -> None:
    loss = torch.ones(1, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


@cases(
    ("shape", lambda: nn.Linear(3, 1)(torch.ones(2, 4))),
    ("backward-twice", twice),
    ("dtype", lambda: torch.ones(2, 2, dtype=torch.bool) @ torch.ones(2, 2, dtype=torch.bool)),
    ("embedding", lambda: nn.Embedding(2, 1)(torch.tensor([5]))),
    ("index", lambda: torch.ones(2)[5]),
    ("target", lambda: nn.functional.cross_entropy(torch.ones(1, 2), torch.tensor([5]))),
    ("device", lambda: torch.ones(2) + torch.ones(2, device="meta")),
    ("overflow", lambda: torch.tensor([2**31], dtype=torch.int32)),
    ("no-file", lambda: Path("no/memory/of/this/file").read_bytes()),
)
def test_a_mistake_of_the_users_is_neither(case: Callable[[], object]) -> None:
    assert failure_of(raised_by(case)) is OTHER


# Words of what no CPU raises


@cases(
    ("full-stop", "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity)"),
    ("bare", "CUDA out of memory"),
    ("async", "CUDA error: out of memory" + HELP.format("cudaErrorMemoryAllocation")),
    ("async-bare", "CUDA error: out of memory"),
    ("driver", "CUDA driver error: out of memory"),
    ("triton-load", "Triton Error [CUDA]: out of memory"),
    ("nvml", 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1154, please report'),
    ("cublas", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("cublas-handle", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    ("hipblas-handle", "HIP error: HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate(handle)`"),
    ("cudnn", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("cudnn-9", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("cusolver", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. If you keep"),
    ("cusparse", "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    ("cufft", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("hip", "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB"),
    ("hip-async", "HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
    ("hip-name", "HIP error: hipErrorOutOfMemory"),
    ("hipblas", "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    ("miopen", "miopenStatusAllocFailed"),
    ("xpu", "XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of 28.55 GiB"),
    ("xpu-device", "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    ("xpu-host", "UR error: UR_RESULT_ERROR_OUT_OF_HOST_MEMORY"),
    ("xpu-older", "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
    ("mps", "MPS backend out of memory (MPS allocated: 17.21 GiB, other allocations: 1.00 MiB, max allowed: 20 GiB)."),
    ("linux", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    ("windows", "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried"),
    ("c++", "std::bad_alloc"),
    ("c++-windows", "bad allocation"),
    ("shared", "unable to mmap 4096 bytes from file </torch_12_34>: Cannot allocate memory (12)"),
    ("replica", "Caught RuntimeError in replica 1 on device 1.\nOriginal Traceback (most recent call last):\n  File\n"
                "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might\n"),
)  # fmt: skip
def test_these_words_of_torch_mean_out_of_memory(case: str) -> None:
    assert failure_of(RuntimeError(case)) is failure_of(torch.AcceleratorError(case)) is MEMORY


NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\n"
)


@cases(
    ("cuda", (NCCL + "Cuda failure 2 'out of memory'", MEMORY)),
    ("calloc", (NCCL + "Failed to CUDA calloc async 2432 bytes", MEMORY)),
    ("argument", (NCCL + "Cuda failure 1 'invalid argument'", OTHER)),
)
def test_nccl_says_last_why_it_failed(case: tuple[str, Failure]) -> None:
    assert failure_of(DistBackendError(case[0])) is case[1]


@cases(
    ("conv", "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false."),
    ("c++-max", "Expected input_height * input_width <= std::numeric_limits<int32_t>::max() to be true, but got false"),
    ("pad", "input tensor must fit into 32-bit index math"),
    ("int32", "offsets must fit in an int32"),
    ("flash", "parameter tensor is too large to be indexed with int32"),
    ("nonzero", "nonzero is not supported for tensors with more than INT_MAX elements, file a support request"),
    ("sort", "The dimension being sorted can not have more than INT_MAX elements."),
    ("upsample", "upsample_nearest_channels_last only supports input tensors with less than INT_MAX elements"),
    ("jagged", "numel needs to be smaller than int32_t max; otherwise, please use packed_accessor64"),
    ("pool", "integer out of range"),
    ("blocks", 'N > 0 INTERNAL ASSERT FAILED at "KernelUtils.h":27, please report a bug to PyTorch. CUDA kernel launch '
               "blocks must be positive, but got N=-2147483648"),
    ("number", "Expected input.numel() to be less than 2147483647, but got 2147483648"),
    ("grid", "upsample: grid size must be less than 65535"),
    ("batch", "cudnn does not support batch sizes larger than 65535, which are not supported"),
    ("batch-words", "this kernel does not support batch size larger than the grid"),
    ("layer-norm", "M should be less than maximum CUDA grid size, file a support request to support bigger batches"),
    ("input", "quantile() input tensor is too large"),
    ("launch", "CUDA error: invalid configuration argument" + HELP.format("cudaErrorInvalidConfiguration")),
    ("launch-hip", "HIP error: invalid configuration argument"),
    ("launch-argument", "CUDA error: invalid argument" + HELP.format("cudaErrorInvalidConfiguration")),
    ("registers", "CUDA error: too many resources requested for launch"),
    ("cudnn", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous"),
    ("cudnn-get", "GET was unable to find an engine to execute this computation"),
    ("cudnn-find", "FIND was unable to find an engine to execute this computation"),
    ("mps-buffer", "Invalid buffer size: 12.00 GiB"),
    ("mps-bytes", "[MPSNDArray initWithDevice:descriptor:isTextureBacked:] Error: total bytes of NDArray > 2**32"),
    ("mps-product", "[MPSNDArray initWithDevice:descriptor:] Error: product of dimension sizes > 2**31"),
    ("mps-length", "Error: NDArray dimension length > INT_MAX"),
    ("mps-graph", "MPSGaph does not support tensor dims larger than INT_MAX"),
    ("mps-matmul", "Output size of the matrix multiplication is larger than currently supported by the MPS backend: "
                   "72250,72250, needs to be less than 2**32 elements"),
    ("inductor", "No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused_0 Required: 147456 "
                 "Hardware limit:101376 Reducing block sizes or `num_stages` may help."),
)  # fmt: skip
def test_these_words_of_torch_mean_a_limit_of_an_operator(case: str) -> None:
    assert failure_of(RuntimeError(case)) is failure_of(torch.AcceleratorError(case)) is LIMIT


WORDS_OF_MISTAKES = (
    "CUDA error: device-side assert triggered" + HELP.format("cudaErrorAssert"),
    "CUDA error: an illegal memory access was encountered" + HELP.format("cudaErrorIllegalAddress"),
    "CUDA error: invalid argument" + HELP.format("cudaErrorInvalidValue"),
    "CUDA error: invalid device ordinal",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA kernel launch blocks must be positive, but got N=0",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "Expected more than 1 value per channel when training, got input size torch.Size([1, 8])",
    "Trying to backward through the graph a second time (or directly access saved tensors after they were freed).",
    "mat1 and mat2 shapes cannot be multiplied (2x4 and 3x1)",
    "one of the variables needed for gradient computation has been modified by an inplace operation",
    "index out of range in self",
    "\"addmm_impl_cpu_\" not implemented for 'Half'",
    "Float8 is not supported for this operation",
    "value cannot be converted to type int32 without overflow",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory.",
    "memory bank is empty",
    "out of memory slots for the queue",
    "the memory module is not large enough",
    "I ran out of memory",
)


@pytest.mark.parametrize("text", WORDS_OF_MISTAKES, ids=lambda text: text[:24])
@pytest.mark.parametrize("before", ["", "My model says: ", "Step 3 failed.\n", "Batch of 65535 rows, no INT_MAX: "])
def test_other_words_are_neither_whatever_the_user_says_before_them(before: str, text: str) -> None:
    assert failure_of(RuntimeError(before + text)) is failure_of(torch.AcceleratorError(before + text)) is OTHER


@cases(
    ("cuda", "CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("async", "CUDA error: out of memory"),
    ("cublas", "CUBLAS_STATUS_ALLOC_FAILED"),
    ("nccl", NCCL + "Cuda failure 2 'out of memory'"),
    ("xpu", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    ("host", "DefaultCPUAllocator: not enough memory"),
    ("c++", "std::bad_alloc"),
)
def test_a_users_sentence_that_quotes_an_out_of_memory_is_none(case: str) -> None:
    assert failure_of(RuntimeError("What I print for a test: " + case)) is OTHER


# Types


class UsersError(RuntimeError):
    """Of the user's own."""


class Lacking(torch.OutOfMemoryError):
    """A user's own out-of-memory, which is one still."""


@pytest.mark.parametrize("text", [str(OOM), "input tensor must fit into 32-bit index math"], ids=["memory", "limit"])
@pytest.mark.parametrize(
    "kind", [ValueError, KeyError, AssertionError, NotImplementedError, RecursionError, UsersError, SystemExit]
)
def test_only_torch_is_taken_at_its_word(kind: type[BaseException], text: str) -> None:
    assert failure_of(kind(text)) is OTHER


def test_a_raise_in_torchscript_speaks_for_the_user() -> None:
    unit = torch.jit.CompilationUnit('def f(n: int):\n    raise RuntimeError("CUDA out of memory")\n    return n\n')
    assert failure_of(raised_by(lambda: unit.f(1))) is OTHER


@cases(
    ("torch", torch.OutOfMemoryError("in words that are new")),
    ("subclass", Lacking()),
    ("memory", MemoryError()),
    ("os", OSError(errno.ENOMEM, "Cannot allocate memory")),
)
def test_some_types_need_no_words(case: BaseException) -> None:
    assert failure_of(case) is MEMORY


def test_another_error_of_the_system_is_neither() -> None:
    assert failure_of(OSError(errno.ENOSPC, "no memory left on device")) is OTHER


OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
SHARED = "out of resource: shared memory, Required: 65538, Hardware limit: 65536. Reducing block sizes may help."


@cases(("triton", OutOfResources(SHARED)), ("torch", torch.OutOfMemoryError(SHARED)))
def test_the_shared_memory_of_a_block_is_no_memory_of_the_device(case: BaseException) -> None:
    assert failure_of(case) is LIMIT


# What an error came from


def wrapped(cause: BaseException, how: str, kind: type[Exception] = UsersError) -> BaseException:
    """An error that was raised while ``cause`` was handled."""

    def raise_it() -> None:
        try:
            raise cause
        except BaseException as error:
            if how == "from":
                raise kind("the step failed") from error
            if how == "from None":
                raise kind("the step failed") from None
            if how == "from another":
                raise kind("the step failed") from KeyError("mine")
            raise kind("the step failed")  # noqa: B904 - its context is what is tested

    return raised_by(raise_it)


@pytest.mark.parametrize(
    "cause", [OOM, RuntimeError("integer out of range"), KeyError("x")], ids=["memory", "limit", "x"]
)
@pytest.mark.parametrize(
    ("how", "is_followed"), [("from", True), ("while handling", True), ("from None", False), ("from another", False)]
)
def test_what_an_error_was_raised_from_counts(cause: BaseException, how: str, is_followed: bool) -> None:
    error = wrapped(cause, how)
    assert failure_of(error) is (failure_of(cause) if is_followed else OTHER)
    assert failure_of(wrapped(error, "from", ValueError)) is failure_of(error)


def test_torchs_own_wrapper_says_from_none_and_passes_the_error_on() -> None:
    error = raised_by(compiled)
    assert type(error).__name__ == "BackendCompilerFailed"
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_no_memory_outranks_a_limit() -> None:
    assert failure_of(wrapped(OOM, "from", lambda _: RuntimeError("integer out of range"))) is MEMORY  # type: ignore[arg-type]


def test_errors_in_a_ring_end() -> None:
    first, second = UsersError("a"), UsersError("b")
    first.__cause__, second.__cause__ = second, first
    assert failure_of(first) is OTHER
    second.__context__, second.__suppress_context__ = OOM, False
    assert failure_of(first) is MEMORY


def test_an_interrupt_is_the_users_whatever_it_interrupted() -> None:
    assert failure_of(wrapped(OOM, "while handling", KeyboardInterrupt)) is OTHER  # type: ignore[arg-type]
    assert failure_of(wrapped(OOM, "while handling", SystemExit)) is MEMORY  # type: ignore[arg-type]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are Python 3.11's")
def test_a_group_lacks_memory_if_any_of_it_does() -> None:
    errors = [KeyError("x"), builtins.ExceptionGroup("inner", [ValueError("y"), wrapped(OOM, "from")])]
    assert failure_of(builtins.ExceptionGroup("outer", errors)) is MEMORY
    assert failure_of(builtins.ExceptionGroup("CUDA out of memory", errors[:1])) is OTHER


def test_a_users_error_that_carries_others_is_no_group() -> None:
    error = UsersError("mine")
    error.exceptions = (OOM,)  # type: ignore[attr-defined]
    assert failure_of(error) is OTHER
