"""What a person reads after probing, from invented numbers: `gradplan.report`."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from gradplan.plan import Goal, Plan, from_json, make_plan, to_json
from gradplan.probes.errors import GradplanError
from gradplan.probes.evidence import Anatomy, Capacity, Device, Evidence, Lever, Notice, Part, Recipe, Trial
from gradplan.report import describe, details, gpu_table, summary, to_text, trial_lines

GIB = 2**30
RTX_4090 = Device(name="NVIDIA GeForce RTX 4090", slug="rtx-4090", total_bytes=24 * GIB)


def a_trial(size: int, fits: bool = True, gib: float | None = None, source: Any = "traced") -> Trial:
    required_bytes = None if gib is None else int(gib * GIB)
    return Trial(micro_batch_size=size, num_micro_batches=2, fits=fits, source=source, required_bytes=required_bytes)


def another(slug: str, gib: float, size: int) -> Capacity:
    return Capacity(device=Device(name=slug.upper(), slug=slug, total_bytes=int(gib * GIB)), max_micro_batch_size=size)


def a_plan(*trials: Trial, goal: Goal = Goal(), **changes: Any) -> Plan:  # noqa: B008
    """Of a recipe for 64 samples at 0.001; keys of the evidence go to the evidence."""
    recipe: dict[str, Any] = {"model": "model.py", "names": ("build_model",), "optimizer": "AdamW"}
    recipe |= {"num_parameters": 124439808, "base_batch_size": 64, "base_learning_rate": 0.001}
    evidence: dict[str, Any] = {"kind": "simulated", "device": RTX_4090, "limit_bytes": int(22.4 * GIB)}
    for key, value in changes.items():
        (evidence if key in Evidence.model_fields and key != "notices" else recipe)[key] = value
    evidence["trials"] = trials or (a_trial(27, gib=21.8),)
    return make_plan(Recipe(**recipe), Evidence(**evidence), goal, gradplan_version="0.1.0", torch_version="2.13.0")


def text(plan: Plan) -> str:
    return to_text(summary(plan))


def row(plan: Plan, label: str) -> str:
    """A setting's value and reason, on one line."""
    wide = to_text(summary(plan), width=300)
    (line,) = (line.strip() for line in wide.splitlines() if line.startswith(f"  {label} "))
    return "; ".join(cell.strip() for cell in line[len(label) :].strip().split("  ") if cell.strip())


# The whole


def test_the_settings_are_a_table_with_a_reason_for_each() -> None:
    plan = a_plan(
        a_trial(64, fits=False, gib=48),
        a_trial(27, gib=21.8),
        goal=Goal(effective_batch=128),
        has_batch_norm=True,
        others=(another("t4", 14.7, 0), another("rtx-3060-12gb", 11.6, 9), another("a100-80gb", 79.3, 128)),
        notices=(Notice(code="invented", message="what comes from the file"),),
    )
    assert (
        text(plan)
        == """\
model.py: 124,439,808 parameters, AdamW, 32-true
NVIDIA GeForce RTX 4090 with 24.0 GiB, simulated

  micro-batch         3 x 26, 2 x 25  27 is the largest that fits
  accumulation steps  5               micro-batches per optimizer step
  effective batch     128             as asked for; the recipe has 64
  learning rate       0.00141         0.001 x 1.41 (sqrt rule), confidence high
  memory needed       21.8 GiB        of 22.4 GiB usable; predicted for size 27

What other GPUs could hold (predicted)
  GPU              memory   micro-batch  accumulation steps
  t4             14.7 GiB  does not fit
  rtx-3060-12gb  11.6 GiB             9                  16
  a100-80gb      79.3 GiB           128                   1

Watch out
  - BatchNorm sees micro-batches of 26, not the 128 of a step, and updates its
    running statistics 5 times per step
  - what comes from the file

"""
    )


def test_what_fits_whole_needs_no_accumulation_and_keeps_the_recipe() -> None:
    plan = a_plan(a_trial(64, gib=0.4), kind="measured", optimizer="SGD")
    assert (
        text(plan)
        == """\
model.py: 124,439,808 parameters, SGD, 32-true
NVIDIA GeForce RTX 4090 with 24.0 GiB, measured

  micro-batch         64         all samples of a step fit at once
  accumulation steps  1          micro-batch per optimizer step
  effective batch     64         kept from the recipe
  learning rate       0.001      kept from the recipe
  memory needed       409.6 MiB  of 22.4 GiB usable; measured for size 64

"""
    )


