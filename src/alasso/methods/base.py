r"""The one abstraction: a surrogate stands for the losses of past tasks, one parameter tensor at a time.

Most methods are :class:`Springs`, one for each weight:

.. math:: \mathcal L_s(\theta) = \sum_k k_k^\pm \, (\theta_k - \hat\theta_k)^2 + \text{const}

with one stiffness for each side, :math:`k^-` where :math:`\theta<\hat\theta` and :math:`k^+` where
:math:`\theta>\hat\theta`. They differ only in how they choose the anchor and the stiffness, and are elementwise: the
same functions serve float64 tests, shards of a distributed model and ``torch.compile``.

Everything is pure, tensors in, tensors out, but for names that end in an underscore: these run at every step and write
in place.

Glossary: θ weights, θ̂ anchor, Ω importance, ω path integral of the running task, d = θ − θ̂.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from alasso.errors import AlassoError


class AnchorState(NamedTuple):
    """State of a method without a path integral.

    Attributes:
        anchor: θ̂, where the spring is fixed.
        omega: Ω ≥ 0, how important the weight is.
    """

    anchor: Tensor
    omega: Tensor


S = TypeVar("S", bound=Any)  # one of the NamedTuples above, or a method's own


class Surrogate(ABC, Generic[S]):
    """A method's settings and its functions of one tensor θ and that tensor's state s.

    A method is a frozen dataclass that derives from this class or from :class:`Springs`; its fields are the settings.

    Attributes:
        State: The NamedTuple of tensors kept for each parameter; it has the field ``anchor``, of θ's shape. To a field
            ``moves``, a number, the end of a task adds :func:`noisy_move` over θ's size, whatever the shards.
        partial: Fields that are sums over θ: of a sharded θ, each rank holds its own shard's part of them.
        ranges: The least and the largest number that a field may hold; any finite one if it is not named here.
        observes_path: Whether the method looks at every step of training.
        learns_from_steps: Whether it needs a task's steps even without a path.
        anchors_as_weights: Whether anchors have the weights' own precision; else float32 at least, as all else has.
        warm_strength: By ``warm_start(scale="auto")``, Ω·d² in squared changes of the outputs; None for as measured.
    """

    State: ClassVar[type]
    partial: ClassVar[frozenset[str]] = frozenset()
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = MappingProxyType({"omega": (0, math.inf)})
    observes_path: ClassVar[bool] = False
    learns_from_steps: ClassVar[bool] = False
    anchors_as_weights: ClassVar[bool] = False
    warm_strength: ClassVar[float | None] = None

    @abstractmethod
    def init(self, theta: Tensor) -> S:
        """Return the state of weights that have no past: the penalty is zero wherever they go.

        Args:
            theta: The weights θ.

        Returns:
            The state, in θ's precision and on its device.
        """

    @abstractmethod
    def consolidate(self, s: S, theta: Tensor, importance: Tensor | None = None) -> S:
        """Return the state after a task that ended at θ.

        Args:
            s: The state before, with the task's path if the method observes one, and with its move if it has ``moves``.
            theta: The weights at the end of the task.
            importance: The importance measured on data, of θ's shape, for methods that measure it.

        Returns:
            The new state; it shares no tensor with ``s`` or ``theta``.
        """

    @abstractmethod
    def penalty(self, theta: Tensor, s: S) -> Tensor:
        """Return the surrogate's loss at θ.

        Args:
            theta: The weights θ.
            s: The state.

        Returns:
            A scalar, differentiable by θ.
        """

    @abstractmethod
    def penalty_grad(self, theta: Tensor, s: S) -> Tensor:
        """Return the derivative of :meth:`penalty` by θ.

        Args:
            theta: The weights θ.
            s: The state.

        Returns:
            The gradient, of θ's shape.
        """

    @abstractmethod
    def importance(self, s: S) -> Tensor:
        """Return Ω, each weight's factor of d² before the method's strength.

        Args:
            s: The state.

        Returns:
            Ω ≥ 0, of θ's shape.
        """

    @abstractmethod
    def typical_stiffness(self, s: S) -> tuple[Tensor, Tensor]:
        """Return what a move of no special direction costs, a weight: how soft, and how stiff.

        Args:
            s: The state.

        Returns:
            Two factors of d², both scalars: in the directions that the past leaves soft, and in those that it holds.
            They are one where a surrogate knows no directions.
        """

    def before_step_(
        self,
        s: S,
        g: Tensor,
        theta: Tensor,
        total: Tensor,
        strength: float | Tensor,
        most: float | Tensor | None = None,
    ) -> None:
        """Add the penalty's gradient to the total one, and take note of a step that the optimizer is about to make.

        Batches of plain springs are added without it (:mod:`alasso._passes`), and noted by :func:`add_to_path_`.

        Args:
            s: The state, changed in place if the method observes the path.
            g: The gradient of the task's loss alone, of θ's shape.
            theta: The weights θ.
            total: The gradient that the optimizer will see, changed in place.
            strength: Factor of the penalty; 0.0 where nothing has a past.
            most: The largest curvature that the penalty may have, for those that have a bound; None for any.
        """
        if not isinstance(strength, float) or strength:
            total.add_(self.penalty_grad(theta, s) * strength)

    def after_step_(self, s: S, g: Tensor, theta: Tensor) -> None:
        """Take note of the step that was made.

        Args:
            s: The state, changed in place.
            g: What :meth:`before_step_` was given.
            theta: The weights after the step.
        """

    def stiffest(self, s: S) -> Tensor:
        """Return a bound on the penalty's largest curvature, which limits the steps of SGD.

        Args:
            s: The state.

        Returns:
            A scalar; zero for no bound.
        """
        return s.anchor.new_zeros(())  # type: ignore[no-any-return]

    def has_past(self, s: S) -> bool:
        """Return whether the state protects anything.

        Args:
            s: The state.

        Returns:
            True if any weight is important.
        """
        return bool(self.importance(s).any())

    def fits(self, field: str, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        """Return whether a field of a state is of the right shape.

        Args:
            field: Its name.
            tensor: Its value.
            shape: The parameter's shape.

        Returns:
            True if it has the shape that :meth:`init` gives it.
        """
        own = getattr(self.init(torch.empty(shape, device="meta")), field)
        return bool(tensor.shape == own.shape)

    def goes_together(self, s: S) -> bool:
        """Return whether the fields of a state, each of which fits and is in its range, may stand beside each other.

        Args:
            s: The state, as it was saved.

        Returns:
            True if they may.
        """
        return True

    def warm_start(self, theta: Tensor, importance: Tensor) -> S:
        """Return the state of weights whose training was not observed: only their importance has been measured.

        Args:
            theta: The weights θ.
            importance: Their importance, of θ's shape.

        Returns:
            The state, as after one task.
        """
        return self.consolidate(self.init(theta), theta, importance)

    def grown(self, s: S, theta: Tensor) -> S:
        """Return the state of a parameter that grew: the old block keeps its memory, what is new starts free.

        Args:
            s: The state before.
            theta: The larger weights, which begin with the old ones in each axis.

        Returns:
            The state for θ.
        """
        block = tuple(slice(0, n) for n in s.anchor.shape)
        fields = {}
        for field, tensor in self.init(theta)._asdict().items():
            fields[field] = getattr(s, field).to(tensor.device, tensor.dtype)
            if tensor.shape == theta.shape:  # and no summary of the whole tensor, such as EWC's constant
                larger = tensor.clone()
                larger[block] = fields[field]
                fields[field] = larger
        return type(s)(**fields)  # type: ignore[no-any-return]


class Springs(Surrogate[S]):
    """A surrogate of one spring for each weight. All tensors of its state have θ's shape, but for its ``partial`` ones.

    The state has a field ``omega``; if the method observes the path, also ``path``, which :func:`add_to_path_` updates.
    """

    @abstractmethod
    def stiffness(self, s: S) -> tuple[Tensor, Tensor]:
        """Return the factors of d² left and right of the anchor.

        Args:
            s: The state.

        Returns:
            (k⁻, k⁺), each of θ's shape; one tensor twice if they are alike.
        """

    def constant(self, s: S) -> Tensor | float:
        """Return the part of the penalty that does not depend on θ.

        Args:
            s: The state.

        Returns:
            A scalar.
        """
        return 0.0

    def penalty(self, theta: Tensor, s: S) -> Tensor:
        return two_sided_spring(theta - s.anchor, *self.stiffness(s)).sum() + self.constant(s)

    def penalty_grad(self, theta: Tensor, s: S, most: float | Tensor | None = None) -> Tensor:
        """Return the derivative of :meth:`penalty` by θ.

        Args:
            theta: The weights θ.
            s: The state.
            most: The largest curvature that a spring may have, as SGD needs it; None for no limit.

        Returns:
            The gradient, of θ's shape.
        """
        return two_sided_spring_grad(theta - s.anchor, *capped(*self.stiffness(s), most))

    def stiffest(self, s: S) -> Tensor:
        k_minus, k_plus = self.stiffness(s)
        if not k_plus.numel():  # a rank may have no part of a small tensor
            return k_plus.new_zeros(())
        return 2 * torch.maximum(k_minus.max(), k_plus.max())

    def importance(self, s: S) -> Tensor:
        omega: Tensor = s.omega
        return omega

    def typical_stiffness(self, s: S) -> tuple[Tensor, Tensor]:
        k_minus, k_plus = self.stiffness(s)
        k = (k_minus + k_plus).sum() / max(2 * k_plus.numel(), 1)  # a rank may have none of a small tensor
        return k, k


def two_sided_spring(d: Tensor, k_minus: Tensor, k_plus: Tensor) -> Tensor:
    """Return k⁻·d² left of the anchor and k⁺·d² right of it.

    Args:
        d: Distances θ − θ̂.
        k_minus: k⁻, of d's shape.
        k_plus: k⁺, of d's shape.

    Returns:
        A tensor of d's shape.
    """
    return k_minus * d.clamp(max=0).square() + k_plus * d.clamp(min=0).square()


def two_sided_spring_grad(d: Tensor, k_minus: Tensor, k_plus: Tensor) -> Tensor:
    """Return the derivative of :func:`two_sided_spring` by d.

    Args:
        d: Distances θ − θ̂.
        k_minus: k⁻, of d's shape.
        k_plus: k⁺, of d's shape; the tensor ``k_minus`` itself makes one spring of the two.

    Returns:
        A tensor of d's shape.
    """
    if k_minus is k_plus:
        return (k_plus * d).mul_(2)
    left = d.clamp(max=0).mul_(k_minus)
    return d.clamp(min=0).mul_(k_plus).add_(left).mul_(2)


def capped(k_minus: Tensor, k_plus: Tensor, most: float | Tensor | None) -> tuple[Tensor, Tensor]:
    """Return springs that are no stiffer than a limit.

    Args:
        k_minus: k⁻.
        k_plus: k⁺; the tensor ``k_minus`` itself makes one spring of the two.
        most: The largest curvature, which is 2k of a spring k·d²; None for no limit.

    Returns:
        (k⁻, k⁺), one tensor twice if they were.
    """
    if most is None:
        return k_minus, k_plus
    right = k_plus.clamp(max=most / 2)
    return right if k_minus is k_plus else k_minus.clamp(max=most / 2), right


def add_to_path_(omega: Tensor, g: Tensor, theta_before: Tensor, theta: Tensor) -> None:
    """Subtract g·(θ − θ_before) from ω: how much a step lowered the task's loss, to first order, weight by weight.

    This is one step of the paper's Eq. 10. It runs at every step of a method that observes its path, so it writes in
    place; no other function here does.

    Args:
        omega: ω, changed in place.
        g: The gradient of the task's loss alone, of ω's shape.
        theta_before: The weights before the step.
        theta: The weights after it.
    """
    omega.addcmul_(g, theta - theta_before, value=-1)


def require_importance(importance: Tensor | None) -> Tensor:
    """Return the importance measured on data, which EWC and MAS cannot do without.

    Args:
        importance: What consolidation received.

    Returns:
        The importance.

    Raises:
        AlassoError: It is None.
    """
    if importance is None:
        raise AlassoError("this method needs an importance measured on data; pass consolidate() the task's loader")
    return importance


def noisy_move(move: Tensor, path: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a tensor's squared move in a task, the larger the noisier its path was.

    A straight path lowers the loss by ‖g‖ ‖d‖ at most, with its steepest g. Where Σ ω says more, it has counted noise.

    Args:
        move: ‖d‖².
        path: Σ ω over the tensor's weights.
        gradient: ‖g‖² of the steepest step that was looked at, if one was.

    Returns:
        ‖d‖² · max(Σ ω / (‖g‖ ‖d‖), 1).
    """
    most = (move * (0.0 if gradient is None else gradient.to(move))).sqrt()
    return torch.where(most > 0, move * (path / most).clamp(min=1), move)


def require_loader(loader: Iterable[Any] | None, method: str) -> Iterable[Any]:
    """Return the data that a method measures importance on.

    Args:
        loader: What consolidation received.
        method: The method's name, for the message.

    Returns:
        The loader.

    Raises:
        AlassoError: It is None.
    """
    if loader is None:
        raise AlassoError(f"{method} measures importance on data; pass consolidate() the task's loader")
    return loader
