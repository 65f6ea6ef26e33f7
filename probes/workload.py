"""model.py -> Workload: the user's model, data, loss and optimizer, found by the names of the contract."""

from __future__ import annotations

import copy
import random
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, default_collate

from gradplan.probes import step
from gradplan.probes.discovery import find_builder, positive_constant, split_name
from gradplan.probes.errors import UserCodeError
from gradplan.probes.evidence import Notice, Recipe
from gradplan.probes.loading import load_module, user_code

NAMES = (
    "build_model", "model", "build_dataset", "build_batch", "collate_fn", "compute_loss", "count_items",
    "build_optimizer", "build_scheduler", "load_weights", "BATCH_SIZE", "LEARNING_RATE", "BATCH_MULTIPLE",
)  # fmt: skip
MOST_DRAWS = 4096
SEED = 0
UNKNOWN_RATE = 1.2345e-3
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

    def build_model(self) -> nn.Module:
        """A new model on the CPU, in training mode."""
        builder = getattr(self.module, self.builder_name)
        what = f"{self.builder_name}()"
        with user_code(what):
            if isinstance(builder, nn.Module):
                model = copy.deepcopy(builder)
            else:
                model = builder() if callable(builder) else builder
        if isinstance(model, (tuple, list)) and any(isinstance(part, nn.Module) for part in model):
            raise UserCodeError(
                f"{what} returned a {type(model).__name__} of {len(model)} models; return one module that holds "
                "them: torch.nn.ModuleList([...]) or torch.nn.ModuleDict({...})"
            )
        if not isinstance(model, nn.Module):
            raise UserCodeError(f"{what} returned {type(model).__name__}; it must return one torch.nn.Module")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserCodeError(f"{what} returned a model in which no parameter requires grad: nothing to train")
        return model.train()

    def build_optimizer(self, model: nn.Module, learning_rate: float | None = None) -> Optimizer:
        """The optimizer at the recipe's rate."""
        rate = next((r for r in (learning_rate, self.base_learning_rate) if r is not None), UNKNOWN_RATE)
        builder = getattr(self.module, "build_optimizer", None)
        if builder is None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if self.base_learning_rate is None and learning_rate is None:
                return torch.optim.AdamW(trained)
            return torch.optim.AdamW(trained, lr=rate)
        with user_code("build_optimizer(model, lr)"):
            optimizer = builder(model, rate)
        if isinstance(optimizer, (tuple, list)):
            raise UserCodeError(
                f"build_optimizer returned {len(optimizer)} optimizers; return one optimizer with a parameter group "
                "for each part (alternating updates of several optimizers cannot be accumulated)"
            )
        if not isinstance(optimizer, Optimizer):
            raise UserCodeError(
                f"build_optimizer returned {type(optimizer).__name__}; it must return one torch.optim.Optimizer"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserCodeError(
                "build_optimizer returned LBFGS, whose step() evaluates the whole batch again and again; "
                "accumulated micro-batches cannot serve it. Use a first-order optimizer, for example torch.optim.AdamW"
            )
        return optimizer

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        """The user's loss, or the one that the model returns itself."""
        compute = getattr(self.module, "compute_loss", None)
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
        try:
            return step.model_loss(model, batch)
        except TypeError as error:
            if traceback.extract_tb(error.__traceback__)[-1].name != step.model_loss.__name__:
                raise  # the model's own
            raise UserCodeError(f"no loss: {error}; {PASTE.format(file=self.path.name)}") from None

    def make_batch(self, batch_size: int) -> Any:
        """A batch on the CPU: ``build_batch``'s, or the largest samples of the dataset, collated."""
        random.seed(SEED)
        torch.manual_seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)
        build_batch = getattr(self.module, "build_batch", None)
        if build_batch is not None:
            with user_code(f"build_batch({batch_size})"):
                return build_batch(batch_size)
        collate = getattr(self.module, "collate_fn", default_collate)
        largest = self._largest_first
        with user_code("the dataset"):
            samples = [self.dataset[largest[i % len(largest)]] for i in range(batch_size)]
        with user_code("collate_fn(samples)"):
            return collate(samples)

    @cached_property
    def dataset(self) -> Any:
        """The training data, or None where the file has no ``build_dataset``."""
        if not hasattr(self.module, "build_dataset"):
            return None
        with user_code("build_dataset()"):
            dataset = self.module.build_dataset()
        if isinstance(dataset, IterableDataset) and not hasattr(self.module, "build_batch"):
            raise UserCodeError("build_dataset() returned an IterableDataset: define build_batch(batch_size) as well")
        return dataset

    @cached_property
    def dataset_length(self) -> int | None:
        """Samples in the dataset; None without one, or where it has no length."""
        if self.dataset is None or isinstance(self.dataset, IterableDataset):
            return None
        if not hasattr(self.dataset, "__getitem__"):
            raise UserCodeError(
                f"build_dataset() returned {type(self.dataset).__name__}; it must return a torch.utils.data.Dataset"
            )
        with user_code("len() of the dataset"):
            length = len(self.dataset)
        if length == 0:
            raise UserCodeError("build_dataset() returned a dataset of length 0: nothing to train on")
        return length

    @cached_property
    def _largest_first(self) -> list[int]:
        length = self.dataset_length
        if length is None:
            raise UserCodeError(
                f"{self.path.name} has neither build_dataset() nor build_batch(batch_size): "
                "gradplan needs one of them to make a batch"
            )
        some = random.Random(SEED).sample(range(length), min(length, MOST_DRAWS))
        with user_code("the dataset"):
            return sorted(sorted(some), key=lambda index: -num_elements(self.dataset[index]))

    def recipe(self, model: nn.Module, optimizer: Optimizer) -> Recipe:
        """What the planner reads, from a model and an optimizer that were built (fake tensors will do)."""
        return Recipe(
            model=self.typed,
            builder=self.builder_name,
            names=tuple(name for name in NAMES if hasattr(self.module, name)),
            optimizer=type(optimizer).__name__,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            base_batch_size=self.base_batch_size,
            base_learning_rate=self.base_learning_rate or _rate_in(optimizer),
            dataset_length=self.dataset_length,
            batch_multiple=self.batch_multiple,
            has_batch_norm=any(
                isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in model.modules()
            ),
            notices=tuple(self.notices),
        )


