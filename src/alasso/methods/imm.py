r"""Incremental moment matching: mean-IMM and mode-IMM (Lee et al., NIPS 2017).

Each task is trained on its own and leaves a Gaussian with mean θ_k and diagonal precision F_k (the Fisher information).
The network that serves all tasks is one Gaussian in place of their mixture with ratios α_k, matched in its mean or at
its mode:

.. math::

    \theta^*_\text{mean} = \sum_k \alpha_k \theta_k, \qquad
    \theta^*_\text{mode} = \frac{\sum_k \alpha_k F_k \theta_k}{\sum_k \alpha_k F_k}.

With F_k = 1 the second is the first, so two running sums serve both. Merging works only if the loss has no ridge
between the weights. The transfer techniques prevent one; they train task k from the weights θ_{k−1} before it:

    weight  start at θ_{k−1}
    l2      and add λ‖θ − θ_{k−1}‖² to the loss
    drop    and drop nodes to their values at θ_{k−1}, not to zero: :class:`DropTransfer`

Deviations, each a setting: by default the next task starts from the merged weights, while the paper starts it from the
last task's own (``start="last"``); the mean leaves out weights that stood still in a task (``count_unmoved``).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alasso._distributed import local
from alasso._parameters import Names, weights_of
from alasso.errors import AlassoError, DivergedError
from alasso.importance._objectives import Head, Loss
from alasso.methods.base import Springs, require_importance
from alasso.methods.ewc import FisherRegularizer, Labels
from alasso.methods.settings import Setting, check_choice, check_non_negative
from alasso.regularizer import Loader

Merge = Literal["mean", "mode"]
Transfer = Literal["weight", "l2", "drop", "l2-drop"]
Start = Literal["merged", "last"]


class IMMState(NamedTuple):
    """The mixture of all tasks so far, and where the next one begins.

    Attributes:
        anchor: θ_{k−1}, where the next task starts: the merged weights, or the last task's own.
        omega: 1 for a weight with a past, which L2-transfer pulls back, whatever its precision; else 0.
        precision: Σ α_k F_k.
        weighted: Σ α_k F_k θ_k.
    """

    anchor: Tensor
    omega: Tensor
    precision: Tensor
    weighted: Tensor


@dataclass(frozen=True)
class IMMSurrogate(Springs[IMMState]):
    """IMM's settings and functions; :class:`IMM` explains the settings."""

    merge: Merge = "mean"
    transfer: Transfer = "weight"
    lam: float = 1e-4
    last_weight: float | None = None
    start: Start = "merged"
    count_unmoved: bool = False

    State: ClassVar[type] = IMMState
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {"omega": (0, 1), "precision": (0, math.inf)}

    def __post_init__(self) -> None:
        check_non_negative(lam=self.lam)
        check_choice("merge", self.merge, Merge)
        check_choice("transfer", self.transfer, Transfer)
        check_choice("start", self.start, Start)
        if not isinstance(self.count_unmoved, bool):
            raise AlassoError(f"count_unmoved must be True or False, not {self.count_unmoved!r:.60}")
        if self.last_weight is not None:
            check_non_negative(last_weight=self.last_weight)
        if self.last_weight is not None and not 0 < self.last_weight < 1:
            raise AlassoError(f"last_weight must lie between 0 and 1, or be None, not {self.last_weight}")

    def init(self, theta: Tensor) -> IMMState:
        zero = torch.zeros_like(theta)
        return IMMState(anchor=theta.clone(), omega=zero, precision=zero.clone(), weighted=zero.clone())

    def stiffness(self, s: IMMState) -> tuple[Tensor, Tensor]:
        """Return λ for all weights where L2-transfer is on, but in the first task, which the authors decay to zero.

        Args:
            s: The state.

        Returns:
            (k⁻, k⁺), one tensor of θ's shape twice.
        """
        k = self.lam * s.omega if "l2" in self.transfer else torch.zeros_like(s.omega)
        return k, k

    def consolidate(self, s: IMMState, theta: Tensor, importance: Tensor | None = None) -> IMMState:
        F = self.task_precision(s, theta, importance)
        alpha_past, alpha_new = mixing_ratios(s.precision, F, self.last_weight)
        new = s._replace(
            precision=alpha_past * s.precision + alpha_new * F,
            weighted=alpha_past * s.weighted + alpha_new * F * theta,
        )
        return new._replace(
            anchor=self.merged(new, theta) if self.start == "merged" else theta.clone(),
            omega=torch.ones_like(theta),
        )

    def importance(self, s: IMMState) -> Tensor:
        """Return 1 where a task has any precision, so that the weight counts in merging, else 0.

        Args:
            s: The state.

        Returns:
            A tensor of θ's shape.
        """
        return (s.precision > 0).to(s.anchor.dtype)

    def warm_start(self, theta: Tensor, importance: Tensor) -> IMMState:
        """Return the first of the tasks to merge; it counts weights that stood still as well.

        Args:
            theta: The weights θ.
            importance: The Fisher information, of θ's shape.

        Returns:
            The state, as after one task.
        """
        F = importance if self.merge == "mode" else torch.ones_like(theta)
        return IMMState(anchor=theta.clone(), omega=torch.ones_like(theta), precision=F.clone(), weighted=F * theta)

    def task_precision(self, s: IMMState, theta: Tensor, importance: Tensor | None) -> Tensor:
        """Return F_k of the task that ended at θ: the Fisher information for the mode, 1 for the mean.

        Args:
            s: The state before the task.
            theta: The weights at its end.
            importance: The Fisher information, of θ's shape; the mean needs none.

        Returns:
            A tensor of θ's shape.

        Raises:
            AlassoError: The mode was given no Fisher information.
        """
        if self.merge == "mode":
            return require_importance(importance)
        # Not in the paper: a weight that stood still took no part in the task. Most of these belong to outputs of later
        # classes; counting their initial values would halve what is learned about them later.
        return torch.ones_like(theta) if self.count_unmoved else (theta != s.anchor).to(theta.dtype)

    def merged(self, s: IMMState, theta: Tensor) -> Tensor:
        """Return θ*, the merged weights.

        Args:
            s: The state that :meth:`consolidate` returned.
            theta: The weights at the end of the last task.

        Returns:
            A tensor of θ's shape.
        """
        return mode_of_gaussians(s.precision, s.weighted, theta)


