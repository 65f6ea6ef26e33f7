"""Decoders written out by hand: Llama and GPT-NeoX as lit-gpt had them with LoRA, and Llama as torchtune has it.

Sources: lit_gpt/model.py and lora.py of github.com/Lightning-AI/litgpt, commit 8641822 (October 2023);
torchtune/modules of github.com/pytorch/torchtune.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from truth_micro import GatedMlp


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. ``rotary_size`` is the part of a head that is rotated."""

    size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    intermediate_size: int
    num_kv_heads: int | None = None
    rotary_fraction: float = 1.0
    is_gated: bool = True  # Llama's feed-forward layer and norm; else GELU and LayerNorm
    has_bias: bool = False
    is_parallel: bool = False  # attention and feed-forward layer read the same input
    shares_norm: bool = False
    has_head_bias: bool = False

    @property
    def head_size(self) -> int:
        return self.size // self.num_heads

    @property
    def num_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads


# lit_gpt/config.py: padded_vocab_size, rotary_percentage
SHAPES: Mapping[str, Shape] = {
    "phi-1_5": Shape(
        2048,
        24,
        32,
        51200,
        8192,
        rotary_fraction=0.5,
        is_gated=False,
        has_bias=True,
        is_parallel=True,
        shares_norm=True,
        has_head_bias=True,
    ),
    "stablelm-base-alpha-3b": Shape(
        4096, 16, 32, 50688, 16384, rotary_fraction=0.25, is_gated=False, has_bias=True, is_parallel=True
    ),
    "stablelm-base-alpha-7b": Shape(
        6144, 16, 48, 50432, 24576, rotary_fraction=0.25, is_gated=False, has_bias=True, is_parallel=True
    ),
    "Llama-2-7b-hf": Shape(4096, 32, 32, 32000, 11008),
    "Llama-2-13b-hf": Shape(5120, 40, 40, 32000, 13824),
    "Llama-3.2-3B": Shape(3072, 28, 24, 128256, 8192, num_kv_heads=8),
    "Llama-3.2-1B": Shape(2048, 16, 32, 128256, 8192, num_kv_heads=8),
    "Llama-3.1-8B": Shape(4096, 32, 32, 128256, 14336, num_kv_heads=8),
    "Llama-2-7B": Shape(4096, 32, 32, 32000, 11008),
}


class SquareNorm(nn.Module):
    """lit-gpt's RMSNorm of that time, in the input's type."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normal = x * torch.rsqrt(mean + 1e-5)
        return self.weight * normal


class LoraQkv(nn.Module):
    """One projection to queries, keys and values, frozen; low-rank additions to queries and values.

    The additions come from a grouped convolution and are spread over zeros, as lit-gpt did.
    """

    def __init__(self, shape: Shape, rank: int, alpha: int, dropout: float) -> None:
        super().__init__()
        self.num_outputs = (shape.num_heads + 2 * shape.num_groups) * shape.head_size
        self.linear = nn.Linear(shape.size, self.num_outputs, bias=shape.has_bias)
        self.num_adapted = (shape.num_heads + shape.num_groups) * shape.head_size
        self.a = nn.Parameter(torch.empty(2 * rank, shape.size))
        self.b = nn.Parameter(torch.empty(self.num_adapted, rank))
        self.dropout = nn.Dropout(dropout)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        after_a = functional.linear(self.dropout(x), self.a)
        after_b = functional.conv1d(after_a.transpose(-2, -1), self.b.unsqueeze(-1), groups=2).transpose(-2, -1)
        lora = self._spread(after_b) * self.scaling
        return pretrained + lora  # type: ignore[no-any-return]

    def _spread(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        spread = x.new_zeros((*x.shape[:-1], self.num_outputs))
        spread = spread.view(-1, self.num_outputs)
        positions = torch.empty(self.num_adapted, dtype=torch.int64)
        spread = spread.index_copy(1, positions, x.reshape(-1, self.num_adapted))
        return spread.view((*x.shape[:-1], self.num_outputs)).transpose(0, 1)


class LoraAttention(nn.Module):
    """lit-gpt's causal attention."""

    def __init__(self, shape: Shape, rank: int, alpha: int, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = LoraQkv(shape, rank, alpha, dropout)
        self.out = nn.Linear(shape.size, shape.size, bias=shape.has_bias)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch_size, length, _ = x.shape
        shape = self.shape
        qkv = self.qkv(x)
        qkv = qkv.view(batch_size, length, shape.num_heads, 3, shape.head_size).permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((1, 1, 1), dim=2)
        query, key, value = (part.reshape(batch_size, -1, length, shape.head_size) for part in (query, key, value))
        size = int(shape.rotary_fraction * shape.head_size)
        rotated_query = rotated(query[..., :size], cosine, sine)
        rotated_key = rotated(key[..., :size], cosine, sine)
        query = torch.cat((rotated_query, query[..., size:]), dim=-1)
        key = torch.cat((rotated_key, key[..., size:]), dim=-1)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = out.transpose(1, 2).reshape(batch_size, length, shape.size)
        result: Tensor = self.out(out)
        return result


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding."""
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cosine) + (turned * sine)).type_as(x)


class GeluMlp(nn.Module):
    """GPT-NeoX's feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.size, shape.intermediate_size, bias=shape.has_bias)
        self.down = nn.Linear(shape.intermediate_size, shape.size, bias=shape.has_bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(functional.gelu(self.up(x)))
        return result


class LoraBlock(nn.Module):
    """One layer; in GPT-NeoX and phi attention and feed-forward layer run beside one another."""

    def __init__(self, shape: Shape, rank: int, alpha: int, dropout: float) -> None:
        super().__init__()
        norm = SquareNorm if shape.is_gated else nn.LayerNorm
        self.shape = shape
        self.norm1 = norm(shape.size)
        self.attention = LoraAttention(shape, rank, alpha, dropout)
        self.norm2 = None if shape.shares_norm else norm(shape.size)
        gated = shape.is_gated
        self.mlp = GatedMlp(shape.size, shape.intermediate_size, functional.silu) if gated else GeluMlp(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        first = self.norm1(x)
        hidden = self.attention(first, cosine, sine)
        if self.shape.is_parallel:
            second = first if self.norm2 is None else self.norm2(x)
            x = self.mlp(second) + hidden + x
        else:
            x = hidden + x
            x = self.mlp(self.norm2(x)) + x  # type: ignore[misc]
        return x


class LoraDecoder(nn.Module):
    """lit-gpt's GPT with LoRA on queries and values; gives its logits in chunks along the sequence."""

    def __init__(self, shape: Shape, rank: int = 8, alpha: int = 16, dropout: float = 0.05) -> None:
        super().__init__()
        self.head = nn.Linear(shape.size, shape.vocab_size, bias=shape.has_head_bias)
        self.tokens = nn.Embedding(shape.vocab_size, shape.size)
        self.blocks = nn.ModuleList(LoraBlock(shape, rank, alpha, dropout) for _ in range(shape.num_layers))
        self.norm = (SquareNorm if shape.is_gated else nn.LayerNorm)(shape.size)
        self.rotary_size = int(shape.rotary_fraction * shape.head_size)
        self.cache: tuple[Tensor, Tensor] | None = None  # made on the device, in float32
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".a", ".b")))

    def forward(self, tokens: Tensor, chunk_size: int = 0) -> list[Tensor]:
        length = tokens.size(1)
        if self.cache is None:
            self.cache = torch.empty(length, self.rotary_size), torch.empty(length, self.rotary_size)
        cosine, sine = self.cache
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        x = self.norm(x)
        return [self.head(part) for part in x.split(chunk_size or length, dim=1)]


