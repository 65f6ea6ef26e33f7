"""What ``gradplan script --with`` adds to train.py: each part runs, alone and with the others, and is exact."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from train_scripts import NAMES, SENTENCES, plan_for

import gradplan
from gradplan.cli import main
from gradplan.parts import PARTS
from gradplan.plan import Plan
from gradplan.probes import averaging, noise, wrappers
from gradplan.probes.errors import UsageError
from gradplan.probes.noise import NoiseScale, gradient_norm, see_gradients
from gradplan.probes.step import accumulate
from gradplan.script import render

PAIRS = [pair for pair in itertools.combinations(PARTS, 2) if set(pair) != {"ddp", "fsdp"}]
TOGETHER = [(part,) for part in PARTS] + PAIRS + [tuple(p for p in PARTS if p != other) for other in ("ddp", "fsdp")]

# Sentences of 1 or 12 tokens, layers in a list, one that only some samples use, a loss that uses the attributes.
MODEL = (
    SENTENCES
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rare, self.head = nn.Linear(1, 6), nn.Linear(1, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    def forward(self, tokens):
        inputs = (tokens.clamp(min=0).unsqueeze(-1) / 4).to(self.first.weight.dtype)
        hidden = self.first(inputs)
        uses_rare = (tokens == 3).any(1)
        if uses_rare.any():
            hidden = hidden + uses_rare[:, None, None] * self.rare(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return hidden

def build_model():
    torch.manual_seed(1)
    return Net().to(torch.float64)

def build_dataset():
    return Sentences(21)

def build_validation_dataset():
    return Sentences(9)

def compute_loss(model, tokens):
    scores = model.head(model(tokens))
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten(), ignore_index=-100)

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

def build_scheduler(optimizer, num_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
"""
)
COUNTED = (*NAMES, "collate_fn", "count_items", "build_validation_dataset")
FEW_LEFT = """
def build_dataset(): return Sentences(17)  # the last step has one sample: the second rank has none
"""
THREE_LEFT = """
def build_optimizer(model, lr): return torch.optim.SGD(model.parameters(), lr=lr)
def build_dataset(): return Sentences(19)  # of three samples in micro-batches of one, the second rank has one
"""
EARLY = """
FIRST = torch.randperm(4, generator=torch.Generator().manual_seed(0))[::2].tolist()  # of each rank, by the seed

class Early(Sentences):  # a layer that only micro-batches before the last one use
    def __getitem__(self, index):
        return torch.full((2,), 3 if index in FIRST else 1)

def build_dataset(): return Early(4)
"""
YIELDED = """
def count_items(tokens):
    return (tokens != -100).sum(), len(tokens)

def compute_loss(model, tokens):
    scores = model.head(model(tokens))
    yield nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten(), ignore_index=-100)
    yield model.first.weight.square().mean() + model(tokens)[:, 0].square().mean()
"""
ADAM = """
def build_optimizer(model, lr): return torch.optim.AdamW(model.parameters(), lr=lr)
"""
PLAIN = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

def build_dataset():
    inputs = torch.arange(150.0).reshape(30, 5).sin()
    return torch.utils.data.TensorDataset(inputs, torch.arange(30) % 3)

def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)
"""
PLAIN_NAMES = tuple(name for name in NAMES if name != "build_scheduler")
Weights = dict[str, Tensor]


def write(folder: Path, model: str, plan: Plan, parts: tuple[str, ...]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(model)
    script = folder / "train.py"
    script.write_text(render(plan, script, folder / "model.py", parts))
    return script


def with_base(plan: Plan, base_batch_size: int | None) -> Plan:
    return plan.model_copy(update={"base_batch_size": base_batch_size})


class FakeWriter:
    """Where torch.utils.tensorboard is not installed: what was written, and how the writer was made."""

    made: list[FakeWriter]

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self.purge_step, self.scalars = purge_step, list[tuple[str, float, int]]()
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, float(value), step))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No TensorBoard, and nothing that takes a compiler: the graphs are traced, then run as they are."""
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    FakeWriter.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_module(module, backend="aot_eager"))
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.rstrip("_") == "model":
            del sys.modules[name]


