"""The child process of a measurement. ``python -m`` this, with a ``Start``; it takes jobs until its input ends.

It is handed the path of model.py and reads it itself, so that it is as near to train.py as can be, and it keeps the
model from job to job. What it has to say goes to the standard output that it was started with; what the user's code
prints goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from gradplan.probes.errors import GradplanError, UserCodeError
from gradplan.probes.evidence import Frozen
from gradplan.probes.loading import describe
from gradplan.probes.measuring.device_memory import DeviceMemory, open_device
from gradplan.probes.measuring.failures import Failure, failure_of
from gradplan.probes.measuring.host_memory import die_first, die_with
from gradplan.probes.measuring.messages import Hello, Job, Report, Start
from gradplan.probes.measuring.trainee import Trainee
from gradplan.probes.workload import Workload, load_workload

PID = "GRADPLAN_WORKER"  # who may speak: a process that was forked off inherits all but its number


def main() -> None:
    """Be the process that the first argument describes."""
    start = Start.model_validate_json(sys.argv[1])
    talk(start.parent_pid, partial(serve, start))


def talk(parent_pid: int, serve: Callable[[Iterable[str]], Iterator[Frozen]]) -> NoReturn:
    """Hand on what comes in and what ``serve`` makes of it, and end with the parent or with the last message."""
    os.environ[PID] = str(os.getpid())
    jobs, out = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    die_with(parent_pid)
    die_first()
    with open(jobs, encoding="utf-8") as lines, open(out, "w", encoding="utf-8") as pipe:
        for message in serve(lines):
            pipe.write(message.model_dump_json() + "\n")
            pipe.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever the user's code still has running


def serve(start: Start, jobs: Iterable[str]) -> Iterator[Hello | Report]:
    """A greeting, then a report for each job; after one that failed this process has no more to say."""
    torch.zeros(2**17).add_(1)  # starts the threads of OpenMP, which ends the process where it cannot
    try:
        memory = open_device(start)
        if start.world_size > 1:
            _be_a_rank(memory.device)
        workload = load_workload(start.model, largest_first=start.largest_first)
        yield memory.hello()
        trainee = Trainee(workload, start.precision, memory)
    except BaseException as error:
        yield failed(error, f"loading {start.model}")
        return
    for line in jobs:
        job = Job.model_validate_json(line)
        try:
            report = trainee.train(job) if job.task == "train" else check(workload, memory)
        except BaseException as error:
            report = failed(error, job.what)
        yield report
        if report.reason is not None or report.error is not None:
            return


def _be_a_rank(device: torch.device) -> None:
    """The only one of its group, so that the step adds up over ranks, in the buffers that this takes."""
    backend = "gloo" if device.type == "cpu" else None
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def check(workload: Workload, memory: DeviceMemory) -> Report:
    """Is the loss finite, a mean, the sum of independent losses?"""
    from gradplan.probes.simulator import losses  # heavy, and no part of training

    unit = workload.batch_multiple
    with memory.limited(memory.limit_bytes()):
        notices = [*losses.check_values(workload, unit), *workload.batch_size_notices(2 * unit)]
        is_exact = not workload.yields_losses or losses.is_exact_loss_by_loss(workload, unit)
    return Report(notices=tuple(notices), is_exact_loss_by_loss=is_exact)


def leave_if_forked() -> None:
    """A process that the user's code forked off has nothing to report."""
    if os.environ.get(PID, str(os.getpid())) != str(os.getpid()):
        os._exit(1)


def failed(error: BaseException, what: str) -> Report:
    """Too large for the device or for an operator; else the user's error, with their lines."""
    leave_if_forked()
    failure = failure_of(error)
    if failure is Failure.OUT_OF_MEMORY:
        return Report(reason="out of memory")
    shown = error if isinstance(error, GradplanError) else UserCodeError(*describe(what, error))
    message, details = str(shown), getattr(shown, "details", "")
    if failure is Failure.OPERATOR_LIMIT:
        return Report(reason="operator limit", error=message, details=details)
    return Report(error=message, details=details)


if __name__ == "__main__":
    main()
