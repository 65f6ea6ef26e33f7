"""What train.py's text holds, and that it finds the user's file: `gradplan.script`."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradplan import window
from gradplan.plan import Plan
from gradplan.probes import checkpoints, drawing, lightning, ranks, step
from gradplan.probes.evidence import Device, Evidence, Notice, Recipe, Trial
from gradplan.script import is_untouched, render, seal

MODEL = """
import torch
from torch.utils.data import TensorDataset

def build_model():
    return torch.nn.Linear(3, 1)

def build_dataset():
    return TensorDataset(torch.ones(10, 3), torch.ones(10, 1))

def build_batch(batch_size):
    return torch.ones(batch_size, 3), torch.ones(batch_size, 1)

def compute_loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
NAMES = ("build_model", "build_dataset", "compute_loss")


def plan_for(names: tuple[str, ...] = NAMES, **changes: Any) -> Plan:
    """A plan for 64 samples per step, 27 at once; keys of the recipe go to the recipe."""
    recipe: dict[str, Any] = {
        "model": "model.py",
        "names": names,
        "optimizer": "AdamW",
        "num_parameters": 4,
        "base_batch_size": 32,
        "base_learning_rate": 6e-4,
        "dataset_length": 10,
    }
    fits = {"micro_batch_size": 27, "num_micro_batches": 2, "fits": True, "required_bytes": 20 * 2**30}
    trial = Trial(source="traced", **fits)
    device = Device(name="NVIDIA GeForce RTX 4090", total_bytes=24 * 2**30)
    evidence = Evidence(kind="simulated", device=device, limit_bytes=22 * 2**30, trials=(trial,))
    keys: dict[str, Any] = {
        "gradplan_version": "0.1.0",
        "torch_version": "2.13.0",
        "precision": "32-true",
        "micro_batch_size": 22,
        "micro_batch_sizes": (22, 21, 21),
        "accumulation_steps": 3,
        "world_size": 1,
        "effective_batch_size": 64,
        "max_micro_batch_size": 27,
        "limited_by": "memory",
        "learning_rate": 6e-4 * 2**0.5,
        "learning_rate_rule": "sqrt",
        "learning_rate_factor": 2**0.5,
        "confidence": "high",
        "evidence": evidence,
    }
    for key, value in changes.items():
        (recipe if key in Recipe.model_fields else keys)[key] = value
    for key in ("model", "optimizer", "num_parameters", "base_batch_size", "base_learning_rate"):
        keys[key] = recipe[key]
    return Plan(**keys, recipe=Recipe(**recipe))


def text_for(plan: Plan, script: str = "train.py", model: str = "model.py") -> str:
    return render(plan, Path(script), Path(model))


@functools.cache
def all_variants() -> list[str]:
    """A text for every way in which plans differ."""
    optional = ("count_items", "collate_fn", "load_weights", "build_optimizer", "build_scheduler")
    optional += ("build_validation_dataset", "collate_fn_validation")
    data = [("build_dataset",), ("build_batch",)]
    names = [("build_model", *kind, *more) for kind in data for more in ((), optional)]
    rates = [
        {},
        {"base_learning_rate": None, "learning_rate": None},
        {"learning_rate_factor": 1.0, "learning_rate": 6e-4},
        {"learning_rate_multiplier": 1.5, "learning_rate": 6e-4 * 2**0.5 * 1.5},
    ]
    rest: list[dict[str, Any]] = [
        {},
        {"batch_multiple": 4, "precision": "16-mixed", "micro_batch_size": 24, "micro_batch_sizes": (24, 20, 20)},
        {"has_batch_norm": True, "precision": "bf16-true"},
        {"world_size": 2, "effective_batch_size": 128, "precision": "bf16-mixed"},
        {"model": "model.py:other", "builder": "other", "warnings": (Notice(code="x", message="mind " * 50),)},
        {"num_counts": 2, "backward": "sequential"},
        {"num_counts": 2},
        {"is_stream": True, "dataset_length": None},
        {"lightning": ("training_step", "configure_optimizers", "schedule")},
        {"lightning": ("training_step", "configure_optimizers"), "precision": "16-mixed"},
    ]
    return [text_for(plan_for(n, **rate, **more)) for n, rate, more in itertools.product(names, rates, rest)]


def functions_in(text: str) -> dict[str, str]:
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
    return found


def load(folder: Path, plan: Plan, model: str = "model.py") -> ModuleType:
    """The script, written to ``folder`` and imported."""
    path = folder / "train.py"
    path.write_text(render(plan, path, folder / model))
    return import_file(path)


