"""Plan -> what a person reads in the terminal. Pure: it prints nothing, and reads only the plan.

The words carry the meaning; colour only helps the eye.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradplan.plan import Plan
from gradplan.probes.evidence import Capacity, Trial
from gradplan.units import format_bytes
from gradplan.window import split_window


class Card(Protocol):
    """What the table of GPUs reads of one."""

    @property
    def slug(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def basis(self) -> str: ...


def summary(plan: Plan) -> RenderableType:
    """The recommended settings, what other GPUs could hold, and what to watch out for."""
    sections = [_header(plan), _settings(plan)]
    if plan.evidence.others:
        sections.append(_titled("What other GPUs could hold (predicted)", _others(plan)))
    if plan.warnings:
        sections.append(_titled("Watch out", _warnings(plan)))
    return Group(*itertools.chain.from_iterable((section, Text()) for section in sections))


def trial_lines(plan: Plan) -> Iterator[str]:
    """Every trial in one line, the smallest micro-batch first."""
    for trial in sorted(plan.evidence.trials, key=lambda trial: trial.micro_batch_size):
        num_bytes = _needed_bytes(trial)
        needs = "" if num_bytes is None else f", needs {format_bytes(num_bytes)}"
        verdict = "fits" if trial.fits else "does not fit"
        yield f"micro-batch of {trial.micro_batch_size}: {verdict}{needs} ({trial.source})"


def gpu_table(cards: Iterable[Card]) -> RenderableType:
    """The catalogue: the name to type, the driver's name, its memory, and what that number is based on."""
    table = _grid("name", "GPU", "memory", "basis", numbers=("memory",))
    for index, (_, family) in enumerate(itertools.groupby(cards, key=lambda card: card.family)):
        if index:
            table.add_row()
        for card in family:
            size = format_bytes(card.total_bytes)
            table.add_row(Text(card.slug, "bold"), Text(card.name), Text(size), Text(card.basis))
    return table


def to_text(content: RenderableType, width: int = 80) -> str:
    """Plain text for a pipe or a file: no line is wider than ``width`` or ends in spaces."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(content)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


# The sections


def _header(plan: Plan) -> RenderableType:
    device = plan.evidence.device
    model = Text.assemble(
        (plan.model, "bold"), f": {plan.num_parameters:,} parameters, {plan.optimizer}, {plan.precision}"
    )
    return Group(model, Text(f"{device.name} with {format_bytes(device.total_bytes)}, {plan.evidence.kind}"))


def _settings(plan: Plan) -> RenderableType:
    table = _grid()
    for label, value, reason in (
        ("micro-batch", _window(plan), _window_reason(plan)),
        ("accumulation steps", str(plan.accumulation_steps), _accumulation_reason(plan)),
        ("effective batch", str(plan.effective_batch_size), _batch_reason(plan)),
        ("learning rate", _learning_rate(plan), _learning_rate_reason(plan)),
        ("memory needed", *_memory(plan)),
    ):
        table.add_row(Text(label), Text(value, "bold cyan"), Text(reason))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _others(plan: Plan) -> RenderableType:
    accumulates = not _has_warning(plan, "no-effective-batch")
    columns = ("micro-batch", "accumulation steps") if accumulates else ("micro-batch",)
    table = _grid("GPU", "memory", *columns, numbers=("memory", *columns))
    for other in plan.evidence.others:
        size = other.max_micro_batch_size
        cells = [other.device.slug or other.device.name, format_bytes(other.device.total_bytes)]
        cells += [str(size) if size else "does not fit"]
        cells += [_steps_on(other, plan)] if accumulates else []
        table.add_row(*map(Text, cells))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _warnings(plan: Plan) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    for warning in plan.warnings:
        table.add_row(Text("-", "yellow"), Text(warning.message))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _titled(title: str, content: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), content)


def _grid(*titles: str, numbers: tuple[str, ...] = ()) -> Table:
    """Columns without lines; those of ``numbers`` are aligned at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.show_header = bool(titles)
    for title in titles:
        table.add_column(title, justify="right" if title in numbers else "left")
    return table


