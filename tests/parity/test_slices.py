"""Elementwise rules give the same bits on flat slices as on the whole, which `plan` relies on.

The boundaries are multiples of `SLICE_ALIGNMENT` elements; tensors are larger than the 32768
elements from which torch splits an operation over its threads.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import optstream
from optstream.plan import SLICE_ALIGNMENT
from optstream.streamed.params import Describer
from parity.cases import (
    Case,
    assert_same_bits,
    make_params,
    reference,
    set_grads,
    torch_cases,
    train,
)

ELEMENTWISE = [
    case for case in torch_cases() if case.cls not in (torch.optim.Adafactor, torch.optim.Muon)
]


def whole_and_sliced(
    case: Case, dtype: torch.dtype, cuts: list[int], numel: int
) -> tuple[list[Tensor], list[Tensor]]:
    whole = make_params([(numel,)], dtype)
    copy = whole[0].detach().clone()
    slices = [nn.Parameter(part) for part in copy.tensor_split(cuts)]
    plain, sliced = case.make(whole), case.make(slices)
    for step in range(2):
        set_grads(whole, step)
        assert whole[0].grad is not None
        for part, grad in zip(slices, whole[0].grad.tensor_split(cuts), strict=True):
            part.grad = grad.clone()
        plain.step()
        sliced.step()
    return [whole[0].detach()], [copy]


@pytest.mark.parametrize(
    ("dtype", "num_threads"),
    [(torch.float32, 1), (torch.float32, 2), (torch.float64, 2), (torch.complex64, 1)],
    ids=str,
)
@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_slices_have_the_bits_of_the_whole(
    case: Case, dtype: torch.dtype, num_threads: int
) -> None:
    if dtype.is_complex and ("fused" in case.name or case.name.startswith("Rprop")):
        pytest.skip("torch has no complex form of it")
    torch.set_num_threads(num_threads)
    rng = random.Random(f"{case} {dtype} {num_threads}")
    cuts = [SLICE_ALIGNMENT * cut for cut in sorted(rng.sample(range(1, 17), 4))]
    assert_same_bits(*whole_and_sliced(case, dtype, cuts, rng.randrange(70_000, 130_000)))


def differs(case: Case, dtype: torch.dtype, cuts: list[int], numel: int) -> bool:
    whole, sliced = whole_and_sliced(case, dtype, cuts, numel)
    return not torch.equal(whole[0], sliced[0])


def test_an_odd_boundary_changes_bits() -> None:
    case = next(case for case in ELEMENTWISE if case.name == "AdamW-fused")
    cuts = [sorted(random.Random(seed).sample(range(1, 60_000), 12)) for seed in range(12)]
    assert any(differs(case, torch.float32, odd, 60_000) for odd in cuts)


def test_bfloat16_itself_is_not_sliced_because_its_bits_would_change() -> None:
    torch.set_num_threads(2)
    case = next(case for case in ELEMENTWISE if case.name == "RMSprop-centered-momentum-for")
    numels = (70_001, 80_003, 90_005)
    assert any(differs(case, torch.bfloat16, [SLICE_ALIGNMENT * 9], numel) for numel in numels)
    for case in ELEMENTWISE:
        optimizer = case.make(make_params([(300, 300)], torch.bfloat16))
        describer = Describer(optimizer, master_weights=False)
        assert not describer.describe("embedding", 0, 0).elementwise
        describer = Describer(optimizer, master_weights=True)
        assert describer.describe("embedding", 0, 0).elementwise


@pytest.mark.parametrize("name", ["Adafactor-for", "Muon"])
def test_rules_that_need_the_matrix_get_it_whole(name: str) -> None:
    case = next(case for case in torch_cases() if case.name == name)
    describer = Describer(case.make(make_params([(300, 300)])), master_weights=True)
    assert not describer.describe("embedding", 0, 0).elementwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_huge_embedding_obeys_the_window(dtype: torch.dtype, tmp_path: Path) -> None:
    case = Case("AdamW-huge", torch.optim.AdamW, {"foreach": True}, ((30_011, 43), (5,)))
    window_bytes = 1 << 20
    params = make_params(case.shapes, dtype)
    with optstream.offload(case.make(params), tmp_path, window=window_bytes) as optimizer:
        plan = optimizer.plan
        assert plan.state_bytes > 9 * window_bytes
        assert all(window.state_bytes <= window_bytes for window in plan.windows)
        assert all(window.data_bytes <= window_bytes for window in plan.windows)
        pieces = [piece for window in plan.windows for piece in window.pieces]
        assert all(piece.start % SLICE_ALIGNMENT == 0 for piece in pieces)
        train(params, optimizer)
    assert_same_bits(params, reference(case, dtype))
