"""The verbs that read a plan, and the one that writes a model.py: `plan`, `script`, `show`, `init`."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import gradplan
from gradplan import cli, options
from gradplan.equal import equal_split
from gradplan.files import read_plan, write_plan
from gradplan.plan import Goal, Plan, from_json, is_untouched, make_plan, to_json
from gradplan.probes.errors import GradplanError, UsageError
from gradplan.probes.evidence import BackwardPeak, Capacity, Device, Evidence, Notice, Recipe, Trial
from gradplan.replan import plan_again
from gradplan.report import describe, trial_lines
from gradplan.trainers import TRAINERS, arguments_for

GIB = 2**30
DEVICE = Device(name="NVIDIA GeForce RTX 4090", slug="rtx-4090", total_bytes=24 * GIB)
READERS = (["plan"], ["script"], ["show"], ["show", "--json"], ["show", "--for", "lightning"])


def a_trial(size: int, fits: bool = True, **changes: Any) -> Trial:
    return Trial(**{"micro_batch_size": size, "num_micro_batches": 2, "fits": fits, "source": "traced", **changes})


LIMITED = (a_trial(27, required_bytes=21 * GIB), a_trial(28, False, required_bytes=23 * GIB))
WHOLE = (a_trial(64, num_micro_batches=1, required_bytes=GIB),)


def a_plan(*trials: Trial, goal: Goal = Goal(), **changes: Any) -> Plan:  # noqa: B008
    """Of a recipe for 64 samples at 0.001; keys of the evidence go to the evidence."""
    recipe: dict[str, Any] = {"model": "model.py", "names": ("build_model", "build_batch"), "optimizer": "AdamW"}
    recipe |= {"num_parameters": 1000, "base_batch_size": 64, "base_learning_rate": 0.001}
    evidence: dict[str, Any] = {"kind": "simulated", "device": DEVICE, "limit_bytes": 22 * GIB}
    for key, value in changes.items():
        (evidence if key in Evidence.model_fields and key != "notices" else recipe)[key] = value
    evidence["trials"] = trials or LIMITED
    versions = {"gradplan_version": gradplan.__version__, "torch_version": "2.13.0"}
    return make_plan(Recipe(**recipe), Evidence(**evidence), goal, **versions)


def codes(plan: Plan) -> list[str]:
    return [warning.code for warning in plan.warnings]


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("def build_model(): ...\n")
    write_plan(a_plan(), "gradplan.json")


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.main, args, prog_name="gradplan")


def edit(**changes: Any) -> None:
    path = Path("gradplan.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# plan: what is not given stays


PLANS = {
    "limited by memory": a_plan(),
    "whole": a_plan(*WHOLE),
    "asked for": a_plan(goal=Goal(effective_batch=256, world_size=4, precision="bf16-mixed")),
    "an option": a_plan(a_trial(16), goal=Goal(max_micro_batch=16)),
    "an option below what was tried": a_plan(goal=Goal(max_micro_batch=10)),
    "rounded": a_plan(a_trial(24), a_trial(32, False), goal=Goal(effective_batch=100), batch_multiple=8),
    "short dataset": a_plan(a_trial(50), dataset_length=50),
    "nobody's choice": a_plan(*LIMITED, base_batch_size=None, base_learning_rate=None),
    "no base batch": a_plan(goal=Goal(effective_batch=256), base_batch_size=None),
    "warned": a_plan(has_batch_norm=True, notices=(Notice(code="invented", message="a thing to know"),)),
}


@pytest.mark.parametrize("name", PLANS)
def test_planning_again_with_nothing_new_gives_the_same_plan(name: str) -> None:
    assert plan_again(PLANS[name]) == PLANS[name]


def test_the_command_reproduces_the_file() -> None:
    before = Path("gradplan.json").read_bytes()
    result = run("plan", "gradplan.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert Path("gradplan.json").read_bytes() == before
    next_step = "wrote gradplan.json; now type\n\n    gradplan script gradplan.json\n\n"
    assert result.stdout == describe(a_plan()) + next_step


def test_a_plan_that_was_planned_again_forgets_nothing() -> None:
    larger = plan_again(a_plan(*WHOLE), effective_batch=256)
    assert plan_again(larger) == larger
    assert plan_again(larger, effective_batch=64).limited_by == "target"
    assert plan_again(larger, effective_batch=64, max_micro_batch=64).micro_batch_sizes == (64,)


@pytest.mark.parametrize(
    ("given", "goal"),
    [
        ({"effective_batch": 128}, Goal(effective_batch=128)),
        ({"effective_batch": 20}, Goal(effective_batch=20)),
        ({"world_size": 2}, Goal(world_size=2)),
        ({"max_micro_batch": 8}, Goal(max_micro_batch=8)),
        ({"effective_batch": 256, "world_size": 4, "max_micro_batch": 16}, Goal(256, 4, max_micro_batch=16)),
    ],
)
def test_a_plan_from_old_evidence_is_the_plan_that_a_probe_would_have_made(given: dict[str, int], goal: Goal) -> None:
    made, probed = plan_again(a_plan(), **given), a_plan(goal=goal)
    assert made.model_copy(update={"tried_up_to": None}) == probed.model_copy(update={"tried_up_to": None})


def test_the_options_reach_the_plan() -> None:
    goal = ["--effective-batch", "512", "--world-size", "4", "--max-micro-batch", "20"]
    args = [*goal, "--base-batch", "128", "--base-lr", "1e-2"]
    assert run("plan", "gradplan.json", *args).exit_code == 0
    plan = read_plan("gradplan.json")
    assert plan == plan_again(
        a_plan(), effective_batch=512, base_batch=128, base_lr=0.01, world_size=4, max_micro_batch=20
    )
    assert (plan.effective_batch_size, plan.world_size, plan.base_batch_size) == (512, 4, 128)
    assert (plan.learning_rate, plan.micro_batch_size, plan.limited_by) == (0.02, 19, "option")


# plan: the recipe


def test_another_base_rate_gives_another_rate() -> None:
    plan = plan_again(a_plan(goal=Goal(effective_batch=256)), base_lr=0.01)
    assert (plan.base_learning_rate, plan.learning_rate, plan.effective_batch_size) == (0.01, 0.02, 256)


def test_another_base_batch_gives_another_rate_and_leaves_the_effective_batch() -> None:
    plan = plan_again(a_plan(), base_batch=16)
    assert (plan.effective_batch_size, plan.base_batch_size, plan.learning_rate) == (64, 16, 0.002)
    assert plan_again(plan) == plan


def test_where_nobody_named_a_batch_the_base_batch_names_it() -> None:
    plan = plan_again(a_plan(base_batch_size=None), base_batch=64)
    assert (plan.effective_batch_size, codes(plan)) == (64, [])


def tuned(plan: Plan, multiplier: float = 0.8) -> Plan:
    rate = None if plan.learning_rate is None else plan.learning_rate * multiplier
    return plan.model_copy(update={"learning_rate": rate, "learning_rate_multiplier": multiplier})


def test_what_tuning_found_is_kept_with_its_recipe() -> None:
    assert plan_again(tuned(a_plan())) == tuned(a_plan())
    assert codes(plan_again(tuned(a_plan()), world_size=2)) == []
    larger = plan_again(tuned(a_plan()), effective_batch=256)
    assert (larger.learning_rate_multiplier, larger.learning_rate) == (0.8, 0.001 * 2 * 0.8)
    assert codes(larger) == ["tuned-elsewhere"]
    assert plan_again(larger) == larger
    unknown = tuned(a_plan(base_learning_rate=None))
    assert plan_again(unknown) == unknown


def test_what_tuning_found_for_another_recipe_is_dropped_and_said() -> None:
    plan = plan_again(tuned(a_plan()), base_lr=0.01)
    assert (plan.learning_rate_multiplier, plan.learning_rate, codes(plan)) == (1.0, 0.01, ["tuned-elsewhere"])


# plan: what the evidence covers


def test_larger_micro_batches_than_were_tried_are_not_promised() -> None:
    plan = plan_again(a_plan(*WHOLE), effective_batch=256)
    assert (plan.micro_batch_sizes, plan.max_micro_batch_size) == ((64,) * 4, 64)
    assert (plan.limited_by, codes(plan)) == ("option", ["larger-not-tried"])
    command = "gradplan probe model.py --device rtx-4090 --effective-batch 256"
    assert plan.warnings[0].message.endswith(command)
    assert "64 is the largest that was tried" in describe(plan)


def test_memory_limits_where_a_larger_micro_batch_did_not_fit() -> None:
    plan = plan_again(a_plan(), effective_batch=256)
    assert (plan.max_micro_batch_size, plan.limited_by, codes(plan)) == (27, "memory", [])


def test_a_plan_without_the_key_is_judged_by_its_trials() -> None:
    old = a_plan(*WHOLE).model_copy(update={"tried_up_to": None})
    assert codes(plan_again(old, effective_batch=256)) == ["larger-not-tried"]
    old = a_plan().model_copy(update={"tried_up_to": None})
    assert codes(plan_again(old, effective_batch=256)) == []


def test_an_option_of_the_probe_bounds_what_is_known() -> None:
    probed = a_plan(a_trial(16), goal=Goal(max_micro_batch=16))
    assert codes(plan_again(probed, effective_batch=128)) == []  # the option still holds
    lifted = plan_again(probed, max_micro_batch=64)
    assert (lifted.micro_batch_sizes, lifted.limited_by, codes(lifted)) == ((16,) * 4, "option", ["larger-not-tried"])


def test_one_micro_batch_is_no_evidence_for_several_unless_the_gradients_fit_beside_it() -> None:
    num_parameters = GIB // 4  # 1 GiB of gradients
    fitting = a_trial(64, num_micro_batches=1, required_bytes=21 * GIB)
    plan = plan_again(a_plan(fitting, num_parameters=num_parameters), effective_batch=128)
    assert plan.micro_batch_sizes == (64, 64)
    halved = a_plan(fitting, num_parameters=2 * num_parameters, goal=Goal(precision="bf16-true"))
    assert plan_again(halved, effective_batch=128).micro_batch_sizes == (64, 64)
    tight = a_trial(64, num_micro_batches=1, required_bytes=21 * GIB + 1)
    smaller = a_trial(32, num_micro_batches=1, required_bytes=12 * GIB)
    plan = plan_again(a_plan(tight, smaller, num_parameters=num_parameters), effective_batch=128)
    assert (plan.micro_batch_sizes, plan.max_micro_batch_size) == ((32,) * 4, 32)
    assert codes(plan) == ["larger-not-tried"]
    with pytest.raises(UsageError, match=r"only tried with one .*gradplan probe model\.py .*--effective-batch 128$"):
        plan_again(a_plan(tight, num_parameters=num_parameters), effective_batch=128)


def test_other_gpus_that_were_not_tried_further_hold_at_least_that_much() -> None:
    others = tuple(Capacity(device=DEVICE, max_micro_batch_size=size) for size in (20, 64))
    text = describe(plan_again(a_plan(*WHOLE, others=others), effective_batch=256))
    assert re.search(r"rtx-4090  24\.0 GiB +20 +13$", text, re.MULTILINE)
    assert re.search(r"rtx-4090  24\.0 GiB  at least 64 +at most 4$", text, re.MULTILINE)
    assert "at least" not in describe(a_plan(*WHOLE, others=others))


# plan: files that people edit


def test_an_edited_plan_is_used_but_not_overwritten() -> None:
    edit(micro_batch_sizes=[16, 16, 16, 16], micro_batch_size=16, accumulation_steps=4)
    before = Path("gradplan.json").read_text()
    result = run("plan", "gradplan.json")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: gradplan.json was edited since gradplan wrote it; --force overwrites it, or --plan PATH writes "
        "elsewhere\n"
    )
    assert Path("gradplan.json").read_text() == before
    assert "16" in run("show", "gradplan.json").stdout
    assert run("plan", "gradplan.json", "--plan", "new.json").exit_code == 0
    assert read_plan("new.json") == a_plan()
    assert run("plan", "gradplan.json", "--force").exit_code == 0
    assert is_untouched(Path("gradplan.json").read_text())


def test_an_edited_batch_or_recipe_counts_as_asked_for() -> None:
    edit(effective_batch_size=96, micro_batch_sizes=[24] * 4, micro_batch_size=24, accumulation_steps=4)
    edit(base_learning_rate=0.01, learning_rate=0.01)
    plan = plan_again(read_plan("gradplan.json"))
    assert (plan.effective_batch_size, plan.base_learning_rate) == (96, 0.01)
    edit(world_size=5, effective_batch_size=480)
    assert plan_again(read_plan("gradplan.json")).effective_batch_size == 480


def test_a_plan_never_overwrites_the_model_or_a_foreign_file() -> None:
    Path("mine").write_text("mine")
    for path in ("model.py", "mine", "."):
        assert run("plan", "gradplan.json", "--plan", path).exit_code == 2
    assert run("plan", "gradplan.json", "--force", "--plan", "model.py").exit_code == 2
    assert Path("mine").read_text() == "mine"


def test_json_is_the_plan_alone_and_the_warnings_are_notes() -> None:
    write_plan(a_plan(*WHOLE), "gradplan.json")
    result = run("plan", "gradplan.json", "--effective-batch", "256", "--json")
    assert result.stdout == Path("gradplan.json").read_text()
    assert result.stderr.startswith("note: micro-batches larger than 64 were not tried")
    assert result.stderr.endswith("wrote gradplan.json; now type\n\n    gradplan script gradplan.json\n\n")
    assert run("plan", "gradplan.json", "--json", "-q").stderr == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--effective-batch", "63", "--world-size", "2"], "error: 2 ranks cannot share an effective batch of 63"),
        (["--effective-batch", "0"], "error: Invalid value for '--effective-batch': '0' is not a count"),
        (["--base-lr", "nan"], "error: Invalid value for '--base-lr': 'nan' is not a number"),
    ],
)
def test_a_goal_that_cannot_be_is_wrong_usage_and_changes_nothing(args: list[str], message: str) -> None:
    before = Path("gradplan.json").read_bytes()
    result = run("plan", "gradplan.json", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert Path("gradplan.json").read_bytes() == before


# Plan files that cannot be read


@pytest.mark.parametrize("verb", READERS, ids=" ".join)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (to_json(a_plan()).encode()[:300], "is damaged: not JSON"),
        (b"[1, 2]", "is not a gradplan plan"),
        (b'{"name": "package", "version": "1.0"}', "is not a gradplan plan"),
        (to_json(a_plan()).replace('"schema": 1', '"schema": 2').encode(), "is newer than this gradplan"),
        (to_json(a_plan()).replace('"micro_batch_size": 22', '"micro_batch_size": "22"').encode(), "is damaged"),
        (to_json(a_plan()).replace('"learning_rate": 0.001', '"learning_rate": NaN').encode(), "is damaged"),
        (to_json(a_plan()).replace('"schema": 1', '"schema": 1, "unheard": 1').encode(), "is damaged"),
        (to_json(a_plan()).replace('"accumulation_steps": 3', '"accumulation_steps": 2').encode(), "is damaged"),
        (b"\xff\xfe" + to_json(a_plan()).encode("utf-16-le"), "is damaged: not UTF-8"),
        (b"", "is damaged: not JSON"),
    ],
)
def test_a_file_that_is_no_plan_ends_every_verb_with_1(verb: list[str], content: bytes, problem: str) -> None:
    Path("gradplan.json").write_bytes(content)
    result = run(*verb, "gradplan.json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: gradplan.json {problem}")
    assert len(result.stderr.splitlines()) == 1
    assert Path("gradplan.json").read_bytes() == content


@pytest.mark.parametrize("verb", READERS, ids=" ".join)
def test_a_missing_plan_or_a_folder_is_wrong_usage(verb: list[str]) -> None:
    Path("folder").mkdir()
    missing = {"gone.json": "there is no file gone.json\n", "model.py/plan": "there is no file model.py/plan\n"}
    for path, message in {**missing, "folder": "folder is a folder, not a plan file such as folder"}.items():
        result = run(*verb, path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {message}")


def test_a_model_in_the_place_of_its_plan_is_told_what_makes_one() -> None:
    result = run("show", "model.py")
    assert result.exit_code == 1
    assert result.stderr == "error: model.py is not a plan file; 'gradplan probe model.py' makes one\n"


def test_a_plan_with_the_mark_that_some_editors_write_is_read() -> None:
    Path("gradplan.json").write_text(to_json(a_plan()), encoding="utf-8-sig")
    assert read_plan("gradplan.json") == a_plan()


def test_a_plan_whose_micro_batches_break_the_multiple_is_damaged() -> None:
    edit(recipe=json.loads(to_json(a_plan()))["recipe"] | {"batch_multiple": 4})
    assert "are not multiples of recipe.batch_multiple" in run("show", "gradplan.json").stderr


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def test_whatever_stands_in_a_plan_is_an_error_of_ours_or_can_be_read() -> None:
    peaks = tuple(
        BackwardPeak(backward=form, micro_batch_size=27, peak_allocated_bytes=GIB, peak_reserved_bytes=GIB)
        for form in ("joint", "sequential")
    )
    others = (Capacity(device=DEVICE, max_micro_batch_size=9),)
    data = json.loads(to_json(a_plan(backward_peaks=peaks, others=others, has_batch_norm=True)))
    num_refused = 0
    for path in leaves(data):
        for hostile in (None, -1, 0, 10**30, 1.5, "", "\ud800", [], {}):
            changed = copy.deepcopy(data)
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = hostile
            try:
                plan = from_json(json.dumps(changed))
                describe(plan)
                list(trial_lines(plan))
                arguments_for(plan, "lightning")
                plan_again(plan)
            except GradplanError:
                num_refused += 1
    assert num_refused > 100


# script


def test_the_script_is_written_again() -> None:
    result = run("script", "gradplan.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "wrote train.py, which trains model.py; now type\n\n    python train.py\n\n"
    first = Path("train.py").read_text()
    assert run("plan", "gradplan.json", "--effective-batch", "32").exit_code == 0
    assert run("script", "gradplan.json").exit_code == 0
    assert Path("train.py").read_text() != first


def test_a_script_without_a_learning_rate_asks_for_one() -> None:
    write_plan(a_plan(base_learning_rate=None), "gradplan.json")
    assert "    python train.py --learning-rate X\n" in run("script", "gradplan.json").stdout


def test_the_model_is_found_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    result = run("script", "../gradplan.json")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"wrote train.py, which trains {Path('../model.py')}; ")
    assert '.parents[1] / "model.py"' in Path("train.py").read_text()
    Path("model.py").touch()  # the working folder comes first
    assert run("script", "../gradplan.json").stdout.startswith("wrote train.py, which trains model.py; ")


def test_a_script_for_a_model_that_is_gone_is_wrong_usage() -> None:
    Path("model.py").unlink()
    result = run("script", "gradplan.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: there is no file model.py")
    assert not Path("train.py").exists()


@pytest.mark.parametrize("path", ["gradplan.json", "model.py", "mine.py", "gone/train.py"])
def test_a_script_never_overwrites_what_it_needs_or_what_is_not_ours(path: str) -> None:
    Path("mine.py").write_text("mine")
    before = {file: file.read_bytes() for file in Path().iterdir()}
    assert run("script", "gradplan.json", "--script", path).exit_code == 2
    if path != "mine.py":
        assert run("script", "gradplan.json", "--script", path, "--force").exit_code == 2
    assert {file: file.read_bytes() for file in Path().iterdir()} == before


# show


def test_show_is_the_table_of_the_probe() -> None:
    result = run("show", "gradplan.json")
    assert (result.exit_code, result.stdout, result.stderr) == (0, describe(a_plan()), "")


def test_show_as_json_is_the_plan_file() -> None:
    edit(torch_version="9.9")
    result = run("show", "gradplan.json", "--json")
    assert (result.stdout, result.stderr) == (to_json(read_plan("gradplan.json")), "")


def a_plan_of_two_losses(backward: Any, **changes: Any) -> Plan:
    sizes = {"joint": 542, "sequential": 478}
    peaks = tuple(
        BackwardPeak(
            backward=form, micro_batch_size=27, peak_allocated_bytes=400 * 2**20, peak_reserved_bytes=size * 2**20
        )
        for form, size in sizes.items()
    )
    return a_plan(**{"backward": backward, "backward_peaks": peaks, **changes})


def test_two_losses_show_both_forms() -> None:
    goal = Goal(effective_batch=27)
    sequential, joint = (a_plan_of_two_losses(form, goal=goal) for form in ("sequential", "joint"))
    expected = "backward            loss by loss  478.0 MiB, against 542.0 MiB for their sum\n"
    assert expected in describe(sequential)
    assert "all losses at once  542.0 MiB, against 478.0 MiB loss by loss" in describe(joint, 200)
    write_plan(sequential, "gradplan.json")
    assert run("show", "gradplan.json", "-v").stderr.splitlines() == [
        *trial_lines(sequential),
        "backward of the sum, micro-batch of 27: reserves 542.0 MiB, 400.0 MiB of it allocated (predicted)",
        "backward loss by loss, micro-batch of 27: reserves 478.0 MiB, 400.0 MiB of it allocated, used (predicted)",
    ]


def test_peaks_at_another_size_than_the_micro_batch_name_it() -> None:
    assert "for their sum (predicted for size 27)" in describe(a_plan_of_two_losses("sequential"), 200)


def test_losses_with_one_form_say_which() -> None:
    assert "backward            loss by loss" in describe(a_plan(backward="sequential"))
    assert "backward" not in describe(a_plan())


def test_what_was_measured_is_called_so_and_shows_its_time() -> None:
    trial = a_trial(27, source="measured", peak_reserved_bytes=21 * GIB, step_seconds=0.1234)
    plan = a_plan(trial, a_trial(28, False, source="measured"), kind="measured")
    text = describe(plan)
    assert "step time           123 ms      measured with 2 micro-batches of 27" in text
    assert "measured for size 27" in text
    assert "predicted" not in text
    write_plan(plan, "gradplan.json")
    lines = run("show", "gradplan.json", "-v").stderr.splitlines()
    assert lines[0] == "micro-batch of 27: fits, needs 21.0 GiB, 123 ms for 2 micro-batches of 27 (measured)"


# show --for


def arguments(plan: Plan, trainer: str) -> str:
    write_plan(plan, "gradplan.json", force=True)
    result = run("show", "gradplan.json", "--for", trainer)
    assert result.exit_code == 0
    return result.stdout


def keywords(text: str) -> dict[str, dict[str, Any]]:
    """The arguments of each call in Python text."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {
        ast.unparse(call.func): {k.arg or "": ast.literal_eval(k.value) for k in call.keywords if k.arg}
        for call in calls
    }


