"""The child process of a search: run train.py itself, with another multiplier and another seed each time.

The script is loaded anew for every run, and with it the user's file, so that a run is what ``python train.py`` would
have been. Only what it prints and saves is left out, and its losses are listened to.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from gradplan.probes.errors import UserCodeError
from gradplan.probes.loading import describe, is_in
from gradplan.probes.measuring.messages import Report
from gradplan.probes.measuring.worker import failed, leave_if_forked, talk
from gradplan.probes.tuning.messages import Run, Script

NEVER = "1000000000"
SHARE_AT_END = 10  # without validation data, a tenth of the steps, the last ones, are averaged


class Losses:
    """What a run's functions returned: each step's loss, and each validation's."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []

    def have_diverged(self) -> bool:
        """Whether one was not finite; train.py stops at that."""
        return not all(map(math.isfinite, (*self.training, *self.validation)))

    def value(self) -> float:
        """The validation loss at the end; without one, the mean of the last losses, each on a batch not seen before."""
        if self.validation:
            return self.validation[-1]
        last = self.training[-max(1, len(self.training) // SHARE_AT_END) :]
        return sum(last) / len(last)


def main() -> None:
    """Be the process that the first argument describes."""
    start = Script.model_validate_json(sys.argv[1])
    talk(start.parent_pid, functools.partial(serve, start))


def serve(start: Script, jobs: Iterable[str]) -> Iterator[Report]:
    """A report for each run; after one that failed this process has no more to say."""
    for line in jobs:
        run = Run.model_validate_json(line)
        losses = Losses()
        try:
            with tempfile.TemporaryDirectory(dir=Path(start.script).parent) as folder:
                rehearse(start, run, losses, folder)
        except SystemExit as ending:
            leave_if_forked()
            if not losses.have_diverged():
                yield Report(error=f"train.py ended during {run.what}: {ending}")
                return
        except BaseException as error:
            yield failed(error, run.what)
            return
        if losses.have_diverged():
            yield Report(has_diverged=True)
        else:
            yield Report(value=losses.value())


def rehearse(start: Script, run: Run, losses: Losses, folder: str) -> None:
    """train.py from its first line to its last.

    Raises:
        SystemExit: the script refuses to go on, as where a loss is not finite.
        Exception: whatever the user's code raised.
    """
    options = {
        "--max-steps": run.num_steps,
        "--epochs": run.epochs,
        "--validation-share": run.validation_share,
        "--seed": run.seed,
        "--device": start.device,
        "--out": folder,
        "--save-every": NEVER,
    }
    given = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
    with mock.patch.object(sys, "argv", [start.script, *given]), modules_kept(start), loaded(start.script) as script:
        for name in ("train_window", "train_window_scaled"):
            _listen(script, name, lambda result: losses.training.append(_loss_of(result)))
        _listen(script, "validation_loss", losses.validation.append)
        changes = {
            "LEARNING_RATE_MULTIPLIER": run.multiplier,
            "print": lambda *_, **__: None,
            "save_whole": lambda *_, **__: None,
        }
        vars(script).update(changes)
        script.main()


def _listen(script: ModuleType, name: str, heard: Callable[[Any], None]) -> None:
    """Be told what a function of the script returns, where it has that function."""
    original = getattr(script, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def listened(*arguments: Any, **more: Any) -> Any:
        result = original(*arguments, **more)
        heard(result)
        return result

    setattr(script, name, listened)


def _loss_of(result: Any) -> float:
    """Of ``train_window``, or of ``train_window_scaled``, which also says whether a step was taken."""
    return float(result[0] if isinstance(result, tuple) else result)


@contextlib.contextmanager
def loaded(path: str) -> Iterator[ModuleType]:
    """The script as a module, imported and not run as ``__main__``."""
    spec = importlib.util.spec_from_file_location("gradplan_train_script", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            raise
        raise UserCodeError(*describe("importing train.py", error)) from error
    yield module


@contextlib.contextmanager
def modules_kept(start: Script) -> Iterator[None]:
    """Afterwards the script, the user's file and what lies beside it are as if they had never been imported."""
    known, path = set(sys.modules), list(sys.path)
    folders = (str(Path(start.script).parent.resolve()), str(Path(start.model_folder).resolve()))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - known:
            if any(is_in(folder, sys.modules[name]) for folder in folders):
                del sys.modules[name]


if __name__ == "__main__":
    main()
