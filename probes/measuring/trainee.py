"""The user's model on its device, trained for a few steps at one size after another."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradplan.probes import step
from gradplan.probes.backwards import own_backwards
from gradplan.probes.batches import seed_everything
from gradplan.probes.evidence import Backward, Precision
from gradplan.probes.loading import user_code
from gradplan.probes.measuring.device_memory import DeviceMemory
from gradplan.probes.measuring.messages import Job, Report
from gradplan.probes.workload import Workload

NUM_STEPS = range(3, 9)  # until the peak has settled: the heap's free pieces fit better from step to step
SETTLED = 1.002  # a last step that raised the peak by less
RUNS: dict[Backward, Callable[..., Tensor]] = {"joint": step.run_losses_together, "sequential": step.run_loss_by_loss}


class Trainee:
    """A model that is built once, and trained anew for every job: each has an optimizer of its own."""

    def __init__(self, workload: Workload, precision: Precision, memory: DeviceMemory) -> None:
        self._workload = workload
        self._precision = precision
        self._memory = memory
        self._model: nn.Module | None = None
        self._model_bytes = 0

    def train(self, job: Job) -> Report:
        """As train.py does: some steps of a window, then an evaluation."""
        memory = self._memory
        limit_bytes = memory.limit_bytes()
        with memory.limited(limit_bytes), own_backwards() as num_own_backwards:
            model = self._model or self._build()
            try:
                seconds = self._steps(model, job)
            except RuntimeError as error:
                if job.backward == "sequential":
                    self._explain_shared_graph(error, job.micro_batch_size)
                raise
            self._evaluate(model, job.micro_batch_size)
            memory.synchronize()  # an error that comes late is this job's
            peaks = memory.peaks()
        trained = tuple(name for name, parameter in model.named_parameters() if parameter.grad is not None)
        model.zero_grad(set_to_none=True)
        gc.collect()
        return Report(
            limit_bytes=limit_bytes,
            peak_allocated_bytes=peaks.allocated_bytes,
            peak_reserved_bytes=peaks.reserved_bytes,
            num_retries=peaks.num_retries,
            step_seconds=statistics.median(seconds[1:]),
            leftover_bytes=max(0, memory.in_use_bytes() - self._model_bytes),
            model_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
            trained=trained,
            yields_losses=self._workload.yields_losses,
            own_backwards=num_own_backwards(),
        )

    def _build(self) -> nn.Module:
        seed_everything()
        model = self._workload.build_model()
        load_weights = getattr(self._workload.module, "load_weights", None)
        if load_weights is not None:
            with user_code("load_weights(model)"):
                load_weights(model)
        self._model = model.to(self._memory.device, torch.bfloat16 if self._precision == "bf16-true" else None)
        self._model_bytes = self._memory.in_use_bytes()
        return self._model

    def _steps(self, model: nn.Module, job: Job) -> list[float]:
        """Seconds of each."""
        memory = self._memory
        seed_everything()
        model.train()
        optimizer = self._workload.build_optimizer(model)
        # A step skipped for an overflow would make no state.
        scaler = torch.amp.GradScaler(memory.device.type, init_scale=1.0) if self._precision == "16-mixed" else None
        seconds: list[float] = []
        for number in range(1, NUM_STEPS.stop):
            peak_bytes = memory.peaks().reserved_bytes
            window = self._window(job)
            memory.synchronize()
            start_seconds = time.perf_counter()
            self._step(model, optimizer, scaler, window, memory.watched(RUNS[job.backward]))
            memory.synchronize()
            seconds.append(time.perf_counter() - start_seconds)
            if number >= NUM_STEPS.start and (memory.peaks().reserved_bytes or 0) <= (peak_bytes or 0) * SETTLED:
                break
        return seconds

    def _window(self, job: Job) -> Iterable[tuple[Any, float]]:
        """On the host one micro-batch after the other, as there each counts; all at once where items are counted."""
        size, share = job.micro_batch_size, 1 / job.num_micro_batches
        is_counted = getattr(self._workload.module, "count_items", None) is not None
        if not is_counted and self._memory.is_host:
            return ((self._workload.make_batch(size), share) for _ in range(job.num_micro_batches))
        num_drawn = job.num_in_window if is_counted else job.num_micro_batches
        drawn = [self._workload.make_batch(size) for _ in range(num_drawn)]
        return list(zip(drawn[: job.num_micro_batches], repeat(share), strict=False))

    def _step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: torch.amp.GradScaler | None,
        window: Iterable[tuple[Any, float]],
        run: Callable[..., Tensor],
    ) -> None:
        arguments = (model, optimizer, window, self._workload.compute_loss, self._memory.device)
        if scaler is None:
            step.train_window(*arguments, self._precision, None, run)
        else:
            step.train_window_scaled(*arguments, scaler, None, run)

    def _evaluate(self, model: nn.Module, size: int) -> None:
        workload = self._workload
        if workload.validation_dataset is None:
            return
        counts = [1.0] * (workload.num_counts or 1)
        batches = ((workload.make_validation_batch(size), counts) for _ in range(1))
        evaluated = (model, batches, workload.compute_loss_to_evaluate, self._memory.device, self._precision)
        step.evaluate(*evaluated, len(counts))

    def _explain_shared_graph(self, error: RuntimeError, size: int) -> None:
        from gradplan.probes.simulator import losses  # heavy, and no part of training

        if losses.is_second_backward(error):
            losses.explain_shared_graph(self._workload, size)
