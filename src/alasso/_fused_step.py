"""A step of an optimizer and the regularizers' share in it, as one compiled pass over each tensor.

    total gradient ← g + ∂penalty/∂θ;  the optimizer's moments;  θ;  ω −= g·Δθ

An engine makes the steps of one optimizer on the state that it keeps itself. Where a step cannot be made in such passes
(half precision, scaled gradients, shards, odd layouts, no compiler), the engine says why, and torch makes the step
between the two halves of :class:`alasso._step_plans.StepHooks`, with equal results.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso._compile import Compiled, compiled, flat, flat_state, no_compiler, with_tensor_settings
from alasso._passes import Share, Work, is_plain, stiffest_of_shares
from alasso._plans import Plans, is_scaled
from alasso._update_rules import AdamRule, Group, SGDRule
from alasso.methods.base import Springs, add_to_path_

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer

log = logging.getLogger("alasso")

Rule = AdamRule | SGDRule
NO_STATE: Mapping[str, Any] = {}


def kernel_of(rule: Rule, shares: Sequence[Share], theta: Tensor) -> Compiled:
    """Return the compiled step of this rule under such shares, of weights such as θ; without any, of plain training."""

    def step(
        theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...], shares: Sequence[Any]
    ) -> None:
        g = -g if rule.maximize else g
        total = g
        most = rule.most_curvature(numbers)
        for surrogate, state, has_past in shares:
            if has_past:
                total = total + surrogate.penalty_grad(theta, state, most)
        new_theta, new_moments = rule.move(theta, total, moments, numbers)
        for surrogate, state, _ in shares:
            if surrogate.observes_path:
                add_to_path_(state.path, g, theta, new_theta)
        theta.copy_(new_theta)
        for old, new in zip(moments, new_moments, strict=True):
            old.copy_(new)

    kinds = tuple((type(share.surrogate), share.has_past) for share in shares)
    names = [type(rule).__name__.removesuffix("Rule"), *(kind.__name__.removesuffix("Surrogate") for kind, _ in kinds)]
    return compiled((rule, kinds, theta.dtype, theta.device.type), step, "step_of_" + "_".join(names))


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
        self._kernel = kernel_of(rule, shares, self._theta)

    def step(self, numbers: tuple[Tensor, ...]) -> None:
        """Make one."""
        assert self.parameter.grad is not None
        self._kernel(self._theta, flat(self.parameter.grad), self._moments, numbers, self._shares)
        torch.autograd.graph.increment_version(self.parameter)


class FusedPlan(NamedTuple):
    """What a step works on, as long as nothing changes."""

    parameters: list[tuple[FusedParameter, int, dict[str, Any]]]  # with the group's index and the optimizer's state
    seen_by: list[Regularizer]


class Engine(ABC):
    """Makes the steps of one optimizer in one pass, and remembers what they work on."""

    def __init__(self) -> None:
        self._plan: tuple[Any, FusedPlan] = (None, FusedPlan([], []))
        self._reason: str | None = None  # why the last step was not made so
        self._constants: dict[Any, tuple[list[float], Tensor]] = {}

    # -- what each optimizer knows ---------------------------------------------------------------------------

    @abstractmethod
    def state_of(self, optimizer: Optimizer, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        """Return the optimizer's state of a parameter, made if it is not there yet."""

    @abstractmethod
    def rule_of(self, group: Group, own: Mapping[str, Any] = NO_STATE) -> Rule:
        """Return the rule of a group; for a step, given the state of the parameter."""

    @abstractmethod
    def numbers(self, group: Group, index: int, own: dict[str, Any], like: Tensor) -> tuple[Tensor, ...]:
        """Return the numbers that a step of a parameter depends on."""

    @abstractmethod
    def count_step(self, states: Sequence[dict[str, Any]]) -> None:
        """Count a step of all parameters with these states."""

    def why_not(self, optimizer: Optimizer, parameter: nn.Parameter, group: Group) -> str | None:
        """Return why a step of a parameter cannot be fused, None if it can."""
        grad = parameter.grad
        assert grad is not None
        if group["differentiable"]:
            return "differentiable=True"
        if grad.layout is not torch.strided or not is_plain(Work(parameter, grad, None, ()), grad):
            return "a parameter and its gradient are not of one full precision, device and layout"
        return no_compiler(parameter.device.type)

    # -- a step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def made(self, optimizer: Optimizer, plans: Plans) -> bool:
        """Make the step, and return whether it could be made so."""
        if self._plan[0] != self._key(optimizer, plans):
            plan = self._made_plan(optimizer, plans)
            self._plan = self._key(optimizer, plans), plan  # the optimizer's state may be there only now
        if self._reason is not None:
            return False
        plan = self._plan[1]
        self.count_step([own for _, _, own in plan.parameters])
        for parameter, index, own in plan.parameters:
            parameter.step(self.numbers(optimizer.param_groups[index], index, own, parameter.parameter))
        for regularizer in plan.seen_by:
            regularizer.steps += 1
        return True

    def forget(self) -> None:
        """Let go of what steps worked on."""
        self._plan = (None, FusedPlan([], []))

    def _key(self, optimizer: Optimizer, plans: Plans) -> list[Any]:
        """Return what changes where a step has to work on other things than the one before, or in another way."""
        key: list[Any] = [is_scaled(optimizer), plans.key_of(optimizer)]
        for group in optimizer.param_groups:
            key.append(self.rule_of(group))
            for p in group["params"]:
                if p.grad is not None and p in optimizer.state:
                    key += [t.data_ptr() for t in optimizer.state[p].values() if t is not None]
        return key

    def _made_plan(self, optimizer: Optimizer, plans: Plans) -> FusedPlan:
        plan = FusedPlan([], [])
        if plans.limits.is_sgd:
            plans.limits.follow(optimizer)
        reason = "the gradients are scaled" if is_scaled(optimizer) else None
        index_of = {id(group): index for index, group in enumerate(optimizer.param_groups)}
        for parameter, group in plans.trained(optimizer):
            owners = plans.owners_of(parameter)
            whole = [one.method for one in owners if not isinstance(one.surrogate, Springs)]
            reason = reason or (f"{whole[0]}'s penalty is not elementwise" if whole else None)
            reason = reason or self.why_not(optimizer, parameter, group)
            if reason is None:
                own, index = self.state_of(optimizer, parameter, group), index_of[id(group)]
                rule = self.rule_of(group, own)
                shares = [Share.of(regularizer, name, parameter) for regularizer, name in owners.items()]
                for stiffest in stiffest_of_shares(shares, plans.limits):
                    plans.limits.below(stiffest, index)  # says so; the kernel looks at every step
                fused = FusedParameter(parameter, shares, rule, [own[moment] for moment in rule.moments])
                plan.parameters.append((fused, index, own))
                plan.seen_by.extend(one for one in owners if one not in plan.seen_by)
        if reason is not None and reason != self._reason:
            log.warning("%s is not fused with the penalty, which hooks add: %s", type(optimizer).__name__, reason)
        self._reason = reason
        if reason is None:
            plans.release()
        return plan

    def learning_rate(self, group: Group, index: int, like: Tensor) -> Tensor:
        """Return a group's learning rate; a tensor of the user's stays the one that schedulers write to."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            return lr.detach().reshape(()).to(like.device, like.dtype, non_blocking=True)
        return self.constant("lr", index, [lr], like).reshape(())

    def constant(self, name: str, index: int, numbers: list[float], like: Tensor) -> Tensor:
        """Return a group's numbers as a tensor that stays where it is: a CUDA graph knows it by its address."""
        key = (name, index, like.device, like.dtype)
        known = self._constants.get(key)
        if known is None:
            known = numbers, torch.tensor(numbers, device=like.device, dtype=like.dtype)
        elif known[0] != numbers:
            known = numbers, known[1].copy_(torch.tensor(numbers, dtype=like.dtype))
        self._constants[key] = known
        return known[1]