def train(script: Path, *options: str, out: str = "out") -> Weights:
    """The script run in this process: the weights."""
    module = ModuleType("train_under_test")
    module.__file__ = str(script)
    before = sys.argv
    sys.argv = ["train.py", "--device", "cpu", "--out", str(script.parent / out), *options]
    try:
        exec(compile(script.read_text(), str(script), "exec"), module.__dict__)
        module.main()
    finally:
        sys.argv = before
    return load(script.parent / out / "model.pt")


def load(path: Path) -> Weights:
    weights: Weights = torch.load(path, weights_only=True)
    return weights


def difference(ours: Weights, reference: Weights) -> float:
    assert ours.keys() == reference.keys()
    flat = [torch.cat([weights[name].double().flatten() for name in reference]) for weights in (ours, reference)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


# The text


def all_texts() -> list[str]:
    names = ("build_model", "build_dataset", "compute_loss")
    plans = [
        plan_for(names, 64, 27),
        plan_for((*names, "count_items"), 64, 27, num_counts=1, has_batch_norm=True, precision="16-mixed"),
        with_base(plan_for((*names, "build_validation_dataset"), 64, 27, precision="bf16-true"), 32),
        with_base(plan_for(("build_model", "build_batch"), 8, 4), None),
        plan_for(names, 8, 4, is_stream=True, dataset_length=None),
    ]
    paths = Path("train.py"), Path("model.py")
    first = [render(plans[0], *paths, parts) for parts in TOGETHER]
    return first + [render(plan, *paths, parts) for plan in plans[1:] for parts in TOGETHER if len(parts) != 2]


def test_it_is_clean_and_pasted_word_for_word(tmp_path: Path) -> None:
    sources = {
        name: inspect.getsource(thing)
        for module in (wrappers, noise, averaging)
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__
    }
    seen = set()
    for number, text in enumerate(all_texts()):
        (tmp_path / f"train_{number}.py").write_text(text)
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in sources:
                assert "".join(lines[node.lineno - 1 : node.end_lineno]) == sources[node.name]
                seen.add(node.name)
    assert seen == sources.keys()
    rules = ["--isolated", "--select=E,F,I,B,UP,SIM,RUF,C4,PIE,N", "--line-length=120", "--target-version=py310"]
    command = [sys.executable, "-m", "ruff", "check", *rules, str(tmp_path)]
    ruff = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ruff.returncode == 0, ruff.stdout + ruff.stderr


def test_a_part_brings_what_it_needs_and_nothing_else() -> None:
    marks = {
        "ddp": "in_ddp",
        "fsdp": "fully_shard",
        "noise": "NoiseScale",
        "tensorboard": "SummaryWriter",
        "compile": ".compile()",
        "ema": "AveragedModel",
    }
    plan, paths = plan_for(NAMES, 64, 27), (Path("train.py"), Path("model.py"))
    assert render(plan, *paths) == render(plan, *paths, ())
    for parts in [(), *TOGETHER[: len(PARTS)], *TOGETHER[-2:]]:
        text = render(plan, *paths, parts)
        assert {part for part, mark in marks.items() if mark in text} == set(parts)


def test_what_a_part_costs_is_said() -> None:
    plan = plan_for(NAMES, 64, 64).model_copy(update={"num_parameters": 2**28})
    words = " ".join(render(plan, Path("train.py"), Path("model.py"), ("ddp", "noise", "ema")).split())
    assert "a second copy of the gradients, 1.0 GiB more than was probed" in words
    assert "a copy of the model on the device, 1.0 GiB more than was probed" in words
    assert "this plan has one, so it stays unknown unless more ranks are started" in words


@pytest.mark.parametrize(
    ("parts", "changes", "reason"),
    [
        (("dpp",), {}, r"no part 'dpp' \(did you mean ddp\?\); there are ddp, fsdp, noise, tensorboard, compile, ema"),
        (("fsdp", "ddp"), {}, "ddp and fsdp exclude each other"),
        (("ddp",), {"backward": "sequential"}, "ddp does not work with a backward after each loss"),
        (("fsdp",), {"backward": "sequential"}, "fsdp does not work with a backward after each loss"),
        (("noise",), {"backward": "sequential"}, "noise does not work with a backward after each loss"),
        (("noise",), {"num_counts": 2}, "noise does not work where count_items gives several numbers"),
    ],
)
def test_what_does_not_go_together_is_refused(parts: tuple[str, ...], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        render(plan_for(COUNTED, 8, 3, **changes), Path("train.py"), Path("model.py"), parts)


def test_the_command_line_takes_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(PLAIN)
    gradplan.write_plan(plan_for(PLAIN_NAMES, 8, 3), "gradplan.json")
    for parts, code in {"ema, compile": 0, "emma": 2, "ddp,fsdp": 2, "": 2}.items():
        assert CliRunner().invoke(main, ["script", "gradplan.json", "--with", parts]).exit_code == code
        assert (tmp_path / "train.py").exists()  # by the first
    text = (tmp_path / "train.py").read_text()
    gradplan.write_script(plan_for(PLAIN_NAMES, 8, 3), "train.py", parts=("ema", "compile"))
    assert (tmp_path / "train.py").read_text() == text
    assert "AveragedModel" in text


# One process


def test_every_part_and_every_pair_trains_the_same_weights(tmp_path: Path) -> None:
    """A part may watch, send or average; what one process trains stays the same, up to what compiling rounds."""
    plan = with_base(plan_for(PLAIN_NAMES, 8, 4, has_batch_norm=True), 4)
    options = ("--max-grad-norm", "0.5", "--validation-share", "0.2", "--max-steps", "2")
    reference = train(write(tmp_path / "plain", PLAIN, plan, ()), *options)
    for parts in TOGETHER:
        weights = train(write(tmp_path / "-".join(parts), PLAIN, plan, parts), *options)
        assert difference(weights, reference) <= (1e-6 if "compile" in parts else 0), parts
        torch._dynamo.reset()


@pytest.mark.parametrize("parts", [tuple(p for p in PARTS if p != "fsdp"), tuple(p for p in PARTS if p != "ddp")])
@pytest.mark.parametrize("changes", [{"precision": "16-mixed"}, {"num_counts": 1, "precision": "bf16-mixed"}])
def test_all_parts_run_in_every_precision(tmp_path: Path, parts: tuple[str, ...], changes: dict[str, Any]) -> None:
    names = PLAIN_NAMES + (("count_items",) if "num_counts" in changes else ())
    model = PLAIN + "\ndef count_items(batch): return len(batch[1])\n"
    plan = plan_for(names, 8, 3, has_batch_norm=True, **changes)
    reference = train(write(tmp_path / "plain", model, plan, ()))
    assert difference(train(write(tmp_path / "all", model, plan, parts)), reference) < 2e-2
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
def test_a_compiled_model_keeps_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    plan = plan_for(PLAIN_NAMES, 8, 4)
    options = ("--max-steps", "2")
    reference = train(write(tmp_path / "plain", PLAIN.replace("nn.Dropout(0.3), ", ""), plan, ()), *options)
    compiled = train(write(tmp_path / "part", PLAIN.replace("nn.Dropout(0.3), ", ""), plan, ("compile",)), *options)
    assert difference(compiled, reference) < 1e-6


def test_the_average_follows_its_formula_once_per_step(tmp_path: Path) -> None:
    """Four steps of two or three micro-batches; the decay of the recipe's batch of 4 is squared for 8."""
    plan = with_base(plan_for(PLAIN_NAMES, 8, 3, has_batch_norm=True), 4)
    script = write(tmp_path / "ema", PLAIN, plan, ("ema",))
    kept: list[Weights] = []
    train_each(script, kept, "--ema-decay", "0.8")
    expected = kept[0]
    for weights in kept[1:]:
        expected = {name: 0.64 * expected[name] + 0.36 * weights[name] for name in expected}
    average = load(tmp_path / "ema" / "out" / "model_ema.pt")
    assert len(kept) == 4
    assert average["1.num_batches_tracked"] == kept[-1]["1.num_batches_tracked"] == 3 * 3 + 2
    for name in expected.keys() - {"1.num_batches_tracked"}:
        torch.testing.assert_close(average[name], expected[name])
    assert difference(average, kept[-1]) > 1e-3


def train_each(script: Path, kept: list[Weights], *options: str) -> None:
    """The script with a checkpoint after every step, whose weights are kept."""
    text = script.read_text().replace("def save_whole(", "def save_whole_plainly(")
    spy = """
def save_whole(data: Any, path: Path) -> None:
    if path.name == "checkpoint.pt":
        model_py.kept.append({name: tensor.clone() for name, tensor in data["model"].items()})
    save_whole_plainly(data, path)
"""
    script.write_text(text.replace("\ndef parse_args(", spy + "\n\ndef parse_args("))
    model = script.parent / "model.py"
    model.write_text(model.read_text() + "\nimport sys\nkept = sys.kept\n")
    sys.kept = kept  # type: ignore[attr-defined]
    train(script, "--save-every", "1", *options)


def test_a_step_that_overflowed_is_not_averaged(tmp_path: Path) -> None:
    """The first step of 16-mixed overflows here: the average starts with the second, from its weights."""
    spoiled = PLAIN + (
        "\ncalls = 0\nplainly = compute_loss\n"
        "def compute_loss(model, batch):\n    global calls\n    calls += 1\n"
        "    return plainly(model, batch) * (1e38 if calls == 1 else 1.0)\n"
    )
    plan = plan_for(PLAIN_NAMES, 8, 8, has_batch_norm=True, precision="16-mixed")
    train(write(tmp_path / "ema", spoiled, plan, ("ema",)), "--max-steps", "3")
    checkpoint = torch.load(tmp_path / "ema" / "out" / "checkpoint.pt", weights_only=True)
    assert checkpoint["num_averaged"] == 2


ALL_BUT_DDP = ("fsdp", "noise", "tensorboard", "ema")


@pytest.mark.parametrize("parts", [("ema", "tensorboard"), ALL_BUT_DDP], ids="+".join)
def test_it_goes_on_with_the_average_bit_for_bit(tmp_path: Path, parts: tuple[str, ...]) -> None:
    plan = with_base(plan_for(PLAIN_NAMES, 8, 3, has_batch_norm=True), 4)
    model = PLAIN.replace("lr=lr)", "lr=lr, momentum=0.9)")
    script = write(tmp_path / "run", model, plan, parts)
    whole = train(script, out="whole")
    stops = model + STOPS
    (tmp_path / "run" / "model.py").write_text(stops)
    with pytest.raises(KeyboardInterrupt):
        train(script, "--save-every", "1")
    (tmp_path / "run" / "model.py").write_text(model)
    resumed = train(script, "--resume", str(tmp_path / "run" / "out" / "checkpoint.pt"))
    assert difference(resumed, whole) == 0
    averages = [load(tmp_path / "run" / out / "model_ema.pt") for out in ("out", "whole")]
    assert difference(*averages) == 0
    assert difference(averages[0], whole) > 0
    writer = FakeWriter.made[-1]
    assert writer.purge_step == 3
    assert {step for _, _, step in writer.scalars} == {3, 4}


STOPS = """
calls = 0
plainly = compute_loss
def compute_loss(model, batch):
    global calls
    calls += 1
    if calls == 8:  # in the third step
        raise KeyboardInterrupt
    return plainly(model, batch)
"""


def test_tensorboard_gets_a_row_for_every_optimizer_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_for(PLAIN_NAMES, 8, 3)
    train(write(tmp_path / "run", PLAIN, plan, ("tensorboard",)), "--validation-share", "0.2")
    rows = FakeWriter.made[0].scalars
    steps = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    losses = [(f"{value:.4f}", step) for name, value, step in rows if name == "loss"]
    assert losses == [(words[3], number) for number, words in enumerate(steps, 1)]
    assert sum(name == "validation loss" for name, _, _ in rows) == 1
    assert {"learning rate", "gradient norm", "samples per second"} <= {name for name, _, _ in rows}


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit, match="pip install tensorboard"):
        train(write(tmp_path / "run", PLAIN, plan_for(PLAIN_NAMES, 8, 3), ("tensorboard",)))


def test_tensorboard_writes_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard")
    train(write(tmp_path / "run", PLAIN, plan_for(PLAIN_NAMES, 8, 3), ("tensorboard",)))
    assert next((tmp_path / "run" / "out" / "tensorboard").glob("events.out.tfevents.*")).stat().st_size > 200


# The noise scale


def regression(noise_in_targets: float) -> tuple[nn.Linear, Any, float]:
    """A linear model, what draws samples, and the noise scale: from a million samples' exact gradients."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    truth = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    def samples(count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 4, dtype=torch.float64)
        return inputs, inputs @ truth + noise_in_targets * torch.randn(count, dtype=torch.float64)

    inputs, targets = samples(1_000_000)
    residuals = (model(inputs).squeeze(1) - targets).detach()
    gradients = 2 * residuals[:, None] * inputs
    return model, samples, (gradients.var(0).sum() / gradients.mean(0).square().sum()).item()


@pytest.mark.parametrize(("sizes", "loss_scale"), [([4, 4, 4, 4], 1.0), ([7, 5, 3, 1], 1.0), ([6, 2], 1024.0)])
def test_the_noise_scale_is_found_from_micro_batches_of_any_sizes(sizes: list[int], loss_scale: float) -> None:
    model, samples, truth = regression(2.0)
    scale, device = NoiseScale(torch.device("cpu"), num_windows=4000), torch.device("cpu")
    see_gradients(model, scale.see)

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

    def backward(loss: Tensor) -> None:
        (loss * loss_scale).backward()

    for _ in range(3000):
        model.zero_grad()
        window = ((samples(size), size / sum(sizes)) for size in sizes)
        accumulate(model, scale.watched(window), compute_loss, device, backward=backward)
        scale.end_window(gradient_norm(model), sum(sizes), loss_scale)
    found = scale.estimate()
    assert found is not None
    assert found[0] == pytest.approx(truth, rel=0.1)
    assert found[1] < truth < found[2]


def test_one_micro_batch_tells_nothing_about_the_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(write(tmp_path / "run", PLAIN, plan_for(PLAIN_NAMES, 8, 8), ("noise",)))
    assert "noise scale unknown: it needs two micro-batches a step" in capsys.readouterr().out


def test_the_noise_scale_is_shown_every_few_steps_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(write(tmp_path / "run", PLAIN, plan_for(PLAIN_NAMES, 8, 3), ("noise",)), "--epochs", "3")
    lines = capsys.readouterr().out.splitlines()
    assert ["noise scale" in line for line in lines if line.startswith("step ")] == [False] * 9 + [True] + [False] * 2
    assert any(line.startswith("noise scale") and line.endswith("from the last 12 steps") for line in lines)


# Two ranks

DRIVER = """
import faulthandler, os, runpy, sys, torch
faulthandler.dump_traceback_later(100, exit=True)  # ranks that wait for each other say where
compile_module = torch.nn.Module.compile
torch.nn.Module.compile = lambda module: compile_module(module, backend="aot_eager")
import torch.distributed.nn.functional  # first, as start_ranks does, lest the group outlive the interpreter
torch.distributed.init_process_group("gloo")
torch.distributed.init_process_group = lambda *_: None  # one group serves all scripts
stop, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda: None
for script in sys.argv[2:]:
    sys.argv = ["train.py", "--device", "cpu", "--out", os.path.join(os.path.dirname(script), "ranks")]
    sys.argv += ["--max-grad-norm", "0.5"]
    print("now", script, flush=True)
    runpy.run_path(script, run_name="__main__")
stop()
"""


def on_two_ranks(scripts: list[Path]) -> str:
    """All scripts, one after the other, in the same two processes: what the first rank printed."""
    command = [sys.executable, "-c", DRIVER, "-", *map(str, scripts)]
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    processes = []
    for rank in range(2):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "".join(outputs)
    return outputs[0]


# name: parts, what is added to the model, samples of a step, of a micro-batch, changes to the plan, tolerance
CASES: dict[str, tuple[tuple[str, ...], str, int, int, dict[str, Any], float]] = {
    "ddp": (("ddp",), ADAM, 8, 3, {}, 1e-9),
    "ddp-none-left": (("ddp", "noise"), FEW_LEFT, 4, 1, {}, 1e-9),
    "ddp-early": (("ddp",), EARLY, 4, 1, {}, 1e-9),
    "ddp-yielded": (("ddp",), YIELDED, 8, 3, {"num_counts": 2}, 1e-9),
    "ddp-one": (("ddp",), "", 8, 4, {}, 1e-9),
    "ddp-all": (("ddp", "noise", "compile", "ema"), "", 8, 3, {}, 1e-9),
    "ddp-16": (("ddp", "noise", "ema"), "", 8, 3, {"precision": "16-mixed"}, 1e-3),
    "fsdp": (("fsdp",), "", 8, 3, {}, 1e-9),
    "fsdp-fewer": (("fsdp", "noise"), THREE_LEFT, 4, 1, {}, 1e-9),
    "fsdp-yielded": (("fsdp",), YIELDED, 8, 3, {"num_counts": 2}, 1e-9),
    "fsdp-all": (("fsdp", "noise", "compile", "ema"), "", 8, 3, {}, 1e-9),
    "fsdp-16": (("fsdp", "noise", "ema"), "", 8, 3, {"precision": "16-mixed"}, 1e-3),
}


def test_two_ranks_end_where_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scripts = []
    for name, (parts, more, window, micro, changes, _) in CASES.items():
        plan = plan_for(COUNTED, window, micro, **{"num_counts": 1, **changes})
        scripts.append(write(tmp_path / name, MODEL + more, plan, parts))
    output = on_two_ranks(scripts).split("now ")[1:]
    for script, said, (name, (parts, _, _, micro, _, tolerance)) in zip(scripts, output, CASES.items(), strict=True):
        capsys.readouterr()
        alone = train(script, "--max-grad-norm", "0.5")
        assert difference(load(script.parent / "ranks" / "model.pt"), alone) < tolerance, name
        if "ema" in parts:
            averages = [load(script.parent / out / "model_ema.pt") for out in ("ranks", "out")]
            assert difference(*averages) < tolerance, name
        outputs = said, capsys.readouterr().out
        if "noise" in parts and micro == 1:  # then both have the same micro-batches
            found = [[line for line in text.splitlines() if line.startswith("noise")] for text in outputs]
            assert found[0] == found[1] != [], name
        validation = [text.split("validation loss ")[1].split()[0] for text in outputs]
        assert float(validation[0]) == pytest.approx(float(validation[1]), abs=10 * tolerance + 1e-4), name
        torch._dynamo.reset()
