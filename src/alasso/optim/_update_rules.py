r"""What an optimizer does with a gradient, as pure functions: tensors in, tensors out, nothing stored.

Adam (Kingma and Ba, ICLR 2015), with t the step's number, counted from 1:

.. math::

    m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2

    \theta &\leftarrow \theta - \eta \, \frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon}

Everything is elementwise and broadcasts, so one source serves single tensors, stacked runs and ``torch.compile``.
Factors close to one come as what they lack to one: in float32, 1 − 0.999 is off by 1e-5, and 0.001 is not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def adam_moments(
    g: Tensor, m: Tensor, v: Tensor, fresh1: float | Tensor, fresh2: float | Tensor
) -> tuple[Tensor, Tensor]:
    """m and v with the newest gradient averaged in; ``fresh1`` = 1 − β₁ and ``fresh2`` = 1 − β₂ are its shares."""
    return m + fresh1 * (g - m), v + fresh2 * (g * g - v)


def bias_corrections(step: Any, log_beta1: Any, log_beta2: Any) -> tuple[Any, Any]:
    """1 − β₁ᵗ and 1 − β₂ᵗ, exact also where β₂ᵗ is almost one; tensors of tensors, numbers of numbers."""
    expm1 = math.expm1 if isinstance(step, float) else torch.expm1
    return -expm1(step * log_beta1), -expm1(step * log_beta2)


def adam_direction(m: Tensor, v: Tensor, root_correction2: float | Tensor, eps: float | Tensor) -> Tensor:
    """m / (√(v / (1 − β₂ᵗ)) + ε); ``root_correction2`` is √(1 − β₂ᵗ). The step is −η / (1 − β₁ᵗ) times this."""
    return m / (v.sqrt() / root_correction2 + eps)


def log_or_minus_infinity(beta: float) -> float:
    """log β; Adam allows β = 0, no memory at all."""
    return math.log(beta) if beta > 0 else -math.inf


def sgd_velocity(g: Tensor, velocity: Tensor, momentum: float | Tensor, fresh: float | Tensor) -> Tensor:
    """Velocity of SGD with momentum; ``fresh`` = 1 − dampening is the gradient's share."""
    return momentum * velocity + fresh * g


def sgd_direction(g: Tensor, velocity: Tensor, momentum: float | Tensor, nesterov: bool) -> Tensor:
    """What SGD with momentum goes against, times the learning rate."""
    return g + momentum * velocity if nesterov else velocity
