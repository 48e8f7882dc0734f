r"""Is the penalty strong enough? A table to read between two tasks, and one verdict.

Two forces decide what the next task does to a tensor: its own gradient g, and the pull of the past, which grows with
the distance from the anchor. A move of length r costs :math:`k r^2`, with k the stiffness; what a task gains by it is
:math:`\lVert g \rVert r` at most. They are equal at the reach

.. math:: r = \lVert g \rVert / k,

which is measured in moves: the farthest that a task has moved the tensor so far. What g will be, nobody knows before
the next task, so it is taken from the last one, late in it. Looking at the steps 1, 2, 4, 8 and so on costs next to
nothing (:class:`Notes`).

A penalty is too weak to matter if even the tensors that are held most may go far, in their stiffest directions; it is
nearly frozen if a typical tensor may go nowhere, not even in its soft ones. ``perf/everywhere.py`` compares the verdict
with what then happens.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso._compile import is_recording
from alasso._distributed import is_sharded, local, sum_over_shards
from alasso._passes import task_gradient
from alasso._state_dict import state_dtype

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer

log = logging.getLogger("alasso")

TOO_WEAK, BALANCED, NEARLY_FROZEN = "too weak to matter", "balanced", "nearly frozen"
UNKNOWN, NO_PENALTY = "unknown", "no penalty"
FAR, NEAR = 5.0, 0.1  # moves within reach: more is too weak, less is nearly frozen
WIDTH, MOST_ROWS = 80, 24


def is_looked_at(steps: int) -> bool:
    """Return whether gradients are looked at in the step that follows this many: in the steps 1, 2, 4, 8 and so on."""
    return steps & (steps + 1) == 0


class Notes:
    """What a regularizer notes of its tasks for the summary: two numbers and a word for each tensor.

    Attributes:
        gradient: {name: ‖g‖²} of the task's loss, at the last step that was looked at.
        steepest: {name: ‖g‖²} of the task's loss, the largest of the task.
        moved: {name: ‖d‖²} of the farthest move that a task has made.
        factors: {name: where the factors of its curvature are from}, for a method that has some.
    """

    def __init__(self) -> None:
        self.gradient: dict[str, Tensor] = {}
        self.steepest: dict[str, Tensor] = {}
        self._earlier: dict[str, Tensor] = {}  # the steepest before the step that was looked at last
        self._looked_at = -1
        self.moved: dict[str, Tensor] = {}
        self.factors: dict[str, str] = {}

    @torch.no_grad()
    def see_gradients(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer, steps: int) -> None:
        """Note the gradients of a step that this optimizer is about to make, after so many; anew if that one raised."""
        if steps != self._looked_at:
            self._looked_at, self._earlier = steps, dict(self.steepest)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for name, parameter in parameters:
            if id(parameter) in held and parameter.grad is not None and not is_recording(parameter.device):
                g = task_gradient(local(parameter.grad).to_dense(), 1.0 if scale is None else scale, found_inf)
                length = torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
                self.gradient[name] = now = sum_over_shards(length.square(), parameter)
                before = self._earlier.get(name)
                self.steepest[name] = now if before is None else torch.maximum(now, before.to(now))

    def task_ends(self, moves: Mapping[str, Tensor]) -> None:
        """Note each tensor's ‖d‖²; the next task has a steepest gradient of its own."""
        self.steepest.clear()
        self._looked_at = -1
        for name, move in moves.items():
            before = self.moved.get(name)
            self.moved[name] = move if before is None else torch.maximum(move, before.to(move.device))

    def of(self, name: str, state: Any) -> dict[str, Any]:
        """Return the notes on one tensor as they are saved beside its state; zero and no word where there are none."""
        none = state.anchor.new_zeros((), dtype=state_dtype(state.anchor))
        numbers = {field: getattr(self, field).get(name, none).to(none) for field in ("gradient", "steepest", "moved")}
        return {**numbers, "factors": self.factors.get(name, "")}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what :meth:`of` returned, by name."""
        for field in ("gradient", "steepest", "moved", "factors"):
            setattr(self, field, {name: note[field] for name, note in saved.items()})


@dataclass(frozen=True)
class TensorSummary:
    """One tensor's line.

    Attributes:
        name: The parameter's name.
        weights: How many there are.
        stiffness: The mean factor of d², in the directions that the past holds most; of plain springs, in all.
        moved: The farthest that a task has moved a weight, as a root mean square; NaN if none has.
        reach: How far a weight may go, likewise, before the past outweighs the gradient; infinite without stiffness.
        reach_elsewhere: The same in the directions that the past leaves soft.
        factors: Where the factors of its curvature are from; empty for plain springs.
    """

    name: str
    weights: int
    stiffness: float
    moved: float
    reach: float
    reach_elsewhere: float
    factors: str = ""


@dataclass(frozen=True)
class Summary:
    """What :meth:`Regularizer.summary` returns; printed, it is a table.

    Attributes:
        method: The method's name.
        tasks: Number of tasks consolidated so far.
        tensors: The protected tensors.
        moves: How many times as far as a task has moved them the tensors may go where they are held most: the harmonic
            mean over the tensors, in their stiffest directions. NaN if that is unknown.
        moves_elsewhere: The same of a typical tensor: the geometric mean, in their soft directions.
    """

    method: str
    tasks: int
    tensors: tuple[TensorSummary, ...]
    moves: float
    moves_elsewhere: float

    @property
    def verdict(self) -> str:
        """ "too weak to matter", "balanced" or "nearly frozen"; "no penalty" or "unknown" where there is none."""
        if not any(tensor.stiffness for tensor in self.tensors):
            return NO_PENALTY
        if math.isnan(self.moves):
            return UNKNOWN
        if self.moves_elsewhere < NEAR:
            return NEARLY_FROZEN
        return TOO_WEAK if self.moves > FAR else BALANCED

    @property
    def sentence(self) -> str:
        """The verdict and its reason."""
        if self.verdict == NO_PENALTY:
            return "no penalty: nothing holds the weights in the next task"
        if self.verdict == UNKNOWN:
            return "unknown: no task was observed from its first step to its end"
        most, elsewhere = short(self.moves), short(self.moves_elsewhere)
        far = f"{most} times as far as a task moves them where the past holds most, {elsewhere} times elsewhere"
        return f"{self.verdict}; weights may go {far}"

    def __str__(self) -> str:
        tasks = "1 task" if self.tasks == 1 else f"{self.tasks} tasks"
        weights = sum(tensor.weights for tensor in self.tensors)
        title = f"{self.method} after {tasks}: {len(self.tensors)} tensors, {weights:,} weights"
        return "\n".join([title, *table(self.tensors), *textwrap.wrap(f"Verdict: {self.sentence}", WIDTH)])


def table(tensors: Sequence[TensorSummary]) -> list[str]:
    """Return the lines of a table: the largest tensors in the model's order, and what is typical of all."""
    by_size = sorted(range(len(tensors)), key=lambda i: -tensors[i].weights)
    shown = [tensors[i] for i in sorted(by_size[:MOST_ROWS])]
    columns = ["stiffness", "moved", "reach"]
    heads = ["tensor", "stiffness", "moved", "may go"]
    if has_factors := any(tensor.factors for tensor in tensors):
        columns.append("reach_elsewhere")
        heads += ["elsewhere", "factors"]
    rows = [[tensor.name, *(short(getattr(tensor, column)) for column in columns), tensor.factors] for tensor in shown]
    if more := len(tensors) - len(shown):
        rows.append([f"and {more} smaller", *[""] * len(columns), ""])
    middles = (short(typical(getattr(tensor, column) for tensor in tensors)) for column in columns)
    rows = [heads, *(row if has_factors else row[:-1] for row in rows), ["typical", *middles]]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(heads))]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    return [line(row, widths, len(columns)) for row in rows]


