"""How a command ends and what its streams are. It prints nothing and ends nothing: `cli` does."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import click

from gradplan.probes.errors import GradplanError

MOST_COLUMNS = 100  # longer lines are hard to read


class Ending(NamedTuple):
    """How a command ends: ``details`` stand above the message, either may be empty."""

    message: str
    exit_code: int
    details: str = ""
    is_error: bool = True


def ending_of(error: BaseException) -> Ending:
    """One message and the exit code that the error's kind promises."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return interrupted()
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "gradplan"
        return Ending(f"{error.format_message()}\ntry '{command} --help'", error.exit_code)
    if isinstance(error, GradplanError):
        return Ending(str(error), error.exit_code, getattr(error, "details", ""))
    what = f"this is a mistake in gradplan, not in your code: {type(error).__name__}: {error}"
    return Ending(f"{what}\nplease report it, with the lines above", 1, traceback.format_exc().rstrip())


def interrupted() -> Ending:
    """On a terminal, in a line after the ^C."""
    return Ending("\ninterrupted" if is_terminal(sys.stderr) else "interrupted", 130, is_error=False)


class Program(click.Group):
    """Every error ends the same way, in ``end``."""

    def end(self, ending: Ending) -> NoReturn:
        """Say it, and exit."""
        raise NotImplementedError

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are used."""
        return list(self.commands)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name in a script that it lacks
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except (click.UsageError, click.Abort, GradplanError) as error:
            self.end(ending_of(error))
        self.end(Ending("", code or 0))

    def invoke(self, ctx: click.Context) -> Any:
        """Before click sees them: it would take some errors for its own."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            self.end(ending_of(error))


@contextlib.contextmanager
def ctrl_c_at_once(say: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, or SIGTERM, ends the process where it stands, after ``say``: nothing is being written.

    As an exception it would pass through torch's C++ functions, some of which abort the process then.
    """

    def leave(number: int, _: object) -> NoReturn:
        with contextlib.suppress(BaseException):
            say()
        os._exit(128 + number)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # somebody else's to handle, or ignored as for a job in the background
        return
    signal.signal(signal.SIGINT, leave)
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def progress(quiet: bool, verbose: bool, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal, lines that stay, by ``say``, with ``verbose``, and silence in a pipe."""
    if verbose:
        yield say
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


def are_others_running() -> bool:
    """Whether the user's code has left a thread behind that Python would wait for."""
    return any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())


def close_quietly(stream: Any) -> None:
    """What is still buffered for a reader who left goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()
