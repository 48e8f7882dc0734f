"""A step of Adam or SGD and a regularizer's share in it, as one compiled pass over each tensor.

    total gradient ← g + ∂penalty/∂θ;  the optimizer's moments;  θ;  ω −= g·Δθ

An engine makes such steps for one optimizer of torch's, on the state that optimizer keeps. What does not fit (half
precision, GradScaler's scale in the optimizer's hands, shards, odd layouts, no compiler, a small network) it refuses
before anything is changed, with the reason; the step is then made in two halves around the optimizer's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso import kernels
from alasso.methods.surrogate import add_to_path_
from alasso.moves import (
    adam_direction,
    adam_moments,
    bias_corrections,
    log_or_minus_infinity,
    sgd_direction,
    sgd_velocity,
)

if TYPE_CHECKING:
    from alasso.attach import Exchange

log = logging.getLogger("alasso")

Group = dict[str, Any]


def fold(rule: Any, theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], s: Any, surrogate: Any, state: Any) -> None:
    """A whole step of one tensor, in place: the penalty, the optimizer's ``rule``, and the path integral."""
    task_g = -g if rule.maximize else g
    total_g = task_g if surrogate is None else task_g + surrogate.penalty_grad(theta, state)
    new_theta, new_moments = rule.move(theta, total_g, moments, s)
    if surrogate is not None and surrogate.observes_path:
        add_to_path_(state.path, task_g, theta, new_theta)
    theta.copy_(new_theta)
    for old, new in zip(moments, new_moments, strict=True):
        old.copy_(new)


def one_pass(rule: Any, surrogate: Any) -> kernels.Compiled:
    """The compiled :func:`fold` of this rule and this kind of surrogate (None for plain training)."""

    def make() -> tuple[Callable[..., None], str]:
        def step(
            theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], scalars: Any, surrogate: Any, state: Any
        ) -> None:
            fold(rule, theta, g, moments, scalars, surrogate, state)

        return step, "_".join(["one_pass", type(rule).__name__] + ([type(surrogate).__name__] if surrogate else []))

    return kernels.compiled((rule, type(surrogate)), make)


#: Weights of a tensor below which a CPU runs its pass uncompiled: torch's own loops use one thread up to here, too.
SMALL = 1 << 15


class Misfit(Exception):
    """Why a step cannot be made in one pass."""


class Work(NamedTuple):
    """All that the pass over one parameter takes."""

    parameter: nn.Parameter
    group: Group
    rule: Any
    tensors: list[Tensor]  # θ, its gradient and the optimizer's moments, in one dimension
    surrogate: Any
    state: Any


