r"""The passes over memory before and after an optimizer's step.

With g the task's gradient, θ the weights, and the springs (θ̂, k⁻, k⁺) of all regularizers attached:

.. math::

    \text{before} \quad & t \leftarrow g + \sum 2 k^\pm (\theta - \hat\theta), \qquad \theta_0 \leftarrow \theta

    \text{after} \quad & \omega \leftarrow \omega - g \, (\theta - \theta_0)

A :class:`Batch` takes pieces of many parameters at once, by torch's foreach operations: on a CPU as many weights as fit
the cache, on a GPU all of them. A :class:`CompiledParameter` makes each pass one kernel. An :class:`OddParameter` takes
what fits neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from alasso._compile import compiled, flat, flat_state, with_tensor_settings
from alasso._distributed import local
from alasso._stability import Limits
from alasso._state_dict import state_dtype
from alasso.methods.base import Springs, Surrogate, add_to_path_, capped

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer

#: Weights in a batch on a CPU: enough for all cores, few enough that what a pass wrote is in a cache for the next.
PIECE = 1 << 18


class Share(NamedTuple):
    """A regularizer's share in one parameter's steps."""

    surrogate: Surrogate[Any]
    state: Any
    has_past: bool

    @classmethod
    def of(cls, regularizer: Regularizer, name: str, parameter: nn.Parameter) -> Share:
        """Return what a regularizer has to do with the parameter that it knows by a name."""
        state = regularizer.protected.state_of(name, parameter)
        return cls(regularizer.surrogate, state, regularizer.tasks > 0)

    @property
    def has_path(self) -> bool:
        """Whether ω is kept for each weight."""
        return self.surrogate.observes_path and isinstance(self.surrogate, Springs)


class Work(NamedTuple):
    """One parameter's part in the steps."""

    parameter: nn.Parameter
    total: Tensor  # the gradient that the optimizer sees
    before: Tensor | None  # the weights before the step, where a path is observed
    shares: tuple[Share, ...]


def is_plain(work: Work, grad: Tensor) -> bool:
    """Return whether passes are elementwise over dense tensors of one precision, device and layout."""
    first = work.parameter
    if first.dtype not in (torch.float32, torch.float64):
        return False
    if not all(isinstance(share.surrogate, Springs) for share in work.shares):
        return False
    tensors = [first, grad, work.total] if work.before is None else [first, grad, work.total, work.before]
    for share in work.shares:
        tensors += [t for t in share.state if t.shape == first.shape]
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter) or t.shape != first.shape or t.device != first.device:
            return False
        if t.layout is not torch.strided or (t.dtype != first.dtype and t.is_floating_point()):
            return False
    if all(t.is_contiguous() for t in tensors):
        return True
    return first.dim() == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)


# -- many parameters at once -----------------------------------------------------------------------------------


class Spring(NamedTuple):
    """What pulls a piece, or the lists of this for many of them."""

    anchor: Any
    k_plus: Any
    more_left: Any  # k⁻ − k⁺; None where the sides are alike

    @classmethod
    def of(cls, surrogate: Springs[Any], state: Any) -> Spring:
        """Return a piece's spring."""
        k_minus, k_plus = surrogate.stiffness(state)
        return cls(state.anchor, k_plus, None if k_minus is k_plus else k_minus - k_plus)


class Piece:
    """A part of one parameter's flat tensors; all of them in their own shape where it is whole.

    Attributes:
        work: The parameter's work.
        springs: Of each regularizer, None where there is no past.
        kind: What pieces of one batch have in common.
        size: How many weights it has.
    """

    def __init__(self, work: Work, begin: int, end: int) -> None:
        self.work = work
        self.size = end - begin
        self._cut = None if self.size == work.total.numel() else slice(begin, end)
        self.springs = [
            Spring.of(share.surrogate, self.state(i))  # type: ignore[arg-type]  # all are springs: is_plain
            if share.has_past
            else None
            for i, share in enumerate(work.shares)
        ]
        of_shares = tuple((id(share.surrogate), share.has_past) for share in work.shares)
        self.kind = (work.total.device, work.total.dtype, of_shares)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece's part of a tensor."""
        return tensor if self._cut is None else flat(tensor)[self._cut]

    def state(self, share: int) -> Any:
        """Return the piece's part of the state of one share."""
        state = self.work.shares[share].state
        return type(state)(*(self.of(t) if t.shape == self.work.parameter.shape else t for t in state))


def pieces_of(work: Work) -> list[Piece]:
    """Cut a plain parameter into pieces: on a CPU small ones, on a GPU one."""
    size = work.total.numel()
    step = PIECE if work.total.is_cpu else max(size, 1)
    return [Piece(work, begin, min(begin + step, size)) for begin in range(0, size, step)]


