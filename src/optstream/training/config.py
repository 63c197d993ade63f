"""What one training run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Store = Literal["direct", "mapped", "memory", "none"]
Dtype = Literal["float32", "bfloat16"]
STORES: tuple[Store, ...] = ("direct", "mapped", "memory", "none")
STORES_ON_DRIVE: tuple[Store, ...] = ("direct", "mapped")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
OPTIMIZERS = ("muon", "adamw")
CODECS = ("exact", "split", "bf16", "bf16-stochastic", "int8")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every setting of a run; the command's flags are these fields with dashes."""

    text: tuple[Path, ...] = ()
    """Files or folders of UTF-8 text; empty: the plays that come as a package."""
    model: str = "small"
    """`tiny`, `small`, `smollm2`, or the directory of a transformers causal language model."""
    optimizer: str = "muon"
    """One of OPTIMIZERS."""
    lr: float | None = None
    """Peak learning rate; None: the default for this optimizer and model."""
    adamw_lr: float | None = None
    """Peak learning rate of what Muon leaves to AdamW; None: the default for this model."""
    weight_decay: float = 0.1
    """Decoupled weight decay of tensors with two or more dimensions."""
    store: Store = "direct"
    """Where the optimizer's state lives; `none`: the plain optimizer, not wrapped at all."""
    state_dir: Path | None = None
    """Directory on a drive for the state; None where the store needs none."""
    window_bytes: int = 64 * 2**20
    """State that is in memory together, at most, bytes."""
    ram: int | str = 0
    """State that stays in memory between steps: bytes, "8GiB", "25%" of the state, or "auto"."""
    codec: str = "exact"
    """How the state is stored; one of CODECS. The seed is that of random rounding, too."""
    steps: int = 100
    batch_size: int = 16
    """Sequences a step."""
    seq_len: int = 128
    """Tokens a sequence."""
    eval_tokens: int = 16384
    """Held-out tokens the loss is measured on, before and after."""
    dtype: Dtype = "float32"
    """Of the parameters; with bfloat16 the optimizer updates float32 masters."""
    seed: int = 0
    """Fixes initialisation, batches and everything else that is random."""
    save_dir: Path | None = None
    """Directory that checkpoints are made in, the last one at the end; None: none are made."""
    save_every: int | None = None
    """Steps between checkpoints; None: one at the end."""
    keep: int | None = None
    """Checkpoints that are left, the newest ones; None: all."""
    resume: Path | None = None
    """A checkpoint to go on from, or a directory whose newest is taken."""
    metrics: Path | None = None
    """JSONL file that gets a line a step, appended."""
