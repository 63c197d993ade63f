"""Text to tokens, and tokens to batches that depend only on the seed and the step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from optstream.errors import ConfigError
from optstream.training.text import Corpus

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Token ids of each of several texts."""

_BYTES_PER_VOCABULARY_ENTRY = 1024
_SMALLEST_VOCABULARY = 384


def train_bpe(texts: Sequence[str], max_vocab_size: int) -> tuple[Encode, int]:
    """Train a byte-level BPE on texts; the same texts give the same tokens, run after run.

    Args:
        texts: what to learn the merges from; anything can be encoded afterwards.
        max_vocab_size: at most so many entries, fewer for less than 1024 bytes of text an entry.

    Returns:
        The encoder and the size of its vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    num_bytes = sum(len(text) for text in texts)
    vocab_size = max(_SMALLEST_VOCABULARY, num_bytes // _BYTES_PER_VOCABULARY_ENTRY)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, max_vocab_size),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]

    return encode, tokenizer.get_vocab_size()


@dataclass(frozen=True)
class TokenData:
    """Training and held-out tokens, each one sequence, int32."""

    train: torch.Tensor
    held_out: torch.Tensor

    def batch(self, seed: int, step: int, *, batch_size: int, seq_len: int) -> torch.Tensor:
        """Return random crops of the training tokens, int64 [batch_size, seq_len + 1].

        A function of its arguments alone, so a run that starts at step k sees the batches that
        the uninterrupted run sees.
        """
        # not torch.Generator: on the CPU it looks at 32 bits of its seed
        generator = random.Random(f"batch {seed} {step}")
        num_starts = len(self.train) - seq_len
        starts = [generator.randrange(num_starts) for _ in range(batch_size)]
        return _crops(self.train, starts, seq_len)

    def held_out_batches(
        self, num_tokens: int, *, batch_size: int, seq_len: int
    ) -> Iterator[torch.Tensor]:
        """Yield evenly spaced crops, int64 [<= batch_size, seq_len + 1], of about `num_tokens`."""
        available = (len(self.held_out) - 1) // seq_len
        num_crops = min(available, max(1, num_tokens // seq_len))
        starts = [i * available // num_crops * seq_len for i in range(num_crops)]
        for first in range(0, num_crops, batch_size):
            yield _crops(self.held_out, starts[first : first + batch_size], seq_len)


def tokenize(corpus: Corpus, encode: Encode, *, seq_len: int) -> TokenData:
    """Encode a corpus.

    Raises:
        ConfigError: too short for one sequence to train on and one to measure on.
    """
    data = TokenData(_concatenate(encode(corpus.train)), _concatenate(encode(corpus.held_out)))
    for part, tokens in (("training", data.train), ("held-out", data.held_out)):
        if len(tokens) <= seq_len:
            raise ConfigError(
                f"the {part} part of the text has {len(tokens)} tokens, --seq-len {seq_len} needs "
                f"at least {seq_len + 1}; give more text or a smaller --seq-len"
            )
    return data


def _crops(tokens: torch.Tensor, starts: Sequence[int], seq_len: int) -> torch.Tensor:
    return torch.stack([tokens[start : start + seq_len + 1] for start in starts]).long()


def _concatenate(ids: list[list[int]]) -> torch.Tensor:
    parts = [torch.tensor(part, dtype=torch.int32) for part in ids]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