def batches(pieces: Iterable[tuple[Piece, int]], limits: Limits) -> list[Batch]:
    """Return batches that together do the work of all pieces, each with its parameter group's index."""
    kinds: dict[tuple[Any, ...], list[list[Piece]]] = {}
    for piece, index in pieces:
        together = kinds.setdefault((index if limits.is_sgd else 0, *piece.kind), [[]])
        if piece.work.total.is_cpu and sum(one.size for one in together[-1]) + piece.size > PIECE:
            together.append([])
        together[-1].append(piece)
    return [Batch(some, limits, kind[0]) for kind, together in kinds.items() for some in together if some]


class Batch:
    """Pieces of plain parameters that take the same passes.

    Args:
        pieces: The pieces.
        limits: How stiff springs may be.
        group: The index of their parameter group, where that matters.
    """

    def __init__(self, pieces: Sequence[Piece], limits: Limits, group: int) -> None:
        self._pieces = pieces
        self._limits, self._group = limits, group
        self._places = self._parameters()
        self._theta = [p.of(p.work.parameter.detach()) for p in pieces]
        self._total = [p.of(p.work.total) for p in pieces]
        self._before = [p.of(p.work.before) for p in pieces if p.work.before is not None]
        self._springs: list[Spring] = []  # of each regularizer with a past
        self._paths: list[list[Tensor]] = []
        for i, share in enumerate(pieces[0].work.shares):
            if springs := [spring for p in pieces if (spring := p.springs[i]) is not None]:
                anchor, k_plus, more_left = (list(column) for column in zip(*springs, strict=True))
                self._springs.append(Spring(anchor, k_plus, None if more_left[0] is None else more_left))
            if share.surrogate.observes_path:
                self._paths.append([p.state(i).path for p in pieces])
        self._stiffest = stiffest_of(self._springs) if limits.is_sgd else 0.0
        self._capped: tuple[float | Tensor | None, list[Spring]] = (None, self._springs)
        self._grads: list[Tensor] = []

    def _parameters(self) -> list[int]:
        """Return where the parameters lie in memory."""
        return [piece.work.parameter.data_ptr() for piece in self._pieces]

    def open(self) -> None:
        """Make the total gradients from the parameters' own, and remember the weights."""
        self._grads = [piece.of(grad) for piece in self._pieces if (grad := piece.work.parameter.grad) is not None]
        torch._foreach_copy_(self._total, self._grads)
        most = self._limits.below(self._stiffest, self._group) if self._stiffest else None
        if isinstance(most, Tensor) or most != self._capped[0]:  # a tensor is not looked into
            self._capped = most, [capped_springs(springs, most) for springs in self._springs]
        for anchor, k_plus, more_left in self._capped[1]:
            d = torch._foreach_sub(self._theta, anchor)
            torch._foreach_addcmul_(self._total, k_plus, d, 2)
            if more_left is not None:
                torch._foreach_clamp_max_(d, 0.0)
                torch._foreach_addcmul_(self._total, more_left, d, 2)
        if self._before:
            torch._foreach_copy_(self._before, self._theta)

    def close(self) -> None:
        """Add the step to the paths."""
        if self._paths:
            theta = self._theta
            if self._parameters() != self._places:  # the optimizer has put other memory in their place: p.data = …
                theta = [p.of(p.work.parameter.detach()) for p in self._pieces]
            moves = torch._foreach_sub(theta, self._before)
            for path in self._paths:
                torch._foreach_addcmul_(path, self._grads, moves, -1)
        self._grads = []


def stiffest_of(springs: Sequence[Spring]) -> float:
    """Return the largest curvature of all springs."""
    curvatures = [
        2 * (k if more is None else k + more.clamp(min=0)).max()
        for _, ks, mores in springs
        for k, more in zip(ks, mores or [None] * len(ks), strict=True)
    ]
    return float(torch.stack(curvatures).max()) if curvatures else 0.0


def capped_springs(springs: Spring, most: float | Tensor | None) -> Spring:
    """Return springs that are no stiffer than a limit."""
    if springs.more_left is None:
        return springs._replace(k_plus=[capped(k, k, most)[1] for k in springs.k_plus])
    both = [capped(k + more, k, most) for k, more in zip(springs.k_plus, springs.more_left, strict=True)]
    return springs._replace(k_plus=[k for _, k in both], more_left=[left - k for left, k in both])


# -- compiled --------------------------------------------------------------------------------------------------


def open_pass(
    total: Tensor,
    before: Tensor | None,
    g: Tensor,
    theta: Tensor,
    pasts: Sequence[tuple[Springs[Any], Any]],
    most: Tensor | None,
) -> None:
    """Do :meth:`Batch.open` in one go over one flat tensor."""
    for surrogate, state in pasts:
        g = g + surrogate.penalty_grad(theta, state, most)
    total.copy_(g)
    if before is not None:
        before.copy_(theta)


def close_pass(theta: Tensor, before: Tensor, g: Tensor, paths: Sequence[Tensor]) -> None:
    """Do :meth:`Batch.close` in one go over one flat tensor."""
    for path in paths:
        add_to_path_(path, g, before, theta)


