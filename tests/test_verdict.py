"""Whether a learning-rate multiplier is believed: paired runs on fresh seeds decide. `gradplan.verdict`."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_scripts import plan_for

from gradplan.plan import Plan, from_json, to_json
from gradplan.probes.evidence import TuningTrial
from gradplan.verdict import FEWEST_PAIRS, T_95, Tuning, Verdict, best_multiplier, is_too_fine, judge, sentence

LOSS = 2.0
NUM_SIMULATED = 2500
Value = float | None
# Differences of five pairs, their mean and the half width of its 95 % interval: 2.776 * stdev / sqrt(5).
KNOWN = ((0.3, 0.1, 0.2, 0.4, 0.5), 0.3, 2.776 * 0.158114 / 2.236068)


def searched(*tried: tuple[float, Value]) -> list[TuningTrial]:
    return [TuningTrial(number=n, multiplier=multiplier, value=value) for n, (multiplier, value) in enumerate(tried)]


def checked(pairs: list[tuple[Value, Value]], multiplier: float = 2.0) -> list[TuningTrial]:
    """Runs with 1 and with ``multiplier``, for each seed."""
    return [
        TuningTrial(number=2 * seed + nth, multiplier=one, seed=seed, value=value)
        for seed, values in enumerate(pairs)
        for nth, (one, value) in enumerate(zip((1.0, multiplier), values, strict=True))
    ]


def with_gains(*gains: float) -> list[TuningTrial]:
    """Pairs in which the multiplier's loss is lower by so much, each seed with a level of its own."""
    return checked([(LOSS + seed, LOSS + seed - gain) for seed, gain in enumerate(gains)])


def a_tuning(verdict: Verdict, trials: tuple[TuningTrial, ...] = (), **changes: Any) -> Tuning:
    known = {"study": "gradplan", "storage": "gradplan.study.log", "objective": "validation loss"}
    known |= {"num_steps": 25, "num_real_steps": 100, "checks": ()}
    return Tuning(**{**known, "trials": trials, "verdict": verdict, **changes})


# The best of the search


def test_the_best_is_the_multiplier_of_the_lowest_loss_to_three_digits() -> None:
    assert best_multiplier(searched((1.0, 0.5), (2.34567, 0.4), (0.5, 0.9))) == 2.35


def test_a_run_that_diverged_is_never_the_best() -> None:
    assert best_multiplier(searched((4.0, None), (1.0, 0.5), (0.5, 0.6))) == 1.0


def test_where_every_run_diverged_the_best_is_1() -> None:
    assert best_multiplier(searched((0.5, None), (2.0, None))) == 1.0
    assert best_multiplier([]) == 1.0


def test_a_loss_below_zero_is_better_than_one_of_zero() -> None:
    assert best_multiplier(searched((1.0, 0.0), (2.0, -1.0))) == 2.0


# The interval


def test_the_interval_is_that_of_students_t_over_the_pairs() -> None:
    gains, mean, half = KNOWN
    verdict = judge(2.0, with_gains(*gains))
    assert (verdict.gain, verdict.low, verdict.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-4)
    assert (verdict.num_pairs, verdict.num_diverged, verdict.multiplier) == (5, (0, 0), 2.0)


def test_the_quantiles_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    assert [stats.t.ppf(0.975, df) for df in range(1, len(T_95) + 1)] == pytest.approx(T_95, abs=6e-4)


@given(gains=st.lists(st.floats(-1, 1).filter(lambda gain: abs(gain) > 1e-6), min_size=FEWEST_PAIRS, max_size=60))
def test_a_multiplier_is_adopted_exactly_where_the_interval_is_above_zero(gains: list[float]) -> None:
    verdict = judge(2.0, with_gains(*gains))
    assert verdict.low is not None
    assert verdict.high is not None
    assert verdict.low <= verdict.high
    assert verdict.is_adopted == (verdict.low > 0)


@given(gains=st.lists(st.floats(-1, 1), min_size=FEWEST_PAIRS, max_size=31))
def test_the_interval_is_the_one_that_scipy_computes(gains: list[float]) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    checks = with_gains(*gains)
    found = [one.value - other.value for one, other in zip(checks[::2], checks[1::2], strict=True)]  # type: ignore[operator]
    verdict = judge(2.0, checks)
    half = stats.t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    middle = statistics.fmean(found)
    assert (verdict.low, verdict.high) == pytest.approx((middle - half, middle + half), abs=1e-6 + half / 1000)


