"""One training run, from text to the numbers of its table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from typing import IO, Protocol

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from optstream.errors import ConfigError, OffloadError
from optstream.memory import read_memory
from optstream.training.config import TrainConfig
from optstream.training.models import LanguageModel, check_model_name, load_model
from optstream.training.optimizers import (
    BUILDERS,
    DEFAULT_PRETRAINED_RATES,
    DEFAULT_RATES,
    Rates,
)
from optstream.training.packages import require_modules
from optstream.training.result import RunPlan, RunResult, StepRecord, Totals
from optstream.training.schedule import learning_rate_share
from optstream.training.state_dir import check_state_directory, state_directory
from optstream.training.stop import StopRequest
from optstream.training.text import read_corpus
from optstream.training.tokens import TokenData, tokenize
from optstream.training.updater import Updater, make_updater

_MAX_GRAD_NORM = 1.0


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


def train(config: TrainConfig, stop: StopRequest, observer: Observer) -> RunResult:
    """Train as configured; a signal ends it after the step it arrives in.

    Everything that can be wrong with the arguments is found before anything is written.

    Raises:
        OffloadError: what was asked cannot be done, or failed.
    """
    require_modules(("transformers", "tokenizers"), extra="train", what="optstream train")
    check_model_name(config.model)
    _check_metrics(config)
    if config.state_dir is not None:
        check_state_directory(config.state_dir)
    observer.preparing("reading the text")
    corpus = read_corpus(config.text)
    observer.preparing(f"preparing model {config.model} and its tokens")
    model = load_model(config.model, corpus.train, seq_len=config.seq_len, seed=config.seed)
    data = tokenize(corpus, model.encode, seq_len=config.seq_len)
    model.module.to(dtype=getattr(torch, config.dtype))
    observer.preparing("measuring the held-out loss")
    loss_before = held_out_loss(model, data, config)
    with state_directory(config.state_dir) if config.state_dir else nullcontext():
        try:
            return _optimize(model, data, loss_before, config, stop, observer)
        finally:
            observer.finished()


def _optimize(
    model: LanguageModel,
    data: TokenData,
    loss_before: float,
    config: TrainConfig,
    stop: StopRequest,
    observer: Observer,
) -> RunResult:
    rates = _rates(config, pretrained=model.pretrained)
    optimizer = BUILDERS[config.optimizer](model.module, rates, config.weight_decay)
    totals = Totals()
    with closing(make_updater(optimizer, model.module, config)) as updater:
        plan = _plan(updater, model, data, rates, config)
        observer.started(plan)
        with _metrics_file(config) as metrics, stop.after_current_step():
            _write(metrics, {"step": 0, "held_out_loss": loss_before})
            for record in _steps(model, data, updater, config):
                totals.add(record)
                _write(metrics, asdict(record))
                observer.stepped(record)
                if stop.signum is not None:
                    break
        state_bytes = updater.state_bytes()
    loss_after = held_out_loss(model, data, config) if stop.signum is None else None
    if loss_after is not None:
        with _metrics_file(config) as metrics:
            _write(metrics, {"step": totals.num_steps, "held_out_loss": loss_after})
    return RunResult(
        plan=plan,
        totals=totals,
        loss_before=loss_before,
        loss_after=loss_after,
        state_bytes=state_bytes,
        stopped_by=stop.signum,
    )


def _rates(config: TrainConfig, *, pretrained: bool) -> Rates:
    default = (DEFAULT_PRETRAINED_RATES if pretrained else DEFAULT_RATES)[config.optimizer]
    return Rates(config.lr or default.lr, config.adamw_lr or default.adamw_lr)


def _steps(
    model: LanguageModel, data: TokenData, updater: Updater, config: TrainConfig
) -> Iterator[StepRecord]:
    params = [param for param in model.module.parameters() if param.requires_grad]
    scheduler = LambdaLR(updater.optimizer, lambda i: learning_rate_share(i, config.steps))
    model.module.train()
    torch.manual_seed(config.seed)
    for step in range(config.steps):
        start = time.perf_counter()
        batch = data.batch(config.seed, step, batch_size=config.batch_size, seq_len=config.seq_len)
        loss = _loss(model, batch)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(params, _MAX_GRAD_NORM)
        if not math.isfinite(loss.item()):
            raise OffloadError(f"the loss is {loss.item()} at step {step + 1}; give a smaller --lr")
        lr = scheduler.get_last_lr()[0]
        optimizer_start = time.perf_counter()
        cost = updater.step()
        optimizer_s = time.perf_counter() - optimizer_start
        scheduler.step()
        model.module.zero_grad(set_to_none=True)
        yield StepRecord(
            step=step + 1,
            loss=loss.item(),
            lr=float(lr),
            grad_norm=grad_norm.item(),
            num_tokens=config.batch_size * config.seq_len,
            total_s=time.perf_counter() - start,
            optimizer_s=optimizer_s,
            anon_bytes=read_memory().anon_bytes,
            **asdict(cost),
        )


def _loss(model: LanguageModel, batch: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits = model.logits(batch[:, :-1]).float()
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def held_out_loss(model: LanguageModel, data: TokenData, config: TrainConfig) -> float:
    """Return the mean loss over the same held-out tokens each time, nats a token."""
    model.module.eval()
    total, num_tokens = 0.0, 0
    for batch in data.held_out_batches(
        config.eval_tokens, batch_size=config.batch_size, seq_len=config.seq_len
    ):
        total += _loss(model, batch, reduction="sum").item()
        num_tokens += batch[:, 1:].numel()
    return total / num_tokens


def _plan(
    updater: Updater, model: LanguageModel, data: TokenData, rates: Rates, config: TrainConfig
) -> RunPlan:
    streamed = updater.plan
    return RunPlan(
        config=config,
        rates=rates,
        num_params=sum(param.numel() for param in model.module.parameters()),
        train_tokens=len(data.train),
        held_out_tokens=len(data.held_out),
        num_windows=streamed.num_windows if streamed else 0,
        state_bytes=streamed.state_bytes if streamed else 0,
        peak_host_bytes=streamed.peak_host_bytes if streamed else 0,
    )


def _check_metrics(config: TrainConfig) -> None:
    path = config.metrics
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a directory" if path.is_dir() else f"is in {path.parent}, which is missing"
        raise ConfigError(f"metrics file {path} {reason}; give a file in an existing directory")


@contextmanager
def _metrics_file(config: TrainConfig) -> Iterator[IO[str] | None]:
    with open(config.metrics, "a", encoding="utf-8") if config.metrics else nullcontext() as file:
        yield file


def _write(metrics: IO[str] | None, values: dict[str, object]) -> None:
    if metrics is not None:
        metrics.write(json.dumps(values) + "\n")
        metrics.flush()