def import_file(path: Path) -> ModuleType:
    module = ModuleType("train_under_test")
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


@pytest.fixture(autouse=True)
def _imports_are_undone() -> Any:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.rstrip("_") in {"model", "json", "helpers", "my-model"}:
            del sys.modules[name]


# The text


def test_the_training_step_is_pasted_word_for_word() -> None:
    sources = {
        name: inspect.getsource(function)
        for module in (step, window, drawing, ranks, lightning, checkpoints)
        for name, function in vars(module).items()
        if getattr(function, "__module__", "") == module.__name__
    }
    del sources["defines"]  # for the probe alone
    seen = set()
    for text in all_variants():
        pasted = {name: body for name, body in functions_in(text).items() if name in sources}
        assert pasted == {name: sources[name] for name in pasted}
        seen |= pasted.keys()
    assert seen == sources.keys()


def test_what_a_plan_does_not_need_is_not_there() -> None:
    plain = text_for(plan_for())
    for absent in ("GradScaler", "model_py.count_items", "MIN_MICRO", "MULTIPLIER", "load_weights"):
        assert absent not in plain
    for absent in ("model_py.collate_fn", "def model_loss", "build_batch", "run_loss_by_loss", "training_step"):
        assert absent not in plain
    assert "run_loss_by_loss" in text_for(plan_for(backward="sequential"))
    assert "GradScaler" in text_for(plan_for(precision="16-mixed"))
    assert "autocast" in text_for(plan_for(precision="bf16-mixed"))
    without_dataset = text_for(plan_for(("build_model", "build_batch"), dataset_length=None))
    assert "DataLoader" not in without_dataset
    assert "--epochs" not in without_dataset
    assert "LEARNING_RATE_FACTOR" not in text_for(plan_for(learning_rate_factor=1.0, learning_rate=6e-4))


def test_it_imports_torch_and_the_standard_library_only() -> None:
    for text in all_variants():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert module.partition(".")[0] in {"torch", *sys.stdlib_module_names}, module


def test_it_is_clean(tmp_path: Path) -> None:
    for number, text in enumerate(all_variants()):
        (tmp_path / f"train_{number}.py").write_text(text)
    rules = ["--isolated", "--select=E,F,I,B,UP,SIM,RUF,C4,PIE,N"]
    rules += ["--line-length=120", "--target-version=py310"]
    for command in (["check", *rules], ["format", "--diff", "--isolated", "--line-length=120"]):
        ruff = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert ruff.returncode == 0, ruff.stdout + ruff.stderr


def test_rendering_needs_no_torch() -> None:
    code = "import sys, gradplan.script; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_docstring_says_what_was_decided_and_why() -> None:
    text = ast.get_docstring(ast.parse(text_for(plan_for())))
    assert text is not None
    words = " ".join(text.split())
    assert "NVIDIA GeForce RTX 4090, simulated: 22.0 GiB of its 24.0 GiB" in words
    assert "a micro-batch of 27 needs 20.0 GiB: the most that fits" in words
    assert "22 + 2 x 21 samples" in words
    assert "0.0006 for a batch of 32 becomes 0.000849 for 64 (sqrt rule for AdamW; confidence: high)" in words


def test_a_plan_for_ranks_says_what_each_does() -> None:
    words = " ".join(text_for(plan_for(world_size=2, effective_batch_size=128)).split())
    assert "22 + 2 x 21 samples on each of 2 ranks, 128 in all" in words
    assert "EFFECTIVE_BATCH_SIZE = 128" in words


@given(st.text())
@example('say """this""" "')
@example("in C:\\new\\")
@example("nul \0, tab \t, line\nend")
@settings(max_examples=50, deadline=None)
def test_any_message_makes_a_docstring(message: str) -> None:
    notice = Notice(code="any", message=message)
    device = Device(name=f"GPU {message}", total_bytes=2)
    evidence = Evidence(kind="measured", device=device, limit_bytes=1, trials=())
    text = text_for(plan_for(warnings=(notice,), evidence=evidence))
    docstring = ast.get_docstring(ast.parse(text), clean=False) or ""
    shown = "".join(char if char.isprintable() else " " for char in message)
    assert "".join(shown.split()) in "".join(docstring.split())


# The seal


def test_the_same_plan_gives_the_same_text() -> None:
    assert text_for(plan_for()) == text_for(plan_for())
    assert is_untouched(text_for(plan_for()))


@given(st.text())
@settings(deadline=None)
def test_sealed_text_is_untouched_until_it_changes(text: str) -> None:
    sealed = seal(text)
    assert is_untouched(sealed)
    assert sealed.endswith(text)
    assert not is_untouched(sealed + " ")
    assert not is_untouched(text)


