"""muon_groups on real architectures, built small from transformers configs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from optstream.errors import ConfigError
from optstream.muon import Muon, muon_groups, muon_table

transformers = pytest.importorskip("transformers", minversion="5")

DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
ATTENTION = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
MLP = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]


def build(kind: str, **options: Any) -> nn.Module:
    t = transformers
    with torch.device("meta"):
        match kind:
            case "llama":
                return t.LlamaForCausalLM(t.LlamaConfig(**DECODER, **options))
            case "qwen3":
                return t.Qwen3ForCausalLM(t.Qwen3Config(**DECODER, head_dim=8, **options))
            case "gpt2":
                sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
                tokens = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1}
                return t.GPT2LMHeadModel(t.GPT2Config(**sizes, **tokens))
            case "mixtral":
                return t.MixtralForCausalLM(t.MixtralConfig(**DECODER, num_local_experts=4))
            case "qwen3_moe":
                sizes = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24}
                return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**DECODER, **sizes))
            case "gpt_oss":
                sizes = {"head_dim": 8, "num_local_experts": 4}
                return t.GptOssForCausalLM(t.GptOssConfig(**DECODER, **sizes))
            case "llama4":
                sizes = {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48}
                return t.Llama4ForCausalLM(t.Llama4TextConfig(**DECODER, **sizes))
            case "bert":
                return t.BertForPreTraining(t.BertConfig(**ENCODER, vocab_size=96))
            case "vit":
                sizes = {"image_size": 16, "patch_size": 8, "num_labels": 5}
                return t.ViTForImageClassification(t.ViTConfig(**ENCODER, **sizes))
    raise AssertionError(kind)


def layers(model: str, names: list[str]) -> set[str]:
    return {f"{model}.{layer}.{name}" for layer in range(2) for name in names}


def muon_names(model: nn.Module, **options: Any) -> dict[str, tuple[Any, bool]]:
    """Return {FQN: (split, transposed)} of Muon's parameters."""
    return {
        name: (group["split"], group["transposed"])
        for group in muon_groups(model, **options)
        if group["use_muon"]
        for name in group["param_names"]
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_llama_and_qwen3(kind: str, tied: bool) -> None:
    names = muon_names(build(kind, tie_word_embeddings=tied))
    assert names.keys() == layers("model.layers", ATTENTION + MLP)
    assert set(names.values()) == {(None, False)}


def test_gpt2_is_stored_transposed_and_its_qkv_is_three() -> None:
    names = muon_names(build("gpt2"))
    plain = ["attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    assert names == {
        **dict.fromkeys(layers("transformer.h", plain), (None, True)),
        **dict.fromkeys(layers("transformer.h", ["attn.c_attn.weight"]), (("equal", 3), True)),
    }


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_are_stacks_with_gate_and_up_apart(kind: str) -> None:
    names = muon_names(build(kind))
    experts = {
        "mlp.experts.gate_up_proj": (("stack", ("equal", 2)), False),
        "mlp.experts.down_proj": (("stack",), False),
    }
    for name, rule in experts.items():
        assert {names.pop(full) for full in layers("model.layers", [name])} == {rule}
    assert names.keys() == layers("model.layers", [*ATTENTION, "mlp.gate.weight"])


def test_gpt_oss_experts_are_transposed_and_interleaved() -> None:
    names = muon_names(build("gpt_oss"))
    layer = "model.layers.0.mlp.experts."
    assert names[layer + "gate_up_proj"] == (("stack", ("grouped", 48, (1, 1))), True)
    assert names[layer + "down_proj"] == (("stack",), True)
    decayed = [
        name
        for group in muon_groups(build("gpt_oss"), adamw_weight_decay=0.1)
        if group["weight_decay"]
        for name in group["param_names"]
    ]
    assert decayed == ["model.embed_tokens.weight", "lm_head.weight"]  # not the 2-D expert biases


def test_llama4_experts_are_known_to_be_transposed() -> None:
    names = muon_names(build("llama4"))
    experts = {name: rule for name, rule in names.items() if ".experts." in name}
    assert {rule for name, rule in experts.items() if name.endswith("gate_up_proj")} == {
        (("stack", ("equal", 2)), True)
    }
    assert {rule for name, rule in experts.items() if name.endswith("down_proj")} == {
        (("stack",), True)
    }


def test_bert() -> None:
    names = muon_names(build("bert"))
    layer = [f"attention.self.{name}.weight" for name in ("query", "key", "value")]
    layer += ["attention.output.dense.weight", "intermediate.dense.weight", "output.dense.weight"]
    top = {"bert.pooler.dense.weight", "cls.predictions.transform.dense.weight"}
    assert names.keys() == layers("bert.encoder.layer", layer) | top


def test_vit_and_its_convolution_by_choice() -> None:
    model = build("vit")
    layer = [f"attention.{name}_proj.weight" for name in "qkvo"]
    layer += ["mlp.fc1.weight", "mlp.fc2.weight"]
    matrices = layers("vit.layers", layer)
    patches = "vit.embeddings.patch_embeddings.projection.weight"
    assert muon_names(model).keys() == matrices
    chosen = muon_names(model, convolutions=True)
    assert chosen.keys() == matrices | {patches}
    assert chosen[patches] == (("flatten",), False)


ALL = ["llama", "qwen3", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "llama4", "bert", "vit"]


@pytest.mark.parametrize("kind", ALL)
def test_every_trainable_parameter_is_in_exactly_one_group(kind: str) -> None:
    model = build(kind)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    groups = muon_groups(model, adamw_weight_decay=0.1)
    grouped = [param for group in groups for param in group["params"]]
    assert len({id(p) for p in grouped}) == len(grouped)
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p.requires_grad}
    names = {id(param): name for name, param in model.named_parameters()}
    for group in groups:
        assert [names[id(p)] for p in group["params"]] == group["param_names"]


