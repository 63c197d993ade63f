"""What a training checkpoint says about its run: a JSON file that holds its own digest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

import optstream
from optstream.checkpoint.values import decode, encode
from optstream.errors import CheckpointError, FormatError
from optstream.training.config import TrainConfig
from optstream.training.models import SIZES
from optstream.training.optimizers import Rates
from optstream.training.tokens import TokenData

FORMAT = "optstream train"
VERSION = 1
_FREE = ("steps", "text", "codec")
"""What a resumed run may change: the schedule's length, where the text is, how state is stored."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """A run after a step, without its weights and the optimizer's state."""

    step: int
    settings: dict[str, Any]
    """Fields of TrainConfig that make the run what it is, learning rates resolved."""
    tokens: str
    """Identity of the training and held-out tokens, so of text and tokenizer."""
    loss_before: float
    """Held-out loss before the first step."""
    rng: torch.Tensor
    """State of torch's generator, which dropout draws from; uint8."""
    weights_xxh3: str
    versions: dict[str, str]

    def to_json(self) -> bytes:
        """Return the file's bytes."""
        body = json.dumps({**asdict(self), "rng": encode(self.rng, "rng")})
        digest = xxhash.xxh3_64_hexdigest(body.encode())
        head = {"format": FORMAT, "version": VERSION, "xxh3": digest}
        return (json.dumps(head)[:-1] + ', "body": ' + body + "}\n").encode()


def read_trainer_state(path: Path) -> TrainerState:
    """Read a trainer's file, believing nothing unchecked.

    Raises:
        CheckpointError: it cannot be read.
        FormatError: damaged, another program's, or a newer version's.
    """
    try:
        text = path.read_bytes().decode()
        document = json.loads(text)
        version = document["version"] if document["format"] == FORMAT else None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} is no file of optstream train: {error!r}") from error
    if type(version) is not int or version < 1:
        raise FormatError(f"{path} is no file of optstream train: version {version!r}")
    if version > VERSION:
        raise FormatError(f"{path} has version {version}, this reads {VERSION}; update optstream")
    body = text.split(', "body": ', 1)[-1].rstrip()[:-1]
    if xxhash.xxh3_64_hexdigest(body.encode()) != document.get("xxh3"):
        raise FormatError(f"{path} was changed after it was written: its digest does not fit")
    try:
        values = document["body"]
        state = TrainerState(**{**values, "rng": decode(values["rng"], str(path))})
        _check(state)
        return state
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is malformed: {error!r}") from error


def _check(state: TrainerState) -> None:
    kinds = {
        "step": int,
        "settings": dict,
        "tokens": str,
        "loss_before": int | float,
        "rng": torch.Tensor,
        "weights_xxh3": str,
        "versions": dict,
    }
    wrong = [name for name, kind in kinds.items() if not isinstance(getattr(state, name), kind)]
    if wrong or isinstance(state.step, bool) or state.step < 0:
        raise ValueError(f"{wrong[0] if wrong else 'step'} cannot be what it says")


def versions() -> dict[str, str]:
    """Return the versions that wrote a checkpoint."""
    return {"optstream": optstream.__version__, "torch": torch.__version__}


def settings(config: TrainConfig, rates: Rates) -> dict[str, Any]:
    """Return what has to be equal when a run goes on, and what `--resume` fills in.

    Args:
        config: of the run.
        rates: its peak learning rates, defaults resolved.
    """
    is_directory = config.model not in SIZES and Path(config.model).is_dir()
    return {
        "text": [str(path.absolute()) for path in config.text],
        "model": str(Path(config.model).absolute()) if is_directory else config.model,
        "optimizer": config.optimizer,
        "lr": rates.lr,
        "adamw_lr": rates.adamw_lr if config.optimizer == "muon" else None,
        "weight_decay": config.weight_decay,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "eval_tokens": config.eval_tokens,
        "dtype": config.dtype,
        "seed": config.seed,
        "codec": config.codec,
    }


def check_settings(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise CheckpointError unless a run with these settings is the run that was saved."""
    for name, value in wanted.items():
        before = saved.get(name)
        # a directory may have moved: its weights are compared, not its name
        moved = name == "model" and all(Path(str(m)).is_absolute() for m in (before, value))
        if name in _FREE or before == value or moved:
            continue
        flag = "--" + name.replace("_", "-")
        raise CheckpointError(
            f"{path} was saved with {flag} {before}, this run has {flag} {value}; leave {flag} "
            "out, or start anew without --resume"
        )


def token_identity(data: TokenData) -> str:
    """Return counts and digest of the tokens; equal text and tokenizer give an equal one."""
    digest = xxhash.xxh3_64()
    for part in (data.train, data.held_out):
        digest.update(part.numpy().tobytes())
    return f"{len(data.train)} + {len(data.held_out)} tokens, xxh3 {digest.hexdigest()}"


def check_tokens(path: Path, saved: str, wanted: str) -> None:
    """Raise CheckpointError unless a run sees the tokens that the saved run saw."""
    if saved != wanted:
        raise CheckpointError(
            f"{path} was trained on {saved}, this text and tokenizer give {wanted}; give the "
            "--text that it was trained on"
        )
