"""Codecs: optimizer state in fewer bytes; pure functions of tensors."""

from optstream.codecs.base import Codec, Place, in_memory_order
from optstream.codecs.choice import NAMES, CodecChoice, Setting
from optstream.codecs.coder import Coder, Encoded, coder_bytes
from optstream.codecs.noise import salt
from optstream.codecs.split import fits_parameter
from optstream.codecs.table import CODECS, EXACT, SPLIT

__all__ = [
    "CODECS",
    "EXACT",
    "NAMES",
    "SPLIT",
    "Codec",
    "CodecChoice",
    "Coder",
    "Encoded",
    "Place",
    "Setting",
    "coder_bytes",
    "fits_parameter",
    "in_memory_order",
    "salt",
]
