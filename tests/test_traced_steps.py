"""Everything that a training step does is traced: checkpoints, frozen parts, copies, hooks, second derivatives.

Sizes are worked out by hand: an fp32 number takes 4 bytes, a layer's activation batch x width of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradplan.probes.simulator.trace import Trace
from gradplan.probes.simulator.tracer import Tracer
from gradplan.probes.simulator.training import Setup, Tensors, trace_training
from gradplan.probes.workload import Workload

Load = Callable[[str], Workload]
A100 = (8, 0)
BATCH, WIDTH, DEPTH = 64, 100, 10
WEIGHT, ACTIVATION = WIDTH * WIDTH * 4, BATCH * WIDTH * 4
WORKSPACES = 2 * 8_519_680
COMMON = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

def build_batch(n):
    return torch.randn(n, 100)

def compute_loss(model, batch):
    return model(batch).square().mean()

def build_optimizer(model, lr):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

def build_model():
    return Model()

def linear(width=100):
    return nn.Linear(100, width, bias=False)

"""


def trace_of(
    workload: Load,
    text: str,
    precision: str = "32-true",
    clip: float | None = None,
    tensors: Tensors | None = None,
    num_micro_batches: int = 1,
    size: int = BATCH,
) -> Trace:
    job = workload(COMMON + text)
    if tensors is None:  # a lazy layer needs a real batch first
        tensors = Tensors.CONVERTED if "Lazy" in text else Tensors.FAKE
    return trace_training(Setup(job, precision, A100, clip), tensors, size, num_micro_batches)


def beyond_workspaces(trace: Trace) -> int:
    return trace.peak_live_bytes - WORKSPACES


CHECKPOINTED = """
class Block(nn.Sequential):
    def __init__(self):
        super().__init__(linear(), nn.Tanh(), linear(), nn.Tanh())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(10)])

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = CALL
        return x
"""
FROZEN = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(*[nn.Sequential(linear(), nn.Tanh()) for _ in range(10)]).requires_grad_(False)
        self.head = linear()

    def forward(self, x):
        return self.head(self.trunk(x))
"""
LORA = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(100, 4, bias=False), nn.Linear(4, 100, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(*[Adapted() for _ in range(5)])
"""
TIED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))
"""
LAZY = """
class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(100, bias=False), nn.Tanh(), nn.LazyLinear(7))
        self(torch.zeros(2, 100))
"""
FUNCTION = """
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0].square() * grad

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return Cube.apply(self.layer(x))
"""
FOURIER = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.filter = linear(), nn.Parameter(torch.ones(51, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(self.layer(x)) * self.filter, n=100)
"""
SPARSE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.layer = nn.Embedding(1000, 100, sparse=True), linear()

    def forward(self, x):
        return self.layer(self.rows(torch.arange(x.size(0), device=x.device)) + x)
"""
SPARSE_PRODUCT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        places = torch.arange(100, device=x.device).expand(2, 100)
        graph = torch.sparse_coo_tensor(places, torch.ones(100, device=x.device), (100, 100))
        return torch.sparse.mm(graph, self.layer(x).t())
"""
PENALTY = """
class Model(nn.Sequential):
    def __init__(self):
        super().__init__(linear(), nn.Tanh(), linear(), nn.Tanh(), linear(1))

def compute_loss(model, batch):
    batch = batch.requires_grad_()
    (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()
"""
AVERAGED = """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, x):
        return self.layer(x)

def build_optimizer(model, lr):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    return optimizer
"""
IN_BACKWARD = """
class Model(nn.Sequential):
    def __init__(self):
        super().__init__(*[linear() for _ in range(10)])

def build_optimizer(model, lr):
    each = {p: torch.optim.SGD([p], lr=lr) for p in model.parameters()}

    def step(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return torch.optim.SGD(model.parameters(), lr=lr)
"""
ATTENTION = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(100, 5, 200, batch_first=True, dropout=DROPOUT)

    def forward(self, x):
        return self.layer(x.unsqueeze(1).expand(-1, 16, -1))
"""
COMPILED = """
class Model(nn.Sequential):
    def __init__(self):
        super().__init__(linear(), nn.Tanh(), linear())

def build_model():
    return torch.compile(Model())
