"""Every torch optimizer that can be offloaded gives the bits of the plain one."""

from pathlib import Path

import pytest
import torch

from parity.cases import PLACES, Case, check_case, torch_cases


@pytest.mark.parametrize(("store", "window"), PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", torch_cases(), ids=str)
def test_ten_steps(case: Case, dtype: torch.dtype, store: str, window: str, tmp_path: Path) -> None:
    check_case(case, dtype, tmp_path, window=window, store=store)


@pytest.mark.parametrize("case", torch_cases("AdamW", "SGD", "Muon"), ids=str)
def test_float16(case: Case, tmp_path: Path) -> None:
    check_case(case, torch.float16, tmp_path, window="64KiB")


@pytest.mark.parametrize("case", torch_cases("AdamW", "SGD", "RMSprop", "Adafactor"), ids=str)
def test_several_directories(case: Case, tmp_path: Path) -> None:
    check_case(case, torch.float32, [tmp_path / "a", tmp_path / "b"], window="64KiB")
