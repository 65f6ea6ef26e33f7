"""Under torchrun: one measurement with a device on every rank, of which the first decides what all try next."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gradplan.probes.errors import GradplanError
from gradplan.probes.launch import Launch
from gradplan.probes.measuring.messages import Hello, Report

ALONE = Launch()
T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # longer than any trial may take


class FollowerError(GradplanError):
    """The first rank failed, and has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


class Ranks:
    """The processes that torchrun started, or this one alone. They speak through the host, never through the devices.

    Used in a ``with``. What a device runs out of stays with its rank's child process: nobody waits for another's.
    """

    def __init__(self, launch: Launch = ALONE) -> None:
        self.count = launch.num_ranks
        self.is_first = launch.is_first

    def __enter__(self) -> Ranks:
        if self.count > 1:
            dist.init_process_group("gloo", timeout=PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        if self.count > 1:
            dist.destroy_process_group()

    def share(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self.count == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[no-any-return]

    def collect(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values


def common_hello(hellos: list[Hello | None]) -> Hello | None:
    """The first device, with what the smallest one leaves; None where one has nothing to say."""
    known = [hello for hello in hellos if hello is not None]
    if len(known) < len(hellos):
        return None
    changes = {
        "limit_bytes": min(hello.limit_bytes for hello in known),
        "has_peaks": all(hello.has_peaks for hello in known),
    }
    return known[0].model_copy(update=changes)


def common_report(reports: list[Report]) -> Report:
    """What holds on every rank: a size fits where all say so, and takes the most that one of them takes."""
    failed = [report for report in reports if report.error is not None or report.reason is not None]
    if failed:
        return next((report for report in failed if report.reason is None), failed[0])

    def over_all(name: str, choose: Callable[[list[Any]], Any]) -> Any:
        values = [getattr(report, name) for report in reports]
        return None if None in values else choose(values)

    most = ("peak_allocated_bytes", "peak_reserved_bytes", "num_retries", "step_seconds")
    changes = {name: over_all(name, max) for name in most}
    return reports[0].model_copy(update={**changes, "limit_bytes": over_all("limit_bytes", min)})