def pairs(text: str) -> dict[str, str]:
    """The keys and values of flat YAML."""
    return dict(line.strip().split(": ") for line in text.splitlines() if ": " in line and not line.startswith("#"))


EVEN = a_plan(goal=Goal(effective_batch=108, precision="bf16-mixed", world_size=2))  # 2 x 27 on each of 2 ranks


def test_the_options_name_every_trainer() -> None:
    assert tuple(TRAINERS) == options.TRAINERS
    for trainer in TRAINERS:
        assert run("show", "gradplan.json", "--for", trainer).exit_code == 0
    assert run("show", "gradplan.json", "--for", "keras").exit_code == 2
    assert run("show", "gradplan.json", "--for", "lightning", "--json").exit_code == 2


def test_arguments_for_transformers() -> None:
    call = keywords(text := arguments(EVEN, "transformers"))["TrainingArguments"]
    expected = {"per_device_train_batch_size": 27, "gradient_accumulation_steps": 2, "bf16": True}
    assert call == {**expected, "learning_rate": pytest.approx(EVEN.learning_rate, rel=1e-5)}
    assert "# start it with 2 processes" in text


def test_arguments_for_lightning() -> None:
    calls = keywords(arguments(EVEN, "lightning"))
    assert calls["Trainer"] == {"accumulate_grad_batches": 2, "precision": "bf16-mixed", "devices": 2}
    assert calls["DataLoader"] == {"batch_size": 27, "shuffle": True}


