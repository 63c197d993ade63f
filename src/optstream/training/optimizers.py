"""The optimizers a run can choose from, with their parameter groups and learning rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from optstream.muon import Muon, muon_groups
from optstream.training.config import TrainConfig
from optstream.training.models import SIZES

_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates.

    Attributes:
        lr: of the optimizer.
        adamw_lr: of what Muon leaves to AdamW; the other optimizers do not look at it.
    """

    lr: float
    adamw_lr: float


Builder = Callable[[torch.nn.Module, Rates, float], torch.optim.Optimizer]


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


def build_adamw(
    module: torch.nn.Module, rates: Rates, weight_decay: float
) -> torch.optim.Optimizer:
    """Return torch's fused AdamW."""
    groups = decay_groups(module, weight_decay)
    return torch.optim.AdamW(groups, lr=rates.lr, betas=_BETAS, fused=True)


def build_muon(module: torch.nn.Module, rates: Rates, weight_decay: float) -> torch.optim.Optimizer:
    """Return Muon for the matrices, fused AdamW for embeddings, output head and vectors."""
    groups = muon_groups(
        module,
        lr=rates.lr,
        adamw_lr=rates.adamw_lr,
        weight_decay=weight_decay,
        adamw_weight_decay=weight_decay,
    )
    # torch's loop over parameters is about ten times slower than the fused kernel on a CPU
    return Muon(groups, betas=_BETAS, fused=True)


BUILDERS: dict[str, Builder] = {"muon": build_muon, "adamw": build_adamw}

_RATES = {"muon": Rates(2e-2, 2e-3), "adamw": Rates(2e-3, 2e-3)}
"""From random weights."""

_PRETRAINED_RATES = {"muon": Rates(1e-3, 5e-5), "adamw": Rates(5e-5, 5e-5)}
"""Of a model that was trained before."""


def peak_rates(config: TrainConfig) -> Rates:
    """Return a run's learning rates: those it gives, defaults for its optimizer and model else."""
    default = (_RATES if config.model in SIZES else _PRETRAINED_RATES)[config.optimizer]
    return Rates(config.lr or default.lr, config.adamw_lr or default.adamw_lr)