class AdamEngine(Engine):
    """Steps of ``torch.optim.Adam`` and ``AdamW``."""

    def why_not(self, optimizer: Optimizer, parameter: nn.Parameter, group: Group) -> str | None:
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "betas are tensors"
        own = optimizer.state.get(parameter)
        if own and not set(self.rule_of(group).moments) <= own.keys():
            return "the optimizer's state lacks a moment"
        return super().why_not(optimizer, parameter, group)

    def state_of(self, optimizer: Optimizer, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        own: dict[str, Any] = optimizer.state[parameter]
        if not own:
            optimizer._init_group(group, [], [], [], [], [], [])  # type: ignore[attr-defined]
        return own

    def rule_of(self, group: Group, own: Mapping[str, Any] = NO_STATE) -> Rule:
        return AdamRule.of(group, bool(own) and own["step"].is_cuda)

    def count_step(self, states: Sequence[dict[str, Any]]) -> None:
        torch._foreach_add_([own["step"] for own in states], 1)

    def numbers(self, group: Group, index: int, own: dict[str, Any], like: Tensor) -> tuple[Tensor, ...]:
        step = own["step"]
        if not step.is_cuda:
            return (self.constant("step", index, AdamRule.numbers(group, float(step)), like),)
        others = self.constant("others", index, AdamRule.device_numbers(group), like)
        return step, self.learning_rate(group, index, like), others


class SGDEngine(Engine):
    """Steps of ``torch.optim.SGD``."""

    def why_not(self, optimizer: Optimizer, parameter: nn.Parameter, group: Group) -> str | None:
        own = optimizer.state.get(parameter, {})
        if group["momentum"] and group["dampening"] and own.get("momentum_buffer") is None:
            return "the first step with dampening is one of its own"
        return super().why_not(optimizer, parameter, group)

    def state_of(self, optimizer: Optimizer, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        if not group["momentum"]:
            return {}
        own: dict[str, Any] = optimizer.state[parameter]
        if own.get("momentum_buffer") is None:
            own["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return own

    def rule_of(self, group: Group, own: Mapping[str, Any] = NO_STATE) -> Rule:
        return SGDRule.of(group)

    def count_step(self, states: Sequence[dict[str, Any]]) -> None:
        """Do nothing: SGD does not depend on the step's number."""

    def numbers(self, group: Group, index: int, own: dict[str, Any], like: Tensor) -> tuple[Tensor, ...]:
        others = self.constant("others", index, SGDRule.numbers(group), like)
        return self.learning_rate(group, index, like), others


def engine_for(optimizer: Optimizer) -> Engine | None:
    """Return an engine for torch's Adam, AdamW and SGD and for the library's own; None for all others."""
    kind = type(optimizer)
    own = getattr(kind, "calls_its_hooks", False)
    if kind is torch.optim.SGD or (own and issubclass(kind, torch.optim.SGD)):
        return SGDEngine()
    # Before torch 2.7, AdamW was no Adam with another option.
    if kind in (torch.optim.Adam, torch.optim.AdamW) or own:
        return AdamEngine() if issubclass(kind, torch.optim.Adam) else None
    return None
