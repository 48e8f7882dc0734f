r"""ALASSO (Park, Hong, Han and Lee, ICCV 2019): asymmetric loss approximation with single-side overestimation.

After task n the past loss of weight k is a quadratic around :math:`\hat\theta_k^n` that is trusted only on the side the
weight came from. The side that training never saw is overestimated by a factor a and a small ε:

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

Two things are missing from the paper's text, but the authors' published experiment has them and the published numbers
need them: ξ in the denominator of (7), and Ω that never falls (``monotone``), i.e. the larger of (7) and the Ω before.
With ``xi="auto"``, ξ is set by the tensor's own moves (:mod:`alasso.methods.si`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alasso._parameters import Names
from alasso.errors import AlassoError
from alasso.methods.base import Springs, two_sided_spring
from alasso.methods.settings import Setting, check_choice, check_non_negative
from alasso.methods.si import MOVES, WARM_STRENGTH, Xi, accumulated_omega, check_xi, ratio_or
from alasso.regularizer import Regularizer

OmegaRule = Literal["accurate", "si"]
Unmoved = Literal["unobserved", "moved_right", "sign_of_omega"]

#: Code in ``side`` of a weight without a past (first task, new row of a head): no surrogate, not even ε.
NO_PAST = 2


class AlassoState(NamedTuple):
    """State of one tensor: 13 bytes a weight in float32.

    Attributes:
        anchor: θ̂, where the surrogate is fixed.
        omega: Ω ≥ 0, how important the weight is.
        path: ω of the running task.
        side: Where the observed side lies, in int8: −1 left, +1 right, 0 neither; NO_PAST: no surrogate.
        moves: The tensor's mean squared move in a task, times r, summed over tasks; one number.
    """

    anchor: Tensor
    omega: Tensor
    path: Tensor
    side: Tensor
    moves: Tensor


@dataclass(frozen=True)
class AlassoSurrogate(Springs[AlassoState]):
    """ALASSO's settings and functions; :class:`ALASSO` explains the settings."""

    a: float = 1.8
    c: float = 1.0
    a_prime: float = 1.0
    c_prime: float = 1.0
    epsilon: float = 1e-6
    epsilon_prime: float = 0.0
    xi: Xi = "auto"
    monotone: bool = True
    omega_rule: OmegaRule = "accurate"
    unmoved: Unmoved = "moved_right"

    State: ClassVar[type] = AlassoState
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"omega": (0, math.inf), "side": (-1, NO_PAST)}
    observes_path: ClassVar[bool] = True
    warm_strength: ClassVar[float | None] = WARM_STRENGTH

    def __post_init__(self) -> None:
        check_non_negative(
            a=self.a,
            c=self.c,
            a_prime=self.a_prime,
            c_prime=self.c_prime,
            epsilon=self.epsilon,
            epsilon_prime=self.epsilon_prime,
        )
        check_xi(self.xi)
        if not isinstance(self.monotone, bool):
            raise AlassoError(f"monotone must be True or False, not {self.monotone!r}")
        check_choice("omega_rule", self.omega_rule, OmegaRule)
        check_choice("unmoved", self.unmoved, Unmoved)

    def init(self, theta: Tensor) -> AlassoState:
        zero = torch.zeros_like(theta)
        side = torch.full_like(theta, NO_PAST, dtype=torch.int8)
        return AlassoState(theta.clone(), omega=zero, path=zero.clone(), side=side, moves=theta.new_zeros(()))

    def stiffness(self, s: AlassoState) -> tuple[Tensor, Tensor]:
        """Return c · (Eq. 5's factor of d²), the surrogate's share of the total loss, Eq. 6.

        Args:
            s: The state.

        Returns:
            (k⁻, k⁺), each of θ's shape.
        """
        k_minus, k_plus = asymmetric_factors(s.omega, s.side, self.a, self.epsilon)
        return self.c * k_minus, self.c * k_plus

    def consolidate(self, s: AlassoState, theta: Tensor, importance: Tensor | None = None) -> AlassoState:
        moved = theta - s.anchor
        xi = MOVES * s.moves if self.xi == "auto" else self.xi
        if self.omega_rule == "si":
            omega = accumulated_omega(s.omega, s.path, moved, xi)
        else:
            past = self.past_omega(s, moved)
            omega = accurate_omega(s.omega, s.path, past, moved, xi, self.monotone)
        return AlassoState(
            anchor=theta.clone(),
            omega=omega,
            path=torch.zeros_like(s.path),
            side=observed_side(moved, omega, self.unmoved),
            moves=s.moves.clone(),
        )

    def warm_start(self, theta: Tensor, importance: Tensor) -> AlassoState:
        """Return Eq. 5 with both sides overestimated: no path led here, so neither has been observed.

        Args:
            theta: The weights θ.
            importance: Ω, of θ's shape.

        Returns:
            The state, as after one task.
        """
        side = torch.zeros_like(theta, dtype=torch.int8)
        return self.init(theta)._replace(omega=importance.clone(), side=side)

    def past_omega(self, s: AlassoState, moved: Tensor) -> Tensor:
        """Return ω of the past, Eqs. 11 and 12: −c′·L_s(θ̂ⁿ, a′).

        Args:
            s: The state before consolidation.
            moved: θ̂ⁿ − θ̂ⁿ⁻¹.

        Returns:
            A tensor of θ's shape, nowhere positive.
        """
        k_minus, k_plus = asymmetric_factors(s.omega, s.side, self.a_prime, self.epsilon_prime)
        return -self.c_prime * two_sided_spring(moved, k_minus, k_plus)