def test_what_nobody_said_is_called_unknown() -> None:
    others = (another("a100-80gb", 79.3, 90),)
    plan = a_plan(a_trial(27), base_batch_size=None, base_learning_rate=None, others=others)
    assert (
        text(plan)
        == """\
model.py: 124,439,808 parameters, AdamW, 32-true
NVIDIA GeForce RTX 4090 with 24.0 GiB, simulated

  micro-batch         27       27 is the largest that fits
  accumulation steps  1        micro-batch per optimizer step
  effective batch     27       not given: the largest without accumulation
  learning rate       unknown  nobody said
  memory needed       unknown  of 22.4 GiB usable

What other GPUs could hold (predicted)
  GPU          memory  micro-batch
  a100-80gb  79.3 GiB           90

Watch out
  - no effective batch was given: planned for 27, the largest possible without
    accumulation; set BATCH_SIZE or --effective-batch
  - the learning rate is unknown; set LEARNING_RATE or --base-lr
  - the batch that the learning rate was tuned for is unknown, so the rate is
    not scaled; set BATCH_SIZE or --base-batch

"""
    )


# The settings


@pytest.mark.parametrize(
    ("goal", "changes", "shown"),
    [
        (Goal(), {}, "22, 21, 21; 27 is the largest that fits"),
        (Goal(effective_batch=54), {}, "27; 27 is the largest that fits"),
        (Goal(effective_batch=100), {}, "25; 27 is the largest that fits"),
        (Goal(effective_batch=103), {}, "3 x 26, 25; 27 is the largest that fits"),
        (Goal(max_micro_batch=8), {}, "8; up to 8 was asked for, and fits"),
        (Goal(), {"dataset_length": 20}, "20; all samples of a step fit at once"),
    ],
)
def test_the_window_and_what_limits_it(goal: Goal, changes: dict[str, Any], shown: str) -> None:
    size = min(27, goal.max_micro_batch or 27, changes.get("dataset_length", 27))
    assert row(a_plan(a_trial(size), goal=goal, **changes), "micro-batch") == shown


def test_ranks_are_named() -> None:
    plan = a_plan(goal=Goal(effective_batch=256, world_size=4))
    assert row(plan, "accumulation steps") == "3; micro-batches per optimizer step on each of 4 ranks"
    assert row(plan, "effective batch") == "256; as asked for; the recipe has 64"


@pytest.mark.parametrize(
    ("goal", "changes", "shown"),
    [
        (Goal(), {}, "64; kept from the recipe"),
        (Goal(effective_batch=128), {}, "128; as asked for; the recipe has 64"),
        (Goal(effective_batch=128), {"base_batch_size": None}, "128; as asked for"),
        (Goal(effective_batch=128), {"dataset_length": 100}, "100; the dataset has no more"),
        (Goal(effective_batch=99), {"batch_multiple": 9}, "99; as asked for; the recipe has 64"),
        (Goal(effective_batch=100), {"batch_multiple": 9}, "99; the nearest multiple of BATCH_MULTIPLE"),
        (Goal(), {"base_batch_size": None}, "27; not given: the largest without accumulation"),
    ],
)
def test_where_the_effective_batch_comes_from(goal: Goal, changes: dict[str, Any], shown: str) -> None:
    assert row(a_plan(goal=goal, **changes), "effective batch") == shown


@pytest.mark.parametrize(
    ("goal", "changes", "shown"),
    [
        (Goal(), {}, "0.001; kept from the recipe"),
        (Goal(effective_batch=256), {}, "0.002; 0.001 x 2 (sqrt rule), confidence medium"),
        (Goal(effective_batch=32), {"optimizer": "SGD"}, "0.0005; 0.001 x 0.5 (linear rule), confidence high"),
        (Goal(effective_batch=128), {"optimizer": "Mine"}, "0.001; as in the recipe: no rule is known for Mine"),
        (Goal(effective_batch=128), {"optimizer": "Adagrad"}, "0.001; as in the recipe: no scaling for Adagrad"),
        (Goal(effective_batch=128), {"base_batch_size": None}, "0.001; as given, not scaled"),
        (Goal(), {"base_learning_rate": None}, "unknown; nobody said"),
        (
            Goal(effective_batch=256),
            {"base_learning_rate": None},
            "unknown; yours x 2 (sqrt rule), confidence medium",
        ),
    ],
)
def test_where_the_learning_rate_comes_from(goal: Goal, changes: dict[str, Any], shown: str) -> None:
    assert row(a_plan(goal=goal, **changes), "learning rate") == shown


