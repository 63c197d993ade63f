"""offload(): check the arguments, agree with the other ranks, make a StreamedOptimizer."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from optstream.codecs import EXACT, CodecChoice, Setting
from optstream.distributed.agreement import check_same, group_facts
from optstream.distributed.place import Place, release, take_places
from optstream.distributed.ranks import Ranks
from optstream.errors import ConfigError
from optstream.optimizer import StreamedOptimizer
from optstream.plan import parse_window_bytes
from optstream.ram import Ram
from optstream.report import Reporter, process_rank
from optstream.store import open_store
from optstream.streamed.roster import Roster
from optstream.streamed.rule import check_optimizer
from optstream.streamed.state import StreamedState
from optstream.units import parse_bytes

log = logging.getLogger("optstream")
StrPath = str | os.PathLike[str]


def offload(
    optimizer: Optimizer,
    directory: StrPath | Sequence[StrPath],
    *,
    model: nn.Module | None = None,
    window: int | str = "256MiB",
    ram: int | str = 0,
    store: str = "direct",
    master_weights: bool = True,
    process_group: dist.ProcessGroup | None = None,
    role: str = "",
    io_threads: int = 4,
    metrics: StrPath | None = None,
    codec: Setting = EXACT,
    codec_seed: int = 0,
) -> StreamedOptimizer:
    """Move a torch optimizer's state to files and stream it during `step()`.

    The result replaces `optimizer` everywhere (schedulers, scalers, clipping); until it is closed,
    `optimizer` itself refuses `step`, `state_dict` and `load_state_dict`. All file space is
    reserved here; state the optimizer holds already is moved to the files.

    Args:
        optimizer: any torch optimizer whose parameters are updated independently of each other.
        directory: a directory on a drive, or one per drive: windows are striped over them.
        model: gives parameters their fully qualified names.
        window: bytes of state in memory together ("256MiB"); about four windows are the host memory
            used.
        ram: state that stays in memory between steps, beside those windows, so that it causes no
            traffic: "8GiB", "25%" of the state, or "auto" for what this process can spare (see
            `Ram`). A save writes it. Of each rank.
        store: "direct" (O_DIRECT files), "mapped" (files in the page cache, which the kernel
            reclaims: for hosts with memory for most of the state) or "memory" (plain RAM; nothing
            is on a drive, `ram` changes nothing).
        master_weights: keep float32 masters of bfloat16 and float16 parameters and update those.
        process_group: ranks that hold the same parameters and share their state,
            `torch.distributed.group.WORLD` or another; all of them call this together. None: this
            process keeps all state itself, whatever other ranks do.
        role: gives this optimizer a folder of its own in `directory`, as a process group does too;
            tells apart those of one process.
        io_threads: threads a drive.
        metrics: a JSONL file that gets one line a step; with several ranks each has its own,
            `run.rank00000.jsonl` for `run.jsonl`.
        codec: how state is stored: "exact"; "split" (masters of bfloat16 parameters in 16 bits,
            still exact); "bf16", "bf16-stochastic" or "int8" (moments, too); or such names by state
            key or by pattern of parameter names, the first that matches decides (docs/codecs.md).
        codec_seed: of random rounding in "bf16-stochastic".

    Raises:
        ConfigError: an argument that cannot be used; parameters on the meta device.
        UnsupportedOptimizerError: the optimizer cannot be streamed; the message says why.
        StoreError: the directory cannot hold the state; nothing is left there.
        RankError: another rank failed, or has another model or other arguments.
    """
    ranks = Ranks(process_group)
    if process_group is None:
        _warn_of_other_ranks(optimizer)
    with contextlib.ExitStack() as undo:
        undo.callback(ranks.close)
        with ranks.together():
            check_optimizer(optimizer)
            _check_model(model, optimizer)
            if not isinstance(master_weights, bool):
                raise ConfigError(f"master_weights={master_weights!r}: give True or False")
            window_bytes = parse_window_bytes(parse_bytes(window, "window"))
            _check_threads(io_threads)
            budget = Ram(ram, ranks.num_on_host)
            places: list[Place] = []
            if store != "memory" and (process_group is not None or role):
                places = take_places(directory, role, ranks.rank)
                undo.callback(release, places)
                directory = [place.path for place in places]
            opened = open_store(store, directory)
            roster = Roster(
                optimizer, ranks, window_bytes, master_weights, model, CodecChoice(codec)
            )
            roster.check_materialised()
            arguments = {
                "the optimizer": type(optimizer).__name__,
                "window": str(window_bytes),
                "store": store,
                "master_weights": str(master_weights),
                "role": repr(role),
                "codec": f"{codec!r}, seed {codec_seed}",
            }
            check_same(ranks, arguments | group_facts(optimizer.param_groups) | roster.facts())
            state = StreamedState(optimizer, roster, ranks, opened, io_threads, budget, codec_seed)
            undo.callback(state.stream.close)
            name = f"{role} {type(optimizer).__name__}".strip()
            rank = ranks.rank if ranks.size > 1 else process_rank()
            reporter = Reporter(name, rank, ranks.size, metrics)
            undo.callback(reporter.close)
            streamed = StreamedOptimizer(optimizer, state, reporter, places)
        streamed.take_over()
        undo.pop_all()
    return streamed


def _warn_of_other_ranks(optimizer: object) -> None:
    """Say that this rank keeps all, unless the optimizer `is_share`: it has its part already."""
    if not dist.is_initialized() or getattr(optimizer, "is_share", False):
        return
    if dist.get_world_size() > 1:
        log.warning(
            "process_group=None on rank %d of %d: this rank keeps all of the state itself; give "
            "process_group=torch.distributed.group.WORLD to share it",
            dist.get_rank(),
            dist.get_world_size(),
        )


def _check_model(model: object, optimizer: Optimizer) -> None:
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model={model!r} is no torch.nn.Module; give the one whose parameters are updated"
        )
    known = set(map(id, model.parameters()))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if params and known.isdisjoint(map(id, params)):
        raise ConfigError(
            f"model ({type(model).__name__}) has none of the optimizer's {len(params)} parameters; "
            "give the module whose parameters are updated, or no model"
        )


def _check_threads(io_threads: int) -> None:
    if isinstance(io_threads, bool) or not isinstance(io_threads, int) or io_threads < 1:
        raise ConfigError(f"io_threads={io_threads!r}: give the threads a drive, at least 1")
