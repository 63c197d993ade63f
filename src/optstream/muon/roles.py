"""What each parameter of a model is, by the type of its module and by name: a matrix or not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

# Linear layers that write logits, by their own name; "output" and the like only at the top of a
# model, since "attention.output" is a hidden layer in many.
_HEADS = {
    "classifier",
    "embed_out",
    "head",
    "lm_head",
    "output_projection",
    "qa_outputs",
    "score",
    "seq_relationship",
    "unembed",
}
_TOP_LEVEL_HEADS = {"decoder", "fc", "output", "proj_out"}
# fused projections whose three parts follow each other in every model that uses the name; c_attn
# does as a Conv1D (GPT-2), while GPT-BigCode's, a Linear, interleaves the parts of each head
_CONCATENATED_QKV = {"Wqkv", "qkv"}
_MAYBE_FUSED = re.compile(r"(?i:qkv|query_key_value|c_attn|in_proj|kv_b_proj)|^Wi$")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass
class Role:
    """A parameter and what is known of it.

    Attributes:
        name: first FQN, as in `named_parameters()`.
        aliases: every FQN; more than one for tied weights.
        what: in words, for the table.
        is_matrix: Muon's, unless overridden.
        options: `split` and `transposed` of its matrices, where they are not the defaults.
        maybe_fused: looks like several matrices, but the layout is not known.
    """

    name: str
    param: Tensor
    what: str
    is_matrix: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    maybe_fused: bool = False
    aliases: list[str] = field(default_factory=list)


def roles(model: nn.Module, convolutions: bool = False) -> list[Role]:
    """Return the role of every distinct parameter, frozen ones too, in the model's order.

    A tied weight is an embedding if any of its uses is, else an output head if any is, else what
    its first use is.
    """
    heads = _output_heads(model)
    found: dict[int, list[Role]] = {}
    for name, module, param in _uses(model):
        role = _role(name, module, param, convolutions, is_head=id(param) in heads)
        found.setdefault(id(param), []).append(role)
    result = []
    for uses in found.values():
        ranked = sorted(uses, key=lambda role: {"embedding": 0, "output head": 1}.get(role.what, 2))
        best = ranked[0]
        best.aliases = [role.name for role in uses]
        best.name = best.aliases[0]
        result.append(best)
    return result


def _uses(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{name}" if prefix else name, module, param


def _output_heads(model: nn.Module) -> set[int]:
    """Return ids of the weights that transformers models call their output embeddings."""
    ids = set()
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        try:
            head = getter() if callable(getter) else None
        except (AttributeError, NotImplementedError):
            head = None
        if isinstance(getattr(head, "weight", None), Tensor):
            ids.add(id(head.weight))  # type: ignore[union-attr]
    return ids


def _role(name: str, module: nn.Module, param: Tensor, convolutions: bool, is_head: bool) -> Role:
    path, _, leaf = name.rpartition(".")
    own = path.rpartition(".")[2]
    if isinstance(module, _EMBEDDINGS):
        return Role(name, param, "embedding")
    if leaf == "bias" or leaf.endswith("_bias") or param.ndim < 2:
        return Role(name, param, "bias" if "bias" in leaf else "vector")
    if is_head or own in _HEADS or path in _TOP_LEVEL_HEADS:
        return Role(name, param, "output head")
    if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED_CONVOLUTIONS)):
        return _convolution(name, module, param, convolutions)
    if isinstance(module, nn.Linear) or _is_conv1d(module):
        return _linear(name, own, param, transposed=_is_conv1d(module))
    if isinstance(module, nn.MultiheadAttention) and leaf in _MULTIHEAD:
        return Role(name, param, "attention matrix", True, dict(_MULTIHEAD[leaf]))
    if param.ndim == 3 and _is_experts(name, module):
        return _experts(name, leaf, module, param)
    kind = type(module).__name__.lower()
    if param.ndim == 2 and leaf == "weight" and not any(word in kind for word in ("embed", "norm")):
        what = "router" if "router" in kind or "gate" in kind else "matrix"
        return Role(name, param, what, True)
    return Role(name, param, "not a known matrix")


_MULTIHEAD: dict[str, dict[str, Any]] = {
    "in_proj_weight": {"split": ("equal", 3)},
    "q_proj_weight": {},
    "k_proj_weight": {},
    "v_proj_weight": {},
}


def _convolution(name: str, module: nn.Module, param: Tensor, wanted: bool) -> Role:
    if not wanted:
        return Role(name, param, "convolution")
    if isinstance(module, _TRANSPOSED_CONVOLUTIONS) or module.groups != 1:
        return Role(name, param, "grouped or transposed convolution")
    return Role(name, param, "convolution", True, {"split": ("flatten",)})


def _is_conv1d(module: nn.Module) -> bool:
    """Tell transformers' Conv1D, a linear layer stored as (in, out), without importing it."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _linear(name: str, own: str, param: Tensor, transposed: bool) -> Role:
    options: dict[str, Any] = {"transposed": True} if transposed else {}
    out, inputs = param.shape[::-1] if transposed else param.shape
    what = "matrix"
    concatenated = own in _CONCATENATED_QKV or (own == "c_attn" and transposed)
    if concatenated and out == 3 * inputs:
        options["split"], what = ("equal", 3), "fused QKV"
    elif own == "gate_up_proj" and out % 2 == 0:
        options["split"], what = ("equal", 2), "gate and up"
    fused = "split" not in options and _MAYBE_FUSED.search(own) is not None
    return Role(name, param, what, True, options, maybe_fused=fused)


def _is_experts(name: str, module: nn.Module) -> bool:
    return "expert" in type(module).__name__.lower() or "expert" in name.lower()


def _experts(name: str, leaf: str, module: nn.Module, param: Tensor) -> Role:
    transposed = _experts_transposed(module)
    options: dict[str, Any] = {"transposed": True} if transposed else {}
    options["split"], what = ("stack",), "expert matrices"
    rows = param.shape[2 if transposed else 1]
    if leaf == "gate_up_proj" and rows % 2 == 0:
        what = "expert gates and ups"
        concatenated = getattr(module, "is_concatenated", True)
        inner = ("equal", 2) if concatenated else ("grouped", rows // 2, (1, 1))
        options["split"] = ("stack", inner)
    return Role(name, param, what, True, options)


def _experts_transposed(module: nn.Module) -> bool:
    """Tell whether experts are stored as (n, in, out): transformers says it, or shapes show it."""
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool):
        return said
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
        return False
    _, first, second = gate_up.shape
    usual = down.shape[1:] == (second, first // 2)
    return not usual and down.shape[1:] == (second // 2, first)
