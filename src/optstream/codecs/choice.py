"""Which codec each state tensor gets: one name, or a mapping of patterns to names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from optstream.codecs.table import CODECS, EXACT
from optstream.errors import ConfigError

NAMES = (EXACT, "split", "bf16", "bf16-stochastic", "int8")
"""What a user asks for; each but the first includes `split` for masters."""

SIGNED = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
POSITIVE = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta"}
    | {"row_var", "col_var", "variance"}
)
"""State keys of torch's optimizers that are moments, first and second."""

Setting = str | Mapping[str, str]


class CodecChoice:
    """Decides codecs; knows afterwards which patterns matched nothing.

    A pattern is a state key ("exp_avg"), or a shell pattern for a parameter's name
    ("*.embed.weight") or for both ("*.embed.weight/exp_avg"). The first that matches a tensor
    decides; what none matches is exact.
    """

    def __init__(self, setting: Setting) -> None:
        """Take a setting.

        Args:
            setting: one of NAMES for everything, or NAMES and names of codecs by pattern.

        Raises:
            ConfigError: another type, or a name that there is not.
        """
        if isinstance(setting, str):
            setting = {} if setting == EXACT else {"*": setting}
        known = (*NAMES, *(name for name in CODECS if name not in NAMES))
        if not isinstance(setting, Mapping):
            raise ConfigError(f"codec={setting!r}: give one of {', '.join(NAMES)}, or a mapping")
        for pattern, name in setting.items():
            if name not in known:
                raise ConfigError(
                    f"codec {name!r} (for {pattern!r}) is unknown; known: {', '.join(known)}"
                )
        self._setting = dict(setting)
        self._unused = set(self._setting)

    def choose(
        self, param: str, key: str, dtype: torch.dtype, master_of: torch.dtype | None
    ) -> str:
        """Return the name of the codec for one state tensor.

        Args:
            master_of: the parameter's dtype where the tensor is a master, else None.

        Raises:
            ConfigError: a codec that does not fit the tensor's key or dtype.
        """
        texts = (param, f"{param}/{key}")
        for pattern, asked in self._setting.items():
            if pattern == key or any(fnmatchcase(text, pattern) for text in texts):
                codec = _fitting(asked, key, dtype, master_of, named=pattern == key)
                if codec is not None:
                    self._unused.discard(pattern)
                return codec or EXACT
        return EXACT

    def check_used(self) -> None:
        """Raise ConfigError if a pattern applied to no tensor so far."""
        for pattern in self._setting:
            if pattern in self._unused:
                name = self._setting[pattern]
                raise ConfigError(
                    f"codec {name!r} for {pattern!r} fits no state of this optimizer: "
                    f"{_needs(name)}; leave it out, or mend the pattern"
                )


def _fitting(
    name: str, key: str, dtype: torch.dtype, master_of: torch.dtype | None, *, named: bool
) -> str | None:
    """Return the codec for a tensor; None where the name says nothing about such a tensor."""
    if name == EXACT:
        return EXACT
    if master_of is not None:
        includes_split = name == "split" or (name in NAMES and not named)
        return "split" if master_of == torch.bfloat16 and includes_split else None
    if dtype != torch.float32 or name == "split":
        return None
    if name == "int8" and key in SIGNED | POSITIVE:
        return "int8-signed" if key in SIGNED else "int8-positive"
    if name == "int8" or not (named or key in SIGNED | POSITIVE):
        raise ConfigError(
            f"codec {name!r}: it is not known what the state {key!r} is; say it by its key, for "
            f'example codec={{"{key}": "exact", "*": "{name}"}}, or "int8-signed", '
            '"int8-positive" or "bf16" for it'
        )
    return name


def _needs(name: str) -> str:
    if name == "split":
        return "it is for masters of bfloat16 parameters"
    return "it is for masters of bfloat16 parameters and for float32 moments"