@pytest.mark.parametrize("kind", ALL)
def test_groups_train_the_model(kind: str) -> None:
    model = build(kind).to_empty(device="cpu")
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator))
        param.grad = torch.randn(param.shape, generator=generator)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    Muon(muon_groups(model, convolutions=True)).step()
    for name, param in model.named_parameters():
        assert param.isfinite().all(), name
        assert not torch.equal(param, before[name]), name


def test_plain_torch_modules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(96, 32)
            self.block = nn.TransformerEncoderLayer(32, 4, 64)
            self.cross = nn.MultiheadAttention(32, 4, kdim=16, vdim=16)
            self.depthwise = nn.Conv1d(32, 32, 3, groups=32)
            self.up = nn.ConvTranspose2d(4, 4, 2)
            self.scale = nn.Parameter(torch.ones(4, 32))
            self.norm = nn.GroupNorm(4, 32)
            self.mixer = nn.ModuleDict({"output": nn.Linear(32, 32)})  # hidden, by its place
            self.output = nn.Linear(32, 96)

    names = muon_names(Model(), convolutions=True)
    assert names == {
        "block.self_attn.in_proj_weight": (("equal", 3), False),
        "block.self_attn.out_proj.weight": (None, False),
        "block.linear1.weight": (None, False),
        "block.linear2.weight": (None, False),
        "cross.q_proj_weight": (None, False),
        "cross.k_proj_weight": (None, False),
        "cross.v_proj_weight": (None, False),
        "cross.out_proj.weight": (None, False),
        "mixer.output.weight": (None, False),
    }


def test_a_weight_tied_to_an_embedding_is_one_even_when_the_head_comes_first() -> None:
    model = nn.Module()
    model.project = nn.Linear(8, 12, bias=False)
    model.tokens = nn.Embedding(12, 8)
    model.tokens.weight = model.project.weight
    (group,) = muon_groups(model)
    assert group["use_muon"] is False
    assert group["param_names"] == ["project.weight"]


def test_rates_and_decays_by_kind() -> None:
    groups = muon_groups(
        build("llama"), lr=0.03, adamw_lr=1e-4, weight_decay=0.1, adamw_weight_decay=0.2
    )
    rates = {
        name: (group["lr"], group["weight_decay"])
        for group in groups
        for name in group["param_names"]
    }
    assert rates["model.layers.0.mlp.up_proj.weight"] == (0.03, 0.1)
    assert rates["model.embed_tokens.weight"] == (1e-4, 0.2)
    assert rates["lm_head.weight"] == (1e-4, 0.2)
    assert rates["model.norm.weight"] == (1e-4, 0.0)


