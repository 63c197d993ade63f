"""Models without data, on torch's meta device: from a number of parameters, or a `config.json`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optstream.errors import ConfigError
from optstream.training.packages import require_modules

_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(?:[eE]\+?([0-9]{1,2}))?([KMBT]?)")
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MAX_PARAMS = 10**14
_VOCAB_SIZE = 32768
_HEAD_SIZE = 128
_MATRICES_PER_LAYER = 12  # of hidden x hidden elements in a decoder: 4 of attention, 8 of the MLP
CONFIG = "config.json"


@dataclass(frozen=True)
class ModelShape:
    """A model on the meta device.

    Attributes:
        text: what it is, in words.
    """

    module: nn.Module
    text: str

    @property
    def num_params(self) -> int:
        return sum(param.numel() for param in self.module.parameters())

    @property
    def num_bytes(self) -> int:
        return sum(param.numel() * param.element_size() for param in self.module.parameters())


def read_model(model: str, dtype: torch.dtype) -> ModelShape:
    """Return the model that MODEL names, its parameters in a dtype.

    Args:
        model: a number of parameters ("7B", "30.5e9"), a transformers `config.json`, or the
            directory of a model that has one.

    Raises:
        ConfigError: none of these, or a config that transformers cannot build.
        MissingPackageError: a config, and transformers is not installed.
    """
    num_params = parse_count(model)
    if num_params is not None:
        return _decoder(num_params, dtype)
    path = Path(model)
    try:
        path = path / CONFIG if path.is_dir() else path
        is_file = path.is_file()
    except OSError:  # a name that is too long
        is_file = False
    if not is_file:
        raise ConfigError(
            f"model {model} is no number of parameters, and {path} is not there; give a number "
            f'such as "7B", a {CONFIG}, or the directory of a model that has one'
        )
    module = _from_config(path).to(dtype)
    return ModelShape(module, f"{type(module).__name__} of {path}")


def parse_count(text: str) -> int | None:
    """Return a number of parameters as people write them; None if it is none.

    Raises:
        ConfigError: not a whole number of them, or none or too many to be a model.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        return None
    count = Fraction(match[1]) * 10 ** int(match[2] or 0) * _FACTORS[match[3]]
    if count.denominator != 1 or not 1 <= count <= _MAX_PARAMS:
        raise ConfigError(f"{text} is not a whole number of parameters from 1 to {_MAX_PARAMS:.0e}")
    return int(count)


def _decoder(num_params: int, dtype: torch.dtype) -> ModelShape:
    """Return a stand-in with exactly so many parameters, of the shapes of a usual decoder.

    12 square matrices a layer, 128 units of width for each layer, an embedding and an output head
    that are at most half of it all.
    """
    width = _HEAD_SIZE * max(
        1, round((num_params / (_MATRICES_PER_LAYER * _HEAD_SIZE**2)) ** (1 / 3))
    )
    vocab_size = min(_VOCAB_SIZE, num_params // (4 * width))
    num_matrices, rest = divmod(num_params - 2 * vocab_size * width, width * width)
    with torch.device("meta"):
        matrices = [nn.Linear(width, width, bias=False) for _ in range(num_matrices)]
        module = nn.Module()
        if vocab_size:
            module.embed = nn.Embedding(vocab_size, width)
        module.layers = nn.ModuleList(matrices)
        if rest >= width:
            module.last = nn.Linear(width, rest // width, bias=False)
        if rest % width:
            module.gain = nn.Parameter(torch.empty(rest % width))
        if vocab_size:
            module.lm_head = nn.Linear(width, vocab_size, bias=False)
    text = f"a decoder of width {width}, {num_matrices} square matrices, vocabulary {vocab_size}"
    return ModelShape(module.to(dtype), f"{text} (assumed)")


def _from_config(path: Path) -> nn.Module:
    require_modules(("transformers",), extra="train", what="a model's config.json")
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        # left open, code that a config names is asked for on the terminal
        config: Any = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        config._attn_implementation = "eager"  # what it names may need a package or a device
        with torch.device("meta"):
            module: nn.Module = _model_class(config)(config)
    except Exception as error:
        text = textwrap.shorten(str(error), 240).rstrip(".") or type(error).__name__
        raise ConfigError(
            f"transformers builds no model of {path}: {text}; give a number of parameters instead"
        ) from error
    return module


def _model_class(config: Any) -> Any:
    """Return what builds the model that a config was saved with, a causal language model else."""
    import transformers

    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is not None:
            return kind
    return transformers.AutoModelForCausalLM.from_config
