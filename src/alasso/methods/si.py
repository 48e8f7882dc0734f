r"""Synaptic intelligence (Zenke, Poole and Ganguli, ICML 2017), in the notation of the ALASSO paper, Eqs. 1 to 3.

.. math::

    \tilde{\mathcal L}^n &= \mathcal L^n + c \sum_k \hat\Omega_k^{n-1} (\theta_k - \hat\theta_k^{n-1})^2  && (1)

    \hat\Omega_k^n &= \frac{\omega_k^n}{(\hat\theta_k^n - \hat\theta_k^{n-1})^2 + \xi} + \hat\Omega_k^{n-1}  && (3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from alasso.methods.base import PathState, Surrogate, check_non_negative


@dataclass(frozen=True)
class SISurrogate(Surrogate[PathState]):
    """Settings: c, strength of the penalty; ξ, damping of a weight that hardly moved."""

    c: float | Tensor = 0.1
    xi: float | Tensor = 0.1

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


def accumulated_omega(Omega: Tensor, omega: Tensor, moved: Tensor, xi: float | Tensor) -> Tensor:
    """Eq. 3. A negative ω lowers Ω, but never below zero: SI's authors take the rectifier of the whole sum."""
    return (Omega + ratio_or(omega, moved.square() + xi, torch.zeros_like(omega))).clamp(min=0)


def ratio_or(numerator: Tensor, denominator: Tensor, otherwise: Tensor) -> Tensor:
    """numerator / denominator, ``otherwise`` where the denominator is zero (ξ = 0 and a weight that stood still)."""
    still = denominator == 0
    return torch.where(still, otherwise, numerator / torch.where(still, 1.0, denominator))
