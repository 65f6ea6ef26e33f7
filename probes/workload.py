"""model.py -> Workload: the user's model, data, loss and optimizer, found by the names of the contract."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gradplan.probes import lightning, step
from gradplan.probes.batches import seed_everything
from gradplan.probes.contract import checked_model, checked_optimizer, learning_rates
from gradplan.probes.data import NO_DATA, UserData
from gradplan.probes.discovery import find_builder, positive_constant, split_name
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Notice, Recipe
from gradplan.probes.loading import load_module, user_code

NAMES = (
    "build_model", "model", "build_dataset", "build_batch", "collate_fn", "compute_loss", "count_items",
    "build_optimizer", "build_scheduler", "build_validation_dataset", "collate_fn_validation", "load_weights",
    "BATCH_SIZE", "LEARNING_RATE", "BATCH_MULTIPLE",
)  # fmt: skip
UNKNOWN_RATE = 1.2345e-3
PASTE = """paste into {file}, for example:

    def compute_loss(model, batch):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(model(inputs), targets)"""


@dataclass
class Workload(UserData):
    """The user's training job. Calls into the user's code raise :class:`UserCodeError` with the user's line.

    ``yields_losses`` says whether ``compute_loss`` is a generator; where a call shows it, it becomes so.
    """

    builder_name: str
    base_batch_size: int | None
    base_learning_rate: float | None
    yields_losses: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether the file compiled a function or a model while it was imported."""
        own = [getattr(value, "__dict__", {}) for value in vars(self.module).values()]
        return any("_torchdynamo_orig_callable" in names and not names.get("_torchdynamo_disable") for names in own)

    def build_model(self) -> nn.Module:
        """A new model on the CPU, in training mode."""
        builder = getattr(self.module, self.builder_name)
        what = f"{self.builder_name}()"
        with user_code(what):
            model = builder() if callable(builder) and not isinstance(builder, nn.Module) else builder
        return checked_model(model, what).train()

    def build_optimizer(self, model: nn.Module, learning_rate: float | None = None) -> Optimizer:
        """The optimizer at the recipe's rate."""
        rate = next((r for r in (learning_rate, self.base_learning_rate) if r is not None), UNKNOWN_RATE)
        builder = self._find("build_optimizer")
        if builder is not None:
            with user_code("build_optimizer(model, lr)"):
                optimizer = builder(model, rate)
        elif self._is_configured(model):
            optimizer, _ = self._configured(model)
        else:
            if self.base_learning_rate is None and learning_rate is None:
                return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
            return step.build_adamw(model, rate)
        return checked_optimizer(optimizer, model)

    def _is_configured(self, model: nn.Module) -> bool:
        """Whether the model is a Lightning module that builds its own optimizer."""
        is_module = all(lightning.defines(model, name) for name in ("training_step", "configure_optimizers"))
        return is_module and not self._has("build_optimizer")

    def _configured(self, model: nn.Module) -> tuple[Optimizer, lightning.EveryNthStep | None]:
        with user_code("configure_optimizers()"):
            try:
                return lightning.configure_optimizer(model, num_steps=100, steps_per_epoch=10)
            except TypeError as error:
                if not str(error).startswith("configure_optimizers returned"):
                    raise
                raise UserCodeError(str(error)) from None

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        """The user's loss or losses, or the one that the model returns itself; several are an iterator."""
        losses = self.compute_loss_to_evaluate(model, batch)
        if isinstance(losses, Iterator):
            self.yields_losses = True
            return map(self._checked, losses)  # which keeps no loss alive
        return self._checked(losses)

    def compute_loss_to_evaluate(self, model: nn.Module, batch: Any) -> Any:
        """As ``compute_loss``, for losses without gradients."""
        compute = self._find("compute_loss")
        return self._own_loss(model, batch) if compute is None else compute(model, batch)

    def _checked(self, loss: Any) -> Tensor:
        try:
            return step.check_loss(loss)
        except TypeError as error:
            raise UserCodeError(f"{self.path}: {error}") from None

    def _own_loss(self, model: Any, batch: Any) -> Any:
        if lightning.defines(model, "training_step"):
            if getattr(model, "automatic_optimization", True) is False:
                raise UserCodeError(
                    f"{type(model).__name__} optimizes by hand (automatic_optimization = False), which cannot be "
                    "accumulated; define compute_loss(model, batch) and build_optimizer(model, lr)"
                )
            return lightning.training_step_loss(model, batch)
        paste = PASTE.format(file=self.path.name)
        try:
            loss = step.model_loss(model, batch)
        except TypeError as error:
            if not _is_before_forward(error):
                raise  # the model's own
            raise UserCodeError(f"no loss: {error}; {paste}") from None
        if loss.numel() != 1:
            raise UserCodeError(f"no loss: the model returned a tensor of shape {tuple(loss.shape)}; {paste}")
        return loss

    def _check_scheduler(self, model: nn.Module, optimizer: Optimizer) -> None:
        """train.py steps it once per optimizer step, without arguments, on the optimizer with its rates scaled."""
        if not self._has("build_scheduler"):
            return
        scaled = self.build_optimizer(model)
        step.scale_learning_rates(scaled, 2.0)
        peaks = [self._peak_rate(one) for one in (optimizer, scaled)]
        if peaks[1] < 1.5 * peaks[0]:
            message = (
                "build_scheduler sets learning rates of its own, whatever the optimizer has: a scaled rate does not "
                "reach training. Take them from the optimizer, for example max_lr=optimizer.param_groups[0]['lr']"
            )
            self.notices.append(Notice(code="schedule-sets-rate", message=message))

    def _peak_rate(self, optimizer: Optimizer) -> float:
        """The highest rate of the first group in a schedule of 100 steps."""
        with user_code("build_scheduler(optimizer, num_steps)"):
            scheduler = self.module.build_scheduler(optimizer, 100)
        if not isinstance(scheduler, LRScheduler):
            kind = type(scheduler).__name__
            raise UserCodeError(f"build_scheduler returned {kind}; it must return a torch LRScheduler")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UserCodeError(
                "build_scheduler returned ReduceLROnPlateau, which needs a validation loss at each step; return one "
                "that follows the steps, for example torch.optim.lr_scheduler.CosineAnnealingLR"
            )
        rates = []
        with warnings.catch_warnings(), user_code("the scheduler's step()"):
            warnings.simplefilter("ignore")  # of a scheduler that steps before the optimizer
            for _ in range(99):
                rates.append(learning_rates(optimizer)[0] or 0.0)
                scheduler.step()
        return max(rates)

    def recipe(self, model: nn.Module, optimizer: Optimizer) -> Recipe:
        """What the planner reads, from a model and an optimizer that were built (fake tensors will do)."""
        rate = self._recipe_rate(model, optimizer)
        is_default = not self._has("build_optimizer") and not self._is_configured(model)
        if rate is not None and self.base_learning_rate is None and is_default:
            message = f"nobody gave a learning rate: {rate:g} is AdamW's default. Set LEARNING_RATE or --base-lr"
            self.notices.append(Notice(code="learning-rate-default", message=message))
        self._check_scheduler(model, optimizer)
        return Recipe(
            model=self.typed,
            builder=self.builder_name,
            names=tuple(name for name in NAMES if self._has(name)),
            optimizer=type(optimizer).__name__,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            num_counts=self.num_counts,
            is_stream=self.is_stream,
            lightning=self._lightning(model),
            base_batch_size=self.base_batch_size,
            base_learning_rate=rate,
            dataset_length=self.dataset_length,
            batch_multiple=self.batch_multiple,
            has_batch_norm=any(
                isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in model.modules()
            ),
            notices=tuple(self.notices),
        )

    def _lightning(self, model: nn.Module) -> tuple[Literal["training_step", "configure_optimizers", "schedule"], ...]:
        parts: list[Literal["training_step", "configure_optimizers", "schedule"]] = []
        if lightning.defines(model, "training_step") and not self._has("compute_loss"):
            parts.append("training_step")
        if self._is_configured(model):
            parts.append("configure_optimizers")
            if not self._has("build_scheduler") and self._configured(model)[1] is not None:
                parts.append("schedule")
        return tuple(parts)

    def _recipe_rate(self, model: nn.Module, optimizer: Optimizer) -> float | None:
        """The rate that the plan scales: the recipe's, unless the optimizer has one of its own whatever it is given."""
        wanted, own, rates = self.base_learning_rate, self._rate_of_file(model, optimizer), learning_rates(optimizer)
        if wanted is None or wanted in rates or None in rates:
            return own if wanted is None else wanted
        shown = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
        builder = "build_optimizer" if self._has("build_optimizer") else "configure_optimizers"
        message = (
            f"the recipe's learning rate is {wanted:g}, and {builder} made an optimizer with {shown}: train.py scales "
            "those"
        )
        self.notices.append(Notice(code="learning-rate-not-used", message=message))
        return wanted if own is None else own

    def _rate_of_file(self, model: nn.Module, optimizer: Optimizer) -> float | None:
        """The first group's rate, where the optimizer has its rates whatever it is given; None where it follows."""
        rates = learning_rates(optimizer)
        if not self._has("build_optimizer"):
            return rates[0]
        return rates[0] if rates == learning_rates(self.build_optimizer(model, 2 * UNKNOWN_RATE)) else None


