"""The optimizer: formula, state, devices, schedulers, checkpoints, and every odd gradient."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optstream.errors import ConfigError
from optstream.muon import COEFFICIENTS, Muon, muon_flops, newton_schulz_flops

SHAPES = [(12, 12), (8, 20), (20, 8), (8, 16), (1, 7), (7, 1)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(randn(*shape, seed=seed, dtype=dtype))


def train(optimizer: torch.optim.Optimizer, steps: int = 4, seed: int = 100) -> None:
    """Step with gradients that depend on the step and the parameter's place alone."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for index, param in enumerate(params):
            grad = randn(*param.shape, seed=seed + 1000 * step + index)
            param.grad = grad.to(param.dtype)
        optimizer.step()


def quintic(x: Tensor, steps: int = 5) -> Tensor:
    """The published iteration, in x's own precision."""
    (a, b, c), tall = COEFFICIENTS["quintic"][0], x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", ["ema", "classical"])
def test_trajectory_is_that_of_the_published_formula(nesterov: bool, mode: str) -> None:
    lr, mu, decay = 0.05, 0.9, 0.1
    for shape in SHAPES:
        param = parameter(*shape, dtype=torch.float64)
        optimizer = Muon([param], lr, mu, nesterov=nesterov, weight_decay=decay, momentum_mode=mode)
        expected, buffer = param.detach().clone(), torch.zeros(shape, dtype=torch.float64)
        for step in range(4):
            train(optimizer, 1, seed=step)
            gain = 1 - mu if mode == "ema" else 1.0
            buffer = mu * buffer + gain * param.grad
            update = gain * param.grad + mu * buffer if nesterov else buffer
            scale = math.sqrt(max(1, shape[0] / shape[1]))
            expected = expected * (1 - lr * decay) - lr * scale * quintic(update)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize(
    ("ns_dtype", "tolerance"),
    # torch.optim.Muon rounds to 8 bits: 5 steps of lr 0.02 with entries below 1
    [("bfloat16", 5e-3), ("float32", 1e-2)],
)
def test_trajectory_agrees_with_torch_within_bf16(
    adjust_lr_fn: str | None, ns_dtype: str, tolerance: float
) -> None:
    for shape in SHAPES[:4]:
        ours, theirs = parameter(*shape), parameter(*shape)
        train(Muon([ours], 0.02, weight_decay=0.1, ns_dtype=ns_dtype, adjust_lr_fn=adjust_lr_fn), 5)
        train(torch.optim.Muon([theirs], 0.02, adjust_lr_fn=adjust_lr_fn), 5)
        assert (ours - theirs).abs().max() < tolerance
        assert (ours - parameter(*shape)).abs().max() > 10 * (ours - theirs).abs().mean()


def test_momentum_buffer_is_bit_for_bit_that_of_torch() -> None:
    ours, theirs = parameter(20, 8), parameter(20, 8)
    optimizers = [Muon([ours]), torch.optim.Muon([theirs])]
    for optimizer in optimizers:
        train(optimizer)
    states = [list(optimizer.state.values())[0] for optimizer in optimizers]  # noqa: RUF015
    assert torch.equal(states[0]["momentum_buffer"], states[1]["momentum_buffer"])
    assert states[0].keys() == states[1].keys()


