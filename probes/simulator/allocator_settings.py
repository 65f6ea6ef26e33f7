"""What PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF) changes about memory. Without torch.

Options, bounds and rules are those of c10/core/AllocatorConfig.cpp, c10/cuda/CUDAAllocatorConfig.h and
c10/cuda/CUDACachingAllocator.cpp of torch 2.13. Older releases know fewer options, and read ``>`` in a list of
divisions as beginning at the last interval that is named, not after it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradplan.probes.errors import UsageError

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MIB = 2**20
MIN_BLOCK_BYTES = 512
MAX_SMALL_BYTES = 1 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_GRANULARITY_BYTES = 2 * MIB
NUM_INTERVALS = 16  # for rounding: below 2 MiB, below 4 MiB, and so on by powers of 2; the last one has no end

IGNORED = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)


@dataclass(frozen=True)
class AllocatorSettings:
    """The options that change memory; sizes are bytes.

    - ``expandable_segments``: one growing range of addresses for each pool, instead of segments.
    - ``max_split_bytes``: larger blocks serve only requests at least as large, whole; None is no such bound.
    - ``max_non_split_rounding_bytes``: how much larger than such a request its block must not be.
    - ``roundup_power2_divisions``: for each of 16 intervals of sizes, into how many steps each power of 2 is
      divided when a request is rounded; 0 and 1 are the usual multiples of 512 bytes.
    - ``garbage_collection_threshold``: the share of the allowed bytes above which old cached segments are given
      back before a new one is taken; 0 is never, and without a memory fraction PyTorch never does.
    - ``per_process_memory_fraction``: the share of ``device_bytes``, all of the device's memory, that is allowed.
    - ``large_segment_bytes``: the segments that requests below 10 MiB share.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    device_bytes: int | None = None

    @property
    def allowed_bytes(self) -> int | None:
        """What the memory fraction lets the allocator reserve; None is no limit.

        Raises:
            ValueError: there is a fraction, but ``device_bytes`` is not known.
        """
        if self.per_process_memory_fraction >= 1:
            return None
        if self.device_bytes is None:
            raise ValueError("per_process_memory_fraction is of the device's memory: give device_bytes too")
        return int(self.per_process_memory_fraction * self.device_bytes)

    def rounded_bytes(self, num_bytes: int) -> int:
        """The block that a request needs.

        A division finer than 512 bytes is not used: 1200 bytes at 4 divisions take 1536, not 1280.
        """
        interval = max(0, num_bytes.bit_length() - MIB.bit_length())
        divisions = self.roundup_power2_divisions[min(interval, NUM_INTERVALS - 1)]
        if divisions > 1 and num_bytes > MIN_BLOCK_BYTES * divisions:
            return round_up(num_bytes, 2 ** (num_bytes.bit_length() - 1) // divisions)
        return round_up(num_bytes, MIN_BLOCK_BYTES)

    def segment_bytes(self, size: int) -> int:
        """Bytes of a new segment for a request of ``size`` bytes, already rounded to blocks."""
        if size <= MAX_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return round_up(size, SEGMENT_GRANULARITY_BYTES)


DEFAULT_SETTINGS = AllocatorSettings()


def round_up(num_bytes: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``num_bytes``."""
    return -(-num_bytes // multiple) * multiple


def settings_of_environment(device_bytes: int) -> tuple[AllocatorSettings, str]:
    """What the environment asks of PyTorch's allocator on a device of ``device_bytes``, and the text that says so.

    Raises:
        UsageError: PyTorch would refuse it.
    """
    name = next((name for name in VARIABLES if os.environ.get(name)), "")
    text = os.environ.get(name, "")
    try:
        return parse_settings(text, device_bytes), text
    except ValueError as error:
        raise UsageError(f"the environment variable {name}: {error}") from None


def parse_settings(text: str, device_bytes: int | None = None) -> AllocatorSettings:
    """Settings from the text of the environment variable, such as ``expandable_segments:True``.

    ``device_bytes``, all of the device's memory, is what a ``per_process_memory_fraction`` is of.

    Raises:
        ValueError: an option or a value that PyTorch would refuse, or the backend cudaMallocAsync, which is
            another allocator altogether.
    """
    values: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", "".join(text.split())):
        key, _, value = part.partition(":")
        if bool(key) != bool(value):
            raise ValueError(f"allocator setting {part!r}: expected key:value, as in expandable_segments:True")
        if key == "backend":
            _check_backend(value)
        elif key in OPTIONS:
            field, read = OPTIONS[key]
            values[field] = read(key, value)
        elif key and key not in IGNORED:
            raise ValueError(f"unknown allocator setting {key!r}: understood are {', '.join(sorted(OPTIONS))}")
    settings = AllocatorSettings(device_bytes=device_bytes, **values)
    _check_sizes(settings.large_segment_bytes, values)
    return settings


def _check_backend(name: str) -> None:
    if name != "native":
        raise ValueError(f"backend:{name} is another allocator, which is not simulated: only backend:native is")


def _check_sizes(least_bytes: int, values: dict[str, Any]) -> None:
    if least_bytes <= MIN_OWN_SEGMENT_BYTES:
        raise ValueError(f"large_segment_size_mb:{least_bytes // MIB} is too small: it must be more than 10")
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        num_bytes = values.get(OPTIONS[key][0], least_bytes)
        if num_bytes < least_bytes:
            raise ValueError(f"{key}:{num_bytes // MIB} is too small: it must be at least {least_bytes // MIB}")


def _read_flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{key}:{value} is neither {key}:True nor {key}:False")
    return value == "True"


def _read_mib(key: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{key}:{value} is not a whole number of MiB")
    return int(value) * MIB


def _read_share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    can_be_whole = key == "per_process_memory_fraction"
    if not 0 <= share <= 1 or (not can_be_whole and share in (0, 1)):
        bounds = "from 0 to 1" if can_be_whole else "between 0 and 1"
        raise ValueError(f"{key}:{value} is not a number {bounds}")
    return share


def _read_divisions(key: str, value: str) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_2(key, value),) * NUM_INTERVALS
    if not value.endswith("]"):
        raise ValueError(f"{key}:{value} lacks its closing bracket")
    divisions = [0] * NUM_INTERVALS
    last, is_first = 0, True
    for entry in filter(None, value[1:-1].split(",")):
        begin, _, number = entry.partition(":")
        count = 0 if number == "0" else _power_of_2(key, number)
        if begin == ">":
            divisions[last + 1 :] = [count] * (NUM_INTERVALS - 1 - last)
            continue
        last = min(_power_of_2(key, begin).bit_length() - 1, NUM_INTERVALS - 1)
        if is_first:
            divisions[:last] = [count] * last
            is_first = False
        divisions[last] = count
    return tuple(divisions)


def _power_of_2(key: str, value: str) -> int:
    number = int(value) if value.isdecimal() else 0
    if number < 1 or number & (number - 1):
        raise ValueError(f"{key}: {value!r} is not a power of 2; expected is {key}:4 or {key}:[256:1,512:2,>:4]")
    return number


OPTIONS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _read_flag),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_share),
    "large_segment_size_mb": ("large_segment_bytes", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "max_split_size_mb": ("max_split_bytes", _read_mib),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_share),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}