def line(row: Sequence[str], widths: Sequence[int], numbers: int) -> str:
    """Return a row of the table: a name, which keeps its end if it is too long, numbers, and a word."""
    name, *cells = row
    name = name if len(name) <= widths[0] else "…" + name[1 - widths[0] :]
    placed = [name.ljust(widths[0])]
    placed += [cell.rjust(width) for cell, width in zip(cells[:numbers], widths[1:], strict=False)]
    return "  ".join([*placed, *cells[numbers:]]).rstrip()


def short(number: float) -> str:
    """Return two digits of a number.

    >>> short(0.01234), short(1234.5), short(1.2e-7), short(float("nan"))
    ('0.012', '1234', '1.2e-07', '-')
    """
    if math.isnan(number):
        return "-"
    return f"{number:.0f}" if 10 <= number < 1e5 else f"{number:.2g}"


@torch.no_grad()
def summary_of(regularizer: Regularizer) -> Summary:
    """Return the summary of a regularizer; with shards, the same on all ranks."""
    regularizer.look()
    tensors = tuple(summary_of_one(regularizer, name, parameter) for name, parameter in regularizer.protected)
    known = [tensor for tensor in tensors if tensor.moved > 0 and 0 < tensor.reach < math.inf]
    held = [tensor.moved / tensor.reach for tensor in known]
    return Summary(
        regularizer.method,
        regularizer.tasks,
        tensors,
        moves=len(held) / sum(held) if held else math.nan,
        moves_elsewhere=typical(tensor.reach_elsewhere / tensor.moved for tensor in known),
    )


def summary_of_one(regularizer: Regularizer, name: str, parameter: nn.Parameter) -> TensorSummary:
    """Return one tensor's line."""
    notes, surrogate = regularizer.notes, regularizer.surrogate
    state, weights = regularizer.protected.state_of(name, parameter), max(parameter.numel(), 1)
    sums = state.anchor.new_zeros(2, dtype=state_dtype(state.anchor))
    if state.anchor.numel():  # a rank may have no part of a small tensor
        sums = torch.stack(surrogate.typical_stiffness(state)) * state.anchor.numel()
    soft, stiff = (sum_over_shards(sums, parameter) / weights).tolist()
    seen = (float(of.get(name, 0.0)) or math.nan for of in (notes.gradient, notes.moved))
    gradient, moved = (math.sqrt(squares / weights) for squares in seen)
    return TensorSummary(
        name,
        parameter.numel(),
        stiffness=stiff,
        moved=moved,
        reach=gradient / stiff if stiff else math.inf,
        reach_elsewhere=gradient / soft if soft else math.inf,
        factors=notes.factors.get(name, ""),
    )


def typical(ratios: Iterable[float]) -> float:
    """Return the geometric mean of those that are finite and not zero; NaN if none is.

    >>> typical([1.0, 100.0, float("inf")])
    10.0
    """
    logs = [math.log10(ratio) for ratio in ratios if 0 < ratio < math.inf]
    return 10 ** (sum(logs) / len(logs)) if logs else math.nan


def log_verdict(regularizer: Regularizer) -> None:
    """Log the verdict; a sharded model's ranks would have to agree on who listens, and are silent."""
    if not any(is_sharded(parameter) for _, parameter in regularizer.protected):
        summary = summary_of(regularizer)
        log.info("%s after task %d: %s", summary.method, summary.tasks, summary.sentence)
