r"""Elastic weight consolidation: EWC (Kirkpatrick et al., PNAS 2017) and online EWC (Schwarz et al., ICML 2018).

EWC adds one quadratic a task, with F_t the diagonal Fisher information at the end of task t:

.. math:: \mathcal L = \mathcal L^n + \frac{\lambda}{2} \sum_{t<n} \sum_k F_{t,k} (\theta_k - \hat\theta_k^t)^2

A sum of quadratics is a quadratic, so one stiffness and one centre hold any number of tasks exactly. For two of them

.. math::

    F_1 (\theta-\theta_1)^2 + F_2 (\theta-\theta_2)^2 = (F_1+F_2)(\theta-\theta_c)^2
        + \frac{F_1 F_2}{F_1+F_2} (\theta_2-\theta_1)^2,
    \qquad \theta_c = \theta_1 + \frac{F_2}{F_1+F_2} (\theta_2 - \theta_1).

Online EWC keeps the last weights as the anchor and a decaying sum: :math:`F^* \leftarrow \gamma F^* + F_n`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from alasso.errors import AlassoError
from alasso.methods.base import AnchorState, Surrogate, check_non_negative, require_importance


class EWCState(NamedTuple):
    """One spring that equals the sum of all tasks' springs."""

    anchor: Tensor  # centre θ_c of the summed quadratic
    omega: Tensor  # Σ F_t
    constant: Tensor  # value of Σ_t Σ_k F_t (θ_c − θ_t)², which does not depend on θ


@dataclass(frozen=True)
class EWCSurrogate(Surrogate[EWCState]):
    """Settings: λ, strength of the penalty (``lam``; ½λF is the factor of d²)."""

    lam: float | Tensor = 100.0

    State: ClassVar[type] = EWCState

    def __post_init__(self) -> None:
        check_non_negative(lam=self.lam)

    def init(self, theta: Tensor) -> EWCState:
        return EWCState(anchor=theta.clone(), omega=torch.zeros_like(theta), constant=theta.new_zeros(()))

    def stiffness(self, s: EWCState) -> tuple[Tensor, Tensor]:
        k = 0.5 * self.lam * s.omega
        return k, k

    def constant(self, s: EWCState) -> Tensor:
        return 0.5 * self.lam * s.constant

    def consolidate(self, s: EWCState, theta: Tensor, importance: Tensor | None = None) -> EWCState:
        return summed_quadratic(s, theta, require_importance(importance))


def summed_quadratic(s: EWCState, theta: Tensor, F: Tensor) -> EWCState:
    """The quadratic of the past plus F·(· − θ)², as one quadratic and a constant."""
    total = s.omega + F
    # Share of the newcomer; where neither has any stiffness the centre is free, and the latest weights will do.
    share = torch.where(total > 0, F / torch.where(total > 0, total, 1.0), 1.0)
    apart = theta - s.anchor
    return EWCState(
        anchor=s.anchor + share * apart,
        omega=total,
        constant=s.constant + (s.omega * share * apart.square()).sum(),
    )


@dataclass(frozen=True)
class OnlineEWCSurrogate(Surrogate[AnchorState]):
    """Settings: λ, strength (``lam``; ½λF* is the factor of d²); γ, what is kept of the past's Fisher at each task."""

    lam: float | Tensor = 100.0
    gamma: float | Tensor = 1.0

    State: ClassVar[type] = AnchorState

    def __post_init__(self) -> None:
        check_non_negative(lam=self.lam, gamma=self.gamma)
        if bool((torch.as_tensor(self.gamma) > 1).any()):
            raise AlassoError(f"gamma must lie between 0 and 1, not {self.gamma}")

    def init(self, theta: Tensor) -> AnchorState:
        return AnchorState(anchor=theta.clone(), omega=torch.zeros_like(theta))

    def stiffness(self, s: AnchorState) -> tuple[Tensor, Tensor]:
        # Schwarz et al. write γF* here as well; a constant factor of λ, left to λ.
        k = 0.5 * self.lam * s.omega
        return k, k

    def consolidate(self, s: AnchorState, theta: Tensor, importance: Tensor | None = None) -> AnchorState:
        return AnchorState(anchor=theta.clone(), omega=self.gamma * s.omega + require_importance(importance))
