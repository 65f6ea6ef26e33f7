"""A simulated GPU answers with a size that was traced as the full step, and says how it came to it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from gradplan.probes import step
from gradplan.probes.errors import DoesNotFitError, UserCodeError
from gradplan.probes.evidence import Evidence
from gradplan.probes.simulate import Simulation, limit_of
from gradplan.probes.simulator.allocator_settings import parse_settings
from gradplan.probes.simulator.catalogue import find
from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.training import Setup, Tensors, trace_training
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
MIB = 2**20
CONTEXT_MIB = find("rtx-4090").context_bytes // MIB

# About 50 kB a sample: some hundreds fit into the 100 MiB that these tests leave free.
WIDE = """
import torch
from torch import nn

ASKED = []

def build_model():
    return nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 1))

def build_batch(n):
    ASKED.append(n)
    return torch.ones(n, 16), torch.ones(n, 1)

def compute_loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
"""


class Probe:
    """A simulation of an RTX 4090 with little memory, and what it reported on the way."""

    def __init__(self, job: Workload, free_mib: float = 100, **options: Any) -> None:
        memory_bytes = CONTEXT_MIB * MIB + math.ceil(free_mib * MIB)
        self.progress: list[str] = []
        self.job = job
        self.simulation = Simulation(
            job,
            find("rtx-4090"),
            memory_bytes=memory_bytes,
            headroom_percent=0,
            progress=self.progress.append,
            **options,
        )

    def gather(self, per_rank: int | None, at_most: int | None) -> Evidence:
        return self.simulation.gather(per_rank, at_most)


def outcomes(evidence: Evidence) -> dict[int, bool]:
    return {trial.micro_batch_size: trial.fits for trial in evidence.trials}


def answer_of(evidence: Evidence) -> int:
    return max((size for size, fits in outcomes(evidence).items() if fits), default=0)


def codes(evidence: Evidence) -> list[str]:
    return [notice.code for notice in evidence.notices]


# What is said of a trace

COMPILED = {
    "a model": WIDE.replace("return nn.Sequential", "return torch.compile(nn.Sequential").replace(
        "nn.Linear(4096, 1))", "nn.Linear(4096, 1)))"
    ),
    "a model in place": WIDE.replace("return nn.Sequential", "model = nn.Sequential").replace(
        "nn.Linear(4096, 1))", "nn.Linear(4096, 1))\n    model.compile()\n    return model"
    ),
    "a function": WIDE.replace("def compute_loss", "@torch.compile\ndef compute_loss"),
}


@pytest.mark.parametrize("text", COMPILED.values(), ids=COMPILED)
def test_what_is_compiled_is_traced_eagerly_and_said_so(text: str, workload: Load) -> None:
    compiled, plain = (Probe(workload(source)).gather(64, 64) for source in (text, WIDE))
    assert codes(compiled) == ["compile-left-out"]
    assert codes(plain) == []
    assert compiled.trials == plain.trials


# The search


def test_the_whole_target_is_tried_first_and_nothing_else_when_it_fits(workload: Load) -> None:
    probe = Probe(workload(WIDE))
    (trial,) = probe.gather(64, 64).trials
    assert (trial.micro_batch_size, trial.num_micro_batches, trial.fits, trial.source) == (64, 1, True, "traced")
    assert probe.progress == [f"tracing a micro-batch of {size}" for size in (2, 3, 64)]


def test_a_target_that_is_certain_not_to_fit_is_not_traced(workload: Load) -> None:
    probe = Probe(workload(WIDE))
    answer = answer_of(probe.gather(100_000, 100_000))
    assert probe.progress == [f"tracing a micro-batch of {size}" for size in (2, 3, answer)]


def test_the_answer_is_traced_and_the_next_size_up_does_not_fit(workload: Load) -> None:
    evidence = Probe(workload(WIDE)).gather(4096, 4096)
    answer = answer_of(evidence)
    trials = {trial.micro_batch_size: trial for trial in evidence.trials}
    assert 100 < answer < 2000
    assert (trials[answer].source, trials[answer].num_micro_batches) == ("traced", 2)
    assert not trials[answer + 1].fits
    assert trials[answer].required_bytes is not None
    assert trials[answer].required_bytes <= evidence.limit_bytes == 100 * MIB
    assert not evidence.notices


def test_the_answer_is_the_largest_that_fits_when_every_size_around_it_is_traced(workload: Load) -> None:
    job = workload(WIDE)
    answer = answer_of(Probe(job).gather(4096, 4096))
    for size, fits in ((answer, True), (answer + 1, False)):
        trace = trace_training(Setup(job, "32-true", (8, 9)), Tensors.FAKE, size, 2)
        assert Probe(job).simulation._record(size, 2, trace, is_traced=True).fits == fits


def test_a_window_without_a_target_is_one_micro_batch_as_large_as_fits(workload: Load) -> None:
    evidence = Probe(workload(WIDE)).gather(None, None)
    assert {trial.num_micro_batches for trial in evidence.trials} == {1}
    assert 100 < answer_of(evidence) < 2000


def test_no_size_above_the_users_limit_is_tried(workload: Load) -> None:
    probe = Probe(workload(WIDE))
    evidence = probe.gather(4096, 50)
    assert answer_of(evidence) == 50
    assert max(outcomes(evidence)) == 50
    assert max(probe.job.module.ASKED) == 50


def test_every_size_is_a_multiple_of_batch_multiple(workload: Load) -> None:
    probe = Probe(workload(WIDE + "\nBATCH_MULTIPLE = 6\n"))
    evidence = probe.gather(4092, 4092)
    answer = answer_of(evidence)
    assert all(size % 6 == 0 for size in (*outcomes(evidence), *probe.job.module.ASKED))
    assert outcomes(evidence)[answer + 6] is False


def test_where_not_even_one_sample_fits_one_was_traced(workload: Load) -> None:
    evidence = Probe(workload(WIDE), free_mib=20).gather(64, 64)
    assert answer_of(evidence) == 0
    smallest = min(evidence.trials, key=lambda trial: trial.micro_batch_size)
    assert (smallest.micro_batch_size, smallest.source, smallest.fits) == (1, "traced", False)
    assert smallest.required_bytes is not None
    assert smallest.required_bytes > evidence.limit_bytes


def test_the_same_simulation_gives_the_same_evidence(workload: Load) -> None:
    job = workload(WIDE)
    first, second = (Probe(job, precision="bf16-mixed").gather(4096, 4096) for _ in range(2))
    assert first == second
    assert first.model_dump_json() == second.model_dump_json()


def test_bf16_mixed_holds_more_samples_than_fp32(workload: Load) -> None:
    job = workload(WIDE)
    assert answer_of(Probe(job, precision="bf16-mixed").gather(None, None)) > 1.3 * answer_of(
        Probe(job).gather(None, None)
    )


def test_the_limit_is_the_memory_less_the_context_less_the_headroom() -> None:
    gpu = find("rtx-4090")
    assert limit_of(gpu, 10_000 * MIB, 5) == math.floor((10_000 - 512) * MIB * 0.95)
    assert limit_of(gpu, gpu.total_bytes, 0) == gpu.total_bytes - 512 * MIB
    assert limit_of(gpu, 1, 5) == 0


def test_other_gpus_are_told_what_they_hold(workload: Load) -> None:
    job = workload(WIDE.replace("4096", "400_000"))  # about 5 MB a sample
    t4, a100 = find("t4"), find("a100-40gb")
    evidence = Simulation(job, find("rtx-4090")).gather(8, 8, others=(t4, a100))
    assert len(evidence.trials) == 1, "the target fits, yet the others' capacities need a curve"
    assert [capacity.max_micro_batch_size for capacity in evidence.others] == [8, 8]
    evidence = Simulation(job, find("rtx-4090")).gather(None, None, others=(t4, a100))
    held = {capacity.device.slug: capacity.max_micro_batch_size for capacity in evidence.others}
    assert held["t4"] < answer_of(evidence) < held["a100-40gb"]
    assert held["t4"] == answer_of(Simulation(job, t4).gather(None, None))


# The step that is traced


def traced_step(job: Workload, size: int = 32, num_micro_batches: int = 2, precision: str = "32-true") -> Trace:
    return trace_training(Setup(job, precision, (8, 0)), Tensors.FAKE, size, num_micro_batches)


STEP = """
import torch
from torch import nn

