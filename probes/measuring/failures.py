"""Tells apart why a training step failed: no memory, a size that an operator refuses, or anything else.

Most of it torch can say only in words: its C++ errors arrive as a plain RuntimeError. The words are read only where
torch itself may have spoken, and mostly from the start of the message, so that a user's sentence about memory is no
lack of it.
"""

from __future__ import annotations

import builtins
import errno
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
import torch.distributed


class Failure(str, Enum):
    """Why a step failed: ``OPERATOR_LIMIT`` is a size that is refused however much memory there is."""

    OUT_OF_MEMORY = "out of memory"
    OPERATOR_LIMIT = "operator limit"
    OTHER = "other"


# A class that a user derived from these speaks for the user, as NotImplementedError and ValueError do.
SPOKEN_BY_TORCH: tuple[type[BaseException], ...] = (
    RuntimeError,
    torch.AcceleratorError,
    torch.OutOfMemoryError,
    getattr(torch.distributed, "DistBackendError", RuntimeError),  # not in builds without torch.distributed
)
GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.11's; nothing is an instance of ()

# What a DataLoader's worker, a replica or TorchScript puts before the message that it passes on.
RELAYED = re.compile(
    r"\A(?:Caught \w+ in |The following operation failed in the TorchScript interpreter\.)"
    r"[\s\S]*\n(?:torch\.)?(?:Runtime|Accelerator|OutOfMemory)Error: "
)

# Each pattern is matched at the start of a message; #numbers are issues of pytorch/pytorch, paths are of its source.
WORDINGS: dict[Failure, tuple[str, ...]] = {
    Failure.OPERATOR_LIMIT: (  # first: torch raises "out of resource" as an OutOfMemoryError
        # Indices of 32 bits: #80020 and #155225; #51871 and, of MPS, #158824; Dao-AILab/flash-attention#407;
        # Pool.h (#113833), and a number of blocks that overflowed (#43476)
        r"Expected .*(?:canUse32BitIndexMath|numeric_limits<u?int(?:32_t)?>::max\(\)).* to be true, but got false",
        r"[^\n]*(?:\b(?:less|more|larger|smaller) than|>) (?:INT_MAX|int32_t max)\b",
        r"[^\n]*\b(?:must fit in(?:to)? (?:an? )?(?:int32|32-bit index math)|too large to be indexed with int32)\b",
        r"integer out of range(?:$|\n)|Storage size calculation overflowed|.*launch blocks must be positive, .* N=-\d",
        # Other fixed bounds. MPS: #141909, #84039; the 16 Mi elements of quantile(), the 2^24 of multinomial()
        r"[^\n]*\b(?:size|numel|dim\w*|elements|tensors?|batch|grid|NDArray|categories)\b[^\n]*"
        r"(?: less than | exceed | > )(?:214748364[78]|2(?:\*\*|\^)(?:31|32|24)|65535)\b",
        r"(?:\w+\(\):? )?(?:the )?input tensor is too large(?:$|[.,:\n])",
        r"[^\n]*\bnot support(?:ed)?\b[^\n]*\bbatch sizes? larger\b",
        # A grid of at most 65535: #142228, #146704; layer_norm_kernel.cu; registers of a block, as Triton's below
        r"(?:CUDA|HIP)(?: driver)? error: (?:invalid configuration argument|too many resources requested for launch)\b",
        r"CUDA error: invalid argument\b[\s\S]*\bcudaErrorInvalidConfiguration\b",
        r"[^\n]*\bshould be less than maximum CUDA grid size\b",
        # cuDNN takes no tensor of more than 2**31 elements (#22496) and had limits of the batch (#2917, #4107)
        r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\b",
        r"(?:GET|FIND) was unable to find an engine to execute this computation",
        # Metal's largest buffer, the same however much memory is free: MPSAllocator.mm
        r"Invalid buffer size: [\d.]+ (?:[KMGT]i?B|bytes)",
        # Triton's shared memory and registers of one block, which are no device memory: triton#8182
        r"(?:No valid triton configs\. \w+: )?out of resource: ",
    ),
    Failure.OUT_OF_MEMORY: (
        # Torch's allocators, and the runtimes below them: CUDAException.cpp, ATen/cuda/Exceptions.h, MPSAllocator.mm
        r"(?:CUDA|HIP|XPU) out of memory(?:$|[.\n])|MPS backend out of memory \(",
        r"(?:(?:CUDA|HIP)(?: driver)? error|Triton Error \[(?:CUDA|HIP)\]): "
        r"(?:out of memory|hipErrorOutOfMemory)(?:$|[.\n])",
        # CUDACachingAllocator.cpp asks NVML only for the words of an out-of-memory: #112377, #185240
        r"NVML_SUCCESS == [^\n]*INTERNAL ASSERT FAILED at [^\n]*CUDACachingAllocator\.cpp",
        # Libraries: ATen/cuda/Exceptions.h, ATen/miopen/Exceptions.h; cuDNN 9 has HOST_ and DEVICE_ALLOCATION_FAILED
        r"(?:\w+ error: )?(?:CU|HIP)[A-Z_]+_ALLOC(?:ATION)?_FAILED\b|miopenStatusAllocFailed\b",
        # Near the limit, that is how cuBLAS says it of its handle: EleutherAI/lm-evaluation-harness#1689,
        # tensorflow#9489. An earlier device-side assert does it too, but not for large batches only.
        r"(?:CUDA|HIP) error: (?:CU|HIP)BLAS_STATUS_NOT_INITIALIZED when calling .?(?:cu|hip)blas(?:Lt)?Create\(",
        # NCCLUtils.cpp appends the last warning of NCCL, whose alloc.h has the second wording: NVIDIA/nccl#1235
        r"NCCL [Ee]rror\b[\s\S]*(?:\bout of memory\b|\bFailed to CUDA (?:host )?[cm]alloc\b)",
        # SYCL: its older layer, PI, has OUT_OF_RESOURCES for what UR calls OUT_OF_DEVICE_MEMORY
        r"(?:(?:\w+ backend failed|Native API failed|UR error)\b[\s\S]*)?"
        r"\b(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:(?:HOST|DEVICE)_MEMORY|RESOURCES)\b",
        # The host: c10/core/impl/alloc_cpu.cpp, C++ (on Windows "bad allocation"), ATen/MapAllocator.cpp
        r"(?:\[enforce fail[^\]]*\].*)?DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        r"(?:std::bad_alloc|bad allocation)(?:$|\n)",
        r"unable to mmap \d+ bytes from file <[^\n]*Cannot allocate memory \(12\)",
    ),
}
PATTERNS = {failure: re.compile("|".join(f"(?:{each})" for each in all_)) for failure, all_ in WORDINGS.items()}


