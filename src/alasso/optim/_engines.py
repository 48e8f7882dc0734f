"""Torch's Adam, AdamW and SGD as engines of :mod:`alasso.optim._fused_step`: their rules, state and settings."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso.optim import _compile as kernels
from alasso.optim._fused_step import Engine, Group, Misfit, Work
from alasso.optim._update_rules import (
    adam_direction,
    adam_moments,
    bias_corrections,
    log_or_minus_infinity,
    sgd_direction,
    sgd_velocity,
)

if TYPE_CHECKING:
    from alasso._exchange import Exchange

# -- Adam ----------------------------------------------------------------------------------------------------

Decay = Literal["none", "coupled", "decoupled"]


class AdamSettings(NamedTuple):
    """What a step of Adam depends on, each a number or a tensor without dimensions."""

    step: Any
    lr: Any
    log_beta1: Any
    log_beta2: Any
    weight_decay: Any
    fresh1: Any  # 1 − β₁
    fresh2: Any  # 1 − β₂
    eps: Any


class AdamScales(NamedTuple):
    """What each weight's move depends on, worked out from the settings once a step."""

    step_size: Any  # η / (1 − β₁ᵗ)
    root_correction2: Any  # √(1 − β₂ᵗ)
    shrink: Any  # 1 − ηλ, of decoupled weight decay
    weight_decay: Any
    fresh1: Any
    fresh2: Any
    eps: Any


def adam_scales(s: AdamSettings) -> AdamScales:
    correction1, correction2 = bias_corrections(s.step, s.log_beta1, s.log_beta2)
    shrink = 1.0 - s.lr * s.weight_decay
    return AdamScales(s.lr / correction1, correction2**0.5, shrink, s.weight_decay, s.fresh1, s.fresh2, s.eps)


@dataclass(frozen=True)
class AdamRule:
    """Adam on one tensor; what is a field here is compiled in, all else comes as tensors."""

    amsgrad: bool
    maximize: bool
    decay: Decay
    on_device: bool  # the step counter is on the GPU, so what depends on it is worked out there, inside the pass

    def move(
        self, theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], s: AdamSettings | AdamScales
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        scales = adam_scales(s) if isinstance(s, AdamSettings) else s
        if self.decay == "coupled":
            g = g + scales.weight_decay * theta
        elif self.decay == "decoupled":
            theta = theta * scales.shrink
        m, v = adam_moments(g, moments[0], moments[1], scales.fresh1, scales.fresh2)
        largest = (torch.maximum(moments[2], v),) if self.amsgrad else ()
        direction = adam_direction(m, largest[0] if largest else v, scales.root_correction2, scales.eps)
        return theta - scales.step_size * direction, (m, v, *largest)


adam_rule = cache(AdamRule)


class AdamEngine(Engine):
    """Steps of ``torch.optim.Adam`` and of ``AdamW``."""

    def step(self, exchange: Exchange | None) -> None:
        self._scales: dict[Hashable, AdamScales] = {}  # of this step; most parameters have them in common
        super().step(exchange)

    def own_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        own: dict[str, Any] = self.optimizer.state[parameter]
        if not own:
            self.optimizer._init_group(group, [], [], [], [], [], [])  # type: ignore[attr-defined]
        return own

    def rule(self, own: dict[str, Any], group: Group) -> AdamRule:
        if group["differentiable"]:
            raise Misfit("differentiable=True")
        beta1, beta2 = group["betas"]
        if isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
            raise Misfit("betas are tensors")
        decay: Decay = "none"
        if group["weight_decay"] != 0:
            decay = "decoupled" if group.get("decoupled_weight_decay") else "coupled"
        return adam_rule(group["amsgrad"], group["maximize"], decay, own["step"].is_cuda)

    def moments(self, own: dict[str, Any], group: Group) -> list[Tensor]:
        names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if group["amsgrad"] else ["exp_avg", "exp_avg_sq"]
        try:
            return [own[name] for name in names]
        except KeyError:
            raise Misfit("the optimizer's state lacks a moment") from None

    def count_step(self, work: list[Work]) -> None:
        on_device = [item.own["step"] for item in work if item.rule.on_device]
        if on_device:
            torch._foreach_add_(on_device, 1)
        for item in work:
            if not item.rule.on_device:
                item.own["step"].add_(1)

    def scalars(self, work: Work) -> AdamSettings | AdamScales:
        step: Tensor = work.own["step"]
        device, dtype = work.parameter.device, work.parameter.dtype
        if work.rule.on_device:
            return adam_settings(work.group, step, device, dtype)
        key = (id(work.group), time := float(step), device, dtype)
        if key not in self._scales:
            lr, *others = adam_numbers(work.group)
            numbers = adam_scales(AdamSettings(time, float(lr), *others))._asdict()
            self._scales[key] = AdamScales(
                **{
                    # What does not change from step to step stays on the device.
                    name: as_tensor(number, device, dtype)
                    if name in AdamSettings._fields
                    else torch.full((), number, device=device, dtype=dtype)
                    for name, number in numbers.items()
                }
            )
        return self._scales[key]


