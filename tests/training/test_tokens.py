"""Tokens and batches: the same in every run, nothing held out is trained on."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
import torch

from optstream.errors import ConfigError
from optstream.training.text import Corpus
from optstream.training.tokens import TokenData, tokenize, train_bpe

TEXTS = ["the drive reads a window and writes a window\n" * 200, "Ünïcode ✓ 数\n" * 20]


def test_vocabulary_is_bounded_by_the_text_and_by_the_limit():
    _, short = train_bpe(TEXTS, 4096)
    assert short <= 384
    long_text = ["".join(f"word{i} " for i in range(200_000))]
    assert train_bpe(long_text, 512)[1] == 512


def test_every_text_can_be_encoded():
    encode, vocab_size = train_bpe(TEXTS, 4096)
    ids = encode(["\x00\x7f never seen: 🙂", ""])
    assert ids[0]
    assert ids[1] == []
    assert max(ids[0]) < vocab_size


def test_two_processes_train_the_same_tokens():
    program = (
        "import hashlib, json, sys; from optstream.training.tokens import train_bpe\n"
        "texts = json.load(sys.stdin); encode, _ = train_bpe(texts, 4096)\n"
        "print(hashlib.sha256(str(encode(texts)).encode()).hexdigest())"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(TEXTS),
        capture_output=True,
        text=True,
        check=True,
    )
    encode, _ = train_bpe(TEXTS, 4096)
    assert child.stdout.strip() == hashlib.sha256(str(encode(TEXTS)).encode()).hexdigest()


@pytest.fixture
def data() -> TokenData:
    return TokenData(torch.arange(1000).int(), torch.arange(5000, 5101).int())


def test_a_batch_depends_on_seed_and_step_alone(data):
    def batch(seed: int, step: int) -> list[list[int]]:
        return data.batch(seed, step, batch_size=4, seq_len=8).tolist()

    torch.manual_seed(1)
    first = batch(0, 3)
    torch.manual_seed(2)
    assert batch(0, 3) == first
    assert batch(0, 4) != first
    assert batch(1, 3) != first
    assert batch(1, 0) != batch(0, 1)


def test_a_batch_is_consecutive_tokens(data):
    batch = data.batch(0, 0, batch_size=4, seq_len=8)
    assert batch.shape == (4, 9)
    assert batch.dtype == torch.int64
    assert (batch.diff() == 1).all()


def test_every_crop_can_be_drawn_and_none_overruns():
    data = TokenData(torch.arange(10).int(), torch.arange(10).int())
    starts = {
        row[0] for i in range(200) for row in data.batch(0, i, batch_size=4, seq_len=7).tolist()
    }
    assert starts == {0, 1, 2}


def test_held_out_crops_are_spread_and_do_not_overlap(data):
    crops = torch.cat(list(data.held_out_batches(40, batch_size=3, seq_len=10)))
    assert crops[:, 0].tolist() == [5000, 5020, 5050, 5070]
    everything = torch.cat(list(data.held_out_batches(10**6, batch_size=3, seq_len=10)))
    assert everything[:, :-1].flatten().tolist() == list(range(5000, 5100))


def test_held_out_crops_of_fewer_tokens_than_a_sequence_are_one(data):
    assert len(list(data.held_out_batches(1, batch_size=3, seq_len=10))) == 1


def encode_letters(texts) -> list[list[int]]:
    return [list(map(ord, text)) for text in texts]


def test_the_shortest_text_that_is_enough():
    data = tokenize(Corpus(["abcdefghi"], ["jklmnopqr"]), encode_letters, seq_len=8)
    assert data.batch(0, 0, batch_size=1, seq_len=8).shape == (1, 9)
    assert len(list(data.held_out_batches(8, batch_size=1, seq_len=8))) == 1


@pytest.mark.parametrize(
    ("train", "held_out", "named"),
    [("abc", "jklmnopqr", "training"), ("abcdefghi", "j", "held-out")],
)
def test_text_that_is_too_short_names_the_part(train, held_out, named):
    with pytest.raises(ConfigError, match=f"the {named} part .* at least 9"):
        tokenize(Corpus([train], [held_out]), encode_letters, seq_len=8)
