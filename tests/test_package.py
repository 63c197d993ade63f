"""The package as installed."""

import optstream


def test_version_is_a_development_version() -> None:
    assert optstream.__version__.startswith("0.1.0")
