"""Written train.py scripts for tests: a plan without a probe, and its script beside a model file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradplan.plan import Plan
from gradplan.probes.evidence import Device, Evidence, Recipe
from gradplan.script import render
from gradplan.window import split_window

NAMES = ("build_model", "build_dataset", "compute_loss", "build_optimizer", "build_scheduler")
RATE = 0.1
Names = tuple[str, ...]
# Sentences of 1 or 12 tokens, whose loss is a mean over tokens. Without braces, to be formatted.
SENTENCES = """
import torch
from torch import nn

class Sentences(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        return torch.full((1 if index % 2 else 12,), 1 + index % 3)

def collate_fn(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)

def count_items(tokens):
    return (tokens != -100).sum()
"""


def write_script(folder: Path, model: str, plan: Plan) -> Path:
    (folder / "model.py").write_text(model)
    script = folder / "train.py"
    script.write_text(render(plan, script, folder / "model.py"))
    return script


def plan_for(names: Names, window: int, micro: int, **changes: Any) -> Plan:
    """A plan for ``window`` samples per step, at most ``micro`` at once; other keys go to the recipe or the plan."""
    recipe: dict[str, Any] = {"dataset_length": 1, "batch_multiple": 1}
    keys: dict[str, Any] = {"precision": "32-true"}
    for key, value in changes.items():
        (recipe if key in Recipe.model_fields else keys)[key] = value
    sizes = tuple(split_window(window, micro, recipe["batch_multiple"]))
    same = {"model": "model.py", "optimizer": "SGD", "num_parameters": 1, "base_batch_size": window}
    same["base_learning_rate"] = RATE
    device = Device(name="none", total_bytes=1)
    evidence = Evidence(kind="measured", device=device, limit_bytes=1, trials=())
    return Plan(
        gradplan_version="0",
        torch_version="0",
        micro_batch_size=sizes[0],
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        world_size=1,
        effective_batch_size=window,
        max_micro_batch_size=micro,
        limited_by="memory",
        learning_rate=RATE,
        learning_rate_rule="linear",
        learning_rate_factor=1.0,
        confidence="high",
        evidence=evidence,
        recipe=Recipe(names=names, **recipe, **same),
        **keys,
        **same,
    )
