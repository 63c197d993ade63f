"""A forked child has neither the threads nor the buffers: each use is an error, never a crash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optstream
from optstream.errors import ClosedError

USES = {
    "step": lambda optimizer, param, path: optimizer.step(),
    "look": lambda optimizer, param, path: optimizer.state[param]["exp_avg"],
    "state_dict": lambda optimizer, param, path: optimizer.state_dict(),
    "load_state_dict": lambda optimizer, param, path: optimizer.load_state_dict({}),
    "save": lambda optimizer, param, path: optimizer.save(path),
    "load": lambda optimizer, param, path: optimizer.load(path),
    "add_param_group": lambda optimizer, param, path: optimizer.add_param_group({"params": []}),
}


@pytest.mark.parametrize("store", ["direct", "mapped", "memory"])
@pytest.mark.parametrize("use", USES)
def test_a_use_in_a_child_is_refused(use: str, store: str, directory: Path, tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(1000))
    param.grad = torch.ones(1000)
    inner = torch.optim.AdamW([param])
    with optstream.offload(inner, directory, store=store) as wrapped:
        optimizer: Any = wrapped
        optimizer.step()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                USES[use](optimizer, param, tmp_path / "checkpoint")
            except ClosedError as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