def mixing_ratios(precision: Tensor, F: Tensor, last_weight: float | None) -> tuple[Tensor | float, Tensor | float]:
    """Return the α of the past and of the newest task, up to a common factor, which cancels in θ*.

    The authors apply α_K once, after the last task, and all tasks before share 1 − α_K evenly. Here it applies after
    every task, so the past fades geometrically. For two tasks both are the same.

    Args:
        precision: Σ α_k F_k of the past.
        F: F_k of the newest task, of the same shape.
        last_weight: Share of the newest task; None: all tasks count alike.

    Returns:
        (α of the past, α of the newest task).
    """
    if last_weight is None:
        return 1.0, 1.0
    # Where only one of the two has any precision, it takes all.
    w = torch.where(precision > 0, last_weight, 1.0).to(F.dtype) * (F > 0)
    return 1 - w, w


def mode_of_gaussians(precision: Tensor, weighted: Tensor, theta: Tensor) -> Tensor:
    """Return Σ α_k F_k θ_k / Σ α_k F_k, and the latest weights θ where no task has any precision.

    Args:
        precision: Σ α_k F_k.
        weighted: Σ α_k F_k θ_k.
        theta: The latest weights.

    Returns:
        A tensor of θ's shape.
    """
    # The authors add 1e-8 to every F_k, which makes that case the mean but shifts all others a little.
    # Below the smallest normal number the ratio is nothing but rounding error.
    known = precision >= torch.finfo(precision.dtype).tiny
    return torch.where(known, weighted / torch.where(known, precision, 1.0), theta)


