"""What a size needs is told from what was measured: by a straight line, or by a simulation that trials correct."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradplan.probes.evidence import Device
from gradplan.probes.measuring.messages import Hello, Start
from gradplan.probes.prediction import MOST_GROWTH, Corrected, Line, foresee
from gradplan.probes.simulator import allocator
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
MIB = 2**20
MANY = 10**6


def line(measured: dict[int, int], failed: tuple[int, ...] = ()) -> Line:
    """One that has learned so much."""
    made = Line()
    for size, num_bytes in measured.items():
        made.learn(size, num_bytes)
    for size in failed:
        made.learn_failure(size)
    return made


# The straight line


def test_a_line_that_has_learned_nothing_knows_nothing() -> None:
    assert Line().largest(1000, MANY, 1) is None
    assert line({}, (7,)).largest(1000, MANY, 1) is None


def test_a_line_goes_through_the_two_largest_sizes_that_were_measured() -> None:
    made = line({8: 180, 1: 3, 4: 100})
    assert made.bytes_per_sample == 20
    assert made.largest(300, MANY, 1) == 14
    assert made.largest(299, MANY, 1) == 13
    assert made.largest(300, 9, 1) == 9


@settings(deadline=None)
@given(
    slope=st.integers(1, 1000),
    fixed=st.integers(0, 10**6),
    sizes=st.sets(st.integers(1, 1000), min_size=2, max_size=5),
    share=st.floats(0.01, 1),
)
def test_a_line_is_exact_where_memory_is_one(slope: int, fixed: int, sizes: set[int], share: float) -> None:
    answer = max(1, math.floor(share * MOST_GROWTH * max(sizes)))
    made = line({size: fixed + slope * size for size in sizes})
    assert made.largest(fixed + slope * answer, MANY, 1) == answer


def test_a_line_is_followed_no_further_than_so_many_times_the_largest_size() -> None:
    assert line({3: 100}).largest(10**12, MANY, 1) == 3 * MOST_GROWTH
    assert line({1: 100, 4: 100}).largest(10**12, MANY, 1) == 4 * MOST_GROWTH
    assert line({1: 100, 4: 103}).largest(10**12, MANY, 1) == 4 * MOST_GROWTH


def test_a_line_that_seems_to_fall_is_level() -> None:
    made = line({2: 110, 4: 100})
    assert made.bytes_per_sample == 0
    assert made.largest(200, MANY, 1) == 4 * MOST_GROWTH


@settings(max_examples=300, deadline=None)
@example(measured={4: 100}, above=1, more=0, limit=10**9)
@given(
    measured=st.dictionaries(st.integers(1, 1000), st.integers(0, 10**6), min_size=1, max_size=4),
    above=st.integers(1, 5000),
    more=st.integers(0, 1000),
    limit=st.integers(0, 10**9),
)
def test_a_line_keeps_away_from_what_failed(measured: dict[int, int], above: int, more: int, limit: int) -> None:
    failed = max(measured) + above
    wanted = line(measured, (failed, failed + more)).largest(limit, MANY, 1)
    assert wanted is not None
    assert 1 <= wanted < failed
    assert wanted <= max(line(measured).largest(limit, MANY, 1) or 0, (failed + max(measured)) // 2)


def test_a_line_that_leads_to_what_failed_halves_the_gap() -> None:
    assert line({2: 10, 4: 20}, (30, 20)).largest(1000, MANY, 1) == 12
    assert line({2: 10, 4: 20}, (30, 20)).largest(75, MANY, 1) == 15


def test_a_line_gives_multiples_and_at_least_one_of_them() -> None:
    made = line({8: 80, 16: 160})
    assert made.largest(399, MANY, 8) == 32
    assert made.largest(5, MANY, 8) == 8
    assert made.largest(10**9, 100, 8) == 96


# A prediction that is corrected


def corrected(base: Callable[[float], float], measured: dict[int, float]) -> Corrected:
    """``base`` says what so many samples need."""
    made = Corrected(lambda size, growth: base(size * growth))
    for size, num_bytes in measured.items():
        made.learn(size, round(num_bytes))
    return made


def floored(fixed: float, slope: float, floor: float = 0) -> Callable[[float], float]:
    return lambda samples: max(floor, fixed + slope * samples)


CONSTANTS = st.integers(0, 4000).map(lambda mebibytes: mebibytes * MIB)
SLOPES = st.floats(0.1, 50).map(lambda mebibytes: mebibytes * MIB)
GROWTHS = st.floats(0.3, 3.5)
PAIRS = st.tuples(st.integers(1, 900), st.integers(2, 1000)).filter(lambda sizes: sizes[0] <= 0.9 * sizes[1])


@settings(max_examples=200, deadline=None)
@given(CONSTANTS, SLOPES, CONSTANTS, GROWTHS, PAIRS, st.integers(1, 5000))
def test_two_measurements_give_the_slope_and_the_constant(
    base_fixed: int, base_slope: float, fixed: int, growth: float, sizes: tuple[int, int], other: int
) -> None:
    truth = floored(fixed, growth * base_slope)
    made = corrected(floored(base_fixed, base_slope), {size: truth(size) for size in sizes})
    noise = (2 + 1e-6 * base_slope * max(sizes)) * max(1, other / (sizes[1] - sizes[0]))  # bytes are whole numbers
    for size in (*sizes, other):
        assert abs(made.bytes_at(size) - truth(size)) <= noise + 1e-6 * base_slope * other


@settings(max_examples=200, deadline=None)
@given(CONSTANTS, SLOPES, GROWTHS, CONSTANTS, PAIRS, st.integers(1, 5000))
def test_the_floor_of_a_prediction_is_kept(
    fixed: int, base_slope: float, growth: float, above: int, sizes: tuple[int, int], other: int
) -> None:
    low, high = sizes
    floor = fixed + min(above, growth * base_slope * high / 2)  # the larger size is above it
    truth = floored(fixed, growth * base_slope, floor)
    made = corrected(floored(fixed, base_slope, floor), {size: truth(size) for size in sizes})
    noise = (2 + 1e-6 * base_slope * high) * max(1, other / (high - low))
    for size in (low, high, other):
        assert abs(made.bytes_at(size) - truth(size)) <= noise + 1e-6 * base_slope * other


def test_two_measurements_at_the_floor_leave_the_prediction_as_it_is() -> None:
    base = floored(0, MIB, 100 * MIB)
    made = corrected(base, {10: 100 * MIB, 20: 100 * MIB})
    assert [made.bytes_at(size) for size in (1, 50, 101, 300)] == [base(size) for size in (1, 50, 101, 300)]


def test_one_measurement_gives_the_constant() -> None:
    base = floored(100 * MIB, 3 * MIB)
    made = corrected(base, {40: base(40) + 7 * MIB})
    assert [made.bytes_at(size) - base(size) for size in (1, 40, 1000)] == [7 * MIB] * 3


def test_the_largest_size_that_was_measured_is_met_exactly() -> None:
    made = corrected(floored(0, MIB), {10: 15 * MIB, 20: 22 * MIB, 40: 61 * MIB})
    assert made.bytes_at(40) == pytest.approx(61 * MIB, abs=1)


def test_sizes_that_are_nearly_the_same_say_nothing_of_the_slope() -> None:
    base = floored(50 * MIB, MIB)
    made = corrected(base, {95: base(95), 100: base(100) + 4 * MIB})
    assert [made.bytes_at(size) - base(size) for size in (10, 100, 1000)] == [4 * MIB] * 3
    made.learn(50, round(base(50)))
    assert made.bytes_at(50) == pytest.approx(base(50), rel=1e-5)
    assert made.bytes_at(1000) - base(1000) > 50 * MIB


@pytest.mark.parametrize("high_bytes", [1, 10**6 * MIB])
def test_measurements_that_no_slope_explains_change_the_constant_alone(high_bytes: int) -> None:
    base = floored(0, MIB)
    made = corrected(base, {50: 50 * MIB, 100: high_bytes})
    assert made.bytes_at(1000) - made.bytes_at(100) == base(900)


def test_what_was_predicted_at_first_stays_known() -> None:
    made = corrected(floored(0, MIB), {50: 60 * MIB, 100: 120 * MIB})
    assert made.uncorrected_bytes_at(100) == 100 * MIB


def test_a_failure_leaves_a_corrected_prediction_as_it_is() -> None:
    made = corrected(floored(0, MIB), {50: 60 * MIB})
    before = made.bytes_at(70)
    made.learn_failure(60)
    assert made.bytes_at(70) == before


def test_the_largest_size_of_a_prediction_is_a_multiple_within_at_most() -> None:
    made = corrected(floored(0, MIB), {})
    assert made.largest(100 * MIB, MANY, 1) == 100
    assert made.largest(100 * MIB, MANY, 8) == 96
    assert made.largest(100 * MIB, 50, 8) == 48
    assert made.largest(MIB, MANY, 8) == 8
    made.learn(10, 40 * MIB)
    assert made.largest(100 * MIB, MANY, 1) == 70


# What a simulation of the device says

SMALL = """
import torch
from torch import nn

