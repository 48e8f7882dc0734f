r"""ALASSO (Park, Hong, Han and Lee, ICCV 2019): asymmetric loss approximation with single-side overestimation.

After task n the past loss of weight k is a quadratic around :math:`\hat\theta_k^n` that is trusted only on the side the
weight came from; the side that training never saw is overestimated by a factor a and a small ε:

.. math::

    \alpha(\theta_k) &= (\theta_k - \hat\theta_k^n)(\hat\theta_k^{n-1} - \hat\theta_k^n)  && (4)

    \mathcal L_s^n(\theta_k, a) &= \begin{cases}
        \hat\Omega_k^n (\theta_k - \hat\theta_k^n)^2 & \alpha(\theta_k) > 0 \\
        (a \hat\Omega_k^n + \epsilon)(\theta_k - \hat\theta_k^n)^2 & \alpha(\theta_k) \le 0 \end{cases}  && (5)

    \tilde{\mathcal L}^n &= \mathcal L^n + c \sum_k \mathcal L_s^{n-1}(\theta_k)  && (6)

    \hat\Omega_k^n &= \frac{\omega_k^n + \omega_k^{1:(n-1)}}{(\hat\theta_k^n - \hat\theta_k^{n-1})^2 + \xi}  && (7)

    \omega_k^n &= \mathcal L^n(\hat\theta_k^{n-1}) - \mathcal L^n(\hat\theta_k^n)
        \approx -\sum_{\text{steps}} g_k \, \Delta\theta_k  && (10)

    \omega_k^{1:(n-1)} &= -c' \, \mathcal L_s^{n-1}(\hat\theta_k^n, a')  && (11, 12)

Two things are not in the paper's text but in the experiment its authors published, and the published numbers need them:
ξ in the denominator of (7), and Ω that never falls (``monotone``), i.e. the larger of (7) and the Ω before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from alasso.errors import AlassoError
from alasso.methods.base import Surrogate, check_non_negative, two_sided_spring
from alasso.methods.si import accumulated_omega, ratio_or

OmegaRule = Literal["accurate", "si"]
Unmoved = Literal["unobserved", "moved_right", "sign_of_omega"]

#: Code in ``side`` of a weight without a past (first task, new row of a head): no surrogate, not even ε.
NO_PAST = 2


class AlassoState(NamedTuple):
    """State of one tensor: 13 bytes a weight in float32."""

    anchor: Tensor  # θ̂
    omega: Tensor  # Ω ≥ 0
    path: Tensor  # ω of the running task
    side: Tensor  # int8: where the observed side lies, −1 left, +1 right, 0 neither; NO_PAST: no surrogate


@dataclass(frozen=True)
class AlassoSurrogate(Surrogate[AlassoState]):
    """ALASSO's settings in the paper's letters; a′, c′, ε′ are the decoupled ones of Eq. 12.

    ``omega_rule="si"`` puts SI's Eq. 3 in place of Eq. 7 (the paper's ablation "asymmetric only"); Eq. 3 carries Ω over
    by itself, so ``monotone`` speaks of Eq. 7 alone. ``unmoved`` says which side of a weight that stood still counts as
    observed: neither, as Eq. 5 has it, or the left one, as in the authors' experiment; "sign_of_omega" is the same with
    the side lost where Ω = 0, as in their program.
    """

    a: float | Tensor = 1.8
    c: float | Tensor = 1.0
    a_prime: float | Tensor = 1.0
    c_prime: float | Tensor = 1.0
    epsilon: float | Tensor = 1e-6
    epsilon_prime: float | Tensor = 0.0
    xi: float | Tensor = 0.1
    monotone: bool = True
    omega_rule: OmegaRule = "accurate"
    unmoved: Unmoved = "unobserved"

    State: ClassVar[type] = AlassoState
    observes_path: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_non_negative(
            a=self.a,
            c=self.c,
            a_prime=self.a_prime,
            c_prime=self.c_prime,
            epsilon=self.epsilon,
            epsilon_prime=self.epsilon_prime,
            xi=self.xi,
        )
        if not isinstance(self.monotone, bool):
            raise AlassoError(f"monotone must be True or False, not {self.monotone!r}")
        for name, allowed in (("omega_rule", get_args(OmegaRule)), ("unmoved", get_args(Unmoved))):
            if getattr(self, name) not in allowed:
                raise AlassoError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    def init(self, theta: Tensor) -> AlassoState:
        zero = torch.zeros_like(theta)
        side = torch.full_like(theta, NO_PAST, dtype=torch.int8)
        return AlassoState(anchor=theta.clone(), omega=zero, path=zero.clone(), side=side)

    def stiffness(self, s: AlassoState) -> tuple[Tensor, Tensor]:
        """c · (Eq. 5's factor of d²), the surrogate's share of the total loss, Eq. 6."""
        k_minus, k_plus = asymmetric_factors(s.omega, s.side, self.a, self.epsilon)
        return self.c * k_minus, self.c * k_plus

    def observed_spring(self, s: AlassoState) -> tuple[Tensor, Tensor]:
        return self.c * s.omega, s.side

    def overestimate(self) -> tuple[float | Tensor, float | Tensor]:
        return self.a, self.c * self.epsilon

    def consolidate(self, s: AlassoState, theta: Tensor, importance: Tensor | None = None) -> AlassoState:
        moved = theta - s.anchor
        if self.omega_rule == "si":
            omega = accumulated_omega(s.omega, s.path, moved, self.xi)
        else:
            past = self.past_omega(s, moved)
            omega = accurate_omega(s.omega, s.path, past, moved, self.xi, self.monotone)
        return AlassoState(
            anchor=theta.clone(),
            omega=omega,
            path=torch.zeros_like(s.path),
            side=observed_side(moved, omega, self.unmoved),
        )

    def warm_start(self, theta: Tensor, importance: Tensor) -> AlassoState:
        """No path led here, so neither side has been observed: Eq. 5 overestimates both."""
        side = torch.zeros_like(theta, dtype=torch.int8)
        return self.init(theta)._replace(omega=importance.clone(), side=side)

    def past_omega(self, s: AlassoState, moved: Tensor) -> Tensor:
        """ω of the past, Eqs. 11 and 12: −c′·L_s(θ̂ⁿ, a′)."""
        k_minus, k_plus = asymmetric_factors(s.omega, s.side, self.a_prime, self.epsilon_prime)
        return -self.c_prime * two_sided_spring(moved, k_minus, k_plus)


def asymmetric_factors(
    Omega: Tensor, side: Tensor, a: float | Tensor, epsilon: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The factor of d² in Eq. 5, left and right of the anchor: Ω where observed, aΩ + ε where not, 0 without a past."""
    side = side.to(Omega.dtype)  # compiled for a CPU, comparing bytes is three times slower than all the rest
    overestimated = (a * Omega + epsilon) * (side != NO_PAST)
    return torch.where(side == -1, Omega, overestimated), torch.where(side == 1, Omega, overestimated)


def observed_side(moved: Tensor, Omega: Tensor, unmoved: Unmoved) -> Tensor:
    """Sign of θ̂ⁿ⁻¹ − θ̂ⁿ, the second factor of Eq. 4: the observed side is where the weight came from."""
    side = -torch.sign(moved).to(torch.int8)
    if unmoved != "unobserved":
        # Deviation from Eq. 5 in the authors' experiment: a weight that stood still counts as moved right.
        side = torch.where(side == 0, -1, side).to(torch.int8)
    if unmoved == "sign_of_omega":
        # To the letter of their program, which keeps the side as the sign of Ω: where Ω = 0 it is lost, and ε is
        # charged on the left whatever the move was.
        side = torch.where(Omega == 0, 1, side).to(torch.int8)
    return side


def accurate_omega(
    Omega: Tensor, omega_new: Tensor, omega_past: Tensor, moved: Tensor, xi: float | Tensor, monotone: bool
) -> Tensor:
    """Eq. 7. A weight that stood still says nothing new about the loss: it keeps its Ω, whatever ξ is."""
    idle = (moved == 0) & (omega_new == 0)
    Omega_new = torch.where(idle, Omega, ratio_or(omega_new + omega_past, moved.square() + xi, Omega))
    # Not in the paper: the authors' experiment never lets Ω fall. The paper only asks for Ω ≥ 0.
    return torch.maximum(Omega_new, Omega) if monotone else Omega_new.clamp(min=0)
