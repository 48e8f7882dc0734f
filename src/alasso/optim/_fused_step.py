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

from alasso.methods.base import add_to_path_
from alasso.optim import _compile as kernels

if TYPE_CHECKING:
    from alasso._exchange import Exchange

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
        # What changes from step to step comes first.
        def step(
            g: Tensor, scalars: Any, theta: Tensor, moments: tuple[Tensor, ...], surrogate: Any, state: Any
        ) -> None:
            fold(rule, theta, g, moments, scalars, surrogate, state)

        return step, "_".join(["one_pass", type(rule).__name__] + ([type(surrogate).__name__] if surrogate else []))

    return kernels.compiled((rule, type(surrogate)), make)


NOT_ALIKE = "a parameter, its gradient and its state are not of one precision, device and layout"


class Misfit(Exception):
    """Why a step cannot be made in one pass."""


class Work(NamedTuple):
    """One parameter's part in the steps."""

    parameter: nn.Parameter
    group: Group
    own: dict[str, Any]  # the optimizer's state of it
    rule: Any
    is_protected: bool
    run: Callable[[Tensor, Any], None]  # takes the gradient in one dimension and the step's scalars


def flat_gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient in one dimension, in the order in which the parameter lies in memory."""
    g = parameter.grad
    assert g is not None
    if kernels.is_alike(g, parameter) and g.is_contiguous() and parameter.is_contiguous():
        return g.view(-1).data
    if g.layout is not torch.strided:
        raise Misfit("a gradient is sparse")
    flat = kernels.flattened([parameter.detach(), g.detach()])
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
        self._known: dict[int, tuple[tuple[Any, ...], Work, Any]] = {}

    # -- what each optimizer knows -------------------------------------------------------------------------------

    def own_state(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        """The optimizer's state of the parameter, made if it is not there yet."""
        raise AssertionError("each optimizer has its own")

    def rule(self, own: dict[str, Any], group: Group) -> Any:
        raise AssertionError("each optimizer has its own")

    def moments(self, own: dict[str, Any], group: Group) -> list[Tensor]:
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
        parameters = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        work = [self._prepared(p, group, exchange) for p, group in parameters]
        if len(self._known) > 2 * len(work):
            self.forget()  # of parameters that are no more
        gradients = [flat_gradient(p) for p, _ in parameters]
        # Nothing has changed so far; from here on, everything fits.
        self.count_step(work)
        for item, g in zip(work, gradients, strict=True):
            item.run(g, self.scalars(item))
            torch.autograd.graph.increment_version(item.parameter)
        if exchange is not None:
            exchange.release()
            if any(item.is_protected for item in work):
                exchange.regularizer.steps += 1

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
        own = self.own_state(parameter, group)
        moments = self.moments(own, group)
        rule = self.rule(own, group)
        state = surrogate = None
        if exchange is not None and (name := exchange.name_of(parameter)) is not None:
            state = exchange.regularizer.state_of(name, parameter)
            surrogate = exchange.regularizer.surrogate
        # Addresses and identities; what they belong to is held by the work itself, so none is used again for another.
        place = (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
        kept = ((id(moment), moment.data_ptr()) for moment in moments)  # one may be given other memory through .data
        now = (*place, rule, id(group), id(own), id(state), id(surrogate), *kept)
        known = self._known.get(id(parameter))
        if known is not None and known[0] == now:
            return known[1]
        run = self._pass(parameter, rule, moments, state, exchange)
        work = Work(parameter, group, own, rule, state is not None, run)
        self._known[id(parameter)] = now, work, (state, surrogate, moments)
        return work

    def _pass(
        self, parameter: nn.Parameter, rule: Any, moments: list[Tensor], state: Any, exchange: Exchange | None
    ) -> Callable[[Tensor, Any], None]:
        """The pass over the parameter, which then takes a gradient and the scalars of a step."""
        if type(parameter) is not nn.Parameter and type(parameter) is not Tensor:
            raise Misfit(f"a parameter is a {type(parameter).__name__}")
        surrogate = None
        if state is not None:
            assert exchange is not None
            surrogate = exchange.regularizer.surrogate_on(parameter.device, parameter.dtype)
            if surrogate is None:
                raise Misfit("a setting of the regularizer is a tensor")
        flat = kernels.flattened([parameter.detach(), *moments], state)
        if flat is None:
            raise Misfit(NOT_ALIKE)
        (theta, *flat_moments), flat_state = flat
        return one_pass(rule, surrogate).bound(theta, tuple(flat_moments), surrogate, flat_state)

    def forget(self) -> None:
        """Let go of the tensors of the last step."""
        self._known.clear()

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            log.info("%s", sentence)
