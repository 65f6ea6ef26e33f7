"""Lightning modules without a Trainer: their loss, optimizer and schedule. Imports only torch.

Copied word for word into train.py where the model is such a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau


def defines(model: nn.Module, name: str) -> bool:
    """Whether the user wrote this method, which Lightning's base class has for everybody."""
    method = getattr(model, name, None)
    return callable(method) and not str(method.__module__).startswith(("lightning.", "pytorch_lightning."))


def training_step_loss(model: nn.Module, batch: Any) -> Any:
    """What ``training_step`` returns: the loss, or a dict that holds it.

    Raises:
        TypeError: it returns nothing.
    """
    training_step: Any = model.training_step
    takes_index = len(inspect.signature(training_step).parameters) > 1
    output = training_step(batch, 0) if takes_index else training_step(batch)
    if output is None:
        raise TypeError("training_step returned None, which cannot skip a micro-batch here; return a loss")
    return output["loss"] if isinstance(output, Mapping) else output


class EveryNthStep:
    """A schedule whose own unit is ``num_steps`` optimizer steps: an epoch, for most Lightning modules."""

    def __init__(self, scheduler: Any, num_steps: int) -> None:
        self.scheduler, self.num_steps, self.count = scheduler, num_steps, 0

    def step(self) -> None:
        """One optimizer step was taken."""
        self.count += 1
        if self.count % self.num_steps == 0:
            self.scheduler.step()

    def scale(self, factor: float) -> None:
        """Multiply the rates that the schedule remembers: it was built before they were scaled."""
        for scheduler in (self.scheduler, *getattr(self.scheduler, "_schedulers", ())):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        return {"count": self.count, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.count = state["count"]
        self.scheduler.load_state_dict(state["scheduler"])


def configure_optimizer(model: Any, num_steps: int, steps_per_epoch: int) -> tuple[Optimizer, EveryNthStep | None]:
    """The module's one optimizer, and its schedule in optimizer steps where it has one.

    A stand-in for the Trainer answers what ``configure_optimizers`` asks most: how many steps there will be.

    Raises:
        TypeError: several optimizers or schedules, or one that needs a validation loss at each step.
    """
    model._trainer = SimpleNamespace(
        estimated_stepping_batches=num_steps,
        max_steps=num_steps,
        max_epochs=-(-num_steps // steps_per_epoch),
        num_training_batches=steps_per_epoch,
        accumulate_grad_batches=1,
        world_size=1,
    )
    try:
        optimizers, schedules = parts_of_configuration(model.configure_optimizers())
    finally:
        model._trainer = None
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise TypeError(
            f"configure_optimizers returned {len(optimizers)} optimizers; return one optimizer with a parameter "
            "group for each part (alternating updates of several optimizers cannot be accumulated)"
        )
    if not schedules:
        return optimizers[0], None
    schedule = schedules[0] if isinstance(schedules[0], Mapping) else {"scheduler": schedules[0]}
    if len(schedules) > 1 or isinstance(schedule["scheduler"], ReduceLROnPlateau):
        raise TypeError(
            "configure_optimizers returned several schedules, or one that needs a validation loss; return one "
            "that follows the steps, for example torch.optim.lr_scheduler.CosineAnnealingLR"
        )
    unit = 1 if schedule.get("interval") == "step" else steps_per_epoch
    return optimizers[0], EveryNthStep(schedule["scheduler"], unit * (schedule.get("frequency") or 1))


def parts_of_configuration(configured: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedules, in each of the forms that ``configure_optimizers`` may return."""
    if isinstance(configured, Mapping):
        configured = [configured]
    if not isinstance(configured, (list, tuple)):
        return [configured], []
    if len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        return list(configured[0]), list(configured[1])
    parts = [part if isinstance(part, Mapping) else {"optimizer": part} for part in configured]
    schedules = [part["lr_scheduler"] for part in parts if part.get("lr_scheduler") is not None]
    return [part["optimizer"] for part in parts], schedules
