"""Traces on the cheapest tensors that a step can run on; the user's errors told from fake tensors' limits."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

import psutil
from torch import nn
from torch.optim import Optimizer

from gradplan.probes import step
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Backward, Notice, Recipe
from gradplan.probes.loading import describe
from gradplan.probes.simulator import losses
from gradplan.probes.simulator.building import are_fakes_left, fake_copy, fake_models, is_fake, new_mode
from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.training import Setup, Tensors, trace_training


class Tracer:
    """Traces one workload. Fake tensors first; then a model built for real; then real steps on the CPU.

    What fails on real tensors too is the user's error. ``notices`` says when real steps were needed; without
    ``may_be_real`` they are not taken.
    """

    def __init__(self, setup: Setup, progress: Callable[[str], None], may_be_real: bool = True) -> None:
        self.setup = setup
        self._may_be_real = may_be_real
        self.notices: list[Notice] = []
        self.backward: Backward | None = None
        self._progress = progress
        self._tensors = Tensors.FAKE
        self._is_proven = False
        self._why_real = ""

    @property
    def is_real(self) -> bool:
        """Whether steps run for real, so that only small sizes can be traced."""
        return self._tensors is Tensors.REAL

    def recipe(self) -> Recipe:
        """What the planner reads of model.py.

        Raises:
            UserCodeError: a builder failed or returned the wrong kind of thing.
        """
        return self.setup.workload.recipe(*self.build())

    def build(self) -> tuple[nn.Module, Optimizer]:
        """The model, without memory, and its optimizer.

        Raises:
            UserCodeError: a builder failed or returned the wrong kind of thing.
        """
        workload, mode = self.setup.workload, new_mode()
        if self._tensors is Tensors.FAKE:
            try:
                with fake_models(mode):
                    model = workload.build_model()
                    model = model if is_fake(model) else fake_copy(model, mode)
                    return model, workload.build_optimizer(model)
            except UserCodeError as error:
                if error.__cause__ is None:
                    raise
            self._tensors = Tensors.CONVERTED
            self._forget_fakes()
        model = workload.build_model()
        with fake_models(mode):
            model = fake_copy(model, mode)
            return model, workload.build_optimizer(model)

    def trace(self, size: int, num_micro_batches: int, backward: Backward | None = None) -> Trace:
        """The trace of two optimizer steps of ``num_micro_batches`` micro-batches of ``size`` samples.

        ``backward`` is for several losses, by default as ``self.backward`` says, and else after each loss.

        Raises:
            UserCodeError: the user's step failed; the message names their line.
        """
        self._progress(f"tracing a micro-batch of {size}")
        workload, backward = self.setup.workload, backward or self.backward
        while True:
            by_loss = workload.yields_losses and backward != "joint"
            joint = step.run_losses_together if workload.yields_losses else step.run_micro_batch
            setup = dataclasses.replace(self.setup, run=step.run_loss_by_loss if by_loss else joint)
            try:
                with redirect_stdout(sys.stderr):
                    trace = trace_training(setup, self._tensors, size, num_micro_batches)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if by_loss and losses.is_second_backward(error):
                    losses.explain_shared_graph(workload, size)
                if by_loss == workload.yields_losses or backward == "joint":
                    self._step_down(error, size)
            else:
                if by_loss == workload.yields_losses or backward == "joint":
                    self._proven(trace)
                    return trace
            self._forget_fakes()  # and once more, where only the call showed that there are several losses

    def check_values(self, unit: int, trace: Trace) -> None:
        """Run a small model's loss for real: values have no shape.

        Raises:
            UserCodeError: the loss is not finite, or fails on real tensors.
        """
        if self.is_real or trace.peak_live_bytes <= losses.VALUE_CHECK_BYTES:
            self.notices += losses.check_values(self.setup.workload, unit)

    def _note(self, code: str, message: str) -> None:
        self.notices.append(Notice(code=code, message=message))

    def _forget_fakes(self) -> None:
        """After a failure: the next kind of tensors must not meet fake ones that the user's file kept."""
        gc.collect()
        if are_fakes_left():
            self.setup.workload.reload()

    def _proven(self, trace: Trace) -> None:
        """Say once how the first trace was made."""
        if self._is_proven:
            return
        self._is_proven = True
        if self.is_real:
            message = (
                "the step reads values of tensors, so it was run for real on the CPU at small batches and "
                f"extrapolated ({self._why_real})"
            )
            self._note("real-steps", message)
        elif self._tensors is Tensors.CONVERTED:
            message = "the model's construction reads values of tensors, so it was built for real, in host memory"
            self._note("built-for-real", message)
        if trace.has_sparse_fakes:
            message = "the elements of sparse gradients are not counted: leave more headroom for large embeddings"
            self._note("sparse-gradients", message)
        if trace.is_compiled:
            message = "torch.compile was left out: compiled kernels need other memory, often less, sometimes more"
            self._note("compile-left-out", message)

    def _step_down(self, error: BaseException, size: int) -> None:
        """Take the next kind of tensors, unless the error would be the same there."""
        theirs = _as_user_error(error, size)
        is_contract = isinstance(error, UserCodeError) and error.__cause__ is None
        if is_contract or self.is_real or self._is_proven:
            raise theirs from error
        kinds = list(Tensors)
        self._tensors = kinds[kinds.index(self._tensors) + 1]
        if self.is_real and not self._may_be_real:
            raise theirs from error
        num_copies = 4 if self.is_real else 1  # real steps make gradients and two moments as well
        if self._parameter_bytes() * num_copies > psutil.virtual_memory().available // 2:
            raise theirs from error
        if self.is_real:
            self._why_real = str(theirs)
            self._progress("running small steps for real on the CPU")

    def _parameter_bytes(self) -> int:
        try:
            with fake_models(new_mode()):
                model = self.setup.workload.build_model()
        except UserCodeError:
            return 0
        return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _as_user_error(error: BaseException, size: int) -> UserCodeError:
    if isinstance(error, UserCodeError):
        return error
    return UserCodeError(*describe(f"a training step with a micro-batch of {size}", error))