def test_every_edit_breaks_the_seal() -> None:
    sealed = text_for(plan_for())
    edits = {"64  #": "65  #", "\n\n\n": "\n\n", "# gradplan": "#  gradplan", "was ": "was 0"}
    for old, new in edits.items():
        assert not is_untouched(sealed.replace(old, new, 1))
    assert not is_untouched("")


# Finding the user's file


@pytest.mark.parametrize(
    ("script", "model", "expression"),
    [
        ("train.py", "model.py", 'Path(__file__).resolve().parent / "model.py"'),
        ("train.py", "nets/gpt.py", 'Path(__file__).resolve().parent / "nets/gpt.py"'),
        ("runs/a/train.py", "nets/gpt.py", 'Path(__file__).resolve().parents[2] / "nets/gpt.py"'),
        ("train.py", 'a "b"/ü.py', 'Path(__file__).resolve().parent / "a \\"b\\"/ü.py"'),
    ],
)
def test_the_model_is_found_from_the_scripts_folder(script: str, model: str, expression: str) -> None:
    assert f"MODEL_FILE = {expression}\n" in text_for(plan_for(), script, model)


def test_a_dataclass_a_sibling_and_a_relative_path_load_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets, runs = tmp_path / "nets", tmp_path / "runs"
    nets.mkdir(), runs.mkdir()
    (nets / "helpers.py").write_text("WIDTH = 3\n")
    (nets / "width.txt").write_text("3")
    (nets / "model.py").write_text(
        "from __future__ import annotations\nimport dataclasses, pathlib\nimport helpers\n"
        "@dataclasses.dataclass\nclass Config:\n    width: int = helpers.WIDTH\n"
        "assert (pathlib.Path(__file__).parent / 'width.txt').read_text() == '3'\n" + MODEL
    )
    (runs / "train.py").write_text(render(plan_for(), runs / "train.py", nets / "model.py"))
    monkeypatch.chdir("/")
    assert import_file(runs / "train.py").model_py.Config().width == 3


def test_a_symbolic_link_on_the_way_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "far" / "away"
    real.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    (real / "script.py").touch()
    (tmp_path / "train.py").symlink_to(real / "script.py")
    (tmp_path / "model.py").write_text(MODEL)
    for script in (tmp_path / "link" / "train.py", tmp_path / "train.py"):
        script.write_text(render(plan_for(), script, tmp_path / "model.py"))
        assert import_file(script).MODEL_FILE.samefile(tmp_path / "model.py")


def test_the_model_keeps_its_name_unless_another_module_has_it(tmp_path: Path) -> None:
    (tmp_path / "my-model.py").write_text(MODEL)
    assert load(tmp_path, plan_for(), "my-model.py").model_py is sys.modules["my-model"]
    import json

    (tmp_path / "json.py").write_text(MODEL)
    assert load(tmp_path, plan_for(), "json.py").model_py is sys.modules["json_"]
    assert sys.modules["json"] is json


def test_a_missing_model_file_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"model\.py is no Python file: MODEL_FILE in train\.py"):
        load(tmp_path, plan_for())


# Running it


def run(folder: Path, plan: Plan, *options: str) -> subprocess.CompletedProcess[str]:
    """The script, started by path from another folder."""
    script = folder / "train.py"
    script.write_text(render(plan, script, folder / "model.py"))
    environment = {**os.environ, "WORLD_SIZE": "1"}
    command = [sys.executable, str(script), "--device", "cpu", "--out", str(folder / "out"), *options]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


