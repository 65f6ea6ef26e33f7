"""Import a user's model.py, and show what goes wrong in it with the user's own lines."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from gradplan.probes.errors import GradplanError, UsageError, UserCodeError

_PROBES = Path(__file__).parent
_OUR_FOLDERS = (_PROBES, _PROBES / "simulator")


def load_module(path: Path) -> ModuleType:
    """The imported file: known to ``sys.modules``, its folder first on ``sys.path``.

    Raises:
        UsageError: there is no such file.
        UserCodeError: it is not Python, or raised while it was imported.
    """
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the file in it that builds the model")
    resolved = path.resolve()
    spec = importlib.util.spec_from_file_location(_module_name(resolved), resolved)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{path} is not a Python file: its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        with user_code(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        sys.path.remove(str(resolved.parent))
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's stem, unless another module has that name: then a name nobody imports."""
    known = sys.modules.get(path.stem)
    if known is None and importlib.util.find_spec(path.stem) is None:
        return path.stem
    same = known is not None and getattr(known, "__file__", None) == str(path)
    return path.stem if same else f"_model_{path.stem}"


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run the user's code: its prints go to standard error, its exceptions become :class:`UserCodeError`.

    ``what`` names the part that runs, for the message: "build_model()", "model.py".
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (GradplanError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}" if error.filename else what
        raise UserCodeError(f"{where} is not valid Python: {error.msg}", (error.text or "").rstrip()) from None
    except BaseException as error:
        raise UserCodeError(*describe(what, error)) from error


def describe(what: str, error: BaseException) -> tuple[str, str]:
    """One sentence with the user's file and line, and the traceback without gradplan's frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    theirs = [frame for frame in frames if not _is_library(frame.filename)]
    place = (theirs or frames)[-1:]
    where = f" at {_short(place[0].filename)}:{place[0].lineno}" if place else ""
    text = " ".join(str(error).split()) or "no message"
    if len(text) > 400:
        text = text[:400] + " ..."
    details = "".join(traceback.format_list(frames)).rstrip() if frames else ""
    return f"{what} failed{where}: {type(error).__name__}: {text}", details


def _is_ours(filename: str) -> bool:
    return Path(filename).parent in _OUR_FOLDERS


def _is_library(filename: str) -> bool:
    return filename.startswith(("<", sys.base_prefix + os.sep)) or "site-packages" in filename


def _short(filename: str) -> str:
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
