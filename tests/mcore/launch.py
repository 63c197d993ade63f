"""The three lines of docs/megatron.md in Megatron's own training: flags, factories, saves."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from megatron.training import arguments, checkpointing, global_vars, training

from mcore.gpt import BATCH, MICRO_BATCH, SEQUENCE, VOCAB, forward
from mcore.streaming import directory
from optstream.integrations import megatron as optstream_megatron

STEPS, SAVED_AFTER = 5, 3
MODEL = (
    f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --swiglu --disable-bias-linear --seq-length {SEQUENCE} "
    f"--max-position-embeddings {SEQUENCE} --position-embedding-type rope --bf16 "
    "--untie-embeddings-and-output-weights --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1}"
)
TRAINING = (
    f"--micro-batch-size {MICRO_BATCH} --global-batch-size {BATCH} --train-iters {STEPS} "
    "--lr 1e-3 --use-distributed-optimizer --distributed-backend gloo --ckpt-format torch_dist "
    f"--save-interval {SAVED_AFTER}"
)


def _gpt(config: Any = None, **stage: Any) -> GPTModel:
    stage.pop("pg_collection", None)
    return GPTModel(
        config=config or arguments.core_transformer_config_from_args(global_vars.get_args()),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **stage,
    )


def _make_streamed(make_optimizer: Any) -> Any:
    def make_streamed(*args: Any, **kwargs: Any) -> Any:
        optimizer = make_optimizer(*args, **kwargs)
        optstream_megatron.setup(global_vars.get_args(), optimizer)
        return optimizer

    return make_streamed


def _batches() -> Any:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
    position = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).view(1, 1, *[SEQUENCE] * 2)
    return itertools.cycle(
        (part[:, :-1].contiguous(), part[:, 1:].contiguous(), position, mask)
        for part in tokens.split(MICRO_BATCH)
    )


def _pretrain(*flags: str) -> tuple[Any, list[float]]:
    """Do what Megatron's `pretrain` does, as far as a CPU can; return optimizer and losses."""
    command = ["pretrain", *MODEL.split(), *TRAINING.split(), *flags]
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    with mock.patch.object(sys, "argv", command):
        args = arguments.parse_args(extra_args_provider=optstream_megatron.add_arguments)
    arguments.validate_args(args)
    optstream_megatron.validate(args)
    args.padded_vocab_size = VOCAB
    global_vars.set_global_variables(args, build_tokenizer=False)
    make_streamed = _make_streamed(training.get_megatron_optimizer)
    try:
        with mock.patch.object(training, "get_megatron_optimizer", make_streamed):
            model, optimizer, scheduler = training.setup_model_and_optimizer(
                ModelType.encoder_or_decoder, _gpt
            )
        return optimizer, _train(args, model, optimizer, scheduler)
    finally:
        global_vars.unset_global_variables()


def _train(args: Any, model: Any, optimizer: Any, scheduler: Any) -> list[float]:
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model[0].no_sync
    batches, losses = _batches(), []
    for iteration in range(args.iteration, STEPS):
        loss, skipped, *_ = training.train_step(
            _forward, batches, model, optimizer, scheduler, config, get_forward_backward_func()
        )
        assert not skipped
        losses.append(float(loss["loss"]))
        if args.save and iteration + 1 == SAVED_AFTER:
            checkpointing.save_checkpoint(SAVED_AFTER, model, optimizer, scheduler, 0)
    return losses


def _forward(data: Any, model: Any, *_: Any) -> Any:
    return forward(1.0, data, model)


def _with_and_without(*flags: str) -> None:
    """Losses are those without optstream; either takes what the other has saved."""
    with directory() as path:
        on = ("--stream-optimizer-state-to-disk", "--offload-train-disk-dir", str(path / "state"))
        on = (*on, "--stream-optimizer-state-moment-dtype", "split")
        _, expected = _pretrain(*flags, "--save", str(path / "plain"))
        assert len(expected) == STEPS
        assert expected[-1] < expected[0]
        optimizer, losses = _pretrain(*flags, *on, "--save", str(path / "streamed"))
        assert losses == expected
        assert optimizer.optstream.children
        optimizer.optstream.close()
        assert _names(path / "streamed") == _names(path / "plain")
        for source in ("plain", "streamed"):
            optimizer, losses = _pretrain(*flags, *on, "--load", str(path / source))
            assert losses == expected[SAVED_AFTER:], source
            optimizer.optstream.close()


def _names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def adam() -> None:
    _with_and_without("--optimizer", "adam")


def muon() -> None:
    _with_and_without("--optimizer", "muon")
