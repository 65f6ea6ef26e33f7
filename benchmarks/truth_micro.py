"""Microbenchmarks: one operator, forward and backward, repeated; the gradients stay from one repetition to the next.

Source: benchmark/scripts of github.com/linkedin/Liger-Kernel, whose memory benchmark resets the peak before each of
ten repetitions and takes the median. The baselines (providers "huggingface" and "torch") are rebuilt here; its Triton
kernels are not. ``Focus`` is YOLOv5's first layer (models/common.py of github.com/ultralytics/yolov5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from truth_stage import Stage, integers

NUM_REPETITIONS = 3  # gradients appear in the first; from the second on all are alike
Repetition = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """What one run of an operator was given, under the names that the scripts used over time."""

    values: Mapping[str, Any]

    def __call__(self, *names: str) -> int:
        """The size that goes by one of ``names``.

        Raises:
            KeyError: by none.
        """
        for name in names:
            if name in self.values:
                return int(self.values[name])
        raise KeyError(f"no size called {' or '.join(names)}")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the inputs, float32 where none is given."""
        name = str(self.values.get("dtype", "float32")).removeprefix("torch.")
        found: torch.dtype = getattr(torch, name)
        return found

    @property
    def num_tokens(self) -> int:
        """Batch times sequence."""
        return self("BT") if "BT" in self.values else self("B", "bsz") * self("T", "seq_len")


def micro_script(operator: str, sizes: Sizes) -> Callable[[Stage], None]:
    """The memory benchmark of one operator, as it ran.

    Raises:
        KeyError: an unknown operator, or a size that it needs is missing.
    """
    if operator not in OPERATORS:
        raise KeyError(f"the baseline of {operator} is not rebuilt; known are {', '.join(OPERATORS)}")

    def script(stage: Stage) -> None:
        full = OPERATORS[operator](stage, sizes)
        for _ in range(NUM_REPETITIONS):
            stage.collect()
            stage.reset_peaks()
            full()

    return script