class TuneNorm(nn.Module):
    """torchtune's RMSNorm: in float32, the weight after the cast back."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normal * self.scale


class TuneAttention(nn.Module):
    """torchtune's grouped-query attention, under the mask of packed samples."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.num_groups * shape.head_size
        self.query = nn.Linear(shape.size, shape.size, bias=False)
        self.key, self.value = (nn.Linear(shape.size, size, bias=False) for _ in range(2))
        self.out = nn.Linear(shape.size, shape.size, bias=False)

    def forward(self, x: Tensor, mask: Tensor, rotation: Tensor) -> Tensor:
        batch_size, length, _ = x.shape
        shape = self.shape
        query = self.query(x).view(batch_size, length, shape.num_heads, shape.head_size)
        query = turned(query, rotation).transpose(1, 2)
        key, value = self.key(x), self.value(x)
        key = turned(key.view(batch_size, length, -1, shape.head_size), rotation)
        key, value = key.transpose(1, 2), value.view(batch_size, length, -1, shape.head_size).transpose(1, 2)
        num_sharing = shape.num_heads // shape.num_groups
        expanded = (batch_size, shape.num_groups, num_sharing, length, shape.head_size)
        key, value = (part.unsqueeze(2).expand(expanded).flatten(1, 2) for part in (key, value))
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        result: Tensor = self.out(out.transpose(1, 2).contiguous().view(batch_size, length, -1))
        return result


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    """torchtune's rotary embedding, in float32, by pairs: ``rotation`` is (batch, length, 1, pairs, 2)."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    out = torch.stack(
        (
            pairs[..., 0] * rotation[..., 0] - pairs[..., 1] * rotation[..., 1],
            pairs[..., 1] * rotation[..., 0] + pairs[..., 0] * rotation[..., 1],
        ),
        -1,
    )
    return out.flatten(3).type_as(x)


class TuneBlock(nn.Module):
    """One layer of torchtune's Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = TuneNorm(shape.size), TuneNorm(shape.size)
        self.attention = TuneAttention(shape)
        self.mlp = GatedMlp(shape.size, shape.intermediate_size, functional.silu)

    def forward(self, x: Tensor, mask: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
        rotation = cache[positions].view(*positions.shape, 1, -1, 2)
        hidden = self.attention(self.norm1(x), mask, rotation) + x
        result: Tensor = hidden + self.mlp(self.norm2(hidden))
        return result


class TuneDecoder(nn.Module):
    """torchtune's Llama with tied embeddings, up to its last norm; ``logits`` is the rest."""

    def __init__(self, shape: Shape, length: int, is_checkpointed: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.size)
        self.blocks = nn.ModuleList(TuneBlock(shape) for _ in range(shape.num_layers))
        self.norm = TuneNorm(shape.size)
        self.is_checkpointed = is_checkpointed
        self.register_buffer("cache", torch.empty(length, shape.head_size // 2, 2))

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cache = self.get_buffer("cache")
        for block in self.blocks:
            arguments = x, mask, cache, positions
            x = checkpoint(block, *arguments, use_reentrant=False) if self.is_checkpointed else block(*arguments)
        result: Tensor = self.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied head."""
        return functional.linear(hidden, self.tokens.weight)
