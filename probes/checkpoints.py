"""A run's state in a file: always whole, loaded without running code, and refused where it is another plan's.

Copied word for word into train.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def save_whole(data: Any, path: Path) -> None:
    """Written beside the file and renamed, so that what is there is always whole."""
    unfinished = path.with_name(path.name + ".part")
    with open(unfinished, "wb") as file:
        torch.save(data, file)
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave the name with nothing behind it
    os.replace(unfinished, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What a training script saved, on the CPU.

    Raises:
        ValueError: it is no such file.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as a checkpoint: {reason}") from None
    if not isinstance(checkpoint, dict) or not {"model", "optimizer", "step", "plan"} <= checkpoint.keys():
        raise ValueError(f"{path} is no checkpoint of such a script: those are called checkpoint.pt")
    return checkpoint


def check_same_plan(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Whether the checkpoint's run was this one; it could not be continued exactly otherwise.

    Raises:
        ValueError: it was not, with what differs.
    """
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    if keys:
        there, here = (", ".join(f"{key} {plan.get(key)}" for key in keys) for plan in (theirs, ours))
        raise ValueError(f"{path} is of another plan: {there} there, {here} here")
