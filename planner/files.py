"""The files that gradplan reads and writes: never over somebody's own work, and never half of one."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from gradplan import page as page_files
from gradplan import plan as plan_files
from gradplan import script as script_files
from gradplan.plan import Plan, to_json
from gradplan.probes.errors import GradplanError, UsageError

MOST_READ_CHARS = 2**24  # far more than a plan or a script has: somebody's checkpoint is not read whole


def write_plan(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write gradplan.json; ``force`` overwrites whatever is at ``path``.

    Raises:
        UsageError: as ``check_output``.
        GradplanError: the file cannot be written after all.
    """
    check_output(path, force=force)
    write_atomically(path, to_json(plan))


def write_script(
    plan: Plan,
    path: str | Path,
    *,
    force: bool = False,
    plan_path: str | Path | None = None,
    parts: Collection[str] = (),
) -> None:
    """Write train.py; ``force`` overwrites whatever is at ``path``. ``parts``: as ``gradplan script --with``.

    The script finds the model's file from its own folder, so the model's file must be where the plan says:
    relative to the working folder, or else to the folder of ``plan_path``, if it was typed that way.

    Raises:
        UsageError: as ``check_output``, or the model's file is not there, or ``path`` is that file, or the parts
            do not go together or with the plan.
        GradplanError: the file cannot be written after all.
    """
    model = find_model(plan, plan_path)
    if is_same_file(path, model):
        raise UsageError(f"{path} is the model's own file; write the script elsewhere")
    check_output(path, force=force)
    write_atomically(path, script_files.render(plan, Path(path), model, parts))


def write_page(plan: Plan, path: str | Path, *, force: bool = False, plan_path: str | Path | None = None) -> None:
    """Write the plan as an HTML page that stands alone.

    Raises:
        UsageError: as ``check_output``, or ``path`` is the plan's own file.
        GradplanError: the file cannot be written after all.
    """
    if plan_path is not None and is_same_file(path, plan_path):
        raise UsageError(f"{path} is the plan's own file; write the page elsewhere")
    check_output(path, force=force)
    write_atomically(path, page_files.render(plan))


def find_model(plan: Plan, plan_path: str | Path | None = None) -> Path:
    """The model's file, relative to the working folder, or else to the folder of ``plan_path``.

    Raises:
        UsageError: it is in neither.
    """
    model = model_file(plan.model)
    folders = [Path()] if plan_path is None else [Path(), Path(plan_path).parent]
    for folder in folders:
        if (folder / model).is_file():
            return folder / model
    raise UsageError(f"there is no file {model}: work in the folder in which the plan was made")


def read_plan(path: str | Path) -> Plan:
    """The plan in a file that ``write_plan`` wrote. It may have been edited, if it still agrees with itself.

    Raises:
        UsageError: no such file, or a folder.
        GradplanError: the file cannot be read, is damaged, is not a plan, or is of a newer gradplan.
    """
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder, not a plan file such as {Path(path) / 'gradplan.json'}")
    try:
        with open(path, encoding="utf-8-sig") as file:  # some editors begin with a mark
            text = file.read(MOST_READ_CHARS)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no file {path}") from None
    except UnicodeDecodeError:
        raise GradplanError(f"{path} is damaged: not UTF-8 text") from None
    except OSError as error:
        raise GradplanError(f"cannot read {path}: {_reason(error)}") from None
    if str(path).endswith(".py") and not text.lstrip().startswith("{"):
        raise GradplanError(f"{path} is not a plan file; 'gradplan probe {path}' makes one")
    return plan_files.from_json(text, str(path))


def model_file(typed: str) -> Path:
    """The file of ``path/to/model.py`` or ``path/to/model.py:name``."""
    file, _, name = typed.rpartition(":")
    return Path(file if file.endswith(".py") and name.isidentifier() else typed)


def is_same_file(one: str | Path, other: str | Path) -> bool:
    """Whether both names mean one file, which need not exist yet."""
    if os.path.exists(one) and os.path.exists(other):
        return os.path.samefile(one, other)
    return os.path.normcase(os.path.realpath(one)) == os.path.normcase(os.path.realpath(other))


def check_model(typed: str) -> Path:
    """The file of a model that was typed.

    Raises:
        UsageError: it is not there, or its name is not text.
    """
    _check_name(typed)
    file = model_file(typed)
    if not file.exists():
        raise UsageError(f"there is no file {file}")
    return file


def check_outputs(
    model: Path, outputs: Mapping[str, str], *, force: bool, inputs: Mapping[str, str] | None = None
) -> None:
    """Before any work: what will be written may be. ``outputs`` and ``inputs`` are paths by what names them.

    Raises:
        UsageError: as ``check_output``, or two of the files are one, or a name is not text.
    """
    for path in outputs.values():
        _check_name(path)
    named = {**(inputs or {}), **outputs}
    for one, other in itertools.combinations(named, 2):
        if is_same_file(named[one], named[other]):
            raise UsageError(f"{one} and {other} are the same file")
    for option, path in outputs.items():
        if is_same_file(path, model):
            raise UsageError(f"{option} {path} is the model's own file")
        check_output(path, force=force, remedy=f"--force overwrites it, or {option} PATH writes elsewhere")


def _check_name(name: str) -> None:
    if name != name.encode(errors="replace").decode():  # it goes into the plan and the script
        raise UsageError(f"the name {name!r} is not text")


def check_output(path: str | Path, *, force: bool, remedy: str = "force=True overwrites it") -> None:
    """Nothing is wrong with writing to ``path``; ``force`` allows any file to be overwritten.

    ``remedy`` ends the message where a file that is not gradplan's, or was edited, is in the way.

    Raises:
        UsageError: such a file is in the way, ``path`` is no regular file, or its folder is missing or cannot
            be written to.
    """
    target = Path(os.path.realpath(path))
    _check_folder(path, target.parent)
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot write {path}: {_reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"cannot write {path}: it is a folder")
    if not stat.S_ISREG(mode):
        raise UsageError(f"cannot write {path}: it is not a regular file")
    if not os.access(target, os.W_OK):
        raise UsageError(f"cannot write {path}: it is read-only")
    if not force and not is_ours(target):
        raise UsageError(f"{path} {_why_kept(target)}; {remedy}")


def _check_folder(path: str | Path, folder: Path) -> None:
    """By writing there: the one test that holds for every user and file system."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"in {folder}: {_reason(error)}" if os.path.exists(folder) else f"there is no folder {folder}"
        raise UsageError(f"cannot write {path}: {reason}") from None


def is_ours(path: str | Path) -> bool:
    """Whether gradplan wrote this file and nobody changed it since: the hash in it says so."""
    text = _read(path)
    return any(kind.is_untouched(text) for kind in (script_files, plan_files, page_files))


def _why_kept(path: Path) -> str:
    text = _read(path)
    if text.startswith(("# gradplan wrote ", "<!-- gradplan wrote ")) or '"gradplan_version"' in text:
        return "was edited since gradplan wrote it"
    return "is there already, and gradplan did not write it"


def _read(path: str | Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MOST_READ_CHARS)
    except (OSError, ValueError):  # not text, or not ours to read: not ours
        return ""


def write_atomically(path: str | Path, text: str) -> None:
    """All of ``text`` or nothing: written beside the file, then renamed over it, whatever interrupts.

    A link stays, and what it points to is written; a file that was there keeps its permissions.

    Raises:
        GradplanError: it cannot be written, with the system's reason.
    """
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f".gradplan-{secrets.token_hex(8)}.part")
    try:
        with open(unfinished, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise GradplanError(f"cannot write {path}: {_reason(error)}") from None
        raise


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