NUM_CALLS = []

def build_model():
    return nn.Linear(10, 1000, bias=False)

def build_batch(n):
    return torch.randn(n, 10)

def compute_loss(model, batch):
    NUM_CALLS.append(1)
    return model(batch).exp().sum()

def build_optimizer(model, lr):
    return torch.optim.OPTIMIZER(model.parameters(), lr=lr)
"""
WEIGHT_BYTES = 10 * 1000 * 4


def test_a_trace_is_two_optimizer_steps_of_as_many_micro_batches_as_asked(workload: Load) -> None:
    for num_micro_batches in (1, 2, 3):
        job = workload(STEP.replace("OPTIMIZER", "SGD"))
        sizes = traced_step(job, 32, num_micro_batches).sizes
        assert len(job.module.NUM_CALLS) == 2 * num_micro_batches
        assert sizes.count(32 * 10 * 4) == 2 * num_micro_batches, "each micro-batch is moved to the device"


def test_gradients_stay_under_the_second_micro_batch(workload: Load) -> None:
    job = workload(STEP.replace("OPTIMIZER", "SGD"))
    one, two = (traced_step(job, 32, num_micro_batches).peak_live_bytes for num_micro_batches in (1, 2))
    assert two - one == WEIGHT_BYTES + 4, "and the first micro-batch's loss"


def test_the_optimizers_state_stays_under_the_second_step(workload: Load) -> None:
    peaks = {
        name: traced_step(workload(STEP.replace("OPTIMIZER", name)), 64).peak_live_bytes for name in ("SGD", "AdamW")
    }
    assert peaks["AdamW"] - peaks["SGD"] == 2 * WEIGHT_BYTES, "two moments; the count of steps is the host's"


def test_the_first_micro_batch_and_its_graph_are_gone_before_the_second(workload: Load) -> None:
    job = workload(STEP.replace("OPTIMIZER", "SGD"))
    trace = traced_step(job, 5000)
    activation_bytes, batch_bytes = 5000 * 1000 * 4, 5000 * 10 * 4
    for num_bytes, at_once in ((batch_bytes, 1), (activation_bytes, 3)):
        live = peak = 0
        for event in trace.events:
            live += (trace.sizes[max(event, ~event)] == num_bytes) * (1 if event >= 0 else -1)
            peak = max(peak, live)
        assert peak <= at_once


def test_the_functions_of_train_py_are_what_is_traced(workload: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = step.train_window
    monkeypatch.setattr(step, "train_window", lambda *args: calls.append(args[5:]) or original(*args))
    traced_step(workload(STEP.replace("OPTIMIZER", "SGD")), precision="bf16-mixed")
    assert calls == [("bf16-mixed", None, step.run_micro_batch)] * 2


KINDS_OF_BATCH = """
import collections
import dataclasses
from typing import NamedTuple