def test_one_line_of_progress_per_optimizer_step_then_the_weights(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    small = {"effective_batch_size": 4, "max_micro_batch_size": 4, "micro_batch_size": 4}
    result = run(tmp_path, plan_for(**small, micro_batch_sizes=(4,), accumulation_steps=1), "--epochs", "2")
    assert result.returncode == 0, result.stderr
    steps = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    progress = r"step \d/6  loss \d+\.\d{4}  lr [\d.e-]+  [\d,.]+ samples/s(  peak \d+\.\d\d GiB)?"
    assert len(steps) == 6
    assert all(re.fullmatch(progress, line) for line in steps)
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint.pt", "model.pt"]


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, plan: Plan, *options: str) -> ModuleType:
    """The script, run in this process."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", "--out", str(folder / "out"), *options])
    module = load(folder, plan)
    module.main()
    return module


@pytest.mark.parametrize(
    ("source", "builder", "typed"),
    [
        ("", "build_model", "model.py"),
        ("def tiny(): return build_model()", "tiny", "model.py:tiny"),
        ("tiny = build_model()", "tiny", "C:/there/model.py:tiny"),
        ("model = build_model()", "model", "model.py"),
        ("class Tiny(torch.nn.Linear):\n    def __init__(self): super().__init__(3, 1)", "Tiny", "model.py"),
    ],
    ids=["build_model", "typed function", "typed module", "model", "class"],
)
def test_every_way_to_give_a_model_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, builder: str, typed: str
) -> None:
    (tmp_path / "model.py").write_text(f"{MODEL}\n{source}\n")
    start(monkeypatch, tmp_path, plan_for(model=typed, builder=builder))
    assert (tmp_path / "out" / "model.pt").exists()


def test_without_a_dataset_it_draws_batches_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    names = ("build_model", "build_batch", "compute_loss", "count_items")
    (tmp_path / "model.py").write_text(MODEL + "\ndef count_items(batch): return len(batch[0])\n")
    for with_count in (names, names[:-1]):
        start(monkeypatch, tmp_path, plan_for(with_count, dataset_length=None), "--max-steps", "3")
        output = capsys.readouterr().out
        assert "there is no dataset: every micro-batch is drawn from build_batch" in output
        assert "step 3/3" in output


def test_weights_are_loaded_before_the_optimizer_sees_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = (
        "\ncalls = []\ndef load_weights(model): calls.append('weights')\n"
        "def build_optimizer(model, lr):\n"
        "    calls.append('optimizer')\n    return torch.optim.SGD(model.parameters(), lr=lr)\n"
    )
    (tmp_path / "model.py").write_text(MODEL + more)
    train = start(monkeypatch, tmp_path, plan_for((*NAMES, "load_weights", "build_optimizer")))
    assert train.model_py.calls == ["weights", "optimizer"]


def test_a_model_that_was_built_for_evaluation_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = (
        "\nmodes = []\ndef build_model(): return torch.nn.Linear(3, 1).eval()\n"
        "def compute_loss(model, batch):\n    modes.append(model.training)\n    return model(batch[0]).mean()\n"
    )
    (tmp_path / "model.py").write_text(MODEL + more)
    assert start(monkeypatch, tmp_path, plan_for()).model_py.modes == [True]


def test_groups_keep_their_ratios_when_the_rate_is_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = (
        "\nrates = []\n"
        "def build_optimizer(model, lr):\n"
        "    groups = [{'params': [model.weight], 'lr': lr}, {'params': [model.bias], 'lr': lr / 10}]\n"
        "    return torch.optim.SGD(groups)\n"
        "def build_scheduler(optimizer, num_steps):\n"
        "    rates.extend(group['lr'] for group in optimizer.param_groups)\n"
        "    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)\n"
    )
    (tmp_path / "model.py").write_text(MODEL + more)
    names = (*NAMES, "build_optimizer", "build_scheduler")
    rate = 6e-4 * 2**0.5 * 1.5
    tuned = plan_for(names, learning_rate_multiplier=1.5, learning_rate=rate)
    assert start(monkeypatch, tmp_path, tuned).model_py.rates == pytest.approx([rate, rate / 10])
    as_given = start(monkeypatch, tmp_path, tuned, "--learning-rate", "0.5")
    assert as_given.model_py.rates == pytest.approx([0.5, 0.05])


def test_an_unknown_learning_rate_must_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    unknown = plan_for(base_learning_rate=None, learning_rate=None)
    with pytest.raises(SystemExit, match="learning rate is unknown: give --learning-rate"):
        start(monkeypatch, tmp_path, unknown)
    assert not (tmp_path / "out").exists()
    start(monkeypatch, tmp_path, unknown, "--learning-rate", "0.1")
    assert (tmp_path / "out" / "model.pt").exists()


@pytest.mark.parametrize(
    "option", [("--epochs", "0"), ("--max-steps", "0"), ("--max-steps", "-2"), ("--save-every", "0")]
)
def test_no_steps_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with pytest.raises(SystemExit, match="nothing to do"):
        start(monkeypatch, tmp_path, plan_for(), *option)


def test_the_seed_decides_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL + "\nmodel = build_model()\n")
    results = []
    for builder in ("build_model", "model"):
        for seed in ("1", "1", "2"):
            start(monkeypatch, tmp_path, plan_for(builder=builder), "--seed", seed)
            results.append((tmp_path / "out" / "model.pt").read_bytes())
    first, again, other, *at_import = results
    assert first == again != other
    assert len(set(at_import)) == 1
