"""Traces on the cheapest tensors that a step can run on; the user's errors told from fake tensors' limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import psutil
from torch._subclasses.fake_tensor import FakeTensorMode

from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Notice, Recipe
from gradplan.probes.loading import describe, user_code
from gradplan.probes.simulator.building import as_fake, fake_models
from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.training import Setup, Tensors, trace_training

VALUE_CHECK_BYTES = 512 * 2**20  # a step this small is also run once for real: fake tensors cannot be NaN


class Tracer:
    """Traces one workload. Fake tensors first; then a model built for real; then real steps on the CPU.

    What fails on real tensors too is the user's error. ``notices`` says when real steps were needed.
    """

    def __init__(self, setup: Setup, progress: Callable[[str], None]) -> None:
        self.setup = setup
        self.notices: list[Notice] = []
        self._progress = progress
        self._tensors = Tensors.FAKE
        self._is_proven = False
        self._why_real = ""

    @property
    def is_real(self) -> bool:
        """Whether steps run for real, so that only small sizes can be traced."""
        return self._tensors is Tensors.REAL

    def recipe(self) -> Recipe:
        """What the planner reads of model.py; builds the model once, without memory where that works.

        Raises:
            UserCodeError: a builder failed or returned the wrong kind of thing.
        """
        workload, mode = self.setup.workload, FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with fake_models(mode):
                model = workload.build_model()
                return workload.recipe(model, workload.build_optimizer(model))
        except UserCodeError as error:
            if error.__cause__ is None:
                raise
        self._tensors = Tensors.CONVERTED
        model = workload.build_model()
        with fake_models(mode):
            as_fake(model, mode)
            return workload.recipe(model, workload.build_optimizer(model))

    def trace(self, size: int, num_micro_batches: int) -> Trace:
        """The trace of two optimizer steps of ``num_micro_batches`` micro-batches of ``size`` samples.

        Raises:
            UserCodeError: the user's step failed; the message names their line.
        """
        self._progress(f"tracing a micro-batch of {size}")
        while True:
            try:
                trace = trace_training(self.setup, self._tensors, size, num_micro_batches)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._step_down(error, size)
            else:
                self._proven()
                return trace

    def check_values(self, size: int, trace: Trace) -> None:
        """Run a small model's loss once for real: a NaN or an index out of range has no shape.

        Raises:
            UserCodeError: the loss is not finite, or fails on real tensors.
        """
        if self.is_real or trace.peak_live_bytes > VALUE_CHECK_BYTES:
            return
        workload = self.setup.workload
        model, batch = workload.build_model(), workload.make_batch(size)
        with user_code("compute_loss(model, batch)"):
            loss = workload.compute_loss(model, batch).item()
        if not math.isfinite(loss):
            raise UserCodeError(
                f"the loss of the first batch is {loss}; training from here cannot work. Look for a division by "
                "zero, a log of zero, or a batch without targets"
            )

    def _proven(self) -> None:
        if self.is_real and not self._is_proven:
            message = (
                "the step reads values of tensors, so it was run for real on the CPU at small batches and "
                f"extrapolated ({self._why_real})"
            )
            self.notices.append(Notice(code="real-steps", message=message))
        self._is_proven = True

    def _step_down(self, error: BaseException, size: int) -> None:
        """Take the next kind of tensors, unless the error would be the same there."""
        theirs = _as_user_error(error, size)
        is_contract = isinstance(error, UserCodeError) and error.__cause__ is None
        if is_contract or self.is_real or self._is_proven:
            raise theirs from error
        kinds = list(Tensors)
        self._tensors = kinds[kinds.index(self._tensors) + 1]
        num_copies = 4 if self.is_real else 1  # real steps make gradients and two moments as well
        if self._parameter_bytes() * num_copies > psutil.virtual_memory().available // 2:
            raise theirs from error
        if self.is_real:
            self._why_real = str(theirs)
            self._progress("running small steps for real on the CPU")

    def _parameter_bytes(self) -> int:
        try:
            with fake_models(FakeTensorMode(allow_non_fake_inputs=True)):
                model = self.setup.workload.build_model()
        except UserCodeError:
            return 0
        return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _as_user_error(error: BaseException, size: int) -> UserCodeError:
    if isinstance(error, UserCodeError):
        return error
    return UserCodeError(*describe(f"a training step with a micro-batch of {size}", error))