def test_arguments_for_accelerate() -> None:
    calls = keywords(arguments(EVEN, "accelerate"))
    assert calls["Accelerator"] == {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}
    assert calls["DataLoader"]["batch_size"] == 27


def test_arguments_for_deepspeed_are_json_and_their_notes_stand_beside_it() -> None:
    write_plan(EVEN, "gradplan.json")
    result = run("show", "gradplan.json", "--for", "deepspeed")
    config = {"train_batch_size": 108, "train_micro_batch_size_per_gpu": 27, "gradient_accumulation_steps": 2}
    assert json.loads(result.stdout) == {**config, "bf16": {"enabled": True}}
    assert "note: the learning rate of your optimizer: 0.0012" in result.stderr


def test_arguments_for_torchtitan() -> None:
    flags = dict(re.findall(r"^--(\S+) (\S+)", arguments(EVEN, "torchtitan"), re.MULTILINE))
    assert (flags["training.local_batch_size"], flags["training.global_batch_size"]) == ("27", "108")
    assert (flags["training.dtype"], flags["training.mixed_precision_param"]) == ("float32", "bfloat16")
    assert float(flags["optimizer.lr"]) == pytest.approx(EVEN.learning_rate, rel=1e-5)


def test_arguments_for_torchtune_and_llama_factory() -> None:
    true = a_plan(goal=Goal(effective_batch=54, precision="bf16-true"), base_learning_rate=1e-5)
    found = pairs(arguments(true, "torchtune"))
    assert (found["batch_size"], found["gradient_accumulation_steps"], found["dtype"]) == ("27", "2", "bf16")
    found = pairs(arguments(true, "llama-factory"))
    assert (found["per_device_train_batch_size"], found["pure_bf16"]) == ("27", "true")
    assert re.fullmatch(r"\d\.\d+e-06", found["learning_rate"])  # without the point, YAML 1.1 reads text
    assert "bf16: true" in arguments(EVEN, "llama-factory")


