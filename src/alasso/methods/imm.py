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
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from alasso.errors import AlassoError
from alasso.methods.base import Surrogate, check_non_negative, require_importance

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
    """How tasks are merged, and what holds them together while they are trained.

    ``merge``  "mean" or "mode"; the latter needs the Fisher information as importance
    ``transfer``  "weight", "l2", "drop" or "l2-drop"; only those with l2 add a penalty, ``lam`` is its λ
    ``last_weight``  share w of the newest task, merged_k = (1 − w)·merged_{k−1} + w·θ_k; None: all tasks count the same
    ``start``  the next task begins, and L2-transfer pulls, at the "merged" weights, or at the "last" task's own
    ``count_unmoved``  whether a weight that a task left exactly where it was is averaged in all the same
    """

    merge: Merge = "mean"
    transfer: Transfer = "weight"
    lam: float | Tensor = 1e-4
    last_weight: float | None = None
    start: Start = "merged"
    count_unmoved: bool = False

    State: ClassVar[type] = IMMState

    def __post_init__(self) -> None:
        check_non_negative(lam=self.lam)
        for name, kind in (("merge", Merge), ("transfer", Transfer), ("start", Start)):
            if getattr(self, name) not in get_args(kind):
                raise AlassoError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        if self.last_weight is not None and not 0 < self.last_weight < 1:
            raise AlassoError(f"last_weight must lie between 0 and 1, or be None, not {self.last_weight}")

    def init(self, theta: Tensor) -> IMMState:
        zero = torch.zeros_like(theta)
        return IMMState(anchor=theta.clone(), omega=zero, precision=zero.clone(), weighted=zero.clone())

    def stiffness(self, s: IMMState) -> tuple[Tensor, Tensor]:
        """λ where L2-transfer is on and the weight has a past. The authors' first task decays towards zero instead."""
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
        """The first of the tasks to be merged; here even a weight that stood still has a say."""
        F = importance if self.merge == "mode" else torch.ones_like(theta)
        return IMMState(anchor=theta.clone(), omega=(F > 0).to(theta.dtype), precision=F.clone(), weighted=F * theta)

    def task_precision(self, s: IMMState, theta: Tensor, importance: Tensor | None) -> Tensor:
        """F_k of the task that ended at θ: the Fisher information in the mode's case, 1 in the mean's."""
        if self.merge == "mode":
            return require_importance(importance)
        # Not in the paper: a weight that stood still took no part in the task. Most of all these are the outputs of
        # classes yet to come, whose initial values would otherwise halve what is learned about them later.
        return torch.ones_like(theta) if self.count_unmoved else (theta != s.anchor).to(theta.dtype)

    def merged(self, s: IMMState, theta: Tensor) -> Tensor:
        """θ*: the weights to take after a task that ended at θ, given the state that consolidation returned."""
        return mode_of_gaussians(s.precision, s.weighted, theta)


def mixing_ratios(precision: Tensor, F: Tensor, last_weight: float | None) -> tuple[Tensor | float, Tensor | float]:
    """(α of the past, α of the newcomer), up to a common factor, which cancels in θ*.

    The authors' α_K is applied once, after the last task, with 1 − α_K shared evenly by all before; here it is applied
    after every task, so the past fades geometrically. For two tasks the two are one.
    """
    if last_weight is None:
        return 1.0, 1.0
    # Whoever is alone takes all: the first to have a say, or the past where the newcomer has none.
    w = torch.where(precision > 0, last_weight, 1.0).to(F.dtype) * (F > 0)
    return 1 - w, w


def mode_of_gaussians(precision: Tensor, weighted: Tensor, theta: Tensor) -> Tensor:
    """Σ α_k F_k θ_k / Σ α_k F_k; where no task has any precision all weights will do, and the latest, θ, are kept."""
    # The authors add 1e-8 to every F_k, which makes that case the mean but shifts all others a little, too.
    # Below the smallest normal number the ratio would be one of rounding errors.
    known = precision >= torch.finfo(precision.dtype).tiny
    return torch.where(known, weighted / torch.where(known, precision, 1.0), theta)


def drop_transfer(theta: Tensor, theta_prev: Tensor, keep: Tensor, p: float | Tensor) -> Tensor:
    r"""Dropout around θ_{k−1} in place of zero; ``keep`` is the mask of nodes that stay, p the chance to be dropped.

    .. math::

        \hat\theta = \begin{cases} \theta_{k-1} & \text{node turned off} \\
            \frac{1}{1-p} \theta - \frac{p}{1-p} \theta_{k-1} & \text{otherwise} \end{cases}
        \qquad \mathrm E[\hat\theta] = \theta
    """
    exact = torch.promote_types(theta.dtype, torch.float32)  # in half precision, p would not be the share of ``keep``
    kept = (theta.to(exact) - p * theta_prev.to(exact)) / (1 - p)
    return torch.where(keep, kept.to(theta.dtype), theta_prev)


def uniform_noise(like: Tensor) -> Tensor:
    """What drop-transfer is decided by: a number from [0, 1) for each one of ``like``."""
    return torch.rand_like(like, dtype=torch.float32)  # half precision is too coarse for a small p


class DropTransfer:
    """Trains a model with drop-transfer while the context is open; made and entered when a task after the first begins.

    The weights at the time of making are θ_{k−1}. A node is one number that a layer puts out for one example; which of
    them are dropped is drawn anew at each forward pass in training mode, and evaluation is left alone. Since a layer is
    linear in its weights, dropping node i's weight vector is dropping its pre-activation, as the authors' program does.

    ``exclude`` holds shell-style patterns of the names of layers to leave alone; None leaves out the last linear or
    convolutional layer of the model, the output, as the authors do. They also drop a fifth of the inputs, in the usual
    way, and train the first task with usual dropout: both are the model's own affair.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> with DropTransfer(model, p=0.5):
    ...     out = model(torch.randn(3, 4))                      # nothing has moved yet: nothing to drop
    """

    def __init__(self, model: nn.Module, p: float = 0.5, *, exclude: str | Iterable[str] | None = None) -> None:
        if not 0 <= p < 1:
            raise AlassoError(f"p, the chance that a node is dropped, must lie in [0, 1), not {p}")
        self.p = p
        self._previous = {layer: weights_of(layer) for layer in layers_to_drop(model, exclude)}
        self._handles = [layer.register_forward_hook(self._drop, with_kwargs=True) for layer in self._previous]

    def remove(self) -> None:
        """End of the task: the model is as it was."""
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
        return with_nodes_dropped(layer, args, kwargs, h, self._previous[layer], self.p)


def with_nodes_dropped(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    h: Tensor,
    previous: tuple[Tensor, Tensor | None],
    p: float | Tensor,
) -> Tensor:
    """The layer's output h, given its arguments, with nodes dropped to what they were at ``previous``, (W, b)."""
    if not layer.training:
        return h
    x = next(iter((*args, *kwargs.values())))
    return drop_transfer(h, pre_activation(layer, x, *previous), uniform_noise(h) >= p, p)


_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layers_to_drop(model: nn.Module, exclude: str | Iterable[str] | None) -> list[nn.Module]:
    """All linear and convolutional layers but the excluded ones."""
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


def weights_of(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """A copy of (W, b) as they are now."""
    assert isinstance(layer, _LINEAR)
    bias = layer.bias
    return layer.weight.detach().clone(), None if bias is None else bias.detach().clone()


def pre_activation(layer: nn.Module, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """What the layer would put out if its weights were (W, b)."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, W, b)
    assert isinstance(layer, _Convolution)
    h: Tensor = layer._conv_forward(x, W, b)
    return h
