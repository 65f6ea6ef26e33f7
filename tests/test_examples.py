"""The examples can be probed and trained as their first lines say, and do what their comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import gradplan
from gradplan.probes import step
from gradplan.probes.batches import settings_kept
from gradplan.probes.loading import load_module
from gradplan.probes.workload import Workload, load_workload

EXAMPLES = Path(__file__).parents[1] / "examples"
WITH_DATA = ("digits", "gpt", "highlight", "two-task")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Workload]:
    """``example(name)``: its model.py, loaded."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return lambda name: load_workload(str(EXAMPLES / name / "model.py"))


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# All of them


def test_these_are_all_examples_that_train() -> None:
    assert {file.parent.name for file in EXAMPLES.glob("*/model.py")} == {*WITH_DATA, "gpt2-124m"}


@pytest.mark.parametrize("name", WITH_DATA)
def test_an_example_trains_with_a_loss_that_falls(name: str, tmp_path: Path) -> None:
    model = EXAMPLES / name / "model.py"
    assert "gradplan" not in re.sub(r'""".*?"""', "", model.read_text(encoding="utf-8"), flags=re.DOTALL)
    with settings_kept():
        plan = gradplan.probe(str(model), device="rtx-4090")
    assert plan.effective_batch_size == 64
    assert not plan.warnings
    gradplan.write_script(plan, str(tmp_path / "train.py"))
    command = [sys.executable, "train.py", "--max-steps", "16", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+/16  loss ([0-9.]+)  lr ", done.stdout, re.MULTILINE)]
    assert len(losses) == 16
    assert sum(losses[-3:]) / 3 < 0.8 * losses[0]
    assert ("validation loss" in done.stdout) == ("build_validation_dataset" in plan.recipe.names)


# Two tasks


def test_the_cut_gives_the_gradients_of_the_sum(example: Callable[[str], Workload]) -> None:
    job = example("two-task")
    upper, lower, labels = batch = job.make_batch(16)
    model: Any = job.build_model()
    step.run_loss_by_loss(model, batch, job.compute_loss, 1.0, nullcontext())
    found = gradients(model)
    model.zero_grad()
    features = model.trunk(upper)
    (cross_entropy(model.classify(features), labels) + mse_loss(model.draw(features), lower)).backward()
    assert len(found) == sum(parameter.numel() for parameter in model.parameters())
    assert relative_difference(found, gradients(model)) < 1e-6


def test_no_image_is_for_training_and_for_validation(example: Callable[[str], Workload]) -> None:
    job = example("two-task")
    trained, validation = (
        {tensors[0].numpy().tobytes() + tensors[1].numpy().tobytes() for tensors in data}
        for data in (job.dataset, job.validation_dataset)
    )
    assert len(job.dataset) + len(job.validation_dataset) == 1797
    assert not trained & validation


# The highlighter


@pytest.fixture
def highlight() -> ModuleType:
    """Its module, with few statements."""
    module = load_module(EXAMPLES / "highlight" / "model.py")
    module.NUM_STATEMENTS = 1000
    return module


def test_kinds_of_characters_are_those_of_pythons_tokenizer(highlight: ModuleType) -> None:
    source = "# Why\nif é > 1.5:\n    x = 'a\\n'\n"
    (first, first_kinds), (second, second_kinds) = highlight.statements_of(source)
    letters = 'skn1"#o'  # of KINDS, in order
    assert "".join(map(chr, first.tolist())) == "# Why\nif \x7f > 1.5:\n"
    assert "".join(letters[kind] for kind in first_kinds.tolist()) == "#####skksnsos111os"
    assert "".join(map(chr, second.tolist())) == "    x = 'a\\n'\n"
    assert "".join(letters[kind] for kind in second_kinds.tolist()) == 'ssssnsos"""""s'


def test_few_statements_are_for_training_and_for_validation(highlight: ModuleType) -> None:
    trained, validation = highlight.build_dataset(), highlight.build_validation_dataset()
    assert (len(trained), len(validation)) == (1000, 100)
    texts = {tuple(text.tolist()) for text, _ in trained}
    assert sum(tuple(text.tolist()) in texts for text, _ in validation) < 10  # such as "else:"


def test_padding_changes_no_logits(highlight: ModuleType) -> None:
    short, long = sorted(highlight.build_dataset()[:20], key=lambda sample: len(sample[0]))[::19]
    assert len(short[0]) < len(long[0])
    model = highlight.build_model()
    alone, padded = model(short[0][None]), model(highlight.collate_fn([short, long])[0])
    assert torch.allclose(alone[0], padded[0, : len(short[0])], atol=1e-5)


def test_the_mean_of_micro_batch_means_is_far_from_the_mean_over_characters(highlight: ModuleType) -> None:
    torch.manual_seed(0)
    model, samples = highlight.build_model(), highlight.build_dataset()
    samples = [samples[i] for i in torch.randperm(len(samples))[:16].tolist()]
    samples.sort(key=lambda sample: len(sample[0]))  # as uneven as a window can be
    parts = [highlight.collate_fn(samples[i : i + 2]) for i in range(0, 16, 2)]
    whole = highlight.collate_fn(samples)
    counts = [float(highlight.count_items(part)) for part in parts]

    def gradient(window: list[tuple[Any, float]]) -> Tensor:
        model.zero_grad()
        step.accumulate(model, window, highlight.compute_loss, torch.device("cpu"))
        return gradients(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(20):  # at first all gradients agree on how frequent each kind is
        gradient([(whole, 1.0)])
        optimizer.step()
    expected = gradient([(whole, 1.0)])
    weighted = gradient([(part, count / sum(counts)) for part, count in zip(parts, counts, strict=True)])
    unweighted = gradient([(part, 1 / len(parts)) for part in parts])
    assert sum(counts) == float(highlight.count_items(whole))
    assert relative_difference(weighted, expected) < 1e-5
    assert relative_difference(unweighted, expected) > 0.2
