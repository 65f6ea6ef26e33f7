"""The command line: the only file that prints or exits."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import click

import gradplan
from gradplan import options, terminal
from gradplan.probes.errors import GradplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gradplan.planfile import Plan


# How a command ends


class Program(terminal.Program):
    def end(self, ending: terminal.Ending) -> NoReturn:
        if ending.details:
            say(ending.details)
        if ending.message:
            write((click.style("error: ", fg="red", bold=True) if ending.is_error else "") + ending.message, err=True)
        if terminal.are_others_running():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.exit_code)
        sys.exit(ending.exit_code)


def leave() -> None:
    """Where Ctrl-C ends the process. What its children started would live on."""
    if (children := sys.modules.get("gradplan.probes.measuring.child")) is not None:
        children.close_all()
    if (tuning := sys.modules.get("gradplan.tuning")) is not None:
        tuning.remove_folders()
    show_cursor = "\x1b[?25h" if terminal.is_terminal(sys.stderr) else ""  # that a changing line hid
    write(show_cursor + terminal.interrupted().message, err=True)


# How a command speaks


def write(text: str | bytes, *, err: bool = False, **style: Any) -> None:
    """A line, at once. A reader who closes the pipe has read enough: the work goes on without one.

    Raises:
        GradplanError: standard output cannot be written to, a full disk for example.
    """
    if style and isinstance(text, str):
        text = click.style(text, **style)
    try:
        click.echo(text, err=err, color=False if os.environ.get("NO_COLOR") else None)
    except OSError as error:
        terminal.close_quietly(sys.stderr if err else sys.stdout)
        if not err and not isinstance(error, BrokenPipeError):
            raise GradplanError(f"cannot write to standard output: {error.strerror}") from None


def say(sentence: str) -> None:
    write(sentence, err=True, dim=True)


def show(content: RenderableType, piped_columns: int = 80) -> None:
    """In colour and as wide as is good to read on a terminal; plain and always the same in a pipe."""
    if terminal.is_terminal(sys.stdout):
        from rich.console import Console

        console = Console(highlight=False)
        console.print(content, width=min(console.width, terminal.MOST_COLUMNS))
    else:
        from gradplan.report import to_text

        write(to_text(content, piped_columns).removesuffix("\n"))


def show_plan(plan: Plan, as_json: bool, verbose: bool = False, with_details: bool = False) -> None:
    from gradplan import planfile, report

    for line in (*report.trial_lines(plan), *report.backward_lines(plan)) if verbose else ():
        say(line)
    if verbose and not with_details and (details := report.to_text(report.details(plan))):
        say(details.removesuffix("\n"))
    if as_json:
        write(planfile.to_json(plan).removesuffix("\n").encode())
    else:
        show(report.summary(plan, with_details))


def say_what_is_next(plan: Plan, wrote: str, command: str, as_json: bool = False, quiet: bool = False) -> None:
    """After the table; beside JSON on standard error, with the warnings that the table would have shown."""
    if as_json and quiet:
        return
    say_notes(warning.message for warning in plan.warnings if as_json)
    write(f"wrote {wrote}; now type\n\n    {click.style(command, bold=True)}\n", err=as_json)


def say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        write(f"note: {note}", err=True)


# The commands


def show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        write(f"gradplan {gradplan.__version__}")
        ctx.exit()


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@options.version(show_version)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Find the largest micro-batch that fits in memory, and the accumulation steps and the learning rate that
    keep the effective batch.

    \b
    gradplan probe model.py
    gradplan probe model.py --device a100-80gb --effective-batch 256
    """
    if ctx.invoked_subcommand is None:
        write(ctx.get_help(), err=True)
        ctx.exit(2)


@main.command("probe")
@click.argument("model")
@options.for_probe
def probe_command(
    model: str,
    plan_path: str,
    script_path: str,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    tune: int,
    **settings: Any,
) -> None:
    """Find what fits, plan, and write gradplan.json and train.py.

    MODEL is a Python file with build_model(), a dataset or build_batch(), and compute_loss(model, batch);
    model.py:name picks another model builder than build_model.
    """
    from gradplan import files, report

    files.check_outputs(files.check_model(model), {"--plan": plan_path, "--script": script_path}, force=force)
    from gradplan.verbs import is_first_rank, is_trained_on, probe

    folder = os.getcwd()
    quiet, verbose = quiet or not is_first_rank(), verbose and is_first_rank()
    with terminal.progress(quiet, verbose, say) as tell, terminal.stdout_aside(), terminal.ctrl_c_at_once(leave):
        plan = probe(model, progress=tell, with_levers=verbose, **settings)
        if tune and is_first_rank():
            from gradplan.tuning import tune as tune_plan

            files.write_plan(plan, plan_path, force=force)  # it is not lost where tuning fails
            device = settings["device"] if is_trained_on(settings["device"]) else None
            plan = tune_plan(plan, plan_path=plan_path, num_trials=tune, device=device, progress=tell)
    os.chdir(folder)  # the model's file may have left it
    if not is_first_rank():
        return
    show_plan(plan, as_json, verbose)
    files.write_plan(plan, plan_path, force=force)
    files.write_script(plan, script_path, force=force)
    say_what_is_next(plan, f"{plan_path} and {script_path}", report.next_step(plan, script_path), as_json, quiet)


