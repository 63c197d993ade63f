"""Parameters of every kind: dtypes, shapes, strides, groups, frozen, without gradients."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import optstream
from optstream.layout.tensorless import AllocationPeak
from parity.cases import (
    SHAPES,
    Case,
    MasterLoop,
    assert_same_bits,
    check_case,
    make_params,
    set_grads,
    torch_cases,
    train,
)

ODD_SHAPES = ((), (0,), (0, 3), (1,), (1, 1), (13, 17), (3, 1, 5, 2), (4097,), (), (4, 4096))
BOTH = pytest.mark.parametrize("store", ["direct", "memory"])


@pytest.mark.parametrize(
    "case", [case for case in torch_cases() if "foreach" not in case.name], ids=str
)
def test_float64(case: Case, tmp_path: Path) -> None:
    check_case(case, torch.float64, tmp_path, window="64KiB")


def complex_cases() -> list[Case]:
    no_complex_form = ("Rprop", "Adafactor", "Muon")
    return [
        case
        for case in torch_cases()
        if not case.name.startswith(no_complex_form) and "fused" not in case.name
    ]


@pytest.mark.parametrize("case", complex_cases(), ids=str)
def test_complex(case: Case, tmp_path: Path) -> None:
    dtype = torch.complex128 if "foreach" in case.name else torch.complex64
    check_case(case, dtype, tmp_path, window="64KiB")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32], ids=str)
@pytest.mark.parametrize("case", [c for c in complex_cases() if "foreach" not in c.name], ids=str)
def test_scalars_that_have_state_when_wrapped(
    case: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    shapes = ((), (3,), ())
    plain, streamed = make_params(shapes, dtype), make_params(shapes, dtype)
    inner = case.make(streamed)
    train(streamed, inner, range(3))
    with optstream.offload(inner, tmp_path) as optimizer:
        train(streamed, optimizer, range(3, 6))
    train(plain, case.make(plain), range(6))
    assert_same_bits(streamed, plain)


def test_the_refusal_of_complex_scalars_names_the_error_of_torch(tmp_path: Path) -> None:
    inner = torch.optim.Adafactor([nn.Parameter(torch.tensor(1 + 2j))])
    with pytest.raises(optstream.OffloadError, match="does not support complex parameters"):
        optstream.offload(inner, tmp_path)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["SGD-momentum-for", "AdamW-for", "AdamW-fused", "Adagrad-foreach"]
)
def test_scalars_empty_and_odd_shapes(
    name: str, dtype: torch.dtype, store: str, tmp_path: Path
) -> None:
    case = next(case for case in torch_cases() if case.name == name)
    case = Case(f"{name}-odd", case.cls, case.options, ODD_SHAPES)
    check_case(case, dtype, tmp_path, window="64KiB", store=store)


@BOTH
def test_a_model_of_empty_parameters(store: str, tmp_path: Path) -> None:
    case = Case("AdamW-empty", torch.optim.AdamW, {}, ((0,), (0, 4)))
    check_case(case, torch.float32, tmp_path, store=store)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda data: data.transpose(0, 1),
    "channels_last": lambda data: data.contiguous(memory_format=torch.channels_last),
    "permuted": lambda data: data.permute(2, 0, 3, 1),
    "columns with gaps": lambda data: data[..., ::2],
    "rows with gaps": lambda data: data[::3],
    "one column": lambda data: data[:, 1, 1, 1],
    "offset into a storage": lambda data: data.flatten()[3:-2],
    "inner block": lambda data: data[1:-1, 1:-1, 1:-1],
}


WITH_GAPS = ("columns with gaps", "rows with gaps", "one column", "inner block")


def laid_out(layout: str, dtype: torch.dtype) -> list[nn.Parameter]:
    params = make_params([(14, 16, 18, 20), (70, 20, 6, 4)], dtype)
    return [nn.Parameter(LAYOUTS[layout](param.detach())) for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["SGD-momentum-for", "AdamW-foreach", "AdamW-fused", "Adafactor-for"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = next(case for case in torch_cases() if case.name == name)
    if name == "AdamW-fused" and layout in WITH_GAPS and dtype == torch.float32:
        pytest.skip("torch's fused kernel takes parameters with gaps for dense ones")
    plain, streamed = laid_out(layout, dtype), laid_out(layout, dtype)
    train(plain, MasterLoop(case.make, plain), range(4))
    with optstream.offload(case.make(streamed), tmp_path, window="64KiB") as optimizer:
        train(streamed, optimizer, range(4))
    assert_same_bits(streamed, plain)


@pytest.mark.parametrize("order", ["param", "grad", "both"])
@pytest.mark.parametrize("name", ["SGD-momentum-for", "AdamW-for", "RMSprop-centered-momentum-for"])
def test_gradients_in_another_order_than_their_parameters(
    name: str, order: str, tmp_path: Path
) -> None:
    case = next(case for case in torch_cases() if case.name == name)

    def run(streamed: bool) -> list[Tensor]:
        params = make_params([(150, 130)])
        if order != "grad":
            params = [nn.Parameter(params[0].detach().t())]
        optimizer = case.make(params)
        if streamed:
            optimizer = optstream.offload(optimizer, tmp_path, window="64KiB")
        for step in range(4):
            set_grads(params, step)
            if order != "param":
                grad = params[0].grad
                assert grad is not None
                params[0].grad = grad.t().contiguous().t()
            optimizer.step()
        return [param.detach() for param in params]

    assert_same_bits(run(True), run(False))


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns first": lambda grad: grad.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "the last dimension outside": lambda grad: grad.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "one row for all": lambda grad: grad[:1].expand_as(grad),
}


@pytest.mark.parametrize("codec", ["exact", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdamW-for", "AdamW-foreach", "AdamW-fused"])
@pytest.mark.parametrize("layout", GRADIENTS)
def test_copies_of_gradients_are_bounded(
    layout: str,
    name: str,
    dtype: torch.dtype,
    codec: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slice of a gradient that is laid out otherwise is copied tile by tile."""
    tile = 8192
    monkeypatch.setattr("optstream.update.tiles.MAX_TILE", tile)
    monkeypatch.setattr("optstream.plan.specs.ENCODED_TILE", tile)
    monkeypatch.setattr("optstream.plan.specs.MAX_TILE", tile)
    case = next(case for case in torch_cases() if case.name == name)
    peaks: list[int] = []

    def run(relay: Callable[[Tensor], Tensor]) -> list[Tensor]:
        params = make_params([(7, 110, 410)], dtype)
        with optstream.offload(
            case.make(params), tmp_path, window="2MiB", codec=codec
        ) as optimizer:
            for step in range(3):
                set_grads(params, step)
                grad = params[0].grad
                assert grad is not None
                if layout == "one row for all":
                    grad = grad[:1].expand_as(grad).contiguous()
                params[0].grad = relay(grad)
                with AllocationPeak() as peak:
                    optimizer.step()
            peaks.append(peak.peak_bytes)
        return [param.detach() for param in params]

    expected = run(lambda grad: grad)
    assert_same_bits(run(GRADIENTS[layout]), expected)
    assert peaks[1] <= peaks[0] + 4 * tile * 4


