"""GPT-2 124M, trained faster step by step: ch05/10_llm-training-speed of github.com/rasbt/LLMs-from-scratch.

The records are numbered as in that folder's README: each adds one change to those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from truth_stage import Stage, integers

SIZE, NUM_HEADS, NUM_LAYERS, LENGTH, DROPOUT = 768, 12, 12, 1024, 0.1
VOCAB_SIZE = 50257
NUM_STEPS = 2  # an evaluation follows the first, a text of 50 tokens the last
TEXT_LENGTHS = (4, 53)  # of 50 tokens that follow "Every effort moves you", what the first and the last are made from


@dataclass(frozen=True)
class Variant:
    """What the first ``number`` changes have made of the script."""

    number: int
    vocab_size: int = VOCAB_SIZE

    @property
    def has_mask_buffer(self) -> bool:
        """A causal mask of 1024 x 1024 floats in every layer; else made in each forward pass."""
        return self.number < 1

    @property
    def is_fused(self) -> bool:
        """AdamW(fused=True)."""
        return self.number >= 3

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, converted on the device."""
        return torch.bfloat16 if self.number >= 5 else torch.float32

    @property
    def has_native_layers(self) -> bool:
        """torch's LayerNorm and GELU; else each is written out."""
        return self.number >= 6

    @property
    def has_sdpa(self) -> bool:
        """scaled_dot_product_attention on one projection; else three projections and the scores in memory."""
        return self.number >= 7


class WrittenOutNorm(nn.Module):
    """LayerNorm, every operation a tensor of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.shift = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class WrittenOutGelu(nn.Module):
    """The tanh approximation, every operation a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3))))


class WrittenOutAttention(nn.Module):
    """Causal attention with the scores in memory."""

    def __init__(self, has_mask_buffer: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.out = nn.Linear(SIZE, SIZE)
        self.dropout = nn.Dropout(DROPOUT)
        if has_mask_buffer:
            self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1))
        self.has_mask_buffer = has_mask_buffer

    def _mask(self, length: int) -> Tensor:
        if self.has_mask_buffer:
            return self.get_buffer("mask").bool()[:length, :length]
        return torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, length, _ = x.shape
        shape = batch_size, length, NUM_HEADS, SIZE // NUM_HEADS
        keys, queries, values = (layer(x).view(shape) for layer in (self.key, self.query, self.value))
        keys, queries, values = keys.transpose(1, 2), queries.transpose(1, 2), values.transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        mask = self._mask(length)
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch_size, length, SIZE)
        result: Tensor = self.out(context)
        return result


class SdpaAttention(nn.Module):
    """Causal attention in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, length, _ = x.shape
        qkv = self.qkv(x)
        qkv = qkv.view(batch_size, length, 3, NUM_HEADS, SIZE // NUM_HEADS).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        dropout = DROPOUT if self.training else 0.0
        context = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        context = context.transpose(1, 2).contiguous().view(batch_size, length, SIZE)
        result: Tensor = self.out(context)
        return result


class Block(nn.Module):
    """Attention, then a feed-forward layer, both on a normalised input and added to it."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        norm = nn.LayerNorm if variant.has_native_layers else WrittenOutNorm
        gelu = nn.GELU(approximate="tanh") if variant.has_native_layers else WrittenOutGelu()
        self.attention = SdpaAttention() if variant.has_sdpa else WrittenOutAttention(variant.has_mask_buffer)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 4 * SIZE), gelu, nn.Linear(4 * SIZE, SIZE))
        self.norm1, self.norm2 = norm(SIZE), norm(SIZE)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.mlp(x)
        x = self.dropout(x)
        return x + shortcut


class Gpt(nn.Module):
    """GPT-2 124M with a head of its own."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.tokens = nn.Embedding(variant.vocab_size, SIZE)
        self.positions = nn.Embedding(LENGTH, SIZE)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*[Block(variant) for _ in range(NUM_LAYERS)])
        self.norm = nn.LayerNorm(SIZE) if variant.has_native_layers else WrittenOutNorm(SIZE)
        self.head = nn.Linear(SIZE, variant.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens)
        positions = self.positions(torch.arange(tokens.shape[1]))
        x = embedded + positions
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


def gpt_script(variant: Variant, batch_size: int) -> Callable[[Stage], None]:
    """An epoch cut short: a step, an evaluation, more steps, a text; the memory is read after it."""

    def script(stage: Stage) -> None:
        model = stage.moved(lambda: Gpt(variant))
        model = model.to(variant.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=variant.is_fused or None)
        model.train()
        with stage.stepping(optimizer):
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                loss = _loss(model, batch_size)
                loss.backward()
                optimizer.step()
                stage.collect()
                if step == 0:
                    _evaluate(model, batch_size)
        _generate(model)

    return script


def _loss(model: nn.Module, batch_size: int) -> Tensor:
    tokens, targets = integers(batch_size, LENGTH), integers(batch_size, LENGTH)
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def _evaluate(model: nn.Module, batch_size: int) -> None:
    model.eval()
    for _ in ("training data", "validation data"):
        loss = _loss(model, batch_size)
        del loss  # the name ends with the function that sums up
    model.train()


@torch.no_grad()
def _generate(model: nn.Module) -> None:
    model.eval()
    for length in TEXT_LENGTHS:
        tokens = integers(1, length)
        logits = model(tokens[:, -LENGTH:])
        logits = logits[:, -1, :]
        following = torch.argmax(logits, dim=-1, keepdim=True)
        tokens = torch.cat((tokens, following), dim=1)