@main.command("plan")
@click.argument("plan_path", metavar="PLAN")
@options.for_plan
def plan_command(
    plan_path: str, new_plan_path: str | None, force: bool, as_json: bool, quiet: bool, **settings: Any
) -> None:
    """Plan again from the evidence in PLAN.

    No device and no torch are needed. What is not given stays as PLAN has it. Micro-batches that were not
    tried are not promised.
    """
    from gradplan import advice, files
    from gradplan.replan import plan_again

    before = files.read_plan(plan_path)
    path = new_plan_path or plan_path
    files.check_outputs(files.model_file(before.model), {"--plan": path}, force=force)
    plan = plan_again(before, **settings)
    show_plan(plan, as_json)
    files.write_plan(plan, path, force=force)
    say_what_is_next(plan, path, f"gradplan script {advice.quoted(path)}", as_json, quiet)


@main.command("tune")
@click.argument("plan_path", metavar="PLAN")
@options.for_tune
def tune_command(
    plan_path: str,
    new_plan_path: str | None,
    trials: int,
    workers: int,
    seeds: int,
    force: bool,
    as_json: bool,
    quiet: bool,
    **settings: Any,
) -> None:
    """Search the learning-rate multiplier around the rule's value.

    Each trial is a complete, shorter run of train.py. The best multiplier and 1 are then run again on fresh seeds, and
    the multiplier is taken only if these say that it is better. A study that was stopped goes on; several machines may
    share one through --storage.
    """
    from gradplan import advice, files
    from gradplan.tuning import tune

    before = files.read_plan(plan_path)
    path = new_plan_path or plan_path
    files.check_outputs(files.find_model(before, plan_path), {"--plan": path}, force=force)
    numbers: dict[str, Any] = {"num_trials": trials, "num_workers": workers, "num_seeds": seeds}
    with terminal.progress(quiet, False, say) as tell, terminal.stdout_aside(), terminal.ctrl_c_at_once(leave):
        plan = tune(before, plan_path=plan_path, progress=tell, **numbers, **settings)
    show_plan(plan, as_json)
    files.write_plan(plan, path, force=force)
    say_what_is_next(plan, path, f"gradplan script {advice.quoted(path)}", as_json, quiet)


@main.command("script")
@click.argument("plan_path", metavar="PLAN")
@options.script_path
@options.parts
@options.force
def script_command(plan_path: str, script_path: str, parts: tuple[str, ...] | None, force: bool) -> None:
    """Write train.py again from PLAN.

    The model's file is looked for in this folder, then in that of PLAN.
    """
    from gradplan import files, report

    plan = files.read_plan(plan_path)
    model = files.find_model(plan, plan_path)
    files.check_outputs(model, {"--script": script_path}, force=force, inputs={"PLAN": plan_path})
    files.write_script(plan, script_path, force=force, plan_path=plan_path, parts=parts or ())
    say_what_is_next(plan, f"{script_path}, which trains {model}", report.next_step(plan, script_path))


@main.command("show")
@click.argument("plan_path", metavar="PLAN")
@options.trainer
@options.page_path
@options.force_at_page
@options.as_json
@options.verbose
def show_command(
    plan_path: str, trainer: str | None, page_path: str | None, force: bool, as_json: bool, verbose: bool
) -> None:
    """Read a plan: as text, as a page, or as another trainer's arguments."""
    from gradplan import files, trainers

    if (trainer or page_path) and (as_json or verbose or (trainer and page_path)):
        alone = "--for" if trainer else "--page"
        raise click.UsageError(f"{alone} stands alone, without --json and -v", click.get_current_context())
    plan = files.read_plan(plan_path)
    if page_path:
        files.check_output(page_path, force=force, remedy="--force overwrites it, or --page PATH writes elsewhere")
        files.write_page(plan, page_path, force=force, plan_path=plan_path)
        say(f"wrote {page_path}")
    elif trainer:
        arguments = trainers.arguments_for(plan, trainer)
        write(arguments.text.removesuffix("\n"))
        say_notes(() if arguments.has_comments else arguments.notes)
    else:
        show_plan(plan, as_json, verbose, with_details=True)


@main.command("init")
@click.argument("path", default="model.py")
@options.force_at_path
def init_command(path: str, force: bool) -> None:
    """Write a model.py to start from.

    A small, complete one, at PATH: it can be probed and trained as it is.
    """
    from gradplan import advice, init

    init.write_model(path, force=force)
    write(f"wrote {path}; now type\n\n    {click.style(f'gradplan probe {advice.quoted(path)}', bold=True)}\n")


@main.command("gpus")
@options.as_json
def gpus_command(as_json: bool) -> None:
    """List the GPUs that can be simulated.

    The memory is what the driver reports as the total: "reported" was read on such a card, "estimated" is
    derived from similar ones.
    """
    from gradplan.probes.simulator.catalogue import gpus

    if as_json:
        write(json.dumps([dataclasses.asdict(gpu) for gpu in gpus()], indent=2, ensure_ascii=False).encode())
    else:
        from gradplan.report import gpu_table

        show(gpu_table(gpus()), piped_columns=120)
