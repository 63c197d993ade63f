"""The fake store in place of a drive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import optstream.store
from stream.fake import FakeStore


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeStore], FakeStore]:
    """Return a function that makes store="fake" open the given store."""

    def install(store: FakeStore) -> FakeStore:
        monkeypatch.setitem(optstream.store._KINDS, "fake", lambda directories: store)
        return store

    return install