def test_what_tuning_found_is_a_factor_of_its_own() -> None:
    kept = a_plan().model_copy(update={"learning_rate": 0.0008, "learning_rate_multiplier": 0.8})
    assert row(kept, "learning rate") == "0.0008; 0.001 x 0.8 (tuned)"
    scaled = a_plan(goal=Goal(effective_batch=256))
    scaled = scaled.model_copy(update={"learning_rate": 0.0016, "learning_rate_multiplier": 0.8})
    assert row(scaled, "learning rate") == "0.0016; 0.001 x 2 (sqrt rule) x 0.8 (tuned), confidence medium"


@pytest.mark.parametrize(
    ("trials", "shown"),
    [
        ([a_trial(27, gib=21), a_trial(22, gib=17)], "17.0 GiB; of 22.4 GiB usable; predicted for size 22"),
        ([a_trial(22, source="replayed"), a_trial(27, gib=21)], "21.0 GiB; of 22.4 GiB usable; predicted for size 27"),
        ([a_trial(26, gib=20), a_trial(27, gib=21)], "21.0 GiB; of 22.4 GiB usable; predicted for size 27"),
        ([a_trial(22, fits=False, gib=99), a_trial(27, gib=21)], "21.0 GiB; of 22.4 GiB usable; predicted for size 27"),
        ([a_trial(27)], "unknown; of 22.4 GiB usable"),
    ],
)
def test_memory_is_that_of_the_chosen_size_or_else_of_the_largest(trials: list[Trial], shown: str) -> None:
    assert row(a_plan(*trials), "memory needed") == shown


def test_measured_peaks_count_where_nothing_was_replayed() -> None:
    trial = a_trial(27, source="measured").model_copy(update={"peak_allocated_bytes": 2 * GIB})
    assert "2.0 GiB; of" in row(a_plan(trial, kind="measured"), "memory needed")
    trial = trial.model_copy(update={"peak_reserved_bytes": 3 * GIB})
    assert "3.0 GiB; of" in row(a_plan(trial, kind="measured"), "memory needed")


def test_other_gpus_accumulate_in_multiples_on_every_rank() -> None:
    others = (another("t4", 14.7, 3), another("a100-80gb", 79.3, 11))
    goal = Goal(effective_batch=128, world_size=2)
    plan = a_plan(a_trial(27), goal=goal, batch_multiple=4, others=others)
    lines = [line.split() for line in text(plan).splitlines() if "GiB" in line][-2:]
    assert lines == [["t4", "14.7", "GiB", "3"], ["a100-80gb", "79.3", "GiB", "11", "8"]]


# In the terminal and in a pipe


def test_names_and_messages_are_shown_as_they_are() -> None:
    odd = "[bold]x:smile:.py:build"
    plan = a_plan(model=odd, optimizer=odd, notices=(Notice(code="invented", message=odd),))
    assert f"  - {odd}\n" in text(plan)
    assert text(plan).startswith("[bold]x:smile:.py:build: 124,439,808 parameters")


def test_no_line_is_wider_than_asked_or_ends_in_spaces() -> None:
    plan = a_plan(has_batch_norm=True, others=(another("t4", 14.7, 9),))
    for width in (40, 80, 120):
        lines = to_text(summary(plan), width).splitlines()
        assert max(map(len, lines)) <= width
        assert all(line == line.rstrip() for line in lines)


def test_piped_text_has_no_colour_and_a_terminal_has_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    plan = a_plan(has_batch_norm=True)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", record=True)
    console.print(summary(plan))
    assert "\x1b" not in text(plan)
    words = [line.rstrip() for line in console.export_text(styles=False).splitlines()]
    assert words == text(plan).splitlines()
    assert console.file.getvalue().count("\x1b[1;36m") == 5  # type: ignore[attr-defined]


