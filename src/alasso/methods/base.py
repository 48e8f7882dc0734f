r"""The one abstraction: a surrogate of past losses is an anchored spring per weight.

Every regularizer here replaces the loss of past tasks by

.. math:: \mathcal L_s(\theta) = \sum_k k_k^\pm \, (\theta_k - \hat\theta_k)^2 + \text{const}

with a stiffness of its own on each side, :math:`k^-` where :math:`\theta<\hat\theta` and :math:`k^+` where
:math:`\theta>\hat\theta`. The methods differ only in how they come by the anchor and the stiffness.

Everything is elementwise and pure: tensors in, tensors out. The same functions therefore serve float64 tests, shards
of a distributed model, stacked runs (settings may be tensors that broadcast) and ``torch.compile``.

Glossary: θ weights, θ̂ anchor, Ω importance, ω path integral of the running task, d = θ − θ̂.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from alasso.errors import AlassoError


class AnchorState(NamedTuple):
    """State of a method without a path integral: where the spring is fixed, and how important the weight is."""

    anchor: Tensor  # θ̂
    omega: Tensor  # Ω ≥ 0


class PathState(NamedTuple):
    """State of a method that integrates the loss along the path of training."""

    anchor: Tensor  # θ̂
    omega: Tensor  # Ω ≥ 0
    path: Tensor  # ω, summed since the last consolidation


S = TypeVar("S", bound=Any)  # one of the NamedTuples above, or a method's own


class Surrogate(ABC, Generic[S]):
    """A method's settings and its pure functions over one tensor θ and that tensor's state s."""

    State: ClassVar[type]
    observes_path: ClassVar[bool] = False  # whether the state has a field ``path``, fed by :func:`add_to_path_`

    @abstractmethod
    def init(self, theta: Tensor) -> S:
        """State of weights that have no past: the penalty is zero wherever they go."""

    @abstractmethod
    def stiffness(self, s: S) -> tuple[Tensor, Tensor]:
        """(k⁻, k⁺): the factor of d² left and right of the anchor."""

    def observed_spring(self, s: S) -> tuple[Tensor, Tensor]:
        """The stiffness on the side that training saw, and which side that is (int8: −1 left, +1 right, 0 neither).

        With :meth:`overestimate`, the same spring as :meth:`stiffness` in fewer bytes, as stacked runs keep it.
        """
        k_minus, k_plus = self.stiffness(s)
        if k_minus is not k_plus:
            raise AlassoError(f"{type(self).__name__} tells the sides apart; it needs an observed_spring of its own")
        return k_plus, torch.zeros_like(k_plus, dtype=torch.int8)

    def overestimate(self) -> tuple[float | Tensor, float | Tensor]:
        """(a, ε): the stiffness on a side that training did not see is aK + ε, where it is K on the one it saw."""
        return 1.0, 0.0

    @abstractmethod
    def consolidate(self, s: S, theta: Tensor, importance: Tensor | None = None) -> S:
        """State after a task that ended at θ."""

    def warm_start(self, theta: Tensor, importance: Tensor) -> S:
        """State of weights θ whose training was not seen: only how important they are has been measured."""
        return self.consolidate(self.init(theta), theta, importance)

    def constant(self, s: S) -> Tensor | float:
        """The part of the penalty that does not depend on θ."""
        return 0.0

    def penalty(self, theta: Tensor, s: S) -> Tensor:
        d = theta - s.anchor
        k_minus, k_plus = self.stiffness(s)
        return two_sided_spring(d, k_minus, k_plus).sum() + self.constant(s)

    def penalty_grad(self, theta: Tensor, s: S) -> Tensor:
        d = theta - s.anchor
        k_minus, k_plus = self.stiffness(s)
        return two_sided_spring_grad(d, k_minus, k_plus)


def two_sided_spring(d: Tensor, k_minus: Tensor, k_plus: Tensor) -> Tensor:
    """k⁻·d² left of the anchor, k⁺·d² right of it."""
    return k_minus * d.clamp(max=0).square() + k_plus * d.clamp(min=0).square()


def two_sided_spring_grad(d: Tensor, k_minus: Tensor, k_plus: Tensor) -> Tensor:
    """Derivative of :func:`two_sided_spring` by d."""
    if k_minus is k_plus:
        return (k_plus * d).mul_(2)
    left = d.clamp(max=0).mul_(k_minus)
    return d.clamp(min=0).mul_(k_plus).add_(left).mul_(2)


def add_to_path_(omega: Tensor, g: Tensor, theta_before: Tensor, theta: Tensor) -> None:
    """ω −= g·(θ − θ_before): how much a step lowered the task's loss, to first order, weight by weight.

    g is the gradient of the task's loss alone (the paper's Eq. 10, one step of it). Runs at every step of a method that
    observes its path, so it writes in place; the only function here that does.
    """
    omega.addcmul_(g, theta - theta_before, value=-1)


def require_importance(importance: Tensor | None) -> Tensor:
    """The importance measured on data, which EWC and MAS cannot do without."""
    if importance is None:
        raise AlassoError("this method needs an importance measured on data; pass consolidate() the task's loader")
    return importance


def no_number(name: str, value: object) -> AlassoError:
    """In one line, whatever was given."""
    what = type(value).__name__ if "\n" in repr(value) else repr(value)
    hint = "; optimizers go to attach()" if isinstance(value, torch.optim.Optimizer) else ""
    return AlassoError(f"{name} must be a number, not {what}{hint}")


def check_non_negative(**settings: float | Tensor) -> None:
    """Refuse a negative, infinite or NaN setting by its name."""
    for name, value in settings.items():
        if not isinstance(value, Real | Tensor):
            raise no_number(name, value)
        value = torch.as_tensor(value)
        if not bool((torch.isfinite(value) & (value >= 0)).all()):
            raise AlassoError(f"{name} must be a finite number, zero or more, not {value.tolist()}")