@pytest.mark.parametrize("case", torch_cases(), ids=str)
def test_bfloat16_without_masters(case: Case, tmp_path: Path) -> None:
    plain, streamed = (make_params(case.shapes, torch.bfloat16) for _ in range(2))
    train(plain, case.make(plain), range(6))
    with optstream.offload(
        case.make(streamed), tmp_path, window="64KiB", master_weights=False
    ) as optimizer:
        train(streamed, optimizer, range(6))
    assert_same_bits(streamed, plain)


# -- which parameters, when


Plan = Callable[[Sequence[nn.Parameter], int], None]


def compare(
    make: Callable[[Any], Optimizer],
    before_step: Plan,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    steps: int = 8,
    store: str = "direct",
) -> list[optstream.StepReport]:
    """Run both with gradients as `before_step(params, step)` leaves them; return the reports."""
    plain, streamed = make_params(shapes, dtype), make_params(shapes, dtype)
    before_step(plain, -1)
    before_step(streamed, -1)
    loop = MasterLoop(make, plain)
    reports = []
    with optstream.offload(make(streamed), directory, window="64KiB", store=store) as optimizer:
        for step in range(steps):
            for params in (plain, streamed):
                set_grads(params, step)
                before_step(params, step)
            loop.step()
            optimizer.step()
            assert_same_bits(streamed, plain)
            assert optimizer.report is not None
            reports.append(optimizer.report)
    return reports


