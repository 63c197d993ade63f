"""Codecs: optimizer state in fewer bytes; pure functions of tensors."""

from optstream.codecs.base import Codec, Place
from optstream.codecs.choice import NAMES, CodecChoice, Setting
from optstream.codecs.coder import Coder, Encoded, coder_bytes
from optstream.codecs.noise import salt
from optstream.codecs.table import CODECS, EXACT

__all__ = [
    "CODECS",
    "EXACT",
    "NAMES",
    "Codec",
    "CodecChoice",
    "Coder",
    "Encoded",
    "Place",
    "Setting",
    "coder_bytes",
    "salt",
]
