"""What the options of the command line may be, and how a wrong one is refused. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import click

from gradplan import trainers
from gradplan.parts import PARTS, as_parts
from gradplan.probes.errors import UsageError
from gradplan.units import parse_size

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")  # as in probes/evidence.py, which is heavy
TRAINERS = tuple(trainers.TRAINERS)

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def checked(check: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """What ``check`` makes of the text; its UsageError becomes click's, which names the option."""

    def convert(_: click.Context, __: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else check(text)
        except UsageError as error:
            raise click.BadParameter(str(error)) from None  # click adds the option

    return convert


def as_count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise UsageError(f"{text!r} is not a count; write a whole number above 0")
    return int(text)


def as_count_or_none(text: str) -> int:
    return 0 if text == "0" else as_count(text)


def as_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{text!r} is not a number")
    return number


def as_percent(text: str) -> float:
    if not 0 <= (percent := as_number(text)) < 100:
        raise UsageError(f"{text!r} is not a headroom; write a percentage, from 0 to below 100")
    return percent


def as_rate(text: str) -> float:
    if (rate := as_number(text)) <= 0:
        raise UsageError(f"{text!r} is not a learning rate; write a number above 0")
    return rate


def _count(name: str, help: str, default: str | None = None) -> Option:
    return click.option(name, metavar="N", callback=checked(as_count), default=default, help=help)


def _flag(*names: str, help: str) -> Option:
    return click.option(*names, is_flag=True, help=help)


def not_with_quiet(ctx: click.Context, _: click.Parameter, verbose: bool) -> bool:
    if verbose and ctx.params.get("quiet"):
        raise click.UsageError("-q and -v exclude each other", ctx)
    return verbose


def together(*options: Option) -> Option:
    """Options that a command takes, as one decorator."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def version(show: Callable[..., None]) -> Option:
    flags: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    return click.option("--version", callback=show, help="say which it is", **flags)


device = click.option(
    "--device",
    metavar="D",
    help="measured: cuda, cuda:1, xpu, mps, cpu; simulated: a name of 'gradplan gpus'; else what is here, "
    "else rtx-4090",
)
memory = click.option(
    *("--memory", "memory_bytes"),
    metavar="SIZE",
    callback=checked(parse_size),
    help="its memory, instead of what it has: 24GiB, 8GB, 512MiB",
)
headroom = click.option(
    *("--headroom", "headroom_percent"),
    metavar="PERCENT",
    callback=checked(as_percent),
    default="5",
    help="memory to leave free",
)
precision = click.option(
    "--precision",
    metavar="P",
    type=click.Choice(PRECISIONS),
    default=PRECISIONS[0],
    help=", ".join(PRECISIONS),
)
effective_batch = _count(
    "--effective-batch", "samples that one optimizer step sees, over all ranks; else BATCH_SIZE of MODEL"
)
base_batch = _count("--base-batch", "batch that the learning rate was tuned for")
base_lr = click.option(
    "--base-lr", metavar="X", callback=checked(as_rate), help="learning rate that was tuned for that batch"
)
world_size = _count("--world-size", "data-parallel ranks", default="1")
max_micro_batch = _count("--max-micro-batch", "look no further than this")
kept_effective_batch = _count("--effective-batch", "samples that one optimizer step sees; else as in PLAN")
kept_world_size = _count("--world-size", "data-parallel ranks; else as in PLAN")
kept_max_micro_batch = _count("--max-micro-batch", "no micro-batch is larger; else as in PLAN")
tune = click.option(
    "--tune",
    metavar="N",
    callback=checked(as_count_or_none),
    default="0",
    help="trials of the learning rate after planning, as 'gradplan tune' does",
)
trials = _count("--trials", "trials in all, over everybody who shares the study", default="10")
horizon = click.option(
    "--horizon",
    metavar="X",
    callback=checked(as_number),
    default="0.25",
    help="length of each run, as a share of the real training's; at least 20 steps",
)
epochs = _count("--epochs", "of the real training; else 1, or 100 steps without a dataset")
max_steps = _count("--max-steps", "optimizer steps of the real training")
run_device = click.option("--device", metavar="D", help="to train on: cuda, cuda:1, xpu, mps, cpu; else what is here")
storage = click.option(
    "--storage", metavar="WHERE", help="of the study: a database's URL, or a journal file; else beside PLAN"
)
study = click.option("--study", metavar="NAME", default="gradplan", help="its name in the storage")
workers = _count("--workers", "runs at a time", default="1")
seeds = _count("--seeds", "pairs of runs that the verdict is from, at least 5", default="5")
seed = click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), metavar="N", default=0, help="of the runs and of the search"
)
page_path = click.option("--page", "page_path", metavar="PATH", help="write an HTML page instead, with Optuna's plots")
plan_path = click.option("--plan", "plan_path", metavar="PATH", default="gradplan.json", help="where to write the plan")
script_path = click.option(
    "--script", "script_path", metavar="PATH", default="train.py", help="where to write the script"
)
new_plan_path = click.option("--plan", "new_plan_path", metavar="PATH", help="where to write; else over PLAN")
parts = click.option(
    *("--with", "parts"),
    metavar="PARTS",
    callback=checked(as_parts),
    help=f"parts to add: {','.join(PARTS)}",
)
trainer = click.option("--for", "trainer", metavar="TRAINER", type=click.Choice(TRAINERS), help=", ".join(TRAINERS))
force = _flag("--force", help="overwrite a file that is not gradplan's, or was edited")
force_at_page = _flag("--force", help="overwrite a page that is not gradplan's, or was edited")
force_at_path = _flag("--force", help="overwrite the file at PATH")
as_json = _flag("--json", "as_json", help="JSON on standard output, and nothing else there")
quiet = click.option("-q", "--quiet", is_flag=True, is_eager=True, help="less on standard error")
verbose = click.option("-v", "--verbose", is_flag=True, callback=not_with_quiet, help="more on standard error")

recipe = together(base_batch, base_lr)
for_probe = together(
    *(device, memory, headroom, precision, effective_batch, recipe, world_size, max_micro_batch, tune),
    *(plan_path, script_path, force, as_json, quiet, verbose),
)
for_plan = together(
    *(kept_effective_batch, recipe, kept_world_size, kept_max_micro_batch),
    *(new_plan_path, force, as_json, quiet),
)
for_tune = together(
    *(trials, horizon, epochs, max_steps, run_device, storage, study, workers, seeds, seed),
    *(new_plan_path, force, as_json, quiet),
)
