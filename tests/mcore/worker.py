"""One rank: runs named cases one after another in one process and writes what became of each.

    worker.py RESULT.json LAYOUT:module.case ...

LAYOUT is tp2 (tensor parallel), ep2 (expert parallel), pp2 (pipeline parallel), pp2vp2 (with two
virtual stages each), cp2 (context parallel) or tp1; what is left of the ranks is data parallel.
Starting Megatron takes longer than most cases, so that tests share one start. Where one rank failed
and others wait for it, nothing more is run.
"""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # jit_fuser is torch.compile, slow to start
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from mcore.cuda_on_cpu import cuda_on_cpu  # noqa: E402

SIZES = {
    "tp": "tensor_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}
TIMEOUT = datetime.timedelta(seconds=60)


def _run(case: str) -> str:
    """Run a case on this rank; return "" or why it failed."""
    module, _, name = case.rpartition(".")
    try:
        getattr(importlib.import_module(f"mcore.{module}"), name)()
    except BaseException:
        return f"rank {dist.get_rank()}: {traceback.format_exc()}"
    return ""


def _failures(own: str) -> str:
    """Return what failed on any rank."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    return "\n".join(text for text in texts if text)


def _run_all(cases: list[str], result: Path) -> None:
    outcomes: dict[str, str] = {}
    current, out_of_step = "", False
    for tagged in cases:
        layout, _, case = tagged.partition(":")
        if layout != current:
            current = layout
            parallel_state.destroy_model_parallel()
            sizes = {SIZES[kind]: int(size) for kind, size in re.findall(r"(..)(\d)", layout)}
            parallel_state.initialize_model_parallel(**sizes)
        start = time.perf_counter()
        own = _run(case)
        text = f"{time.perf_counter() - start:.1f} s: {own or 'passed'}"
        logging.info("rank %d: %s: %s", dist.get_rank(), tagged, text)
        try:
            outcomes[tagged] = _failures(own)
        except RuntimeError as error:  # another rank is no longer in step
            outcomes[tagged] = own or f"rank {dist.get_rank()} lost the others: {error}"
            out_of_step = True
        if dist.get_rank() == 0:
            result.write_text(json.dumps(outcomes))
        if out_of_step:
            break


def main() -> None:
    logging.basicConfig(level=logging.INFO, force=True)
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    with cuda_on_cpu():
        _run_all(sys.argv[2:], Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":  # saving a checkpoint spawns processes that import this file
    main()
