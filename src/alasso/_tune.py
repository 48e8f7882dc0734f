"""Which strength of the past is best: a few trainings of your own loop, scored on held-out data.

Only the strength is searched, ``c`` or ``lam``: it is what differs most between models, and accuracy over its logarithm
has one hill. The climb begins where :meth:`Regularizer.summary` calls the first task's past balanced, which costs no
training, goes up in tens, then in finer steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from alasso._summary import NEARLY_FROZEN, TOO_WEAK, Summary, short
from alasso.errors import AlassoError, DivergedError
from alasso.methods.kron import KronALASSO
from alasso.regularizer import Regularizer

Task = TypeVar("Task")

RANGE = 100.0  # what a study may ask for: so many times as much as the first strength, or as little
STEPS = (10.0, math.sqrt(10.0), 10.0**0.25)  # of the climb, one after another


class Study(Protocol):
    """What is asked of an ``optuna.Study``."""

    def enqueue_trial(self, params: dict[str, Any]) -> None: ...
    def ask(self) -> Any: ...
    def tell(self, trial: Any, values: float) -> Any: ...


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        strength: The strength it was made with.
        score: Mean score over the tasks at its end; −∞ if it diverged.
        scores: Score of each task at its end; empty if it diverged.
    """

    strength: float
    score: float
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` found; printed, it is a table.

    Attributes:
        setting: The name of the setting that was searched, ``"c"`` or ``"lam"``.
        trials: All trainings, in the order they were made.
        method: Makes a regularizer for a model.
    """

    setting: str
    trials: tuple[Trial, ...]
    method: Callable[[nn.Module], Regularizer]

    @property
    def best(self) -> Trial:
        """The training with the highest score; of equal ones the first."""
        return max(self.trials, key=lambda trial: trial.score)

    @property
    def strength(self) -> float:
        """The best strength."""
        return self.best.strength

    def regularizer(self, model: nn.Module) -> Regularizer:
        """Return a regularizer of the best strength.

        Args:
            model: The model to protect.

        Returns:
            The regularizer, attached to nothing.
        """
        regularizer = self.method(model)
        setattr(regularizer, self.setting, self.strength)
        return regularizer

    def __str__(self) -> str:
        rows = [[self.setting, "mean", "tasks"]]
        for trial in sorted(self.trials, key=lambda trial: trial.strength):
            scores = " ".join(f"{score:.3f}" for score in trial.scores) or "diverged"
            mark = "  <- best" if trial == self.best else ""
            rows.append([short(trial.strength), f"{trial.score:.3f}" if trial.scores else "-", scores + mark])
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows)


def tune(
    start: Callable[[], tuple[nn.Module, Optimizer]],
    train: Callable[[nn.Module, Optimizer, Task], object],
    score: Callable[[nn.Module, Task], float],
    tasks: Sequence[Task],
    method: Callable[[nn.Module], Regularizer] = KronALASSO,
    *,
    trainings: int = 6,
    end: Callable[[Regularizer, Task], object] = lambda regularizer, task: regularizer.consolidate(),
    seed: int = 0,
    study: Study | None = None,
) -> Tuned:
    """Find the strength of the past that serves a loop of one's own best.

    Each training goes through all tasks, from a new model. Two or three tasks are enough; take examples for ``score``
    that ``train`` does not see.

    Args:
        start: Returns a new model and its optimizer.
        train: Trains a model on one task, with your own loop.
        score: Returns how well a model does on one task, on held-out data; more is better.
        tasks: What ``train`` and ``score`` are given, two or more.
        method: Makes the regularizer: a class, or a function with settings of your own.
        trainings: How many to make, at most.
        end: Ends a task; for EWC and MAS ``lambda reg, task: reg.consolidate(loader_of(task))``.
        seed: Of torch's random numbers, the same for each training; yours go on as if nothing had happened.
        study: An Optuna study that maximizes, to choose the strengths in place of the climb, within two decades of the
            first one.

    Returns:
        What was found; ``tune(…).regularizer(model)`` is the one to use.

    Raises:
        AlassoError: There are fewer than two tasks, no training to make, no strength to search, or all diverged.

    >>> def start():
    ...     model = nn.Linear(4, 2)
    ...     return model, torch.optim.Adam(model.parameters(), lr=0.1)
    >>> def train(model, optimizer, task):
    ...     optimizer.zero_grad()
    ...     (model(torch.ones(8, 4)) - task).square().mean().backward()
    ...     optimizer.step()
    >>> def score(model, task):
    ...     return -(model(torch.ones(8, 4)) - task).square().mean().item()
    >>> found = tune(start, train, score, [1.0, -1.0])
    >>> found.regularizer(nn.Linear(4, 2)).c == found.strength
    True
    """
    if len(tasks) < 2:
        raise AlassoError(f"tune() needs two tasks or more to see what is forgotten, not {len(tasks)}")
    if trainings < 1:
        raise AlassoError(f"trainings must be a whole number, one or more, not {trainings}")
    trials: list[Trial] = []
    setting = ""

    def trained(strength: float | None) -> Trial:
        nonlocal setting
        torch.manual_seed(seed)
        model, optimizer = start()
        with method(model).attach(optimizer) as regularizer:
            setting = setting or strength_among(regularizer.method, regularizer.settings())
            if strength is not None:
                setattr(regularizer, setting, strength)
            try:
                for i, task in enumerate(tasks):
                    train(model, optimizer, task)
                    end(regularizer, task)
                    if i == 0 and strength is None:
                        begin = balanced(getattr(regularizer, setting), regularizer.summary())
                        setattr(regularizer, setting, begin)
                scores = tuple(float(score(model, task)) for task in tasks)
            except DivergedError:
                scores = ()
            made_with: float = getattr(regularizer, setting)
        mean = sum(scores) / len(scores) if scores else math.nan
        return Trial(made_with, -math.inf, ()) if math.isnan(mean) else Trial(made_with, mean, scores)

    with torch.random.fork_rng():
        trials.append(trained(None))
        if study is None:
            climb(trials, trained, trainings)
        else:
            ask(study, setting, trials, trained, trainings)
    found = Tuned(setting, tuple(trials), method)
    if trials[0].strength == 0:
        raise AlassoError(f"the method's own {setting} is 0, from which no climb leads up; give it another")
    if found.best.score == -math.inf:
        raise AlassoError(f"all {len(trials)} trainings diverged; try a smaller learning rate")
    return found


def climb(trials: list[Trial], trained: Callable[[float], Trial], trainings: int) -> None:
    """Go uphill from the first trial, in ever finer steps.

    Args:
        trials: The trainings made so far; new ones are added.
        trained: Makes a training with a strength.
        trainings: How many trials there may be.
    """
    for step in STEPS:
        center = None
        while center != (best := max(trials, key=lambda trial: trial.score)).strength:
            center = best.strength
            for strength in (center * step, center / step):
                if len(trials) >= trainings:
                    return
                if not any(math.isclose(trial.strength, strength, rel_tol=0.01) for trial in trials):
                    trials.append(trained(strength))
                    if trials[-1].score > best.score:
                        break


def ask(study: Study, setting: str, trials: list[Trial], trained: Callable[[float], Trial], trainings: int) -> None:
    """Let an Optuna study choose the strengths.

    Args:
        study: The study.
        setting: The strength's name.
        trials: The first training; new ones are added.
        trained: Makes a training with a strength.
        trainings: How many trials there may be.
    """
    first = trials[0].strength
    study.enqueue_trial({setting: first})
    for i in range(trainings):
        asked = study.ask()
        strength = asked.suggest_float(setting, first / RANGE, first * RANGE, log=True)
        if i > 0:
            trials.append(trained(strength))
        study.tell(asked, trials[-1].score if trials[-1].scores else -sys.float_info.max)


def strength_among(method: str, settings: Iterable[str]) -> str:
    """Return the name of the setting that weighs the past.

    Args:
        method: The method's name.
        settings: The names of its settings.

    Returns:
        ``"c"`` or ``"lam"``.

    Raises:
        AlassoError: There is none.
    """
    for name in ("c", "lam"):
        if name in settings:
            return name
    raise AlassoError(f"{method} has no strength to search: neither c nor lam")


def balanced(strength: float, summary: Summary) -> float:
    """Return the strength at which weights may go about as far as a task moves them, if the present one is far off."""
    if summary.verdict not in (TOO_WEAK, NEARLY_FROZEN):
        return strength
    return strength * math.sqrt(summary.moves * summary.moves_elsewhere)