class RmsNorm(nn.Module):
    """Llama's: in float32, the result times a weight in the weight's type."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.eps)
        return self.weight * hidden.to(dtype)


class GatedMlp(nn.Module):
    """Llama's feed-forward layer."""

    def __init__(self, size: int, intermediate_size: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(size, intermediate_size, bias=False)
        self.up = nn.Linear(size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, size, bias=False)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Any:
        return self.down(self.activation(self.gate(hidden)) * self.up(hidden))


class Jsd(nn.Module):
    """The generalised Jensen-Shannon divergence of two tensors of log-probabilities, in float32."""

    def __init__(self, beta: float = 0.5) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        log_p, log_q = log_p.float(), log_q.float()
        middle = torch.lerp(torch.exp(log_q), torch.exp(log_p), self.beta)
        of_p = functional.kl_div(torch.log(middle), log_p, reduction="none", log_target=True).sum(-1)
        of_q = functional.kl_div(torch.log(middle), log_q, reduction="none", log_target=True).sum(-1)
        return ((self.beta * of_p + (1 - self.beta) * of_q) / log_q.shape[0]).sum()


class Focus(nn.Module):
    """Every second pixel in both directions, into four times the channels; then convolution, norm and SiLU."""

    def __init__(self, num_inputs: int = 3, num_outputs: int = 64, kernel_size: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 * num_inputs, num_outputs, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = nn.BatchNorm2d(num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        quarters = (x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2])
        return functional.silu(self.norm(self.conv(torch.cat(quarters, 1))))


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def _of_norm(build: Callable[[int], nn.Module]) -> Callable[[Stage, Sizes], Repetition]:
    def prepare(stage: Stage, sizes: Sizes) -> Repetition:
        num_rows, size = sizes("M", "BT"), sizes("H", "N", "hidden_size")
        other = torch.empty(size)  # the weight of the kernel that is compared, made all the same
        norm = stage.moved(lambda: build(size))
        x = torch.empty(num_rows, size, dtype=sizes.dtype)
        grad = torch.empty_like(x)
        x.requires_grad_()

        def full() -> None:
            out = norm(x)
            out.backward(grad, retain_graph=True)
            del out
            assert other.numel() == size

        return full

    return prepare


def _group_norm(stage: Stage, sizes: Sizes) -> Repetition:
    channels = sizes("C", "num_channels")
    norm = stage.moved(lambda: nn.GroupNorm(channels // sizes("channels_per_group"), channels))
    x = _leaf(sizes("M", "batch_size"), channels, sizes("H", "hidden_size"), dtype=sizes.dtype)
    grad = torch.empty_like(x)
    return lambda: norm(x).backward(grad, retain_graph=True)


def _cross_entropy(stage: Stage, sizes: Sizes) -> Repetition:
    logits, target = _leaf(sizes.num_tokens, sizes("V", "vocab_size")), integers(sizes.num_tokens)
    return lambda: functional.cross_entropy(logits, target).backward()


def _linear_cross_entropy(stage: Stage, sizes: Sizes) -> Repetition:
    size, vocab_size = sizes("H", "hidden_size"), sizes("V", "vocab_size")
    # the head of the baseline, and that of the kernel which it is compared with
    head, other = (stage.moved(lambda: nn.Linear(size, vocab_size, bias=False, dtype=sizes.dtype)) for _ in range(2))
    hidden, target = _leaf(sizes.num_tokens, size, dtype=sizes.dtype), integers(sizes.num_tokens)

    def full() -> None:
        logits = head(hidden)
        loss = functional.cross_entropy(logits, target)
        del logits  # the name ends with the module's forward
        loss.backward()
        assert other.weight.grad is None

    return full


def _embedding(stage: Stage, sizes: Sizes) -> Repetition:
    table = stage.moved(lambda: nn.Embedding(sizes("V", "vocab_size"), sizes("D", "hidden_size"), dtype=sizes.dtype))
    tokens = integers(sizes.num_tokens)

    def full() -> None:
        out = table(tokens)
        out.backward(torch.empty_like(out))

    return full


def _gated_mlp(activation: Callable[[Tensor], Tensor]) -> Callable[[Stage, Sizes], Repetition]:
    def prepare(stage: Stage, sizes: Sizes) -> Repetition:
        size = sizes("hidden_size", "H")
        x = _leaf(sizes.num_tokens, size, dtype=sizes.dtype)
        build = lambda: GatedMlp(size, sizes("intermediate_size"), activation).to(sizes.dtype)  # noqa: E731
        mlp = stage.moved(build)

        def full() -> None:
            out = mlp(x)
            out.backward(torch.empty_like(out), retain_graph=True)

        return full

    return prepare


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _rope(stage: Stage, sizes: Sizes) -> Repetition:
    length, num_heads, num_kv_heads = sizes("seq_len", "T"), sizes("num_q_heads"), sizes("num_kv_heads")
    head_size = sizes("hidden_size", "H") // num_heads
    query, key = (
        _leaf(1, length, heads, head_size, dtype=sizes.dtype).transpose(1, 2) for heads in (num_heads, num_kv_heads)
    )
    grads = torch.empty_like(query), torch.empty_like(key)
    cosine, sine = (torch.empty(1, 1, length, head_size, dtype=sizes.dtype) for _ in range(2))

    def full() -> None:
        outs = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        torch.autograd.grad(outs, (query, key), grads, retain_graph=True)

    return full


def _of_divergence(divergence: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Stage, Sizes], Repetition]:
    def prepare(stage: Stage, sizes: Sizes) -> Repetition:
        shape = sizes.num_tokens, sizes("V", "vocab_size")
        log_q, target = _leaf(*shape).log_softmax(-1), torch.empty(shape).log_softmax(-1)
        return lambda: divergence(log_q, target).backward(retain_graph=True)

    return prepare


def _linear_jsd(stage: Stage, sizes: Sizes) -> Repetition:
    size, vocab_size, dtype = sizes("H", "hidden_size"), sizes("V", "vocab_size"), sizes.dtype
    student, teacher = (stage.moved(lambda: nn.Linear(size, vocab_size, bias=False, dtype=dtype)) for _ in range(2))
    seen, taught = _leaf(sizes.num_tokens, size, dtype=dtype), torch.empty(sizes.num_tokens, size, dtype=dtype)

    def loss() -> Tensor:
        student_logits, teacher_logits = student(seen), teacher(taught)
        log_q = torch.log_softmax(student_logits / 1.0, -1)
        log_p = torch.log_softmax(teacher_logits / 1.0, -1)
        divergence: Tensor = Jsd()(log_q, log_p)
        return divergence.to(dtype)

    return lambda: loss().backward()


def _focus(stage: Stage, sizes: Sizes) -> Repetition:
    layer = stage.moved(Focus)
    x = _leaf(sizes("B"), 3, sizes("size"), sizes("size"))

    def full() -> None:
        out = layer(x)
        out.sum().backward()

    return full


OPERATORS: Mapping[str, Callable[[Stage, Sizes], Repetition]] = {
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "fused_linear_cross_entropy": _linear_cross_entropy,
    "fused_linear_jsd": _linear_jsd,
    "geglu": _gated_mlp(lambda x: functional.gelu(x, approximate="tanh")),
    "group_norm": _group_norm,
    "jsd": _of_divergence(Jsd()),
    "kl_div": _of_divergence(lambda log_q, p: functional.kl_div(log_q, p, reduction="batchmean")),
    "layer_norm": _of_norm(nn.LayerNorm),
    "rms_norm": _of_norm(RmsNorm),
    "rope": _rope,
    "swiglu": _gated_mlp(functional.silu),
    "focus": _focus,
}
