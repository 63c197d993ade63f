"""Codecs in training: split gives the bits of exact; the others do not depend on windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optstream
from optstream.errors import ConfigError
from parity.cases import (
    LOW_PRECISION,
    MATRICES,
    SHAPES,
    Case,
    MasterLoop,
    assert_same_bits,
    make_params,
    reference,
    set_grads,
    torch_cases,
    train,
)
from parity.lanes import DeferredLane, installed

BF16 = torch.bfloat16
ODD_SHAPES = ((), (0,), (1,), (1, 5), (13, 17), (3, 1, 5, 2), (4097,), (4, 4096))
LOSSY = ("bf16", "bf16-stochastic", "int8")
PLACES = (("direct", "64KiB"), ("memory", "200KiB"), ("direct", "16MiB"))


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with installed(DeferredLane, monkeypatch) as made:
        yield made


def muon(params: Any) -> torch.optim.Optimizer:
    return optstream.Muon(params, ns_steps=2)


def case_named(name: str) -> Case:
    return next(case for case in torch_cases() if case.name == name)


@pytest.mark.parametrize("case", torch_cases(), ids=str)
def test_split_gives_the_bits_of_exact(case: Case, tmp_path: Path) -> None:
    for store, window in PLACES[:2]:
        params = make_params(case.shapes, BF16)
        with optstream.offload(
            case.make(params), tmp_path, window=window, store=store, codec="split"
        ) as optimizer:
            train(params, optimizer)
        assert_same_bits(params, reference(case, BF16))


@pytest.mark.parametrize("name", ["AdamW-fused", "AdamW-foreach", "Muon"])
def test_split_with_a_late_lane(name: str, tmp_path: Path, deferred: list[str]) -> None:
    case = case_named(name)
    params = make_params(case.shapes, BF16)
    with optstream.offload(case.make(params), tmp_path, window="64KiB", codec="split") as optimizer:
        train(params, optimizer)
    assert_same_bits(params, reference(case, BF16))


def states(params: Sequence[nn.Parameter], optimizer: Any) -> list[Tensor]:
    views = [optimizer.state[param] for param in params if param in optimizer.state]
    return [view[key] for view in views for key in sorted(view)]


def both(
    before_step: Callable[[Sequence[nn.Parameter], int], None],
    directory: Path,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    make: Callable[[Any], Any] = torch.optim.AdamW,
    steps: int = 8,
) -> None:
    """Step with exact and with split; parameters and state, masters included, must be the same."""
    runs = {}
    for codec in ("exact", "split"):
        params = make_params(shapes, BF16)
        runs[codec] = (
            params,
            optstream.offload(make(params), directory / codec, window="64KiB", codec=codec),
        )
    for step in range(steps):
        for params, optimizer in runs.values():
            set_grads(params, step)
            before_step(params, step)
            optimizer.step()
        (exact, in_full), (split, in_half) = runs.values()
        assert_same_bits(split, exact)
        for a, b in zip(states(split, in_half), states(exact, in_full), strict=True):
            assert torch.equal(a, b)
    for _, optimizer in runs.values():
        optimizer.close()


def test_masters_come_back_whole(tmp_path: Path) -> None:
    both(lambda params, step: None, tmp_path)


def test_odd_shapes(tmp_path: Path) -> None:
    both(lambda params, step: None, tmp_path, ODD_SHAPES)


def test_muon_and_missing_gradients(tmp_path: Path) -> None:
    def some(params: Sequence[nn.Parameter], step: int) -> None:
        for index, param in enumerate(params):
            if (step * 3 + index) % 4 == 0:
                param.grad = None

    both(some, tmp_path, MATRICES, muon)


def test_ties_in_both_directions(tmp_path: Path) -> None:
    """Signs times powers of two put every master in the middle between two parameters."""

    def signs(params: Sequence[nn.Parameter], step: int) -> None:
        for param in params:
            grad = torch.ones_like(param)
            grad.view(-1)[::3] = -1
            param.grad = grad

    def make(params: Any) -> torch.optim.Optimizer:
        with torch.no_grad():
            for index, param in enumerate(params):
                param.fill_(1.0 if index % 2 else 1.0078125)
        return torch.optim.SGD(params, lr=2.0**-8, momentum=0.0)

    both(signs, tmp_path, make=make)


def test_values_at_the_ends(tmp_path: Path) -> None:
    """Negative zeros, subnormals, overflow while rounding, infinities; NaN where exact has it."""
    special = [0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x0080]

    def make(params: Any) -> torch.optim.Optimizer:
        with torch.no_grad():
            bits = torch.tensor(special, dtype=torch.int32).to(torch.int16)
            params[0].view(-1)[: len(special)] = bits.view(BF16)
        return torch.optim.SGD(params, lr=1e30)

    def grads(params: Sequence[nn.Parameter], step: int) -> None:
        grad = torch.zeros_like(params[0])
        flat = grad.view(-1)
        flat[:9] = torch.tensor([0.0, 0.0, 1e-39, 1e-39, -2e5, 2e5, 0.0, 0.0, 1e-38]) * 1e-2
        params[0].grad = grad / 1e28

    both(grads, tmp_path, [(300, 20)], make, steps=4)


@pytest.mark.parametrize("name", ["AdamW-fused", "Muon"])
def test_nan_goes_where_it_goes_in_exact(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    outcomes = []
    for codec in ("exact", "split"):
        params = make_params(case.shapes, BF16)
        with optstream.offload(case.make(params), tmp_path, window="64KiB", codec=codec) as opt:
            for step in range(5):
                set_grads(params, step)
                if step == 2:
                    assert params[0].grad is not None
                    params[0].grad[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
                opt.step()
        outcomes.append([param.detach() for param in params])
    for split, exact in zip(*reversed(outcomes), strict=True):
        assert torch.equal(split.isnan(), exact.isnan())
        assert torch.equal(split.nan_to_num(7.0), exact.nan_to_num(7.0))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda data: data.transpose(0, 1),
    "channels_last": lambda data: data.contiguous(memory_format=torch.channels_last),
    "rows with gaps": lambda data: data[::3],
    "offset into a storage": lambda data: data.flatten()[3:-2],
}


@pytest.mark.parametrize("name", ["SGD-momentum-for", "AdamW-fused", "Adafactor-for"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, name: str, tmp_path: Path) -> None:
    case = case_named(name)

    def laid_out() -> list[nn.Parameter]:
        params = [*make_params([(14, 16, 18, 20), (70, 20, 6, 4)], BF16)]
        rest = make_params([(50,)], BF16)
        return [*(nn.Parameter(LAYOUTS[layout](p.detach())) for p in params), *rest]

    plain, streamed = laid_out(), laid_out()
    train(plain, MasterLoop(case.make, plain), range(4))
    with optstream.offload(
        case.make(streamed), tmp_path, window="64KiB", codec="split"
    ) as optimizer:
        train(streamed, optimizer, range(4))
    assert_same_bits(streamed, plain)


def test_a_parameter_in_another_memory_format_than_before(tmp_path: Path) -> None:
    def reformat(params: Sequence[nn.Parameter], step: int) -> None:
        if step == 3:
            params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(params)

    both(reformat, tmp_path, [(6, 8, 10, 12), (90, 130)], make)


# -- parameters that something else has written


def test_what_something_else_wrote_is_followed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = make_params([(4, 4096), (300,)], BF16)
    params[0].grad = None
    with optstream.offload(
        torch.optim.SGD(params, lr=1e-3), tmp_path, window="64KiB", codec="split"
    ) as optimizer:
        train(params, optimizer, range(3))
        before = optimizer.state[params[0]]["master"]
        params[0].data[1, 5] = 3.0  # no version tells
        for param in params:
            param.grad = torch.zeros_like(param)
        with caplog.at_level("INFO", "optstream"):
            optimizer.step()
        after = optimizer.state[params[0]]["master"]
    expected = before.clone()
    expected[1] = params[0][1].float()  # the whole block of 4096
    assert torch.equal(after, expected)
    assert "1 parameters (group0.param0, ...) were written by something else" in caplog.text


def test_weights_swapped_out_and_back_lose_nothing(tmp_path: Path) -> None:
    def swap(params: Sequence[nn.Parameter], step: int) -> None:
        kept = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param, value in zip(params, kept, strict=True):
                param.zero_()
                param.copy_(value)

    both(swap, tmp_path)


# -- codecs that lose something


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "name", ["AdamW-fused", "AdamW-amsgrad-foreach", "SGD-momentum-for", "Muon"]
)
def test_windows_and_stores_do_not_matter(
    name: str, codec: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    case = case_named(name)
    outcomes = []
    for store, window in PLACES:
        params = make_params(case.shapes, dtype)
        with optstream.offload(
            case.make(params), tmp_path, window=window, store=store, codec=codec
        ) as optimizer:
            train(params, optimizer)
            outcomes.append([*states(params, optimizer), *(p.detach() for p in params)])
    for other in outcomes[1:]:
        assert_same_bits(other, outcomes[0])


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("name", ["AdamW-fused", "Muon"])
def test_near_exact(name: str, codec: str, tmp_path: Path) -> None:
    case = case_named(name)
    params = make_params(case.shapes)
    with optstream.offload(case.make(params), tmp_path, window="64KiB", codec=codec) as optimizer:
        train(params, optimizer)
    start = make_params(case.shapes)
    for param, exact, first in zip(params, reference(case, torch.float32), start, strict=True):
        moved = (exact - first).norm()
        assert (param - exact).norm() < 0.05 * moved
        assert not torch.equal(param, exact)


def test_the_seed_of_random_rounding(tmp_path: Path) -> None:
    def run(seed: int) -> list[Tensor]:
        params = make_params(SHAPES)
        with optstream.offload(
            torch.optim.AdamW(params), tmp_path, codec="bf16-stochastic", codec_seed=seed
        ) as optimizer:
            train(params, optimizer)
        return [param.detach() for param in params]

    assert_same_bits(run(3), run(3))
    assert not torch.equal(run(3)[0], run(4)[0])


def test_a_codec_for_each_state(tmp_path: Path) -> None:
    params = make_params([(64, 256), (64, 256)], BF16)
    codec = {"*param1/exp_avg": "exact", "exp_avg": "bf16", "exp_avg_sq": "int8", "master": "split"}
    with optstream.offload(torch.optim.AdamW(params), tmp_path, codec=codec) as optimizer:
        used = [{state.key: state.codec for state in spec.states} for spec in optimizer.plan.params]
        train(params, optimizer)
    assert used == [
        {"master": "split", "exp_avg": "bf16", "exp_avg_sq": "int8-positive"},
        {"master": "split", "exp_avg": "exact", "exp_avg_sq": "int8-positive"},
    ]


# -- what does not fit


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("fp8", "codec 'fp8'.*known: exact, split, bf16, bf16-stochastic, int8"),
        ("split", "'split' for '\\*' fits no state.*masters of bfloat16"),
        ({"exp_avg": "split"}, "'split' for 'exp_avg' fits no state"),
        ({"*.embed.*": "bf16"}, "'bf16' for '\\*.embed.\\*' fits no state"),
        ({"exp_avg": "bf16", "exp_avg_sq": "bf16", "*": "int8", "x": "exact"}, "for '\\*' fits no"),
        (8, "codec=8: give one of"),
    ],
)
def test_refused(codec: Any, text: str, tmp_path: Path) -> None:
    params = make_params([(10, 10)])
    with pytest.raises(ConfigError, match=text):
        optstream.offload(torch.optim.AdamW(params), tmp_path, codec=codec)
    assert not list(tmp_path.iterdir())


def test_state_of_unknown_meaning_is_refused(tmp_path: Path) -> None:
    params = make_params([(10, 10)])
    with pytest.raises(ConfigError, match=r'state .prev.*"prev": "exact"'):
        optstream.offload(torch.optim.Rprop(params), tmp_path, codec="int8")
    codec = {"prev": "exact", "step_size": "bf16"}
    optstream.offload(torch.optim.Rprop(params), tmp_path, codec=codec).close()


def test_float16_masters_stay_exact(tmp_path: Path) -> None:
    params = [
        nn.Parameter(param.detach().to(dtype))
        for param, dtype in zip(make_params([(64, 64)] * 2), LOW_PRECISION, strict=True)
    ]
    with optstream.offload(torch.optim.AdamW(params), tmp_path, codec="split") as optimizer:
        masters = [spec.states[0].codec for spec in optimizer.plan.params]
    assert masters == ["split", "exact"]


# -- bytes

CODEC = dict[str, str] | str
BYTES: Mapping[str, tuple[Callable[[Any], Any], CODEC, float]] = {
    "Muon, exact": (muon, "exact", 8.0),
    "Muon, split": (muon, "split", 6.0),
    "Muon, bf16": (muon, "bf16", 4.0),
    "Muon, int8": (muon, "int8", 3.1),
    "AdamW, exact": (torch.optim.AdamW, "exact", 12.0),
    "AdamW, split": (torch.optim.AdamW, "split", 10.0),
    "AdamW, bf16": (torch.optim.AdamW, "bf16", 6.0),
    "AdamW, stochastic": (torch.optim.AdamW, "bf16-stochastic", 6.0),
    "AdamW, int8": (torch.optim.AdamW, "int8", 4.2),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_that_move(case: str, tmp_path: Path) -> None:
    """Counted, each way, per parameter and step; digests and padding to pages add 0.3 %."""
    make, codec, limit = BYTES[case]
    params = make_params([(512, 1024)] * 8, BF16)
    numel = sum(param.numel() for param in params)
    with optstream.offload(make(params), tmp_path, window="4MiB", codec=codec) as optimizer:
        written = []
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
            optimizer._state.stream.drain()
            written.append(optimizer._state.stream.counters.written_bytes)
        plan = optimizer.plan
    assert written[2] - written[1] == plan.written_bytes_per_step
    assert plan.read_bytes_per_step <= plan.written_bytes_per_step
    assert (written[2] - written[1]) / numel <= limit * 1.003
    assert plan.state_bytes / numel <= limit * 1.001