def drop_transfer(theta: Tensor, theta_prev: Tensor, keep: Tensor, p: float) -> Tensor:
    r"""Return θ with dropout around θ_{k−1} in place of zero.

    .. math::

        \hat\theta = \begin{cases} \theta_{k-1} & \text{node turned off} \\
            \frac{1}{1-p} \theta - \frac{p}{1-p} \theta_{k-1} & \text{otherwise} \end{cases}
        \qquad \mathrm E[\hat\theta] = \theta

    Args:
        theta: The nodes' outputs at θ.
        theta_prev: Their outputs at θ_{k−1}, of the same shape.
        keep: Mask of the nodes to keep, of the same shape.
        p: The probability to drop a node.

    Returns:
        A tensor of that shape, in ``theta``'s precision.
    """
    exact = torch.promote_types(theta.dtype, torch.float32)  # half precision would round p
    kept = (theta.to(exact) - p * theta_prev.to(exact)) / (1 - p)
    return torch.where(keep, kept.to(theta.dtype), theta_prev)


class DropTransfer:
    """Trains a model with drop-transfer while the context is open. Make and enter one for each task after the first.

    The weights at construction are θ_{k−1}. A node is one output of a layer for one example. Each forward pass in
    training mode draws which nodes to drop; evaluation mode drops none. A layer is linear in its weights, so dropping
    node i's weight vector is dropping its pre-activation, as the authors' program does. The authors also drop a fifth
    of the inputs, in the usual way, and train the first task with usual dropout: do both in the model.

    Args:
        model: The model to train.
        p: The probability to drop a node.
        exclude: Shell-style patterns of the names of layers to leave alone. None leaves out the last linear or
            convolutional layer of the model, the output, as the authors do.

    Raises:
        AlassoError: No layer is left, a pattern matches none, or p is not in [0, 1).

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with DropTransfer(model, p=0.5):
    ...     out = model(torch.randn(3, 4))  # no weight has moved yet: nothing changes
    """

    def __init__(self, model: nn.Module, p: float = 0.5, *, exclude: str | Iterable[str] | None = None) -> None:
        if not 0 <= p < 1:
            raise AlassoError(f"p, the probability to drop a node, must lie in [0, 1), not {p}")
        self.p = p
        self._previous = {layer: _copied(layer) for layer in _layers_to_drop(model, exclude)}
        self._handles = [layer.register_forward_hook(self._drop, with_kwargs=True) for layer in self._previous]

    def remove(self) -> None:
        """End the task: remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> DropTransfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _drop(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], h: Tensor) -> Tensor:
        """Return the layer's output h with some nodes dropped to their values at θ_{k−1}."""
        if not layer.training:
            return h
        x = next(iter((*args, *kwargs.values())))
        keep = torch.rand_like(h, dtype=torch.float32) >= self.p  # half precision is too coarse for a small p
        return drop_transfer(h, _pre_activation(layer, x, *self._previous[layer]), keep, self.p)


_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _layers_to_drop(model: nn.Module, exclude: str | Iterable[str] | None) -> list[nn.Module]:
    """Return all linear and convolutional layers but the excluded ones."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _LINEAR)}
    if exclude is None:
        exclude = list(layers)[-1:]
    for pattern in (exclude,) if isinstance(exclude, str) else tuple(exclude):
        matched = fnmatch.filter(layers, pattern)
        if not matched:
            raise AlassoError(f"exclude={pattern!r} matches no linear or convolutional layer that is left")
        for name in matched:
            del layers[name]
    if not layers:
        raise AlassoError("drop-transfer finds no hidden linear or convolutional layer")
    return list(layers.values())


def _copied(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a copy of (W, b) as they are now."""
    assert isinstance(layer, _LINEAR)
    bias = layer.bias
    return layer.weight.detach().clone(), None if bias is None else bias.detach().clone()


