"""The gradient noise scale (McCandlish et al. 2018), from the micro-batches that are run anyway.

Samples' gradients scatter around their mean G with covariance Sigma. Then tr(Sigma) / |G|^2 is the batch size
at which the noise of a step is as large as its signal: much larger batches bring little. Copied word for word
into train.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradplan.probes.ranks import add_up


def see_gradients(model: nn.Module, see: Callable[[Tensor], None]) -> None:
    """Show each micro-batch's gradient of each parameter to ``see``, before it is added to the others."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(see)


def gradient_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients together."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(values)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of shards
    return whole


class NoiseScale:
    """Estimates over the last windows, in samples.

    A micro-batch with the share w of its window's N samples has a mean gradient g with E|g|^2 = |G|^2 +
    tr(Sigma) / (w N). So with k micro-batches, of whatever sizes, in the window over all ranks

        tr(Sigma) = N / (k - 1) x (sum of w |g|^2  -  |gradient of the window|^2)

    has no bias, and neither has |G|^2 = |gradient of the window|^2 - tr(Sigma) / N. Both are averaged over
    windows before one is divided by the other.
    """

    def __init__(self, device: torch.device, num_windows: int = 256) -> None:
        self.square = torch.zeros((), device=device)  # of the micro-batch that is running
        self.sums = torch.zeros(2, device=device)  # of the window: squares / shares, micro-batches
        self.traces: deque[float] = deque(maxlen=num_windows)
        self.squares: deque[float] = deque(maxlen=num_windows)

    def see(self, gradient: Tensor) -> None:
        """A hook on a parameter: this micro-batch's gradient, times its share and the loss scale."""
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        dtype = torch.promote_types(values.dtype, torch.float32)
        self.square += torch.linalg.vector_norm(values.detach(), dtype=dtype).square()

    def watched(self, window: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """The window; whoever takes the next micro-batch of it has run the one before."""
        self.sums.zero_()
        for batch, share in window:
            self.square.zero_()
            yield batch, share
            weight = share[0] if isinstance(share, list) else share
            self.sums += torch.stack([self.square / weight, torch.ones_like(self.square)])

    def end_window(self, norm: Tensor, num_samples: int, loss_scale: float = 1.0) -> None:
        """After the gradients of all ranks were added up to one of this norm, before they are clipped."""
        add_up(self.sums)
        weighted, num_micro_batches = self.sums.tolist()
        square = norm.item() ** 2 / loss_scale**2
        if num_micro_batches < 2 or not math.isfinite(square):
            return
        trace = num_samples / (num_micro_batches - 1) * (weighted / loss_scale**2 - square)
        self.traces.append(trace)
        self.squares.append(square - trace / num_samples)

    def estimate(self) -> tuple[float, float, float] | None:
        """The noise scale in samples, and its 95 % interval by the jackknife; None where windows are too few."""
        count, trace, square = len(self.traces), sum(self.traces), sum(self.squares)
        without_each = [(trace - t, square - s) for t, s in zip(self.traces, self.squares, strict=True)]
        if count < 2 or min(map(min, without_each)) <= 0 or min(trace, square) <= 0:
            return None
        logs = [math.log(t / s) for t, s in without_each]
        mean = sum(logs) / count
        error = math.sqrt((count - 1) / count * sum((log - mean) ** 2 for log in logs))
        scale = trace / square
        return scale, scale * math.exp(-1.96 * error), scale * math.exp(1.96 * error)

    def __str__(self) -> str:
        found = self.estimate()
        if found is None:
            return (
                "noise scale unknown yet" if self.traces else "noise scale unknown: it needs two micro-batches a step"
            )
        return "noise scale {:,.0f} ({:,.0f} to {:,.0f})".format(*found)
