"""State that a plain optimizer has made is taken over, whatever its rule keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

import optstream
from parity.cases import Case, assert_same_bits, make_params, set_grads, torch_cases


@pytest.mark.parametrize("case", torch_cases(), ids=lambda case: case.name)
def test_wrapped_after_two_steps(case: Case, tmp_path: Path) -> None:
    results = []
    for wrapped in (False, True):
        params = make_params([(30, 20), (7, 3)])
        optimizer = case.make(params)
        for step in range(5):
            if wrapped and step == 2:
                optimizer = optstream.offload(optimizer, tmp_path, store="memory")
            set_grads(params, step)
            optimizer.step()
        results.append(params)
    assert_same_bits(*results)