def some_without_gradient(params: Sequence[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        if (step * 3 + index) % 4 == 0 or (index == 1 and step < 5):
            param.grad = None


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", torch_cases("SGD", "AdamW", "Adafactor", "RAdam", "Adagrad", "ASGD"), ids=str
)
def test_gradients_missing_in_some_steps(
    case: Case, dtype: torch.dtype, store: str, tmp_path: Path
) -> None:
    if "fused" in case.name and case.cls is torch.optim.SGD:
        pytest.skip("torch's fused SGD cannot begin with a parameter later than with the others")
    compare(case.make, some_without_gradient, tmp_path, dtype=dtype, store=store)


def test_windows_without_gradients_cost_no_transfer(tmp_path: Path) -> None:
    def only_the_last(params: Sequence[nn.Parameter], step: int) -> None:
        for param in params[:-1] if step > 0 else ():
            param.grad = None

    shapes = [(64, 256)] * 8
    reports = compare(torch.optim.AdamW, only_the_last, tmp_path, shapes=shapes, steps=6)
    assert [report.num_windows for report in reports] == [16, 2, 2, 2, 2, 2]
    # the writes of the first step may be through only in the second
    assert all(report.read_bytes == 0 for report in reports[2:])
    assert all(0 < report.written_bytes <= 4 * 65536 for report in reports[2:])


def test_no_gradients_at_all_touch_nothing(tmp_path: Path) -> None:
    def none_in_odd_steps(params: Sequence[nn.Parameter], step: int) -> None:
        for param in params if step % 2 else ():
            param.grad = None

    reports = compare(torch.optim.AdamW, none_in_odd_steps, tmp_path)
    assert [report.num_windows > 0 for report in reports] == [True, False] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", torch_cases("AdamW", "Adagrad", "SGD"), ids=str)
def test_frozen_parameters_that_train_later(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    def thaw(params: Sequence[nn.Parameter], step: int) -> None:
        for index, param in enumerate(params):
            param.requires_grad_(index % 2 == 0 or step >= 3)
            if not param.requires_grad:
                param.grad = None

    if "fused" in case.name and case.cls is torch.optim.SGD:
        pytest.skip("torch's fused SGD cannot begin with a parameter later than with the others")
    compare(case.make, thaw, tmp_path, dtype=dtype)


def test_frozen_parameters_have_no_space(tmp_path: Path) -> None:
    params = make_params([(64, 64)] * 4)
    for param in params[1:]:
        param.requires_grad_(False)
    with optstream.offload(torch.optim.AdamW(params), tmp_path) as optimizer:
        assert optimizer.plan.state_bytes == 2 * 4 * 64 * 64
        for param in params[1:]:
            param.requires_grad_(True)
        train(params, optimizer, range(2))
        assert optimizer.plan.state_bytes == 8 * 4 * 64 * 64


def test_frozen_after_some_steps(tmp_path: Path) -> None:
    def freeze(params: Sequence[nn.Parameter], step: int) -> None:
        params[0].requires_grad_(not 2 <= step < 5)
        if 2 <= step < 5:
            params[0].grad = None

    compare(torch.optim.AdamW, freeze, tmp_path)


def test_a_parameter_that_never_gets_a_gradient(tmp_path: Path) -> None:
    def never(params: Sequence[nn.Parameter], step: int) -> None:
        params[2].grad = None

    compare(torch.optim.AdamW, never, tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("store", ["direct", "memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_with_options_of_their_own(dtype: torch.dtype, store: str, tmp_path: Path) -> None:
    def make(params: Any) -> Optimizer:
        decayed, plain, rest = params[:2], params[2:3], params[3:]
        return torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.3, "betas": (0.5, 0.9)},
                {"params": plain, "weight_decay": 0.0, "amsgrad": True, "foreach": True},
                {"params": rest, "lr": 0.1, "maximize": True},
            ],
            lr=0.01,
        )

    compare(make, lambda params, step: None, tmp_path, dtype=dtype, store=store)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16, torch.float64), (torch.float16, torch.float32)]
)
def test_mixed_dtypes(dtypes: Sequence[torch.dtype], tmp_path: Path) -> None:
    def make() -> list[nn.Parameter]:
        return [
            nn.Parameter(param.detach().to(dtypes[index % len(dtypes)]))
            for index, param in enumerate(make_params(SHAPES))
        ]

    plain, streamed = make(), make()
    train(plain, MasterLoop(torch.optim.AdamW, plain))
    with optstream.offload(torch.optim.AdamW(streamed), tmp_path, window="64KiB") as optimizer:
        train(streamed, optimizer)
    assert_same_bits(streamed, plain)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_learning_rate_in_a_tensor(cls: type[Optimizer], tmp_path: Path) -> None:
    def make(params: Any) -> Optimizer:
        return cls(params, lr=torch.tensor(0.01), foreach=False)  # type: ignore[call-arg]

    compare(make, lambda params, step: None, tmp_path)