"""
PLAIN_CALL, OLD_CALL = "block(x)", "checkpoint(block, x, use_reentrant=True)"
NEW_CALL = "checkpoint(block, x, use_reentrant=False)"
STEPS = {
    "plain": CHECKPOINTED.replace("CALL", PLAIN_CALL),
    "reentrant checkpoint": CHECKPOINTED.replace("CALL", OLD_CALL),
    "checkpoint": CHECKPOINTED.replace("CALL", NEW_CALL),
    "frozen": FROZEN,
    "lora": LORA,
    "tied": TIED,
    "lazy": LAZY,
    "custom function": FUNCTION,
    "complex": FOURIER,
    "sparse": SPARSE,
    "sparse product": SPARSE_PRODUCT,
    "second derivative": PENALTY,
    "average": AVERAGED,
    "optimizer in backward": IN_BACKWARD,
    "attention": ATTENTION.replace("DROPOUT", "0.0"),
    "dropout": ATTENTION.replace("DROPOUT", "0.1"),
    "compiled": COMPILED,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_fake_step_holds_what_the_real_one_does(name: str, workload: Load) -> None:
    fake = trace_of(workload, STEPS[name])
    real = trace_of(workload, STEPS[name], tensors=Tensors.REAL)
    assert beyond_workspaces(fake) == pytest.approx(beyond_workspaces(real), rel=0.01)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", sorted(set(STEPS) - {"complex", "sparse", "sparse product"}))
def test_every_precision_runs_every_step(name: str, precision: str, workload: Load) -> None:
    full = trace_of(workload, STEPS[name])
    trace = trace_of(workload, STEPS[name], precision, 1.0)
    if precision == "bf16-true" and name not in ("attention", "dropout"):  # flash rounds 16 queries up to 128
        assert 0.4 < beyond_workspaces(trace) / beyond_workspaces(full) < 0.75


# Activation checkpoints


@pytest.mark.parametrize("call", [OLD_CALL, NEW_CALL])
def test_checkpoints_keep_one_activation_for_each_block(call: str, workload: Load) -> None:
    plain, checkpointed = (
        trace_of(workload, CHECKPOINTED.replace("CALL", text), size=16 * BATCH) for text in (PLAIN_CALL, call)
    )
    # Two Tanhs a block are kept, and one where the block is run again; the last block has both either way.
    saved = (plain.peak_live_bytes - checkpointed.peak_live_bytes) / (16 * ACTIVATION)
    assert DEPTH - 2 <= saved <= DEPTH


# Which weights have gradients


def test_a_frozen_trunk_has_no_gradients_and_keeps_no_activations(workload: Load) -> None:
    trace = trace_of(workload, FROZEN)
    assert trace.trained == {"head.weight"}
    assert trace.sizes.count(WEIGHT) == 11 + 2, "the weights, and the head's gradient in each window"
    weights_and_gradient = 12 * WEIGHT
    # At once: batch, the trunk's output, the head's, its square, and the gradients of both.
    assert 0 <= beyond_workspaces(trace) - weights_and_gradient <= 6 * ACTIVATION


def test_adapters_alone_have_gradients(workload: Load) -> None:
    trace = trace_of(workload, LORA)
    assert trace.trained == {f"{index}.{name}.weight" for index in range(5) for name in ("down", "up")}
    assert trace.sizes.count(WEIGHT) == 5
    assert trace.sizes.count(4 * WIDTH * 4) >= 2 * 5 * 2, "adapters and gradients"


def test_tied_weights_count_once(workload: Load) -> None:
    trace = trace_of(workload, TIED)
    in_each_window = 3  # a gradient of each use, and their sum
    assert trace.sizes.count(WEIGHT) == 1 + 2 * in_each_window


def test_a_lazy_layer_has_the_size_of_its_first_batch(workload: Load) -> None:
    assert trace_of(workload, LAZY).sizes[:3] == (WEIGHT, 7 * WIDTH * 4, 7 * 4)


# What backward keeps


def test_a_custom_function_keeps_what_it_saves(workload: Load) -> None:
    trace = trace_of(workload, FUNCTION)
    saved = next(index for index in range(3, len(trace.sizes)) if trace.sizes[index] == ACTIVATION)
    gradient = next(index for index in range(3, len(trace.sizes)) if trace.sizes[index] == WEIGHT)
    assert trace.events.index(saved) < trace.events.index(gradient)


def test_a_spectrum_is_complex(workload: Load) -> None:
    spectrum = BATCH * (WIDTH // 2 + 1) * 8
    assert trace_of(workload, FOURIER).sizes.count(spectrum) >= 2 * 3, "it, its product, their gradients"


def test_a_second_derivative_keeps_the_first_backwards_tensors(workload: Load) -> None:
    once = PENALTY.replace("create_graph=True", "create_graph=False").replace(
        "return (", "return model(batch).mean() + ("
    )
    assert trace_of(workload, PENALTY).peak_live_bytes > trace_of(workload, once).peak_live_bytes + 2 * ACTIVATION


def test_a_sparse_gradient_holds_only_the_rows_of_the_batch(workload: Load) -> None:
    trace = trace_of(workload, SPARSE)
    assert trace.sizes.count(1000 * WIDTH * 4) == 1, "the table alone"


# Copies, hooks


def test_an_average_of_the_weights_is_one_more_copy(workload: Load) -> None:
    without = AVERAGED.replace("    optimizer.register", "    del average\n    0 and optimizer.register")
    more = trace_of(workload, AVERAGED).peak_live_bytes - trace_of(workload, without).peak_live_bytes
    assert WEIGHT <= more <= WEIGHT + ACTIVATION


def test_an_optimizer_in_backward_frees_each_gradient_at_once(workload: Load) -> None:
    trace = trace_of(workload, IN_BACKWARD)
    weights, a_gradient = 10 * WEIGHT, WEIGHT
    assert beyond_workspaces(trace) < weights + 2 * a_gradient + (DEPTH + 4) * ACTIVATION


# Gradients over a window


def test_clipping_holds_no_copy_of_the_gradients(workload: Load) -> None:
    """_foreach_norm and _foreach_mul_ in torch/nn/utils/clip_grad.py: single numbers, then in place."""
    text = IN_BACKWARD.partition("def build_optimizer")[0]
    clipped, plain = trace_of(workload, text, clip=1.0), trace_of(workload, text)
    assert clipped.peak_live_bytes == plain.peak_live_bytes
    assert clipped.sizes.count(4) > plain.sizes.count(4)


@pytest.mark.parametrize("name", ["plain", "tied", "lora"])
def test_accumulation_adds_each_new_gradient_and_drops_it(name: str, workload: Load) -> None:
    one, four = (trace_of(workload, STEPS[name], num_micro_batches=number) for number in (1, 4))
    assert one.peak_live_bytes <= four.peak_live_bytes
    again = trace_of(workload, STEPS[name], num_micro_batches=8)
    assert again.peak_live_bytes == four.peak_live_bytes


def test_the_scaler_of_16_mixed_unscales_in_place(workload: Load) -> None:
    """_amp_foreach_non_finite_check_and_unscale_: torch/amp/grad_scaler.py."""
    text = IN_BACKWARD.partition("def build_optimizer")[0]
    scaled, unscaled = trace_of(workload, text, "16-mixed"), trace_of(workload, text, "bf16-mixed")
    assert scaled.peak_live_bytes == pytest.approx(unscaled.peak_live_bytes, abs=64)


# Attention layers


def test_a_transformers_layer_materialises_no_scores(workload: Load) -> None:
    text = STEPS["dropout"].replace("16, -1)", "48, -1)")
    scores = BATCH * 5 * 48 * 48 * 4
    assert scores not in trace_of(workload, text).sizes


# Libraries' models

LANGUAGE_MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def build_model():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, n_positions=64))

def build_batch(n):
    ids = torch.randint(0, 1000, (n, 64))
    return {"input_ids": ids, "labels": ids}
"""
ADAPTED_LANGUAGE_MODEL = LANGUAGE_MODEL.replace(
    "def build_batch",
    """def build_whole():
    from peft import LoraConfig, get_peft_model
    whole = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, n_positions=64))
    return get_peft_model(whole, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))

build_model = build_whole

def build_batch""",
)
IMAGE_MODEL = """
import timm
import torch

def build_model():
    return timm.create_model("NAME", num_classes=10)

def build_batch(n):
    return torch.randn(n, 3, 224, 224), torch.randint(0, 10, (n,))

def compute_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
DIFFUSION_MODEL = """
import torch
from diffusers import UNet2DModel

