"""What probes hand to the planner: frozen facts, without torch.

Bytes are bytes, times are seconds, batch sizes are samples.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Bytes = Annotated[int, Field(ge=0, lt=2**63)]
MOST_SAMPLES = 2**20  # where nothing else bounds a micro-batch

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
Backward = Literal["joint", "sequential"]
Reason = Literal[
    "out of memory",
    "operator limit",  # a kernel refuses that size, however much memory there is
    "killed",  # by the system, as where the host's memory ran out
    "not in time",
    "allocator retried",  # it only fitted after the cache had been given back, which every step would repeat
    "above the limit",  # it ran, and took more than it may
]


class Frozen(BaseModel):
    """Data that leaves the process: immutable, no unknown keys, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _identifier(name: str) -> str:
    """As it stands in train.py's code."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a name")
    return name


def _printable(text: str) -> str:
    """As it may be written to a terminal."""
    if not text.isprintable():
        raise ValueError(f"{text!r} cannot be printed")
    return text


class Notice(Frozen):
    """Something the user should know: a stable code for programs, a sentence for people."""

    code: str
    message: str


class Device(Frozen):
    """The device that was probed. ``slug`` is its name on the command line."""

    name: str
    total_bytes: int = Field(gt=0)
    slug: str = ""


class Trial(Frozen):
    """One micro-batch size that was tried as a full training step.

    ``num_micro_batches`` micro-batches per optimizer step, two optimizer steps. ``source`` says how: "traced"
    at this size, "replayed" from smaller traces, or "measured" on the device. ``reason`` says why a measured one
    does not fit. ``predicted_bytes`` is what a simulation said of it before anything was measured. ``step_seconds``
    is the median of steps after the first.
    """

    micro_batch_size: int = Field(ge=1)
    num_micro_batches: int = Field(ge=1)
    fits: bool
    source: Literal["traced", "replayed", "measured"]
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    required_bytes: int | None = None
    step_seconds: float | None = None
    reason: Reason | None = None
    predicted_bytes: Bytes | None = None

    @property
    def needed_bytes(self) -> int | None:
        """The most exact of the sizes that are known, None where none is."""
        known = (self.required_bytes, self.peak_reserved_bytes, self.peak_allocated_bytes)
        return next((num_bytes for num_bytes in known if num_bytes is not None), None)


class BackwardPeak(Frozen):
    """What several losses need at one micro-batch size, summed for one backward or with one after each."""

    backward: Backward
    micro_batch_size: int = Field(ge=1)
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class Part(Frozen):
    """Some of the memory in use."""

    name: Annotated[str, AfterValidator(_printable)]
    num_bytes: Bytes


class Anatomy(Frozen):
    """What is in memory when most of it is in use, for one micro-batch size.

    ``moment`` is where in the training that is: of which optimizer ``step`` and ``micro_batch`` (counted from 1), and
    in a forward pass, inside which ``module``. ``parts`` are all bytes in use by kind, the largest first; ``modules``
    are the activations of the modules that keep most, those that are alike together. ``unused_bytes`` is what the
    allocator reserves beyond.
    """

    micro_batch_size: int = Field(ge=1)
    moment: Literal["building", "forward", "backward", "optimizer step", "evaluation"]
    step: int = Field(ge=0)
    micro_batch: int = Field(ge=0)
    module: Annotated[str, AfterValidator(_printable)]
    parts: tuple[Part, ...]
    modules: tuple[Part, ...]
    unused_bytes: Bytes


class Lever(Frozen):
    """What one change would do to the largest micro-batch, predicted; the first is none. ``how`` says what to type.

    The sizes are bounded by the memory alone, not by the recipe or an option. ``required_bytes`` is what the smallest
    micro-batch needs.
    """

    name: Annotated[str, AfterValidator(_printable)]
    how: Annotated[str, AfterValidator(_printable)]
    max_micro_batch_size: int = Field(ge=0)
    required_bytes: Bytes


class Capacity(Frozen):
    """What another GPU could hold, replayed from the same traces."""

    device: Device
    max_micro_batch_size: int = Field(ge=0)


class Evidence(Frozen):
    """Every trial of one probe, and what the device may give.

    ``limit_bytes`` is what the allocator may take: (memory - context - other use) x (1 - headroom).
    ``backward`` is the form that was tried: "sequential" runs it after each of several losses. Where both forms
    exist, ``backward_peaks`` compares them at one size. ``anatomy`` is that of the largest size that fits, or of the
    smallest where none does; ``levers`` is empty where nobody asked.
    """

    kind: Literal["simulated", "measured"]
    device: Device
    limit_bytes: int
    trials: tuple[Trial, ...]
    others: tuple[Capacity, ...] = ()
    backward: Backward = "joint"
    backward_peaks: tuple[BackwardPeak, ...] = ()
    has_several_losses: bool = False
    anatomy: Anatomy | None = None
    levers: tuple[Lever, ...] = ()
    notices: tuple[Notice, ...] = ()

    @property
    def largest_fitting(self) -> int:
        """The largest micro-batch that was tried and fits, 0 where none does."""
        return max((trial.micro_batch_size for trial in self.trials if trial.fits), default=0)


class TuningTrial(Frozen):
    """A complete short run with ``multiplier`` times the planned learning rate.

    ``value`` is the loss that is compared, None where it diverged. ``seed`` is that of a run made to check a finding;
    the search itself gives all its runs one seed.
    """

    number: int = Field(ge=0)
    multiplier: float = Field(gt=0)
    seed: int | None = None
    value: float | None
    seconds: float | None = None


class Recipe(Frozen):
    """What model.py says about itself: the part of a workload that the planner reads.

    ``model`` is the path as the user typed it; ``builder`` is the name in that file that gives the model: a
    function, a class, or a module; ``names`` are the names of the contract that the file defines.
    ``base_batch_size`` and ``base_learning_rate`` are None where nobody said them. ``num_counts`` is how many
    numbers ``count_items`` gives, None without it. ``is_stream``: the dataset can only be read in order.
    ``lightning`` says what a Lightning module gives in the place of ``compute_loss``, ``build_optimizer`` and
    ``build_scheduler``.
    """

    model: str
    builder: Annotated[str, AfterValidator(_identifier)] = "build_model"
    names: tuple[str, ...]
    optimizer: str
    num_parameters: int
    base_batch_size: int | None = None
    base_learning_rate: float | None = None
    dataset_length: int | None = None
    batch_multiple: int = 1
    has_batch_norm: bool = False
    num_counts: int | None = Field(default=None, ge=1)
    is_stream: bool = False
    lightning: tuple[Literal["training_step", "configure_optimizers", "schedule"], ...] = ()
    notices: tuple[Notice, ...] = ()