def load_workload(
    typed: str,
    base_batch_size: int | None = None,
    base_learning_rate: float | None = None,
    largest_first: Sequence[int] | None = None,
) -> Workload:
    """Import ``path/to/model.py`` or ``path/to/model.py:name`` and find what the contract names.

    ``base_batch_size`` and ``base_learning_rate`` go over what the file says. ``largest_first`` are the dataset's
    largest samples, where somebody has looked for them already.

    Raises:
        UsageError: there is no such file.
        UserCodeError: it cannot be imported, has no model or more than one, or a constant of a wrong kind.
    """
    file, builder_name = split_name(typed)
    seed_everything()
    module = load_module(Path(file))
    workload = Workload(
        typed=typed,
        path=Path(file),
        module=module,
        yields_losses=inspect.isgeneratorfunction(getattr(module, "compute_loss", None)),
        builder_name=find_builder(module, file, builder_name),
        base_batch_size=base_batch_size or positive_constant(module, "BATCH_SIZE", int),
        base_learning_rate=base_learning_rate or positive_constant(module, "LEARNING_RATE", float),
        batch_multiple=positive_constant(module, "BATCH_MULTIPLE", int) or 1,
    )
    if not workload._has("build_batch") and not workload._has("build_dataset"):
        raise UserCodeError(NO_DATA.format(file=file))
    if workload._has("train_step"):
        workload.notices.append(
            Notice(
                code="train-step-ignored",
                message="train_step is not used: gradplan runs its own step around compute_loss and build_optimizer",
            )
        )
    if largest_first is not None:
        workload.largest_first = list(largest_first)
    _ = workload.dataset_length, workload.num_counts  # now, on real tensors: later they would be fake ones
    return workload


def _is_before_forward(error: TypeError) -> bool:
    """Whether the model was not run: it does not take such a batch, or there is no loss in what it returned."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    between = {"_wrapped_call_impl", "_call_impl", "_call_and_watch"}
    return set(names[names.index(step.model_loss.__name__) + 1 :]) <= between
