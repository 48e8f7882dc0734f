r"""KronALASSO: a quadratic for each layer in the shape of its Kronecker-factored curvature, from training alone.

ALASSO gives each weight a spring of its own. Here a parameter W, a matrix of m rows and n columns, has one quadratic

.. math::

    \mathcal L_s(W) = \tfrac{c}{2} \, N \kappa \, \langle \bar L \, D \, \bar R, \; D \rangle, \qquad D = W - \hat W

with a factor for its rows and one for its columns, both positive. They are by-products of training: in each step, the
inputs a of the layer and the gradients g of its outputs tell

.. math::

    L_\text{step} = B f^2 \, \overline{\lVert a \rVert^2} \sum g g^\top, \qquad
    R_\text{step} = \frac{\sum a a^\top}{\sum \lVert a \rVert^2}

with sums and the mean over samples and positions; what the positions of a sample have in common makes L larger
(:mod:`alasso.importance._signed_gradients`). Their product is about the Fisher information of the batch's loss, a mean
over B terms: B is the number of samples and positions at the output, the layer nearest to the loss, which backward
comes to first. Rows whose gradient is zero, of ignored labels and padding, count nowhere. Between what backward tells
the layers and the gradients M that the optimizer has lies a factor f: clipping, a GradScaler, the mean over ranks. The
output's weight shows it: T, the product of its gradient as backward made it with random signs S, against that of its M,

.. math:: f = \langle M S, T \rangle / \langle T, T \rangle.

L and R of a task are the means over its steps, :math:`\bar L` and :math:`\bar R` the means over the N tasks. Where a
layer's inputs cannot be seen, as in an LSTM, :math:`B \, M M^\top` and :math:`M^\top M`, of unit trace, take their
place; a vector, such as a bias, keeps the diagonal :math:`B \, M^2` alone.

The Fisher information is right for one scale of the loss, that of a likelihood. ``scale="fisher"`` divides by the unit
u that the loss is in, so that a loss times 64 is protected 64 times as much, and moves no further than before:

.. math::

    \kappa = \frac{25 \sum_t 1}{\sum_t u_t}, \qquad
    u_t = \max_\text{steps} \; f B \, \operatorname{rms} \lVert \partial \text{loss} / \partial \text{output} \rVert

with the root mean square over the B terms. For a cross-entropy, u is about 1: that of answers that are all wrong.
``scale="path"`` is the paper's Eq. 7 for a whole tensor. The quadratic equals the loss drop along the paths of all
tasks:

.. math::

    \kappa = \frac{\sum_t \max(\omega_t, 0)}{\sum_t q_t}, \qquad
    \omega_t = -\sum_\text{steps} \langle M, \Delta W \rangle \quad (10), \qquad
    q_t = \tfrac12 \langle L_t D_t R_t, D_t \rangle

with :math:`D_t` the move of task t. Factors are sketches of rank r (:mod:`alasso.importance.kronecker`), so a tensor
keeps its anchor and some r (m + n) numbers. The family: Ritter, Botev and Barber, "Online structured Laplace
approximations" (NeurIPS 2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso._distributed import is_distributed, is_sharded, local
from alasso._parameters import Names, some_of
from alasso._passes import task_gradient
from alasso.errors import AlassoError
from alasso.importance._objectives import Head, Objective
from alasso.importance._taps import LossScale, Taps, factors_of_samples, joined
from alasso.importance.kronecker import (
    as_matrix,
    capped,
    diagonal,
    form,
    grown_sketch,
    largest,
    matrix_shape,
    pieces,
    rank_of,
    sketch,
    sketch_of_counts,
    spread,
    times,
    with_unit_trace,
)
from alasso.methods.base import Surrogate
from alasso.methods.settings import Setting, check_choice, check_non_negative
from alasso.regularizer import Loader, Regularizer, WarmScale

Scale = Literal["path", "fisher"]

TINY = 1e-30  # no division by zero
STRENGTH = 25.0  # of c = 1 with the Fisher's scale: serves small set-ups of every kind alike
SUMS = ("unit", "steps", "tasks", "above", "below")  # fields that are never negative
ALL_AT_FIRST = 100  # steps of a task whose factors are all looked at: a short task has no more


class KronState(NamedTuple):
    """State of one parameter, seen as a matrix. Sketches are [Y | d], forms [B | ρ], of rows and of columns.

    Attributes:
        anchor: Ŵ.
        path: ω of the running task, with scale="path".
        unit: u of the running task.
        rows: Σ over the task's steps of L.
        columns: Σ over the task's steps of R.
        steps: How many steps they stand for.
        past_rows: Σ over tasks of L.
        past_columns: Σ over tasks of R.
        tasks: Their number N.
        above: Σ over tasks of κ's numerator.
        below: Σ over tasks of κ's denominator.
        row_form: Form of N κ L̄.
        column_form: Form of R̄.
    """

    anchor: Tensor
    path: Tensor
    unit: Tensor
    rows: Tensor
    columns: Tensor
    steps: Tensor
    past_rows: Tensor
    past_columns: Tensor
    tasks: Tensor
    above: Tensor
    below: Tensor
    row_form: Tensor
    column_form: Tensor


@dataclass(frozen=True)
class KronSurrogate(Surrogate[KronState]):
    """KronALASSO's settings and functions; :class:`KronALASSO` explains the settings."""

    c: float = 1.0
    rank: int = 32
    every: int = 10
    scale: Scale = "fisher"
    gamma: float = 1.0

    State: ClassVar[type] = KronState
    partial: ClassVar[frozenset[str]] = frozenset({"path"})
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = dict.fromkeys(SUMS, (0, math.inf))
    learns_from_steps: ClassVar[bool] = True
    anchors_as_weights: ClassVar[bool] = True
    warm_strength: ClassVar[float] = 1.0

    @property
    def observes_path(self) -> bool:  # type: ignore[override]
        return self.scale == "path"

    def __post_init__(self) -> None:
        check_non_negative(c=self.c, rank=self.rank, every=self.every, gamma=self.gamma)
        for name, value in (("rank", self.rank), ("every", self.every)):
            if not isinstance(value, int) or not 1 <= value < 2**31:
                raise AlassoError(f"{name} must be a whole number, one or more, not {value!s:.60}")
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
        return torch.outer(0.5 * diagonal(s.row_form), diagonal(s.column_form)).view_as(s.anchor)

    def typical_stiffness(self, s: KronState) -> tuple[Tensor, Tensor]:
        (soft_rows, stiff_rows), (soft_columns, stiff_columns) = spread(s.row_form), spread(s.column_form)
        return 0.5 * self.c * soft_rows * soft_columns, 0.5 * self.c * stiff_rows * stiff_columns

    def stiffest(self, s: KronState) -> Tensor:
        return self.c * largest(s.row_form) * largest(s.column_form)

    def capped(self, s: KronState, most: float | Tensor) -> KronState:
        """Return the state without directions that SGD could not follow.

        Args:
            s: The state.
            most: The largest curvature that the penalty may have.

        Returns:
            The state, its rows no stiffer than that goes with the stiffest column; soft ones as they were.
        """
        return s._replace(row_form=capped(s.row_form, most / (self.c * largest(s.column_form)).clamp(min=TINY)))

    # -- a step ----------------------------------------------------------------------------------------------

    def before_step_(
        self,
        s: KronState,
        g: Tensor,
        theta: Tensor,
        total: Tensor,
        strength: float | Tensor,
        most: float | Tensor | None = None,
    ) -> None:
        # ω gets ⟨M, D⟩, which after_step_ takes away at the new D. With the forms of both factors the gradient is
        # ρ D ρᵀ, weight by weight, and two thin products, through rows that fit a CPU's cache:
        #   L̄ D R̄ = ρ D ρᵀ + (ρ D B + B' B'ᵀ D B) Bᵀ + B' (B'ᵀ D ρᵀ)     with B' and ρ of L̄, B and ρᵀ of R̄
        if self.observes_path:
            _add_along_move_(s.path, g, theta, s.anchor, 1.0)
        if isinstance(strength, float) and strength == 0:
            return
        if most is not None:
            s = self.capped(s, most)
        L = s.row_form * (self.c * strength)
        if theta.dim() < 2:
            total.addcmul_((L * s.column_form).view_as(theta), theta - s.anchor)
            return
        W, W_hat, T = as_matrix(theta), as_matrix(s.anchor), as_matrix(total)
        B_rows, rho_rows = L[:, :-1], L[:, -1:]
        B_columns, rho_columns = s.column_form[:, :-1], s.column_form[:, -1:]
        rho = rho_columns.mT.contiguous()
        D_B, Dt_B = W.new_empty(len(B_rows), B_columns.shape[1]), W.new_zeros(len(B_columns), B_rows.shape[1])
        for w, w_hat, t, d_b, b, rho_m in pieces(W, W_hat, T, D_B, s.row_form[:, :-1], rho_rows):
            D = w - w_hat
            torch.mm(D, B_columns, out=d_b)
            Dt_B.addmm_(D.mT, b)
            t.addcmul_(D.mul_(rho), rho_m)
        U = torch.addmm(rho_rows * D_B, B_rows, s.row_form[:, :-1].mT @ D_B)
        V = rho_columns * Dt_B
        for left, right in ((U, B_columns), (B_rows, V)):
            T.addmm_(left.to(T.dtype), right.mT.to(T.dtype))
        if T.data_ptr() != total.data_ptr():  # its memory lies in another order, as channels_last does
            total.copy_(T.view_as(total))

    def after_step_(self, s: KronState, g: Tensor, theta: Tensor) -> None:
        if self.observes_path:
            _add_along_move_(s.path, g, theta, s.anchor, -1.0)

    def add_factors_(
        self, s: KronState, g: Tensor, loss: LossScale, seen: tuple[Tensor, Tensor] | None = None, weight: int = 1
    ) -> None:
        """Add a step's L and R to the task's.

        Args:
            s: The state, changed in place.
            g: M, of θ's shape.
            loss: What the layer nearest to the loss told.
            seen: Sketches of the layer's G ⊗ A. Without them, or if it has just grown, M tells the shape.
            weight: For how many steps it stands.
        """
        M, loss = as_matrix(g), LossScale(*(number.to(s.unit) for number in loss))
        size = torch.dot(M.reshape(-1), M.reshape(-1))
        if s.anchor.dim() < 2:
            rows, columns = M.square(), torch.ones_like(s.columns)
        elif seen is not None and (seen[0].shape, seen[1].shape) == (s.rows.shape, s.columns.shape):
            rows, columns = seen[0] * loss.factor.square(), seen[1]
        else:
            rows, columns = sketch(M.mT, rank_of(s.rows)), sketch(M, rank_of(s.columns))
        usable = (size > 0) & torch.isfinite(rows[:, -1].sum() + loss.unit)
        s.rows.add_(torch.where(usable, rows * loss.terms, 0.0), alpha=weight)
        s.columns.add_(torch.where(usable, with_unit_trace(columns), 0.0), alpha=weight)
        s.steps.add_(usable, alpha=weight)
        s.unit.copy_(torch.where(usable, torch.maximum(s.unit, loss.unit), s.unit))

    # -- the end of a task -----------------------------------------------------------------------------------

    def consolidate(self, s: KronState, theta: Tensor, importance: Tensor | None = None) -> KronState:
        if not bool(s.steps):  # the task did not train it
            return KronState(*(t.clone() for t in s._replace(anchor=theta)))
        L, R = s.rows / s.steps, s.columns / s.steps
        past = {
            "past_rows": self.gamma * s.past_rows + L,
            "past_columns": self.gamma * s.past_columns + R,
            "tasks": self.gamma * s.tasks + 1,
        }
        if self.scale == "path":
            D = as_matrix(theta - s.anchor)
            above, below = s.path.clamp(min=0), 0.5 * (times(form(L), D, form(R)) * D).sum()
            if bool((s.tasks > 0) & (s.below == 0)):  # the past was measured, and has its size: the first κ keeps it
                below = torch.where(above > 0, below, 0.0)
                past["past_rows"] = L + self.gamma * s.past_rows * torch.where(above > 0, below / above, 1.0)
        else:
            above, below = torch.full_like(s.unit, STRENGTH), s.unit
        past |= {"above": self.gamma * s.above + above, "below": self.gamma * s.below + below}
        return self.with_past(theta, past)

    def warm_start(self, theta: Tensor, importance: Tensor) -> KronState:
        # The factors are the sums of the importance by rows and by columns.
        omega, s = as_matrix(importance), self.init(theta)
        columns = with_unit_trace(sketch_of_counts(omega.sum(0), rank_of(s.columns)))
        rows = sketch_of_counts(omega.sum(1), rank_of(s.rows))
        return self._measured(s._replace(rows=rows, columns=columns, steps=s.steps + 1), 1.0)

    def _measured(self, s: KronState, scale: float | Tensor) -> KronState:
        """Return the state after one task in which weights stood still, with Ω·d² = scale ⟨L D R, D⟩."""
        strength = 1.0 if self.scale == "path" else STRENGTH
        s = s._replace(rows=s.rows * (2 * scale / strength), unit=torch.ones_like(s.unit))
        return self.consolidate(s, s.anchor)

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
        kappa = torch.where(s.below == 0, 1.0, s.above / s.below)
        row_form = form(s.past_rows)  # of N L̄
        row_form[:, :-1] *= kappa.sqrt()
        row_form[:, -1] *= kappa
        return s._replace(row_form=row_form, column_form=form(s.past_columns / s.tasks))

    def fits(self, field: str, tensor: Tensor, shape: tuple[int, ...]) -> bool:
        own = getattr(self.init(torch.empty(shape, device="meta")), field)
        if own.dim() < 2 or len(shape) < 2 or field == "anchor":
            return bool(tensor.shape == own.shape)
        return tensor.dim() == 2 and len(tensor) == len(own) and 0 <= rank_of(tensor) <= len(own)  # of any rank

    def goes_together(self, s: KronState) -> bool:
        # a task's sketches have the ranks of the past's, and all diagonals are positive
        alike = s.rows.shape == s.past_rows.shape and s.columns.shape == s.past_columns.shape
        factors = (s.rows, s.columns, s.past_rows, s.past_columns, s.row_form, s.column_form)
        return alike and not any(bool((local(factor)[:, -1] < 0).any()) for factor in factors)

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


