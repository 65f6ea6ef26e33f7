"""model.py -> Workload: the user's model, data, loss and optimizer, found by the names of the contract."""

from __future__ import annotations

import contextlib
import random
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset, default_collate

from gradplan.probes import step
from gradplan.probes.batches import SEED, num_elements, seed_everything
from gradplan.probes.contract import checked_dataset, checked_model, checked_optimizer, learning_rates
from gradplan.probes.discovery import find_builder, positive_constant, split_name
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Notice, Recipe
from gradplan.probes.loading import load_module, user_code

NAMES = (
    "build_model", "model", "build_dataset", "build_batch", "collate_fn", "compute_loss", "count_items",
    "build_optimizer", "build_scheduler", "load_weights", "BATCH_SIZE", "LEARNING_RATE", "BATCH_MULTIPLE",
)  # fmt: skip
MOST_DRAWS = 4096
UNKNOWN_RATE = 1.2345e-3
NO_DATA = "{file} has neither build_dataset() nor build_batch(batch_size): gradplan needs one of them to make a batch"
PASTE = """paste into {file}, for example:

    def compute_loss(model, batch):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(model(inputs), targets)"""


@dataclass
class Workload:
    """The user's training job. Calls into the user's code raise :class:`UserCodeError` with the user's line.

    ``typed`` is the path as the user wrote it, with ``:name`` where another builder was named.
    """

    typed: str
    path: Path
    module: ModuleType
    builder_name: str
    base_batch_size: int | None
    base_learning_rate: float | None
    batch_multiple: int
    notices: list[Notice] = field(default_factory=list)

    def _find(self, name: str) -> Any:
        return getattr(self.module, name, None)

    def _has(self, name: str) -> bool:
        return self._find(name) is not None

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
        if builder is None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if self.base_learning_rate is None and learning_rate is None:
                return torch.optim.AdamW(trained)
            return torch.optim.AdamW(trained, lr=rate)
        with user_code("build_optimizer(model, lr)"):
            optimizer = builder(model, rate)
        return checked_optimizer(optimizer, model)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        """The user's loss, or the one that the model returns itself."""
        compute = self._find("compute_loss")
        loss = self._model_loss(model, batch) if compute is None else compute(model, batch)
        try:
            return step.check_loss(loss)
        except TypeError as error:
            raise UserCodeError(f"{self.path}: {error}") from None

    def _model_loss(self, model: nn.Module, batch: Any) -> Tensor:
        if hasattr(model, "training_step"):
            raise UserCodeError(
                f"{type(model).__name__} has a training_step, which this version does not call by itself; paste into "
                f"{self.path.name}:\n\n    def compute_loss(model, batch):\n"
                "        return model.training_step(batch, 0)"
            )
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

    def count_items(self, batch: Any) -> float | None:
        """Over how many items the loss of this batch is a mean, as the file says; None where it does not."""
        count = self._find("count_items")
        if count is None:
            return None
        with user_code("count_items(batch)"):
            num_items = count(batch)
        if isinstance(num_items, (tuple, list)):
            raise UserCodeError("count_items returned several numbers; this version takes one loss, so one number")
        with user_code("count_items(batch), which must return a number,"):
            return float(num_items)

    def make_batch(self, batch_size: int) -> Any:
        """A batch on the CPU: ``build_batch``'s, or the largest samples of the dataset, collated."""
        build_batch = self._find("build_batch")
        if build_batch is not None:
            what = f"build_batch({batch_size})"
            seed_everything()
            with user_code(what):
                batch = build_batch(batch_size)
        else:
            collate = self._find("collate_fn")
            what = "PyTorch's default collate (there is no collate_fn)" if collate is None else "collate_fn(samples)"
            largest = self._largest_first
            seed_everything()
            with user_code("the dataset"):
                samples = [self.dataset[largest[i % len(largest)]] for i in range(batch_size)]
            with user_code(what):
                batch = (collate or default_collate)(samples)
        if batch is None:
            raise UserCodeError(f"{what} returned None; it must return a batch")
        return batch

    def batch_size_notices(self, size: int) -> list[Notice]:
        """Whether ``build_batch`` gives more for more samples; without that, memory says nothing about sizes."""
        if not self._has("build_batch"):
            return []
        larger = size + self.batch_multiple
        small, large = num_elements(self.make_batch(size)), num_elements(self.make_batch(larger))
        if small != large or small <= 1:  # 1: of a kind that cannot be counted
            return []
        message = (
            f"build_batch({size}) and build_batch({larger}) are of equal size: where it does not follow "
            "batch_size, what is planned here means nothing"
        )
        return [Notice(code="batch-size-ignored", message=message)]

    @cached_property
    def dataset(self) -> Any:
        """The training data, or None where the file has no ``build_dataset``."""
        if not self._has("build_dataset"):
            return None
        with user_code("build_dataset()"):
            dataset = self.module.build_dataset()
        return checked_dataset(dataset, has_build_batch=self._has("build_batch"))

    @cached_property
    def dataset_length(self) -> int | None:
        """Samples in the dataset; None without one, or where it has no length."""
        if self.dataset is None or isinstance(self.dataset, IterableDataset):
            return None
        with user_code("len() of the dataset"):
            length = len(self.dataset)
        if length == 0:
            raise UserCodeError("build_dataset() returned a dataset of length 0: nothing to train on")
        return length

    def reload(self) -> None:
        """Import the file anew, for what its code keeps between calls; all stays where that fails."""
        with contextlib.suppress(UserCodeError):
            self.module = load_module(Path(str(self.module.__file__)))

    @cached_property
    def _largest_first(self) -> list[int]:
        length = self.dataset_length
        if length is None:
            raise UserCodeError(NO_DATA.format(file=self.path.name))
        some = random.Random(SEED).sample(range(length), min(length, MOST_DRAWS))
        seed_everything()
        with user_code("the dataset"):
            return sorted(sorted(some), key=lambda index: -num_elements(self.dataset[index]))

    def _check_scheduler(self, optimizer: Optimizer) -> None:
        """train.py steps it once per optimizer step, without arguments."""
        builder = self._find("build_scheduler")
        if builder is None:
            return
        with user_code("build_scheduler(optimizer, num_steps)"):
            scheduler = builder(optimizer, 100)
        if not isinstance(scheduler, LRScheduler):
            kind = type(scheduler).__name__
            raise UserCodeError(f"build_scheduler returned {kind}; it must return a torch LRScheduler")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UserCodeError(
                "build_scheduler returned ReduceLROnPlateau, which needs a validation loss at each step; return one "
                "that follows the steps, for example torch.optim.lr_scheduler.CosineAnnealingLR"
            )

    def recipe(self, model: nn.Module, optimizer: Optimizer) -> Recipe:
        """What the planner reads, from a model and an optimizer that were built (fake tensors will do)."""
        rate = self.base_learning_rate or self._rate_of_file(model, optimizer)
        if rate is not None and self.base_learning_rate is None and not self._has("build_optimizer"):
            message = f"nobody gave a learning rate: {rate:g} is AdamW's default. Set LEARNING_RATE or --base-lr"
            self.notices.append(Notice(code="learning-rate-default", message=message))
        self._note_unused_rate(optimizer)
        self._check_scheduler(optimizer)
        return Recipe(
            model=self.typed,
            builder=self.builder_name,
            names=tuple(name for name in NAMES if self._has(name)),
            optimizer=type(optimizer).__name__,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            base_batch_size=self.base_batch_size,
            base_learning_rate=rate,
            dataset_length=self.dataset_length,
            batch_multiple=self.batch_multiple,
            has_batch_norm=any(
                isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in model.modules()
            ),
            notices=tuple(self.notices),
        )

    def _note_unused_rate(self, optimizer: Optimizer) -> None:
        """Say it where the recipe's rate is not the optimizer's: train.py scales what the optimizer has."""
        rates = learning_rates(optimizer)
        if self.base_learning_rate is not None and self.base_learning_rate not in rates and None not in rates:
            shown = ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
            message = (
                f"build_optimizer was given the learning rate {self.base_learning_rate:g} and made an optimizer with "
                f"{shown}: train.py scales those"
            )
            self.notices.append(Notice(code="learning-rate-not-used", message=message))

    def _rate_of_file(self, model: nn.Module, optimizer: Optimizer) -> float | None:
        """The first group's rate, where the optimizer has its rates whatever it is given; None where it follows."""
        rates = learning_rates(optimizer)
        if not self._has("build_optimizer"):
            return rates[0]
        return rates[0] if rates == learning_rates(self.build_optimizer(model, 2 * UNKNOWN_RATE)) else None


def load_workload(typed: str, base_batch_size: int | None = None, base_learning_rate: float | None = None) -> Workload:
    """Import ``path/to/model.py`` or ``path/to/model.py:name`` and find what the contract names.

    ``base_batch_size`` and ``base_learning_rate`` go over what the file says.

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
    _ = workload.dataset_length  # built now, on real tensors: later it would be cached as fake ones
    return workload


def _is_before_forward(error: TypeError) -> bool:
    """Whether the model was not run: it does not take such a batch, or there is no loss in what it returned."""
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return set(names[names.index(step.model_loss.__name__) + 1 :]) <= {"_wrapped_call_impl", "_call_impl"}
