"""Adam and SGD with the penalty folded in: one compiled pass over each tensor in place of an optimizer and two hooks.

    total gradient ← g + ∂penalty/∂θ;  the optimizer's moments;  θ;  ω −= g·Δθ

Both are torch's own optimizers, with their arguments, ``state_dict`` and behaviour; only the arithmetic of a step is
made here. Whatever does not fit the one pass (half precision, GradScaler's scale in the optimizer's hands, shards, odd
layouts, no compiler, a small network) goes by way of hooks around torch's own step, with equal results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso import kernels
from alasso.attach import Exchange, TakesRegularizer
from alasso.errors import AlassoError
from alasso.methods.surrogate import add_to_path_
from alasso.moves import (
    adam_direction,
    adam_moments,
    bias_corrections,
    log_or_minus_infinity,
    sgd_direction,
    sgd_velocity,
)
from alasso.shell import Regularizer

log = logging.getLogger("alasso")

Params = Any  # what torch.optim calls ParamsT
Closure = Callable[[], Any]


# -- one pass ------------------------------------------------------------------------------------------------


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


_passes: dict[Hashable, kernels.Compiled] = {}


def one_pass(rule: Any, surrogate: Any) -> kernels.Compiled:
    """The compiled :func:`fold` of this rule and this kind of surrogate (None for plain training)."""
    key = (rule, type(surrogate))
    if key not in _passes:

        def step(
            theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], scalars: Any, surrogate: Any, state: Any
        ) -> None:
            fold(rule, theta, g, moments, scalars, surrogate, state)

        name = type(rule).__name__ + ("" if surrogate is None else f"_{type(surrogate).__name__}")
        _passes[key] = kernels.Compiled(step, f"one_pass_{name}")
    return _passes[key]


class Misfit(Exception):
    """Why a step cannot be made in one pass."""


class _OnePass(TakesRegularizer, Optimizer):
    """An optimizer of torch's whose step is made in one pass wherever that is possible."""

    # Defaults here, not in __init__, because a copied or unpickled optimizer never runs it.
    compile: bool | None = None
    _exchange: Exchange | None = None
    _said: frozenset[str] = frozenset()

    @property
    def regularizer(self) -> Regularizer | None:
        return None if self._exchange is None else self._exchange.regularizer

    def connect(self, regularizer: Regularizer) -> Exchange:
        """What ``regularizer.attach(optimizer)`` does here: no hooks, the step itself takes care of the penalty."""
        if self._exchange is not None and self._exchange.regularizer is not regularizer:
            raise AlassoError(
                f"this {type(self).__name__} already works for another regularizer; detach() that one first"
            )
        self._exchange = _Connection(regularizer, self)
        return self._exchange

    # -- what each optimizer knows -------------------------------------------------------------------------------

    def _rule(self, group: dict[str, Any]) -> Any:
        raise AssertionError("each optimizer has its own")

    def _moments(self, parameter: nn.Parameter, group: dict[str, Any]) -> list[Tensor]:
        raise AssertionError("each optimizer has its own")

    def _count_step(self, parameters: list[nn.Parameter]) -> None:
        """Step counters go up before the step."""

    def _scalars(self, parameter: nn.Parameter, group: dict[str, Any], rule: Any) -> Any:
        raise AssertionError("each optimizer has its own")

    def _torch_step(self) -> None:
        raise AssertionError("each optimizer has its own")

    # -- the step ------------------------------------------------------------------------------------------------

    def _step(self, closure: Closure | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._exchange is not None:
            self._exchange.give_back_gradients()  # a step that raised left them exchanged
        try:
            self._in_one_pass()
            self._say(f"{type(self).__name__} makes its steps in one compiled pass")
        except Misfit as reason:
            self._say(f"{type(self).__name__} makes its steps uncompiled: {reason}")
            self._by_hooks()
        return loss

    @torch.no_grad()
    def _in_one_pass(self) -> None:
        self._check_whole_step()
        exchange = self._exchange
        if exchange is not None:
            exchange.begin()
        work = [self._prepared(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        # Nothing has changed so far; from here on, everything fits.
        self._count_step([parameter for parameter, *_ in work])
        for parameter, group, rule, flat, surrogate, state in work:
            (theta, g, *moments) = flat
            scalars = self._scalars(parameter, group, rule)
            one_pass(rule, surrogate)(theta, g, tuple(moments), scalars, surrogate, state)
            torch.autograd.graph.increment_version(parameter)
        if exchange is not None:
            exchange.release()
            if any(surrogate is not None for *_, surrogate, _ in work):
                exchange.regularizer.steps += 1

    def _check_whole_step(self) -> None:
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            raise Misfit("the gradients are scaled")
        if self.compile is False:
            raise Misfit("compile=False")
        for device, count in self._weights().items():
            count = kernels.WORTH_COMPILING.get(device, 0) if self.compile else count
            if reason := kernels.why_not_compiled(device, count):
                raise Misfit(reason)

    def _weights(self) -> dict[str, int]:
        """Weights on each kind of device."""
        counts: dict[str, int] = {}
        for group in self.param_groups:
            for p in group["params"]:
                counts[p.device.type] = counts.get(p.device.type, 0) + p.numel()
        return counts

    def _prepared(self, parameter: nn.Parameter, group: dict[str, Any]) -> tuple[Any, ...]:
        """All that the parameter's pass takes; :class:`Misfit` if anything about it is out of the ordinary."""
        g = parameter.grad
        assert g is not None
        if type(parameter) is not nn.Parameter and type(parameter) is not Tensor:
            raise Misfit(f"a parameter is a {type(parameter).__name__}")
        rule = self._rule(group)
        moments = self._moments(parameter, group)
        surrogate = state = None
        if self._exchange is not None and (name := self._exchange.name_of(parameter)) is not None:
            state = self._exchange.regularizer.state_of(name, parameter)
            surrogate = self._exchange.regularizer.surrogate_on(parameter.device, parameter.dtype)
        flat = kernels.flattened([parameter.detach(), g.detach(), *moments], state)
        if flat is None:
            raise Misfit("a parameter, its gradient and its state differ in precision, device or layout")
        return parameter, group, rule, flat[0], surrogate, flat[1]

    def _by_hooks(self) -> None:
        if self._exchange is None:
            self._torch_step()
            return
        self._exchange.open()
        try:
            self._torch_step()
            self._exchange.close()
        finally:
            self._exchange.give_back_gradients()

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said |= {sentence}
            log.info("%s", sentence)


class _Connection(Exchange):
    """A regularizer's part in the steps of an optimizer that knows it."""

    def remove(self) -> None:
        super().remove()
        self.release()
        if isinstance(self.optimizer, _OnePass) and self.optimizer._exchange is self:
            self.optimizer._exchange = None


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


class Adam(_OnePass, torch.optim.Adam):
    """``torch.optim.Adam`` with its arguments, and ``regularizer``: the penalty within the same pass over memory.

    ``compile``  None: compiled where that pays; True: whatever the network's size; False: never

    >>> import alasso
    >>> model = nn.Linear(4, 2)
    >>> reg = alasso.ALASSO(model)
    >>> optimizer = Adam(model.parameters(), lr=1e-3, regularizer=reg)      # no attach() needed
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        regularizer: Regularizer | None = None,
        compile: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self.compile = compile
        if regularizer is not None:
            regularizer.attach(self)

    def step(self, closure: Closure | None = None) -> Any:
        return self._step(closure)

    def _torch_step(self) -> None:
        unhooked(torch.optim.Adam.step)(self)

    def _in_one_pass(self) -> None:
        check_recording(self)
        self._scales: dict[Any, AdamScales] = {}  # of this step; parameters have most in common
        super()._in_one_pass()

    def _rule(self, group: dict[str, Any]) -> AdamRule:
        if group["differentiable"]:
            raise Misfit("differentiable=True")
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            raise Misfit("betas are tensors")
        decay: Decay = "none"
        if group["weight_decay"] != 0:
            decay = "decoupled" if group.get("decoupled_weight_decay") else "coupled"
        on_device = (group["capturable"] or group["fused"]) and group["params"][0].is_cuda
        return AdamRule(group["amsgrad"], group["maximize"], decay, bool(on_device))

    def _moments(self, parameter: nn.Parameter, group: dict[str, Any]) -> list[Tensor]:
        if not self.state[parameter]:
            self._init_group(group, [], [], [], [], [], [])
        state = self.state[parameter]
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        return [state[name] for name in names]

    def _count_step(self, parameters: list[nn.Parameter]) -> None:
        for cuda in (False, True):
            steps = [step for p in parameters if (step := self.state[p]["step"]).is_cuda is cuda]
            if steps:
                torch._foreach_add_(steps, 1)

    def _scalars(self, parameter: nn.Parameter, group: dict[str, Any], rule: AdamRule) -> AdamSettings | AdamScales:
        step = self.state[parameter]["step"]
        device, dtype = parameter.device, parameter.dtype
        if rule.on_device:
            return self._settings(group, step, device, dtype)
        key = (id(group), float(step), device, dtype)
        if key not in self._scales:
            exact = adam_scales(self._settings(group, step.double(), torch.device("cpu"), torch.float64))
            self._scales[key] = AdamScales(*(scale.to(device, dtype, non_blocking=True) for scale in exact))
        return self._scales[key]

    def _settings(self, group: dict[str, Any], step: Tensor, device: torch.device, dtype: torch.dtype) -> AdamSettings:
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


class SGD(_OnePass, torch.optim.SGD):
    """``torch.optim.SGD`` with its arguments, and ``regularizer`` and ``compile`` as in :class:`Adam`."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        regularizer: Regularizer | None = None,
        compile: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
        self.compile = compile
        if regularizer is not None:
            regularizer.attach(self)

    def step(self, closure: Closure | None = None) -> Any:
        return self._step(closure)

    def _torch_step(self) -> None:
        unhooked(torch.optim.SGD.step)(self)

    def _rule(self, group: dict[str, Any]) -> SGDRule:
        if group["differentiable"]:
            raise Misfit("differentiable=True")
        return SGDRule(group["momentum"] != 0, group["nesterov"], group["maximize"], group["weight_decay"] != 0)

    def _moments(self, parameter: nn.Parameter, group: dict[str, Any]) -> list[Tensor]:
        if group["momentum"] == 0:
            return []
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            if group["dampening"] != 0:
                raise Misfit("the first step with dampening is one of its own")
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [state["momentum_buffer"]]

    def _scalars(self, parameter: nn.Parameter, group: dict[str, Any], rule: SGDRule) -> SGDScales:
        numbers = (group["lr"], group["momentum"], 1.0 - group["dampening"], group["weight_decay"])
        return SGDScales(*(as_tensor(number, parameter.device, parameter.dtype) for number in numbers))


# -- small things --------------------------------------------------------------------------------------------

_numbers: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}


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


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step() without the hooks around it: they have been run around ours."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return inner


def check_recording(optimizer: Any) -> None:
    """torch's own check that a CUDA graph is recorded with capturable=True only; its name changed with torch 2.9."""
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(optimizer, name):
            getattr(optimizer, name)()
            return
