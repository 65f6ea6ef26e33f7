"""Published training scripts on images, statement by statement; each names where it is from.

What a data loader holds in host memory is no part of the trace; a batch is made where it reaches the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from truth_release import Release
from truth_stage import Stage, images, integers

from gradplan.probes.simulator.training import SteadyScaler

NUM_STEPS = 3  # state appears in the first; what the second leaves alive overlaps the third
NUM_VALIDATION_BATCHES = 2
TRANSFORMERS = ("vit", "deit", "beit", "eva")  # of timm: their positions fit one size of image
RENAMED = {"xception": "legacy_xception"}  # timm 0.9 gave the old name to another model
Script = Callable[[Stage], None]
Build = Callable[[], nn.Module]
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Network:
    """A model and the shape of one of its samples: channels, height, width."""

    build: Build
    sample_shape: tuple[int, int, int] = (3, 224, 224)


def torchvision_model(name: str, num_classes: int = 1000) -> Build:
    """Any model of torchvision.models, with another last layer where the classes differ from ImageNet's."""

    def build() -> nn.Module:
        from torchvision import models

        model: nn.Module = models.get_model(name, weights=None)
        if num_classes != 1000:  # as the scripts do it; a Vision Transformer's last layer stands here
            last = model.get_submodule("heads.head")
            model.set_submodule("heads.head", nn.Linear(int(last.in_features), num_classes))  # type: ignore[arg-type]
        return model

    return build


def timm_model(
    name: str,
    release: Release,
    num_classes: int | None = None,
    is_checkpointed: bool = False,
    image_size: int | None = None,
) -> Build:
    """Any model of timm, without the tag of its weights; names of older releases are known."""

    def build() -> nn.Module:
        import timm

        timm.layers.set_fused_attn(release.has_fused_attention)
        known = RENAMED.get(name, name).partition(".")[0]
        options = {} if num_classes is None else {"num_classes": num_classes}
        if image_size is not None and known.startswith(TRANSFORMERS) and timm_sample_shape(name)[1] != image_size:
            options["img_size"] = image_size
        model: nn.Module = timm.create_model(known, **options)
        if is_checkpointed:
            model.set_grad_checkpointing()  # type: ignore[operator]
        return model

    return build


def timm_sample_shape(name: str) -> tuple[int, int, int]:
    """What the model's configuration asks for."""
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(RENAMED.get(name, name).partition(".")[0])
    if config is None:
        raise ValueError(f"timm knows no input size of {name}")
    channels, height, width = config.input_size
    return channels, height, width


def optimizer_of(text: str, release: Release) -> OptimizerOf:
    """The optimizer that a record names: "torch.optim.Adam(lr=5e-5)", "create_optimizer_v2 sgd ... (momentum 0.9)"."""
    name = re.search(r"\b(adamw|adam|sgd|rmsprop|adagrad|adafactor)", text, re.IGNORECASE)
    if name is None:
        raise ValueError(f"no optimizer of torch in {text!r}")
    names = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
    optimizer_class = getattr(torch.optim, names.get(name[1].lower(), "Adafactor"))
    options: dict[str, Any] = {"momentum": 0.9} if "momentum" in text else {}
    if "fused=True" in text:
        options["fused"] = True
    elif not release.has_foreach_by_default:
        options["foreach"] = False

    def build(model: nn.Module) -> torch.optim.Optimizer:
        chosen: torch.optim.Optimizer = optimizer_class(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3, **options
        )
        return chosen

    return build


def gpumemnet_cnn(network: Network, optimizer_for: OptimizerOf, batch_size: int) -> Script:
    """Test_Pipeline/cnn_models/resnet50.py of github.com/itu-rad/GPUMemNet: an epoch, then validation."""

    def script(stage: Stage) -> None:
        model = stage.moved(network.build)
        criterion = nn.CrossEntropyLoss()
        optimizer = optimizer_for(model)
        model.train()
        with stage.stepping(optimizer):
            for _ in range(NUM_STEPS):
                inputs, labels = images(batch_size, *network.sample_shape), integers(batch_size)
                optimizer.zero_grad()
                outputs = _first(model(inputs))
                loss = criterion(outputs, labels)
                loss.backward()
                optimizer.step()
                stage.collect()
        model.eval()
        with torch.no_grad():
            for _ in range(NUM_VALIDATION_BATCHES):
                inputs, labels = images(batch_size, *network.sample_shape), integers(batch_size)
                outputs = model(inputs)
                loss = criterion(outputs, labels)
                _, predicted = torch.max(outputs.data, 1)
                stage.collect()
        del inputs, labels, outputs, loss, predicted

    return script


