"""Published training scripts on text, statement by statement; each names where it is from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from truth_decoders import LoraDecoder, Shape, TuneDecoder
from truth_images import OptimizerOf, Script
from truth_stage import Stage, integers

from gradplan.probes.simulator.training import SteadyScaler

NUM_STEPS = 2
CHUNK_LENGTH = 128  # lit-gpt's lm_head_chunk_size
NUM_CHUNKS = 8  # of torchtune's CEWithChunkedOutputLoss
NUM_ACCUMULATED = 4


def lora_finetuning(shape: Shape, optimizer_for: OptimizerOf, batch_size: int, length: int) -> Script:
    """finetune/lora.py of github.com/Lightning-AI/litgpt: the first micro-batch holds the longest sample."""

    def script(stage: Stage) -> None:
        model = stage.moved(lambda: LoraDecoder(shape).to(torch.bfloat16))
        optimizer = optimizer_for(model)
        model.train()
        with stage.stepping(optimizer):
            for _ in range(NUM_STEPS):
                for _ in range(NUM_ACCUMULATED):  # of 32 and more, all alike
                    tokens, targets = integers(batch_size, length), integers(batch_size, length)
                    logits = model(tokens, CHUNK_LENGTH)
                    logits[-1] = logits[-1][..., :-1, :]
                    loss = _chunked_loss(logits, targets[..., 1:])
                    (loss / NUM_ACCUMULATED).backward()
                    stage.collect()
                optimizer.step()
                optimizer.zero_grad()
        del tokens, targets, logits, loss

    return script


def _chunked_loss(logits: list[Tensor], targets: Tensor) -> Tensor:
    flat = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    split = [chunk.reshape(-1) for chunk in targets.split(logits[0].size(1), dim=1)]
    losses = [
        functional.cross_entropy(chunk, target, ignore_index=-1, reduction="none")
        for chunk, target in zip(flat, split, strict=True)
    ]
    return torch.cat(losses).mean()


@dataclass(frozen=True)
class Recipe:
    """Which of torchtune's savings are on."""

    has_chunked_loss: bool = False
    is_checkpointed: bool = False


def full_finetuning(shape: Shape, optimizer_for: OptimizerOf, batch_size: int, length: int, recipe: Recipe) -> Script:
    """recipes/full_finetune_single_device.py of github.com/pytorch/torchtune, on packed samples."""

    def script(stage: Stage) -> None:
        model = stage.moved(lambda: TuneDecoder(shape, length, recipe.is_checkpointed).to(torch.bfloat16))
        optimizer = optimizer_for(model)
        model.train()
        with stage.stepping(optimizer):
            for _ in range(NUM_STEPS):
                tokens, labels = integers(batch_size, length), integers(batch_size, length)
                mask = torch.empty(batch_size, length, length, dtype=torch.bool)
                positions = integers(batch_size, length)
                hidden = model(tokens, mask, positions)
                labels = torch.hstack((labels[..., 1:], labels[..., :1]))
                loss = _tune_loss(model, hidden, labels, recipe.has_chunked_loss)
                del hidden
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                stage.collect()
        del tokens, labels, mask, positions, loss

    return script


def _tune_loss(model: nn.Module, hidden: Tensor, labels: Tensor, is_chunked: bool) -> Tensor:
    head: Callable[[Tensor], Tensor] = model.logits  # type: ignore[assignment]
    if not is_chunked:
        logits = head(hidden).float()
        return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))
    chunks = [head(chunk) for chunk in hidden.chunk(NUM_CHUNKS, dim=1)]
    flat = [chunk.reshape(-1, chunk.size(-1)) for chunk in chunks]
    targets = [target.reshape(-1) for target in labels.chunk(NUM_CHUNKS, dim=1)]
    total = torch.zeros(())
    for chunk, target in zip(flat, targets, strict=True):
        total = total + functional.cross_entropy(chunk.float(), target, reduction="sum")
    return total / labels.numel()


@dataclass(frozen=True)
class Trainer:
    """transformers' Trainer: its options that a record names."""

    precision: str = "32-true"
    num_accumulated: int = 1
    is_checkpointed: bool = False
    optimizer: str = "adamw"


def bert_large(batch_size: int, length: int, trainer: Trainer) -> Script:
    """docs/source/en/perf_train_gpu_one.mdx of github.com/huggingface/transformers, January 2022.

    Before torch 2.0 ``zero_grad()`` kept the gradients and filled them with zeros.
    """

    def build() -> nn.Module:
        import transformers

        config = transformers.BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        config._attn_implementation = "eager"
        model: nn.Module = transformers.BertForSequenceClassification(config)
        if trainer.is_checkpointed:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        return model

    def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
        if trainer.optimizer == "adafactor":
            import transformers

            chosen: torch.optim.Optimizer = transformers.Adafactor(
                model.parameters(), lr=5e-5, scale_parameter=False, relative_step=False
            )
            return chosen
        return torch.optim.AdamW(model.parameters(), lr=5e-5, foreach=False)

    def script(stage: Stage) -> None:
        model = stage.moved(build)
        optimizer = optimizer_for(model)
        scaler = SteadyScaler("cpu") if trainer.precision == "16-mixed" else None
        model.train()
        with stage.stepping(optimizer):
            for _ in range(NUM_STEPS):
                for _ in range(trainer.num_accumulated):
                    inputs = {"input_ids": integers(batch_size, length), "labels": integers(batch_size)}
                    with torch.autocast("cuda", dtype=torch.float16) if scaler else nullcontext():
                        loss = model(**inputs).loss
                    loss = loss / trainer.num_accumulated
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    stage.collect()
                if scaler is None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
                    optimizer.step()
                else:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad(set_to_none=False)
        del inputs, loss

    return script