import torch
from torch import nn

class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor

@dataclasses.dataclass
class Sample:
    first: torch.Tensor
    name: str

def build_model():
    return nn.Linear(10, 3)

def build_batch(n):
    x = torch.randn(n, 10)
    return BATCH

def compute_loss(model, batch):
    return model(FIRST).square().mean()
"""


@pytest.mark.parametrize(
    ("batch", "first", "num_tensors"),
    [
        ("x", "batch", 1),
        ("[x, x + 1]", "batch[0]", 2),
        ("(x, (x + 1, x + 2))", "batch[1][0]", 3),
        ("{'a': x, 'b': [x + 1]}", "batch['b'][0]", 2),
        ("collections.OrderedDict(a=x)", "batch['a']", 1),
        ("Pair(x, x + 1)", "batch.second", 2),
        ("Sample(x, 'name')", "batch.first", 1),
    ],
)
def test_every_kind_of_batch_is_moved_anew_for_each_micro_batch(
    batch: str, first: str, num_tensors: int, workload: Load
) -> None:
    job = workload(KINDS_OF_BATCH.replace("BATCH", batch).replace("FIRST", first))
    assert traced_step(job, 32, 2).sizes.count(32 * 10 * 4) == num_tensors * 2 * 2


# Code that fake tensors cannot run

MODEL = """
import torch
from torch import nn
from torch.nn import functional

BUILT = []

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 10)
        INIT
        BUILT.append(type(self.first.weight.data).__name__)

    def forward(self, x):
        x = self.first(x)
        FORWARD
        return self.last(x)

def build_model():
    return Model()

def build_batch(n):
    return torch.randn(n, 16), torch.randint(10, (n,))

