"""Which rows a rule gives to which matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optstream.errors import ConfigError
from optstream.muon.splits import as_rule, block_shapes, blocks


def matrices(tensor: Tensor, split: Any, transposed: bool = False) -> list[Tensor]:
    return [
        view.flatten(4).flatten(2, 3)[i, j]
        for view in blocks(tensor, split, transposed)
        for i in range(view.shape[0])
        for j in range(view.shape[1])
    ]


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(
        torch.equal(a, b) for a, b in zip(actual, expected, strict=True)
    )


W = torch.arange(24 * 3).view(24, 3)


def test_whole_equal_and_rows() -> None:
    assert same(matrices(W, None), [W])
    assert same(matrices(W, ("equal", 3)), [W[:8], W[8:16], W[16:]])
    assert same(matrices(W, ("rows", (16, 4, 3, 1))), [W[:16], W[16:20], W[20:23], W[23:]])


def test_gated_attention_with_unequal_parts() -> None:
    shape = (2048 + 2048 + 256 + 256, 16)
    assert block_shapes(shape, ("rows", (2048, 2048, 256, 256))) == [
        (1, 2048, 16),
        (1, 2048, 16),
        (1, 256, 16),
        (1, 256, 16),
    ]


def test_grouped_is_the_interleaved_qkv_of_megatron() -> None:
    # 3 groups of [2 query heads, key, value], heads of 2 rows: build it head by head
    q, k, v = (torch.randn(n, 3) for n in (12, 6, 6))
    fused = torch.cat(
        [
            rows
            for g in range(3)
            for rows in (q[4 * g : 4 * g + 4], k[2 * g : 2 * g + 2], v[2 * g : 2 * g + 2])
        ]
    )
    assert same(matrices(fused, ("grouped", 3, (4, 2, 2))), [q, k, v])
    gate_up = torch.stack([q, q + 1], dim=1).flatten(0, 1)  # gate0, up0, gate1, up1, ...
    assert same(matrices(gate_up, ("grouped", 12, (1, 1))), [q, q + 1])


def test_stacks() -> None:
    experts = torch.randn(3, 8, 5)
    halves = [half for expert in experts for half in (expert[:4], expert[4:])]
    assert same(matrices(experts, ("stack",)), list(experts))
    assert same(matrices(experts, ("stack", ("equal", 2))), halves)
    assert same(
        matrices(experts, ("stack", ("rows", (6, 2)))),
        [*experts[:, :6], *experts[:, 6:]],
    )
    stored = experts.mT.contiguous()
    assert same(matrices(stored, ("stack", ("equal", 2)), transposed=True), halves)


def test_transposed_storage_cuts_columns() -> None:
    stored = W.T.contiguous()
    assert same(matrices(stored, ("equal", 3), transposed=True), [W[:8], W[8:16], W[16:]])


def test_flatten_keeps_the_memory_of_a_channels_last_kernel() -> None:
    kernel = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert same(matrices(kernel, ("flatten",)), [kernel.reshape(4, 12)])
    blocks(kernel, ("flatten",))[0].zero_()
    assert not kernel.any()


@pytest.mark.parametrize(
    ("shape", "split", "transposed"),
    [
        ((24, 3), ("equal", 4), False),
        ((24, 3), ("rows", (20, 4)), False),
        ((24, 3), ("grouped", 2, (8, 2, 2)), False),
        ((3, 24), ("grouped", 2, (8, 2, 2)), True),
        ((3, 8, 5), ("stack", ("grouped", 4, (1, 1))), False),
        ((3, 5, 8), ("stack", ("rows", (2, 6))), True),
        ((4, 3, 2, 2), ("flatten",), False),
    ],
)
def test_blocks_are_views_that_cover_every_element_once(
    shape: tuple[int, ...], split: Any, transposed: bool
) -> None:
    tensor = torch.zeros(shape)
    for view in blocks(tensor, split, transposed):
        view += 1
    assert torch.equal(tensor, torch.ones(shape))


@pytest.mark.parametrize(
    ("shape", "split", "transposed"),
    [
        ((24, 3), ("equal", 5), False),
        ((24, 3), ("equal", 2), True),
        ((24, 3), ("rows", (20, 5)), False),
        ((24, 3), ("grouped", 5, (4,)), False),
        ((24, 3), ("stack",), False),
        ((2, 24, 3), None, False),
        ((2, 24, 3), ("equal", 2), False),
        ((2, 24, 3), ("stack", ("equal", 5)), False),
        ((24, 3), ("flatten",), False),
        ((24, 3, 2, 2), ("flatten",), True),
        ((24,), None, False),
    ],
)
def test_a_rule_that_does_not_fit_names_rule_and_shape(
    shape: tuple[int, ...], split: Any, transposed: bool
) -> None:
    with pytest.raises(ConfigError) as error:
        block_shapes(shape, split, transposed)
    assert repr(shape) in str(error.value)
    assert repr(split[1] if split and split[0] == "stack" and split[1:] else split) in str(
        error.value
    )


@pytest.mark.parametrize(
    "split",
    [
        "equal",
        ("equal",),
        ("equal", 0),
        ("equal", 2.0),
        ("rows", ()),
        ("rows", (4, -4)),
        ("rows", 4),
        ("grouped", 2),
        ("stack", ("stack",)),
        ("thirds", 3),
        7,
        ("equal", True),
    ],
)
def test_not_a_rule(split: Any) -> None:
    with pytest.raises(ConfigError, match="is not a rule"):
        as_rule(split)


def test_lists_of_a_json_checkpoint_are_rules_too() -> None:
    assert as_rule(["stack", ["rows", [1, 2]]]) == ("stack", ("rows", (1, 2)))
