"""From evidence and a goal to a plan: effective batch, window, learning rate, warnings, file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradplan.plan import Goal, Plan, find_target, from_json, make_plan, per_rank_target, to_json
from gradplan.probes.errors import DoesNotFitError, GradplanError, UsageError, UserCodeError
from gradplan.probes.evidence import Capacity, Device, Evidence, Notice, Recipe, Trial
from gradplan.window import split_window

GIB = 2**30
DEVICE = Device(name="NVIDIA GeForce RTX 4090", slug="rtx-4090", total_bytes=24 * GIB)
COMPARE = "compare half and twice the rate in short, complete runs"


def a_recipe(**changes: Any) -> Recipe:
    known = {"model": "model.py", "names": ("build_model",), "optimizer": "AdamW", "num_parameters": 1000}
    return Recipe(**{**known, "base_batch_size": 64, "base_learning_rate": 0.001, **changes})


def a_trial(size: int, fits: bool, required_bytes: int | None = None) -> Trial:
    return Trial(micro_batch_size=size, num_micro_batches=2, fits=fits, source="traced", required_bytes=required_bytes)


def some_evidence(fits_up_to: int, *tried: int, **changes: Any) -> Evidence:
    """Trials of ``tried``, or of the largest that fits and the next."""
    sizes = tried or tuple(size for size in (fits_up_to, fits_up_to + 1) if size)
    trials = tuple(a_trial(size, size <= fits_up_to) for size in sizes)
    known = {"kind": "simulated", "device": DEVICE, "limit_bytes": 22 * GIB, "trials": trials}
    return Evidence(**{**known, **changes})


def a_plan(recipe: Recipe | None = None, evidence: Evidence | None = None, goal: Goal | None = None) -> Plan:
    return make_plan(
        recipe or a_recipe(),
        evidence or some_evidence(27),
        goal or Goal(),
        gradplan_version="0.1.0",
        torch_version="2.13.0",
    )


def codes(plan: Plan) -> list[str]:
    return [notice.code for notice in plan.warnings]


def message(plan: Plan, code: str) -> str:
    (found,) = [notice.message for notice in plan.warnings if notice.code == code]
    return found


# The window


def test_the_effective_batch_is_kept_by_balanced_micro_batches() -> None:
    plan = a_plan()
    assert plan.micro_batch_sizes == (22, 21, 21)
    assert (plan.micro_batch_size, plan.accumulation_steps, plan.effective_batch_size) == (22, 3, 64)
    assert (plan.max_micro_batch_size, plan.limited_by) == (27, "memory")
    assert plan.warnings == ()


def test_what_fits_whole_is_not_accumulated() -> None:
    plan = a_plan(evidence=some_evidence(64, 64))
    assert (plan.micro_batch_sizes, plan.limited_by) == ((64,), "target")


def test_ranks_share_the_effective_batch() -> None:
    plan = a_plan(goal=Goal(effective_batch=256, world_size=4))
    assert plan.micro_batch_sizes == (22, 21, 21)
    assert (plan.world_size, plan.effective_batch_size) == (4, 256)


def test_the_goal_wins_over_the_recipe() -> None:
    assert per_rank_target(a_recipe(), Goal(effective_batch=48)) == 48
    assert per_rank_target(a_recipe(), Goal()) == 64


def test_the_largest_that_fits_is_taken_in_whatever_order_it_was_tried() -> None:
    assert a_plan(evidence=some_evidence(27, 64, 1, 27, 4, 28, 16)).max_micro_batch_size == 27


def test_an_option_below_what_fits_limits_the_micro_batch() -> None:
    plan = a_plan(evidence=some_evidence(16, 16), goal=Goal(max_micro_batch=16))
    assert (plan.micro_batch_sizes, plan.limited_by) == ((16, 16, 16, 16), "option")


def test_an_option_above_what_fits_changes_nothing() -> None:
    assert a_plan(goal=Goal(max_micro_batch=40)).limited_by == "memory"
    assert a_plan(evidence=some_evidence(64, 64), goal=Goal(max_micro_batch=64)).limited_by == "target"


def test_an_option_is_rounded_down_to_the_multiple() -> None:
    target = find_target(a_recipe(batch_multiple=8), Goal(max_micro_batch=30))
    assert (target.at_most, target.bound) == (24, "option")


def test_evidence_beyond_the_option_is_not_used() -> None:
    plan = a_plan(evidence=some_evidence(64, 64), goal=Goal(max_micro_batch=30))
    assert (plan.micro_batch_sizes, plan.limited_by) == ((22, 21, 21), "option")
    assert plan.max_micro_batch_size == 64


def test_micro_batches_are_multiples() -> None:
    assert a_plan(a_recipe(batch_multiple=8)).micro_batch_sizes == (24, 24, 16)


@pytest.mark.parametrize(
    ("effective", "world_size", "multiple", "advice"),
    [
        (50, 4, 1, "take 48 or 52$"),
        (3, 4, 1, "take 4$"),
        (64, 3, 1, "take 63 or 66$"),
        (30, 4, 2, "take 24 or 32$"),
    ],
)
def test_what_ranks_cannot_share_names_the_nearest_that_they_can(
    effective: int, world_size: int, multiple: int, advice: str
) -> None:
    recipe = a_recipe(batch_multiple=multiple)
    problem = f"{world_size} ranks cannot share an effective batch of {effective}"
    with pytest.raises(UsageError, match=f"^{problem} equally; {advice}"):
        per_rank_target(recipe, Goal(effective_batch=effective, world_size=world_size))
    with pytest.raises(UsageError):
        per_rank_target(recipe.model_copy(update={"base_batch_size": effective}), Goal(world_size=world_size))


@pytest.mark.parametrize("goal", [Goal(effective_batch=0), Goal(effective_batch=-3), Goal(world_size=0)])
def test_counts_below_one_are_wrong_usage(goal: Goal) -> None:
    with pytest.raises(UsageError, match="must be at least 1, not"):
        find_target(a_recipe(), goal)


@pytest.mark.parametrize("changes", [{"base_batch_size": 0}, {"base_batch_size": -1}, {"batch_multiple": 0}])
def test_counts_below_one_in_the_file_are_wrong_usage(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be at least 1, not"):
        find_target(a_recipe(**changes), Goal(effective_batch=8))


@pytest.mark.parametrize(("multiple", "most"), [(1, 0), (8, 7), (1, -2)])
def test_an_option_below_the_smallest_micro_batch_is_wrong_usage(multiple: int, most: int) -> None:
    with pytest.raises(UsageError, match=f"at least .*{multiple}.*, not {most}"):
        find_target(a_recipe(batch_multiple=multiple), Goal(max_micro_batch=most))


@pytest.mark.parametrize("rate", [0.0, -0.1])
def test_a_learning_rate_that_cannot_train_is_wrong_usage(rate: float) -> None:
    with pytest.raises(UsageError, match="above 0, not"):
        find_target(a_recipe(base_learning_rate=rate), Goal())


# The multiple, the dataset, no target


@pytest.mark.parametrize(
    ("effective", "world_size", "planned"), [(60, 1, 56), (5, 1, 8), (120, 2, 112), (8, 2, 16), (64, 1, 64)]
)
def test_the_effective_batch_is_rounded_to_the_multiple_with_a_warning(
    effective: int, world_size: int, planned: int
) -> None:
    plan = a_plan(a_recipe(batch_multiple=8), goal=Goal(effective_batch=effective, world_size=world_size))
    assert plan.effective_batch_size == planned
    if effective == planned:
        assert "batch-multiple" not in codes(plan)
    else:
        assert f"of {effective} is not a multiple" in message(plan, "batch-multiple")
        assert message(plan, "batch-multiple").endswith(f"planned for {planned}")


def test_a_dataset_shorter_than_the_batch_becomes_the_batch() -> None:
    plan = a_plan(a_recipe(dataset_length=50), some_evidence(50, 50))
    assert (plan.effective_batch_size, plan.micro_batch_sizes, plan.limited_by) == (50, (50,), "dataset")
    assert message(plan, "dataset-shorter") == (
        "the dataset has 50 samples, fewer than the effective batch of 64: planned for 50"
    )
    assert math.isclose(plan.learning_rate or 0, 0.001 * math.sqrt(50 / 64))


def test_a_shorter_dataset_is_shared_by_ranks_in_multiples() -> None:
    plan = a_plan(a_recipe(dataset_length=50, batch_multiple=4), goal=Goal(world_size=2))
    assert (plan.effective_batch_size, plan.micro_batch_sizes) == (48, (24,))
    assert codes(plan) == ["dataset-shorter"]


def test_memory_may_still_limit_the_micro_batch_of_a_short_dataset() -> None:
    plan = a_plan(a_recipe(dataset_length=50))
    assert (plan.micro_batch_sizes, plan.limited_by) == ((25, 25), "memory")


def test_a_dataset_of_exactly_the_batch_is_not_short() -> None:
    plan = a_plan(a_recipe(dataset_length=64), some_evidence(64, 64))
    assert (plan.limited_by, plan.warnings) == ("target", ())


@pytest.mark.parametrize(("length", "multiple", "world_size"), [(0, 1, 1), (7, 8, 1), (3, 1, 4)])
def test_a_dataset_without_one_micro_batch_per_rank_is_an_error(length: int, multiple: int, world_size: int) -> None:
    recipe = a_recipe(dataset_length=length, batch_multiple=multiple)
    with pytest.raises(UserCodeError, match=f"the dataset has {length} samples, too few"):
        find_target(recipe, Goal(effective_batch=64, world_size=world_size))


def test_without_a_batch_the_largest_that_fits_is_the_effective_batch() -> None:
    recipe = a_recipe(base_batch_size=None)
    plan = a_plan(recipe, goal=Goal(world_size=2))
    assert per_rank_target(recipe, Goal(world_size=2)) is None
    assert (plan.micro_batch_sizes, plan.effective_batch_size, plan.limited_by) == ((27,), 54, "memory")
    assert "planned for 54" in message(plan, "no-effective-batch")


def test_without_a_batch_the_largest_is_a_multiple() -> None:
    assert a_plan(a_recipe(base_batch_size=None, batch_multiple=4)).micro_batch_sizes == (24,)


def test_without_a_batch_the_dataset_and_the_option_still_limit() -> None:
    recipe = a_recipe(base_batch_size=None, dataset_length=21)
    assert find_target(recipe, Goal(world_size=2)).at_most == 10
    plan = a_plan(recipe, some_evidence(21, 21))
    assert (plan.micro_batch_sizes, plan.limited_by) == ((21,), "dataset")
    plan = a_plan(recipe, some_evidence(16, 16), Goal(max_micro_batch=16))
    assert (plan.micro_batch_sizes, plan.limited_by) == ((16,), "option")


# Nothing fits


def test_nothing_fits_says_what_is_needed_and_what_would_help() -> None:
    evidence = some_evidence(0, trials=(a_trial(2, False, 60 * GIB), a_trial(1, False, 31 * GIB)))
    with pytest.raises(DoesNotFitError) as error:
        a_plan(evidence=evidence)
    text = str(error.value)
    assert error.value.exit_code == 3
    assert text.startswith(f"a micro-batch of 1 needs 31.0 GiB, more than the 22.0 GiB that {DEVICE.name}")
    for remedy in ("bf16-mixed", "checkpointing", "SGD", "more memory"):
        assert remedy in text
    assert "what else uses the device" not in text


def test_nothing_fits_claims_no_number_that_it_does_not_have() -> None:
    with pytest.raises(DoesNotFitError, match=r"^a micro-batch of 1 does not fit in the 22\.0 GiB"):
        a_plan(evidence=some_evidence(0))
    with pytest.raises(DoesNotFitError, match=r"^a micro-batch of 8 does not fit"):
        a_plan(a_recipe(batch_multiple=8), some_evidence(0, trials=()))
    within_the_limit = some_evidence(0, trials=(a_trial(1, False, 21 * GIB),))
    with pytest.raises(DoesNotFitError, match=r"does not fit in the 22\.0 GiB"):
        a_plan(evidence=within_the_limit)


def test_nothing_fits_advises_only_what_is_left_to_do() -> None:
    with pytest.raises(DoesNotFitError) as error:
        a_plan(a_recipe(optimizer="SGD"), some_evidence(0, kind="measured"), Goal(precision="bf16-mixed"))
    assert "bf16-mixed" not in str(error.value)
    assert "less state" not in str(error.value)
    assert "what else uses the device" in str(error.value)


def test_nothing_fits_names_the_smallest_device_that_would_do() -> None:
    others = [("H200", 141, 90), ("A100", 80, 40), ("T4", 16, 0)]
    capacities = tuple(
        Capacity(device=Device(name=name, total_bytes=size * GIB), max_micro_batch_size=most)
        for name, size, most in others
    )
    with pytest.raises(DoesNotFitError, match=r"more memory, such as A100$"):
        a_plan(evidence=some_evidence(0, others=capacities))


# The learning rate


@pytest.mark.parametrize(
    ("optimizer", "effective", "rule", "scale", "confidence"),
    [
        ("AdamW", 64, "sqrt", 1.0, "high"),
        ("AdamW", 256, "sqrt", 2.0, "medium"),
        ("AdamW", 16, "sqrt", 0.5, "medium"),
        ("SGD", 128, "linear", 2.0, "high"),
        ("SGD", 1024, "linear", 16.0, "low"),
        ("Adagrad", 128, "constant", 1.0, "low"),
        ("MyOptimizer", 128, "none", 1.0, "low"),
        ("MyOptimizer", 64, "none", 1.0, "high"),
    ],
)
def test_the_rate_follows_the_effective_batch_by_the_rule(
    optimizer: str, effective: int, rule: str, scale: float, confidence: str
) -> None:
    plan = a_plan(a_recipe(optimizer=optimizer), goal=Goal(effective_batch=effective))
    assert (plan.learning_rate_rule, plan.learning_rate_factor, plan.confidence) == (rule, scale, confidence)
    assert plan.learning_rate == 0.001 * scale
    assert (plan.base_batch_size, plan.base_learning_rate, plan.learning_rate_multiplier) == (64, 0.001, 1.0)


def test_the_split_alone_never_changes_the_rate() -> None:
    for fits_up_to in (1, 7, 27, 64):
        assert a_plan(evidence=some_evidence(fits_up_to)).learning_rate == 0.001


def test_the_rate_is_scaled_over_all_ranks() -> None:
    assert a_plan(goal=Goal(effective_batch=256, world_size=4)).learning_rate == 0.002


def test_an_unknown_base_batch_leaves_the_rate_and_says_so() -> None:
    plan = a_plan(a_recipe(base_batch_size=None), goal=Goal(effective_batch=256))
    assert (plan.learning_rate, plan.learning_rate_factor, plan.confidence) == (0.001, 1.0, "low")
    assert codes(plan) == ["no-base-batch"]


def test_an_unknown_base_rate_stays_unknown_and_says_by_what_to_multiply() -> None:
    plan = a_plan(a_recipe(base_learning_rate=None), goal=Goal(effective_batch=256))
    assert (plan.learning_rate, plan.learning_rate_factor) == (None, 2.0)
    assert message(plan, "no-base-lr").endswith("or multiply your own by 2")
    assert "multiply" not in message(a_plan(a_recipe(base_learning_rate=None)), "no-base-lr")


def test_an_unknown_optimizer_is_said_where_the_batch_changes() -> None:
    recipe = a_recipe(optimizer="MyOptimizer")
    changed = a_plan(recipe, goal=Goal(effective_batch=128))
    assert "from a batch of 64 to 128" in message(changed, "unknown-optimizer")
    assert codes(a_plan(recipe)) == []


@pytest.mark.parametrize(
    ("optimizer", "names", "effective", "doubt"),
    [
        ("AdamW", (), 576, "the sqrt rule for AdamW is not tested that far (from a batch of 64 to 576)"),
        ("SGD", (), 4, "the linear rule for SGD is not tested that far (from a batch of 64 to 4)"),
        ("Lion", (), 65, "the sqrt rule for Lion is little tested (from a batch of 64 to 65)"),
        ("AdamW", ("load_weights",), 65, "the sqrt rule for AdamW is not tested for fine-tuning (from"),
        ("AdamW", (), 512, None),
        ("Lion", (), 64, None),
        ("AdamW", ("load_weights",), 64, None),
    ],
)
def test_a_rate_of_low_confidence_is_a_warning(
    optimizer: str, names: tuple[str, ...], effective: int, doubt: str | None
) -> None:
    plan = a_plan(a_recipe(optimizer=optimizer, names=names), goal=Goal(effective_batch=effective))
    assert (plan.confidence == "low") == (doubt is not None)
    if doubt is None:
        assert codes(plan) == []
    else:
        assert message(plan, "learning-rate-confidence").startswith(doubt)
        assert message(plan, "learning-rate-confidence").endswith(COMPARE)


# Where accumulating differs from the large batch; the notices of others


def test_batch_norm_is_a_warning_only_where_the_batch_is_split() -> None:
    recipe = a_recipe(has_batch_norm=True)
    assert message(a_plan(recipe), "batch-norm") == (
        "BatchNorm sees micro-batches of 22, not the 64 of a step, and updates its running statistics 3 times per step"
    )
    assert codes(a_plan(recipe, some_evidence(64, 64))) == []
    assert "64 of a step on each rank" in message(
        a_plan(recipe, goal=Goal(effective_batch=128, world_size=2)), "batch-norm"
    )


def test_batch_norm_with_a_single_sample_is_said() -> None:
    recipe = a_recipe(has_batch_norm=True, base_batch_size=3)
    assert "one sample" in message(a_plan(recipe, some_evidence(2)), "batch-norm")
    assert "one sample" not in message(a_plan(recipe, some_evidence(1)), "batch-norm")  # tried, and it ran


@pytest.mark.parametrize(
    ("precision", "micro_batches", "said"),
    [
        ("bf16-true", 16, "about 0.5%; bf16-mixed"),
        ("bf16-true", 128, "about 1.4%, more where they agree; bf16-mixed"),
        ("bf16-true", 15, None),
        ("bf16-mixed", 128, None),
        ("32-true", 128, None),
    ],
)
def test_many_gradients_summed_in_bfloat16_are_a_warning(precision: Any, micro_batches: int, said: str | None) -> None:
    recipe = a_recipe(base_batch_size=micro_batches)
    plan = a_plan(recipe, some_evidence(1), Goal(precision=precision))
    assert plan.precision == precision
    assert codes(plan) == ([] if said is None else ["bf16-accumulation"])
    if said is not None:
        assert f"sums {micro_batches} gradients" in message(plan, "bf16-accumulation")
        assert said in message(plan, "bf16-accumulation")


def test_notices_of_the_recipe_and_the_evidence_are_kept_once() -> None:
    one, two = Notice(code="a", message="one"), Notice(code="a", message="two")
    three = Notice(code="b", message="three")
    plan = a_plan(a_recipe(notices=(one, two)), some_evidence(64, 64, notices=(three, one)))
    assert plan.warnings == (one, two, three)


# Invariants


@st.composite
def situations(draw: st.DrawFn) -> tuple[Recipe, Evidence, Goal]:
    """A recipe, evidence and a goal that can be planned, whatever limits them."""
    multiple, world_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    counts = st.none() | st.integers(1, 400)
    effective, base, length = draw(counts), draw(counts), draw(counts)
    wanted = effective or base
    assume(wanted is None or wanted % world_size == 0)
    assume(length is None or length >= world_size * multiple)
    most = draw(st.none() | st.integers(multiple, 100))
    recipe = a_recipe(
        optimizer=draw(st.sampled_from(["SGD", "AdamW", "Adagrad", "MyOptimizer"])),
        base_batch_size=base,
        base_learning_rate=draw(st.none() | st.floats(1e-8, 10)),
        dataset_length=length,
        batch_multiple=multiple,
        has_batch_norm=draw(st.booleans()),
    )
    goal = Goal(effective_batch=effective, world_size=world_size, max_micro_batch=most)
    at_most = find_target(recipe, goal).at_most or 1000
    fits_up_to = draw(st.integers(multiple, max(multiple, at_most)))
    return recipe, some_evidence(fits_up_to), goal


@given(situations())
def test_any_plan_adds_up(situation: tuple[Recipe, Evidence, Goal]) -> None:
    recipe, evidence, goal = situation
    plan = a_plan(recipe, evidence, goal)
    fits = max(trial.micro_batch_size for trial in evidence.trials if trial.fits)
    at_most = min(fits, goal.max_micro_batch or fits)
    per_rank = plan.effective_batch_size // goal.world_size
    assert sum(plan.micro_batch_sizes) * goal.world_size == plan.effective_batch_size
    assert max(plan.micro_batch_sizes) == plan.micro_batch_size <= at_most
    assert plan.max_micro_batch_size == fits
    assert list(plan.micro_batch_sizes) == split_window(per_rank, at_most, recipe.batch_multiple)
    fewest = math.ceil(per_rank / (at_most // recipe.batch_multiple * recipe.batch_multiple))
    assert fewest <= plan.accumulation_steps <= max(fewest, 1.1 * fewest)
    assert all(size % recipe.batch_multiple == 0 for size in plan.micro_batch_sizes)


@given(situations())
def test_the_effective_batch_is_what_was_asked_for_or_a_warning_says_why_not(
    situation: tuple[Recipe, Evidence, Goal],
) -> None:
    recipe, evidence, goal = situation
    plan = a_plan(recipe, evidence, goal)
    why = {"batch-multiple", "dataset-shorter", "no-effective-batch"} & set(codes(plan))
    assert len(why) == (plan.effective_batch_size != (goal.effective_batch or recipe.base_batch_size))
    assert recipe.dataset_length is None or plan.effective_batch_size <= recipe.dataset_length


@given(situations())
def test_what_limits_is_said_truly(situation: tuple[Recipe, Evidence, Goal]) -> None:
    recipe, evidence, goal = situation
    plan = a_plan(recipe, evidence, goal)
    whole = plan.accumulation_steps == 1 and "no-effective-batch" not in codes(plan)
    assert (plan.limited_by == "target") == (whole and "dataset-shorter" not in codes(plan))
    if plan.limited_by == "dataset":
        assert recipe.dataset_length is not None
        assert plan.effective_batch_size + goal.world_size * recipe.batch_multiple > recipe.dataset_length
    if plan.limited_by == "option":
        assert goal.max_micro_batch is not None
        assert plan.max_micro_batch_size + recipe.batch_multiple > goal.max_micro_batch


@given(situations())
def test_the_rate_is_the_base_times_the_factor(situation: tuple[Recipe, Evidence, Goal]) -> None:
    recipe, evidence, goal = situation
    plan = a_plan(recipe, evidence, goal)
    if recipe.base_learning_rate is None:
        assert plan.learning_rate is None
        assert "no-base-lr" in codes(plan)
    else:
        assert plan.learning_rate == recipe.base_learning_rate * plan.learning_rate_factor
    if recipe.base_batch_size in (None, plan.effective_batch_size):
        assert plan.learning_rate_factor == 1.0


@given(situations())
def test_a_plan_survives_its_file(situation: tuple[Recipe, Evidence, Goal]) -> None:
    plan = a_plan(*situation)
    text = to_json(plan)
    assert from_json(text) == plan
    assert to_json(from_json(text)) == text


# The file


def test_the_file_has_the_promised_keys_in_order() -> None:
    promised = [
        *("schema", "gradplan_version", "torch_version", "model", "precision", "optimizer", "num_parameters"),
        *("micro_batch_size", "micro_batch_sizes", "accumulation_steps", "world_size"),
        *("effective_batch_size", "max_micro_batch_size", "limited_by"),
        *("base_batch_size", "base_learning_rate", "learning_rate", "learning_rate_rule"),
        *("learning_rate_factor", "learning_rate_multiplier", "confidence", "backward"),
        *("evidence", "warnings"),
    ]
    data = json.loads(to_json(a_plan()))
    assert list(data)[: len(promised)] == promised
    assert data["schema"] == 1
    assert list(data["evidence"])[:4] == ["kind", "device", "limit_bytes", "trials"]
    trial_keys = {"micro_batch_size", "fits", "peak_allocated_bytes", "peak_reserved_bytes"}
    assert trial_keys | {"required_bytes", "step_seconds"} <= data["evidence"]["trials"][0].keys()
    assert {"name", "total_bytes"} <= data["evidence"]["device"].keys()


def test_what_is_unknown_is_null_in_the_file() -> None:
    data = json.loads(to_json(a_plan(a_recipe(base_batch_size=None, base_learning_rate=None))))
    assert (data["base_batch_size"], data["base_learning_rate"], data["learning_rate"]) == (None, None, None)
    assert data["learning_rate_factor"] == 1.0


def test_the_file_is_indented_and_ends_with_a_newline() -> None:
    text = to_json(a_plan(a_recipe(model="modèle.py")))
    assert text.startswith('{\n  "schema": 1,\n  "gradplan_version": "0.1.0",\n')
    assert text.endswith("}\n")
    assert "modèle.py" in text


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(to_json(a_plan())), **changes})


@pytest.mark.parametrize("text", ["", "{", to_json(a_plan())[:-40], "[" * 100_000, '{"schema": 1,}', "\x00"])
def test_a_damaged_file_is_an_error(text: str) -> None:
    with pytest.raises(GradplanError, match=r"^gradplan\.json is damaged: not JSON") as error:
        from_json(text, "gradplan.json")
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"schema"', "{}", '{"schema": 1}', '{"gradplan_version": "0.1.0"}']
)
def test_a_foreign_file_is_an_error(text: str) -> None:
    with pytest.raises(GradplanError, match=r"^gradplan\.json is not a gradplan plan") as error:
        from_json(text, "gradplan.json")
    assert error.value.exit_code == 1


def test_a_newer_file_is_an_error_that_says_to_upgrade() -> None:
    text = edited(schema=2, gradplan_version="7.0", unheard_of=1)
    with pytest.raises(GradplanError, match=r"newer than this gradplan: schema 2, .*gradplan 7\.0.*Upgrade"):
        from_json(text)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"micro_batch_size": "many"}, "micro_batch_size: "),
        ({"schema": 0}, "schema: "),
        ({"schema": "1"}, "schema: "),
        ({"gradplan_version": None}, "gradplan_version: "),
        ({"unheard_of": 1}, "unheard_of: "),
        ({"evidence": {}}, r"evidence\.kind: "),
        ({"learning_rate": math.nan}, "learning_rate: "),
        ({"learning_rate": math.inf}, "learning_rate: "),
        ({"precision": "fp8"}, "precision: "),
        ({"effective_batch_size": 128}, "do not add up to effective_batch_size"),
        ({"micro_batch_sizes": [22, 21, 22]}, "do not add up"),
        ({"micro_batch_sizes": [32, 32]}, "accumulation_steps is not the number"),
        ({"micro_batch_sizes": [65, 0, -1]}, "do not add up"),
        ({"micro_batch_size": 27}, "micro_batch_size is not the largest"),
        ({"max_micro_batch_size": 21}, "above the maximum"),
        ({"learning_rate": None}, "known only together"),
        ({"learning_rate": 0.002}, "learning_rate is not base_learning_rate x factor x multiplier"),
        ({"learning_rate_multiplier": 2.0}, "learning_rate is not base_learning_rate x factor x multiplier"),
    ],
)
def test_a_file_that_does_not_agree_with_itself_is_an_error(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(GradplanError, match=rf"^the plan file is damaged \(written by .*\): .*{problem}"):
        from_json(edited(**changes))


def test_planning_needs_no_torch() -> None:
    code = "import sys, gradplan.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
