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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alasso import importance
from alasso._parameters import Names
from alasso.errors import AlassoError
from alasso.importance._objectives import Head, Loss
from alasso.methods.base import AnchorState, Springs, Surrogate, require_importance, require_loader
from alasso.methods.settings import Setting, check_choice, check_non_negative
from alasso.regularizer import Loader, Regularizer

Labels = Literal["true", "sampled", "expected", "uniform", "reversed"]


class EWCState(NamedTuple):
    """One spring that equals the sum of all tasks' springs.

    Attributes:
        anchor: Centre θ_c of the summed quadratic.
        omega: Σ F_t.
        constant: Σ_t Σ_k F_t (θ_c − θ_t)², a scalar, which does not depend on θ.
    """

    anchor: Tensor
    omega: Tensor
    constant: Tensor


@dataclass(frozen=True)
class EWCSurrogate(Springs[EWCState]):
    """EWC's setting and functions, with ½λF as the factor of d²; :class:`EWC` explains the settings."""

    lam: float = 100.0

    State: ClassVar[type] = EWCState
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"omega": (0, math.inf), "constant": (0, math.inf)}
    partial: ClassVar[frozenset[str]] = frozenset({"constant"})

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
    """Return the quadratic of the past plus F·(· − θ)², as one quadratic and a constant.

    Args:
        s: The quadratic of the past.
        theta: The centre of the new quadratic.
        F: Its stiffness, of θ's shape.

    Returns:
        The sum.
    """
    total = s.omega + F
    # Share of the new quadratic. Where both are zero the centre is free: take the latest weights.
    share = torch.where(total > 0, F / torch.where(total > 0, total, 1.0), 1.0)
    apart = theta - s.anchor
    return EWCState(
        anchor=s.anchor + share * apart,
        omega=total,
        constant=s.constant + (s.omega * share * apart.square()).sum(),
    )


@dataclass(frozen=True)
class OnlineEWCSurrogate(Springs[AnchorState]):
    """Online EWC's functions, with ½λF* as the factor of d²; :class:`OnlineEWC` explains the settings."""

    lam: float = 100.0
    gamma: float = 1.0

    State: ClassVar[type] = AnchorState

    def __post_init__(self) -> None:
        check_non_negative(lam=self.lam, gamma=self.gamma)
        if self.gamma > 1:
            raise AlassoError(f"gamma must lie between 0 and 1, not {self.gamma}")

    def init(self, theta: Tensor) -> AnchorState:
        return AnchorState(anchor=theta.clone(), omega=torch.zeros_like(theta))

    def stiffness(self, s: AnchorState) -> tuple[Tensor, Tensor]:
        # Schwarz et al. write γF* here as well; that is a constant factor, which λ holds.
        k = 0.5 * self.lam * s.omega
        return k, k

    def consolidate(self, s: AnchorState, theta: Tensor, importance: Tensor | None = None) -> AnchorState:
        return AnchorState(anchor=theta.clone(), omega=self.gamma * s.omega + require_importance(importance))


class FisherRegularizer(Regularizer):
    """A method whose importance is the diagonal Fisher information, measured by ``consolidate(loader)``.

    Args:
        model: The model to protect.
        surrogate: The method's settings and maths.
        labels: Whose log-likelihood the Fisher is of, as in :func:`alasso.importance.fisher`.
        loss: A custom negative log-likelihood, one value a sample, for targets that are not classes.
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

    Raises:
        AlassoError: The labels are unknown or do not go with the loss, or a pattern matches no parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        surrogate: Surrogate[Any],
        labels: Labels,
        loss: Loss | None,
        exclude: Names,
        include: Names,
    ) -> None:
        super().__init__(model, surrogate, exclude, include)
        self.loss = loss
        self.labels = labels

    @property
    def labels(self) -> Labels:
        """Whose log-likelihood the Fisher is of."""
        return self._labels

    @labels.setter
    def labels(self, labels: Labels) -> None:
        check_labels(labels, self.loss)
        self._labels = labels

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "labels": self.labels}

    def load_settings(self, saved: Mapping[str, Any]) -> None:
        labels = saved.get("labels", self.labels)  # the first states did not hold them
        check_labels(labels, self.loss)
        super().load_settings({name: value for name, value in saved.items() if name != "labels"})
        self.labels = labels

    def measure(self, loader: Loader | None, head: Head | None) -> dict[str, Tensor]:
        data = require_loader(loader, self.method)
        parameters = dict(self.protected)
        return importance.fisher(self.model, data, labels=self.labels, loss=self.loss, parameters=parameters, head=head)


def check_labels(labels: Labels, loss: Loss | None) -> None:
    """Refuse labels that the Fisher does not know, or that do not go with a loss.

    Args:
        labels: Whose log-likelihood the Fisher is of.
        loss: A custom loss, or None.

    Raises:
        AlassoError: The labels are unknown, or there is a loss and they are not "true".
    """
    check_choice("labels", labels, Labels)
    if loss is not None and labels != "true":
        raise AlassoError(f'a custom loss needs the given targets: leave labels="true", not {labels!r}')


class EWC(FisherRegularizer):
    """Elastic weight consolidation (Kirkpatrick et al., 2017): the exact sum of all quadratics, at the cost of one.

    Args:
        model: The model to protect.
        lam: λ of the penalty ½λ Σ F d².
        labels: Whose log-likelihood the Fisher is of: the "true" labels', labels "sampled" from the model, the model's
            "expected" value over all classes, or the "uniform" mean over them. The last does not vanish where the model
            is certain and needs a far smaller ``lam`` (0.3 on permuted MNIST, where the true labels need 300). Nor does
            "reversed", the true labels under negated logits, softmax(−z), as in EWC-DR (Liu and Chang, CVPR 2026).
        loss: A custom negative log-likelihood, one value a sample, for targets that are not classes; for regression
            ``lambda output, y: (output - y).square().sum(1) / 2``.
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.
    """

    method = "EWC"
    lam = Setting[float]()
    anchors_are_weights = False  # they are the centre of all springs

    def __init__(
        self,
        model: nn.Module,
        lam: float = 100.0,
        *,
        labels: Labels = "true",
        loss: Loss | None = None,
        exclude: Names = (),
        include: Names = None,
    ) -> None:
        super().__init__(model, EWCSurrogate(lam), labels, loss, exclude, include)


class OnlineEWC(FisherRegularizer):
    """Online EWC (Schwarz et al., 2018): a quadratic at the latest weights, its Fisher a decaying sum.

    Args:
        model: The model to protect.
        lam: λ of the penalty ½λ Σ F* d².
        gamma: γ, the share of the past's Fisher that each task keeps, from 0 to 1.
        labels: Whose log-likelihood the Fisher is of, as in :class:`EWC`.
        loss: A custom negative log-likelihood, as in :class:`EWC`.
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.
    """

    method = "OnlineEWC"
    lam = Setting[float]()
    gamma = Setting[float]()

    def __init__(
        self,
        model: nn.Module,
        lam: float = 100.0,
        gamma: float = 1.0,
        *,
        labels: Labels = "true",
        loss: Loss | None = None,
        exclude: Names = (),
        include: Names = None,
    ) -> None:
        super().__init__(model, OnlineEWCSurrogate(lam, gamma), labels, loss, exclude, include)