def test_modes_differ_by_a_factor_that_orthogonalisation_removes() -> None:
    params = [parameter(8, 20), parameter(8, 20)]
    for param, mode in zip(params, ("ema", "classical"), strict=True):
        train(Muon([param], 0.02, 0.5, momentum_mode=mode))  # 1 - 0.5 is a power of two
    torch.testing.assert_close(*params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("adjust_lr_fn", "scale"),
    [
        ("original", lambda rows, cols: math.sqrt(max(1, rows / cols))),
        (None, lambda rows, cols: math.sqrt(max(1, rows / cols))),
        ("match_rms_adamw", lambda rows, cols: 0.2 * math.sqrt(max(rows, cols))),
        ("spectral", lambda rows, cols: math.sqrt(rows / cols)),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_scale_counts_outputs_as_rows(adjust_lr_fn: Any, scale: Any, transposed: bool) -> None:
    for shape in SHAPES:
        param = parameter(*shape, dtype=torch.float64)
        before = param.detach().clone()
        train(Muon([param], 1.0, transposed=transposed, adjust_lr_fn=adjust_lr_fn), 1)
        rows, cols = reversed(shape) if transposed else shape
        expected = before - scale(rows, cols) * quintic(param.grad)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "split", "parts"),
    [
        ((12, 5), ("equal", 3), lambda w: [w[:4], w[4:8], w[8:]]),
        ((12, 5), ("rows", (6, 4, 1, 1)), lambda w: [w[:6], w[6:10], w[10:11], w[11:]]),
        ((3, 6, 5), ("stack",), lambda w: list(w)),
        ((3, 6, 5), ("stack", ("equal", 2)), lambda w: [h for e in w for h in (e[:3], e[3:])]),
        ((6, 4, 2, 2), ("flatten",), lambda w: [w.view(6, 16)]),
    ],
)
def test_each_block_is_updated_as_a_parameter_of_its_own(
    shape: tuple[int, ...], split: Any, parts: Any
) -> None:
    fused = parameter(*shape)
    alone = [nn.Parameter(part.clone()) for part in parts(fused.detach())]
    options: dict[str, Any] = {"weight_decay": 0.1, "cautious_weight_decay": True}
    optimizer, separate = Muon([fused], split=split, **options), Muon(alone, **options)
    for step in range(3):
        train(optimizer, 1, seed=step)
        for param, grad in zip(alone, parts(fused.grad), strict=True):
            param.grad = grad.clone()
        separate.step()
    for part, param in zip(parts(fused.detach()), alone, strict=True):
        assert torch.equal(part, param)


def test_interleaved_qkv_and_transposed_storage_are_the_same_matrices() -> None:
    order = torch.arange(16).view(2, 8)  # 2 groups of 4 query, 2 key, 2 value rows
    order = torch.cat([order[:, :4].flatten(), order[:, 4:6].flatten(), order[:, 6:].flatten()])
    fused = parameter(16, 5)
    stored = nn.Parameter(fused.detach().T.clone())
    plain = nn.Parameter(fused.detach()[order].clone())
    cases = [
        (fused, ("grouped", 2, (4, 2, 2)), False),
        (stored, ("grouped", 2, (4, 2, 2)), True),
        (plain, ("rows", (8, 4, 4)), False),
    ]
    grad = randn(16, 5, seed=7)
    for param, split, transposed in cases:
        param.grad = grad.T.clone() if transposed else grad[order] if param is plain else grad
        Muon([param], 0.1, split=split, transposed=transposed).step()
    torch.testing.assert_close(stored.T, fused, rtol=0, atol=1e-6)
    assert torch.equal(plain, fused[order])