def _add_along_move_(path: Tensor, g: Tensor, theta: Tensor, anchor: Tensor, factor: float) -> None:
    """Add ⟨M, W − Ŵ⟩ to ω, times a factor."""
    for m, w, w_hat in pieces(g, theta, anchor):
        path.add_(torch.dot(m.reshape(-1), (w - w_hat).reshape(-1)), alpha=factor)


class KronALASSO(Regularizer):
    """ALASSO in the shape of each layer's Kronecker-factored curvature: the method to start with.

    It needs no data at the end of a task and no search. :meth:`attach` also puts hooks on the model's linear layers,
    convolutions and embeddings, which see what these get and what they are told. Attach before you train, and again
    when the model got new layers. They break a compiled model's graph. FSDP2 cuts a weight into matrices of their own:
    there the gradient alone tells the shape, and a state of shards cannot be saved.

    Args:
        model: The model to protect.
        c: Weight of the past against the present.
        rank: Directions that each factor keeps, beside a diagonal.
        every: Look at the factors in every so many steps, after the first hundred; a path is followed in all.
        scale: "fisher": the Fisher information in the loss's own unit, which the layer nearest to the loss tells.
            "path": the surrogate rises by the loss drop along the path of training; no layer has to be known.
        gamma: Share of the past that each new task keeps, from 0 to 1; below 1 for streams without an end.
        exclude: Shell-style patterns of parameter names to leave alone.
        include: Patterns of those to protect, and no others; None for all. What is excluded stays so.

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
        every: int = 10,
        scale: Scale = "fisher",
        gamma: float = 1.0,
        exclude: Names = (),
        include: Names = None,
    ) -> None:
        self.taps = Taps()
        super().__init__(model, KronSurrogate(c, rank, every, scale, gamma), exclude, include)

    def attach(self, optimizer: Optimizer, compile: bool = False, *, every: int | None = None) -> KronALASSO:
        super().attach(optimizer, compile, every=every)
        self.taps.put(self)
        if self.scale == "fisher" and not self.taps:
            self.detach()
            raise AlassoError(
                "no linear layer, convolution or embedding of torch's is here whose gradients tell the loss's scale; "
                'use KronALASSO(model, scale="path")'
            )
        return self

    def detach(self) -> None:
        super().detach()
        self.taps.remove()

    def look(self) -> None:
        super().look()
        if self.taps:
            self.taps.put(self)

    def _measured_states(self, scale: WarmScale, loader: Loader, objective: Objective, head: Head | None) -> Any:
        with self.taps.set_aside(self):
            if any(is_sharded(parameter) for _, parameter in self.protected):
                return super()._measured_states(scale, loader, objective, head)
            states, steepness = factors_of_samples(self, loader, objective, head)
        factor = self.surrogate.warm_strength / steepness if scale == "auto" else scale
        return {name: self.surrogate._measured(s, factor) for name, s in states.items()}

    @property
    def step_kind(self) -> int:
        """Weight of the step to come in the means over a task's steps; 0 if its factors are not looked at."""
        if self.rounds < ALL_AT_FIRST:
            return 1
        return self.every if self.rounds % self.every == 0 else 0

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        super().before_step(optimizer)
        if not (weight := self.step_kind):
            return
        surrogate: KronSurrogate = self.protected.surrogate  # type: ignore[assignment]
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)

        def gradient_of(p: nn.Parameter) -> Tensor:
            assert p.grad is not None
            return task_gradient(local(p.grad).detach(), 1.0 if scale is None else scale, found_inf)

        held = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        if not (trained := {name: p for p in held if (name := self.protected.name_of(p)) is not None}):
            return
        states = {name: self.protected.state_of(name, p) for name, p in trained.items()}
        if sparse := [name for name, p in trained.items() if p.grad is not None and p.grad.is_sparse]:
            raise AlassoError(f"{sparse[0]} has a sparse gradient, which tells no factors; use sparse=False")
        loss = self.taps.loss_scale(gradient_of, self.protected.states, next(iter(states.values())).unit)
        seen = self.taps.take(trained, states)
        for name, p in trained.items():
            state = states[name]
            told = joined(seen[name]) if seen[name] and not is_sharded(p) else None  # a shard is a matrix of its own
            self.notes.factors[name] = (
                "diagonal" if p.dim() < 2 else "of its gradient" if told is None else "of the layer"
            )
            surrogate.add_factors_(state, gradient_of(p).to(state.unit.dtype), loss, told, weight)

    def _check_was_trained(self) -> None:
        super()._check_was_trained()
        trained = {name: s for name, s in self.protected.states.items() if bool(s.steps)}
        if self.scale == "fisher" and (blind := [name for name, s in trained.items() if not bool(s.unit)]):
            raise AlassoError(
                f"no layer that hooks can see has told the loss's scale for {some_of(blind)}: their forward was not "
                'called; use KronALASSO(model, scale="path")'
            )

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
