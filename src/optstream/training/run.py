"""One training run, from text to the numbers of its table."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from typing import Protocol

import torch

from optstream import durable
from optstream.distributed.ranks import Ranks
from optstream.errors import ConfigError
from optstream.report import metrics_path
from optstream.training.checkpoint import (
    Saves,
    TrainingCheckpoint,
    check_save_directory,
    check_weights,
    find_checkpoint,
    open_saves,
)
from optstream.training.config import TrainConfig
from optstream.training.loop import Job, held_out_loss, steps
from optstream.training.models import check_model_name, load_model
from optstream.training.optimizers import BUILDERS, peak_rates
from optstream.training.packages import require_modules
from optstream.training.ranks import check_ranks
from optstream.training.result import RunPlan, RunResult, StepRecord, Totals
from optstream.training.state_dir import check_state_directory, state_directory
from optstream.training.stop import StopRequest
from optstream.training.text import read_corpus
from optstream.training.tokens import tokenize
from optstream.training.trainer_state import (
    TrainerState,
    check_settings,
    check_tokens,
    settings,
    token_identity,
    versions,
)
from optstream.training.updater import Updater, make_updater
from optstream.training.weights import load_weights, weights_digest


class Observer(Protocol):
    """Is told what happens; shows it to a person."""

    def preparing(self, what: str) -> None:
        """Say what is being done before the first step."""
        ...

    def started(self, plan: RunPlan) -> None:
        """Say what is about to run."""
        ...

    def stepped(self, record: StepRecord) -> None:
        """Show one step."""
        ...

    def finished(self) -> None:
        """Take the progress display away."""
        ...


def train(config: TrainConfig, stop: StopRequest, observer: Observer, ranks: Ranks) -> RunResult:
    """Train as configured; a signal ends it after the step it arrives in.

    Everything that can be wrong with the arguments is found before anything is written.

    Raises:
        OffloadError: what was asked cannot be done, or failed.
    """
    require_modules(("transformers", "tokenizers"), extra="train", what="optstream train")
    check_ranks(config, ranks)
    check_model_name(config.model)
    if config.metrics is not None:
        own = metrics_path(config.metrics, ranks.rank, ranks.size)
        config = replace(config, metrics=own)
    _check_metrics(config)
    if config.state_dir is not None:
        check_state_directory(config.state_dir)
    resumed = _open_resumed(config)
    if config.save_dir is not None:
        check_save_directory(config.save_dir, resumed)
    job, state = _prepare(config, resumed, stop, observer, ranks)
    with ExitStack() as stack:
        stack.callback(observer.finished)
        if config.state_dir is not None:
            stack.enter_context(state_directory(config.state_dir))
        saves = None
        if config.save_dir is not None:
            saves = stack.enter_context(open_saves(config.save_dir, config.keep, ranks))
        return _optimize(job, state, resumed, saves, stop, observer)


def _open_resumed(config: TrainConfig) -> TrainingCheckpoint | None:
    if config.resume is None:
        return None
    checkpoint = find_checkpoint(config.resume)
    rates = peak_rates(config)
    check_settings(checkpoint.path, checkpoint.state.settings, settings(config, rates))
    if checkpoint.state.step > config.steps:
        raise ConfigError(
            f"{checkpoint.path} has done {checkpoint.state.step} steps, --steps {config.steps} is "
            "fewer; --steps is the total"
        )
    check_weights(checkpoint)
    return checkpoint


def _prepare(
    config: TrainConfig,
    resumed: TrainingCheckpoint | None,
    stop: StopRequest,
    observer: Observer,
    ranks: Ranks,
) -> tuple[Job, TrainerState]:
    """Return what the steps need, and what every checkpoint of the run says about it."""
    observer.preparing("reading the text")
    corpus = read_corpus(config.text)
    observer.preparing(f"preparing model {config.model} and its tokens")
    model = load_model(config.model, corpus.train, seq_len=config.seq_len, seed=config.seed)
    data = tokenize(corpus, model.encode, seq_len=config.seq_len)
    model.module.to(dtype=getattr(torch, config.dtype))
    rates, tokens = peak_rates(config), token_identity(data)
    if resumed is not None:
        observer.preparing(f"going on from {resumed.path}")
        check_tokens(resumed.path, resumed.state.tokens, tokens)
        load_weights(model.module, resumed.weights)
        step, rng, loss_before = resumed.state.step, resumed.state.rng, resumed.state.loss_before
        job = Job(
            config=config,
            rates=rates,
            model=model,
            data=data,
            first_step=step,
            rng=rng,
            ranks=ranks,
        )
    else:
        observer.preparing("measuring the held-out loss")
        job = Job(config=config, rates=rates, model=model, data=data, ranks=ranks)
        measured = held_out_loss(job, stop)
        assert measured is not None, "a signal raises during set-up"
        loss_before = measured
    state = TrainerState(
        step=job.first_step,
        settings=settings(config, rates),
        tokens=tokens,
        loss_before=loss_before,
        rng=torch.get_rng_state(),
        weights_xxh3="",
        versions=versions(),
    )
    return job, state


def _optimize(
    job: Job,
    state: TrainerState,
    resumed: TrainingCheckpoint | None,
    saves: Saves | None,
    stop: StopRequest,
    observer: Observer,
) -> RunResult:
    config, module = job.config, job.model.module
    build = partial(BUILDERS[config.optimizer], module, job.rates, config.weight_decay)
    totals = Totals()
    with closing(make_updater(build, module, config, job.ranks)) as updater:
        plan = _plan(updater, job)
        if saves is not None:
            _check_room(saves, plan, job)
        if resumed is not None:
            updater.load(resumed.optimizer)
        observer.started(plan)
        save = partial(_save, job, state, saves, updater)
        with stop.deferred():
            if resumed is None:
                before = {"step": 0, "held_out_loss": state.loss_before}
                _write(config, before | _on_rank(job, plan))
            for record in steps(job, updater, stop, save):
                totals.add(record)
                _write(config, asdict(record))
                observer.stepped(record)
            totals.add_drain(updater.drain())
        state_bytes = updater.state_bytes()
    with stop.deferred():
        loss_after = held_out_loss(job, stop)
    if loss_after is not None:
        after = {"step": config.steps, "held_out_loss": loss_after}
        _write(config, after | {"weights_xxh3": weights_digest(module)})
    return RunResult(
        plan=plan,
        totals=totals,
        loss_before=state.loss_before,
        loss_after=loss_after,
        state_bytes=state_bytes,
        num_saved=saves.num_saved if saves else 0,
        stopped_by=stop.signum,
    )


def _save(
    job: Job, state: TrainerState, saves: Saves | None, updater: Updater, step: int, last: bool
) -> float:
    """Save if a checkpoint is due after a step; return the seconds it took."""
    every = job.config.save_every
    if saves is None or not (last or (every is not None and step % every == 0)):
        return 0.0
    now = TrainerState(**{**vars(state), "step": step, "rng": torch.get_rng_state()})
    return saves.save(now, job.model.module, updater)


def _check_room(saves: Saves, plan: RunPlan, job: Job) -> None:
    """Refuse a run whose checkpoints will not fit; unknown for a plain optimizer's new state."""
    config = job.config
    every = config.save_every or config.steps
    num_saves = -(-config.steps // every) - job.first_step // every
    weights_bytes = sum(tensor.nbytes for tensor in job.model.module.parameters())
    state_bytes = sum(job.ranks.gather(plan.state_bytes))
    saves.check_room(max(1, num_saves), state_bytes + weights_bytes)


def _plan(updater: Updater, job: Job) -> RunPlan:
    streamed = updater.plan
    return RunPlan(
        config=job.config,
        rates=job.rates,
        first_step=job.first_step,
        num_params=sum(param.numel() for param in job.model.module.parameters()),
        num_windows=streamed.num_windows if streamed else 0,
        state_bytes=streamed.state_bytes if streamed else 0,
        resident_bytes=streamed.resident_bytes if streamed else 0,
        peak_host_bytes=streamed.peak_host_bytes if streamed else 0,
    )


def _on_rank(job: Job, plan: RunPlan) -> dict[str, object]:
    """Return what this rank keeps of the state, for its metrics."""
    return {
        "rank": job.ranks.rank,
        "num_windows": plan.num_windows,
        "state_bytes": plan.state_bytes,
        "peak_host_bytes": plan.peak_host_bytes,
    }


def _check_metrics(config: TrainConfig) -> None:
    path = config.metrics
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a directory" if path.is_dir() else f"is in {path.parent}, which is missing"
        raise ConfigError(f"metrics file {path} {reason}; give a file in an existing directory")


def _write(config: TrainConfig, values: dict[str, object]) -> None:
    if config.metrics is None:
        return
    try:
        with config.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"optimizer": config.optimizer, **values}) + "\n")
    except OSError as error:
        raise durable.failed("write metrics to", config.metrics, error) from error
