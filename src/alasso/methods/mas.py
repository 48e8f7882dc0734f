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
from torch import Tensor, nn

from alasso import importance
from alasso._parameters import Names
from alasso.importance._objectives import Head
from alasso.methods.base import AnchorState, Springs, require_importance, require_loader
from alasso.methods.settings import Setting, check_non_negative
from alasso.regularizer import Loader, Regularizer


@dataclass(frozen=True)
class MASSurrogate(Springs[AnchorState]):
    """MAS's setting and functions, with λΩ as the factor of d²; :class:`MAS` explains the settings."""

    lam: float = 1.0

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


class MAS(Regularizer):
    """Memory aware synapses (Aljundi et al., ECCV 2018): importance from the outputs' sensitivity, without labels.

    ``consolidate(loader)`` measures the importance on the task's data.

    Args:
        model: The model to protect.
        lam: λ of the penalty λ Σ Ω d².
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.
    """

    method = "MAS"
    lam = Setting[float]()

    def __init__(self, model: nn.Module, lam: float = 1.0, *, exclude: Names = (), include: Names = None) -> None:
        super().__init__(model, MASSurrogate(lam), exclude, include)

    def measure(self, loader: Loader | None, head: Head | None) -> dict[str, Tensor]:
        data = require_loader(loader, self.method)
        return importance.squared_output_norm(self.model, data, parameters=dict(self.protected), head=head)
