"""Import a user's model.py, and show what goes wrong in it with the user's own lines."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from gradplan.probes.errors import GradplanError, UsageError, UserCodeError

_PROBES = Path(__file__).parent
_OUR_FOLDERS = (_PROBES, _PROBES / "measuring", _PROBES / "simulator", _PROBES / "tuning")
# Under the user's call, but there only because gradplan imports files and fakes tensors.
_MACHINERY = re.compile(
    r"<frozen importlib|/torch/(_subclasses/|utils/_stats\.py|_compile\.py|_ops\.py|_dynamo/eval_frame\.py)"
)
_LIBRARIES = ("<", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")))

_loaded: list[tuple[str, frozenset[str]]] = []  # the folder of each loaded file, the modules known before it


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
    _forget_loaded()
    resolved = path.resolve()
    spec = importlib.util.spec_from_file_location(_module_name(resolved), resolved)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{path} is not a Python file: its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    _loaded.append((str(resolved.parent), frozenset(sys.modules)))
    sys.modules[spec.name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        with user_code(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        _forget_loaded()
        raise
    return module


def _forget_loaded() -> None:
    """As if no user's file had been loaded: the next one has siblings of its own, maybe of the same names."""
    importlib.invalidate_caches()
    while _loaded:
        folder, known = _loaded.pop()
        for name in sys.modules.keys() - known:
            if not name.startswith("gradplan.") and is_in(folder, sys.modules[name]):
                del sys.modules[name]
        with contextlib.suppress(ValueError):  # the user's file may have removed it
            sys.path.remove(folder)


def is_in(folder: str, module: ModuleType) -> bool:
    """Whether it is the user's own file or package there, not a library of an environment inside the folder."""
    spec = getattr(module, "__spec__", None)
    if not isinstance(spec, ModuleSpec):
        return False
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), "")  # a folder without __init__.py
    if _is_library(place) or _is_ours(place) or not (place.endswith(".py") or os.path.isdir(place)):
        return False
    return Path(folder) in Path(place).parents


def _module_name(path: Path) -> str:
    """The file's stem, unless that is another module's name: then one that nobody imports."""
    name = path.stem
    if name.isidentifier() and name not in sys.modules:
        found = importlib.util.find_spec(name)
        if found is None or found.origin == str(path):
            return name
    return "_model_" + re.sub(r"\W", "_", name)


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
        if error.filename is not None and not os.path.isfile(error.filename):  # of text that the user's code made
            raise UserCodeError(*describe(what, error)) from error
        where = f"{_short(error.filename)}:{error.lineno}" if error.filename else what
        raise UserCodeError(f"{where} is not valid Python: {error.msg}", (error.text or "").rstrip()) from None
    except BaseException as error:
        raise UserCodeError(*describe(what, error)) from error


def describe(what: str, error: BaseException) -> tuple[str, str]:
    """One sentence with the user's file and line, and the traceback without gradplan's frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    theirs = [frame for frame in frames if not _is_library(frame.filename)]
    place = (theirs or frames)[-1:]
    where = f" at {_short(place[0].filename)}:{place[0].lineno}" if place else ""
    text = " ".join(_text_of(error).split()) or "no message"
    if len(text) > 400:
        text = text[:400] + " ..."
    details = "".join(traceback.format_list(frames)).rstrip() if frames else ""
    return f"{what} failed{where}: {type(error).__name__}: {text}", details


def _text_of(error: BaseException) -> str:
    """Its message, as it can be written anywhere."""
    try:
        return str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # the user's own __str__
        return "its message cannot be made"


def _is_ours(filename: str) -> bool:
    return Path(filename).parent in _OUR_FOLDERS or _MACHINERY.search(Path(filename).as_posix()) is not None


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) or "site-packages" in filename or "dist-packages" in filename


def _short(filename: str) -> str:
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