def test_tied_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 32)
            self.head = nn.Linear(32, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens))  # type: ignore[no-any-return]

    def run(streamed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Tied()
        optimizer: Optimizer = torch.optim.AdamW(model.parameters())
        if streamed:
            optimizer = optstream.offload(optimizer, tmp_path, model=model)
        tokens = torch.arange(100)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    assert_same_bits(run(True), run(False))


def test_frozen_parameters_keep_the_state_they_have(tmp_path: Path) -> None:
    """A run that froze a parameter, was wrapped, and thaws it goes on from its moments."""
    plain, streamed = make_params(SHAPES), make_params(SHAPES)
    loop, inner = torch.optim.AdamW(plain), torch.optim.AdamW(streamed)
    train(plain, loop, range(3))
    train(streamed, inner, range(3))
    for params in (plain, streamed):
        params[0].requires_grad_(False)
        params[0].grad = None
    with optstream.offload(inner, tmp_path, window="64KiB") as optimizer:
        for params in (plain, streamed):
            params[0].requires_grad_(True)
        train(plain, loop, range(3, 6))
        train(streamed, optimizer, range(3, 6))
    assert_same_bits(streamed, plain)


@pytest.mark.parametrize("case", torch_cases("SGD", "AdamW", "RMSprop", "Adafactor"), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles(
    case: Case, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice is updated tile by tile where that saves memory; the bits stay the same."""
    monkeypatch.setattr("optstream.plan.specs.MAX_TILE", 4096)
    monkeypatch.setattr("optstream.update.master.MAX_TILE", 1000)
    check_case(case, dtype, tmp_path, window="1MiB")


def test_infinite_and_missing_numbers_are_kept(tmp_path: Path) -> None:
    def poison(params: Sequence[nn.Parameter], step: int) -> None:
        grad = params[0].grad
        if grad is not None and step == 2:
            grad[0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e38])

    compare(torch.optim.AdamW, poison, tmp_path)
    compare(torch.optim.AdamW, poison, tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimizer_that_stepped_already(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, streamed = make_params(SHAPES), make_params(SHAPES)
    loop, inner = torch.optim.AdamW(plain, amsgrad=True), torch.optim.AdamW(streamed, amsgrad=True)
    train(plain, loop)
    train(streamed, inner, range(4))
    with optstream.offload(inner, tmp_path, window="64KiB") as optimizer:
        assert not inner.state
        train(streamed, optimizer, range(4, 10))
    assert_same_bits(streamed, plain)
