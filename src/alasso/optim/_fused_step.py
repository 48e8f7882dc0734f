"""A step of an optimizer and the regularizers' share in it, as one compiled pass over each tensor.

    total gradient ← g + ∂penalty/∂θ;  the optimizer's moments;  θ;  ω −= g·Δθ

Steps are made on the state that torch's optimizer keeps. Where one cannot be made in such passes (half precision,
scaled gradients, shards, odd layouts, no compiler), torch makes it between the two halves of
:class:`alasso._step_hooks.StepHooks`, with equal results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso._compile import Compiled, compiled, flat, flat_state, no_compiler, with_tensor_settings
from alasso._passes import Share, Work, is_plain
from alasso._step_hooks import StepHooks
from alasso.errors import AlassoError
from alasso.methods.base import add_to_path_
from alasso.optim._update_rules import AdamRule, Group, SGDRule
from alasso.regularizer import Regularizer

log = logging.getLogger("alasso")

Closure = Callable[[], Any]
Rule = AdamRule | SGDRule
NO_STATE: Mapping[str, Any] = {}


def kernel_of(rule: Rule, surrogates: Sequence[Any]) -> Compiled:
    """Return the compiled step of this rule under these kinds of surrogate; none of them for plain training."""

    def step(
        theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...], shares: Sequence[Any]
    ) -> None:
        g = -g if rule.maximize else g
        total = g
        for surrogate, state, has_past in shares:
            if has_past:
                total = total + surrogate.penalty_grad(theta, state)
        new_theta, new_moments = rule.move(theta, total, moments, numbers)
        for surrogate, state, _ in shares:
            if surrogate.observes_path:
                add_to_path_(state.path, g, theta, new_theta)
        theta.copy_(new_theta)
        for old, new in zip(moments, new_moments, strict=True):
            old.copy_(new)

    kinds = tuple(type(surrogate) for surrogate in surrogates)
    names = [type(rule).__name__.removesuffix("Rule"), *(kind.__name__.removesuffix("Surrogate") for kind in kinds)]
    return compiled((rule, kinds), step, "step_of_" + "_".join(names))


class FusedParameter:
    """One parameter's steps, as long as nothing changes."""

    def __init__(self, parameter: nn.Parameter, shares: Sequence[Share], rule: Rule, moments: Sequence[Tensor]) -> None:
        self.parameter = parameter
        self._theta = flat(parameter.detach())
        self._moments = tuple(flat(moment) for moment in moments)
        self._shares = [
            (with_tensor_settings(surrogate, self._theta), flat_state(state, parameter.shape), has_past)
            for surrogate, state, has_past in shares
        ]
        self._kernel = kernel_of(rule, [share.surrogate for share in shares])

    def step(self, numbers: tuple[Tensor, ...]) -> None:
        """Make one."""
        assert self.parameter.grad is not None
        self._kernel(self._theta, flat(self.parameter.grad), self._moments, numbers, self._shares)
        torch.autograd.graph.increment_version(self.parameter)


class FusedPlan(NamedTuple):
    """What a step works on, as long as nothing changes."""

    parameters: list[tuple[FusedParameter, int, dict[str, Any]]]  # with the group's index and the optimizer's state
    seen_by: list[Regularizer]


