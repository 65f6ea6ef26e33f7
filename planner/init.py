"""A model.py to start from."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from gradplan.files import check_output, write_atomically
from gradplan.probes.errors import UsageError


def write_model(path: str | Path = "model.py", *, force: bool = False) -> None:
    """Write a small, complete model.py: it can be probed and trained as it is, and names what else it may define.

    Raises:
        UsageError: something is at ``path`` and ``force`` is not given, ``path`` is no Python file's, or its folder
            is missing or cannot be written to.
        GradplanError: the file cannot be written after all.
    """
    if Path(path).suffix != ".py":
        raise UsageError(f"{path} is not the name of a Python file, such as {Path(path).with_suffix('.py')}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already; --force overwrites it, or name another file")
    check_output(path, force=True)
    template = (resources.files("gradplan") / "model.py.jinja").read_text(encoding="utf-8")
    write_atomically(path, template.replace("{{ name }}", Path(path).name))
