"""The models behind the published runs, rebuilt offline: no weights, configurations written out by hand.

Sizes are those of the hub's models; every parameter count is checked against the published one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

IMAGE_SIZE = 86
SEQUENCE_LENGTH = 128


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision import models

        model: nn.Module = getattr(models, name)(weights=None)
        return model

    return build


def _mnasnet() -> nn.Module:
    from torchvision.models import MNASNet

    model: nn.Module = MNASNet(alpha=1.0, num_classes=10)
    return model


def _mobilenet_v3(size: str, last_channel: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision.models import mobilenetv3

        settings, _ = mobilenetv3._mobilenet_v3_conf(f"mobilenet_v3_{size}")
        model: nn.Module = mobilenetv3.MobileNetV3(settings, last_channel=last_channel, num_classes=10)
        return model

    return build


def _transformers(model_class: str, config_class: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
        return model.train()

    return build


def _gpt2(**config: Any) -> Callable[[], nn.Module]:
    return _transformers("GPT2LMHeadModel", "GPT2Config", **config)


def _opt(**config: Any) -> Callable[[], nn.Module]:
    return _transformers("OPTForCausalLM", "OPTConfig", **config)


def _t5(**config: Any) -> Callable[[], nn.Module]:
    return _transformers("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, **config)


@dataclass(frozen=True)
class Rebuilt:
    """How to build one model, and which of the two training loops it went through."""

    build: Callable[[], nn.Module]
    family: Literal["CNN", "transformer"]


MODELS: Mapping[str, Rebuilt] = {
    "ConvNeXtBase": Rebuilt(_torchvision("convnext_base"), "CNN"),
    "ConvNeXtTiny": Rebuilt(_torchvision("convnext_tiny"), "CNN"),
    "MnasNet": Rebuilt(_mnasnet, "CNN"),
    "MobeNetV3Large": Rebuilt(_mobilenet_v3("large", 1280), "CNN"),
    "MobeNetV3Small": Rebuilt(_mobilenet_v3("small", 1024), "CNN"),
    "MobileNetV2": Rebuilt(_torchvision("mobilenet_v2"), "CNN"),
    "RegNetX400MF": Rebuilt(_torchvision("regnet_x_400mf"), "CNN"),
    "RegNetY400MF": Rebuilt(_torchvision("regnet_y_400mf"), "CNN"),
    "ResNet101": Rebuilt(_torchvision("resnet101"), "CNN"),
    "ResNet152": Rebuilt(_torchvision("resnet152"), "CNN"),
    "VGG16": Rebuilt(_torchvision("vgg16"), "CNN"),
    "VGG19": Rebuilt(_torchvision("vgg19"), "CNN"),
    "EleutherAI/gpt-neo-125M": Rebuilt(
        _transformers(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            intermediate_size=3072,
            attention_types=[[["global", "local"], 6]],
            max_position_embeddings=2048,
        ),
        "transformer",
    ),
    "T5-small": Rebuilt(_t5(), "transformer"),
    "t5-base": Rebuilt(_t5(d_model=768, d_ff=3072, num_layers=12, num_heads=12), "transformer"),
    "cerebras/Cerebras-GPT-111M": Rebuilt(
        _gpt2(
            n_layer=10,
            n_positions=2048,
            n_inner=3072,
            activation_function="gelu",
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        ),
        "transformer",
    ),
    "distilbert/distilgpt2": Rebuilt(_gpt2(n_layer=6), "transformer"),
    "openai-community/gpt2": Rebuilt(_gpt2(), "transformer"),
    "facebook/opt-125m": Rebuilt(_opt(), "transformer"),
    "facebook/opt-350m": Rebuilt(
        _opt(
            hidden_size=1024,
            num_hidden_layers=24,
            ffn_dim=4096,
            num_attention_heads=16,
            word_embed_proj_dim=512,
            do_layer_norm_before=False,
        ),
        "transformer",
    ),
}


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