class Engine:
    """Makes the steps of one optimizer in one pass. ``compile``: True for any size of network, False for none."""

    def __init__(self, optimizer: Optimizer, compile: bool | None = None) -> None:
        self.optimizer = optimizer
        self.compile = compile
        self._said: set[str] = set()

    # -- what each optimizer knows -------------------------------------------------------------------------------

    def rule(self, parameter: nn.Parameter, group: Group) -> Any:
        raise AssertionError("each optimizer has its own")

    def moments(self, parameter: nn.Parameter, group: Group) -> list[Tensor]:
        raise AssertionError("each optimizer has its own")

    def count_step(self, work: list[Work]) -> None:
        """Step counters go up before the step."""

    def scalars(self, work: Work) -> Any:
        raise AssertionError("each optimizer has its own")

    # -- the step ------------------------------------------------------------------------------------------------

    def made(self, exchange: Exchange | None) -> bool:
        """Make the step if it fits, and say whether it was made."""
        try:
            self.step(exchange)
        except Misfit as reason:
            self._say(f"{type(self.optimizer).__name__} makes its steps apart from the penalty: {reason}")
            return False
        self._say(f"{type(self.optimizer).__name__} and the penalty are one compiled pass")
        return True

    @torch.no_grad()
    def step(self, exchange: Exchange | None) -> None:
        self._check()
        if exchange is not None:
            exchange.begin()
        groups = self.optimizer.param_groups
        work = [self._work(p, group, exchange) for group in groups for p in group["params"] if p.grad is not None]
        # Nothing has changed so far; from here on, everything fits.
        self.count_step(work)
        for item in work:
            theta, g, *moments = item.tensors
            compiled = one_pass(item.rule, item.surrogate)
            # A compiled kernel wakes all threads of a CPU, which a small tensor is not worth.
            small = theta.is_cpu and theta.numel() < SMALL and not self.compile
            run: Callable[..., None] = compiled.plain if small else compiled
            run(theta, g, tuple(moments), self.scalars(item), item.surrogate, item.state)
            torch.autograd.graph.increment_version(item.parameter)
        if exchange is not None:
            exchange.release()
            if any(item.surrogate is not None for item in work):
                exchange.regularizer.steps += 1

    def _check(self) -> None:
        optimizer = self.optimizer
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise Misfit("the gradients are scaled")
        if self.compile is False:
            raise Misfit("compile=False")
        if any(not group.get("capturable", True) and is_recorded(group) for group in optimizer.param_groups):
            raise Misfit("a CUDA graph is recorded without capturable=True")  # torch says so, too, and better
        weights: dict[str, int] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                weights[p.device.type] = weights.get(p.device.type, 0) + p.numel()
        for device, count in weights.items():
            reason = kernels.no_compiler(device) if self.compile else kernels.why_not_compiled(device, count)
            if reason:
                raise Misfit(reason)

    def _work(self, parameter: nn.Parameter, group: Group, exchange: Exchange | None) -> Work:
        if type(parameter) is not nn.Parameter and type(parameter) is not Tensor:
            raise Misfit(f"a parameter is a {type(parameter).__name__}")
        assert parameter.grad is not None
        if parameter.grad.layout is not torch.strided:
            raise Misfit("a gradient is sparse")
        moments = self.moments(parameter, group)
        surrogate = state = None
        if exchange is not None and (name := exchange.name_of(parameter)) is not None:
            state = exchange.regularizer.state_of(name, parameter)
            surrogate = exchange.regularizer.surrogate_on(parameter.device, parameter.dtype)
            if surrogate is None:
                raise Misfit("a setting of the regularizer is a tensor")
        flat = kernels.flattened([parameter.detach(), parameter.grad.detach(), *moments], state)
        if flat is None:
            raise Misfit("a parameter, its gradient and its state are not of one precision, device and layout")
        return Work(parameter, group, self.rule(parameter, group), flat[0], surrogate, flat[1])

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.info("%s", sentence)


# -- Adam ----------------------------------------------------------------------------------------------------

Decay = Literal["none", "coupled", "decoupled"]


class AdamSettings(NamedTuple):
    """What a step of Adam depends on, each a tensor without dimensions."""

    step: Tensor
    lr: Tensor
    log_beta1: Tensor
    log_beta2: Tensor
    weight_decay: Tensor
    fresh1: Tensor  # 1 − β₁
    fresh2: Tensor  # 1 − β₂
    eps: Tensor


class AdamScales(NamedTuple):
    """What each weight's move depends on, worked out from the settings once a step."""

    step_size: Tensor  # η / (1 − β₁ᵗ)
    root_correction2: Tensor  # √(1 − β₂ᵗ)
    shrink: Tensor  # 1 − ηλ, of decoupled weight decay
    weight_decay: Tensor
    fresh1: Tensor
    fresh2: Tensor
    eps: Tensor


def adam_scales(s: AdamSettings) -> AdamScales:
    correction1, correction2 = bias_corrections(s.step, s.log_beta1, s.log_beta2)
    shrink = 1.0 - s.lr * s.weight_decay
    return AdamScales(s.lr / correction1, correction2.sqrt(), shrink, s.weight_decay, s.fresh1, s.fresh2, s.eps)


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