class FusedOptimizer(Optimizer):
    """What :class:`alasso.optim.Adam` and :class:`alasso.optim.SGD` have in common."""

    calls_its_hooks = True  # torch does not

    # Defaults here, because a copied or unpickled optimizer never runs __init__.
    _reason: str | None = None  # why the last step was not fused

    def _take(self, regularizer: Any) -> None:
        if isinstance(regularizer, Regularizer):
            regularizer.attach(self)
        elif regularizer is not None:
            given = f"the class {regularizer.__name__}" if isinstance(regularizer, type) else type(regularizer).__name__
            raise AlassoError(f"regularizer takes one made for the model, as alasso.ALASSO(model), not {given}")

    # -- what each optimizer knows ---------------------------------------------------------------------------

    def _state_of(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, made if it is not there yet."""
        raise NotImplementedError

    def _rule_of(self, group: Group, own: Mapping[str, Any] = NO_STATE) -> Rule:
        """Return the rule of a group; for a step, given the state of the parameter."""
        raise NotImplementedError

    def _numbers(self, index: int, own: dict[str, Any], like: Tensor) -> tuple[Tensor, ...]:
        """Return the numbers that a step of a parameter depends on."""
        raise NotImplementedError

    def _count_step(self, states: Sequence[dict[str, Any]]) -> None:
        """Count a step of all parameters with these states."""

    def _why_not(self, parameter: nn.Parameter, group: Group) -> str | None:
        """Return why a step of a parameter cannot be fused, None if it can."""
        grad = parameter.grad
        assert grad is not None
        if group["differentiable"]:
            return "differentiable=True"
        if grad.layout is not torch.strided or not is_plain(Work(parameter, grad, None, ()), grad):
            return "a parameter and its gradient are not of one full precision, device and layout"
        return no_compiler(parameter.device.type)

    # -- a step ----------------------------------------------------------------------------------------------

    def _step(self, closure: Closure | None, torch_step: Callable[..., Any]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hooks = StepHooks.of(self)
        hooks.leave_open_step()  # which raised
        if not self._fused_step(hooks):
            hooks.open(self)
            unhooked(torch_step)(self)
            hooks.close(self)
        return loss

    @torch.no_grad()
    def _fused_step(self, hooks: StepHooks) -> bool:
        """Make the step, and return whether it could be made so."""
        is_scaled = getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None
        hooks.begin()
        if hooks.fused_plan is None or hooks.fused_plan[0] != self._key(hooks, is_scaled):
            plan = self._made_plan(hooks, "the gradients are scaled" if is_scaled else None)
            hooks.fused_plan = self._key(hooks, is_scaled), plan  # the optimizer's state may be there only now
        if self._reason is not None:
            return False
        plan = hooks.fused_plan[1]
        self._count_step([own for _, _, own in plan.parameters])
        for parameter, index, own in plan.parameters:
            parameter.step(self._numbers(index, own, parameter.parameter))
        for regularizer in plan.seen_by:
            regularizer.steps += 1
        return True

    def _key(self, hooks: StepHooks, is_scaled: bool) -> list[Any]:
        """Return what changes where a step has to work on other things than the one before, or in another way."""
        key: list[Any] = [is_scaled, hooks.key_of(self)]
        for group in self.param_groups:
            key.append(self._rule_of(group))
            for p in group["params"]:
                if p.grad is not None and p in self.state:
                    key += [t.data_ptr() for t in self.state[p].values() if t is not None]
        return key

    def _made_plan(self, hooks: StepHooks, reason: str | None) -> FusedPlan:
        plan = FusedPlan([], [])
        index_of = {id(group): index for index, group in enumerate(self.param_groups)}
        for parameter, group in hooks.trained(self):
            reason = reason or self._why_not(parameter, group)
            if reason is None:
                own, index = self._state_of(parameter, group), index_of[id(group)]
                rule = self._rule_of(group, own)
                owners = hooks.owners_of(parameter)
                shares = [Share.of(regularizer, name, parameter) for regularizer, name in owners.items()]
                fused = FusedParameter(parameter, shares, rule, [own[moment] for moment in rule.moments])
                plan.parameters.append((fused, index, own))
                plan.seen_by.extend(one for one in owners if one not in plan.seen_by)
        if reason is not None and reason != self._reason:
            log.warning("%s is not fused with the penalty, which hooks add: %s", type(self).__name__, reason)
        self._reason = reason
        if reason is None:
            hooks.release()
        return plan

    def _learning_rate(self, index: int, like: Tensor) -> Tensor:
        """Return a group's learning rate; a tensor of the user's stays the one that schedulers write to."""
        lr = self.param_groups[index]["lr"]
        if isinstance(lr, Tensor):
            return lr.detach().reshape(()).to(like.device, like.dtype, non_blocking=True)
        return self._constant("lr", index, [lr], like).reshape(())

    def _constant(self, name: str, index: int, numbers: list[float], like: Tensor) -> Tensor:
        """Return a group's numbers as a tensor that stays where it is: a CUDA graph knows it by its address."""
        known: dict[Any, tuple[list[float], Tensor]] = self.__dict__.setdefault("_constants", {})
        key = (name, index, like.device, like.dtype)
        if key not in known:
            known[key] = numbers, torch.tensor(numbers, device=like.device, dtype=like.dtype)
        elif known[key][0] != numbers:
            known[key] = numbers, known[key][1].copy_(torch.tensor(numbers, dtype=like.dtype))
        return known[key][1]


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's step() without the hooks around it: they are run around ours."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return inner
