"""The child process of a measurement: train for two steps, and say what that took. ``python -m`` this, with a job.

It is handed the path of model.py and reads it itself, so that it is as near to train.py as can be: a new process
for every trial. What it has to say goes to the standard output that it was started with, one JSON document a
line; what the user's code prints goes to standard error.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor

from gradplan.probes import step
from gradplan.probes.backwards import own_backwards
from gradplan.probes.batches import seed_everything
from gradplan.probes.errors import GradplanError, UserCodeError
from gradplan.probes.evidence import Backward, Frozen, Notice, Precision
from gradplan.probes.host_memory import die_first, die_with, growth_limited, peak_resident_bytes, resident_bytes
from gradplan.probes.loading import describe, user_code
from gradplan.probes.workload import Workload, load_workload

NUM_STEPS = range(3, 9)  # until the peak has settled: the heap's free pieces fit better from step to step
SETTLED = 1.002  # a last step that raised the peak by less
MAPPED_FACTOR = 2  # an LSTM of oneDNN was seen to map two thirds more than it touches
SLACK_BYTES = 256 * 2**20  # mapped and never touched: stacks of threads, the allocator's spare room
RUNS: dict[Backward, Callable[..., Tensor]] = {"joint": step.run_losses_together, "sequential": step.run_loss_by_loss}
ALLOCATOR_ERROR = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|^std::bad_alloc$")


class Job(Frozen):
    """What the child shall do: train, or check the values of the loss.

    ``num_micro_batches`` of a window are run; ``num_in_window`` is how many it has, which train.py draws first
    where it counts items. ``memory_bytes`` is what the whole process may have. ``largest_first`` are the dataset's
    largest samples, which need not be looked for again.
    """

    task: Literal["train", "check"]
    model: str
    parent_pid: int
    memory_bytes: int
    precision: Precision
    backward: Backward
    micro_batch_size: int
    num_micro_batches: int
    num_in_window: int
    largest_first: tuple[int, ...] | None = None


class Report(Frozen):
    """What the child has to say, each time all that it knows; a later one replaces it.

    ``context_bytes`` is resident before the model is built: Python, torch, the user's file and its dataset.
    ``peak_bytes`` is the most that was ever resident, the context included. ``trained`` are the parameters that
    got a gradient, ``own_backwards`` how many the user's code ran. ``error`` and ``details`` are the message of
    a user's error.
    """

    context_bytes: int
    peak_bytes: int | None = None
    step_seconds: float | None = None
    trained: tuple[str, ...] = ()
    yields_losses: bool = False
    own_backwards: int = 0
    is_exact_loss_by_loss: bool = True
    notices: tuple[Notice, ...] = ()
    is_out_of_memory: bool = False
    error: str | None = None
    details: str = ""


def main() -> None:
    """Do the job of the first argument."""
    job = Job.model_validate_json(sys.argv[1])
    out = os.dup(1)
    os.dup2(2, 1)
    die_with(job.parent_pid)
    die_first()
    with open(out, "w", encoding="utf-8") as pipe:
        for report in run(job):
            pipe.write(report.model_dump_json() + "\n")
            pipe.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever the user's code still has running


def run(job: Job) -> Iterator[Report]:
    """The context at once, in case that this process does not live to say more; then the whole."""
    torch.zeros(2**17).add_(1)  # starts the threads of OpenMP, which ends the process where it cannot
    context_bytes = 0
    try:
        workload = load_workload(job.model, largest_first=job.largest_first)
        context_bytes = resident_bytes()
        yield Report(context_bytes=context_bytes)
        with growth_limited(MAPPED_FACTOR * max(0, job.memory_bytes - context_bytes) + SLACK_BYTES):
            report = TASKS[job.task](job, workload, context_bytes)
    except BaseException as error:
        report = _failure(error, job, context_bytes)
    yield report


def _train(job: Job, workload: Workload, context_bytes: int) -> Report:
    try:
        with own_backwards() as num_own_backwards:
            seconds, trained = train(job, workload)
    except RuntimeError as error:
        if job.backward == "sequential":
            _explain_shared_graph(error, workload, job.micro_batch_size)
        raise
    return Report(
        context_bytes=context_bytes,
        peak_bytes=peak_resident_bytes(),
        step_seconds=seconds,
        trained=trained,
        yields_losses=workload.yields_losses,
        own_backwards=num_own_backwards(),
    )


def _explain_shared_graph(error: RuntimeError, workload: Workload, size: int) -> None:
    from gradplan.probes.simulator import losses  # heavy, and no part of training

    if losses.is_second_backward(error):
        losses.explain_shared_graph(workload, size)


def train(job: Job, workload: Workload) -> tuple[float, tuple[str, ...]]:
    """As train.py does: some steps of a window, then an evaluation. Seconds of the last step; what was trained."""
    device, size = torch.device("cpu"), job.micro_batch_size
    seed_everything()
    model = workload.build_model()
    load_weights = getattr(workload.module, "load_weights", None)
    if load_weights is not None:
        with user_code("load_weights(model)"):
            load_weights(model)
    model.to(device, torch.bfloat16 if job.precision == "bf16-true" else None).train()
    optimizer = workload.build_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)  # a step skipped for an overflow would make no state
    is_counted = getattr(workload.module, "count_items", None) is not None
    share = 1 / job.num_micro_batches
    seconds = 0.0
    for num_steps in range(1, NUM_STEPS.stop):
        start_seconds, peak_bytes = time.perf_counter(), peak_resident_bytes()
        if is_counted:
            in_window = [workload.make_batch(size) for _ in range(job.num_in_window)]
            window: Any = list(zip(in_window[: job.num_micro_batches], repeat(share), strict=False))
        else:
            window = ((workload.make_batch(size), share) for _ in range(job.num_micro_batches))
        arguments = (model, optimizer, window, workload.compute_loss, device)
        if job.precision == "16-mixed":
            step.train_window_scaled(*arguments, scaler, None, RUNS[job.backward])
        else:
            step.train_window(*arguments, job.precision, None, RUNS[job.backward])
        seconds = time.perf_counter() - start_seconds
        if num_steps >= NUM_STEPS.start and peak_resident_bytes() <= peak_bytes * SETTLED:
            break
    if workload.validation_dataset is not None:
        counts = [1.0] * (workload.num_counts or 1)
        batches = ((workload.make_validation_batch(size), counts) for _ in range(1))
        step.evaluate(model, batches, workload.compute_loss_to_evaluate, device, job.precision, len(counts))
    return seconds, tuple(name for name, parameter in model.named_parameters() if parameter.grad is not None)


def _check(job: Job, workload: Workload, context_bytes: int) -> Report:
    """Is the loss finite, a mean, the sum of independent losses?"""
    from gradplan.probes.simulator import losses

    unit = workload.batch_multiple
    notices = [*losses.check_values(workload, unit), *workload.batch_size_notices(2 * unit)]
    is_exact = not workload.yields_losses or losses.is_exact_loss_by_loss(workload, unit)
    return Report(context_bytes=context_bytes, notices=tuple(notices), is_exact_loss_by_loss=is_exact)


TASKS = {"train": _train, "check": _check}


def _failure(error: BaseException, job: Job, context_bytes: int) -> Report:
    if is_out_of_memory(error):
        return Report(context_bytes=context_bytes, is_out_of_memory=True)
    if not isinstance(error, GradplanError):
        error = UserCodeError(*describe(f"a training step with a micro-batch of {job.micro_batch_size}", error))
    return Report(context_bytes=context_bytes, error=str(error), details=getattr(error, "details", ""))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, in Python, NumPy, torch or the system, as what this error was raised from."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError) and ALLOCATOR_ERROR.search(str(error)):
            return True
        error = error.__cause__
    return False


if __name__ == "__main__":
    main()