ran_for_real = []

def build_model():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))

def build_batch(n):
    return torch.ones(n, 64, 256)

def compute_loss(model, batch):
    if type(batch) is torch.Tensor:
        ran_for_real.append(len(batch))
    return model(batch).square().mean()
"""
READS_VALUES = SMALL.replace("    return model(", "    assert batch.sum().item() > 0\n    return model(")


def opened(device: str, capability: tuple[int, int] | None = None) -> tuple[Start, Hello]:
    """A device, and how it greets."""
    start = Start(model="model.py", device=device, parent_pid=1, precision="32-true")
    described = Device(name="made up", total_bytes=2000 * MIB, slug=device)
    return start, Hello(device=described, context_bytes=0, limit_bytes=1000 * MIB, capability=capability)


def tracer_of(workload: Workload) -> Tracer:
    return Tracer(Setup(workload, "32-true", (8, 0)), lambda _: None, may_be_real=False)


@pytest.mark.parametrize(("unit", "num_micro_batches"), [(1, 2), (4, 1)])
def test_a_simulation_says_what_every_size_needs(unit: int, num_micro_batches: int, workload: Load) -> None:
    loaded = workload(SMALL)
    start, hello = opened("cuda", (8, 0))
    foreseen = foresee(start, ".", hello, tracer_of(loaded), unit, num_micro_batches)
    assert foreseen is not None
    for size in (unit, 5 * unit, 64 * unit):
        trace = tracer_of(loaded).trace(size, num_micro_batches)
        assert foreseen.bytes_at(size) == allocator.replay(trace.events, trace.sizes).reserved_bytes
    assert loaded.module.ran_for_real == []


def test_the_device_that_was_opened_is_the_one_that_is_simulated(workload: Load) -> None:
    tracer = tracer_of(workload(SMALL))
    for capability, expected in [((9, 0), (9, 0)), (None, (9, 0))]:
        start, hello = opened("cuda", capability)
        foresee(start, ".", hello, tracer, 1, 2)
        assert tracer.setup.capability == expected


def test_what_needs_real_steps_to_be_traced_is_not_foreseen_and_not_run(workload: Load) -> None:
    loaded = workload(READS_VALUES)
    start, hello = opened("cuda", (8, 0))
    assert foresee(start, ".", hello, tracer_of(loaded), 1, 2) is None
    assert loaded.module.ran_for_real == []


def test_a_mistake_of_the_users_is_left_to_the_device(workload: Load) -> None:
    start, hello = opened("cuda", (8, 0))
    broken = workload(SMALL.replace("nn.Linear(512, 256)", "nn.Linear(511, 256)"))
    assert foresee(start, ".", hello, tracer_of(broken), 1, 2) is None


def test_a_step_whose_operators_depend_on_the_size_has_no_curve(workload: Load) -> None:
    text = SMALL.replace(
        "    return model(", "    for _ in range(len(batch)):\n        model(batch)\n    return model("
    )
    start, hello = opened("cuda", (8, 0))
    assert foresee(start, ".", hello, tracer_of(workload(text)), 1, 2) is None


def test_an_invented_device_has_a_prediction_of_its_own_or_none(tmp_path: Path, workload: Load) -> None:
    described = {"total_bytes": 1000 * MIB, "bytes_per_sample": MIB, "fixed_bytes": 100 * MIB}
    (tmp_path / "without.json").write_text(json.dumps(described))
    (tmp_path / "with.json").write_text(json.dumps({**described, "hint": 450, "floor_bytes": 150 * MIB}))
    tracer = tracer_of(workload(SMALL))
    start, hello = opened("test:without.json")
    assert foresee(start, str(tmp_path), hello, tracer, 1, 2) is None
    start, hello = opened("test:with.json")
    foreseen = foresee(start, str(tmp_path), hello, tracer, 1, 2)
    assert foreseen is not None
    assert foreseen.largest(1000 * MIB, MANY, 1) == 450
    assert foreseen.bytes_at(1) == 150 * MIB
