"""What each choice inside KronALASSO gives: scale, sums over tasks, path, sampling, rank, rest, asymmetry, γ.

    python perf/kron_choices.py permuted-digits --set hidden=400 --tasks 20 [--only c= --jobs 4 --record]

Each choice differs from the defaults in one thing. Runs use seeds that no reported result has, and are measured on
examples held out of training; the test examples are not touched.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _measure import arguments, keep, parsed, table
from torch import Tensor

from alasso.bench.config import RunConfig
from alasso.bench.training.run import run
from alasso.importance import kronecker
from alasso.importance.kronecker import as_matrix, form, times, with_unit_trace
from alasso.methods import kron
from alasso.methods.kron import KronALASSO, KronState, KronSurrogate

FIGURES = ("A", "F", "learning_accuracy")
_consolidate = KronALASSO.consolidate


# -- choices that are no settings ----------------------------------------------------------------------------


class KappaOfEachTask(KronSurrogate):
    """Each task's factor has that task's own κ, in place of one κ by the sums over tasks."""

    def with_past(self, theta: Tensor, past: dict[str, Tensor]) -> KronState:
        return super().with_past(theta, {**past, "above": past["tasks"], "below": past["tasks"]})

    def consolidate(self, s: KronState, theta: Tensor, importance: Tensor | None = None) -> KronState:
        if bool(s.steps):
            L, R, D = s.rows / s.steps, s.columns / s.steps, as_matrix(theta - s.anchor)
            rise = 0.5 * (times(form(L), D, form(R)) * D).sum()
            s = s._replace(rows=s.rows * torch.where(rise > 0, s.path.clamp(min=0) / rise, 0.0))
        return super().consolidate(s, theta, importance)


class LateFactors(KronSurrogate):
    """Factors forget the earlier steps of their task: a mean over the last hundred or so that were looked at."""

    def add_factors_(self, s: KronState, *args: Any) -> None:
        for total in (s.rows, s.columns, s.steps):
            total.mul_(0.99)
        super().add_factors_(s, *args)


class EqualSteps(KronSurrogate):
    """Each step's L has trace one, whatever the size of its gradient."""

    def add_factors_(self, s: KronState, *args: Any) -> None:
        rows = s.rows.clone()
        super().add_factors_(s, *args)
        s.rows.copy_(rows + with_unit_trace(s.rows - rows) * args[-1])


class SizeOfTheGradient(KronSurrogate):
    """L has the size of B‖M‖², in place of that of G ⊗ A."""

    def add_factors_(self, s: KronState, g: Tensor, loss: Any, *args: Any) -> None:
        rows = s.rows.clone()
        super().add_factors_(s, g, loss, *args)
        s.rows.copy_(rows + with_unit_trace(s.rows - rows) * (args[-1] * loss.terms * g.square().sum()))


class RoundedAnchors(KronSurrogate):
    """Anchors in bfloat16, of float32 weights: they pull by a rounding error though nothing moved."""

    def with_past(self, theta: Tensor, past: dict[str, Tensor]) -> KronState:
        return super().with_past(theta.bfloat16().to(theta.dtype), past)


class PathAfter(KronSurrogate):
    """ω with the gradient after each move, of the next batch, in place of the one before it."""

    places = {}  # an anchor, and the weights at the step before, by the anchor's id  # noqa: RUF012

    def before_step_(self, s: KronState, g: Tensor, theta: Tensor, *args: Any) -> None:
        _, before = self.places.setdefault(id(s.anchor), (s.anchor, theta.clone()))
        path = s.path.clone()
        super().before_step_(s, g, theta, *args)
        s.path.copy_(path - (g * (theta - before)).sum())
        before.copy_(theta)

    def after_step_(self, s: KronState, g: Tensor, theta: Tensor) -> None:
        pass

    def consolidate(self, s: KronState, theta: Tensor, importance: Tensor | None = None) -> KronState:
        self.places.pop(id(s.anchor), None)
        return super().consolidate(s, theta, importance)