@pytest.mark.parametrize(
    ("precision", "trainer", "expected"),
    [
        ("32-true", "transformers", None),
        ("16-mixed", "transformers", "fp16=True"),
        ("bf16-true", "transformers", "# bf16-true: build the model in bfloat16"),
        ("bf16-true", "lightning", 'precision="bf16-true"'),
        ("32-true", "accelerate", 'mixed_precision="no"'),
        ("16-mixed", "accelerate", 'mixed_precision="fp16"'),
        ("16-mixed", "deepspeed", '"fp16": {\n    "enabled": true'),
        ("32-true", "torchtitan", "--training.mixed_precision_param float32"),
        ("bf16-true", "torchtitan", "--training.dtype bfloat16"),
        ("32-true", "torchtune", "dtype: fp32"),
    ],
)
def test_each_precision_keeps_its_meaning(precision: Any, trainer: str, expected: str | None) -> None:
    text = arguments(a_plan(goal=Goal(effective_batch=54, precision=precision)), trainer)
    assert expected in text if expected else not re.search("16", text)


@pytest.mark.parametrize(("precision", "trainer"), [("16-mixed", "torchtitan"), ("bf16-mixed", "torchtune")])
def test_a_precision_that_a_trainer_lacks_is_refused(precision: Any, trainer: str) -> None:
    with pytest.raises(
        UsageError, match=f"^{trainer} does not train in {precision}; probe with --precision 32-true or"
    ):
        arguments_for(a_plan(goal=Goal(precision=precision)), trainer)


