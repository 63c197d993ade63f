"""Checkpoints whose state is stored otherwise than the optimizer's, or apart from its weights."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from optstream.checkpoint.manifest import Manifest
from optstream.checkpoint.match import some
from optstream.checkpoint.parts import Held
from optstream.checkpoint.snapshot import Snapshot
from optstream.errors import CheckpointError
from optstream.plan import ParamSpec

log = logging.getLogger("optstream")


def check_weights(
    source: str, snapshot: Snapshot, weights: Iterable[tuple[str, Held]], strict: bool
) -> None:
    """Hold split masters against the model's weights, by digest.

    Args:
        weights: with their names, as they are now.
        strict: else masters that do not fit are taken from the weights, with a warning.

    Raises:
        CheckpointError: names the first parameters that are not those the checkpoint was made with.
    """
    params = snapshot.manifest.params
    wrong = [
        repr(name)
        for name, weight in weights
        if name in params and not snapshot.is_of(name, weight)
    ]
    if not wrong:
        return
    text = f"the masters in {source} are split from other weights than the model has: {some(wrong)}"
    if strict:
        raise CheckpointError(
            f"{text}; load the weights that were saved with it first, or use strict=False to take "
            "these masters from the weights as they are"
        )
    log.warning("%s; they follow the weights because strict=False", text)


def report_conversions(source: str, manifest: Manifest, specs: Sequence[ParamSpec]) -> None:
    """Say which states are stored otherwise than they were."""
    for (key, old, new), count in Counter(_conversions(manifest, specs)).items():
        log.warning("%s: %s of %d parameters converted from %s to %s", source, key, count, old, new)


def _conversions(manifest: Manifest, specs: Sequence[ParamSpec]) -> Iterator[tuple[str, str, str]]:
    for spec in specs:
        stored = manifest.params[spec.name].tensors if spec.name in manifest.params else {}
        for state in spec.states:
            if state.key in stored and stored[state.key].codec != state.codec:
                yield state.key, stored[state.key].codec, state.codec
