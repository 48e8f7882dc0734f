r"""Memory aware synapses (Aljundi et al., ECCV 2018): importance without labels.

.. math::

    \Omega_k = \sum_{t} \frac1{N_t} \sum_{i=1}^{N_t}
        \left| \frac{\partial \lVert f(x_i;\theta) \rVert_2^2}{\partial \theta_k} \right|,
    \qquad \mathcal L = \mathcal L^n + \lambda \sum_k \Omega_k (\theta_k - \hat\theta_k)^2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from alasso.methods.base import AnchorState, Surrogate, check_non_negative, require_importance


@dataclass(frozen=True)
class MASSurrogate(Surrogate[AnchorState]):
    """Settings: λ, strength of the penalty (``lam``; λΩ is the factor of d²)."""

    lam: float | Tensor = 1.0

    State: ClassVar[type] = AnchorState

    def __post_init__(self) -> None:
        check_non_negative(lam=self.lam)

    def init(self, theta: Tensor) -> AnchorState:
        return AnchorState(anchor=theta.clone(), omega=torch.zeros_like(theta))

    def stiffness(self, s: AnchorState) -> tuple[Tensor, Tensor]:
        k = self.lam * s.omega
        return k, k

    def consolidate(self, s: AnchorState, theta: Tensor, importance: Tensor | None = None) -> AnchorState:
        return AnchorState(anchor=theta.clone(), omega=s.omega + require_importance(importance))
