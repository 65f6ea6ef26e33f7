"""Start the worker, hand it jobs, watch it from outside, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Protocol

import psutil
from pydantic import ValidationError

from gradplan.probes.evidence import Frozen
from gradplan.probes.measuring.messages import MESSAGES, Hello, Report

POLL_SECONDS = 0.02
_alive: set[Child] = set()
WORKER = "gradplan.probes.measuring.worker"
DIED = "{what} ended its process without an exception ({how}); what it said last stands above"


class Task(Protocol):
    """What a worker is asked to do: a pydantic model that can say it in words."""

    @property
    def what(self) -> str: ...

    def model_dump_json(self) -> str: ...


class Child:
    """A new process that runs a user's model, started in ``folder``; ``worker`` is the module that it is.

    Where ``most_resident_bytes`` is given, it is killed when all of it holds more than that in RAM.
    """

    def __init__(
        self, start: Frozen, folder: str, most_resident_bytes: int | None = None, worker: str = WORKER
    ) -> None:
        self._most_resident_bytes = most_resident_bytes
        safe_path = ["-P"] if sys.version_info >= (3, 11) else []  # the working folder's files shadow no library
        self._process = subprocess.Popen(
            [sys.executable, *safe_path, "-m", worker, start.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,  # a group of its own, to be killed as one
        )
        _alive.add(self)
        self._hello: Hello | Report | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def hello(self, seconds: float | None = None) -> Hello | Report:
        """Its greeting, or a report that says why there is none."""
        if self._hello is None:
            self._hello = self._next("importing the model's file", seconds)
        return self._hello

    def run(self, job: Task, seconds: float | None = None) -> Report:
        """What it reports of a job, or how it ended before it could. It is not to be used after ``seconds``."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone, which is seen next
                self._process.stdin.write(job.model_dump_json().encode() + b"\n")
                self._process.stdin.flush()
        message = self._next(job.what, seconds)
        assert isinstance(message, Report)
        return message

    def close(self) -> None:
        """The process and what it started."""
        _alive.discard(self)
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _read(self) -> None:
        """In a thread, as a pipe may stay open after its end: what the user's code started may hold it."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)

    def _next(self, what: str, seconds: float | None) -> Hello | Report:
        end = None if seconds is None else time.monotonic() + seconds
        message: Hello | Report | None = None
        while message is None:
            has_ended = self._process.poll() is not None  # before its last line is looked for
            try:
                message = _as_message(self._lines.get(timeout=POLL_SECONDS * (5 if has_ended else 1)))
            except queue.Empty:
                if has_ended:
                    message = self._ended(what)
                elif self._outgrows():
                    message = Report(reason="out of memory")
                elif end is not None and time.monotonic() > end:
                    message = Report(reason="not in time")
        return message

    def _ended(self, what: str) -> Report:
        code = self._process.returncode
        if code == -9:
            return Report(reason="killed")
        return Report(error=DIED.format(how=_how_it_ended(code), what=what))

    def _outgrows(self) -> bool:
        if self._most_resident_bytes is None:
            return False
        try:
            return bool(psutil.Process(self._process.pid).memory_info().rss > self._most_resident_bytes)
        except psutil.Error:
            return False


def _as_message(line: bytes) -> Hello | Report | None:
    """None for what was printed before the worker could turn it aside, by whatever Python imports at its start."""
    try:
        return MESSAGES.validate_json(line)
    except ValidationError:
        sys.stderr.write(line.decode(errors="replace"))
        return None


def close_all() -> None:
    """Every child that is alive, before this process ends at once."""
    for child in list(_alive):
        child.close()


def _how_it_ended(return_code: int) -> str:
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return signal.Signals(-return_code).name
    except ValueError:
        return f"signal {-return_code}"
