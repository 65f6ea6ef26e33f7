"""A small GPT that learns to write Python, byte by byte, from the standard library's own source.

The settings it needs on a GPU, and a script that trains it:

    gradplan probe examples/gpt/model.py
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

# The recipe: the best of four learning rates for one epoch with this batch.
BATCH_SIZE = 64
LEARNING_RATE = 3e-3

VOCABULARY = 256  # a token is a byte
CONTEXT = 64
WIDTH = 128
NUM_HEADS = 4
NUM_LAYERS = 2
NUM_TEXT_BYTES = 1_500_000  # an epoch takes about a minute on a laptop's CPU


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (NUM_HEADS, -1)) for part in self.query_key_value(x).chunk(3, dim=-1))
        query, key, value = (part.transpose(1, 2) for part in heads)  # each (batch, heads, time, size)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of the token that follows each of ``tokens`` (batch, time)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def build_model() -> nn.Module:
    return GPT()


def read_text() -> bytes:
    """The modules at the top of the standard library, in alphabetical order, up to NUM_TEXT_BYTES."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(text) < NUM_TEXT_BYTES:
        raise FileNotFoundError(
            f"{folder} holds only {len(text)} bytes of .py files: this Python comes without its source, "
            "zipped or compiled; let read_text return any other text of yours"
        )
    return text[:NUM_TEXT_BYTES]


def build_dataset() -> TensorDataset:
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
    num_samples = len(text) // (CONTEXT + 1)
    samples = text[: num_samples * (CONTEXT + 1)].view(num_samples, CONTEXT + 1)
    return TensorDataset(samples[:, :-1], samples[:, 1:])  # what is read, and what follows it


def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    tokens, targets = batch
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Weight decay on matrices and embeddings, none on the scales and shifts of LayerNorm."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
