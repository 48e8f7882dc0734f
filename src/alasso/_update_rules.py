r"""What Adam and SGD do with a gradient, as pure functions of tensors.

Adam (Kingma and Ba, ICLR 2015), with t the step's number, counted from 1:

.. math::

    m &\leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2

    \theta &\leftarrow \theta - \eta \, \frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon}

SGD with momentum μ, dampening τ and velocity u:

.. math::

    u \leftarrow \mu u + (1-\tau) g, \qquad \theta \leftarrow \theta - \eta u
        \quad (\text{Nesterov: } \theta \leftarrow \theta - \eta (g + \mu u))

Everything is elementwise, so it can be compiled. A rule's fields are compiled in; numbers come as one tensor, so that
one kernel serves every setting. Factors close to one come as what they lack to one: in float32, 1 − 0.999 is off by
1e-5, and 0.001 is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from alasso._stability import most_curvature

Group = dict[str, Any]
Decay = Literal["none", "coupled", "decoupled"]


@dataclass(frozen=True)
class AdamRule:
    """Adam and AdamW on one tensor.

    Attributes:
        amsgrad: Whether the largest second moment so far is used.
        maximize: Whether the optimizer ascends.
        decay: How weights decay.
        on_device: Whether the step counter is on the GPU, as a CUDA graph needs it: what depends on it is worked out
            there, within the kernel.
    """

    amsgrad: bool
    maximize: bool
    decay: Decay
    on_device: bool

    @classmethod
    def of(cls, group: Group, on_device: bool) -> AdamRule:
        """Return the rule of a parameter group."""
        decay: Decay = "none"
        if group["weight_decay"] != 0:
            decay = "decoupled" if group.get("decoupled_weight_decay") else "coupled"
        return cls(group["amsgrad"], group["maximize"], decay, on_device)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments in the optimizer's state."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    @staticmethod
    def numbers(group: Group, step: float) -> list[float]:
        """Return what a step made on the host depends on."""
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        correction1, correction2 = (-math.expm1(step * log_or_minus_infinity(beta)) for beta in (beta1, beta2))
        return [lr / correction1, correction2**0.5, 1 - lr * decay, decay, 1 - beta1, 1 - beta2, group["eps"]]

    def most_curvature(self, numbers: tuple[Tensor, ...]) -> None:
        """Return None: a penalty of any curvature is stable."""

    @staticmethod
    def device_numbers(group: Group) -> list[float]:
        """Return what a step made on the device depends on, beside its number and the learning rate."""
        beta1, beta2 = group["betas"]
        logs = log_or_minus_infinity(beta1), log_or_minus_infinity(beta2)
        return [*logs, group["weight_decay"], 1 - beta1, 1 - beta2, group["eps"]]

    def move(
        self, theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the weights and moments after a step.

        Args:
            theta: The weights before it.
            g: What the optimizer descends.
            moments: Those named by :attr:`moments`.
            numbers: (:meth:`numbers`,), or (step, learning rate, :meth:`device_numbers`).
        """
        if self.on_device:
            step, lr, (log_beta1, log_beta2, decay, fresh1, fresh2, eps) = numbers[0], numbers[1], numbers[2].unbind()
            step_size = lr / -torch.expm1(step * log_beta1)
            root_correction2 = (-torch.expm1(step * log_beta2)).sqrt()
            shrink = 1 - lr * decay
        else:
            step_size, root_correction2, shrink, decay, fresh1, fresh2, eps = numbers[0].unbind()
        if self.decay == "coupled":
            g = g + decay * theta
        elif self.decay == "decoupled":
            theta = theta * shrink
        m = moments[0] + fresh1 * (g - moments[0])
        v = moments[1] + fresh2 * (g * g - moments[1])
        largest = (torch.maximum(moments[2], v),) if self.amsgrad else ()
        root = (largest[0] if largest else v).sqrt() / root_correction2
        return theta - step_size * m / (root + eps), (m, v, *largest)


def log_or_minus_infinity(beta: float) -> float:
    """Return log β; Adam allows β = 0, no memory at all."""
    return math.log(beta) if beta > 0 else -math.inf


@dataclass(frozen=True)
class SGDRule:
    """SGD on one tensor.

    Attributes:
        momentum: Whether there is a velocity.
        nesterov: Whether the step looks ahead.
        maximize: Whether the optimizer ascends.
        decay: Whether weights decay.
    """

    momentum: bool
    nesterov: bool
    maximize: bool
    decay: bool

    @classmethod
    def of(cls, group: Group) -> SGDRule:
        """Return the rule of a parameter group."""
        return cls(group["momentum"] != 0, group["nesterov"], group["maximize"], group["weight_decay"] != 0)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments in the optimizer's state."""
        return ("momentum_buffer",) if self.momentum else ()

    @staticmethod
    def numbers(group: Group) -> list[float]:
        """Return what a step depends on beside the learning rate."""
        return [group["momentum"], 1 - group["dampening"], group["weight_decay"]]

    def most_curvature(self, numbers: tuple[Tensor, ...]) -> float | Tensor:
        """Return the largest curvature at which a penalty is stable; ``numbers`` as in :meth:`move`."""
        return most_curvature({"lr": numbers[0], "momentum": numbers[1][0], "nesterov": self.nesterov})

    def move(
        self, theta: Tensor, g: Tensor, moments: tuple[Tensor, ...], numbers: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the weights and moments after a step; ``numbers`` are (learning rate, :meth:`numbers`)."""
        lr, (momentum, fresh, decay) = numbers[0], numbers[1].unbind()
        if self.decay:
            g = g + decay * theta
        if not self.momentum:
            return theta - lr * g, ()
        velocity = momentum * moments[0] + fresh * g
        return theta - lr * (g + momentum * velocity if self.nesterov else velocity), (velocity,)