class Sided(KronSurrogate):
    """The paper's idea in the eigenbasis: directions are stiffer, by ``a``, on the side that training never saw.

    Coordinates are those of D between the factors' bases. A task that moved by D came from −D, so a later move with
    the sign of D goes where its training never was.
    """

    a, side = 2.0, 1
    moves = {}  # an anchor, the way there from the first weights, and both bases, by the anchor's id  # noqa: RUF012

    def consolidate(self, s: KronState, theta: Tensor, importance: Tensor | None = None) -> KronState:
        new = super().consolidate(s, theta, importance)
        if theta.dim() > 1:
            way = as_matrix(theta - s.anchor)
            if id(s.anchor) in self.moves:
                way = way + self.moves.pop(id(s.anchor))[1]
            self.moves[id(new.anchor)] = new.anchor, way, basis(new.row_form), basis(new.column_form)
        return new

    def penalty_grad(self, theta: Tensor, s: KronState) -> Tensor:
        grad = super().penalty_grad(theta, s)
        if id(s.anchor) not in self.moves:
            return grad
        _, way, U, V = self.moves[id(s.anchor)]
        unseen = self.side * (U.mT @ as_matrix(theta - s.anchor) @ V) * (U.mT @ way @ V) > 0
        return grad + (U @ ((U.mT @ as_matrix(grad) @ V) * unseen) @ V.mT).view_as(grad) * (self.a - 1)

    def before_step_(
        self, s: KronState, g: Tensor, theta: Tensor, total: Tensor, strength: float | Tensor, most: Any = None
    ) -> None:
        super().before_step_(s, g, theta, total, 0.0)
        if not isinstance(strength, float) or strength:
            total.add_(self.penalty_grad(theta, s) * strength)


def basis(packed: Tensor) -> Tensor:
    """The orthonormal basis of B's columns."""
    U, values, _ = torch.linalg.svd(packed[:, :-1], full_matrices=False)
    return U * (values > 1e-6 * values.max())


class SidedTheOtherWay(Sided):
    """The same on the side that training came from, to tell the side from the stiffness."""

    side = -1


def stiffer_vectors(factor: float) -> type[KronSurrogate]:
    """Biases and norms by another factor than matrices."""

    class Vectors(KronSurrogate):
        def with_past(self, theta: Tensor, past: dict[str, Tensor]) -> KronState:
            new = super().with_past(theta, past)
            return new if theta.dim() > 1 else new._replace(row_form=new.row_form * factor)

    return Vectors


def one_kappa(reg: KronALASSO) -> None:
    """All tensors share one κ, in place of one each."""
    states = [s for s in reg.protected.states.values() if s.below > 0]
    shared = sum(s.above for s in states) / sum(s.below for s in states)
    for s in states:
        factor = torch.where(s.above > 0, shared / (s.above / s.below), 1.0)
        s.row_form[:, :-1] *= factor.sqrt()
        s.row_form[:, -1] *= factor


def nothing(reg: KronALASSO) -> None:
    """The default."""


def rest_of(stays: float, spread: float) -> Callable[[Tensor], Tensor]:
    """Another share of a factor's rest for where it is, and for all directions alike."""

    def form(packed: Tensor) -> Tensor:
        made = kronecker.form(packed)
        B, d = made[:, :-1], packed[:, -1]
        rest = (d - B.square().sum(1)).clamp(min=0)
        return torch.cat([B, (stays * rest + spread * rest.mean())[:, None]], 1)

    return form