@pytest.mark.parametrize(
    ("batch", "fits_up_to", "multiple", "split"),
    [
        (64, 27, 1, (16, 4, 64)),  # [22, 21, 21]: one more micro-batch keeps the batch
        (67, 27, 1, (22, 3, 66)),  # a prime
        (100, 8, 1, (5, 20, 100)),
        (54, 27, 1, (27, 2, 54)),
        (7, 4, 1, (3, 2, 6)),
        (56, 24, 8, (8, 7, 56)),
        (40, 24, 8, (8, 5, 40)),
        (23, 6, 1, (6, 4, 24)),
    ],
)
def test_the_nearest_equal_split_fits(batch: int, fits_up_to: int, multiple: int, split: tuple[int, int, int]) -> None:
    trials = (a_trial(fits_up_to), a_trial(fits_up_to + multiple, False))
    plan = a_plan(*trials, goal=Goal(effective_batch=batch), batch_multiple=multiple)
    equal = equal_split(plan)
    assert (equal.micro_batch, equal.num_micro_batches, equal.effective_batch) == split
    assert equal.micro_batch <= plan.micro_batch_size


def test_an_equal_split_that_keeps_the_batch_says_so() -> None:
    text = arguments(a_plan(), "lightning").replace("\n#   ", " ")
    assert text.startswith(
        "# the plan has 3 micro-batches of 22 and 21; lightning takes equal ones: 4 of 16, the same 64 samples per "
        "optimizer step\n"
    )


