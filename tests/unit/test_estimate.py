"""`optstream plan` and `offload` come to the same figures: one plans, the other one does it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import optstream
from optstream.errors import ConfigError
from optstream.estimate.estimate import Check, Estimate, drive_bytes
from optstream.estimate.models import parse_count, read_model
from optstream.estimate.node import Node, read_node
from optstream.estimate.optimizers import RECIPES, make_optimizer
from optstream.estimate.planning import NO_RAM, describe_all, make_plans
from optstream.ram import parse_budget

CONFIGS = {
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "qwen3_moe": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "mixtral": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_key_value_heads": 2,
    },
}
SIZES = {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 4}
WINDOW_BYTES = 128 * 2**10


def write_config(kind: str, directory: Path) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({"model_type": kind, **SIZES, **CONFIGS[kind]}))
    return path


def real_model(path: Path, dtype: torch.dtype) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "ram", "codec"),
    [
        *((kind, "muon", torch.bfloat16, "0", "exact") for kind in CONFIGS),
        ("qwen3_moe", "muon", torch.float32, "30%", "exact"),
        ("gpt2", "adamw", torch.bfloat16, "30%", "split"),
        ("llama", "adamw", torch.float32, "0", "int8"),
        ("llama", "sgd", torch.bfloat16, "0", "bf16"),
        ("mixtral", "muon", torch.bfloat16, "0", "int8"),
        ("mixtral", "sgd", torch.float32, "100%", "exact"),
    ],
)
def test_figures_of_a_config_are_those_of_the_real_optimizer(
    kind: str, name: str, dtype: torch.dtype, ram: str, codec: str, tmp_path: Path
) -> None:
    shape = read_model(str(write_config(kind, tmp_path)), dtype)
    optimizer = make_optimizer(name, shape.module)
    specs = describe_all(shape.module, optimizer, "cpu", codec)
    (planned,) = make_plans(specs, optimizer, WINDOW_BYTES, parse_budget(ram))
    assert (planned.num_resident > 0) == (ram != "0")

    model = real_model(tmp_path, dtype)
    assert shape.num_params == sum(param.numel() for param in model.parameters())
    names = {"torch": torch, "optstream": optstream, "model": model}
    real = eval(RECIPES[name].code, names)  # the very line that is printed
    state = tmp_path / "state"
    with optstream.offload(
        real, state, model=model, window=WINDOW_BYTES, ram=ram, codec=codec
    ) as streamed:
        assert planned == streamed.plan
        for figure in ("peak_host_bytes", "read_bytes_per_step", "written_bytes_per_step"):
            assert getattr(planned, figure) == getattr(streamed.plan, figure)
        files = streamed._state.store
        file_bytes = [files.file(window).file_bytes for window in range(planned.num_windows)]
        assert drive_bytes(planned) == sum(file_bytes)


@pytest.mark.parametrize("num_params", [1, 127, 1000, 123_457, 7 * 10**9, 10**12 + 1])
@pytest.mark.parametrize("name", RECIPES)
def test_a_number_stands_for_exactly_so_many_parameters(num_params: int, name: str) -> None:
    shape = read_model(str(num_params), torch.bfloat16)
    assert shape.num_params == num_params
    assert shape.num_bytes == 2 * num_params
    optimizer = make_optimizer(name, shape.module)
    (plan,) = make_plans(describe_all(shape.module, optimizer, "cuda"), optimizer, 2**30)
    moments = plan.state_bytes - 4 * num_params  # the masters
    most = {"muon": 8, "adamw": 8, "sgd": 4}[name] * num_params
    assert 4 * num_params <= moments <= most
    if name != "muon":
        assert moments == most
    elif num_params >= 10**9:
        assert moments < 4.4 * num_params  # only embedding and head are AdamW's


def test_an_accelerator_needs_its_own_memory() -> None:
    shape = read_model("10M", torch.bfloat16)
    optimizer = make_optimizer("adamw", shape.module)
    on_cpu, on_cuda = (
        make_plans(describe_all(shape.module, optimizer, device), optimizer, 2**20)[0]
        for device in ("cpu", "cuda")
    )
    assert on_cpu.peak_device_bytes == 0
    assert on_cuda.peak_device_bytes > 2 * 2**20
    assert on_cuda.peak_host_bytes < on_cpu.peak_host_bytes  # gradients in float32 are there


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9),
        ("30.5e9", 30_500_000_000),
        ("30.5e+9", 30_500_000_000),
        ("0.5K", 500),
        ("1T", 10**12),
        ("124M", 124 * 10**6),
        ("1000", 1000),
        ("7b", None),
        ("7 B", None),
        ("models/7B", None),
        ("-7B", None),
        ("", None),
        ("B", None),
    ],
)
def test_numbers_of_parameters(text: str, count: int | None) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["0", "0.5", "1.0005K", "0B", "1e15", "9e99", "1000T"])
def test_numbers_that_no_model_has(text: str) -> None:
    with pytest.raises(ConfigError, match="not a whole number of parameters from 1 to"):
        parse_count(text)


def test_a_model_that_transformers_does_not_build(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[]", "{}", '{"model_type": "nothing"}', '{"model_type": "vit"}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"transformers builds no model of .*config\.json: ."):
            read_model(str(tmp_path), torch.float32)


def test_code_that_a_config_names_is_neither_run_nor_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "custom", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit(99)")
    with pytest.raises(ConfigError, match=r"config\.json: .*contains custom code.*give a number"):
        read_model(str(tmp_path), torch.float32)
    assert capsys.readouterr().out == ""


def test_the_architecture_that_was_saved_is_built(tmp_path: Path) -> None:
    path = write_config("llama", tmp_path)
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["LlamaForTokenClassification"]}))
    shape = read_model(str(path), torch.float32)
    assert type(shape.module).__name__ == "LlamaForTokenClassification"


def test_kernels_that_are_not_installed_are_not_needed(tmp_path: Path) -> None:
    path = write_config("llama", tmp_path)
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    assert read_model(str(path), torch.float32).num_params > 0


def test_too_many_windows() -> None:
    shape = read_model("1T", torch.float32)
    optimizer = make_optimizer("sgd", shape.module)
    specs = describe_all(shape.module, optimizer, "cpu")
    with pytest.raises(ConfigError, match=r"give a larger --window"):
        make_plans(specs, optimizer, 2**20)


def estimate(node: Node, num_ranks: int = 1, on_node: int = 1, **more: float) -> Estimate:
    shape = read_model("100M", torch.float32)
    optimizer = make_optimizer("adamw", shape.module)
    specs = describe_all(shape.module, optimizer, "cpu")
    plans = make_plans(specs, optimizer, 64 * 2**20, num_ranks=num_ranks)
    return Estimate(plans, node, on_node, NO_RAM, **more)  # type: ignore[arg-type]


def test_ranks_share_the_state() -> None:
    (alone,) = estimate(Node()).plans
    found = estimate(Node(bytes_per_s=1e9), num_ranks=3, on_node=2)
    assert len(found.plans) == 3
    assert sum(plan.state_bytes for plan in found.plans) == alone.state_bytes
    sizes = [plan.state_bytes for plan in found.plans]
    assert found.most_of_a_node(lambda plan: plan.state_bytes) == max(sum(sizes[:2]), sizes[2])
    assert max(sizes) < alone.state_bytes / 2
    moved = [plan.read_bytes_per_step + plan.written_bytes_per_step for plan in found.plans]
    assert found.drive_s == pytest.approx(max(sum(moved[:2]), moved[2]) / 1e9)


def test_more_ranks_than_parameters() -> None:
    shape = read_model("1", torch.float32)
    optimizer = make_optimizer("adamw", shape.module)
    plans = make_plans(describe_all(shape.module, optimizer, "cpu"), optimizer, 2**20, num_ranks=3)
    assert [plan.num_windows for plan in plans] == [1, 0, 0]
    assert Estimate(plans, Node(space_bytes=2**20), 1).checks[0].fits


def test_a_step_and_a_day() -> None:
    found = estimate(Node(bytes_per_s=1e9), step_s=10.0, endurance_bytes=10**15)
    (plan,) = found.plans
    moved = plan.read_bytes_per_step + plan.written_bytes_per_step
    assert found.drive_s == pytest.approx(moved / 1e9)
    written = plan.written_bytes_per_step * 8640
    assert found.written_bytes_per_day == pytest.approx(written)
    assert found.endurance_days == pytest.approx(10**15 / written)


def test_no_step_is_shorter_than_the_drive_takes() -> None:
    found = estimate(Node(bytes_per_s=1e8), step_s=0.001)
    assert found.drive_s is not None
    written = found.plans[0].written_bytes_per_step * 86400 / found.drive_s
    assert found.written_bytes_per_day == pytest.approx(written)


def test_what_is_not_known_is_not_said() -> None:
    found = estimate(Node())
    assert (found.drive_s, found.written_bytes_per_day, found.endurance_days) == (None, None, None)
    assert found.checks == []


def test_what_fits_and_what_does_not() -> None:
    plans = estimate(Node(), 2, 2).plans
    state_bytes = sum(map(drive_bytes, plans))
    host_bytes = sum(plan.peak_host_bytes for plan in plans)
    exact = Node(space_bytes=2 * state_bytes, memory_bytes=host_bytes, open_files=1024)
    assert all(check.fits and not check.advice for check in estimate(exact, 2, 2).checks)
    lacking = Node(space_bytes=2 * state_bytes - 1, memory_bytes=host_bytes - 1)
    checks = {check.what: check for check in estimate(lacking, 2, 2).checks}
    assert [check.fits for check in checks.values()] == [True, False, False]
    assert checks["host memory"].advice == "give --window 32MiB"
    assert checks["drive, with a checkpoint kept"].advice.startswith("free 1 B, or")
    (check,) = estimate(Node(memory_bytes=2**20)).checks
    assert check.advice.startswith("no window is small enough; give fewer ranks")
    assert Check("x", 1, 1, "").fits


def test_memory_to_spare() -> None:
    (plan,) = estimate(Node()).plans
    assert estimate(Node()).spare_bytes(0) == 0
    assert estimate(Node(memory_bytes=2**30)).spare_bytes(0) == 0
    memory = Node(memory_bytes=plan.peak_host_bytes + 5 * 2**30)
    assert estimate(memory).spare_bytes(0) == 4 * 2**30
    assert estimate(memory).spare_bytes(2**30) == 3 * 2**30
    both = estimate(Node(memory_bytes=40 * 2**30), 2, 2)
    host_bytes = sum(plan.peak_host_bytes for plan in both.plans)
    assert both.spare_bytes(0) == (36 * 2**30 - host_bytes) // 2
    half = estimate(Node()).with_ram(plan.data_bytes // 2)
    assert 0 < half.plans[0].resident_bytes <= plan.data_bytes // 2
    assert half.moved_bytes_per_step < 0.6 * estimate(Node()).moved_bytes_per_step


def test_open_files() -> None:
    num_windows = estimate(Node()).plans[0].num_windows
    few, enough = Node(open_files=2 * num_windows), Node(open_files=2 * num_windows + 128)
    assert [c.fits for node in (few, enough) for c in estimate(node).checks] == [False, True]


def test_a_node_from_the_doctor(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    use = {"directories": ["/a"], "bytes_per_s": None, "free_bytes": 5, "io_threads": 2}
    limits = {"available_bytes": 7, "open_files": None}
    path.write_text(json.dumps({"use": use, "limits": limits}))
    node = read_node(path)
    assert node == Node(("/a",), None, 5, 7, None, 2)
    assert node.given(bytes_per_s=3, space_bytes=None) == Node(("/a",), 3, 5, 7, None, 2)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "cannot read .*nowhere"),
        ("{", "is not what optstream doctor --json writes"),
        ("[]", "is not what optstream doctor --json writes"),
        ('{"use": {}, "limits": {}}', "is not what optstream doctor --json writes"),
        ('{"use": null, "limits": {}}', "no usable directory"),
    ],
)
def test_a_node_that_is_none(text: str | None, match: str, tmp_path: Path) -> None:
    path = tmp_path / ("nowhere" if text is None else "doctor.json")
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_node(path)
