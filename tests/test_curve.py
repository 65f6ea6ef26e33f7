"""Two small traces give the trace of every other batch size, storage for storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradplan.probes.search import largest
from gradplan.probes.simulator import allocator
from gradplan.probes.simulator.curve import Curve
from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.training import Setup, Tensors, trace_training
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
MIB = 2**20

RESNET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, stride):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Conv2d(width, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        return torch.relu(self.branch(x) + self.shortcut(x))

def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Block(8, 1), Block(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )

def build_batch(n):
    return torch.randn(n, 3, 64, 64), torch.randint(10, (n,))

def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
"""
GPT = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attend, self.project = nn.Linear(32, 96), nn.Linear(32, 32)
        self.expand, self.contract = nn.Linear(32, 128), nn.Linear(128, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        query, key, value = self.attend(self.norm1(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)
        x = x + self.dropout(self.project(heads.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.contract(functional.gelu(self.expand(self.norm2(x)))))

class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(65, 32), nn.Embedding(24, 32)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(32, 65, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))

def build_model():
    return Gpt()

def build_batch(n):
    return torch.randint(65, (n, 25))

def compute_loss(model, batch):
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
"""
LSTM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(65, 16), nn.Linear(24, 65)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])

def build_model():
    return Model()

def build_batch(n):
    return torch.randint(65, (n, 25))

def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
"""


_known: dict[tuple[str, str, int], Trace] = {}


def traces(load: Load, text: str, sizes: tuple[int, ...], precision: str = "32-true") -> list[Trace]:
    """Two optimizer steps of two micro-batches of each size, traced once for all tests."""
    for size in sizes:
        if (text, precision, size) not in _known:
            setup = Setup(load(text), precision, (8, 0))
            _known[text, precision, size] = trace_training(setup, Tensors.FAKE, size, 2)
    return [_known[text, precision, size] for size in sizes]


def curve_of(load: Load, text: str, precision: str = "32-true") -> Curve:
    two, three = traces(load, text, (2, 3), precision)
    curve = Curve.fit(two, three, (2, 3))
    assert curve is not None
    return curve


@pytest.mark.parametrize(
    ("text", "precision"),
    [(RESNET, "32-true"), (GPT, "32-true"), (GPT, "bf16-mixed"), (GPT, "16-mixed"), (LSTM, "32-true")],
    ids=["resnet", "gpt", "gpt bf16", "gpt fp16", "lstm"],
)
def test_traces_of_two_and_three_samples_give_every_other_trace_exactly(
    text: str, precision: str, workload: Load
) -> None:
    (actual,) = traces(workload, text, (251,), precision)
    assert curve_of(workload, text, precision).at(251) == actual


def test_the_points_of_a_curve_lie_on_it_and_those_between_as_well(workload: Load) -> None:
    four, twelve, eight = traces(workload, LSTM, (4, 12, 8))
    curve = Curve.fit(four, twelve, (4, 12))
    assert curve is not None
    assert [curve.at(4), curve.at(8), curve.at(12)] == [four, eight, twelve]


SAMPLE_BY_SAMPLE = """
import torch
from torch import nn

def build_model():
    return nn.Linear(4, 4)

def build_batch(n):
    return torch.randn(n, 4)

def compute_loss(model, batch):
    return sum(model(sample).square().sum() for sample in batch) / len(batch)
"""


def test_there_is_no_curve_where_the_operators_change_with_the_batch(workload: Load) -> None:
    two, three = traces(workload, SAMPLE_BY_SAMPLE, (2, 3))
    assert Curve.fit(two, three, (2, 3)) is None


def test_there_is_no_curve_where_storages_die_in_another_order() -> None:
    assert Curve.fit(Trace((0, 1, ~0, ~1), (1, 1)), Trace((0, 1, ~1, ~0), (1, 1)), (2, 3)) is None


def test_no_storage_shrinks_below_zero() -> None:
    """What is padded to a multiple can shrink from one size to the next."""
    curve = Curve.fit(Trace((0, ~0), (1000,)), Trace((0, ~0), (400,)), (2, 3))
    assert curve is not None
    assert [curve.at(size).sizes for size in (2, 3, 4)] == [(1000,), (400,), (0,)]


# What fits

storages = st.lists(st.tuples(st.integers(0, 10 * MIB), st.integers(0, MIB)), min_size=1, max_size=8)


def all_at_once(storages: list[tuple[int, int]]) -> Curve:
    bases, slopes = zip(*storages, strict=True)
    return Curve(tuple(range(len(storages))), bases, slopes)


@given(storages, st.integers(1, 200 * MIB), st.integers(1, 5000))
def test_the_hint_is_the_largest_size_by_live_bytes_within_two_percent(
    storages: list[tuple[int, int]], limit: int, at_most: int
) -> None:
    curve = all_at_once(storages)
    base, slope = (sum(values) for values in zip(*storages, strict=True))
    exact = max(0, min(at_most, (limit - base) // slope)) if slope else (at_most if base <= limit else 0)
    hint = curve.hint(limit, at_most)
    assert 1 <= hint <= at_most
    assert abs(hint - exact) <= max(1, 0.02 * exact)


@pytest.mark.parametrize("text", [RESNET, GPT, LSTM], ids=["resnet", "gpt", "lstm"])
@pytest.mark.parametrize("limit", [2**30, 24 * 2**30])
def test_the_hint_is_a_little_above_the_answer(text: str, limit: int, workload: Load) -> None:
    """Live bytes are a bound: what the allocator rounds and cannot use comes on top."""
    curve = curve_of(workload, text)
    hint = curve.hint(limit, 2**20)
    answer = curve.largest(limit, 2**20)
    assert 0.98 * answer <= hint <= 1.15 * answer


@given(storages, st.integers(0, 200 * MIB))
def test_the_largest_size_is_what_a_search_over_replays_finds(storages: list[tuple[int, int]], limit: int) -> None:
    curve = all_at_once(storages)

    def is_fitting(size: int) -> bool:
        trace = curve.at(size)
        assert trace.sizes == tuple(base + slope * size for base, slope in storages)
        return allocator.fits(trace.events, trace.sizes, limit)

    assert curve.largest(limit, 64) == largest(is_fitting, at_most=64, hint=curve.hint(limit, 64))


@given(st.lists(st.tuples(st.integers(-MIB, MIB), st.integers(0, MIB)), min_size=1, max_size=9), st.integers(1, 99))
def test_live_bytes_of_a_size_are_those_of_its_trace(storages: list[tuple[int, int]], size: int) -> None:
    curve = all_at_once(storages)
    assert curve.peak_live_bytes(size) == curve.at(size).peak_live_bytes