def test_bits_do_not_depend_on_which_parameters_share_a_step() -> None:
    shapes = [(12, 12), (8, 20), (12, 12), (20, 8), (12, 12)]

    def optimizer() -> Muon:
        params = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
        return Muon([{"params": params[:3]}, {"params": params[3:], "ns_coefficients": "quintic"}])

    together, apart = optimizer(), optimizer()
    grads = [randn(*shape, seed=50 + i) for i, shape in enumerate(shapes)]
    for _ in range(3):
        for param, grad in zip(_params(together), grads, strict=True):
            param.grad = grad.clone()
        together.step()
    whole = [list(group["params"]) for group in apart.param_groups]
    for index, group in enumerate(apart.param_groups):  # one parameter a step, as streaming does
        for other in apart.param_groups:
            other["params"] = []
        for param in whole[index]:
            group["params"] = [param]
            for _ in range(3):
                param.grad = grads[sum(len(w) for w in whole[:index]) + _place(whole, param)]
                apart.step()
    for a, b in zip(_params(together), [p for group in whole for p in group], strict=True):
        assert torch.equal(a, b)


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _place(groups: list[list[Tensor]], param: Tensor) -> int:
    return next(i for group in groups for i, other in enumerate(group) if other is param)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"maximize": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adamw_groups_are_torch_adamw_bit_for_bit(options: Any, dtype: torch.dtype) -> None:
    shapes = [(5,), (4, 6), (2, 3, 4)]
    hyper = {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.3}
    ours = [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    theirs = [parameter(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    muon = Muon([{"params": ours, "use_muon": False, **hyper, **options}])
    adamw = torch.optim.AdamW(theirs, **hyper, **options)
    train(muon, 5)
    train(adamw, 5)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert muon.state[a].keys() == adamw.state[b].keys()
        for name, value in adamw.state[b].items():
            assert torch.equal(muon.state[a][name], value)
            assert muon.state[a][name].dtype == value.dtype


@pytest.mark.parametrize("foreach", [False, True])
def test_complex_parameters_are_torch_adamw_bit_for_bit(foreach: bool) -> None:
    ours, theirs = (parameter(4, 4, dtype=torch.complex64) for _ in range(2))
    hyper = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": foreach}
    muon = Muon([{"params": [ours], "use_muon": False, **hyper}])
    adamw = torch.optim.AdamW([theirs], **hyper)
    grads = [torch.complex(randn(4, 4, seed=step), randn(4, 4, seed=9 + step)) for step in range(3)]
    for grad in grads:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        muon.step()
        adamw.step()
    assert torch.equal(ours, theirs)


def test_one_step_updates_both_kinds() -> None:
    matrix, vector = parameter(8, 8), parameter(8)
    optimizer = Muon(
        [{"params": [matrix]}, {"params": [vector], "use_muon": False}], lr=0.5, adamw_lr=1e-3
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]
    train(optimizer, 1)
    assert optimizer.state[matrix].keys() == {"momentum_buffer"}
    assert optimizer.state[vector].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert (vector - parameter(8)).abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def test_cautious_decay_spares_elements_that_the_update_pulls_outwards() -> None:
    before = parameter(6, 9, dtype=torch.float64)
    plain, decayed, cautious = (nn.Parameter(before.detach().clone()) for _ in range(3))
    train(Muon([plain], 0.1), 1)
    train(Muon([decayed], 0.1, weight_decay=0.5), 1)
    train(Muon([cautious], 0.1, weight_decay=0.5, cautious_weight_decay=True), 1)
    inwards = (before - plain) * before >= 0
    assert 0 < inwards.sum() < inwards.numel()
    expected = torch.where(inwards, decayed, plain)
    torch.testing.assert_close(cautious, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", ["ema", "classical"])
def test_maximize_is_the_negative_gradient(mode: str, nesterov: bool) -> None:
    ascent, descent = parameter(6, 9), parameter(6, 9)
    options: Any = {"momentum_mode": mode, "nesterov": nesterov}
    ascending, descending = Muon([ascent], maximize=True, **options), Muon([descent], **options)
    for number in range(3):
        ascent.grad = randn(6, 9, seed=number)
        descent.grad = -ascent.grad
        kept = ascent.grad.clone()
        ascending.step()
        descending.step()
        assert torch.equal(ascent, descent)
        assert torch.equal(ascent.grad, kept)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", ["ema", "classical"])
def test_huge_gradients_are_as_any_other(mode: str, nesterov: bool, sign: int) -> None:
    """Enough steps for the sum of "classical" to reach its limit of 1 / (1 - momentum)."""
    param = parameter(8, 6)
    optimizer = Muon([param], momentum_mode=mode, nesterov=nesterov)
    huge = torch.finfo(torch.float32).max / 50
    for number in range(60):
        param.grad = torch.full_like(param, huge * sign**number)
        optimizer.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
def test_zero_gradient_moves_nothing(shape: tuple[int, int]) -> None:
    param = parameter(*shape)
    param.grad = torch.zeros(shape)
    Muon([param]).step()
    assert torch.equal(param, parameter(*shape))


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e30])
def test_rank_deficient_gradients_move_their_own_directions_only(scale: float) -> None:
    param = nn.Parameter(torch.zeros(10, 16, dtype=torch.float64))
    left, right = randn(10, 3).double(), randn(3, 16, seed=1).double()
    param.grad = left @ right * scale
    Muon([param], lr=1.0).step()
    values = torch.linalg.svdvals(param.detach())
    assert 0.68 < values[2] <= values[0] < 1.21
    assert values[3] < 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_reach_their_own_matrix_only(bad: float) -> None:
    hit, split, spared = parameter(6, 6), parameter(6, 6), parameter(6, 6)
    optimizer = Muon([{"params": [hit, spared]}, {"params": [split], "split": ("equal", 2)}])
    for param in (hit, split, spared):
        param.grad = randn(6, 6, seed=9)
    for param in (hit, split):
        param.grad[1, 2] = bad
    optimizer.step()
    assert hit.isnan().all()
    assert split[:3].isnan().all()
    assert split[3:].isfinite().all()
    assert spared.isfinite().all()
    assert optimizer.state[hit]["momentum_buffer"].isfinite().sum() == 35


def test_parameters_without_gradient_or_elements_are_left_alone() -> None:
    idle, empty, moved = parameter(4, 4), parameter(0, 4), parameter(4, 4)
    optimizer = Muon([idle, empty, moved])
    empty.grad, moved.grad = torch.zeros(0, 4), torch.ones(4, 4)
    optimizer.step()
    assert torch.equal(idle, parameter(4, 4))
    assert idle not in optimizer.state
    assert not torch.equal(moved, parameter(4, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_follow_float32(dtype: torch.dtype) -> None:
    param, exact = parameter(8, 20, dtype=dtype), parameter(8, 20)
    optimizer = Muon([param], weight_decay=0.1)
    train(optimizer, 3)
    train(Muon([exact], weight_decay=0.1), 3)
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps * 3)
    torch.testing.assert_close(param.float(), exact.detach(), rtol=tolerance, atol=tolerance)
    assert optimizer.state[param]["momentum_buffer"].dtype == dtype


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    for use_muon in (True, False):
        with pytest.raises(ConfigError, match="dense gradients"):
            Muon([{"params": embedding.parameters(), "use_muon": use_muon}]).step()


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_state_is_known_without_memory(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode() if device == "fake" else torch.device("meta")
    with mode:
        matrix, stack, vector = (
            nn.Parameter(torch.zeros(s)) for s in ((40000, 90000), (128, 64, 32), (9,))
        )
        optimizer = Muon(
            [
                {"params": [matrix], "weight_decay": 0.1, "cautious_weight_decay": True},
                {"params": [stack], "split": ("stack", ("equal", 2)), "lr": torch.tensor(0.1)},
                {"params": [vector], "use_muon": False},
            ]
        )
        for param in (matrix, stack, vector):
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert {k: v.shape for k, v in optimizer.state[matrix].items()} == {
        "momentum_buffer": (40000, 90000)
    }
    assert optimizer.state[stack]["momentum_buffer"].shape == (128, 64, 32)
    assert optimizer.state[vector].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_updates_are_in_place() -> None:
    param = parameter(8, 8)
    optimizer = Muon([param])
    train(optimizer, 1)
    pointers = param.data_ptr(), optimizer.state[param]["momentum_buffer"].data_ptr()
    train(optimizer, 2)
    assert pointers == (param.data_ptr(), optimizer.state[param]["momentum_buffer"].data_ptr())


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    param = parameter(4, 4)
    optimizer = Muon([param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx((parameter(4, 4) ** 2).sum().item())
    assert not torch.equal(param, parameter(4, 4))


def test_lr_may_be_a_tensor() -> None:
    params = [parameter(8, 20), parameter(8, 20)]
    for param, lr in zip(params, (0.03, torch.tensor(0.03)), strict=True):
        train(Muon([param], lr, weight_decay=0.1))
    torch.testing.assert_close(*params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    ],
)
def test_schedulers_reach_both_kinds(scheduler: Any) -> None:
    groups = [{"params": [parameter(4, 4)]}, {"params": [parameter(4)], "use_muon": False}]
    optimizer = Muon(groups)
    schedule = scheduler(optimizer)
    before = [group["lr"] for group in optimizer.param_groups]
    for _ in range(2):
        train(optimizer, 1)
        schedule.step()
    assert all(a != g["lr"] for a, g in zip(before, optimizer.param_groups, strict=True))


def mixed() -> Muon:
    return Muon(
        [
            {"params": [parameter(8, 8)], "ns_dtype": torch.float64, "ns_coefficients": (2, -1, 0)},
            {"params": [parameter(2, 6, 4)], "split": ("stack", ("equal", 2)), "lr": 0.1},
            {"params": [parameter(8)], "use_muon": False},
        ]
    )


@pytest.mark.parametrize("how", ["torch.save", "pickle", "deepcopy"])
def test_resume_is_bit_for_bit_the_uninterrupted_run(how: str) -> None:
    whole, first = mixed(), mixed()
    train(whole, 2, seed=1)
    train(whole, 2, seed=2)
    train(first, 2, seed=1)
    if how == "torch.save":
        resumed = mixed()
        for new, old in zip(_params(resumed), _params(first), strict=True):
            new.data.copy_(old)
        stream = io.BytesIO()
        torch.save(first.state_dict(), stream)
        stream.seek(0)
        resumed.load_state_dict(torch.load(stream, weights_only=True))
    else:
        resumed = copy.deepcopy(first) if how == "deepcopy" else pickle.loads(pickle.dumps(first))
    train(resumed, 2, seed=2)
    for a, b in zip(_params(whole), _params(resumed), strict=True):
        assert torch.equal(a, b)
    options = [
        [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
        for o in (whole, resumed)
    ]
    assert options[0] == options[1]


def test_a_checkpoint_of_torch_muon_loads() -> None:
    theirs = torch.optim.Muon([parameter(8, 20)], 0.03)
    train(theirs, 2)
    ours = Muon([parameter(8, 20)], ns_dtype="float64")
    ours.load_state_dict(theirs.state_dict())
    group = ours.param_groups[0]
    assert (group["lr"], group["use_muon"], group["ns_dtype"]) == (0.03, True, "float64")
    buffers = [o.state[_params(o)[0]]["momentum_buffer"] for o in (ours, theirs)]
    assert torch.equal(*buffers)
    train(ours, 1)


def test_a_checkpoint_with_amsgrad_is_refused() -> None:
    param = parameter(4)
    adamw = torch.optim.AdamW([param], amsgrad=True)
    train(adamw, 1)
    with pytest.raises(ConfigError, match="amsgrad"):
        Muon([{"params": [param], "use_muon": False}]).load_state_dict(adamw.state_dict())


def test_a_checkpoint_of_adamw_keeps_its_groups_adamw() -> None:
    theirs = torch.optim.AdamW([parameter(8)])
    train(theirs, 2)
    ours = Muon([{"params": [parameter(8)], "use_muon": False}])
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["use_muon"] is False
    train(ours, 1)


def test_flops_count_every_block() -> None:
    group = Muon([parameter(3, 8, 16)], split=("stack", ("equal", 2))).param_groups[0]
    coefficients = COEFFICIENTS["quintic"] * 5
    one = newton_schulz_flops(4, 16, coefficients, gram=True)
    assert muon_flops((3, 8, 16), group) == 6 * one
    square = Muon([parameter(8, 8)], ns_dtype="bfloat16").param_groups[0]
    assert muon_flops((8, 8), square) == 5 * 6 * 8**3
    assert muon_flops((8, 8), {**square, "use_muon": False}) == 0


@pytest.mark.parametrize("limit", [2, 3, 5, 100])
@pytest.mark.parametrize("split", [("stack",), ("stack", ("equal", 4))])
def test_batches_of_an_accelerator_cover_every_matrix_once(
    split: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, batched = parameter(5, 8, 6), parameter(5, 8, 6)
    train(Muon([alone], split=split, weight_decay=0.1))
    monkeypatch.setattr("optstream.muon.update._batch_limit", lambda block: limit)
    train(Muon([batched], split=split, weight_decay=0.1))
    torch.testing.assert_close(batched, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_in_bfloat16() -> None:
    shapes = [(64, 64), (32, 96), (64, 64)]
    together, apart = (
        [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes] for _ in range(2)
    )
    for index, (a, b) in enumerate(zip(together, apart, strict=True)):
        a.grad = randn(*a.shape, seed=index).cuda()
        b.grad = a.grad.clone()
        Muon([b], lr=1.0).step()
    Muon(together, lr=1.0).step()
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a, b)
        assert 0.5 < torch.linalg.svdvals(a.detach().double()).max() < 1.3


class LargestTemporary(TorchDispatchMode):
    """Notes the largest new tensor, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = [a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)]
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize(
    "options", [{}, {"cautious_weight_decay": True, "nesterov": False}, {"maximize": True}]
)
@pytest.mark.parametrize("split", [("stack",), ("stack", ("equal", 2))])
def test_temporaries_are_those_of_one_block(split: Any, options: Any) -> None:
    param = parameter(16, 8, 20)
    param.grad = randn(16, 8, 20)
    optimizer = Muon([param], split=split, weight_decay=0.1, **options)
    optimizer.step()  # makes the state
    with LargestTemporary() as largest:
        optimizer.step()
    assert largest.numel == (160 if split == ("stack",) else 80)
