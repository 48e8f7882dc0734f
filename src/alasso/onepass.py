"""A step of Adam or SGD and a regularizer's share in it, as one compiled pass over each tensor.

    total gradient ← g + ∂penalty/∂θ;  the optimizer's moments;  θ;  ω −= g·Δθ

An engine makes such steps for one optimizer of torch's, on the state that optimizer keeps. What does not fit (half
precision, GradScaler's scale in the optimizer's hands, shards, odd layouts, no compiler, a small network) it refuses
before anything is changed, with the reason; the step is then made in two halves around the optimizer's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso import kernels
from alasso.methods.surrogate import add_to_path_

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


def is_recorded(group: Group) -> bool:
    """Whether the group's parameters are on a GPU that is recording a graph."""
    return any(kernels.is_being_recorded(p.device) for p in group["params"][:1])


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
