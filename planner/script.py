"""Plan -> the text of train.py: a frame, and the functions of the training step copied word for word.

train.py never imports gradplan, yet it must run the very step that was probed. So ``probes/step.py`` and
``planner/window.py`` are read as text, and whatever the frame calls of them is pasted. Without torch; nothing
is written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import textwrap
from collections.abc import Collection
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from gradplan import decisions
from gradplan.parts import check_parts, notes
from gradplan.paste import definitions, needed_definitions, with_needed_imports
from gradplan.plan import Plan
from gradplan.probes.evidence import Recipe

_SOURCES = (  # the title of the section in train.py, and where it comes from
    ("How a step is split", "gradplan", "window.py"),
    ("The training step", "gradplan.probes", "step.py"),
    ("Lightning's methods without its Trainer", "gradplan.probes", "lightning.py"),
    ("The same samples and random numbers after --resume", "gradplan.probes", "drawing.py"),
    ("What the ranks tell each other", "gradplan.probes", "ranks.py"),
    ("Checkpoints", "gradplan.probes", "checkpoints.py"),
    ("Gradients of several ranks, in a wrapper", "gradplan.probes", "wrappers.py"),
    ("The gradient noise scale", "gradplan.probes", "noise.py"),
    ("The average of the weights", "gradplan.probes", "averaging.py"),
)
_OURS = {
    "compute_loss": "model_loss",
    "build_optimizer": "build_adamw",
    "build_scheduler": "warm_up_then_cosine",
}
_HEADER = re.compile(r"# gradplan wrote what follows; its sha256 was ([0-9a-f]{64})\n")
_WIDTH = 100


def render(plan: Plan, script_path: Path, model_path: Path, parts: Collection[str] = ()) -> str:
    """The text of train.py, sealed: the same plan, paths and parts always give the same text.

    ``script_path`` is where it will be written; the script finds ``model_path`` from its own folder. ``parts``
    are some of ``gradplan.parts.PARTS``.

    Raises:
        UsageError: the parts do not go together, or not with the plan.
    """
    check_parts(plan, parts)
    template = _frame()
    context = {**_context(plan, script_path, model_path), **_context_of_parts(plan, parts)}
    sources = {title: _read(package, name) for title, package, name in _SOURCES}
    frame = template.render(context, functions="")
    needed = set(needed_definitions(frame, sources.values()))
    sections = [
        "\n\n\n".join([f"# {title}", *found])
        for title, source in sources.items()
        if (found := [text for text in definitions(source).values() if text in needed])
    ]
    text = template.render(context, functions="\n\n\n".join(sections))
    text = re.sub("\n{4,}", "\n\n\n", text)  # where a part of the frame is left out
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
        "headline": decisions.headline(plan, model_path.name),
        "script_name": script_path.name,
        "model_name": model_path.name,
        "model_file": _path_from(script_path, model_path),
        "decisions": decisions.decisions(plan),
        "limit_reason": decisions.LIMIT_REASONS[plan.limited_by],
        "base_batch_note": "" if plan.base_batch_size is None else f", for a batch of {plan.base_batch_size}",
        "factor_reason": decisions.factor_reason(plan),
        "rate_factors": decisions.rate_factors(plan),
        "run": _run(plan),
        "train_window": _train_window(plan, _builders(recipe, names)["compute_loss"]),
        "has_one_loss": not _run(plan),
        "collate": _collate(names),
        "validation_collate": _collate(names, "collate_fn_validation"),
        "build_model": _build_model(recipe),
        **_builders(recipe, names),
    }


def _context_of_parts(plan: Plan, parts: Collection[str]) -> dict[str, Any]:
    has_batch_norm, is_sharded = plan.recipe.has_batch_norm, "fsdp" in parts
    names = frozenset(plan.recipe.names)
    compute_loss = _builders(plan.recipe, names)["compute_loss"]
    base = plan.base_batch_size
    evaluated = "average.module" if "ema" in parts else "model"
    wrapper = "sharded_average" if "ema" in parts else "sharded"
    return {
        "parts": frozenset(parts),
        "cautions": [warning.message for warning in plan.warnings] + notes(plan, parts),
        "is_open": not {"ddp", "fsdp", "noise", "tensorboard"}.isdisjoint(parts),
        "has_batch_norm": has_batch_norm,
        "watched": "noise.watched(window)" if "noise" in parts else "window",
        "num_in_window": "len(window)" if plan.recipe.num_counts or "count_items" in names else "len(parts[rank])",
        "backward": ", backward=backward" if plan.precision == "16-mixed" else "",
        "update_average": "update_average(average, model)" if has_batch_norm else "average.update_parameters(model)",
        "ema_batch_note": "per optimizer step" if base is None else f"per optimizer step of {base} samples",
        "ema_exponent": "" if base in (None, plan.effective_batch_size) else f"{plan.effective_batch_size} / {base}",
        "evaluated": f"{evaluated}, {wrapper}" if is_sharded else evaluated,
        "evaluated_loss": f"evaluated_in(sharded, {compute_loss})" if is_sharded else compute_loss,
    }


def _train_window(plan: Plan, compute_loss: str) -> str:
    """The call of one optimizer step, on one line where it fits."""
    if plan.precision == "16-mixed":
        head, precision = "loss, stepped = train_window_scaled(", "scaler"
    else:
        head, precision = "loss = train_window(", "PRECISION"
    arguments = f"model, optimizer, window, {compute_loss}, device, {precision}, args.max_grad_norm{_run(plan)}"
    is_short = len(head + arguments) < 120 - len("        ")
    return f"{head}{arguments})" if is_short else f"{head}\n            {arguments}\n        )"


def _run(plan: Plan) -> str:
    """How a micro-batch is run, as one more argument; none where there is one loss."""
    if plan.backward == "sequential":
        return ", run_loss_by_loss"
    has_several_losses = plan.evidence.has_several_losses or (plan.recipe.num_counts or 1) > 1
    return ", run_losses_together" if has_several_losses else ""


def _builders(recipe: Recipe, names: frozenset[str]) -> dict[str, str]:
    found = {name: f"model_py.{name}" if name in names else ours for name, ours in _OURS.items()}
    if "training_step" in recipe.lightning:
        found["compute_loss"] = "training_step_loss"
    return found


def _collate(names: frozenset[str], *others: str) -> str:
    name = next((name for name in (*others, "collate_fn") if name in names), None)
    return "default_collate" if name is None else f"model_py.{name}"


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