def _pre_activation(layer: nn.Module, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """Return the layer's output at the weights (W, b)."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, W, b)
    assert isinstance(layer, _Convolution)
    h: Tensor = layer._conv_forward(x, W, b)
    return h


class IMM(FisherRegularizer):
    """Incremental moment matching (Lee et al., 2017): after each task the model takes the merged weights of all tasks.

    Consolidation changes the weights: begin the next task with a new optimizer, or reset its state.

    Args:
        model: The model to protect.
        merge: "mean" averages the tasks' weights; "mode" weighs them by their Fisher information, and needs a loader.
        transfer: "weight", "l2", "drop" or "l2-drop". With l2, :meth:`attach` adds λ‖θ − θ_{k−1}‖² to the loss; with
            drop, train within :class:`DropTransfer`.
        lam: λ of L2-transfer.
        last_weight: Share of the newest task in the merged weights; None: all tasks count alike.
        start: The next task begins at the "merged" weights or, as in the paper, at the "last" task's own, which
            :meth:`begin_task` puts back.
        count_unmoved: Whether the mean counts weights that did not move in a task.
        labels: Whose log-likelihood the Fisher is of, as in :class:`EWC`.
        loss: A custom negative log-likelihood, as in :class:`EWC`.
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.
    """

    method = "IMM"
    anchors_are_weights = False  # with start="last" they are the weights before merging
    merge = Setting[Merge]()
    transfer = Setting[Transfer]()
    lam = Setting[float]()
    last_weight = Setting[float | None]()
    start = Setting[Start]()
    count_unmoved = Setting[bool]()
    surrogate: IMMSurrogate

    def __init__(
        self,
        model: nn.Module,
        merge: Merge = "mean",
        *,
        transfer: Transfer = "weight",
        lam: float = 1e-4,
        last_weight: float | None = None,
        start: Start = "merged",
        count_unmoved: bool = False,
        labels: Labels = "true",
        loss: Loss | None = None,
        exclude: Names = (),
        include: Names = None,
    ) -> None:
        surrogate = IMMSurrogate(merge, transfer, lam, last_weight, start, count_unmoved)
        if loss is not None and merge != "mode":
            raise AlassoError("mean-IMM measures nothing and needs no loss: leave it out")
        super().__init__(model, surrogate, labels, loss, exclude, include)

    def _check_was_trained(self) -> None:
        """Check nothing: merging needs neither a path nor a penalty."""

    def measure(self, loader: Loader | None, head: Head | None) -> dict[str, Tensor]:
        for name, parameter in self.protected:
            if not bool(torch.isfinite(local(parameter)).all()):
                raise DivergedError(
                    f"{name} holds NaN or infinite weights: the training diverged (a smaller learning rate helps); "
                    "the regularizer keeps its earlier state"
                )
        return super().measure(loader, head) if self.merge == "mode" else {}

    @torch.no_grad()
    def consolidate(self, loader: Loader | None = None, *, head: Head | None = None) -> None:
        """End a task: merge its weights with the past's and put the result into the model.

        Args:
            loader: The task's data, for ``merge="mode"``: any iterable of (x, y).
            head: Maps the model's output to the task's logits.

        Raises:
            AlassoError: Mode-IMM was given no loader, or nothing was learned.
            DivergedError: Weights or importance are not finite.
        """
        super().consolidate(loader, head=head)
        for name, parameter in self.protected:
            state, theta = self.protected.state_of(name, parameter), weights_of(parameter)
            local(parameter).copy_(self.surrogate.merged(state, theta))
            if self.start == "merged":
                # A parameter in half precision takes the merged weights rounded: the next task starts there.
                self.protected.put(name, state._replace(anchor=weights_of(parameter).clone()))

    @torch.no_grad()
    def begin_task(self) -> None:
        """Put the last task's own weights back into the model with ``start="last"``; do nothing otherwise."""
        if self.start == "last" and self.tasks > 0:
            for name, parameter in self.protected:
                local(parameter).copy_(self.protected.state_of(name, parameter).anchor)
