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

from gradplan import reasons
from gradplan.advice import quoted
from gradplan.planfile import Plan
from gradplan.probes.evidence import MOST_SAMPLES, Anatomy
from gradplan.units import format_bytes


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


def summary(plan: Plan, with_details: bool = False) -> RenderableType:
    """The recommended settings, what other GPUs could hold, and what to watch out for."""
    sections = [_header(plan), _settings(plan), *(_detail_sections(plan) if with_details else ())]
    if plan.evidence.others:
        sections.append(_titled("What other GPUs could hold (predicted)", _others(plan)))
    if plan.warnings:
        sections.append(_titled("Watch out", _warnings(plan)))
    return _spaced(sections)


def details(plan: Plan) -> RenderableType:
    """What the memory is needed for, and what would make room, as far as the evidence says."""
    return _spaced(_detail_sections(plan))


def trial_lines(plan: Plan) -> Iterator[str]:
    """Every trial in one line, the smallest micro-batch first."""
    for trial in sorted(plan.evidence.trials, key=lambda trial: trial.micro_batch_size):
        num_bytes = trial.needed_bytes
        verb = "takes" if trial.required_bytes is None and trial.source == "replayed" else "needs"
        needs = "" if num_bytes is None else f", {verb} {format_bytes(num_bytes)}"
        if trial.predicted_bytes is not None:
            needs += f", {format_bytes(trial.predicted_bytes)} predicted"
        verdict = "fits" if trial.fits else "does not fit" + (f" ({trial.reason})" if trial.reason else "")
        seconds = trial.step_seconds
        took = "" if seconds is None else f", {reasons.format_seconds(seconds)} for {reasons.micro_batches(trial)}"
        yield f"micro-batch of {trial.micro_batch_size}: {verdict}{needs}{took} ({trial.source})"


def backward_lines(plan: Plan) -> Iterator[str]:
    """For several losses: what both forms need, side by side."""
    names = {"joint": "backward of the sum", "sequential": "backward loss by loss"}
    for peak in plan.evidence.backward_peaks:
        used = ", used" if peak.backward == plan.backward else ""
        reserved, allocated = format_bytes(peak.peak_reserved_bytes), format_bytes(peak.peak_allocated_bytes)
        yield (
            f"{names[peak.backward]}, micro-batch of {peak.micro_batch_size}: reserves {reserved}, "
            f"{allocated} of it allocated{used} ({reasons.how(plan)})"
        )


def next_step(plan: Plan, script_path: str) -> str:
    """The command that trains."""
    start = "python" if plan.world_size == 1 else f"torchrun --nproc-per-node {plan.world_size}"
    return f"{start} {quoted(script_path)}{' --learning-rate X' if plan.learning_rate is None else ''}"


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


def describe(plan: Plan, width: int = 80) -> str:
    """What ``gradplan show`` prints, as plain text of at most ``width`` columns."""
    return to_text(summary(plan, with_details=True), width)


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


def setting_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """(what, how much, why) for each setting."""
    optional = {
        "tuning": reasons.tuning(plan),
        "backward": reasons.backward(plan),
        "step time": reasons.step_time(plan),
        "samples per second": reasons.throughput(plan),
    }
    return [
        ("micro-batch", reasons.window(plan), reasons.window_reason(plan)),
        ("accumulation steps", str(plan.accumulation_steps), reasons.accumulation_reason(plan)),
        ("effective batch", str(plan.effective_batch_size), reasons.batch_reason(plan)),
        ("learning rate", reasons.learning_rate(plan), reasons.learning_rate_reason(plan)),
        ("memory needed", *reasons.memory(plan)),
        *((label, *row) for label, row in optional.items() if row is not None),
    ]


def _settings(plan: Plan) -> RenderableType:
    table = _grid()
    for label, value, reason in setting_rows(plan):
        table.add_row(Text(label), Text(value, "bold cyan"), Text(reason))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _others(plan: Plan) -> RenderableType:
    accumulates = not reasons.has_warning(plan, "no-effective-batch")
    columns = ("micro-batch", "accumulation steps") if accumulates else ("micro-batch",)
    table = _grid("GPU", "memory", *columns, numbers=("memory", *columns))
    for other in plan.evidence.others:
        cells = [other.device.slug or other.device.name, format_bytes(other.device.total_bytes)]
        cells += [reasons.size_on(other, plan)]
        cells += [reasons.steps_on(other, plan)] if accumulates else []
        table.add_row(*map(Text, cells))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _detail_sections(plan: Plan) -> list[RenderableType]:
    sections = []
    if plan.evidence.anatomy is not None:
        sections.append(_titled(reasons.anatomy_title(plan.evidence.anatomy), _anatomy(plan.evidence.anatomy)))
    if plan.evidence.levers:
        sections.append(
            _titled(
                "What would make room: the largest micro-batch, whatever the recipe asks for (predicted)", _levers(plan)
            )
        )
    return sections


def _anatomy(anatomy: Anatomy) -> RenderableType:
    table = _grid("", "memory", numbers=("memory",))
    for name, num_bytes, is_inside in reasons.anatomy_rows(anatomy):
        style = "dim" if is_inside else ""
        table.add_row(Text(f"  {name}" if is_inside else name, style), Text(format_bytes(num_bytes), style))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _levers(plan: Plan) -> RenderableType:
    table = _grid("change", "micro-batch", "how", numbers=("micro-batch",))
    now, *changes = plan.evidence.levers
    for lever in (now, *(lever for lever in changes if lever.max_micro_batch_size > now.max_micro_batch_size)):
        size = str(lever.max_micro_batch_size or "none")
        if lever.max_micro_batch_size >= MOST_SAMPLES:
            size = f"at least {size}"
        table.add_row(Text(lever.name), Text(size), Text(lever.how))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _warnings(plan: Plan) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    for warning in plan.warnings:
        table.add_row(Text("-", "yellow"), Text(warning.message))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _spaced(sections: Iterable[RenderableType]) -> RenderableType:
    return Group(*itertools.chain.from_iterable((section, Text()) for section in sections))


def _titled(title: str, content: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), content)


def _grid(*titles: str, numbers: tuple[str, ...] = ()) -> Table:
    """Columns without lines; those of ``numbers`` are aligned at the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.show_header = bool(titles)
    for title in titles:
        table.add_column(title, justify="right" if title in numbers else "left", overflow="fold")
    return table