def test_a_multiplier_that_is_worse_is_not_adopted() -> None:
    verdict = judge(2.0, with_gains(-0.3, -0.31, -0.29, -0.3, -0.32))
    assert verdict.high is not None
    assert verdict.high < 0
    assert not verdict.is_adopted


def test_pairing_finds_a_gain_that_is_small_beside_the_spread_of_seeds() -> None:
    spread = [(level, level - 0.01 - 0.001 * level) for level in (1.0, 5.0, 2.0, 9.0, 4.0)]
    assert judge(2.0, checked(spread)).is_adopted  # type: ignore[arg-type]


def test_the_order_of_the_runs_does_not_matter() -> None:
    checks = with_gains(0.3, 0.1, 0.2, 0.4, 0.5)
    shuffled = random.Random(0).sample(checks, len(checks))
    one, other = judge(2.0, shuffled), judge(2.0, checks)
    assert (one.gain, one.low, one.high) == pytest.approx((other.gain, other.low, other.high))
    assert (one.num_pairs, one.is_adopted) == (other.num_pairs, other.is_adopted)


@pytest.mark.parametrize("num_pairs", range(1, FEWEST_PAIRS))
def test_fewer_than_five_pairs_never_adopt(num_pairs: int) -> None:
    verdict = judge(2.0, with_gains(*[0.5 + 0.001 * n for n in range(num_pairs)]))
    assert (verdict.is_adopted, verdict.low, verdict.high, verdict.num_pairs) == (False, None, None, num_pairs)


def test_a_run_whose_pair_is_missing_does_not_count() -> None:
    checks = with_gains(0.5, 0.51, 0.52, 0.53, 0.54)[:-1]
    assert (judge(2.0, checks).num_pairs, judge(2.0, checks).is_adopted) == (4, False)


def test_1_is_never_adopted_against_itself() -> None:
    assert judge(1.0, []) == Verdict(multiplier=1.0, num_pairs=0, is_adopted=False)
    assert judge(2.0, []) == Verdict(multiplier=2.0, num_pairs=0, is_adopted=False)


# Runs that diverge


@pytest.mark.parametrize("num_lost", range(6))
def test_a_multiplier_rescues_where_1_diverges_on_at_least_half_of_the_seeds(num_lost: int) -> None:
    pairs: list[tuple[Value, Value]] = [(None if seed < num_lost else 2.0, 2.0) for seed in range(5)]
    verdict = judge(0.5, checked(pairs, 0.5))
    assert verdict.num_diverged == (0, num_lost)
    assert verdict.is_adopted == (num_lost >= 3)


def test_half_of_an_even_number_of_seeds_is_enough() -> None:
    lost: list[tuple[Value, Value]] = [(None, 1.0)] * 3
    kept: list[tuple[Value, Value]] = [(1.0, 1.0)] * 3
    assert judge(0.5, checked(lost + kept, 0.5)).is_adopted


@pytest.mark.parametrize("num_lost_with_1", [0, 4, 5])
def test_a_multiplier_that_diverges_once_is_not_adopted(num_lost_with_1: int) -> None:
    pairs: list[tuple[Value, Value]] = [(None if seed < num_lost_with_1 else 9.0, 1.0) for seed in range(5)]
    pairs[4] = (pairs[4][0], None)
    verdict = judge(0.5, checked(pairs, 0.5))
    assert (verdict.is_adopted, verdict.num_diverged) == (False, (1, num_lost_with_1))


def test_four_pairs_are_too_few_for_a_rescue() -> None:
    assert not judge(0.5, checked([(None, 1.0)] * 4, 0.5)).is_adopted


# Nearer to 1 than a short run can tell


@pytest.mark.parametrize(
    ("num_steps", "finest"), [(100, 1.0), (99, 2.0), (25, 2.0), (24, 4.0), (1, 4.0)], ids=lambda one: f"{one:g}"
)
def test_the_shorter_the_runs_the_farther_from_1_a_finding_must_be(num_steps: int, finest: float) -> None:
    def is_fine(multiplier: float) -> bool:
        return is_too_fine(multiplier, num_steps, 100)

    assert is_fine(1.0)
    assert (is_fine(finest), is_fine(1 / finest)) == ((finest == 1), (finest == 1))
    assert (is_fine(finest * 1.01), is_fine(1 / finest / 1.01)) == (False, False)
    if finest > 1:
        assert (is_fine(finest * 0.99), is_fine(1 / finest / 0.99)) == (True, True)


