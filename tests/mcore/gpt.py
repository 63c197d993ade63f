"""A tiny GPT of megatron-core's own parts, and its training as Megatron does it. For tests only."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCAB, SEQUENCE, BATCH, MICRO_BATCH = 128, 32, 8, 2
SEED = 123


@dataclass(frozen=True)
class Recipe:
    """How a model and its optimizer are built.

    Attributes:
        optimizer: Megatron's name.
        distributed: Adam's state is sharded by bytes (DistributedOptimizer).
        layer_wise: whole matrices are dealt to ranks (LayerWiseDistributedOptimizer).
        layout: DDP's parameters are views of one buffer with a layout.
        tied: the output's weights are the embedding's.
        model, ddp, config: more for TransformerConfig, DistributedDataParallelConfig and
            OptimizerConfig.
    """

    optimizer: str
    distributed: bool = False
    layer_wise: bool = False
    layout: bool = False
    tied: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    lr: float = 5e-3
    seed: int = SEED


ADAM = Recipe("adam", distributed=True, layout=True)
ADAM_PLAIN = Recipe("adam")
MUON = Recipe("muon", layer_wise=True, layout=True)
MUON_DEALT = Recipe("muon", layer_wise=True)
MUON_PLAIN = Recipe("muon")
DIST_MUON = Recipe("dist_muon")
FLOAT32 = {"bf16": False, "params_dtype": torch.float32}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "allgather",
}


def _transformer_config(recipe: Recipe) -> TransformerConfig:
    values = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "attention_softmax_in_fp32": True,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
    }
    return TransformerConfig(**{**values, **recipe.model})


def varied(recipe: Recipe, **more: Any) -> Recipe:
    """Return a recipe with more for some of its dictionaries, or other fields."""
    old = vars(recipe)
    return Recipe(
        **{
            **old,
            **{k: {**old[k], **v} if isinstance(v, dict) else v for k, v in more.items()},
        }
    )


def _layout(recipe: Recipe, model: torch.nn.Module, ddp: DistributedDataParallelConfig) -> Any:
    if not recipe.layout:
        return None
    if recipe.layer_wise:
        tag_params_for_buffer_routing([model])
    owner = LayerWiseDistributedOptimizer if recipe.layer_wise else DistributedOptimizer
    return owner.compute_full_param_layout(
        [p for p in model.parameters() if p.requires_grad],
        ddp.bucket_size if ddp.overlap_grad_reduce else None,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp,
        parallel_state.get_expert_data_parallel_world_size(),
    )


def _chunk(
    recipe: Recipe,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    stage: int | None,
) -> DistributedDataParallel:
    """Return this rank's layers, or those of one of its stages of a virtual pipeline."""
    place = {"ignore_virtual": False, "vp_stage": stage}
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        position_embedding_type=_position_embedding(),
        share_embeddings_and_output_weights=recipe.tied,
        vp_stage=stage,
    )
    model = Float16Module(config, gpt) if config.bf16 or config.fp16 else gpt
    layout = _layout(recipe, model, ddp_config)
    ddp = DistributedDataParallel(
        config, ddp_config, model, disable_bucketing=bool(stage), full_param_layout=layout
    )
    ddp.broadcast_params()
    return ddp


def _position_embedding() -> str:
    # only Transformer Engine's attention takes parts of a sequence (DotProductAttention says so);
    # here context-parallel ranks have sequences of their own, whose positions RoPE would cut
    return "learned_absolute" if parallel_state.get_context_parallel_world_size() > 1 else "rope"


class Training:
    """One model with its optimizer."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
        config = _transformer_config(recipe)
        ddp_config = DistributedDataParallelConfig(
            **{
                "grad_reduce_in_fp32": True,
                "use_distributed_optimizer": recipe.layout,
                **recipe.ddp,
            }
        )
        virtual = config.virtual_pipeline_model_parallel_size
        self.chunks = [
            _chunk(recipe, config, ddp_config, chunk if virtual else None)
            for chunk in range(virtual or 1)
        ]
        self.ddp = self.chunks[0]
        self.optimizer = get_megatron_optimizer(_optimizer_config(recipe, ddp_config), self.chunks)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = (
            [chunk.no_sync for chunk in self.chunks] if virtual else self.ddp.no_sync
        )

    def gradients(self, scale: float = 1.0) -> float:
        """Run forward and backward on this rank's batch; return the mean loss of all ranks.

        Args:
            scale: of the loss; infinite where a step is to be skipped.
        """
        batches = self.batches()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=functools.partial(forward, scale),
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        # only the last stage of a pipeline has losses
        loss = torch.stack([x["loss"] for x in losses]).mean() if losses else torch.zeros(())
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(loss, group=group)
        return float(loss) / group.size()

    def step(self, scale: float = 1.0) -> tuple[bool, float, float | None]:
        """Train one step; return whether it was applied, the loss and the gradients' norm."""
        loss = self.gradients(scale)
        applied, norm, _ = self.optimizer.step()
        return applied, loss, None if norm is None else float(norm)

    def steps(self, count: int) -> list[tuple[bool, float, float | None]]:
        return [self.step() for _ in range(count)]

    def batches(self) -> list[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(7)
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        mine = tokens.chunk(size)[rank]
        position = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).view(1, 1, *[SEQUENCE] * 2)
        return [
            (part[:, :-1].contiguous(), part[:, 1:].contiguous(), position, mask)
            for part in mine.split(MICRO_BATCH)
        ]

    def sync_params(self) -> None:
        """Gather what an overlapping gather would only fetch in the next forward."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, param in self._named_parameters():
            param.copy_(weights[name])

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self._named_parameters()}

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self.chunks):
            for name, param in chunk.named_parameters():
                yield f"{index}.{name}", param


def _optimizer_config(recipe: Recipe, ddp: DistributedDataParallelConfig) -> OptimizerConfig:
    values = {
        "optimizer": recipe.optimizer,
        "lr": recipe.lr,
        "min_lr": 0.0,
        "weight_decay": 0.1,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": recipe.distributed,
        "use_layer_wise_distributed_optimizer": recipe.layer_wise,
        "overlap_param_gather": ddp.overlap_param_gather,
        "clip_grad": 1.0,
        "muon_tp_mode": "blockwise",
    }
    return OptimizerConfig(**{**values, **recipe.config})


def forward(scale: float, data: Any, model: Any) -> Any:
    """Return the loss per token of one microbatch, and what makes a loss of it."""
    tokens, labels, position, mask = next(data)
    per_token = model(tokens, position, mask, labels=labels)

    def loss_of(output: torch.Tensor) -> Any:
        loss = output.float().mean() * scale
        # the schedule divides the loss in place
        return loss, {"loss": loss.detach().clone()}

    return per_token, loss_of
