r"""Synaptic intelligence (Zenke, Poole and Ganguli, ICML 2017), in the notation of the ALASSO paper, Eqs. 1 to 3.

.. math::

    \tilde{\mathcal L}^n &= \mathcal L^n + c \sum_k \hat\Omega_k^{n-1} (\theta_k - \hat\theta_k^{n-1})^2  && (1)

    \hat\Omega_k^n &= \frac{\omega_k^n}{(\hat\theta_k^n - \hat\theta_k^{n-1})^2 + \xi} + \hat\Omega_k^{n-1}  && (3)

ξ has to be of the size of the squared moves, which differ a hundredfold between networks, optimizers and tensors. So a
tensor of K weights sets its own, ``xi="auto"``:

.. math::

    \xi^n = \tfrac32 \sum_{m \le n} \frac{r^m}{K} \lVert d^m \rVert^2, \qquad
    r^m = \max\left(\frac{\sum_k \omega_k^m}{\lVert g \rVert \, \lVert d^m \rVert}, \; 1\right),

with d its move in a task and g the steepest gradient seen in it. r is one for a straight path; beyond that, ω has
counted noise, as under SGD with large steps. ξ grows with the tasks: what has to leave room for more is held less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alasso._parameters import Names
from alasso.errors import AlassoError
from alasso.methods.base import Springs
from alasso.methods.settings import Setting, check_non_negative
from alasso.regularizer import Regularizer

Xi = float | Literal["auto"]

#: ξ = "auto" in mean squared moves: fewer protect the first of two tasks more, more leave a long stream more room.
MOVES = 1.5

#: Of a measured importance, which stands for a path's: Ω·d² in squared changes of the outputs.
WARM_STRENGTH = 3.0


class PathState(NamedTuple):
    """State of one tensor.

    Attributes:
        anchor: θ̂, where the spring is fixed.
        omega: Ω ≥ 0, how important the weight is.
        path: ω, summed since the last consolidation.
        moves: The tensor's mean squared move in a task, times r, summed over tasks; one number.
    """

    anchor: Tensor
    omega: Tensor
    path: Tensor
    moves: Tensor


@dataclass(frozen=True)
class SISurrogate(Springs[PathState]):
    """SI's settings and functions; :class:`SI` explains the settings."""

    c: float = 1.0
    xi: Xi = "auto"

    State: ClassVar[type] = PathState
    observes_path: ClassVar[bool] = True
    warm_strength: ClassVar[float | None] = WARM_STRENGTH

    def __post_init__(self) -> None:
        check_non_negative(c=self.c)
        check_xi(self.xi)

    def init(self, theta: Tensor) -> PathState:
        zero = torch.zeros_like(theta)
        return PathState(anchor=theta.clone(), omega=zero, path=zero.clone(), moves=theta.new_zeros(()))

    def stiffness(self, s: PathState) -> tuple[Tensor, Tensor]:
        k = self.c * s.omega
        return k, k

    def consolidate(self, s: PathState, theta: Tensor, importance: Tensor | None = None) -> PathState:
        xi = MOVES * s.moves if self.xi == "auto" else self.xi
        omega = accumulated_omega(s.omega, s.path, theta - s.anchor, xi)
        return PathState(anchor=theta.clone(), omega=omega, path=torch.zeros_like(s.path), moves=s.moves.clone())

    def warm_start(self, theta: Tensor, importance: Tensor) -> PathState:
        return self.init(theta)._replace(omega=importance.clone())


def check_xi(xi: object) -> None:
    """Refuse what is no ξ.

    Args:
        xi: The setting.

    Raises:
        AlassoError: It is neither "auto" nor a number in its range.
    """
    if isinstance(xi, str):
        if xi != "auto":
            raise AlassoError(f'xi must be "auto" or a number, not {xi!r}')
    else:
        check_non_negative(xi=xi)


def accumulated_omega(Omega: Tensor, omega: Tensor, moved: Tensor, xi: float | Tensor) -> Tensor:
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
        xi: Damping of weights that hardly moved, Eq. 3. "auto": 1.5 times the tensor's mean squared move in a
            task, summed over tasks. A number is the same for all tensors and tasks; SI's authors used 0.1 with c = 0.1.
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.
    """

    method = "SI"
    c = Setting[float]()
    xi = Setting[Xi]()

    def __init__(
        self,
        model: nn.Module,
        c: float = 1.0,
        xi: Xi = "auto",
        *,
        exclude: Names = (),
        include: Names = None,
    ) -> None:
        super().__init__(model, SISurrogate(c, xi), exclude, include)
