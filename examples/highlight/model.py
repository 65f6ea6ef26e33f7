"""A network that highlights Python: for each character, is it of a keyword, a name, a string, ...?

It learns from the standard library's source, where Python's own tokenizer gives the answers. Statements are of very
different lengths, so batches are padded, and the loss is a mean over characters, not over statements: count_items
says over how many.

The settings it needs on a GPU, and a script that trains it:

    gradplan probe examples/highlight/model.py
"""

import keyword
import sysconfig
import tokenize
from collections.abc import Iterator
from io import StringIO
from itertools import accumulate, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

# The recipe: the best of five learning rates for one epoch with this batch.
BATCH_SIZE = 64
LEARNING_RATE = 8e-3

KINDS = ("space", "keyword", "name", "number", "string", "comment", "operator")
VOCABULARY = 128  # ASCII; the last code stands for all that is not
PADDING = 0  # a character that no source file has
NO_KIND = -100  # what cross_entropy leaves out
CONTEXT = 256  # longer statements are cut off
WIDTH = 64
NUM_LAYERS = 2
NUM_STATEMENTS = 16_000  # an epoch takes about a minute on a laptop's CPU

Sample = tuple[Tensor, Tensor]


class Highlighter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(KINDS))

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, length, kinds) of each character's kind; ``text`` is (batch, length), padded."""
        x = self.character(text) + self.position(torch.arange(text.shape[1], device=text.device))
        return self.head(self.layers(x, src_key_padding_mask=text == PADDING))  # nobody attends to padding


def build_model() -> nn.Module:
    return Highlighter()


def kind_of(token: tokenize.TokenInfo) -> str:
    """One of KINDS."""
    name = tokenize.tok_name[token.type]
    if name == "NAME" and keyword.iskeyword(token.string):
        return "keyword"
    if name.startswith(("FSTRING", "TSTRING")):  # the parts of f"..." in Python 3.12 and later
        return "string"
    return {"NAME": "name", "NUMBER": "number", "STRING": "string", "COMMENT": "comment", "OP": "operator"}.get(
        name, "space"
    )


def statements_of(source: str) -> Iterator[Sample]:
    """Each statement's characters, and their kinds: two tensors of the same length."""
    starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]  # where each line starts
    text = torch.tensor([min(ord(character), VOCABULARY - 1) for character in source])
    kinds = torch.zeros(len(source), dtype=torch.long)  # space, where no token is
    first = 0
    for token in tokenize.generate_tokens(StringIO(source).readline):
        (start_line, start_column), (end_line, end_column) = token.start, token.end
        end = starts[end_line - 1] + end_column
        kinds[starts[start_line - 1] + start_column : end] = KINDS.index(kind_of(token))
        if token.type == tokenize.NEWLINE:
            yield text[first:end][:CONTEXT], kinds[first:end][:CONTEXT]
            first = end


def read_statements(is_validation: bool, num_statements: int) -> list[Sample]:
    """The first statements of the modules at the top of the standard library; every tenth module is for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    chosen = (file for index, file in enumerate(modules) if (index % 10 == 0) == is_validation)
    statements = (statement for file in chosen for statement in statements_of(file.read_text(encoding="utf-8")))
    samples = list(islice(statements, num_statements))
    if len(samples) < num_statements:
        raise FileNotFoundError(f"{folder} holds only {len(samples)} statements: this Python comes without its source")
    return samples


def build_dataset() -> list[Sample]:
    return read_statements(is_validation=False, num_statements=NUM_STATEMENTS)


def build_validation_dataset() -> list[Sample]:
    return read_statements(is_validation=True, num_statements=NUM_STATEMENTS // 10)


def collate_fn(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    texts, kinds = zip(*samples, strict=True)
    return (
        pad_sequence(texts, batch_first=True, padding_value=PADDING),
        pad_sequence(kinds, batch_first=True, padding_value=NO_KIND),
    )


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    text, kinds = batch
    return cross_entropy(model(text).flatten(0, 1), kinds.flatten(), ignore_index=NO_KIND)


def count_items(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Characters that are not padding. Without it, a micro-batch of short statements would weigh as much as one of
    long statements, and accumulated gradients would be far from those of the whole batch."""
    _, kinds = batch
    return (kinds != NO_KIND).sum()