def test_an_equal_split_with_another_batch_says_so_and_the_rate_follows() -> None:
    plan = a_plan(goal=Goal(effective_batch=134, world_size=2))
    found = arguments_for(plan, "deepspeed")
    assert json.loads(found.text)["train_batch_size"] == 132
    assert "an optimizer step sees 132 samples, NOT 134, and the learning rate follows" in found.notes[0]
    assert equal_split(plan).learning_rate == pytest.approx(0.001 * (132 / 64) ** 0.5)


def test_what_another_trainer_does_otherwise_is_said() -> None:
    plan = a_plan_of_two_losses("sequential", limit_bytes=500 * 2**20, optimizer="SGD", base_learning_rate=None)
    notes = "\n".join(arguments_for(plan, "transformers").notes)
    assert "runs it once for their sum, which needs 542.0 MiB at 27 samples: DOES NOT FIT" in notes
    assert "the plan was made with SGD, not AdamW" in notes
    assert "the learning rate is unknown" in notes
    assert "is not known to fit" in "\n".join(arguments_for(a_plan(backward="sequential"), "lightning").notes)
    assert "count_items" in "\n".join(arguments_for(a_plan(names=("count_items",)), "lightning").notes)


# init


def test_init_writes_a_file_to_start_from_and_says_what_to_type() -> None:
    Path("model.py").unlink()
    result = run("init")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "wrote model.py; now type\n\n    gradplan probe model.py\n\n"
    text = Path("model.py").read_text()
    names = {getattr(node, "name", None) for node in ast.parse(text).body}
    assert {"build_dataset", "build_model", "compute_loss", "build_optimizer"} <= names
    assert "{{" not in text
    assert "import gradplan" not in text
    for name in ("BATCH_SIZE", "LEARNING_RATE", "BATCH_MULTIPLE", "build_batch", "collate_fn", "count_items"):
        assert name in text
    for name in ("build_scheduler", "build_validation_dataset", "collate_fn_validation", "load_weights"):
        assert name in text


