"""Runs in the format of xmem.json beside replays, and beside four published predictors.

Every run is rebuilt offline on fake tensors, at two small batches; the curve through them gives its batch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truth_loops import trace_run
from truth_models import MODELS

from gradplan.probes.simulator.allocator import fits, replay, required_bytes
from gradplan.probes.simulator.catalogue import find
from gradplan.probes.simulator.curve import Curve

MIB = 2**20
SMALL_BATCHES = (2, 3)
RESERVATION = 1.05  # a planner leaves 5 % free
PREDICTORS = ("xMem", "DNNMem", "SchedTune", "LLMem")
SLUGS = {"NVIDIA GeForce RTX 3060": "rtx-3060-12gb", "NVIDIA GeForce RTX 4060": "rtx-4060"}


@dataclass(frozen=True)
class Run:
    """One published run; sizes in bytes. ``ground_bytes`` is its peak without the CUDA context."""

    id: str
    family: str
    model: str
    n_params: int
    optimizer: str
    batch_size: int
    gpu: str
    gpu_total_bytes: int
    zero_grad_mode: int | None
    ground_bytes: int
    ground_is_oom: bool
    flag: str | None
    estimates: dict[str, int]
    capped_runs: list[dict[str, Any]]
    cap_bracket: dict[str, int | None]
    path: str
    commit: str


@dataclass(frozen=True)
class Prediction:
    """What a replay says of one run; sizes in bytes."""

    peak_reserved_bytes: int  # with room to spare
    peak_allocated_bytes: int
    required_bytes: int  # the smallest limit under which it still runs
    is_oom_on_card: bool
    is_oom_under_caps: tuple[bool, ...]


Pairs = list[tuple[Run, Prediction]]


def read_runs(path: Path) -> list[Run]:
    """The runs of a file in the format of xmem.json."""
    return [Run(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def pairs_of(runs: list[Run]) -> Iterator[tuple[Run, Prediction]]:
    """The runs that can be rebuilt and what a replay says of them; the others are named on standard error."""
    for run in runs:
        try:
            yield run, predict(run)
        except Exception as error:  # a library that is not there, or is another version than the runs'
            print(f"{run.id}: not rebuilt: {type(error).__name__}: {error}", file=sys.stderr)


def tables(pairs: Pairs) -> Iterator[str]:
    """What comes after the rows."""
    yield from ("", *error_table(pairs), "", *verdict_table(pairs), "", *planner_table(pairs))


def as_json(pairs: Pairs) -> list[dict[str, Any]]:
    """The runs as plain values."""
    return [{**dataclasses.asdict(run), **dataclasses.asdict(prediction)} for run, prediction in pairs]


def summary(pairs: Pairs) -> dict[str, Any]:
    """By family: how many runs, the median and mean error of those that finished, and the verdicts."""
    found = {}
    for family in dict.fromkeys(run.family for run, _ in pairs):
        chosen = [(run, prediction) for run, prediction in pairs if run.family == family]
        errors = [abs(percent(p.peak_reserved_bytes, run)) for run, p in chosen if not run.ground_is_oom]
        capped = [
            guess == case["oom"]
            for run, p in chosen
            for guess, case in zip(p.is_oom_under_caps, run.capped_runs, strict=True)
        ]
        found[family] = {
            "rows": len(chosen),
            "median_error_percent": statistics.median(errors) if errors else None,
            "mean_error_percent": statistics.mean(errors) if errors else None,
            "right_on_card": sum(p.is_oom_on_card == run.ground_is_oom for run, p in chosen),
            "right_under_cap": sum(capped),
            "under_cap": len(capped),
        }
    return found


def predict(run: Run) -> Prediction:
    """Replay the rebuilt run at its own batch size, freely, on its card and under each cap."""
    gpu = find(SLUGS[run.gpu])
    mode = run.zero_grad_mode or 0
    curve = curve_of(run.model, run.optimizer, mode, gpu.compute_capability or (8, 0), run.n_params)
    trace = curve.at(run.batch_size)
    peaks = replay(trace.events, trace.sizes)
    card_bytes = run.gpu_total_bytes - gpu.context_bytes

    def is_oom(limit_bytes: int) -> bool:
        return not fits(trace.events, trace.sizes, limit_bytes)

    return Prediction(
        peaks.reserved_bytes,
        peaks.allocated_bytes,
        required_bytes(trace.events, trace.sizes),
        is_oom(card_bytes),
        tuple(is_oom(min(card_bytes, capped["cap_bytes"])) for capped in run.capped_runs),
    )


@functools.cache
def curve_of(
    model: str, optimizer: str, zero_grad_mode: int, capability: tuple[int, int], num_parameters: int
) -> Curve:
    """The curve through traces of two small batches.

    Raises:
        ValueError: the model is not the published one, or its events depend on the batch size.
    """
    traces = []
    for batch_size in SMALL_BATCHES:
        trace, found = trace_run(MODELS[model], optimizer, zero_grad_mode, batch_size, capability)
        if found != num_parameters:
            raise ValueError(f"{found} parameters; the published model has {num_parameters}")
        traces.append(trace)
    curve = Curve.fit(traces[0], traces[1], SMALL_BATCHES)
    if curve is None:
        raise ValueError("the events differ between two batch sizes")
    return curve


HEADER = (
    f"{'run':47} {'measured':>8} {'peak':>7} {'error':>7} "
    + " ".join(f"{name:>9}" for name in PREDICTORS)
    + f" {'required':>8} {'largest cap OOM':>15} {'smallest that fits':>18}  card caps\n"
    f"{'':47} {'MiB':>8} {'MiB':>7} {'%':>7} "
    + " ".join(f"{'%':>9}" for _ in PREDICTORS)
    + f" {'MiB':>8} {'MiB':>15} {'MiB':>18}"
)


def row(run: Run, prediction: Prediction) -> str:
    """One run. '*': a noisy measurement; '+': it ran out of memory there; a dot for each cap foretold rightly."""
    name = run.id.removeprefix("xmem2-") + ("*" if run.flag else "")
    estimates = [prediction.peak_reserved_bytes, *map(run.estimates.get, PREDICTORS)]
    errors = ["-" if run.ground_is_oom or e is None else f"{percent(e, run):+.1f}" for e in estimates]
    caps = "".join(
        "." if guess == capped["oom"] else "X"
        for guess, capped in zip(prediction.is_oom_under_caps, run.capped_runs, strict=True)
    )
    largest, smallest = (mib(value) if value else "-" for value in bracket(run))
    card = "right" if prediction.is_oom_on_card == run.ground_is_oom else "WRONG"
    return (
        f"{name:47} {mib(run.ground_bytes):>7}{'+' if run.ground_is_oom else ' '} "
        f"{mib(prediction.peak_reserved_bytes):>7} {errors[0]:>7} "
        + " ".join(f"{error:>9}" for error in errors[1:])
        + f" {mib(prediction.required_bytes):>8} {largest:>15} {smallest:>18}  {card} {caps}"
    )


def percent(estimate_bytes: float, run: Run) -> float:
    """Signed error of an estimate of the peak."""
    return 100 * (estimate_bytes / run.ground_bytes - 1)


def mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f}"


def bracket(run: Run) -> tuple[int | None, int | None]:
    """(the largest cap that ran out of memory, the smallest that fitted)."""
    return run.cap_bracket["largest_oom_cap_bytes"], run.cap_bracket["smallest_fit_cap_bytes"]


def error_table(pairs: Pairs) -> Iterator[str]:
    """Median and mean of |error| by family and predictor, over the runs that finished."""
    yield "error of the peak, median / mean %, signed median %"
    yield f"{'':24} {'runs':>4}  " + "  ".join(f"{name:>20}" for name in ("gradplan", *PREDICTORS))
    for family in ("CNN", "transformer"):
        for label, wanted in (("all", True), ("without noisy ones", False)):
            chosen = [p for p in pairs if p[0].family == family and (wanted or not p[0].flag)]
            finished = [(run, prediction) for run, prediction in chosen if not run.ground_is_oom]
            if not finished:
                continue
            errors = [[percent(prediction.peak_reserved_bytes, run) for run, prediction in finished]]
            errors += [
                [percent(run.estimates[key], run) for run, _ in finished if key in run.estimates] for key in PREDICTORS
            ]
            cells = "  ".join(f"{in_short(values):>20}" for values in errors)
            yield f"{family + ', ' + label:24} {len(finished):>4}  {cells}"


def in_short(errors: list[float]) -> str:
    if not errors:
        return "-"
    sizes = [abs(error) for error in errors]
    return f"{statistics.median(sizes):.2f} / {statistics.mean(sizes):.2f}, {statistics.median(errors):+.1f}"


def verdict_table(pairs: Pairs) -> Iterator[str]:
    """How often 'out of memory' or 'fits' was foretold rightly."""
    yield "out of memory or fits, right of all"
    for family in ("CNN", "transformer"):
        chosen = [(run, prediction) for run, prediction in pairs if run.family == family]
        if not chosen:
            continue
        card = [prediction.is_oom_on_card == run.ground_is_oom for run, prediction in chosen]
        capped = [
            (guess == capped["oom"], capped["oom"])
            for run, prediction in chosen
            for guess, capped in zip(prediction.is_oom_under_caps, run.capped_runs, strict=True)
        ]
        right = sum(is_right for is_right, _ in capped)
        missed = sum(is_oom for is_right, is_oom in capped if not is_right)
        yield (
            f"{family:12} whole card {sum(card)} of {len(card)}; under a cap {right} of {len(capped)}"
            f" (foretold as fitting, ran out: {missed}; as running out, fitted: {len(capped) - right - missed})"
        )


def planner_table(pairs: Pairs) -> Iterator[str]:
    """A planner that reserves 1.05 times the estimate: is the job killed, does it run, or is it unknown?"""
    yield f"as a planner ({RESERVATION} times the estimate)  right wrong undetermined  median reservation"
    choices: list[tuple[str, Callable[[Run, Prediction], int | None]]] = [
        ("gradplan, peak", lambda run, prediction: prediction.peak_reserved_bytes),
        ("gradplan, requirement", lambda run, prediction: prediction.required_bytes),
        *((name, functools.partial(published, name)) for name in PREDICTORS),
    ]
    for name, choose in choices:
        found = [(run, estimate) for run, prediction in pairs if (estimate := choose(run, prediction)) is not None]
        counts = [verdict(run, estimate) for run, estimate in found]
        reserved = [percent(RESERVATION * estimate, run) for run, estimate in found if not run.ground_is_oom]
        right, wrong, unknown = (counts.count(word) for word in ("right", "wrong", "undetermined"))
        median = f"{statistics.median(reserved):+.1f} %" if reserved else "-"
        yield f"{name:38}  {right:5} {wrong:5} {unknown:12}  {median:>18}"


def published(name: str, run: Run, _: Prediction) -> int | None:
    return run.estimates.get(name)


def verdict(run: Run, estimate_bytes: int) -> str:
    """ "right", "wrong" or "undetermined", for a reservation made from an estimate of this run."""
    reserved = RESERVATION * estimate_bytes
    foretold_oom = estimate_bytes > run.gpu_total_bytes
    if foretold_oom != run.ground_is_oom:
        return "wrong"
    largest_oom, smallest_fit = bracket(run)
    if foretold_oom or (smallest_fit is not None and reserved >= smallest_fit):
        return "right"
    return "wrong" if largest_oom is not None and reserved <= largest_oom else "undetermined"