def compute_loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])
"""


def model_of(forward: str = "pass", init: str = "pass") -> str:
    return MODEL.replace("INIT", init).replace("FORWARD", forward)


READ = "x = x * int(x.sum() > 0)\n        "


@pytest.mark.parametrize(
    ("forward", "precision"),
    [
        ("x = x * 2 if x.sum() > 0 else x + x", "32-true"),
        ("x = x + x[x > 0].mean()", "32-true"),
        ("x = x * x.max().item()", "bf16-mixed"),
        (READ + "x = functional.scaled_dot_product_attention(*[x.view(-1, 2, 4, 8)] * 3).flatten(1)", "bf16-mixed"),
        (READ + "x = nn.LSTM(64, 64)(x[None])[0][0]", "bf16-mixed"),
    ],
    ids=["if", "mask", "item", "attention", "lstm"],
)
def test_a_step_that_reads_values_runs_for_real_at_small_sizes_and_says_so(
    forward: str, precision: str, workload: Load
) -> None:
    probe = Probe(workload(model_of(forward)), precision=precision)
    evidence = probe.gather(1000, 1000)
    assert codes(evidence)[0] == "real-steps"
    assert "values" in evidence.notices[0].message
    assert probe.progress[1] == "running small steps for real on the CPU"
    assert {trial.source for trial in evidence.trials} == {"replayed"}
    assert answer_of(evidence) > 100


def test_real_steps_find_what_fake_ones_do(workload: Load) -> None:
    """The same model twice, once with a value read that changes no memory."""
    plain = Probe(workload(model_of()), free_mib=30).gather(None, None)
    reading = Probe(workload(model_of("assert x.sum().item() is not None")), free_mib=30).gather(None, None)
    assert codes(plain) == []
    assert codes(reading) == ["real-steps"]
    assert answer_of(reading) == pytest.approx(answer_of(plain), rel=0.02)


def test_a_model_whose_construction_reads_values_is_built_for_real_and_traced_as_fake(workload: Load) -> None:
    probe = Probe(workload(model_of(init="self.width = int(torch.linspace(1, 8, 4)[-1].item())")))
    assert probe.simulation.recipe().num_parameters == 16 * 64 + 64 + 64 * 10 + 10
    evidence = probe.gather(64, 64)
    assert codes(evidence) == ["built-for-real"]
    assert [trial.source for trial in evidence.trials] == ["traced"]


def test_a_model_too_large_for_this_machine_is_never_built_for_real(
    workload: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    probe = Probe(workload(model_of("x = x * x.max().item()")))
    with pytest.raises(UserCodeError, match="DataDependentOutputException"):
        probe.gather(64, 64)
    assert set(probe.job.module.BUILT) == {"FakeTensor"}


def test_operators_that_change_with_the_batch_are_traced_size_by_size(workload: Load) -> None:
    evidence = Probe(workload(model_of("x = sum(x.roll(i, 0) for i in range(1 + len(x) // 3))"))).gather(24, 12)
    assert codes(evidence) == ["events-differ"]
    assert {trial.source for trial in evidence.trials} == {"traced"}
    assert answer_of(evidence) == 12


QUADRATIC = "wide = x.repeat(32, 1); x = x + (wide @ wide.T).softmax(-1).mean()"


def test_a_size_that_needs_more_than_its_curve_says_is_noticed_even_where_it_fits(workload: Load) -> None:
    evidence = Probe(workload(model_of(QUADRATIC))).gather(None, 16)
    assert codes(evidence) == ["curve-missed"]
    assert answer_of(evidence) == 16


def test_memory_that_bends_with_the_batch_is_traced_size_by_size(workload: Load) -> None:
    evidence = Probe(workload(model_of(QUADRATIC)), free_mib=40).gather(None, 64)
    answer = answer_of(evidence)
    assert codes(evidence) == ["curve-missed"]
    assert {trial.source for trial in evidence.trials} == {"traced"}
    assert 10 < answer < 64
    assert outcomes(evidence)[answer + 1] is False


def test_random_operators_become_a_straight_line_and_are_said_to_be(workload: Load) -> None:
    text = model_of("x = sum(x * 1 for _ in range(len(set(x[:, 0].tolist())) + 1))")
    evidence = Probe(workload(text)).gather(256, 256)
    assert codes(evidence) == ["real-steps", "straight-line"]
    assert answer_of(evidence) > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_model_that_is_a_name_in_the_file_is_left_as_it_is(precision: str, workload: Load) -> None:
    text = WIDE.replace("def build_model():\n    return", "model =").replace("nn.ReLU()", "nn.BatchNorm1d(4096)")
    job = workload(text)
    before = [tensor.clone() for tensor in job.module.model.state_dict().values()]
    evidences = [Probe(job, precision=precision).gather(64, 64) for _ in range(2)]
    assert evidences[0] == evidences[1]
    after = job.module.model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in job.module.model.parameters())


# The user's errors


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        ("x = x[:, :5]", r"model0\.py:\d+: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("x = x + undefined_name", r"model0\.py:\d+: NameError: name 'undefined_name' is not defined"),
        ("x = x * float('nan')", "the loss of the first batch is nan"),
        ("x = x + nn.Embedding(3, 64)(torch.full((len(x),), 7))", r"model0\.py:\d+: IndexError: index out of range"),
        ("raise KeyboardInterrupt", None),
    ],
    ids=["shape", "name", "nan", "index", "ctrl-c"],
)
def test_the_users_error_is_one_message_with_their_line(
    forward: str, message: str | None, workload: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[object] = []  # torch logs what fails on fake tensors, with a traceback
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)
    probe = Probe(workload(model_of(forward)))
    with pytest.raises(KeyboardInterrupt if message is None else UserCodeError, match=message):
        probe.gather(64, 64)
    assert not logged


def test_a_broken_contract_is_said_at_once(workload: Load) -> None:
    probe = Probe(
        workload(model_of().replace("return functional.cross_entropy(model(batch[0]), batch[1])", "return 1, 2"))
    )
    with pytest.raises(UserCodeError, match="compute_loss returned a tuple of 2; yield the losses one by one"):
        probe.gather(64, 64)
    assert probe.progress == ["tracing a micro-batch of 2"]


def test_an_error_at_a_larger_size_only_is_the_users(workload: Load) -> None:
    """After a first trace no other kind of tensors is tried: the code runs on fake ones."""
    probe = Probe(workload(model_of("assert len(x) < 50, 'too many'")))
    with pytest.raises(UserCodeError, match=r"micro-batch of 64 failed .*AssertionError: too many"):
        probe.gather(64, 64)
    assert probe.progress == [f"tracing a micro-batch of {size}" for size in (2, 3, 64)]


# The allocator's settings, and the planned size


def test_a_memory_fraction_is_a_limit(workload: Load) -> None:
    job, total_bytes = workload(WIDE), 2**30
    settings = parse_settings("per_process_memory_fraction:0.08", total_bytes)
    options: dict[str, Any] = {"memory_bytes": total_bytes, "headroom_percent": 0}
    capped = Simulation(job, find("rtx-4060"), **options, settings=settings)
    assert capped.limit_bytes == int(0.08 * total_bytes)
    evidence = capped.gather(None, None)
    assert (
        0 < evidence.largest_fitting < Simulation(job, find("rtx-4060"), **options).gather(None, None).largest_fitting
    )
    with pytest.raises(DoesNotFitError, match="nothing fits"):
        Simulation(job, find("rtx-4060"), **options, settings=parse_settings("per_process_memory_fraction:0.0", 1))


def test_the_planned_size_is_told_what_it_needs_and_what_is_in_memory(workload: Load) -> None:
    probe = Probe(workload(WIDE))
    evidence = probe.gather(4096, 4096)
    planned = probe.simulation.at_size(evidence, 100, 41)
    (trial,) = (trial for trial in planned.trials if trial.micro_batch_size == 100)
    assert trial.fits
    assert trial.required_bytes is not None
    assert trial.required_bytes < evidence.limit_bytes
    assert planned.anatomy is not None
    assert planned.anatomy.micro_batch_size == 100
    assert planned.largest_fitting == evidence.largest_fitting


def test_sparse_gradients_are_said_to_be_missing(workload: Load) -> None:
    text = WIDE.replace("nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4096, 1))", "Model()")
    text = text.replace(
        "def build_model",
        """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 4, sparse=True)

    def forward(self, x):
        return self.table(x.long()[:, 0]).sum(1, keepdim=True)

def build_optimizer(model, lr):
    return torch.optim.SparseAdam(model.parameters(), lr=lr)

def build_model""",
    )
    assert "sparse-gradients" in codes(Probe(workload(text)).gather(64, 64))
