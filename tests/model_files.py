"""Texts of model.py that several tests load."""

from __future__ import annotations

TWO_LOSSES = """
import torch
from torch import nn

def build_model():
    return nn.ModuleList(nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 1)) for _ in range(2))

def build_batch(n):
    return torch.ones(n, 64)

def compute_loss(model, batch):
    yield model[0](batch).mean()
    yield model[1](batch).mean()
"""