def test_overrides_apply_in_order_and_open_groups_of_their_own() -> None:
    groups = muon_groups(
        build("llama"),
        overrides={
            "*.self_attn.*": {"lr": 0.5},
            "*.layers.1.self_attn.q_proj.weight": {"lr": 0.7, "split": ("equal", 4)},
            "*.down_proj.*": {"use_muon": False},
            "lm_head.weight": {"use_muon": True},
        },
    )
    found = {name: group for group in groups for name in group["param_names"]}
    assert found["model.layers.0.self_attn.q_proj.weight"]["lr"] == 0.5
    assert found["model.layers.0.self_attn.q_proj.weight"]["split"] is None
    assert found["model.layers.1.self_attn.q_proj.weight"]["lr"] == 0.7
    assert found["model.layers.1.self_attn.q_proj.weight"]["split"] == ("equal", 4)
    assert found["model.layers.0.mlp.down_proj.weight"]["use_muon"] is False
    assert found["model.layers.0.mlp.down_proj.weight"]["lr"] == 3e-4
    assert found["lm_head.weight"]["use_muon"] is True
    Muon(groups)


def test_an_override_finds_a_tied_weight_by_either_name() -> None:
    for name in ("transformer.wte.weight", "lm_head.weight"):
        groups = muon_groups(build("gpt2"), overrides={name: {"use_muon": True}})
        assert "transformer.wte.weight" in [n for g in groups[:1] for n in g["param_names"]]
        assert groups[0]["use_muon"]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'\*\.wq\.\*' matches none of the model's 21 param"):
        muon_groups(build("llama"), overrides={"*.wq.*": {"use_muon": False}})


def test_a_split_that_does_not_fit_is_an_error_with_the_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.0.*\('equal', 5\).*\(32, 32\)"):
        muon_groups(build("llama"), overrides={"*.q_proj.weight": {"split": ("equal", 5)}})


@pytest.mark.parametrize("option", ["splitt", "use_moun", "params"])
def test_an_option_that_muon_does_not_have_is_an_error(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"'\*\.q_proj\.weight': '{option}' is no option.*split"):
        muon_groups(build("llama"), overrides={"*.q_proj.weight": {option: True}})


def test_a_fused_projection_of_unknown_layout_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unknown = ["query_key_value", "c_attn", "kv_b_proj", "Wi"]
    model = nn.ModuleDict({name: nn.Linear(8, 24) for name in [*unknown, "qkv", "wi"]})
    with caplog.at_level(logging.WARNING, logger="optstream"):
        names = muon_names(model)
        assert "query_key_value.weight and 3 more" in caplog.text
        caplog.clear()
        split = {"split": ("grouped", 2, (4, 4, 4))}
        muon_groups(model, overrides={f"{name}.weight": split for name in unknown})
        assert not caplog.text
    assert names["qkv.weight"] == (("equal", 3), False)
    assert names["c_attn.weight"] == (None, False)  # as GPT-BigCode's, which interleaves heads


def test_the_table_shows_every_decision(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("gpt2")
    model.get_parameter("transformer.wpe.weight").requires_grad_(False)
    muon_groups(model, table=True)
    printed = capsys.readouterr().out.splitlines()
    assert printed == muon_table(model).splitlines()
    assert len(printed) == 1 + len(list(model.parameters()))
    columns = {line.split("  ")[0]: line.split() for line in printed}
    tied = columns["transformer.wte.weight = lm_head.weight"]
    assert tied[3:] == ["96x32", "adamw", "embedding"]
    assert columns["transformer.wpe.weight"][1:] == ["16x32", "frozen", "embedding"]
    fused = columns["transformer.h.0.attn.c_attn.weight"][1:]
    assert fused == ["32x96", "muon", "3", "of", "32x32", "fused", "QKV"]
