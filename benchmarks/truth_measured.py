"""What others measured beside what a replay says: absolute peaks, slopes over the batch, and the largest batch.

Slopes are those of device-level readings, whose context, kernels and workspaces do not grow with the batch.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from truth_records import NotRebuilt, Record, script_of
from truth_stage import Recording, play

from gradplan.probes.simulator.allocator import Peaks, fits, required_bytes
from gradplan.probes.simulator.curve import Curve
from gradplan.probes.simulator.trace import Trace

MIB = 2**20
SMALL_BATCHES = (2, 3)
SATURATED = 0.96  # of a card's memory: what is read there is what the card holds, not what the run needs
Kind = Literal["microbenchmark", "script", "slope", "bracket", "peak", "device"]
TARGETS: dict[Kind, float] = {"microbenchmark": 0.5, "script": 4.0, "slope": 6.0}
TITLES: dict[Kind, str] = {
    "microbenchmark": "peak allocated of microbenchmarks, MiB (target: within 0.5 %)",
    "script": "peak reserved of the GPT-2 and ViT-L scripts, MiB (target: within 4 %)",
    "slope": "slopes of device-level readings, MiB per sample (target: within 6 %)",
    "bracket": "largest batch that fits (target: 85 % right)",
    "peak": "other peaks, MiB",
    "device": "device-level readings, MiB: predicted without context, kernels and cuDNN's workspaces (no target)",
}
RIGHT_BRACKETS = 0.85


@dataclass(frozen=True)
class Row:
    """One comparison; ``predicted`` and ``measured`` in MiB, or MiB per sample, or for a bracket as text."""

    id: str
    kind: Kind
    family: str
    case: str  # which batch, or which part of the record
    measured: float | str
    predicted: float | str
    error_percent: float | None
    is_within: bool | None  # the target; None where there is none
    confidence: str

    @classmethod
    def of(cls, record: Record, kind: Kind, case: str, measured: float, predicted: float) -> Row:
        """A row of numbers."""
        error = 100 * (predicted / measured - 1)
        target = TARGETS.get(kind)
        is_within = None if target is None else abs(error) <= target
        confidence = str(record.confidence)
        return cls(record.id, kind, record.family, case, measured, predicted, error, is_within, confidence)


class Predictor:
    """Replays of one record at any batch size: traced there, or from the curve through two small batches."""

    def __init__(self, records: list[Record]) -> None:
        self.record = record = records[0]
        self._script_of = script_of(record)
        self._curve: Curve | None = None
        num_batches = sum(len(one.batches) for one in records) + (record.ooms is not None)
        if num_batches > 1 and record.family != "microbench":
            small, large = (self._recording(size).trace for size in SMALL_BATCHES)
            self._curve = Curve.fit(small, large, SMALL_BATCHES)

    def _recording(self, batch_size: int) -> Recording:
        return play(self._script_of(batch_size), self.record.capability, self.record.release)

    def recording(self, batch_size: int) -> Recording:
        """The trace at a batch size, and where its peaks were reset."""
        if self._curve is None:
            return self._recording(batch_size)
        return Recording(self._curve.at(batch_size))

    def peaks(self, batch_size: int) -> Peaks:
        """With room to spare."""
        return self.recording(batch_size).peaks()

    def trace(self, batch_size: int) -> Trace:
        """To be replayed under a limit."""
        return self.recording(batch_size).trace


def rows_of(records: list[Record], is_strict: bool = False) -> Iterator[Row]:
    """The rows of every record that can be rebuilt; the others are named on standard error, and why.

    Where ``is_strict``, only a missing library is a reason, and anything else is raised.

    Device-level readings of one model at several batches may stand in several records: they make one slope.
    """
    by_curve = {id(record): (record.id, "") for record in records}
    by_curve |= {id(record): (record.family, record.model) for record in records if kind_of(record) == "device"}
    for _, group in groupby(sorted(records, key=lambda r: _first(records, by_curve, r)), lambda r: by_curve[id(r)]):
        together = list(group)
        try:
            yield from _rows(together)
        except Exception as error:  # a library that is not there, or knows no such model
            if is_strict and not isinstance(error, ImportError):
                raise
            if isinstance(error, NotRebuilt):
                _left_out(together, str(error))
                continue
            _left_out(together, f"{type(error).__name__}: {error}")


def _first(records: list[Record], by_curve: dict[int, tuple[str, str]], record: Record) -> int:
    return next(index for index, other in enumerate(records) if by_curve[id(other)] == by_curve[id(record)])


def _left_out(records: list[Record], reason: str) -> None:
    for record in records:
        print(f"{record.id}: not rebuilt: {reason}", file=sys.stderr)


def kind_of(record: Record) -> Kind:
    """What a record's number is compared with, by its metric."""
    if record.fits is not None:
        return "bracket"
    if record.family == "microbench" and "allocated" in record.metric:
        return "microbenchmark"
    if str(record.id).startswith("rasbt-"):
        return "script"
    return "device" if "max device memory" in record.metric else "peak"


