"""The command line: the only file that prints or exits."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from gradplan import options
from gradplan.probes.errors import GradplanError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gradplan.plan import Plan

Command = TypeVar("Command", bound=Callable[..., None])

MOST_COLUMNS = 100  # longer lines are hard to read


# How a command ends


class Program(click.Group):
    """Gives click's own errors the look of all others."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name in a script that it lacks
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "gradplan"
            fail(f"{error.format_message()}\ntry '{command} --help'", error.exit_code)
        except GradplanError as error:
            fail(str(error), error.exit_code)
        except click.Abort:
            interrupted()


def ends_well(command: Command) -> Command:
    """Every error ends as one message and the exit code that its kind promises."""

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        try:
            command(**options)
        except GradplanError as error:
            fail(str(error), error.exit_code, getattr(error, "details", ""))
        except KeyboardInterrupt:
            interrupted()
        except (click.ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            what = f"this is a mistake in gradplan, not in your code: {type(error).__name__}: {error}"
            fail(f"{what}\nplease report it, with the lines above", 1, traceback.format_exc().rstrip())

    return wrapped  # type: ignore[return-value]


def fail(message: str, exit_code: int, details: str = "") -> NoReturn:
    if details:
        write(details, err=True, dim=True)
    write(click.style("error: ", fg="red", bold=True) + message, err=True)
    sys.exit(exit_code)


def interrupted() -> NoReturn:
    write("\ninterrupted" if is_terminal(sys.stderr) else "interrupted", err=True)  # after the ^C
    sys.exit(130)


@contextlib.contextmanager
def ctrl_c_at_once() -> Iterator[None]:
    """Ctrl-C ends the process where it stands: nothing is being written here, and there is no child process.

    As an exception it would pass through torch's C++ functions, some of which abort the process then.
    """

    def leave(*_: object) -> NoReturn:
        if is_terminal(sys.stderr):
            write("\x1b[?25h", err=True)  # the cursor that the progress line hid
        with contextlib.suppress(SystemExit):
            interrupted()
        os._exit(130)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # somebody else's to handle, or ignored as for a job in the background
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())
        if not err and not isinstance(error, BrokenPipeError):
            raise GradplanError(f"cannot write to standard output: {error.strerror}") from None


def show(content: RenderableType, piped_columns: int = 80) -> None:
    """In colour and as wide as is good to read on a terminal; plain and always the same in a pipe."""
    if is_terminal(sys.stdout):
        from rich.console import Console

        console = Console(highlight=False)
        console.print(content, width=min(console.width, MOST_COLUMNS))
    else:
        from gradplan.report import to_text

        write(to_text(content, piped_columns).removesuffix("\n"))


@contextlib.contextmanager
def progress(quiet: bool, verbose: bool) -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal, lines that stay with ``verbose``, and silence in a pipe."""
    if verbose:
        yield lambda sentence: write(sentence, err=True, dim=True)
    elif quiet or not is_terminal(sys.stderr):
        yield lambda sentence: None
    else:
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("") as status:
            yield lambda sentence: status.update(Text(sentence))


@contextlib.contextmanager
def stdout_aside() -> Iterator[None]:
    """What the user's code prints goes to standard error, also what C libraries and child processes print."""
    try:
        out, err = sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # not files
        yield
        return
    sys.stdout.flush()
    kept = os.dup(out)
    os.dup2(err, out)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, out)
        os.close(kept)


def is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


# The commands


def show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        import gradplan

        write(f"gradplan {gradplan.__version__}")
        ctx.exit()


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=show_version, help="say which it is"
)
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
@options.device
@options.memory
@options.headroom
@options.precision
@options.effective_batch
@options.base_batch
@options.base_lr
@options.world_size
@options.max_micro_batch
@options.plan_path
@options.script_path
@options.force
@options.as_json
@options.quiet
@options.verbose
@ends_well
def probe_command(
    *,
    model: str,
    plan_path: str,
    script_path: str,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **settings: Any,
) -> None:
    """Find what fits, plan, and write gradplan.json and train.py.

    MODEL is a Python file with build_model(), a dataset or build_batch(), and compute_loss(model, batch);
    model.py:name picks another model builder than build_model.
    """
    from gradplan.files import write_plan, write_script
    from gradplan.plan import to_json
    from gradplan.report import summary, trial_lines

    if quiet and verbose:
        raise click.UsageError("-q and -v exclude each other", click.get_current_context())
    check_files(model, plan_path, script_path, force)
    from gradplan.verbs import probe

    folder = os.getcwd()
    with progress(quiet, verbose) as tell, stdout_aside(), ctrl_c_at_once():
        plan = probe(model, progress=tell, **settings)
    os.chdir(folder)  # the model's file may have left it
    if verbose:
        write("\n".join(trial_lines(plan)), err=True, dim=True)
    if as_json:
        write(to_json(plan).removesuffix("\n").encode())
    else:
        show(summary(plan))
    write_plan(plan, plan_path, force=force)
    write_script(plan, script_path, force=force)
    if not as_json:
        say_what_is_next(plan, plan_path, script_path)
    elif not quiet:
        for warning in plan.warnings:
            write(f"note: {warning.message}", err=True)
        say_what_is_next(plan, plan_path, script_path, err=True)


def check_files(model: str, plan_path: str, script_path: str, force: bool) -> None:
    """Before any work: what is read is there, and what is written may be."""
    from gradplan.files import check_output, is_same_file, model_file

    for name in (model, plan_path, script_path):
        if name != name.encode(errors="replace").decode():  # it goes into the plan and the script
            raise UsageError(f"the name {name!r} is not text")
    file = model_file(model)
    if not os.path.exists(file):
        raise UsageError(f"there is no file {file}")
    if is_same_file(plan_path, script_path):
        raise UsageError("--plan and --script are the same file")
    for option, path in (("--plan", plan_path), ("--script", script_path)):
        if is_same_file(path, file):
            raise UsageError(f"{option} {path} is the model's own file")
        remedy = f"--force overwrites it, or {option} PATH writes elsewhere"
        check_output(path, force=force, remedy=remedy)


def say_what_is_next(plan: Plan, plan_path: str, script_path: str, *, err: bool = False) -> None:
    rate = " --learning-rate X" if plan.learning_rate is None else ""
    command = click.style(f"python {quoted(script_path)}{rate}", bold=True)
    write(f"wrote {plan_path} and {script_path}; now type\n\n    {command}\n", err=err)


def quoted(path: str) -> str:
    """As the shell needs it."""
    if os.name == "nt":
        return f'"{path}"' if " " in path else path
    return shlex.quote(path)


@main.command("gpus")
@options.as_json
@ends_well
def gpus_command(*, as_json: bool) -> None:
    """List the GPUs that can be simulated.

    The memory is what the driver reports as the total: "reported" was read on such a card, "estimated" is
    derived from similar ones.
    """
    from gradplan.probes.simulator.catalogue import gpus

    if as_json:
        import dataclasses
        import json

        cards = [dataclasses.asdict(gpu) for gpu in gpus()]
        write(json.dumps(cards, indent=2, ensure_ascii=False).encode())
    else:
        from gradplan.report import gpu_table

        show(gpu_table(gpus()), piped_columns=120)
