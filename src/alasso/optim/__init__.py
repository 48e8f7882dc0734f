"""Adam and SGD with a regularizer: the penalty is part of their own pass over memory, compiled at the first steps.

They are torch's optimizers, with the same arguments, ``state_dict`` and behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alasso.optim._fused_step import NO_STATE, Closure, FusedOptimizer, Rule
from alasso.optim._update_rules import AdamRule, Group, SGDRule
from alasso.regularizer import Regularizer

__all__ = ["SGD", "Adam"]


class Adam(FusedOptimizer, torch.optim.Adam):
    """``torch.optim.Adam``, whose steps add a regularizer's penalty and observe its path; no ``attach()`` is needed.

    Compiling takes some seconds at the first steps; the log says so. Hooks do what cannot be fused (half precision,
    scaled gradients, no compiler), with equal results and a line in the log.

    Args:
        params: Parameters or parameter groups, as in torch.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        amsgrad: Whether to use the largest second moment so far.
        regularizer: The regularizer whose penalty is part of each step; None for plain training.
        **options: torch's other options.

    Raises:
        AlassoError: ``regularizer`` is no regularizer, or protects none of the parameters.

    >>> import alasso
    >>> model = torch.nn.Linear(4, 2)
    >>> reg = alasso.ALASSO(model)
    >>> optimizer = alasso.optim.Adam(model.parameters(), lr=1e-3, regularizer=reg)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    >>> reg.consolidate()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        regularizer: Regularizer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        self._take(regularizer)

    def step(self, closure: Closure | None = None) -> Any:
        """Take a step.

        Args:
            closure: Evaluates the loss and its gradients, as in torch.

        Returns:
            The closure's loss, if there is one.
        """
        return self._step(closure, torch.optim.Adam.step)

    def _why_not(self, parameter: nn.Parameter, group: Group) -> str | None:
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "betas are tensors"
        own = self.state.get(parameter)
        if own and not set(AdamRule.of(group, False).moments) <= own.keys():
            return "the optimizer's state lacks a moment"
        return super()._why_not(parameter, group)

    def _state_of(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        own: dict[str, Any] = self.state[parameter]
        if not own:
            self._init_group(group, [], [], [], [], [], [])
        return own

    def _rule_of(self, group: Group, own: Mapping[str, Any] = NO_STATE) -> Rule:
        return AdamRule.of(group, bool(own) and own["step"].is_cuda)

    def _count_step(self, states: Sequence[dict[str, Any]]) -> None:
        torch._foreach_add_([own["step"] for own in states], 1)

    def _numbers(self, index: int, own: dict[str, Any], like: Tensor) -> tuple[Tensor, ...]:
        group, step = self.param_groups[index], own["step"]
        if not step.is_cuda:
            return (self._constant("step", index, AdamRule.numbers(group, float(step)), like),)
        return (
            step,
            self._learning_rate(index, like),
            self._constant("others", index, AdamRule.device_numbers(group), like),
        )


class SGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD``, whose steps add a regularizer's penalty, as those of :class:`Adam` do.

    Args:
        params: Parameters or parameter groups, as in torch.
        lr: Learning rate.
        momentum: Decay of the velocity.
        dampening: Share of each gradient that the velocity leaves out.
        weight_decay: Decay of the weights.
        nesterov: Whether to use Nesterov momentum.
        regularizer: The regularizer whose penalty is part of each step; None for plain training.
        **options: torch's other options.

    Raises:
        AlassoError: ``regularizer`` is no regularizer, or protects none of the parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        regularizer: Regularizer | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **options)
        self._take(regularizer)

    def step(self, closure: Closure | None = None) -> Any:
        """Take a step.

        Args:
            closure: Evaluates the loss and its gradients, as in torch.

        Returns:
            The closure's loss, if there is one.
        """
        return self._step(closure, torch.optim.SGD.step)

    def _why_not(self, parameter: nn.Parameter, group: Group) -> str | None:
        own = self.state.get(parameter, {})
        if group["momentum"] and group["dampening"] and own.get("momentum_buffer") is None:
            return "the first step with dampening differs from the later ones"
        return super()._why_not(parameter, group)

    def _state_of(self, parameter: nn.Parameter, group: Group) -> dict[str, Any]:
        if not group["momentum"]:
            return {}
        own: dict[str, Any] = self.state[parameter]
        if own.get("momentum_buffer") is None:
            own["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return own

    def _rule_of(self, group: Group, own: Mapping[str, Any] = NO_STATE) -> Rule:
        return SGDRule.of(group)

    def _numbers(self, index: int, own: dict[str, Any], like: Tensor) -> tuple[Tensor, ...]:
        others = self._constant("others", index, SGDRule.numbers(self.param_groups[index]), like)
        return self._learning_rate(index, like), others
