r"""The one abstraction: a surrogate of past losses is an anchored spring per weight.

Every regularizer here replaces the loss of past tasks by

.. math:: \mathcal L_s(\theta) = \sum_k k_k^\pm \, (\theta_k - \hat\theta_k)^2 + \text{const}

with one stiffness for each side, :math:`k^-` where :math:`\theta<\hat\theta` and :math:`k^+` where
:math:`\theta>\hat\theta`. The methods differ only in how they choose the anchor and the stiffness.

Everything is elementwise and pure: tensors in, tensors out. The same functions serve float64 tests, shards of a
distributed model and ``torch.compile``.

Glossary: θ weights, θ̂ anchor, Ω importance, ω path integral of the running task, d = θ − θ̂.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from numbers import Real
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from alasso.errors import AlassoError


class AnchorState(NamedTuple):
    """State of a method without a path integral.

    Attributes:
        anchor: θ̂, where the spring is fixed.
        omega: Ω ≥ 0, how important the weight is.
    """

    anchor: Tensor
    omega: Tensor


class PathState(NamedTuple):
    """State of a method that integrates the loss along the path of training.

    Attributes:
        anchor: θ̂, where the spring is fixed.
        omega: Ω ≥ 0, how important the weight is.
        path: ω, summed since the last consolidation.
    """

    anchor: Tensor
    omega: Tensor
    path: Tensor


S = TypeVar("S", bound=Any)  # one of the NamedTuples above, or a method's own


class Surrogate(ABC, Generic[S]):
    """A method's settings and its pure functions over one tensor θ and that tensor's state s.

    A method is a frozen dataclass that derives from this class; its fields are the settings. All tensors of a state
    have θ's shape, unless the state says otherwise.

    Attributes:
        State: The NamedTuple of tensors kept for each parameter; it has the fields ``anchor`` and ``omega``.
        observes_path: Whether the state has a field ``path``, which :func:`add_to_path_` updates at each step.
    """

    State: ClassVar[type]
    observes_path: ClassVar[bool] = False

    @abstractmethod
    def init(self, theta: Tensor) -> S:
        """Return the state of weights that have no past: the penalty is zero wherever they go.

        Args:
            theta: The weights θ.

        Returns:
            The state, in θ's precision and on its device.
        """

    @abstractmethod
    def stiffness(self, s: S) -> tuple[Tensor, Tensor]:
        """Return the factors of d² left and right of the anchor.

        Args:
            s: The state.

        Returns:
            (k⁻, k⁺), each of θ's shape; one tensor twice if they are alike.
        """

    @abstractmethod
    def consolidate(self, s: S, theta: Tensor, importance: Tensor | None = None) -> S:
        """Return the state after a task that ended at θ.

        Args:
            s: The state before, with the task's path if the method observes one.
            theta: The weights at the end of the task.
            importance: The importance measured on data, of θ's shape, for methods that measure it.

        Returns:
            The new state; it shares no tensor with ``s`` or ``theta``.
        """

    def warm_start(self, theta: Tensor, importance: Tensor) -> S:
        """Return the state of weights whose training was not observed: only their importance has been measured.

        Args:
            theta: The weights θ.
            importance: Their importance, of θ's shape.

        Returns:
            The state, as after one task.
        """
        return self.consolidate(self.init(theta), theta, importance)

    def constant(self, s: S) -> Tensor | float:
        """Return the part of the penalty that does not depend on θ.

        Args:
            s: The state.

        Returns:
            A scalar.
        """
        return 0.0

    def penalty(self, theta: Tensor, s: S) -> Tensor:
        """Return the surrogate's loss at θ.

        Args:
            theta: The weights θ.
            s: The state.

        Returns:
            A scalar, differentiable by θ.
        """
        return two_sided_spring(theta - s.anchor, *self.stiffness(s)).sum() + self.constant(s)

    def penalty_grad(self, theta: Tensor, s: S) -> Tensor:
        """Return the derivative of :meth:`penalty` by θ.

        Args:
            theta: The weights θ.
            s: The state.

        Returns:
            The gradient, of θ's shape.
        """
        return two_sided_spring_grad(theta - s.anchor, *self.stiffness(s))


def two_sided_spring(d: Tensor, k_minus: Tensor, k_plus: Tensor) -> Tensor:
    """Return k⁻·d² left of the anchor and k⁺·d² right of it.

    Args:
        d: Distances θ − θ̂.
        k_minus: k⁻, of d's shape.
        k_plus: k⁺, of d's shape.

    Returns:
        A tensor of d's shape.
    """
    return k_minus * d.clamp(max=0).square() + k_plus * d.clamp(min=0).square()


def two_sided_spring_grad(d: Tensor, k_minus: Tensor, k_plus: Tensor) -> Tensor:
    """Return the derivative of :func:`two_sided_spring` by d.

    Args:
        d: Distances θ − θ̂.
        k_minus: k⁻, of d's shape.
        k_plus: k⁺, of d's shape; the tensor ``k_minus`` itself makes one spring of the two.

    Returns:
        A tensor of d's shape.
    """
    if k_minus is k_plus:
        return (k_plus * d).mul_(2)
    left = d.clamp(max=0).mul_(k_minus)
    return d.clamp(min=0).mul_(k_plus).add_(left).mul_(2)


def add_to_path_(omega: Tensor, g: Tensor, theta_before: Tensor, theta: Tensor) -> None:
    """Subtract g·(θ − θ_before) from ω: how much a step lowered the task's loss, to first order, weight by weight.

    This is one step of the paper's Eq. 10. It runs at every step of a method that observes its path, so it writes in
    place; no other function here does.

    Args:
        omega: ω, changed in place.
        g: The gradient of the task's loss alone, of ω's shape.
        theta_before: The weights before the step.
        theta: The weights after it.
    """
    omega.addcmul_(g, theta - theta_before, value=-1)


def require_importance(importance: Tensor | None) -> Tensor:
    """Return the importance measured on data, which EWC and MAS cannot do without.

    Args:
        importance: What consolidation received.

    Returns:
        The importance.

    Raises:
        AlassoError: It is None.
    """
    if importance is None:
        raise AlassoError("this method needs an importance measured on data; pass consolidate() the task's loader")
    return importance


def require_loader(loader: Iterable[Any] | None, method: str) -> Iterable[Any]:
    """Return the data that a method measures importance on.

    Args:
        loader: What consolidation received.
        method: The method's name, for the message.

    Returns:
        The loader.

    Raises:
        AlassoError: It is None.
    """
    if loader is None:
        raise AlassoError(f"{method} measures importance on data; pass consolidate() the task's loader")
    return loader


def check_non_negative(**settings: object) -> None:
    """Refuse a negative, infinite or NaN setting by its name.

    Args:
        **settings: The settings by name.

    Raises:
        AlassoError: One is not a number, or is out of range.
    """
    for name, value in settings.items():
        if not isinstance(value, Real):
            given = type(value).__name__ if isinstance(value, Tensor | torch.optim.Optimizer) else repr(value)
            hint = "; optimizers go to attach()" if isinstance(value, torch.optim.Optimizer) else ""
            raise AlassoError(f"{name} must be a number, not {given:.60}{hint}")
        if not (math.isfinite(value) and float(value) >= 0):
            raise AlassoError(f"{name} must be a finite number, zero or more, not {value}")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of a ``Literal``'s.

    Args:
        name: The setting's name.
        value: Its value.
        choices: The ``Literal``.

    Raises:
        AlassoError: The ``Literal`` does not hold the value.
    """
    if value not in get_args(choices):
        raise AlassoError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")