def _rows(records: list[Record]) -> Iterator[Row]:
    kind = kind_of(records[0])
    predictor = Predictor(records)
    if kind == "bracket":
        yield _bracket(predictor)
    elif kind == "device":
        yield from _device_rows(predictor, records)
    else:
        yield from _peak_rows(predictor, kind)


def _peak_rows(predictor: Predictor, kind: Kind) -> Iterator[Row]:
    record = predictor.record
    is_reserved = "reserved" in record.metric or "NVML" in record.metric
    measured = record.measured if record.minus_context_mib is None else [record.minus_context_mib]
    highest = 0.0
    for batch_size, value in zip(record.batches, measured, strict=True):
        peaks = predictor.peaks(batch_size)
        highest = max(highest, peaks.reserved_bytes / MIB)  # one process measured all
        predicted = highest if is_reserved else peaks.allocated_bytes / MIB
        yield Row.of(record, kind, f"{batch_size}", value, predicted)


def _device_rows(predictor: Predictor, records: list[Record]) -> Iterator[Row]:
    points = []
    for record in records:
        gpu = record.gpu
        for batch_size, value in zip(record.batches, record.measured, strict=True):
            if gpu is not None and value > SATURATED * gpu.total_bytes / MIB:
                continue
            predicted = predictor.peaks(batch_size).reserved_bytes / MIB
            yield Row.of(record, "device", f"{batch_size}", value, predicted)
            points.append((batch_size, value, predicted))
    points.sort()
    if len(points) > 1:
        (first, low, low_predicted), (last, high, high_predicted) = points[0], points[-1]
        slopes = (high - low) / (last - first), (high_predicted - low_predicted) / (last - first)
        yield Row.of(records[0], "slope", f"{first} to {last}", *slopes)


def _bracket(predictor: Predictor) -> Row:
    record = predictor.record
    if record.gpu is None:
        raise NotRebuilt(f"which GPU is meant by {record.fields['gpu']!r}?")
    limit = record.gpu.total_bytes - max(record.gpu.context_bytes, record.release.least_context_bytes)
    fitting = record.fits or None
    failing = record.ooms if fitting else record.batches[0]
    verdicts, needs, cases = [], [], []
    for batch_size, is_fitting in ((fitting, True), (failing, False)):
        if batch_size is None:
            continue
        trace = predictor.trace(batch_size)
        verdicts.append(fits(trace.events, trace.sizes, limit) == is_fitting)
        needs.append(f"{100 * required_bytes(trace.events, trace.sizes) / limit:.0f}")
        cases.append(f"{'fits' if is_fitting else 'ooms'} {batch_size}")
    measured = " / ".join(("<= 100" if case.startswith("fits") else "> 100") for case in cases)
    return Row(
        record.id,
        "bracket",
        record.family,
        ", ".join(cases),
        measured,
        " / ".join(needs),
        None,
        all(verdicts),
        str(record.confidence),
    )


def tables(rows: list[Row]) -> Iterator[str]:
    """One table per kind, by family."""
    for kind, title in TITLES.items():
        chosen = [row for row in rows if row.kind == kind]
        if not chosen:
            continue
        yield from ("", title)
        yield f"{'record':52} {'at':>20} {'measured':>12} {'predicted':>12} {'error %':>8}"
        for _, group in groupby(chosen, lambda row: row.family):
            yield from (_line(row) for row in group)
        yield _summary_line(kind, chosen)


def _line(row: Row) -> str:
    measured, predicted = (
        value if isinstance(value, str) else f"{value:.{1 if row.kind == 'slope' else 0}f}"
        for value in (row.measured, row.predicted)
    )
    if row.error_percent is None:
        error = "right" if row.is_within else "WRONG"
    else:
        error = f"{row.error_percent:+.2f}" + ("" if row.is_within in (True, None) else " !")
    return f"{row.id:52} {row.case:>20} {measured:>12} {predicted:>12} {error:>8}"


def _summary_line(kind: Kind, rows: list[Row]) -> str:
    found = summary(rows)[kind]
    parts = [f"{found['rows']} rows"]
    if "median_error_percent" in found:
        parts.append(f"median error {found['median_error_percent']:.2f} %, mean {found['mean_error_percent']:.2f} %")
    if "within" in found:
        parts.append(f"{found['within']} within the target")
    return "; ".join(parts)


def summary(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """By kind: how many rows, the median and mean of |error|, how many are within the target."""
    found: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(row.kind for row in rows):
        chosen = [row for row in rows if row.kind == kind]
        errors = [abs(row.error_percent) for row in chosen if row.error_percent is not None]
        found[kind] = {"rows": len(chosen)}
        if errors:
            found[kind] |= {
                "median_error_percent": statistics.median(errors),
                "mean_error_percent": statistics.mean(errors),
            }
        verdicts = [row.is_within for row in chosen if row.is_within is not None]
        if verdicts:
            found[kind] |= {"within": sum(verdicts), "target_percent": TARGETS.get(kind)}
    return found


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows as plain values."""
    return [dataclasses.asdict(row) for row in rows]