@dataclass(frozen=True)
class Choice:
    """What differs from the defaults."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    surrogate: type[KronSurrogate] = KronSurrogate
    form: Callable[[Tensor], Tensor] = kronecker.form
    finish: Callable[[KronALASSO], None] = nothing  # after each task's end


def sided(a: float, kind: type[Sided]) -> type[Sided]:
    return type(kind.__name__, (kind,), {"a": a})


PATH = {"scale": "path"}
CHOICES = {
    "defaults": Choice(),
    **{f"c={c}": Choice({"c": c}) for c in (0.125, 0.25, 0.5, 0.8, 1.2, 1.6, 3.2, 6.4)},
    **{f"path, c={c}": Choice({"c": c, **PATH}) for c in (0.3, 1.0, 3.0, 10.0)},
    "path, κ of each task": Choice(PATH, KappaOfEachTask),
    **{f"path, one κ for all, c={c}": Choice({"c": c, **PATH}, finish=one_kappa) for c in (0.3, 1.0, 3.0)},
    **{f"path, ω after the move, c={c}": Choice({"c": c, **PATH}, PathAfter) for c in (1.0, 2.0)},
    **{f"rank={rank}": Choice({"rank": rank}) for rank in (4, 8, 16, 64, 400)},
    **{f"every={every}": Choice({"every": every}) for every in (1, 16)},
    "anchors in bfloat16": Choice(surrogate=RoundedAnchors),
    "late factors": Choice(surrogate=LateFactors),
    "equal steps": Choice(surrogate=EqualSteps),
    "size of the gradient": Choice(surrogate=SizeOfTheGradient),
    "rest stays": Choice(form=rest_of(1.0, 0.0)),
    "rest spread": Choice(form=rest_of(0.0, 1.0)),
    "rest × 3": Choice(form=rest_of(1.5, 1.5)),
    "no rest": Choice(form=rest_of(0.0, 0.0)),
    **{f"a={a} unseen": Choice(surrogate=sided(a, Sided)) for a in (1.5, 2.0, 3.0)},
    "a=2.0 seen": Choice(surrogate=sided(2.0, SidedTheOtherWay)),
    "vectors × 0.1": Choice(surrogate=stiffer_vectors(0.1)),
    "vectors × 10": Choice(surrogate=stiffer_vectors(10.0)),
    **{f"gamma={gamma}": Choice({"gamma": gamma}) for gamma in (0.8, 0.9, 0.95)},
}


# -- runs ----------------------------------------------------------------------------------------------------


def one_run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains with a choice, in a process of its own; returns its figures."""
    torch.set_num_threads(options.threads or 1)
    choice = CHOICES[name]
    kron.KronSurrogate, kron.form = choice.surrogate, choice.form  # type: ignore[misc]

    def then_finish(reg: KronALASSO, *args: Any, **kwargs: Any) -> None:
        _consolidate(reg, *args, **kwargs)
        choice.finish(reg)

    KronALASSO.consolidate = then_finish  # type: ignore[method-assign]
    changes = dict(pair.split("=") for pair in options.set) | dict(choice.settings)
    config = RunConfig.for_benchmark(
        options.benchmark,
        "kron-alasso",
        tasks=options.tasks,
        epochs=options.epochs,
        seed=seed,
        validation=True,
        **changes,
    )
    found = run(config, data_dir=options.data_dir, device=options.device).metrics
    return {"choice": name, "seed": seed, **{figure: round(float(found[figure] or 0), 4) for figure in FIGURES}}


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], rounds=1)
    parser.add_argument("benchmark", help="a benchmark of alasso list")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of every run")
    parser.add_argument("--tasks", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--only", default=".", help="choices whose names match")
    parser.add_argument("--seeds", type=int, nargs="*", default=[10, 11])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data-dir", type=Path, default=None)
    options = parsed(parser)
    rows = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = [
            pool.submit(one_run, name, seed, options)
            for name in CHOICES
            if re.search(options.only, name)
            for seed in options.seeds
        ]
        for done in as_completed(waiting):
            if done.exception():
                print(done.exception(), file=sys.stderr)
            else:
                rows.append(done.result())
                print(rows[-1], file=sys.stderr, flush=True)
    names = [name for name in CHOICES if any(row["choice"] == name for row in rows)]
    rows.sort(key=lambda row: (names.index(row["choice"]), row["seed"]))
    means = {
        name: [statistics.mean(row[figure] for row in rows if row["choice"] == name) for figure in FIGURES]
        for name in names
    }
    title = f"{options.benchmark}, {options.tasks} tasks, {options.epochs or 'the usual'} epochs, held-out examples"
    table(title, ["", *FIGURES], [[name, *(f"{value:.3f}" for value in values)] for name, values in means.items()])
    options.data_dir = None
    keep("kron_choices", options, {"runs": rows})


if __name__ == "__main__":
    main()
