"""The learning rate over a run."""

from __future__ import annotations

import math

_WARMUP_SHARE = 0.1
_LONGEST_WARMUP_STEPS = 100
_FINAL_SHARE = 0.1


def learning_rate_share(step: int, num_steps: int) -> float:
    """Return the share of the peak learning rate at a step, counted from 0.

    Linear warm-up over a tenth of the run, at most 100 steps, then half a cosine down to a tenth.
    """
    warmup = min(_LONGEST_WARMUP_STEPS, max(1, round(num_steps * _WARMUP_SHARE)))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return _FINAL_SHARE + (1 - _FINAL_SHARE) * (1 + math.cos(math.pi * progress)) / 2
