r"""KronALASSO: the loss drop of Eq. 7, spread over each layer in the shape of its Kronecker-factored curvature.

ALASSO gives each weight a spring of its own. Here a parameter W, a matrix of m rows and n columns, has one quadratic

.. math::

    \mathcal L_s(W) = \tfrac{c}{2} \, N \kappa \, \langle \bar L \, D \, \bar R, \; D \rangle, \qquad D = W - \hat W

with a factor for its rows and one for its columns, both positive. They are by-products of training: in each step, the
output gradients g and the inputs a of the layer tell the shape, the gradient M of the task's loss the size,

.. math::

    L_\text{step} = B \lVert M \rVert^2 \frac{\sum g g^\top}{\operatorname{tr} \sum g g^\top}, \qquad
    R_\text{step} = \frac{\sum a a^\top}{\operatorname{tr} \sum a a^\top},

where B is the number of samples. L and R of a task are the means over its steps, :math:`\bar L` and :math:`\bar R` the
means over the N tasks. Where a layer's inputs cannot be seen, as in an LSTM, :math:`M M^\top` and :math:`M^\top M` take
their place; a vector, such as a bias, keeps the diagonal of L alone. The scale κ makes the quadratic equal the loss
drop along the paths of all tasks, which is the paper's Eq. 7 for a whole tensor:

.. math::

    \kappa = \frac{\sum_t \max(\omega_t, 0)}{\sum_t q_t}, \qquad
    \omega_t = -\sum_\text{steps} \langle M, \Delta W \rangle \quad (10), \qquad
    q_t = \tfrac12 \langle L_t D_t R_t, D_t \rangle

with :math:`D_t` the move of task t. Factors are sketches of rank r (:mod:`alasso.importance.kronecker`), so a tensor
keeps its anchor and some r (m + n) numbers.

The family: Ritter, Botev and Barber, "Online structured Laplace approximations" (NeurIPS 2018).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mode
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso._distributed import is_distributed, is_sharded, local
from alasso._passes import task_gradient
from alasso.errors import AlassoError
from alasso.importance._taps import Factors, Taps, joined
from alasso.importance.kronecker import (
    as_matrix,
    diagonal,
    form,
    grown_sketch,
    largest,
    matrix_shape,
    rank_of,
    sketch,
    sketch_of_counts,
    times,
    with_unit_trace,
)
from alasso.methods.base import Setting, Surrogate, check_choice, check_non_negative
from alasso.regularizer import Regularizer

Scale = Literal["path", "fisher"]

PIECE = 1 << 17  # weights at a time on a CPU
TINY = 1e-30  # no division by zero
ALL_AT_FIRST = 100  # steps of a task whose factors are all looked at: a short task has no more


class KronState(NamedTuple):
    """State of one parameter, seen as a matrix. Sketches are [Y | d], forms [B | ρ], of rows and of columns.

    Attributes:
        anchor: Ŵ.
        path: ω of the running task.
        rows: Σ over the task's steps of L.
        columns: Σ over the task's steps of R.
        steps: How many steps they stand for.
        past_rows: Σ over tasks of L.
        past_columns: Σ over tasks of R.
        tasks: Their number N.
        drop: Σ over tasks of max(ω, 0).
        rise: Σ over tasks of q.
        row_form: Form of N κ L̄.
        column_form: Form of R̄.
    """

    anchor: Tensor
    path: Tensor
    rows: Tensor
    columns: Tensor
    steps: Tensor
    past_rows: Tensor
    past_columns: Tensor
    tasks: Tensor
    drop: Tensor
    rise: Tensor
    row_form: Tensor
    column_form: Tensor


@dataclass(frozen=True)
class KronSurrogate(Surrogate[KronState]):
    """KronALASSO's settings and functions; :class:`KronALASSO` explains the settings."""

    c: float = 1.0
    rank: int = 32
    every: int = 4
    scale: Scale = "path"
    gamma: float = 1.0

    State: ClassVar[type] = KronState
    partial: ClassVar[frozenset[str]] = frozenset({"path"})
    observes_path: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_non_negative(c=self.c, rank=self.rank, every=self.every, gamma=self.gamma)
        for name, value in (("rank", self.rank), ("every", self.every)):
            if not isinstance(value, int) or value < 1:
                raise AlassoError(f"{name} must be a whole number, one or more, not {value}")
        if self.gamma > 1:
            raise AlassoError(f"gamma must lie between 0 and 1, not {self.gamma}")
        check_choice("scale", self.scale, Scale)

    def init(self, theta: Tensor) -> KronState:
        m, n = matrix_shape(theta)
        ranks = (min(m, self.rank), min(n, self.rank)) if theta.dim() > 1 else (0, 0)
        fields = {field: theta.new_zeros(()) for field in KronState._fields}
        for field in ("rows", "past_rows", "row_form"):
            fields[field] = theta.new_zeros(m, ranks[0] + 1)
        for field in ("columns", "past_columns", "column_form"):
            fields[field] = theta.new_zeros(n, ranks[1] + 1)
        return KronState(**{**fields, "anchor": theta.clone()})

    # -- the penalty -----------------------------------------------------------------------------------------

    def penalty(self, theta: Tensor, s: KronState) -> Tensor:
        D = as_matrix(theta - s.anchor)
        return (0.5 * self.c) * (times(s.row_form, D, s.column_form) * D).sum()

    def penalty_grad(self, theta: Tensor, s: KronState) -> Tensor:
        D = as_matrix(theta - s.anchor)
        return self.c * times(s.row_form, D, s.column_form).view_as(theta)

    def importance(self, s: KronState) -> Tensor:
        return 0.5 * torch.outer(diagonal(s.row_form), diagonal(s.column_form)).view_as(s.anchor)

    def stiffest(self, s: KronState) -> Tensor:
        return self.c * largest(s.row_form) * largest(s.column_form)

    # -- a step ----------------------------------------------------------------------------------------------

    def before_step_(self, s: KronState, g: Tensor, theta: Tensor, total: Tensor, strength: float | Tensor) -> None:
        """Add c · N κ L̄ D R̄ to the total gradient, and ⟨M, D⟩ to ω, which :meth:`after_step_` takes away at the new D.

        With the forms of both factors that is ρ D ρᵀ, weight by weight, and one thin product U V. It goes through rows
        that fit a CPU's cache.

        Args:
            s: The state, changed in place.
            g: M, of θ's shape.
            theta: The weights.
            total: The gradient that the optimizer will see, changed in place.
            strength: Factor of the penalty; 0.0 where nothing has a past.
        """
        M, W, W_hat, T = as_matrix(g), as_matrix(theta), as_matrix(s.anchor), as_matrix(total)
        if isinstance(strength, float) and strength == 0:
            for rows in pieces_of_rows(W):
                s.path.add_(torch.dot(M[rows].reshape(-1), (W[rows] - W_hat[rows]).reshape(-1)))
            return
        B_rows, rho_rows = s.row_form[:, :-1], s.row_form[:, -1:] * (self.c * strength)
        B_columns, rho_columns = s.column_form[:, :-1], s.column_form[:, -1]
        D_B, Bt_D = [], W.new_zeros(B_rows.shape[1], W.shape[1])  # D B_columns and B_rowsᵀ D
        for rows in pieces_of_rows(W):
            D = W[rows] - W_hat[rows]
            s.path.add_(torch.dot(M[rows].reshape(-1), D.reshape(-1)))
            D_B.append(D @ B_columns)
            Bt_D.addmm_(B_rows[rows].mT, D)
            T[rows].addcmul_(D.mul_(rho_columns), rho_rows[rows])
        if theta.dim() > 1:
            U = torch.cat([torch.cat(D_B).mul_(rho_rows), B_rows * (self.c * strength)], 1)
            V = torch.cat([B_columns.mT, Bt_D * rho_columns + (Bt_D @ B_columns) @ B_columns.mT])
            T.addmm_(U.to(T.dtype), V.to(T.dtype))
        if T.data_ptr() != total.data_ptr():  # its memory lies in another order, as channels_last does
            total.copy_(T.view_as(total))

    def after_step_(self, s: KronState, g: Tensor, theta: Tensor) -> None:
        M, W, W_hat = as_matrix(g), as_matrix(theta), as_matrix(s.anchor)
        for rows in pieces_of_rows(W):
            s.path.sub_(torch.dot(M[rows].reshape(-1), (W[rows] - W_hat[rows]).reshape(-1)))

    def add_factors_(self, s: KronState, g: Tensor, samples: int, seen: Factors | None = None, weight: int = 1) -> None:
        """Add a step's L and R to the task's.

        Args:
            s: The state, changed in place.
            g: M, of θ's shape.
            samples: B.
            seen: What the layer's hooks saw. Without it, or if the layer has just grown, the gradient tells the shape.
            weight: For how many steps it stands.
        """
        M = as_matrix(g)
        size = M.square().sum()
        if s.anchor.dim() < 2:
            rows, columns = M.square(), torch.ones_like(s.columns)
        elif seen is not None and (seen.rows.shape, seen.columns.shape) == (s.rows.shape, s.columns.shape):
            rows, columns = seen.rows, seen.columns
        else:
            rows, columns = sketch(M.mT, rank_of(s.rows)), sketch(M, rank_of(s.columns))
        rows, columns = with_unit_trace(rows), with_unit_trace(columns)
        counts = weight * (size * rows[:, -1].sum() * columns[:, -1].sum() != 0)  # unless nothing or infinity was told
        s.rows.add_(rows * (counts * samples * size))
        s.columns.add_(columns * counts)
        s.steps.add_(counts)

    # -- the end of a task -----------------------------------------------------------------------------------

    def consolidate(self, s: KronState, theta: Tensor, importance: Tensor | None = None) -> KronState:
        if not bool(s.steps):  # the task did not train it
            return KronState(*(t.clone() for t in s._replace(anchor=theta)))
        L, R = s.rows / s.steps, s.columns / s.steps
        D = as_matrix(theta - s.anchor)
        past = {
            "past_rows": self.gamma * s.past_rows + L,
            "past_columns": self.gamma * s.past_columns + R,
            "tasks": self.gamma * s.tasks + 1,
            "drop": self.gamma * s.drop + s.path.clamp(min=0),
            "rise": self.gamma * s.rise + 0.5 * (times(form(L), D, form(R)) * D).sum(),
        }
        return self.with_past(theta, past)

    def warm_start(self, theta: Tensor, importance: Tensor) -> KronState:
        """Return the state whose factors are the sums of the importance by rows and by columns, and κ = 1."""
        omega = as_matrix(2 * importance)
        rows, columns = omega.sum(1), omega.sum(0)
        s = self.init(theta)
        past = {
            "past_rows": sketch_of_counts(rows, rank_of(s.rows)),
            "past_columns": sketch_of_counts(columns / columns.sum().clamp(min=TINY), rank_of(s.columns)),
            "tasks": torch.ones_like(s.tasks),
        }
        return self.with_past(theta, past)

    def with_past(self, theta: Tensor, past: dict[str, Tensor]) -> KronState:
        """Return the state at the end of a task, with the forms that follow from the sums over tasks.

        Args:
            theta: The weights, which become the anchor.
            past: The sums by name; zero if left out.

        Returns:
            The state with the forms of N κ L̄ and R̄.
        """
        fresh = {"rows": torch.zeros_like(past["past_rows"]), "columns": torch.zeros_like(past["past_columns"])}
        s = self.init(theta)._replace(**past, **fresh)  # of the rank that the past has
        kappa = torch.ones_like(s.rise)
        if self.scale == "path":
            kappa = torch.where(s.rise == 0, 1.0, s.drop / s.rise)
        row_form = form(s.past_rows)  # of N L̄
        row_form[:, :-1] *= kappa.sqrt()
        row_form[:, -1] *= kappa
        return s._replace(row_form=row_form, column_form=form(s.past_columns / s.tasks))

    def fits(self, field: str, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        own = getattr(self.init(torch.empty(shape, device="meta")), field)
        is_factor = own.dim() == tensor.dim() == 2 and field != "anchor"  # whose rank may be another
        return tensor.shape == own.shape or (is_factor and len(tensor) == len(own))

    def grown(self, s: KronState, theta: Tensor) -> KronState:
        m, n = matrix_shape(theta)
        sizes = {"rows": m, "columns": n}
        fields = {field: tensor.clone() for field, tensor in s._asdict().items()}
        for field in ("rows", "columns", "past_rows", "past_columns"):
            fields[field] = grown_sketch(fields[field], sizes[field.rpartition("_")[2]], self.rank)
        for field, size in (("row_form", m), ("column_form", n)):
            fields[field] = nn.functional.pad(fields[field], (0, 0, 0, size - len(fields[field])))
        anchor = theta.clone()
        anchor[tuple(slice(0, k) for k in s.anchor.shape)] = s.anchor
        return KronState(**{**fields, "anchor": anchor})


def pieces_of_rows(W: Tensor) -> list[slice]:
    """Return slices of rows: on a CPU as many at a time as fit its cache, on a GPU all.

    Args:
        W: A matrix.

    Returns:
        The slices in their order.
    """
    m, n = W.shape
    step = max(PIECE // max(n, 1), 1) if W.is_cpu else max(m, 1)
    return [slice(begin, begin + step) for begin in range(0, m, step)]


class KronALASSO(Regularizer):
    """ALASSO in the shape of each layer's Kronecker-factored curvature: the method to start with.

    It needs no data at the end of a task and no search. :meth:`attach` also puts hooks on the model's linear layers,
    convolutions and embeddings, which see what these get and what they are told. Attach before you train, and again
    when the model got new layers. Hooks do not run in a compiled model, and FSDP2 cuts a weight into matrices of their
    own: there the gradient alone tells the shape, and a state of shards cannot be saved.

    Args:
        model: The model to protect.
        c: Weight of the past against the present.
        rank: Directions that each factor keeps, beside a diagonal.
        every: Look at the factors in every so many steps, after the first hundred; the path is followed in all.
        scale: "path": the surrogate rises by the loss drop along the path of training, whatever the loss's scale.
            "fisher": the factors' own scale, κ = 1, for a loss that is a mean over the batch; it needs another c.
        gamma: Share of the past that each new task keeps, from 0 to 1; below 1 for streams without an end.
        exclude: Shell-style patterns of parameter names to leave alone.

    Raises:
        AlassoError: A setting is out of its range, or a pattern matches no parameter.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> reg = KronALASSO(model).attach(optimizer)
    >>> for _ in range(3):                                      # task 1, in your own loop
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     _ = optimizer.step()
    >>> reg.consolidate()
    >>> reg.penalty().item()                                    # zero at the anchor
    0.0
    """

    method = "KronALASSO"
    surrogate: KronSurrogate
    c = Setting[float]()
    rank = Setting[int]()
    every = Setting[int]()
    scale = Setting[Scale]()
    gamma = Setting[float]()

    def __init__(
        self,
        model: nn.Module,
        c: float = 1.0,
        rank: int = 32,
        *,
        every: int = 4,
        scale: Scale = "path",
        gamma: float = 1.0,
        exclude: str | Iterable[str] = (),
    ) -> None:
        self.taps = Taps()
        self._samples = 1  # in a batch, as far as the layers tell
        super().__init__(model, KronSurrogate(c, rank, every, scale, gamma), exclude)

    def attach(self, optimizer: Optimizer, compile: bool = False) -> KronALASSO:
        super().attach(optimizer, compile)
        self.taps.put(self)
        return self

    def detach(self) -> None:
        super().detach()
        self.taps.remove()

    def look(self) -> None:
        super().look()
        if self.taps:
            self.taps.put(self)

    def warm_start(self, *args: Any, **kwargs: Any) -> None:
        was_attached = bool(self.taps)
        self.taps.remove()  # what measures importance is no training, and vmap cannot follow hooks
        try:
            super().warm_start(*args, **kwargs)
        finally:
            if was_attached:
                self.taps.put(self)

    @property
    def step_kind(self) -> int:
        """Weight of the step to come in the means over a task's steps; 0 if its factors are not looked at."""
        step = self.steps // max(len(self._attached), 1)
        if step < ALL_AT_FIRST:
            return 1
        return self.every if step % self.every == 0 else 0

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        super().before_step(optimizer)
        if not (weight := self.step_kind):
            return
        surrogate: KronSurrogate = self.protected.surrogate  # type: ignore[assignment]
        held = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        trained = {name: p for p in held if (name := self.protected.name_of(p)) is not None}
        states = {name: self.protected.state_of(name, p) for name, p in trained.items()}
        seen = self.taps.take(trained, states)
        if counts := [one.samples for told in seen.values() for one in told]:
            self._samples = mode(counts)  # some layers see positions as samples, or are called several times
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for name, p in trained.items():
            state, told = states[name], None
            if seen[name] and not is_sharded(p):  # a shard is a matrix of its own
                told = joined(seen[name])
            g = task_gradient(local(p.grad).detach(), 1.0 if scale is None else scale, found_inf)
            surrogate.add_factors_(state, g.to(state.anchor.dtype), self._samples, told, weight)

    def state_dict(self) -> dict[str, Any]:
        self._refuse_shards()
        return super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._refuse_shards()
        super().load_state_dict(saved)

    def _refuse_shards(self) -> None:
        """Each rank has factors of its own rows, which another number of ranks cannot take over."""
        if is_distributed() and (name := next((name for name, p in self.protected if is_sharded(p)), None)):
            raise AlassoError(f"{name} is sharded, and KronALASSO cannot save or load factors of shards; use DDP")
