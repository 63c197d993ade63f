"""The steps of a run: batch, gradients, update, and a checkpoint when one is due."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from optstream.distributed.ranks import Ranks
from optstream.errors import OffloadError
from optstream.memory import MemoryMeter
from optstream.training.config import TrainConfig
from optstream.training.models import LanguageModel
from optstream.training.optimizers import Rates
from optstream.training.result import StepRecord
from optstream.training.schedule import learning_rate_share
from optstream.training.stop import StopRequest
from optstream.training.tokens import TokenData
from optstream.training.updater import Updater

_MAX_GRAD_NORM = 1.0

Save = Callable[[int, bool], float]
"""Save after a step if that is due, or if it is the last one; return the seconds it took."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the steps work on.

    Attributes:
        first_step: steps that were done before this run.
        rng: state of torch's generator after them; None at the start of a training.
        ranks: each takes its share of every batch.
    """

    config: TrainConfig
    rates: Rates
    model: LanguageModel
    data: TokenData
    first_step: int = 0
    rng: torch.Tensor | None = None
    ranks: Ranks = field(default_factory=lambda: Ranks(None))


def steps(job: Job, updater: Updater, stop: StopRequest, save: Save) -> Iterator[StepRecord]:
    """Do what is left of the run's steps; a signal ends it after the step it arrives in.

    Raises:
        OffloadError: the loss is not finite, or a step or a save failed.
    """
    config = job.config
    scheduler = LambdaLR(
        updater.optimizer,
        lambda step: learning_rate_share(step, config.steps),
        last_epoch=job.first_step - 1,
    )
    memory = MemoryMeter()
    job.model.module.train()
    torch.manual_seed(config.seed)
    if job.rng is not None:
        torch.set_rng_state(job.rng)
    for step in range(job.first_step, config.steps):
        start = time.perf_counter()
        loss, grad_norm = _gradients(job, updater, step)
        optimizer_start = time.perf_counter()
        cost = updater.step()
        optimizer_s = time.perf_counter() - optimizer_start
        scheduler.step()
        job.model.module.zero_grad(set_to_none=True)
        signum = max(job.ranks.gather(stop.signum or 0))
        stopping = signum > 0
        if stopping:
            stop.signum = signum  # of another rank perhaps
        save_s = save(step + 1, stopping or step + 1 == config.steps)
        yield StepRecord(
            step=step + 1,
            loss=loss,
            lr=job.rates.lr * learning_rate_share(step, config.steps),
            grad_norm=grad_norm,
            num_tokens=config.batch_size * config.seq_len,
            total_s=time.perf_counter() - start,
            optimizer_s=optimizer_s,
            save_s=save_s,
            **asdict(cost),
            **asdict(memory.read()),
        )
        if stopping:
            return


def _gradients(job: Job, updater: Updater, step: int) -> tuple[float, float]:
    """Leave clipped gradients in the parameters; return the loss and the norm before clipping."""
    config, ranks = job.config, job.ranks
    batch = job.data.batch(config.seed, step, batch_size=config.batch_size, seq_len=config.seq_len)
    loss = _loss(job.model, batch[ranks.rank :: ranks.size])
    loss.backward()
    grad_norm = updater.clip_gradients(_MAX_GRAD_NORM)
    mean_loss = statistics.fmean(ranks.gather(loss.item()))
    if not math.isfinite(mean_loss):
        raise OffloadError(f"the loss is {mean_loss} at step {step + 1}; give a smaller --lr")
    return mean_loss, grad_norm


def _loss(model: LanguageModel, batch: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    logits = model.logits(batch[:, :-1]).float()
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def held_out_loss(job: Job, stop: StopRequest) -> float | None:
    """Return the mean loss over the same held-out tokens each time, nats a token; None if stopped.

    A signal that was deferred ends it after the batch it arrives in.
    """
    config = job.config
    job.model.module.eval()
    total, num_tokens = 0.0, 0
    batches = job.data.held_out_batches(
        config.eval_tokens, batch_size=config.batch_size, seq_len=config.seq_len
    )
    for batch in itertools.islice(batches, job.ranks.rank, None, job.ranks.size):
        if stop.signum is not None:
            break
        total += _loss(job.model, batch, reduction="sum").item()
        num_tokens += batch[:, 1:].numel()
    shares = job.ranks.gather((total, num_tokens, stop.signum or 0))
    signum = max(share[2] for share in shares)
    if signum > 0:
        stop.signum = signum  # of another rank perhaps
        return None
    return sum(share[0] for share in shares) / sum(share[1] for share in shares)