def timm_training(network: Network, optimizer_for: OptimizerOf, batch_size: int) -> Script:
    """train.py of github.com/huggingface/pytorch-image-models.

    Its loader moves and normalises batches on a stream of its own, whose memory serves no other stream: the bytes
    of one batch, and three batches in float32, the one trained on, the next and the one after it.
    """

    def script(stage: Stage) -> None:
        model = stage.moved(network.build)
        optimizer = optimizer_for(model)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        model.train()
        pixels = torch.empty(batch_size, *network.sample_shape, dtype=torch.uint8)
        batches = [images(batch_size, *network.sample_shape) for _ in range(3)]
        target = integers(batch_size)
        with stage.stepping(optimizer):
            for step in range(NUM_STEPS):
                output = _first(model(batches[step % len(batches)]))
                loss = criterion(output, target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                stage.collect()
        del pixels, batches, target, output, loss

    return script


def timm_benchmark(network: Network, optimizer_for: OptimizerOf, batch_size: int, autocast: bool = True) -> Script:
    """benchmark.py of github.com/huggingface/pytorch-image-models: the backward pass runs inside autocast too."""

    def script(stage: Stage) -> None:
        model = stage.moved(network.build)
        model.train()
        criterion = nn.CrossEntropyLoss()
        optimizer = optimizer_for(model)
        inputs = images(batch_size, *network.sample_shape)
        with stage.stepping(optimizer):
            for _ in range(NUM_STEPS):
                optimizer.zero_grad()
                with _autocast(torch.float16 if autocast else None):
                    output = _first(model(inputs))
                    target = integers(batch_size)
                    criterion(output, target).backward()
                optimizer.step()
                del output, target  # the names end with the step's function
                stage.collect()

    return script


@dataclass(frozen=True)
class Fabric:
    """Lightning Fabric's precision: "32-true", "16-mixed", "bf16-mixed" or "bf16-true"; and its accumulation."""

    precision: str = "32-true"
    num_accumulated: int = 1

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that computations run in, where it is not the parameters'."""
        return {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(self.precision)

    def forward(self, model: nn.Module, features: Tensor) -> Tensor:
        """Inputs and outputs are converted, and autocast ends with the model."""
        if self.precision == "bf16-true":
            features = features.to(torch.bfloat16)
        with _autocast(self.dtype):
            logits: Tensor = model(features)
        return logits.float()


def vit_finetuning(network: Network, optimizer_for: OptimizerOf, batch_size: int, fabric: Fabric) -> Script:
    """01_pytorch-vit.py to 06_sgd-with-scheduler.py of github.com/rasbt/pytorch-memory-optim: an epoch, validation."""

    def script(stage: Stage) -> None:
        is_low = fabric.precision == "bf16-true"
        model = stage.moved(lambda: network.build().to(torch.bfloat16) if is_low else network.build())
        optimizer = optimizer_for(model)
        scaler = SteadyScaler("cpu") if fabric.precision == "16-mixed" else None
        with stage.stepping(optimizer):
            for step in range(NUM_STEPS * fabric.num_accumulated + 1):
                model.train()
                features, targets = images(batch_size, *network.sample_shape), integers(batch_size)
                logits = fabric.forward(model, features)
                loss = functional.cross_entropy(logits, targets)
                if fabric.num_accumulated == 1:
                    optimizer.zero_grad()
                else:
                    loss = loss / fabric.num_accumulated
                (loss if scaler is None else scaler.scale(loss)).backward()
                if step % fabric.num_accumulated == 0:
                    _step(optimizer, scaler)
                    if fabric.num_accumulated > 1:
                        optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    predicted = torch.argmax(logits, 1)
                stage.collect()
        with torch.no_grad():
            for _ in range(NUM_VALIDATION_BATCHES):
                features, targets = images(batch_size, *network.sample_shape), integers(batch_size)
                outputs = fabric.forward(model, features)
                predicted = torch.argmax(outputs, 1)
                stage.collect()
        del features, targets, logits, loss, outputs, predicted

    return script


def low_bit_adam(
    network: Network, optimizer_for: OptimizerOf, batch_size: int, precision: str, validates: bool = True
) -> Script:
    """benchmarks/benchmark_low_bit_adam.py of github.com/pytorch/ao, whose validation runs at the same batch."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

    def loss_of(model: nn.Module) -> Tensor:
        with _autocast(torch.bfloat16 if precision == "bf16-mixed" else None):
            logits = model(images(batch_size, *network.sample_shape, dtype=dtype))
            return functional.cross_entropy(logits, integers(batch_size))

    def script(stage: Stage) -> None:
        model = stage.moved(lambda: network.build().to(dtype))
        optimizer = optimizer_for(model)
        model.train()
        with stage.stepping(optimizer):
            for _ in range(NUM_STEPS):
                loss = loss_of(model)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                stage.collect()
        del loss

    return script


def optimizer_tutorial(network: Network, optimizer_for: OptimizerOf, batch_size: int) -> Script:
    """intermediate_source/optimizer_step_in_backward_tutorial.py of github.com/pytorch/tutorials."""

    def script(stage: Stage) -> None:
        model = stage.moved(network.build)
        optimizer = optimizer_for(model)
        with stage.stepping(optimizer):
            for _ in range(NUM_STEPS):
                image = images(batch_size, *network.sample_shape)
                loss = model(image)
                loss.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                stage.collect()
        del image, loss

    return script


def _step(optimizer: torch.optim.Optimizer, scaler: SteadyScaler | None) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast("cuda", dtype=dtype)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some networks give what their auxiliary heads say as well."""
    return output[0] if isinstance(output, tuple) else output
