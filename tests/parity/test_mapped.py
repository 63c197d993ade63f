"""The page cache gives the bits of the plain optimizer, with room for the state and without."""

from pathlib import Path

import pytest
import torch

from parity.cases import Case, check_case, torch_cases

CASES = torch_cases("AdamW", "SGD", "Adagrad", "Adafactor", "Muon")


@pytest.mark.parametrize("short", [False, True], ids=["room", "short"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps(
    case: Case,
    dtype: torch.dtype,
    short: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if short:
        monkeypatch.setattr("optstream.stream.page_cache.read_available_bytes", lambda: 0)
    check_case(case, dtype, tmp_path, window="64KiB", store="mapped")


@pytest.mark.parametrize("ram", ["40%", "100%"])
def test_resident_windows(ram: str, tmp_path: Path) -> None:
    for case in CASES:
        check_case(case, torch.bfloat16, tmp_path, window="64KiB", store="mapped", ram=ram)


def test_several_directories(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "AdamW-fused")
    check_case(
        case, torch.float32, [tmp_path / "a", tmp_path / "b"], window="64KiB", store="mapped"
    )
