"""Shared by all tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Keep workers from fighting over the cores; a test that needs more threads sets them."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