def test_trials_are_listed_by_size() -> None:
    plan = a_plan(a_trial(64, fits=False, gib=48), a_trial(27, gib=21.8), a_trial(28, False, None, "replayed"))
    assert list(trial_lines(plan)) == [
        "micro-batch of 27: fits, needs 21.8 GiB (traced)",
        "micro-batch of 28: does not fit (replayed)",
        "micro-batch of 64: does not fit, needs 48.0 GiB (traced)",
    ]


# The catalogue


@dataclass(frozen=True)
class Card:
    slug: str
    name: str
    family: str
    total_bytes: int
    basis: str


def test_the_catalogue_is_a_table_with_a_gap_between_families() -> None:
    cards = [
        Card("rtx-4090", "NVIDIA GeForce RTX 4090", "GeForce", int(23.5 * GIB), "reported"),
        Card("rtx-5090", "NVIDIA GeForce RTX 5090", "GeForce", int(31.4 * GIB), "estimated"),
        Card("mi300x", "AMD Instinct MI300X", "Instinct", 192 * GIB, "estimated"),
    ]
    assert (
        to_text(gpu_table(cards))
        == """\
name      GPU                         memory  basis
rtx-4090  NVIDIA GeForce RTX 4090   23.5 GiB  reported
rtx-5090  NVIDIA GeForce RTX 5090   31.4 GiB  estimated

mi300x    AMD Instinct MI300X      192.0 GiB  estimated
"""
    )


# What the memory is needed for


ANATOMY = Anatomy(
    micro_batch_size=27,
    moment="backward",
    step=2,
    micro_batch=2,
    module="",
    parts=(Part(name="activations", num_bytes=12 * GIB), Part(name="gradients", num_bytes=GIB)),
    modules=(Part(name="blocks.*.mlp", num_bytes=7 * GIB),),
    unused_bytes=2 * GIB,
)
LEVERS = (
    Lever(name="as it is", how="", max_micro_batch_size=27, required_bytes=GIB),
    Lever(name="bf16-mixed", how="--precision bf16-mixed", max_micro_batch_size=2**20, required_bytes=GIB),
    Lever(name="Adafactor", how="torch.optim.Adafactor in build_optimizer", max_micro_batch_size=27, required_bytes=1),
)


def test_a_plan_that_is_shown_says_what_is_in_memory_and_when() -> None:
    plan = a_plan(anatomy=ANATOMY)
    shown = describe(plan, width=120)
    assert "in the backward pass of micro-batch 2, optimizer step 2, for size 27 (predicted)" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert rows[rows.index(["memory"]) + 1 :][:5] == [
        ["activations", "12.0", "GiB"],
        ["blocks.*.mlp", "7.0", "GiB"],
        ["others", "5.0", "GiB"],
        ["gradients", "1.0", "GiB"],
        ["reserved", "beyond", "that,", "with", "room", "to", "spare", "2.0", "GiB"],
    ]
    assert "activations" not in text(plan), "the table after a probe is short"


def test_levers_say_what_they_would_hold_beside_what_is_held_now() -> None:
    shown = to_text(details(a_plan(a_trial(27, gib=21.8), levers=LEVERS)), width=100)
    assert [line.split() for line in shown.splitlines()[2:4]] == [
        ["as", "it", "is", "27"],
        ["bf16-mixed", "at", "least", "1048576", "--precision", "bf16-mixed"],
    ]
    assert "Adafactor" not in shown, "it makes no room"


def test_without_evidence_there_are_no_details() -> None:
    assert to_text(details(a_plan())) == ""


def test_both_answers_are_shown() -> None:
    trial = a_trial(27, gib=21.8).model_copy(update={"peak_reserved_bytes": int(22.1 * GIB)})
    assert row(a_plan(trial), "memory needed").endswith("for size 27; with room to spare it takes 22.1 GiB")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("unused_bytes", -5),
        ("unused_bytes", 10**400),
        ("moment", "nonsense"),
        ("step", -7),
        ("module", "\x1b]0;title"),
        ("parts", [{"name": "activations", "num_bytes": -(10**30)}]),
        ("modules", [{"name": "a\nb", "num_bytes": 1}]),
    ],
)
def test_an_absurd_anatomy_makes_no_plan(key: str, value: Any) -> None:
    data = json.loads(to_json(a_plan(anatomy=ANATOMY)))
    assert from_json(json.dumps(data)).evidence.anatomy == ANATOMY
    data["evidence"]["anatomy"][key] = value
    with pytest.raises(GradplanError):
        from_json(json.dumps(data))
