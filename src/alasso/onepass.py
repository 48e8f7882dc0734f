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


#: Tensors below this many weights are passed over together on a CPU: each pass costs a fixed 0.1 to 0.3 ms.
SMALL = 1 << 15


NOT_ALIKE = "a parameter, its gradient and its state are not of one precision, device and layout"


class Misfit(Exception):
    """Why a step cannot be made in one pass."""


class Work(NamedTuple):
    """All that the pass over one parameter takes, in one dimension."""

    parameter: nn.Parameter
    group: Group
    rule: Any
    theta: Tensor
    moments: tuple[Tensor, ...]
    surrogate: Any
    state: Any


def changed(item: Work) -> list[Tensor]:
    """The tensors that a pass writes to."""
    path = [item.state.path] if item.surrogate is not None and item.surrogate.observes_path else []
    return [item.theta, *item.moments, *path]


def end_to_end(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    return None if parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient in one dimension, in the order in which the parameter lies in memory."""
    assert parameter.grad is not None
    flat = kernels.flattened([parameter.detach(), parameter.grad.detach()])
    if flat is None:
        raise Misfit(NOT_ALIKE)
    return flat[0][1]


class Engine:
    """Makes the steps of one optimizer in one pass. ``compile``: True for any size of network, False for none."""

    def __init__(self, optimizer: Optimizer, compile: bool | None = None) -> None:
        self.optimizer = optimizer
        self.compile = compile
        self._said: set[str] = set()
        self._reason: tuple[Hashable, str | None] = (None, None)
        self._known: dict[nn.Parameter, tuple[tuple[Any, ...], Work, Any]] = {}

    # -- what each optimizer knows -------------------------------------------------------------------------------

    def rule(self, parameter: nn.Parameter, group: Group) -> Any:
        raise AssertionError("each optimizer has its own")

    def moments(self, parameter: nn.Parameter, group: Group) -> list[Tensor]:
        raise AssertionError("each optimizer has its own")

    def count_step(self, work: list[Work]) -> None:
        """Step counters go up before the step."""

    def time_of(self, parameter: nn.Parameter) -> Hashable:
        """How many steps the parameter has made, where that matters."""
        return None

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
        parameters = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        work = [self._prepared(p, group, exchange) for p, group in parameters]
        if len(self._known) > 2 * len(work):
            self.forget()  # of parameters that are no more
        gradients = [flat_gradient(p) for p, _ in parameters]
        # Nothing has changed so far; from here on, everything fits.
        self.count_step(work)
        together: dict[Hashable, list[tuple[Work, Tensor]]] = {}
        for item, g in zip(work, gradients, strict=True):
            if item.theta.is_cpu and item.theta.numel() < SMALL and not self.compile:
                together.setdefault(self._kind(item), []).append((item, g))
            else:
                self._pass(item, g)
        for items in together.values():
            self._pass_together(items)
        for item in work:
            torch.autograd.graph.increment_version(item.parameter)
        if exchange is not None:
            exchange.release()
            if any(item.surrogate is not None for item in work):
                exchange.regularizer.steps += 1

    def _pass(self, item: Work, g: Tensor) -> None:
        run = one_pass(item.rule, item.surrogate)
        run(item.theta, g, item.moments, self.scalars(item), item.surrogate, item.state)

    def _kind(self, item: Work) -> Hashable:
        """Equal for parameters that can be passed over together."""
        setting = (id(item.group), self.time_of(item.parameter), item.rule)
        return (*setting, item.theta.dtype, type(item.surrogate))

    def _pass_together(self, items: list[tuple[Work, Tensor]]) -> None:
        """One pass over many small tensors laid end to end, and back to where they belong."""
        work = [item for item, _ in items]
        sizes = [item.theta.numel() for item in work]
        states = [item.state for item in work]
        joined = work[0]._replace(
            theta=torch.cat([item.theta for item in work]),
            moments=tuple(map(torch.cat, zip(*(item.moments for item in work), strict=True))),
            state=states[0] and type(states[0])(*map(end_to_end, zip(*states, strict=True))),
        )
        self._pass(joined, torch.cat([g for _, g in items]))
        for whole, *parts in zip(*map(changed, [joined, *work]), strict=True):
            torch._foreach_copy_(parts, whole.split(sizes))

    def _check(self) -> None:
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise Misfit("the gradients are scaled")
        if any(not group.get("capturable", True) and is_recorded(group) for group in groups):
            raise Misfit("a CUDA graph is recorded without capturable=True")  # torch says so, too, and better
        what = tuple((len(group["params"]), group["params"][0].device) for group in groups if group["params"])
        if self._reason[0] != what:
            self._reason = what, self._why_not()
        if self._reason[1]:
            raise Misfit(self._reason[1])

    def _why_not(self) -> str | None:
        """Why passes over these parameters are not to be compiled; None if they are."""
        if self.compile is False:
            return "compile=False"
        weights: dict[str, int] = {}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                weights[p.device.type] = weights.get(p.device.type, 0) + p.numel()
        for device, count in weights.items():
            reason = kernels.no_compiler(device) if self.compile else kernels.why_not_compiled(device, count)
            if reason:
                return reason
        return None

    def _prepared(self, parameter: nn.Parameter, group: Group, exchange: Exchange | None) -> Work:
        """The parameter's work, as it was at the last step unless anything has changed since."""
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
        rule = self.rule(parameter, group)
        # Addresses and identities; what they belong to is held by the work itself, so none is used again for another.
        place = (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
        now = (*place, rule, id(group), id(state), id(surrogate), *map(id, moments))
        before, work, _ = self._known.get(parameter, (None, None, None))
        if work is None or now != before:
            flat = kernels.flattened([parameter.detach(), *moments], state)
            if flat is None:
                raise Misfit(NOT_ALIKE)
            work = Work(parameter, group, rule, flat[0][0], tuple(flat[0][1:]), surrogate, flat[1])
            self._known[parameter] = now, work, (state, moments)
        return work

    def forget(self) -> None:
        """Let go of the tensors of the last step."""
        self._known.clear()

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
        steps = [self._step_of(item) for item in work]
        on_device = [step for step in steps if step.is_cuda]
        if on_device:
            torch._foreach_add_(on_device, 1)
        for step in steps:
            if not step.is_cuda:
                step.add_(1)

    def _step_of(self, item: Work) -> Tensor:
        step: Tensor = self.optimizer.state[item.parameter]["step"]
        return step

    def time_of(self, parameter: nn.Parameter) -> Hashable:
        return float(self.optimizer.state[parameter]["step"])

    def scalars(self, work: Work) -> AdamSettings | AdamScales:
        step = self._step_of(work)
        device, dtype = work.parameter.device, work.parameter.dtype
        if work.rule.on_device:
            return adam_settings(work.group, step, device, dtype)
        key = (id(work.group), float(step), device, dtype)
        if key not in self._scales:
            exact = adam_scales(adam_settings(work.group, step.double(), torch.device("cpu"), torch.float64))
            # What does not change from step to step stays on the device.
            kept = adam_settings(work.group, step, device, dtype)
            scales: list[Tensor] = [getattr(kept, name, getattr(exact, name)) for name in exact._fields]
            self._scales[key] = AdamScales(*(scale.to(device, dtype, non_blocking=True) for scale in scales))
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
        # A scheduler leaves a number at every step. Those on a GPU stay: a recorded step may know them by address.
        if device.type == "cpu" and len(_numbers) > 1000:
            for old in [known for known in _numbers if known[1].type == "cpu"]:
                del _numbers[old]
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
