"""All codecs by name."""

from __future__ import annotations

from optstream.codecs.base import Codec
from optstream.codecs.bf16 import Bf16, StochasticBf16
from optstream.codecs.int8 import Int8
from optstream.codecs.split import Split

EXACT = "exact"
"""The values themselves: no codec at all, and no copy."""

SPLIT = "split"
"""Of masters; it needs the parameter to decode."""

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (Split(), Bf16(), StochasticBf16(), Int8(signed=True), Int8(signed=False))
}
