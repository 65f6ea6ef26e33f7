"""A running average of the weights. Copied word for word into train.py."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel


def update_average(average: AveragedModel, model: nn.Module) -> None:
    """After an optimizer step: also the buffers, but counts and indices, which have no mean, as the model's are."""
    average.update_parameters(model)
    for ours, theirs in zip(average.module.buffers(), model.buffers(), strict=True):
        if not theirs.is_floating_point():
            ours.copy_(theirs)
