"""A small convolutional network that reads handwritten digits: 1797 images of 8 x 8 from scikit-learn.

The settings it needs on a GPU, and a script that trains it:

    gradplan probe examples/digits/model.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

# The recipe: the best of six learning rates for one epoch with this batch.
BATCH_SIZE = 64
LEARNING_RATE = 1e-2


def conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(8, out_channels),  # not BatchNorm, which would see micro-batches, not the whole batch
        nn.ReLU(),
    )


def build_model() -> nn.Module:
    return nn.Sequential(
        conv(1, 32),
        conv(32, 64, stride=2),  # 4 x 4
        conv(64, 128, stride=2),  # 2 x 2
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def build_dataset() -> TensorDataset:
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16  # (1797, 1, 8, 8), between 0 and 1
    return TensorDataset(images, torch.from_numpy(digits.target).long())


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