def test_init_overwrites_nothing_unless_forced() -> None:
    before = Path("model.py").read_text()
    result = run("init")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: model.py is there already; --force overwrites it, or name another file\n"
    assert Path("model.py").read_text() == before
    assert run("init", "--force").exit_code == 0
    assert run("init").exit_code == 2  # not even its own
    Path("link.py").symlink_to("nowhere.py")
    assert run("init", "link.py").exit_code == 2


@pytest.mark.parametrize("path", ["model", "no/model.py", "model.txt", "folder.py"])
def test_init_refuses_what_could_not_be_probed(path: str) -> None:
    Path("folder.py").mkdir()
    assert run("init", path).exit_code == 2
    assert run("init", path, "--force").exit_code == 2


def test_what_init_writes_is_planned_without_warnings_and_learns() -> None:
    gradplan.write_model("start.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def python(*args: str) -> str:
        done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    probed = json.loads(python("-m", "gradplan", "probe", "start.py", "--device", "t4", "--json", "--force"))
    assert (probed["warnings"], probed["effective_batch_size"], probed["learning_rate_factor"]) == ([], 64, 1)
    losses = re.findall(r"^step \d+/\d+  loss ([0-9.]+)", python("train.py", "--device", "cpu"), re.MULTILINE)
    assert float(losses[-1]) < 0.5 * float(losses[0])


# Functions, and what is imported


@pytest.mark.parametrize(
    "args", [["plan"], ["show"], ["show", "-v"], ["show", "--json"], ["show", "--for", "deepspeed"], ["script"]]
)
def test_verbs_that_read_a_plan_need_no_torch(args: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    poison = tmp_path_factory.mktemp("poison")
    for name in ("torch", "optuna"):
        (poison / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    before = f"import sys; sys.path.insert(0, {str(poison)!r}); from gradplan.cli import main"
    code = f"{before}; main({[args[0], 'gradplan.json', *args[1:]]!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "was imported" in done.stderr) == (0, False), done.stderr


def test_every_name_of_the_package_is_what_it_was_when_it_is_asked_for_again() -> None:
    names = [name for name in gradplan.__all__ if name != "__version__"]
    for name in names:
        assert getattr(gradplan, name) is getattr(gradplan, name)
        assert callable(getattr(gradplan, name)), name
    assert {"plan_again", "read_plan", "describe", "arguments_for", "write_model"} <= set(names)


def test_the_functions_are_the_verbs() -> None:
    plan = gradplan.plan_again(gradplan.read_plan("gradplan.json"), effective_batch=32)
    gradplan.write_plan(plan, "other.json")
    assert gradplan.describe(plan) == run("show", "other.json").stdout
    assert gradplan.arguments_for(plan, "accelerate").text == run("show", "other.json", "--for", "accelerate").stdout


@pytest.mark.parametrize(
    ("key", "value"), [("builder", "x(); import os #"), ("num_counts", -3), ("num_counts", 0), ("builder", "")]
)
def test_a_plan_file_puts_no_code_into_the_script(key: str, value: Any) -> None:
    data = json.loads(to_json(a_plan(a_trial(8))))
    data["recipe"][key] = value
    with pytest.raises(GradplanError, match="damaged"):
        from_json(json.dumps(data))
    with pytest.raises(GradplanError, match="schema is True"):
        from_json(json.dumps({**data, "schema": True}))
