"""What the peak is made of: at which moment of the training most memory is in use, and by what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from gradplan.probes.evidence import Anatomy, Part
from gradplan.probes.simulator.allocator import replay
from gradplan.probes.simulator.allocator_settings import DEFAULT_SETTINGS, AllocatorSettings
from gradplan.probes.simulator.trace import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    OPTIMIZER_STEP,
    Trace,
)

MOST_MODULES = 10
ACTIVATIONS = "activations"
TEMPORARIES = {
    FORWARD: ACTIVATIONS,
    EVALUATION: ACTIVATIONS,
    BACKWARD: "temporaries of the backward pass",
    OPTIMIZER_STEP: "temporaries of the optimizer step",
}


def anatomy(trace: Trace, micro_batch_size: int, settings: AllocatorSettings = DEFAULT_SETTINGS) -> Anatomy:
    """The storages that are alive when a trace's live bytes are largest, by kind, and by module for activations.

    Sizes are those that the step asks for. What the allocator reserves beyond them at its own peak, for rounding and
    in free blocks, is ``unused_bytes``.

    Raises:
        ValueError: nothing is known of the storages' births.
    """
    if len(trace.births) != len(trace.sizes) or not trace.sizes:
        raise ValueError("the trace does not say how its storages came about")
    last, alive = _at_peak(trace)
    parts: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for index in alive:
        birth = trace.births[index]
        kind = birth.kind or TEMPORARIES.get(birth.moment, "other")
        parts[kind] += trace.sizes[index]
        if kind == ACTIVATIONS:
            modules[_pattern(birth.module)] += trace.sizes[index]
    born = trace.births[last]
    return Anatomy(
        micro_batch_size=micro_batch_size,
        moment=born.moment,
        step=born.step,
        micro_batch=born.micro_batch,
        module=born.module if born.moment in (FORWARD, EVALUATION) else "",
        parts=_parts(parts.most_common()),
        modules=_parts(modules.most_common(MOST_MODULES)),
        unused_bytes=max(0, replay(trace.events, trace.sizes, settings=settings).reserved_bytes - parts.total()),
    )


def _at_peak(trace: Trace) -> tuple[int, list[int]]:
    """The storage whose birth makes the peak, and all that are alive then."""
    live = peak = position = 0
    for at, event in enumerate(trace.events):
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        if live > peak:
            peak, position = live, at
    alive = dict.fromkeys(event for event in trace.events[: position + 1] if event >= 0)
    for event in trace.events[: position + 1]:
        if event < 0:
            del alive[~event]
    return trace.events[position], list(alive)


def _pattern(path: str) -> str:
    """One name for a module and those like it: ``blocks.3.mlp`` and ``blocks.4.mlp`` are ``blocks.*.mlp``."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) or "the loss"


def _parts(found: Iterable[tuple[str, int]]) -> tuple[Part, ...]:
    return tuple(Part(name=name, num_bytes=num_bytes) for name, num_bytes in found if num_bytes)
