"""Plan -> the text of train.py: a frame, and the functions of the training step copied word for word.

train.py never imports gradplan, yet it must run the very step that was probed. So ``probes/step.py`` and
``planner/window.py`` are read as text, and whatever the frame calls of them is pasted. Without torch; nothing
is written.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import textwrap
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from gradplan.paste import definitions, needed_definitions, with_needed_imports
from gradplan.plan import Plan
from gradplan.probes.evidence import Recipe
from gradplan.units import format_bytes

_SOURCES = (  # the title of the section in train.py, and where it comes from
    ("How a step is split", "gradplan", "window.py"),
    ("The training step", "gradplan.probes", "step.py"),
    ("Lightning's methods without its Trainer", "gradplan.probes", "lightning.py"),
    ("The same samples and random numbers after --resume", "gradplan.probes", "drawing.py"),
    ("What the ranks tell each other", "gradplan.probes", "ranks.py"),
    ("Checkpoints", "gradplan.probes", "checkpoints.py"),
)
_OURS = {
    "compute_loss": "model_loss",
    "build_optimizer": "build_adamw",
    "build_scheduler": "warm_up_then_cosine",
}
_HEADER = re.compile(r"# gradplan wrote what follows; its sha256 was ([0-9a-f]{64})\n")
_WIDTH = 100


def render(plan: Plan, script_path: Path, model_path: Path) -> str:
    """The text of train.py, sealed: the same plan and paths always give the same text.

    ``script_path`` is where it will be written; the script finds ``model_path`` from its own folder.
    """
    template = _frame()
    context = _context(plan, script_path, model_path)
    sources = {title: _read(package, name) for title, package, name in _SOURCES}
    frame = template.render(context, functions="")
    needed = set(needed_definitions(frame, sources.values()))
    sections = [
        "\n\n\n".join([f"# {title}", *found])
        for title, source in sources.items()
        if (found := [text for text in definitions(source).values() if text in needed])
    ]
    text = template.render(context, functions="\n\n\n".join(sections))
    return seal(with_needed_imports(text, sources.values()))


def seal(text: str) -> str:
    """The text under a first line that holds its hash."""
    return f"# gradplan wrote what follows; its sha256 was {_sha256(text)}\n{text}"


def is_untouched(text: str) -> bool:
    """Whether ``seal`` made this text and nobody changed it since."""
    header = _HEADER.match(text)
    return header is not None and header[1] == _sha256(text[header.end() :])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _read(package: str, name: str) -> str:
    return (resources.files(package) / name).read_text(encoding="utf-8")


# What the frame is told


def _context(plan: Plan, script_path: Path, model_path: Path) -> dict[str, Any]:
    recipe = plan.recipe
    names = frozenset(recipe.names)
    # A plan of ones was tried with one sample: then this model's BatchNorm averages over more than samples.
    drops_lone_samples = recipe.has_batch_norm and recipe.batch_multiple == 1 and plan.max_micro_batch_size > 1
    has_dataset = "build_dataset" in names and not recipe.is_stream
    return {
        "plan": plan,
        "names": names,
        "multiple": recipe.batch_multiple,
        "num_counts": recipe.num_counts or int("count_items" in names),
        "has_dataset": has_dataset,
        "is_stream": recipe.is_stream,
        "is_scaled": plan.precision == "16-mixed",
        "is_configured": "configure_optimizers" in recipe.lightning,
        "is_scheduled": "schedule" in recipe.lightning,
        "drops_lone_samples": drops_lone_samples,
        "headline": _headline(plan, model_path.name),
        "script_name": script_path.name,
        "model_name": model_path.name,
        "model_file": _path_from(script_path, model_path),
        "decisions": _decisions(plan),
        "limit_reason": _LIMIT_REASONS[plan.limited_by],
        "base_batch_note": "" if plan.base_batch_size is None else f", for a batch of {plan.base_batch_size}",
        "factor_reason": _factor_reason(plan),
        "rate_factors": _rate_factors(plan),
        "run": ", run_loss_by_loss" if plan.backward == "sequential" else "",
        "collate": _collate(names),
        "validation_collate": _collate(names, "collate_fn_validation"),
        "build_model": _build_model(recipe),
        "may_be_built_on_import": _build_model(recipe) != f"model_py.{recipe.builder}()",
        **_builders(recipe, names),
    }


def _builders(recipe: Recipe, names: frozenset[str]) -> dict[str, str]:
    found = {name: f"model_py.{name}" if name in names else ours for name, ours in _OURS.items()}
    if "training_step" in recipe.lightning:
        found["compute_loss"] = "training_step_loss"
    return found


def _collate(names: frozenset[str], *others: str) -> str:
    name = next((name for name in (*others, "collate_fn") if name in names), None)
    return "default_collate" if name is None else f"model_py.{name}"


_LIMIT_REASONS = {
    "memory": "the most that fits",
    "target": "one optimizer step needs no more",
    "dataset": "the dataset has no more",
    "option": "no more was asked for",
}


def _headline(plan: Plan, model_name: str) -> str:
    batch = f"{plan.effective_batch_size} samples per optimizer step"
    if plan.accumulation_steps > 1:
        batch += f", in micro-batches of at most {plan.max_micro_batch_size}"
    return f"Train {model_name}: {batch}."


def _decisions(plan: Plan) -> list[tuple[str, str]]:
    """(what, why) for the docstring."""
    return [
        ("device", _device(plan)),
        ("memory", _memory(plan)),
        ("window", _window(plan)),
        ("learning rate", _learning_rate(plan)),
        ("precision", plan.precision),
    ]


def _device(plan: Plan) -> str:
    evidence = plan.evidence
    limit, total = format_bytes(evidence.limit_bytes), format_bytes(evidence.device.total_bytes)
    return f"{evidence.device.name}, {evidence.kind}: {limit} of its {total} for tensors"


def _memory(plan: Plan) -> str:
    size = plan.max_micro_batch_size
    peak: int | None = None
    for trial in plan.evidence.trials:
        if trial.fits and trial.micro_batch_size == size:
            peak = trial.required_bytes or trial.peak_reserved_bytes or trial.peak_allocated_bytes
    needs = "" if peak is None else f" needs {format_bytes(peak)}"
    return f"a micro-batch of {size}{needs}: {_LIMIT_REASONS[plan.limited_by]}"


def _window(plan: Plan) -> str:
    runs = [(size, len(list(group))) for size, group in itertools.groupby(plan.micro_batch_sizes)]
    sizes = " + ".join(str(size) if count == 1 else f"{count} x {size}" for size, count in runs)
    batch = plan.effective_batch_size
    if plan.world_size > 1:
        return f"{sizes} samples on each of {plan.world_size} ranks, {batch} in all; other numbers of ranks work too"
    if plan.accumulation_steps == 1:
        return f"{sizes} samples at once"
    return f"{sizes} samples, weighted so that their gradients add up to that of the mean over all {batch}"


def _learning_rate(plan: Plan) -> str:
    if plan.base_learning_rate is None or plan.learning_rate is None:
        return "unknown: give --learning-rate, or set LEARNING_RATE in the model's file and probe again"
    if not _rate_factors(plan):
        return f"{plan.base_learning_rate:.3g}, as in the recipe"
    reasons = [f"{plan.learning_rate_rule} rule for {plan.optimizer}", f"confidence: {plan.confidence}"]
    if plan.learning_rate_multiplier != 1:
        reasons.insert(1, f"x {plan.learning_rate_multiplier:.3g} found by tuning")
    base = f"{plan.base_learning_rate:.3g}"
    if plan.base_batch_size is not None:
        base += f" for a batch of {plan.base_batch_size}"
    return f"{base} becomes {plan.learning_rate:.3g} for {plan.effective_batch_size} ({'; '.join(reasons)})"


def _factor_reason(plan: Plan) -> str:
    ratio = f"{plan.effective_batch_size} / {plan.base_batch_size}"
    return f"sqrt({ratio})" if plan.learning_rate_rule == "sqrt" else ratio


def _rate_factors(plan: Plan) -> list[str]:
    factors = {
        "LEARNING_RATE_FACTOR": plan.learning_rate_factor,
        "LEARNING_RATE_MULTIPLIER": plan.learning_rate_multiplier,
    }
    return [name for name, factor in factors.items() if factor != 1]


def _path_from(script_path: Path, model_path: Path) -> str:
    """An expression for the model's file that starts at the script's folder."""
    script, file = os.path.realpath(script_path), os.path.realpath(model_path)
    try:
        parts = PurePosixPath(Path(os.path.relpath(file, os.path.dirname(script))).as_posix()).parts
    except ValueError:  # another drive
        return f"Path({_quoted(file)})"
    num_up = parts.count("..")
    base = f"parents[{num_up}]" if num_up else "parent"
    return f"Path(__file__).resolve().{base} / {_quoted('/'.join(parts[num_up:]))}"


def _build_model(recipe: Recipe) -> str:
    """An expression for the model. What was named after the colon may be a module; so is ``model``."""
    builder = f"model_py.{recipe.builder}"
    if recipe.model.endswith(f".py:{recipe.builder}"):
        return f"{builder} if isinstance({builder}, nn.Module) else {builder}()"
    return builder if recipe.builder == "model" else f"{builder}()"


# How text becomes part of a Python file


@functools.cache
def _frame() -> Template:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(docstring=_docstring, item=_item)
    return environment.from_string(_read("gradplan", "train.py.jinja"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _docstring(text: str) -> str:
    """As a docstring, whatever a device's name or a message holds."""
    text = "".join(char if char.isprintable() or char == "\n" else " " for char in text.strip())
    return '"""' + text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '\n"""\n'


def _item(text: str, label: str) -> str:
    """``  label  text``, wrapped under itself."""
    indent = "  - " if label == "-" else f"  {label:<15}"
    lines = textwrap.wrap(" ".join(text.split()), _WIDTH - len(indent), break_on_hyphens=False)
    return indent + ("\n" + " " * len(indent)).join(lines)
