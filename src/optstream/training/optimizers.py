"""The optimizers a run can choose from, with their parameter groups and learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Builder = Callable[[torch.nn.Module, float, float], torch.optim.Optimizer]


def decay_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices and embeddings decay, vectors (norms, biases) do not."""
    params = [param for param in module.parameters() if param.requires_grad]
    decayed = [param for param in params if param.ndim >= 2]
    others = [param for param in params if param.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(module: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    groups = decay_groups(module, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


BUILDERS: dict[str, Builder] = {"adamw": build_adamw}

DEFAULT_LR = {"adamw": 2e-3}
"""Peak learning rate from random weights."""

DEFAULT_PRETRAINED_LR = {"adamw": 5e-5}
"""Peak learning rate of a model that was trained before."""
