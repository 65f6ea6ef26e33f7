"""What a search for the learning rate and the process that trains for it tell each other."""

from __future__ import annotations

from pydantic import Field

from gradplan.probes.evidence import Frozen


class Script(Frozen):
    """Which process to be: one that runs this train.py, again and again. ``device`` None is the script's own choice."""

    script: str
    model_folder: str
    parent_pid: int
    device: str | None = None


class Run(Frozen):
    """One complete run of ``num_steps`` optimizer steps, with its own warm-up and decay.

    ``epochs`` is at least what so many steps take, None where the script has no dataset that ends.
    ``validation_share`` of the dataset is held out, None where the file has its own validation set or nothing to
    hold out from.
    """

    multiplier: float = Field(gt=0)
    seed: int
    num_steps: int = Field(ge=1)
    epochs: int | None = None
    validation_share: float | None = None

    @property
    def what(self) -> str:
        """What is being done, in words."""
        return f"a run with {self.multiplier:.3g} times the learning rate"