class AdamEngine(Engine):
    """Steps of ``torch.optim.Adam`` and of ``AdamW``."""

    def step(self, exchange: Exchange | None) -> None:
        self._scales: dict[Hashable, AdamScales] = {}  # of this step; most parameters have them in common
        super().step(exchange)

    def rule(self, parameter: nn.Parameter, group: Group) -> AdamRule:
        if group["differentiable"]:
            raise Misfit("differentiable=True")
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            raise Misfit("betas are tensors")
        decay: Decay = "none"
        if group["weight_decay"] != 0:
            decay = "decoupled" if group.get("decoupled_weight_decay") else "coupled"
        on_device = self.optimizer.state[parameter]["step"].is_cuda
        return AdamRule(group["amsgrad"], group["maximize"], decay, on_device)

    def moments(self, parameter: nn.Parameter, group: Group) -> list[Tensor]:
        if not self.optimizer.state[parameter]:
            self.optimizer._init_group(group, [], [], [], [], [], [])  # type: ignore[attr-defined]
        state = self.optimizer.state[parameter]
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        if any(name not in state for name in names):
            raise Misfit("the optimizer's state lacks a moment")
        return [state[name] for name in names]

    def count_step(self, work: list[Work]) -> None:
        for on_device in (False, True):
            steps = [self._step_of(item) for item in work if item.rule.on_device is on_device]
            if steps:
                torch._foreach_add_(steps, 1)

    def _step_of(self, item: Work) -> Tensor:
        step: Tensor = self.optimizer.state[item.parameter]["step"]
        return step

    def scalars(self, work: Work) -> AdamSettings | AdamScales:
        step = self._step_of(work)
        device, dtype = work.parameter.device, work.parameter.dtype
        if work.rule.on_device:
            return adam_settings(work.group, step, device, dtype)
        key = (id(work.group), float(step), device, dtype)
        if key not in self._scales:
            exact = adam_scales(adam_settings(work.group, step.double(), torch.device("cpu"), torch.float64))
            self._scales[key] = AdamScales(*(scale.to(device, dtype, non_blocking=True) for scale in exact))
        return self._scales[key]


def adam_settings(group: Group, step: Tensor, device: torch.device, dtype: torch.dtype) -> AdamSettings:
    beta1, beta2 = group["betas"]
    numbers = (
        group["lr"],
        log_or_minus_infinity(beta1),
        log_or_minus_infinity(beta2),
        group["weight_decay"],
        1.0 - beta1,
        1.0 - beta2,
        group["eps"],
    )
    return AdamSettings(step, *(as_tensor(number, device, dtype) for number in numbers))


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


class SGDEngine(Engine):
    """Steps of ``torch.optim.SGD``."""

    def rule(self, parameter: nn.Parameter, group: Group) -> SGDRule:
        if group["differentiable"]:
            raise Misfit("differentiable=True")
        return SGDRule(group["momentum"] != 0, group["nesterov"], group["maximize"], bool(group["weight_decay"] != 0))

    def moments(self, parameter: nn.Parameter, group: Group) -> list[Tensor]:
        if group["momentum"] == 0:
            return []
        state = self.optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            if group["dampening"] != 0:
                raise Misfit("the first step with dampening is one of its own")
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [state["momentum_buffer"]]

    def scalars(self, work: Work) -> SGDScales:
        group, p = work.group, work.parameter
        numbers = (group["lr"], group["momentum"], 1.0 - group["dampening"], group["weight_decay"])
        return SGDScales(*(as_tensor(number, p.device, p.dtype) for number in numbers))


# -- small things --------------------------------------------------------------------------------------------

_numbers: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}


def is_recorded(group: Group) -> bool:
    """Whether the group's parameters are on a GPU that is recording a graph."""
    return any(kernels.is_being_recorded(p.device) for p in group["params"][:1])


def as_tensor(number: float | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The number as a tensor without dimensions; a user's tensor stays the one that schedulers write to."""
    if isinstance(number, Tensor):
        return number.detach().reshape(()).to(device, dtype, non_blocking=True)
    key = (float(number), device, dtype)
    if key in _numbers:
        return _numbers[key]
    made = torch.full((), number, device=device, dtype=dtype)
    if not kernels.is_being_recorded(device):
        if len(_numbers) > 1000:  # a scheduler leaves a number at every step
            _numbers.clear()
        _numbers[key] = made
    return made


def engine_for(optimizer: Optimizer) -> Engine | None:
    """An engine for torch's own Adam, AdamW and SGD; None for all others, also for their subclasses."""
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return SGDEngine(optimizer)
    # Before torch 2.7, AdamW was no Adam with another option.
    if kind is torch.optim.Adam or (kind is torch.optim.AdamW and issubclass(kind, torch.optim.Adam)):
        return AdamEngine(optimizer)
    return None