def failure_of(error: BaseException) -> Failure:
    """Why the step that ended with ``error`` failed; memory counts most, wherever in the chain of errors it lacked.

    An interrupt is the user's wish, whatever it interrupted.
    """
    if isinstance(error, KeyboardInterrupt):
        return Failure.OTHER
    found = {_failure_of_one(each) for each in _chain(error)}
    return next((each for each in (Failure.OUT_OF_MEMORY, Failure.OPERATOR_LIMIT) if each in found), Failure.OTHER)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and all that it came from, each once: users can tie errors into a ring."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += _sources(each)


def _sources(error: BaseException) -> list[BaseException]:
    """What ``error`` was raised from, and the members of a group.

    What was being handled counts too: code that fails while it deals with an out-of-memory would not have run at a
    smaller size. Not so where ``from`` names another cause or None, which says that the handled one explains nothing.
    torch.compile alone says ``from None`` to shorten the traceback of the very error that it passes on.
    """
    sources = [error.__cause__]
    if not error.__suppress_context__ or _root(error) == "torch":
        sources.append(error.__context__)
    if isinstance(error, GROUP):
        sources += getattr(error, "exceptions", ())
    return [each for each in sources if each is not None]


def _failure_of_one(error: BaseException) -> Failure:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return Failure.OUT_OF_MEMORY
    if type(error) in SPOKEN_BY_TORCH or _root(error) == "triton":  # Triton's OutOfResources is a bare Exception
        text = RELAYED.sub("", str(error))
        for failure, pattern in PATTERNS.items():
            if pattern.match(text):
                return failure
    return Failure.OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else Failure.OTHER


def _root(error: BaseException) -> str:
    """The package that the class of ``error`` is from."""
    return type(error).__module__.partition(".")[0]