# In words

LOST: list[tuple[Value, Value]] = [(None, 1.0)] * 5
VERDICTS = {
    "adopted": judge(2.0, with_gains(0.3, 0.1, 0.2, 0.4, 0.5)),
    "worse": judge(2.0, with_gains(-0.3, -0.1, -0.2, -0.4, -0.5)),
    "rescued": judge(0.5, checked(LOST, 0.5)),
    "too few": judge(2.0, with_gains(0.3, 0.1)),
    "too near": judge(1.5, []),
    "none better": judge(1.0, []),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_sentence_never_holds_the_lowest_loss_of_the_search(name: str) -> None:
    verdict = VERDICTS[name]
    trials = searched((1.0, 0.87654321), (verdict.multiplier, 0.13579246))
    text = sentence(a_tuning(verdict, tuple(trials)))
    for loss in (0.87654321, 0.13579246, 0.87654321 - 0.13579246):
        assert not any(f"{loss:.{digits}g}" in text for digits in range(2, 9)), text
    assert text == sentence(a_tuning(verdict))


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_not_adopted_is_called_no_evidence(name: str) -> None:
    verdict = VERDICTS[name]
    assert ("no evidence against the rule" in sentence(a_tuning(verdict))) != verdict.is_adopted


def test_the_sentence_says_gain_interval_pairs_and_length() -> None:
    assert sentence(a_tuning(VERDICTS["adopted"])) == (
        "2 times the rate lowers the validation loss by 0.3 (95 % interval 0.104 to 0.496); 5 fresh seeds, "
        "runs of 25 of 100 steps"
    )


def test_the_sentence_counts_the_runs_that_diverged() -> None:
    text = sentence(a_tuning(VERDICTS["rescued"]))
    assert text.startswith("with 0.5 times the rate, 0 of 5 runs diverged, and 5 with the rate as planned")


def test_the_sentence_says_what_the_length_cannot_show() -> None:
    assert "1.5, is too near to 1 for runs of 25 of 100 steps" in sentence(a_tuning(VERDICTS["too near"]))


# How often it is right


def share_adopted(effect_in_sd: float, num_pairs: int = FEWEST_PAIRS) -> float:
    """Of simulated checks whose differences are normal, the part that is adopted."""
    draw = random.Random(20)
    verdicts = [
        judge(2.0, with_gains(*[draw.gauss(effect_in_sd * 0.1, 0.1) for _ in range(num_pairs)]))
        for _ in range(NUM_SIMULATED)
    ]
    return sum(verdict.is_adopted for verdict in verdicts) / NUM_SIMULATED


@pytest.mark.parametrize("num_pairs", [5, 8])
def test_a_multiplier_that_changes_nothing_is_adopted_in_one_case_of_forty(num_pairs: int) -> None:
    four_sigma = 4 * math.sqrt(0.025 * 0.975 / NUM_SIMULATED)
    assert share_adopted(0.0, num_pairs) == pytest.approx(0.025, abs=four_sigma)


def test_an_effect_of_three_standard_deviations_is_nearly_always_found() -> None:
    assert share_adopted(3.0) > 0.97
    assert share_adopted(-3.0) == 0


# In the plan file


def a_tuned_plan(verdict: Verdict) -> Plan:
    checks = tuple(with_gains(0.3, 0.1, 0.2, 0.4, 0.5))
    tuning = a_tuning(verdict, tuple(searched((1.0, 0.9), (0.5, None), (2.0, 0.8))), checks=checks)
    plan = plan_for(("build_model", "build_batch"), 8, 8)
    multiplier = verdict.multiplier if verdict.is_adopted else 1.0
    rate = 0.1 * multiplier
    return plan.model_copy(update={"tuning": tuning, "learning_rate_multiplier": multiplier, "learning_rate": rate})


@pytest.mark.parametrize("name", VERDICTS)
def test_a_plan_file_holds_all_of_a_tuning(name: str) -> None:
    plan = a_tuned_plan(VERDICTS[name])
    assert from_json(to_json(plan)) == plan
    assert to_json(from_json(to_json(plan))) == to_json(plan)


def test_a_plan_without_tuning_stays_without() -> None:
    plan = plan_for(("build_model", "build_batch"), 8, 8)
    assert from_json(to_json(plan)).tuning is None
