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
        torch.save(plain(data), file)
        file.flush()
        os.fsync(file.fileno())  # else a power cut could leave the name with nothing behind it
    os.replace(unfinished, path)


def plain(data: Any) -> Any:
    """The same with Python's numbers for NumPy's, which would be refused on loading."""
    if type(data) is dict:
        return {key: plain(value) for key, value in data.items()}
    if type(data) in (list, tuple):
        return type(data)(plain(value) for value in data)
    is_number = type(data).__module__ == "numpy" and getattr(data, "shape", None) == ()
    return data.item() if is_number else data


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What a training script saved, on the CPU.

    Raises:
        ValueError: it is no such file.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: name the checkpoint.pt in it") from None
    except Exception as error:
        raise ValueError(f"{path} is damaged, or no checkpoint ({type(error).__name__} on reading it)") from None
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
        raise ValueError(f"{path} is of another plan: {there} there, {here} here; start it as it was, or anew")