def load_workload(typed: str, base_batch_size: int | None = None, base_learning_rate: float | None = None) -> Workload:
    """Import ``path/to/model.py`` or ``path/to/model.py:name`` and find what the contract names.

    ``base_batch_size`` and ``base_learning_rate`` go over what the file says.

    Raises:
        UsageError: there is no such file.
        UserCodeError: it cannot be imported, has no model or more than one, or a constant of a wrong kind.
    """
    file, builder_name = split_name(typed)
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
    if not hasattr(module, "build_batch") and not hasattr(module, "build_dataset"):
        raise UserCodeError(
            f"{file} has neither build_dataset() nor build_batch(batch_size): gradplan needs one of them "
            "to make a batch"
        )
    if hasattr(module, "train_step"):
        workload.notices.append(
            Notice(
                code="train-step-ignored",
                message="train_step is not used: gradplan runs its own step around compute_loss and build_optimizer",
            )
        )
    _ = workload.dataset_length  # built now, on real tensors: later it would be cached as fake ones
    return workload


def num_elements(sample: Any) -> int:
    """How large a sample is: elements of its tensors and arrays, lengths of its texts, 1 for a number."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(num_elements(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        return sum(num_elements(value) for value in sample)
    if hasattr(sample, "__dict__") and not hasattr(sample, "size"):
        return sum(num_elements(value) for value in vars(sample).values())
    size = getattr(sample, "size", 1)
    return size if isinstance(size, int) else 1


def _rate_in(optimizer: Optimizer) -> float | None:
    """The rate that the optimizer was built with, where the file rather than gradplan chose it."""
    rates = {float(group["lr"]) for group in optimizer.param_groups if "lr" in group}
    rates.discard(UNKNOWN_RATE)
    return rates.pop() if len(rates) == 1 else None
