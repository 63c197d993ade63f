"""Who keeps what: balanced on the shapes of real models, and the same wherever it is computed."""

from __future__ import annotations

import math

import pytest

from optstream.distributed.ownership import Cost, assign
from optstream.muon.coefficients import schedule
from optstream.muon.newton_schulz import newton_schulz_flops

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
STEPS = schedule("quintic", 5)
MOMENTUM_AND_MASTER, ADAM_AND_MASTER = 8, 12  # bytes a parameter


def matrix(rows: int, cols: int, count: int = 1) -> Cost:
    flops = newton_schulz_flops(rows, cols, STEPS, gram=False)
    return Cost(count * flops, count * rows * cols * MOMENTUM_AND_MASTER)


def adamw(*shape: int) -> Cost:
    return Cost(0, math.prod(shape) * ADAM_AND_MASTER)


def llama_8b() -> list[Cost]:
    """Hidden 4096, MLP 14336, 32 layers, 8 key-value heads of 128, vocabulary 128256, untied."""
    attention = [matrix(4096, 4096), matrix(1024, 4096), matrix(1024, 4096), matrix(4096, 4096)]
    mlp = [matrix(14336, 4096), matrix(14336, 4096), matrix(4096, 14336)]
    layer = [*attention, *mlp, adamw(4096), adamw(4096)]
    return [adamw(128256, 4096), *layer * 32, adamw(4096), adamw(128256, 4096)]


def qwen3_30b_a3b(*, fused: bool) -> list[Cost]:
    """Hidden 2048, 48 layers of 128 experts of 768, vocabulary 151936, untied.

    Args:
        fused: the experts of a layer are two parameters, else three each.
    """
    attention = [matrix(4096, 2048), matrix(512, 2048), matrix(512, 2048), matrix(2048, 4096)]
    rest = [adamw(128), adamw(128), adamw(2048), adamw(2048), adamw(128, 2048)]
    expert = [matrix(768, 2048), matrix(768, 2048), matrix(2048, 768)]
    experts = [matrix(768, 2048, 256), matrix(2048, 768, 128)] if fused else expert * 128
    return [
        adamw(151936, 2048),
        *[*attention, *experts, *rest] * 48,
        adamw(2048),
        adamw(151936, 2048),
    ]


def loads(costs: list[Cost], size: int) -> list[Cost]:
    found = [Cost(0, 0)] * size
    for cost, owner in zip(costs, assign(costs, found), strict=True):
        found[owner] += cost
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "costs",
    [llama_8b(), qwen3_30b_a3b(fused=True), qwen3_30b_a3b(fused=False)],
    ids=["llama-8b", "qwen3-30b-a3b", "qwen3-30b-a3b-apart"],
)
def test_the_bound(costs: list[Cost], size: int) -> None:
    found = loads(costs, size)
    for kind in ("flops", "num_bytes"):
        most = max(getattr(load, kind) for load in found)
        mean = sum(getattr(cost, kind) for cost in costs) / size
        largest = max(getattr(cost, kind) for cost in costs)
        assert most <= 1.3 * max(mean, largest), kind
        if size <= 8:
            assert most <= 1.15 * mean, kind


def test_what_is_there_already_counts() -> None:
    there = [Cost(0, 100), Cost(0, 0)]
    assert assign([Cost(0, 40), Cost(0, 30), Cost(0, 20)], there) == [1, 1, 1]


def test_ties_go_to_the_lowest_rank_and_everybody_gets_something() -> None:
    assert assign([Cost(0, 8)] * 4, [Cost(0, 0)] * 3) == [0, 1, 2, 0]
    assert sorted(assign([Cost(0, 0)] * 2, [Cost(0, 0)] * 3)) == [0, 0]


def test_both_kinds_of_cost_are_balanced() -> None:
    """Matrices alone on one rank and embeddings on the other would balance neither."""
    costs = [Cost(100, 10)] * 4 + [Cost(0, 100)] * 4
    for load in loads(costs, 2):
        assert load == Cost(200, 220)
