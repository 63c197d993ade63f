"""The models by name: their sizes, their seeds, and the pretrained one."""

from __future__ import annotations

import pytest
import torch

from optstream.training.models import SIZES, load_model
from optstream.training.packages import MissingPackageError
from optstream.training.text import read_corpus

TEXTS = ["the drive reads a window and writes a window\n" * 200]


def num_params(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


@pytest.mark.parametrize(
    ("name", "lowest", "highest"), [("tiny", 0.9e6, 1.3e6), ("small", 10e6, 15e6)]
)
def test_sizes_on_the_default_text(name, lowest, highest):
    model = load_model(name, read_corpus([]).train, seq_len=32, seed=0)
    assert lowest < num_params(model.module) < highest
    assert model.module.config.vocab_size == SIZES[name].max_vocab_size
    tokens = torch.tensor(model.encode(["To be, or not to be, that is the question"]))
    assert model.logits(tokens).shape == (1, tokens.shape[1], model.module.config.vocab_size)


def test_a_seed_fixes_the_weights():
    def weights(seed: int) -> torch.Tensor:
        module = load_model("tiny", TEXTS, seq_len=16, seed=seed).module
        return torch.nn.utils.parameters_to_vector(module.parameters())

    first = weights(3)
    torch.rand(1)
    assert torch.equal(weights(3), first)
    assert not torch.equal(weights(4), first)


def test_a_model_sees_no_later_token():
    model = load_model("tiny", TEXTS, seq_len=16, seed=0)
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 8] = 200
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8], after[:, 8])


@pytest.mark.slow
def test_the_pretrained_model_knows_english():
    try:
        model = load_model("smollm2", [], seq_len=32, seed=0)
    except MissingPackageError as error:
        pytest.skip(str(error))
    assert num_params(model.module) == 134_515_008
    ids = model.encode(["The capital of France is Paris", "The capital of France is Sunday"])
    with torch.no_grad():
        scores = model.logits(torch.tensor(ids[0][:-1]).unsqueeze(0))[0, -1]
    assert scores[ids[0][-1]] > scores[ids[1][-1]]