def asymmetric_factors(Omega: Tensor, side: Tensor, a: float, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return Eq. 5's factors of d²: Ω on the observed side, aΩ + ε on the other, 0 without a past.

    Args:
        Omega: Ω.
        side: The observed side, as in :class:`AlassoState`.
        a: Factor of overestimation.
        epsilon: What an unobserved side costs at least.

    Returns:
        The factors (left, right) of the anchor, each of Ω's shape.
    """
    side = side.to(Omega.dtype)  # in a kernel for a CPU, comparing bytes takes three times as long as all the rest
    overestimated = (a * Omega + epsilon) * (side != NO_PAST)
    return torch.where(side == -1, Omega, overestimated), torch.where(side == 1, Omega, overestimated)


def observed_side(moved: Tensor, Omega: Tensor, unmoved: Unmoved) -> Tensor:
    """Return the sign of θ̂ⁿ⁻¹ − θ̂ⁿ, the second factor of Eq. 4: the observed side is where the weight came from.

    Args:
        moved: θ̂ⁿ − θ̂ⁿ⁻¹.
        Omega: Ω after the task.
        unmoved: The rule for a weight that stood still, as in :class:`ALASSO`.

    Returns:
        The side in int8: −1 left, +1 right, 0 neither.
    """
    side = -torch.sign(moved).to(torch.int8)
    if unmoved != "unobserved":
        # Deviation from Eq. 5 in the authors' experiment: a weight that stood still counts as moved right.
        side = torch.where(side == 0, -1, side).to(torch.int8)
    if unmoved == "sign_of_omega":
        # As in their program, which stores the side as the sign of Ω: where Ω = 0 the side is lost, and the left
        # side costs ε whatever the move was.
        side = torch.where(Omega == 0, 1, side).to(torch.int8)
    return side


def accurate_omega(
    Omega: Tensor, omega_new: Tensor, omega_past: Tensor, moved: Tensor, xi: float | Tensor, monotone: bool
) -> Tensor:
    """Return Ω by Eq. 7. A weight that stood still says nothing new about the loss: it keeps its Ω, whatever ξ is.

    Args:
        Omega: Ω before the task.
        omega_new: ω of the task.
        omega_past: ω of the past, from :meth:`AlassoSurrogate.past_omega`.
        moved: θ̂ⁿ − θ̂ⁿ⁻¹.
        xi: ξ.
        monotone: Whether Ω never falls.

    Returns:
        Ω ≥ 0 after the task, of the same shape.
    """
    idle = (moved == 0) & (omega_new == 0)
    Omega_new = torch.where(idle, Omega, ratio_or(omega_new + omega_past, moved.square() + xi, Omega))
    # Not in the paper, which only asks for Ω ≥ 0: the authors' experiment never lets Ω fall.
    return torch.maximum(Omega_new, Omega) if monotone else Omega_new.clamp(min=0)


class ALASSO(Regularizer):
    """Asymmetric loss approximation with single-side overestimation (Park et al., ICCV 2019).

    The defaults are the constants of the authors' permuted-MNIST experiment, but for ξ, which was 0.1 there and is set
    by the weights' own moves here; the names are the paper's letters.

    Args:
        model: The model to protect.
        a: Factor by which the side that training never saw is overestimated, Eq. 5.
        c: Weight of the past against the present, Eq. 6.
        a_prime: The decoupled a of Eq. 12. Set it to ``a`` for no decoupling.
        c_prime: The decoupled c of Eq. 12. Set it to ``c`` for no decoupling.
        epsilon: Least stiffness of the unseen side, Eq. 5.
        epsilon_prime: The decoupled ε of Eq. 12. Set it to ``epsilon`` for no decoupling.
        xi: Added to the squared distance in Eq. 7's denominator. "auto": 1.5 times the tensor's mean squared move in
            a task, summed over tasks. A number is the same for all tensors and tasks.
        monotone: Whether Ω by Eq. 7 never falls. Not in the paper's text, but its published numbers need it.
        omega_rule: "accurate" is Eq. 7; "si" is SI's Eq. 3, which adds to the Ω before.
        unmoved: Which side of a weight that stood still counts as observed. "moved_right": the left side, as in the
            authors' experiment. "unobserved": neither, as in Eq. 5. "sign_of_omega": "moved_right" with the side lost
            where Ω = 0, as in the authors' program.
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> reg = ALASSO(model, a=1.8, c=1.0).attach(optimizer)
    >>> for _ in range(3):                                      # task 1, in your own loop
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     _ = optimizer.step()
    >>> reg.consolidate()
    >>> reg.penalty().item()                                    # zero at the anchor
    0.0
    """

    method = "ALASSO"
    a = Setting[float]()
    c = Setting[float]()
    a_prime = Setting[float]()
    c_prime = Setting[float]()
    epsilon = Setting[float]()
    epsilon_prime = Setting[float]()
    xi = Setting[Xi]()
    monotone = Setting[bool]()
    omega_rule = Setting[OmegaRule]()
    unmoved = Setting[Unmoved]()

    def __init__(
        self,
        model: nn.Module,
        a: float = 1.8,
        c: float = 1.0,
        a_prime: float = 1.0,
        c_prime: float = 1.0,
        epsilon: float = 1e-6,
        epsilon_prime: float = 0.0,
        xi: Xi = "auto",
        monotone: bool = True,
        *,
        omega_rule: OmegaRule = "accurate",
        unmoved: Unmoved = "moved_right",
        exclude: Names = (),
        include: Names = None,
    ) -> None:
        surrogate = AlassoSurrogate(a, c, a_prime, c_prime, epsilon, epsilon_prime, xi, monotone, omega_rule, unmoved)
        super().__init__(model, surrogate, exclude, include)

    @classmethod
    def as_the_authors_ran_it(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """Return the published experiment: monotone Ω, ξ = 0.1, a weight that stood still counts as moved right.

        ``unmoved="sign_of_omega"`` is closer still to their program, which loses the side where Ω = 0.

        Args:
            model: The model to protect.
            **changes: Settings that differ.

        Returns:
            The regularizer.
        """
        return cls(model, **{"xi": 0.1, "monotone": True, "unmoved": "moved_right", **changes})

    @classmethod
    def as_the_paper_states_it(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """Return Eqs. 4 to 12 to the letter: Ω may fall, no damping, one ε. This does not give the paper's numbers.

        Args:
            model: The model to protect.
            **changes: Settings that differ.

        Returns:
            The regularizer.
        """
        epsilon = changes.get("epsilon", 1e-6)
        letter = {"monotone": False, "xi": 0.0, "epsilon_prime": epsilon, "unmoved": "unobserved"}
        return cls(model, **{**letter, **changes})

    @classmethod
    def asymmetric_only(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """Return the paper's first ablation: the asymmetric surrogate, Eq. 5, on SI's Ω, Eq. 3.

        Args:
            model: The model to protect.
            **changes: Settings that differ.

        Returns:
            The regularizer.
        """
        return cls(model, **{"omega_rule": "si", **changes})

    @classmethod
    def accurate_only(cls, model: nn.Module, **changes: Any) -> ALASSO:
        """Return the paper's second ablation: the accurate Ω, Eq. 7, in a symmetric surrogate.

        Args:
            model: The model to protect.
            **changes: Settings that differ.

        Returns:
            The regularizer.
        """
        return cls(model, **{"a": 1.0, "epsilon": 0.0, **changes})
