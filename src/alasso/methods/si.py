r"""Synaptic intelligence (Zenke, Poole and Ganguli, ICML 2017), in the notation of the ALASSO paper, Eqs. 1 to 3.

.. math::

    \tilde{\mathcal L}^n &= \mathcal L^n + c \sum_k \hat\Omega_k^{n-1} (\theta_k - \hat\theta_k^{n-1})^2  && (1)

    \hat\Omega_k^n &= \frac{\omega_k^n}{(\hat\theta_k^n - \hat\theta_k^{n-1})^2 + \xi} + \hat\Omega_k^{n-1}  && (3)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from alasso.methods.base import PathState, Setting, Springs, check_non_negative
from alasso.regularizer import Regularizer


@dataclass(frozen=True)
class SISurrogate(Springs[PathState]):
    """SI's settings and functions; :class:`SI` explains the settings."""

    c: float = 0.1
    xi: float = 0.1

    State: ClassVar[type] = PathState
    observes_path: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_non_negative(c=self.c, xi=self.xi)

    def init(self, theta: Tensor) -> PathState:
        zero = torch.zeros_like(theta)
        return PathState(anchor=theta.clone(), omega=zero, path=zero.clone())

    def stiffness(self, s: PathState) -> tuple[Tensor, Tensor]:
        k = self.c * s.omega
        return k, k

    def consolidate(self, s: PathState, theta: Tensor, importance: Tensor | None = None) -> PathState:
        omega = accumulated_omega(s.omega, s.path, theta - s.anchor, self.xi)
        return PathState(anchor=theta.clone(), omega=omega, path=torch.zeros_like(s.path))

    def warm_start(self, theta: Tensor, importance: Tensor) -> PathState:
        return self.init(theta)._replace(omega=importance.clone())


def accumulated_omega(Omega: Tensor, omega: Tensor, moved: Tensor, xi: float) -> Tensor:
    """Return Ω by Eq. 3. A negative ω lowers Ω, but never below zero: SI's authors rectify the whole sum.

    Args:
        Omega: Ω before the task.
        omega: ω of the task.
        moved: θ̂ⁿ − θ̂ⁿ⁻¹.
        xi: ξ.

    Returns:
        Ω ≥ 0 after the task, of the same shape.
    """
    return (Omega + ratio_or(omega, moved.square() + xi, torch.zeros_like(omega))).clamp(min=0)


def ratio_or(numerator: Tensor, denominator: Tensor, otherwise: Tensor) -> Tensor:
    """Return numerator / denominator, or ``otherwise`` where the denominator is zero: ξ = 0 and no move.

    Args:
        numerator: Of any shape.
        denominator: Of the numerator's shape.
        otherwise: Of the numerator's shape.

    Returns:
        A tensor of that shape.
    """
    still = denominator == 0
    return torch.where(still, otherwise, numerator / torch.where(still, 1.0, denominator))


class SI(Regularizer):
    """Synaptic intelligence (Zenke et al., ICML 2017).

    Args:
        model: The model to protect.
        c: Strength of the penalty, Eq. 1.
        xi: Damping of weights that hardly moved, Eq. 3.
        exclude: Shell-style patterns of parameter names to leave alone.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.
    """

    method = "SI"
    c = Setting[float]()
    xi = Setting[float]()

    def __init__(self, model: nn.Module, c: float = 0.1, xi: float = 0.1, *, exclude: str | Iterable[str] = ()) -> None:
        super().__init__(model, SISurrogate(c, xi), exclude)