class CompiledParameter:
    """One plain parameter whose passes are compiled.

    Args:
        work: Its part in the steps.
        limits: How stiff springs may be.
        group: The index of its parameter group.
    """

    def __init__(self, work: Work, limits: Limits, group: int) -> None:
        self._parameter = work.parameter
        self._limits, self._group = limits, group
        self._stiffest = max(stiffest_of_shares(work.shares, limits), default=0.0)
        self._most = work.total.new_tensor(float("inf")) if limits.is_sgd else None  # None is a kernel of its own
        self._theta, self._total = flat(work.parameter.detach()), flat(work.total)
        self._before = None if work.before is None else flat(work.before)
        self._pasts = [
            (with_tensor_settings(share.surrogate, self._theta), flat_state(share.state, work.parameter.shape))
            for share in work.shares
            if share.has_past
        ]
        self._paths = [flat(share.state.path) for share in work.shares if share.surrogate.observes_path]
        kinds = "_".join(type(surrogate).__name__ for surrogate, _ in self._pasts)
        kind = work.total.dtype, work.total.device.type
        self._open = compiled(("open", kinds, limits.is_sgd, *kind), open_pass, f"open_step_{kinds}")
        self._close = compiled(("close", *kind), close_pass, "close_step")
        self._g = self._total

    def open(self) -> None:
        """Make the total gradient, and remember the weights."""
        assert self._parameter.grad is not None
        self._g = flat(self._parameter.grad)
        most = self._most
        if most is not None:
            most.fill_(float("inf") if (now := self._limits.below(self._stiffest, self._group)) is None else now)
        self._open(self._total, self._before, self._g, self._theta, self._pasts, most)

    def close(self) -> None:
        """Add the step to the paths."""
        if self._paths:
            theta = flat(self._parameter.detach())  # the optimizer may have put other memory in its place: p.data = …
            self._close(theta, self._before, self._g, self._paths)
        self._g = self._total


# -- what fits neither -----------------------------------------------------------------------------------------


def stiffest_of_shares(shares: Sequence[Share], limits: Limits) -> list[float]:
    """Return the largest curvature of each share's penalty; 0 where it has no limit."""
    if not limits.is_sgd:
        return [0.0] * len(shares)
    return [float(share.surrogate.stiffest(share.state)) if share.has_past else 0.0 for share in shares]


class OddParameter:
    """A parameter in half precision, a shard, one with a scaled gradient, one that ascends, or one under no springs.

    Args:
        work: Its part in the steps.
        limits: How stiff a penalty may be.
        group: The index of its parameter group.
    """

    def __init__(self, work: Work, limits: Limits, group: int) -> None:
        self._work = work
        self.id = id(work.parameter)
        self._limits, self._group = limits, group
        self._stiffest = stiffest_of_shares(work.shares, limits)
        self._g: Tensor | None = None

    def open(
        self, scale: float | Tensor = 1.0, found_inf: Tensor | None = None, begun_at: Tensor | None = None
    ) -> None:
        """Make the total gradient, and remember the weights.

        Args:
            scale: The factor from the task's loss to what the optimizer descends: a GradScaler's, −1 to ascend.
            found_inf: Not zero for a step that a scaler skips.
            begun_at: The weights before the step, if the optimizer has moved them since.
        """
        parameter, total, before, shares = self._work
        theta, t = local(parameter).detach(), local(total)
        assert parameter.grad is not None
        grad = local(parameter.grad).detach()
        t.copy_(grad)
        self._g = g = task_gradient(grad, scale, found_inf)
        if before is not None:
            before.copy_(theta if begun_at is None else begun_at)
        for share, stiffest in zip(shares, self._stiffest, strict=True):
            surrogate, state, dtype = share.surrogate, share.state, state_dtype(theta)
            most = self._limits.below(stiffest, self._group)
            if isinstance(surrogate, Springs):
                if share.has_past:
                    t.add_(surrogate.penalty_grad(theta.to(dtype), state, most) * scale)
                continue
            strength = scale if share.has_past else 0.0
            surrogate.before_step_(state, g.to(dtype), theta.to(dtype), t, strength, most)
            if begun_at is not None and share.surrogate.observes_path and not share.has_path:
                state.path.add_((g.to(dtype) * (begun_at - theta).to(dtype)).sum())

    def close(self) -> None:
        """Add the step to the paths."""
        parameter, _, before, shares = self._work
        theta = local(parameter).detach()
        assert self._g is not None
        for share in shares:
            dtype = state_dtype(theta)
            if share.has_path and before is not None:
                add_to_path_(share.state.path, self._g.to(dtype), before.to(dtype), theta.to(dtype))
            else:
                share.surrogate.after_step_(share.state, self._g.to(dtype), theta.to(dtype))
        self._g = None


def task_gradient(grad: Tensor, scale: float | Tensor, found_inf: Tensor | None) -> Tensor:
    """Return the gradient of the task's loss; zero in a step that a scaler skipped, whose 0 · inf would poison ω."""
    is_plain = isinstance(scale, float) and scale == 1.0
    g = grad if is_plain else grad.to(torch.promote_types(grad.dtype, torch.float32)) / scale
    return g if found_inf is None else torch.where(found_inf.to(g.device, torch.bool), 0.0, g)
