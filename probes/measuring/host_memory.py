"""Memory of this process and of this machine: how much, how much at most, and a limit that the kernel enforces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

IS_LIMIT_ENFORCED = sys.platform == "linux"  # elsewhere RLIMIT_DATA is missing, or counts little
PR_SET_PDEATHSIG = 1
SIGKILL = 9
CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """What this process holds in RAM now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most that this process ever held in RAM.

    On Linux from the kernel's high-water mark, not from ``ru_maxrss``, which a new process inherits from the one
    that started it.
    """
    if sys.platform == "linux":
        return _status_bytes("VmHWM")
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


@contextlib.contextmanager
def growth_limited(num_bytes: int) -> Iterator[None]:
    """Inside, an allocation that would make this process larger than now by more than ``num_bytes`` fails.

    The kernel counts what is mapped to be written, touched or not. Does nothing where it enforces no such limit.
    """
    if not IS_LIMIT_ENFORCED:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [_status_bytes("VmData") + num_bytes, *(one for one in (soft, hard) if one != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_bytes() -> int:
    """What a new process can have: the machine's free and reclaimable memory, or what its control group leaves."""
    return min([psutil.virtual_memory().available, *_left_in_control_groups()])


def _left_in_control_groups(root: Path = CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Of every limited group around this process, version 1 or 2; a container sees its own as the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            left += _left_in(group, *names)
            if group == top:
                break
    return left


def _left_in(group: Path, limit_name: str, use_name: str, cache_name: str) -> list[int]:
    try:
        limit = int((group / limit_name).read_text())  # "max" is no number, and no limit
        use = int((group / use_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    return [max(0, limit - use + int(stat.get(cache_name, 0)))]  # pages of files are given back under pressure


def die_first() -> None:
    """Where the system runs out of memory after all, it ends this process and no other."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with(parent_pid: int) -> None:
    """From here on this process ends when ``parent_pid``, which started it, does, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
        if os.getppid() != parent_pid:  # it was quicker
            os._exit(1)
        return

    def watch() -> None:
        while psutil.pid_exists(parent_pid):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