def build_model():
    return UNet2DModel(
        sample_size=16, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )

def build_batch(n):
    return torch.randn(n, 3, 16, 16), torch.randint(0, 1000, (n,))

def compute_loss(model, batch):
    return (model(batch[0], batch[1]).sample - batch[0]).square().mean()
"""
LIGHTNING_MODULE = """
import lightning
import torch
from torch import nn

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 10)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def build_model():
    return Module()

def build_batch(n):
    return torch.randn(n, 100), torch.randint(0, 10, (n,))
"""
LIBRARIES = {
    "transformers": ("transformers", LANGUAGE_MODEL),
    "peft": ("peft", ADAPTED_LANGUAGE_MODEL),
    "timm ViT": ("timm", IMAGE_MODEL.replace("NAME", "vit_tiny_patch16_224")),
    "timm ResNet": ("timm", IMAGE_MODEL.replace("NAME", "resnet18")),
    "diffusers": ("diffusers", DIFFUSION_MODEL),
    "lightning": ("lightning", LIGHTNING_MODULE),
}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_models_of_well_known_libraries_run_no_real_step(name: str, precision: str, workload: Load) -> None:
    library, text = LIBRARIES[name]
    pytest.importorskip(library)
    tracer = Tracer(Setup(workload(text), precision, A100), lambda _: None)
    small, large = (tracer.trace(size, 1) for size in (2, 3))
    assert not tracer.is_real
    assert small.events == large.events
    assert sum(small.sizes) < sum(large.sizes)
    assert small.trained
