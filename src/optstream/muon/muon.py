"""The optimizer: Muon for groups with `use_muon=True`, AdamW for the others, in one `step()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from optstream.distributed.gathering import run_on_owners
from optstream.distributed.shards import check_shard_gradient, here
from optstream.errors import ConfigError, OffloadError
from optstream.muon.coefficients import Triple
from optstream.muon.options import check_group
from optstream.muon.sharded import Scattered, is_scattered, scattered, wholes_at_once
from optstream.muon.update import muon_flops, update_matrices


class Muon(Optimizer):
    """Momentum, orthogonalised by Newton-Schulz, with decoupled weight decay.

    For a gradient g of a matrix (momentum_buffer m starts at 0):

        m <- momentum m + (1 - momentum) g          momentum_mode="ema", as torch.optim.Muon
        m <- momentum m + g                         momentum_mode="classical", as torch.optim.SGD
        u <- (1 - momentum) g + momentum m          nesterov, "ema"
        u <- g + momentum m                         nesterov, "classical"
        p <- (1 - lr weight_decay) p - lr scale newton_schulz(u)

    The modes differ by a constant factor of u, which Newton-Schulz removes unless the norm of u is
    below `ns_eps`. Groups with `use_muon=False` are `torch.optim.AdamW`, bit for bit.

    A group holds every option; `use_muon` says which apply. A gradient that is not finite makes its
    own matrix NaN (and the momentum of its elements), and no other; a zero gradient with zero
    momentum moves nothing but weight decay.

    Args:
        params: parameters or groups. Without `use_muon` a group is Muon's, and its parameters must
            be matrices or have a `split`; `muon_groups` sorts a model.
        lr: step size of Muon groups; a number or a tensor with one element.
        momentum: in [0, 1).
        nesterov: look one momentum step ahead.
        weight_decay: of Muon groups, decoupled, times lr; >= 0.
        ns_steps: Newton-Schulz steps, 1 to 99. `ns_coefficients` shorter than that are continued
            by their last triple.
        ns_coefficients: a name of `COEFFICIENTS`, or (a, b, c), or a tuple of those.
        ns_dtype: "float64", "float32", "bfloat16", "float16" or the torch dtype; None: float64 for
            float64 parameters, else float32 on a CPU and bfloat16 on an accelerator.
        ns_eps: norms below this fade to zero instead of being blown up; > 0.
        momentum_mode: "ema" or "classical", see above.
        adjust_lr_fn: the scale, for a matrix of `rows` outputs and `cols` inputs:
            "original" (or None) sqrt(max(1, rows / cols)), Jordan 2024;
            "match_rms_adamw" 0.2 sqrt(max(rows, cols)), arXiv:2502.16982;
            "spectral" sqrt(rows / cols), arXiv:2310.17813, Megatron's "unit_rms_norm".
        cautious_weight_decay: decay only elements whose sign is that of the update,
            arXiv:2510.12402.
        split: the matrices in each parameter of the group, see `optstream.muon.splits`.
        transposed: parameters are stored as (in, out), like GPT-2's Conv1D.
        maximize: ascend.
        use_muon: of groups that do not say.
        adamw_lr: step size of AdamW groups that do not give `lr`.
        adamw_weight_decay: of AdamW groups that do not give `weight_decay`.
        betas: of AdamW groups.
        eps: of AdamW groups.
        foreach: of AdamW groups, torch's choice of implementation.
        fused: of AdamW groups, likewise.

    State: `momentum_buffer` in the parameter's dtype; AdamW: `step`, `exp_avg`, `exp_avg_sq`.

    Raises:
        ConfigError: an option or a shape that cannot be used.
    Source: https://kellerjordan.github.io/posts/muon/; checked by test_muon.py.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        *,
        ns_coefficients: str | Triple | tuple[Triple, ...] = "quintic",
        ns_dtype: str | torch.dtype | None = None,
        ns_eps: float = 1e-7,
        momentum_mode: str = "ema",
        adjust_lr_fn: str | None = "original",
        cautious_weight_decay: bool = False,
        split: tuple[Any, ...] | None = None,
        transposed: bool = False,
        maximize: bool = False,
        use_muon: bool = True,
        adamw_lr: float | Tensor = 3e-4,
        adamw_weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        options = dict(locals())
        for name in ("self", "params", "__class__"):
            options.pop(name)
        super().__init__(params, options)

    def is_elementwise(self, group: dict[str, Any]) -> bool:
        """Tell `offload` which groups it may cut into flat slices: AdamW's."""
        return not group["use_muon"]

    def update_flops(self, group: dict[str, Any], shape: Sequence[int]) -> int:
        """Count Newton-Schulz's operations, by which ranks share out parameters."""
        return muon_flops(shape, group)

    def gathers(self, group: dict[str, Any], param: Tensor) -> int:
        """Tell `offload` how much of a DTensor is put together here; 0: its parts are apart."""
        return wholes_at_once(group, param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not param_group.get("use_muon", self.defaults["use_muon"]):
            param_group.setdefault("lr", self.defaults["adamw_lr"])
            param_group.setdefault("weight_decay", self.defaults["adamw_weight_decay"])
        super().add_param_group(param_group)
        try:
            check_group(param_group)
        except OffloadError:
            self.param_groups.pop()
            raise
        del param_group["adamw_lr"], param_group["adamw_weight_decay"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a checkpoint of torch.optim.Muon or AdamW lacks our options: keep those of the live group
        live = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            for option, value in (live[index] if index < len(live) else {}).items():
                group.setdefault(option, value)
            check_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; each by itself.

        The ranks of a mesh step together, with gradients of the same parameters.

        Args:
            closure: re-evaluates the model and returns the loss, which is returned.

        Raises:
            ConfigError: a sparse gradient.
            UnsupportedOptimizerError: a gradient that is not sharded as its parameter.
            RankError: a rank that has parts of the same matrices is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tasks: list[Scattered] = []
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                _check_gradient(group, param)
            if group["use_muon"]:
                tasks += self._muon(group, params)
            else:
                self._adamw(group, params)
        run_on_owners(tasks)
        return loss

    def _muon(self, group: dict[str, Any], params: list[Tensor]) -> Iterator[Scattered]:
        """Update the parameters that this rank can update by itself; yield the others."""
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            assert param.grad is not None
            tensors: tuple[Tensor, Tensor, Tensor] = param, param.grad, state["momentum_buffer"]
            if is_scattered(group, param):
                yield from scattered(group, *tensors)
            else:
                update_matrices(group, *map(here, tensors))

    def _adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if not state:
                # torch keeps the counter on the CPU unless the kernel reads it
                device = param.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        if not params:
            return
        adamw(
            [here(param) for param in params],
            [here(param.grad) for param in params if param.grad is not None],
            [here(state["exp_avg"]) for state in states],
            [here(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            has_complex=any(map(torch.is_complex, params)),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


def _check_gradient(group: dict[str, Any], param: Tensor) -> None:
    assert param.grad is not None
    if param.grad.is_sparse:
        raise ConfigError("Muon needs dense gradients; build the embedding with sparse=False")
    check_shard_gradient(f"a parameter of shape {tuple(param.shape)}", param, param.grad)


OPTIONS = tuple(
    name
    for name in inspect.signature(Muon).parameters
    if name not in ("params", "adamw_lr", "adamw_weight_decay")
)
"""What a group may say."""
