"""Start the worker, watch its memory from outside, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile

import psutil

from gradplan.probes.errors import UserCodeError
from gradplan.probes.worker import Job, Report

POLL_SECONDS = 0.02
DIED = (
    "a training step of {job.model} with a micro-batch of {job.micro_batch_size} ended its process without an "
    "exception ({how}); what it said last stands above"
)


def run_in_child(job: Job, folder: str) -> Report | None:
    """The last report of a new process with this job, started in ``folder``; None where it gave none for memory.

    It is out of memory where it says so, where all of it grew beyond ``job.memory_bytes`` and was killed here,
    and where the system killed it.

    Raises:
        UserCodeError: the user's code failed, or ended the process.
    """
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []  # the working folder's files shadow no library
    with tempfile.TemporaryFile() as out:  # not a pipe, which what the user's code starts might keep open
        process = subprocess.Popen(
            [sys.executable, *safe_path, "-m", "gradplan.probes.worker", job.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            cwd=folder,
            start_new_session=True,  # a group of its own, to be killed as one
        )
        try:
            is_too_large = _outgrows(process, job.memory_bytes)
        finally:
            _kill(process)
        out.seek(0)
        text = out.read().decode("utf-8")
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    report = Report.model_validate_json(lines[-1]) if lines else None
    if report is not None and report.error is not None:
        raise UserCodeError(report.error, report.details)
    if is_too_large or process.returncode == -9:
        return None if report is None else report.model_copy(update={"is_out_of_memory": True})
    if report is None or process.returncode:
        raise UserCodeError(DIED.format(job=job, how=_how_it_ended(process.returncode)))
    return report


def _outgrows(process: subprocess.Popen[bytes], most_bytes: int) -> bool:
    """Wait until it ends; whether it grew beyond ``most_bytes`` before."""
    with contextlib.suppress(psutil.Error):
        inside = psutil.Process(process.pid)
        while inside.memory_info().rss <= most_bytes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=POLL_SECONDS)
                return False
        return process.poll() is None
    process.wait()
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _how_it_ended(return_code: int) -> str:
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return signal.Signals(-return_code).name
    except ValueError:
        return f"signal {-return_code}"