def adam_numbers(group: Group) -> tuple[Any, ...]:
    """The settings after the first, as they stand in the group."""
    beta1, beta2 = group["betas"]
    logs = log_or_minus_infinity(beta1), log_or_minus_infinity(beta2)
    return (group["lr"], *logs, group["weight_decay"], 1.0 - beta1, 1.0 - beta2, group["eps"])


def adam_settings(group: Group, step: Tensor, device: torch.device, dtype: torch.dtype) -> AdamSettings:
    return AdamSettings(step, *(as_tensor(number, device, dtype) for number in adam_numbers(group)))


# -- SGD -----------------------------------------------------------------------------------------------------


class SGDScales(NamedTuple):
    lr: Tensor
    momentum: Tensor
    fresh: Tensor  # 1 − dampening
    weight_decay: Tensor


@dataclass(frozen=True)
class SGDRule:
    """SGD on one tensor; what is a field here is compiled in, all else comes as tensors."""

    momentum: bool
    nesterov: bool
    maximize: bool
    decay: bool

    def move(
        self, theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], s: SGDScales
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.decay:
            g = g + s.weight_decay * theta
        if not self.momentum:
            return theta - s.lr * g, ()
        velocity = sgd_velocity(g, moments[0], s.momentum, s.fresh)
        return theta - s.lr * sgd_direction(g, velocity, s.momentum, self.nesterov), (velocity,)


NOTHING: dict[str, Any] = {}  # without momentum, SGD keeps no state


class SGDEngine(Engine):
    """Steps of ``torch.optim.SGD``."""

    def own_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        if group["momentum"] == 0:
            return NOTHING
        own: dict[str, Any] = self.optimizer.state[parameter]
        if own.get("momentum_buffer") is None:
            if group["dampening"] != 0:
                raise Misfit("the first step with dampening is one of its own")
            own["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return own

    def rule(self, own: dict[str, Any], group: Group) -> SGDRule:
        if group["differentiable"]:
            raise Misfit("differentiable=True")
        return SGDRule(group["momentum"] != 0, group["nesterov"], group["maximize"], bool(group["weight_decay"] != 0))

    def moments(self, own: dict[str, Any], group: Group) -> list[Tensor]:
        return [own["momentum_buffer"]] if own else []

    def scalars(self, work: Work) -> SGDScales:
        group, p = work.group, work.parameter
        numbers = (group["lr"], group["momentum"], 1.0 - group["dampening"], group["weight_decay"])
        return SGDScales(*(as_tensor(number, p.device, p.dtype) for number in numbers))


# -- small things --------------------------------------------------------------------------------------------

_numbers: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}
_recorded: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}  # a CUDA graph knows these by address


def as_tensor(number: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The number as a tensor without dimensions; a user's tensor stays the one that schedulers write to."""
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, dtype, non_blocking=True)
    key = (float(number), device, dtype)
    known = _numbers.get(key)
    if kernels.is_being_recorded(device):
        if known is None:
            return torch.full((), number, device=device, dtype=dtype)  # made anew whenever the graph runs
        return _recorded.setdefault(key, known)
    if known is None:
        if len(_numbers) > 1000:  # a scheduler leaves one at every step
            _numbers.clear()
        known = _numbers[key] = torch.full((), number, device=device, dtype=dtype)
    return known


def engine_for(optimizer: Optimizer) -> Engine | None:
    """An engine for torch's own Adam, AdamW and SGD; None for all others, also for their subclasses."""
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return SGDEngine(optimizer)
    # Before torch 2.7, AdamW was no Adam with another option.
    if kind is torch.optim.Adam or (kind is torch.optim.AdamW and issubclass(kind, torch.optim.Adam)):
        return AdamEngine(optimizer)
    return None
