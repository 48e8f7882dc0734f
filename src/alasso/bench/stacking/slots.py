"""One parameter of all lanes: what is kept of it from step to step, and the one pass over it that a step makes.

There are four kinds: a weight by itself, under a spring that is as stiff on one side as on the other, or under one
that tells them apart; and the log-variance of a weight that is a Gaussian. Of each, a pass reads and writes as few
bytes as it can: memory is what a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alasso.methods.alasso import asymmetric_factors
from alasso.methods.base import two_sided_spring_grad
from alasso.optim._update_rules import adam_direction, adam_moments
from alasso.vcl import kl_grad_by_logvar

BETA1, BETA2 = 0.9, 0.999  # torch's defaults, which all learners use


# -- what is kept: tensors with a leading axis, a row a lane ------------------------------------------------------


class PlainSlot(NamedTuple):
    """A weight that nothing holds."""

    theta: Tensor
    m: Tensor
    v: Tensor


class EvenSlot(NamedTuple):
    """A weight and its spring, the same on both sides; or the mean of a Gaussian weight, whose KL term is one."""

    theta: Tensor
    m: Tensor
    v: Tensor
    anchor: Tensor
    stiffness: Tensor


class SpringSlot(NamedTuple):
    """A weight and its spring, with a stiffness of its own on each side, and ω, its path integral."""

    theta: Tensor
    m: Tensor
    v: Tensor
    anchor: Tensor
    stiffness: Tensor  # where training was observed
    side: Tensor  # which side that is, in a byte, as in ALASSO's state
    path: Tensor


class LogvarSlot(NamedTuple):
    """Log-variance of a Gaussian weight, and the variance itself: the network is given that, and gradients are by it.

    Both are at hand where the pass moves the log-variance, so nothing else has to go over the weights for them.
    """

    theta: Tensor
    m: Tensor
    v: Tensor
    anchor: Tensor  # the prior's log-variance
    variance: Tensor


Slot = PlainSlot | EvenSlot | SpringSlot | LogvarSlot


def empty_slot(kind: type[Slot], leading: Tensor) -> Slot:
    """All in the memory layout of ``leading``."""
    dtypes = {name: torch.int8 if name == "side" else leading.dtype for name in kind._fields}
    return kind(*(torch.zeros_like(leading, dtype=dtype) for dtype in dtypes.values()))


def laid_out_like(gradient: Tensor, slot: Slot) -> Slot:
    return type(slot)(*(torch.empty_like(gradient, dtype=tensor.dtype).copy_(tensor) for tensor in slot))


def given_to_the_network(slot: Slot) -> Tensor:
    return slot.variance if isinstance(slot, LogvarSlot) else slot.theta


def anchor_of(slot: Slot) -> Tensor:
    assert not isinstance(slot, PlainSlot)
    return slot.anchor


def row_of(slot: Slot, lane: int) -> Slot:
    return type(slot)(*(tensor[lane] for tensor in slot))


def taken(slot: Tensor, content: Tensor) -> Tensor:
    """The slot with the content in it; nothing to do if it is the content's own place."""
    if slot.data_ptr() != content.data_ptr():
        slot.copy_(content)
    return slot


def is_dense(tensor: Tensor) -> bool:
    """Whether a lane's rows fill memory without gaps, lanes one after another, in whatever order of the other axes."""
    row = tensor[0].numel()
    return tensor.stride(0) == row and torch.empty_like(tensor[0]).stride() == tensor[0].stride()


def in_rows(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """(lanes, weights), in the order in which they lie in memory; a tensor laid out unlike ``like`` is copied first."""
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_like(like).copy_(tensor)
    lanes, count = len(tensor), tensor[0].numel()
    return tensor.as_strided((lanes, count), (count, 1))


# -- the passes -----------------------------------------------------------------------------------------------------
#
# Each takes a slot's tensors in rows, in rows the gradient of the task's loss by what the network is given, and numbers
# of the lanes, (lanes, 1): step_size, root = √(1 − β₂ᵗ), whether the lane is active, Adam's ε, and what else this kind
# of slot needs.


def adam_(
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    step_size: Tensor,
    root: Tensor,
    active: Tensor,
    adam_epsilon: Tensor,
) -> None:
    """Adam alone; a lane that is not active stays as it is."""
    put_where_(active, (theta, m, v), after_adam(theta, m, v, grad, step_size, root, adam_epsilon))


def even_spring_and_adam_(
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    anchor: Tensor,
    stiffness: Tensor,
    grad: Tensor,
    step_size: Tensor,
    root: Tensor,
    active: Tensor,
    adam_epsilon: Tensor,
) -> None:
    """Penalty, or KL term, and Adam in one pass; a lane that is not active stays as it is."""
    total = grad + two_sided_spring_grad(theta - anchor, stiffness, stiffness)
    put_where_(active, (theta, m, v), after_adam(theta, m, v, total, step_size, root, adam_epsilon))


def spring_and_adam_(
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    anchor: Tensor,
    stiffness: Tensor,
    side: Tensor,
    path: Tensor,
    grad: Tensor,
    step_size: Tensor,
    root: Tensor,
    active: Tensor,
    adam_epsilon: Tensor,
    a: Tensor,
    epsilon: Tensor,
) -> None:
    """Penalty, Adam and ω in one pass; a lane that is not active stays as it is.

    Stiffness and side are read, not the stiffness of either side: five bytes a weight instead of eight.
    """
    total = grad + two_sided_spring_grad(theta - anchor, *asymmetric_factors(stiffness, side, a, epsilon))
    moved = after_adam(theta, m, v, total, step_size, root, adam_epsilon)
    new_path = path - grad * (moved[0] - theta)
    put_where_(active, (theta, m, v, path), (*moved, new_path))


def logvar_and_adam_(
    theta: Tensor,
    m: Tensor,
    v: Tensor,
    anchor: Tensor,
    variance: Tensor,
    grad: Tensor,
    step_size: Tensor,
    root: Tensor,
    active: Tensor,
    adam_epsilon: Tensor,
    half_share: Tensor,
) -> None:
    """KL term and Adam of log-variances in one pass; a lane that is not active stays as it is."""
    total = grad * variance + kl_grad_by_logvar(theta, anchor, half_share)  # σ² by log σ² is σ²
    moved = after_adam(theta, m, v, total, step_size, root, adam_epsilon)
    put_where_(active, (theta, m, v, variance), (*moved, moved[0].exp()))


def after_adam(
    theta: Tensor, m: Tensor, v: Tensor, gradient: Tensor, step_size: Tensor, root: Tensor, epsilon: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """θ, m and v after a step of Adam."""
    new_m, new_v = adam_moments(gradient, m, v, 1 - BETA1, 1 - BETA2)
    return theta - step_size * adam_direction(new_m, new_v, root, epsilon), new_m, new_v


def put_where_(active: Tensor, places: tuple[Tensor, ...], contents: tuple[Tensor, ...]) -> None:
    for place, content in zip(places, contents, strict=True):
        place.copy_(torch.where(active, content, place))


PASSES: dict[type[Slot], Callable[..., None]] = {
    PlainSlot: adam_,
    EvenSlot: even_spring_and_adam_,
    SpringSlot: spring_and_adam_,
    LogvarSlot: logvar_and_adam_,
}