# The cells


def _window(plan: Plan) -> str:
    """``22, 21, 21``; one number where all are equal; ``9 x 8, 4 x 7`` where there are many."""
    sizes = plan.micro_batch_sizes
    if len(set(sizes)) == 1:
        return str(sizes[0])
    if len(sizes) <= 3:
        return ", ".join(map(str, sizes))
    runs = [(len(list(run)), size) for size, run in itertools.groupby(sizes)]
    return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)


def _window_reason(plan: Plan) -> str:
    largest = plan.max_micro_batch_size
    if plan.limited_by == "memory":
        return f"{largest} is the largest that fits"
    if plan.limited_by == "option":
        return f"up to {largest} was asked for, and fits"
    return "all samples of a step fit at once"


def _accumulation_reason(plan: Plan) -> str:
    each = f" on each of {plan.world_size} ranks" if plan.world_size > 1 else ""
    many = "micro-batch" if plan.accumulation_steps == 1 else "micro-batches"
    return f"{many} per optimizer step{each}"


def _batch_reason(plan: Plan) -> str:
    if _has_warning(plan, "no-effective-batch"):
        return "not given: the largest without accumulation"
    if plan.effective_batch_size == plan.base_batch_size:
        return "kept from the recipe"
    if _has_warning(plan, "dataset-shorter"):
        return "the dataset has no more"
    if _has_warning(plan, "batch-multiple"):
        return "the nearest multiple of BATCH_MULTIPLE"
    known = "" if plan.base_batch_size is None else f"; the recipe has {plan.base_batch_size}"
    return f"as asked for{known}"


def _learning_rate(plan: Plan) -> str:
    return "unknown" if plan.learning_rate is None else f"{plan.learning_rate:.3g}"


def _learning_rate_reason(plan: Plan) -> str:
    known = plan.base_learning_rate
    base = "yours" if known is None else f"{known:.3g}"
    multiplier = plan.learning_rate_multiplier
    tuned = "" if multiplier == 1 else f" x {multiplier:.3g} (tuned)"
    if plan.learning_rate_factor != 1:
        scaled = f"{base} x {plan.learning_rate_factor:.3g} ({plan.learning_rate_rule} rule)"
        return f"{scaled}{tuned}, confidence {plan.confidence}"
    if tuned:
        return base + tuned
    if known is None:
        return "nobody said"
    if plan.base_batch_size is None:
        return "as given, not scaled"
    if plan.base_batch_size == plan.effective_batch_size:
        return "kept from the recipe"
    no_rule = plan.learning_rate_rule == "none"
    return f"as in the recipe: {'no rule is known' if no_rule else 'no scaling'} for {plan.optimizer}"


def _memory(plan: Plan) -> tuple[str, str]:
    """What the chosen micro-batch needs, else what the largest that fits needs; and of how much."""
    how = "predicted" if plan.evidence.kind == "simulated" else "measured"
    limit = f"of {format_bytes(plan.evidence.limit_bytes)} usable"
    for size in (plan.micro_batch_size, plan.max_micro_batch_size):
        for trial in plan.evidence.trials:
            num_bytes = _needed_bytes(trial)
            if trial.fits and trial.micro_batch_size == size and num_bytes is not None:
                return format_bytes(num_bytes), f"{limit}; {how} for size {size}"
    return "unknown", limit


def _needed_bytes(trial: Trial) -> int | None:
    known = (trial.required_bytes, trial.peak_reserved_bytes, trial.peak_allocated_bytes)
    return next((num_bytes for num_bytes in known if num_bytes is not None), None)


def _steps_on(other: Capacity, plan: Plan) -> str:
    """Accumulation steps there, for the same effective batch on as many ranks."""
    multiple, size = plan.recipe.batch_multiple, other.max_micro_batch_size
    per_rank = plan.effective_batch_size // plan.world_size
    return "" if size < multiple else str(len(split_window(per_rank, size, multiple)))


def _has_warning(plan: Plan, code: str) -> bool:
    return any(warning.code == code for warning in plan.warnings)
