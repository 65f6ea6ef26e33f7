"""One network, two tasks: it sees the upper half of a handwritten digit, says which digit it is, and draws the rest.

The settings it needs on a GPU, and a script that trains it:

    gradplan probe examples/two-task/model.py
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

# The recipe: the best of seven learning rates for one epoch with this batch; ten epochs get further.
BATCH_SIZE = 64
LEARNING_RATE = 1e-3

WIDTH = 64
NUM_TRAINED = 1500  # of 1797 images; the others are for validation


def conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(8, out_channels),  # not BatchNorm, which would see micro-batches, not the whole batch
        nn.ReLU(),
    )


class HalfDigit(nn.Module):
    """A trunk that reads (batch, 1, 4, 8) pixels, and one head for each task on its output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(conv(1, WIDTH), conv(WIDTH, WIDTH))
        self.classify = nn.Sequential(
            conv(WIDTH, WIDTH),
            conv(WIDTH, WIDTH),
            nn.Flatten(),
            nn.Linear(WIDTH * 4 * 8, 10),
        )
        self.draw = nn.Sequential(
            conv(WIDTH, WIDTH),
            nn.Flatten(),
            nn.Linear(WIDTH * 4 * 8, 4 * 8),
            nn.Unflatten(1, (1, 4, 8)),
        )


def build_model() -> nn.Module:
    return HalfDigit()


def load_halves() -> tuple[Tensor, Tensor, Tensor]:
    """Upper halves and lower halves (1797, 1, 4, 8), between 0 and 1, and which digit each one is."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    return images[:, :, :4].contiguous(), images[:, :, 4:].contiguous(), torch.from_numpy(digits.target).long()


def build_dataset() -> TensorDataset:
    return TensorDataset(*(tensor[:NUM_TRAINED] for tensor in load_halves()))


def build_validation_dataset() -> TensorDataset:
    """The last images: other people wrote them."""
    return TensorDataset(*(tensor[NUM_TRAINED:] for tensor in load_halves()))


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Iterator[Tensor]:
    """Yields the two losses; they are trained as their sum.

    Whoever calls this runs backward() after each yield. That frees what the head kept for it before the next head
    runs, so that only one head's activations are in memory at a time. The trunk belongs to both: its graph must
    survive the first backward, and is needed only once. So it is cut off here. Each head's backward ends at the cut
    and adds to ``cut.grad``, and one backward through the trunk at the end carries the sum on. By the chain rule
    the gradients are those of the sum of the losses.
    """
    upper, lower, labels = batch
    features = model.trunk(upper)
    cut = features.detach().requires_grad_()
    yield cross_entropy(model.classify(cut), labels)
    yield mse_loss(model.draw(cut), lower)
    if cut.grad is not None:  # in evaluation nobody runs backward, and there is no gradient to carry on
        features.backward(cut.grad)


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
