"""Checkpoints whose state is stored otherwise than the optimizer's, or apart from its weights."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from optstream.checkpoint.manifest import Manifest
from optstream.checkpoint.match import some
from optstream.checkpoint.parts import Held
from optstream.checkpoint.snapshot import Snapshot
from optstream.codecs import CODECS, EXACT, SPLIT
from optstream.distributed.region import Region
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


def report_conversions(
    source: str, manifest: Manifest, specs: Sequence[ParamSpec], regions: Mapping[str, Region]
) -> None:
    """Say which states are stored otherwise than they were.

    Args:
        regions: what this rank keeps of each parameter, by name.
    """
    for (key, old, new), count in Counter(_conversions(manifest, specs, regions)).items():
        how = f"from {old} to {new}" if old != new else f"to other blocks of {new}, rounded again"
        log.warning("%s: %s of %d parameters converted %s", source, key, count, how)


def _conversions(
    manifest: Manifest, specs: Sequence[ParamSpec], regions: Mapping[str, Region]
) -> Iterator[tuple[str, str, str]]:
    for spec in specs:
        stored = manifest.params[spec.name].tensors if spec.name in manifest.params else {}
        for state in spec.states:
            tensor = stored.get(state.key)
            if tensor is None:
                continue
            moved = all(shard.region != regions[spec.name] for shard in tensor.shards)
            if tensor.codec != state.codec or (moved and _rounds_blocks(tensor.codec)):
                yield state.key, tensor.codec, state.codec


def _rounds_blocks(codec: str) -> bool:
    """Tell whether what a value becomes depends on the values around it."""
    exact = codec in (EXACT, SPLIT)
    return not exact and any(part.values > 1 for part in CODECS[codec].parts)
