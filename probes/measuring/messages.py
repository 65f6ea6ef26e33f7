"""What a measurement and its child process tell each other, one JSON document a line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from gradplan.probes.evidence import Backward, Device, Frozen, Notice, Precision, Reason


class Start(Frozen):
    """Which process to be, as its only argument.

    ``device`` is a name of torch's, or ``test:`` and the file of an invented one. ``memory_bytes`` is what the process
    may have of it, the context included; None means all that is free, and on the CPU there is always a number.
    ``headroom_percent`` of what is left for tensors stays free. ``largest_first`` are the dataset's largest samples,
    which need not be looked for again.
    """

    model: str
    device: str
    parent_pid: int
    precision: Precision
    memory_bytes: int | None = None
    headroom_percent: float = 0.0
    world_size: int = 1
    largest_first: tuple[int, ...] | None = None


class Hello(Frozen):
    """The device is open and the file is loaded.

    ``limit_bytes`` is what tensors may take: what is free for them, less the headroom. ``capability`` is NVIDIA's
    (major, minor). ``has_peaks`` says whether the device tells how much was in use.
    """

    kind: Literal["hello"] = "hello"
    device: Device
    context_bytes: int
    limit_bytes: int
    capability: tuple[int, int] | None = None
    has_peaks: bool = True


class Job(Frozen):
    """Train for some steps, or check the values of the loss.

    ``num_micro_batches`` of a window are run; ``num_in_window`` is how many it has, which train.py draws first where
    it counts items.
    """

    task: Literal["train", "check"] = "train"
    backward: Backward
    micro_batch_size: int
    num_micro_batches: int
    num_in_window: int

    @property
    def what(self) -> str:
        """What is being done, in words."""
        return f"a training step with a micro-batch of {self.micro_batch_size}"


class Report(Frozen):
    """How a job went.

    ``reason`` says why it did not come to its end, unless by an error of the user's, whose message and traceback are
    ``error`` and ``details``. ``limit_bytes`` is as in ``Hello``, read again before the job.
    ``peak_allocated_bytes`` and ``peak_reserved_bytes`` are beside the context; None where nobody counts them.
    ``num_retries``: how often the allocator gave its cache back to find room. ``step_seconds`` is the median step after
    the first. ``leftover_bytes`` are still in use beyond the model, when all that belongs to the job is gone.
    ``model_bytes`` are its parameters and buffers. ``trained`` are the parameters that got a gradient,
    ``own_backwards`` how many the user's code ran. Of a tuning run there is ``value``, the loss that is compared,
    unless it ``has_diverged``.
    """

    kind: Literal["report"] = "report"
    reason: Reason | None = None
    error: str | None = None
    details: str = ""
    limit_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    num_retries: int = 0
    step_seconds: float | None = None
    leftover_bytes: int = 0
    trained: tuple[str, ...] = ()
    yields_losses: bool = False
    own_backwards: int = 0
    is_exact_loss_by_loss: bool = True
    notices: tuple[Notice, ...] = ()
    model_bytes: int = 0
    value: float | None = None
    has_diverged: bool = False


Message = Annotated[Hello | Report, Field(discriminator="kind")]
MESSAGES: TypeAdapter[Hello | Report] = TypeAdapter(Message)
