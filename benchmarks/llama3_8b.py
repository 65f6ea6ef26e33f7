"""Llama 3 8B by Hugging Face's configuration class, at 2048 tokens: to be probed, without memory for its weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH_SIZE = 64
LEARNING_RATE = 1e-5
LENGTH = 2048


def build_model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
    )


def build_batch(batch_size):
    tokens = torch.zeros(batch_size, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def build_optimizer(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)
