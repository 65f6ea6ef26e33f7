"""GPT-2 with 124 million parameters at 1024 tokens. Without data: it is here to be probed.

In mixed precision, on a GPU that need not be here:

    gradplan probe examples/gpt2-124m/model.py --device a100-80gb --precision bf16-mixed
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

# The recipe of github.com/karpathy/nanoGPT: half a million tokens per optimizer step. It also clips the
# gradient's norm at 1: python train.py --max-grad-norm 1
BATCH_SIZE = 480
LEARNING_RATE = 6e-4

VOCABULARY = 50304  # GPT-2's 50257, padded to a multiple of 64 for speed
CONTEXT = 1024
WIDTH = 768
NUM_HEADS = 12
NUM_LAYERS = 12


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
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH, bias=False), Attention())
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH, bias=False),
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
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                is_residual = name.endswith(("project.weight", "feed_forward.3.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * NUM_LAYERS) ** 0.5 if is_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of the token that follows each of ``tokens`` (batch, time)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def build_model() -> nn.Module:
    return GPT()


def build_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Weight decay on matrices and embeddings, none on the scales of LayerNorm."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
