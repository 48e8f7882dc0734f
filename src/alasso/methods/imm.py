r"""Incremental moment matching: mean-IMM and mode-IMM (Lee et al., NIPS 2017).

Each task is trained on its own and leaves a Gaussian with mean θ_k and diagonal precision F_k (the Fisher information).
The network that serves all tasks is one Gaussian in place of their mixture with ratios α_k, matched in its mean or at
its mode:

.. math::

    \theta^*_\text{mean} = \sum_k \alpha_k \theta_k, \qquad
    \theta^*_\text{mode} = \frac{\sum_k \alpha_k F_k \theta_k}{\sum_k \alpha_k F_k}.

With F_k = 1 the second is the first, so two running sums serve both. Merging is sensible only if the loss has no ridge
between the weights, which the transfer techniques see to when task k is trained from the weights θ_{k−1} before it:

    weight  start at θ_{k−1}
    l2      and pay λ‖θ − θ_{k−1}‖²
    drop    and drop nodes to what they were at θ_{k−1}, not to zero: :class:`DropTransfer`

Deviations, each a setting: by default the next task starts from the merged weights, where the paper starts it from the
last task's own (``start="last"``); a weight that stood still in a task has no say in the mean (``count_unmoved``).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alasso._distributed import local
from alasso._parameters import weights_of
from alasso.errors import AlassoError, DivergedError
from alasso.importance._objectives import Loss
from alasso.methods.base import Surrogate, check_choice, check_non_negative, require_importance
from alasso.methods.ewc import FisherRegularizer, Labels
from alasso.regularizer import Head, Loader, Setting

Merge = Literal["mean", "mode"]
Transfer = Literal["weight", "l2", "drop", "l2-drop"]
Start = Literal["merged", "last"]


class IMMState(NamedTuple):
    """The mixture of all tasks so far, and where the next one begins."""

    anchor: Tensor  # θ_{k−1}, where the next task starts: merged weights, or the last task's own
    omega: Tensor  # what L2-transfer weighs: 1 where there is a past, 0 where not
    precision: Tensor  # Σ α_k F_k
    weighted: Tensor  # Σ α_k F_k θ_k


@dataclass(frozen=True)
class IMMSurrogate(Surrogate[IMMState]):
    """IMM's settings and functions; :class:`IMM` explains the settings."""

    merge: Merge = "mean"
    transfer: Transfer = "weight"
    lam: float = 1e-4
    last_weight: float | None = None
    start: Start = "merged"
    count_unmoved: bool = False

    State: ClassVar[type] = IMMState

    def __post_init__(self) -> None:
        check_non_negative(lam=self.lam)
        check_choice("merge", self.merge, Merge)
        check_choice("transfer", self.transfer, Transfer)
        check_choice("start", self.start, Start)
        if self.last_weight is not None and not 0 < self.last_weight < 1:
            raise AlassoError(f"last_weight must lie between 0 and 1, or be None, not {self.last_weight}")

    def init(self, theta: Tensor) -> IMMState:
        zero = torch.zeros_like(theta)
        return IMMState(anchor=theta.clone(), omega=zero, precision=zero.clone(), weighted=zero.clone())

    def stiffness(self, s: IMMState) -> tuple[Tensor, Tensor]:
        """Return λ where L2-transfer is on and the weight has a past; the authors decay the first task to zero."""
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
            omega=(new.precision > 0).to(theta.dtype),
        )

    def warm_start(self, theta: Tensor, importance: Tensor) -> IMMState:
        """Return the first of the tasks to be merged; here even a weight that stood still has a say."""
        F = importance if self.merge == "mode" else torch.ones_like(theta)
        return IMMState(anchor=theta.clone(), omega=(F > 0).to(theta.dtype), precision=F.clone(), weighted=F * theta)

    def task_precision(self, s: IMMState, theta: Tensor, importance: Tensor | None) -> Tensor:
        """Return F_k of the task that ended at θ: the Fisher information for the mode, 1 for the mean."""
        if self.merge == "mode":
            return require_importance(importance)
        # Not in the paper: a weight that stood still took no part in the task. Most of all these are the outputs of
        # classes yet to come, whose initial values would otherwise halve what is learned about them later.
        return torch.ones_like(theta) if self.count_unmoved else (theta != s.anchor).to(theta.dtype)

    def merged(self, s: IMMState, theta: Tensor) -> Tensor:
        """Return θ*, the weights to take after a task that ended at θ, given the state that consolidation returned."""
        return mode_of_gaussians(s.precision, s.weighted, theta)


def mixing_ratios(precision: Tensor, F: Tensor, last_weight: float | None) -> tuple[Tensor | float, Tensor | float]:
    """Return (α of the past, α of the newcomer), up to a common factor, which cancels in θ*.

    The authors' α_K is applied once, after the last task, with 1 − α_K shared evenly by all before; here it is applied
    after every task, so the past fades geometrically. For two tasks the two are one.
    """
    if last_weight is None:
        return 1.0, 1.0
    # Whoever is alone takes all: the first to have a say, or the past where the newcomer has none.
    w = torch.where(precision > 0, last_weight, 1.0).to(F.dtype) * (F > 0)
    return 1 - w, w


def mode_of_gaussians(precision: Tensor, weighted: Tensor, theta: Tensor) -> Tensor:
    """Return Σ α_k F_k θ_k / Σ α_k F_k, and the latest weights θ where no task has any precision."""
    # The authors add 1e-8 to every F_k, which makes that case the mean but shifts all others a little, too.
    # Below the smallest normal number the ratio would be one of rounding errors.
    known = precision >= torch.finfo(precision.dtype).tiny
    return torch.where(known, weighted / torch.where(known, precision, 1.0), theta)


def drop_transfer(theta: Tensor, theta_prev: Tensor, keep: Tensor, p: float) -> Tensor:
    r"""Return θ with dropout around θ_{k−1} in place of zero.

    .. math::

        \hat\theta = \begin{cases} \theta_{k-1} & \text{node turned off} \\
            \frac{1}{1-p} \theta - \frac{p}{1-p} \theta_{k-1} & \text{otherwise} \end{cases}
        \qquad \mathrm E[\hat\theta] = \theta

    Args:
        theta: What the nodes put out at θ.
        theta_prev: What they put out at θ_{k−1}.
        keep: Mask of the nodes that stay.
        p: The chance to be dropped.
    """
    exact = torch.promote_types(theta.dtype, torch.float32)  # in half precision, p would not be the share of ``keep``
    kept = (theta.to(exact) - p * theta_prev.to(exact)) / (1 - p)
    return torch.where(keep, kept.to(theta.dtype), theta_prev)


class DropTransfer:
    """Trains a model with drop-transfer while the context is open; made and entered when a task after the first begins.

    The weights at the time of making are θ_{k−1}. A node is one number that a layer puts out for one example; which of
    them are dropped is drawn anew at each forward pass in training mode, and evaluation is left alone. Since a layer is
    linear in its weights, dropping node i's weight vector is dropping its pre-activation, as the authors' program does.
    They also drop a fifth of the inputs, in the usual way, and train the first task with usual dropout: both are the
    model's own affair.

    Args:
        model: The model to train.
        p: The chance that a node is dropped.
        exclude: Shell-style patterns of the names of layers to leave alone. None leaves out the last linear or
            convolutional layer of the model, the output, as the authors do.

    Raises:
        AlassoError: No layer is left, a pattern fits none, or p is not in [0, 1).

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with DropTransfer(model, p=0.5):
    ...     out = model(torch.randn(3, 4))                      # nothing has moved yet: nothing to drop
    """

    def __init__(self, model: nn.Module, p: float = 0.5, *, exclude: str | Iterable[str] | None = None) -> None:
        if not 0 <= p < 1:
            raise AlassoError(f"p, the chance that a node is dropped, must lie in [0, 1), not {p}")
        self.p = p
        self._previous = {layer: _copied(layer) for layer in _layers_to_drop(model, exclude)}
        self._handles = [layer.register_forward_hook(self._drop, with_kwargs=True) for layer in self._previous]

    def remove(self) -> None:
        """End the task: the model is as it was."""
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
        """Return the layer's output h with nodes dropped to what they were at θ_{k−1}."""
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
        raise AlassoError("drop-transfer finds no hidden linear or convolutional layer to drop nodes of")
    return list(layers.values())


def _copied(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a copy of (W, b) as they are now."""
    assert isinstance(layer, _LINEAR)
    bias = layer.bias
    return layer.weight.detach().clone(), None if bias is None else bias.detach().clone()


def _pre_activation(layer: nn.Module, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """Return what the layer would put out if its weights were (W, b)."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, W, b)
    assert isinstance(layer, _Convolution)
    h: Tensor = layer._conv_forward(x, W, b)
    return h


class IMM(FisherRegularizer):
    """Incremental moment matching (Lee et al., 2017): after each task the model takes the merged weights of all so far.

    Consolidation changes the weights: begin the next task with a new optimizer, or one whose state is reset.

    Args:
        model: The model to protect.
        merge: "mean" averages the tasks' weights; "mode" weighs them by their Fisher information, and needs a loader.
        transfer: "weight", "l2", "drop" or "l2-drop". Those with l2 pay λ‖θ − θ_{k−1}‖² through :meth:`attach`; train
            those with drop within :class:`DropTransfer`.
        lam: λ of L2-transfer.
        last_weight: Share of the newest task in the merged weights; None: all tasks count alike.
        start: The next task begins at the "merged" weights or, as in the paper, at the "last" task's own, which
            :meth:`begin_task` puts back.
        count_unmoved: Whether the mean counts a weight that a task left exactly where it was.
        labels: Whose log-likelihood the Fisher is of, as in :class:`EWC`.
        loss: A negative log-likelihood of your own, as in :class:`EWC`.
        exclude: Shell-style patterns of parameter names to leave alone.

    Raises:
        AlassoError: A setting is out of its range, or a pattern fits no parameter.
    """

    method = "IMM"
    anchors_are_weights = False  # but the last task's own, before merging
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
        exclude: str | Iterable[str] = (),
    ) -> None:
        surrogate = IMMSurrogate(merge, transfer, lam, last_weight, start, count_unmoved)
        if loss is not None and merge != "mode":
            raise AlassoError("mean-IMM measures nothing, and needs no loss: leave it out")
        super().__init__(model, surrogate, labels, loss, exclude)

    def _check_was_trained(self) -> None:
        """Check nothing: merging needs neither a path nor a penalty."""

    def measure(self, loader: Loader | None, head: Head | None) -> dict[str, Tensor]:
        for name, parameter in self.protected:
            if not bool(torch.isfinite(local(parameter)).all()):
                raise DivergedError(
                    f"{name} holds NaN or infinite weights: the training diverged (a smaller learning rate helps); "
                    "the state before this consolidation is kept"
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
