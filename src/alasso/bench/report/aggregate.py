"""Statistics over seeds: the one place where results become means, deviations and differences.

A *group* is all seeds of one config. The page, the figures, ``compare`` and the reproduction all read groups:

    found = groups(results)              # a Group for each config
    found[0].over_seeds("A")             # Mean: value, deviation, count, error
    found[0].curve(accuracy_curve)       # mean and deviation of a curve
    difference(found[0], found[1], "A")  # seed by seed where seeds are shared
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from alasso.bench import metrics
from alasso.bench.config import RunConfig
from alasso.bench.registry import METHODS
from alasso.bench.results import Result

Array = npt.NDArray[np.float64]
Curve = Callable[[Sequence[Sequence[float]]], list[float]]
References = Mapping[tuple[object, ...], Result]  # single-task runs by their stream

#: Measures of a run: key, heading, whether more is better (None: neither).
MEASURES: tuple[tuple[str, str, bool | None], ...] = (
    ("A", "A mean accuracy", True),
    ("F", "F forgetting", False),
    ("I", "I intransigence", False),
    ("std", "std over tasks", False),
    ("learning_accuracy", "learning accuracy", True),
    ("first_task", "first task", True),
    ("seconds", "seconds", None),
)


# -- means and differences ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, with its standard deviation (None: too few) and how many seeds it is of."""

    value: float
    deviation: float | None = None
    count: int = 1

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)


@dataclass(frozen=True)
class Difference:
    """Mean of B − A; its standard error (None: too few seeds); how many seeds were paired, 0 for none."""

    mean: float
    error: float | None
    pairs: int


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """Averages the known values.

    Args:
        values: One value a seed, None where it is not known.

    Returns:
        Their mean and sample standard deviation; None where nothing is known.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Mean(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def mean_and_deviation(values: Array) -> tuple[Array, Array]:
    """Averages over the first axis.

    Args:
        values: (seeds, …).

    Returns:
        Mean and sample standard deviation, which is zero for a single seed.
    """
    return values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """Subtracts seed by seed.

    Args:
        first: Seed → value.
        second: Seed → value.

    Returns:
        Seed → second − first, for the seeds that both have.
    """
    return {seed: second[seed] - first[seed] for seed in sorted(first.keys() & second.keys())}


def difference(first: Group, second: Group, measure: str) -> Difference | None:
    """Compares two groups: over the seeds that both have, pair by pair; without any, as independent samples.

    Args:
        first: A.
        second: B.
        measure: A key of :data:`MEASURES`.

    Returns:
        B − A; None where one of them does not have the measure.
    """
    one, other = mean_of(first.measures[measure]), mean_of(second.measures[measure])
    if one is None or other is None:
        return None
    if apart := mean_of(paired(first.values(measure), second.values(measure)).values()):
        return Difference(apart.value, apart.error, apart.count)
    if one.error is None or other.error is None:
        return Difference(other.value - one.value, None, 0)
    return Difference(other.value - one.value, math.hypot(one.error, other.error), 0)


# -- groups -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """All seeds of one config, one result a seed, in order.

    Args:
        results: One a seed.
        measures: A key of :data:`MEASURES` → one value a seed, None where it is not known.
        repeats: How many results gave way to a newer one of the same config and seed.
    """

    results: tuple[Result, ...]
    measures: Mapping[str, tuple[float | None, ...]]
    repeats: int = 0

    @property
    def config(self) -> RunConfig:
        return self.results[0].config

    @property
    def method(self) -> str:
        return self.config.method

    @property
    def variant(self) -> str | None:
        return variant(self.config)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(result.config.seed for result in self.results)

    @cached_property
    def matrices(self) -> Array:
        """(seeds, tasks, tasks) accuracies, NaN above the diagonal."""
        return np.stack([metrics.lower_triangle(result.accuracy) for result in self.results])

    def values(self, measure: str) -> dict[int, float]:
        """Seed → value, where it is known."""
        values = zip(self.seeds, self.measures[measure], strict=True)
        return {seed: value for seed, value in values if value is not None}

    def over_seeds(self, measure: str) -> Mean | None:
        """Mean over seeds; None where nothing is known."""
        return mean_of(self.measures[measure])

    def mean(self, measure: str) -> float | None:
        """The mean's value alone."""
        found = self.over_seeds(measure)
        return found.value if found else None

    def curve(self, of: Curve) -> tuple[Array, Array]:
        """Mean and standard deviation over seeds of a curve of each result's accuracies."""
        return mean_and_deviation(np.array([of(result.accuracy) for result in self.results]))

    def with_seeds(self, seeds: Container[int]) -> Group:
        """The same group with some of its seeds."""
        kept = [i for i, seed in enumerate(self.seeds) if seed in seeds]
        measures = {name: tuple(values[i] for i in kept) for name, values in self.measures.items()}
        return replace(self, results=tuple(self.results[i] for i in kept), measures=measures)


def groups(results: Iterable[Result]) -> list[Group]:
    """Groups results by config.

    Args:
        results: In any order. Of several with the same config and seed the one that finished last counts.

    Returns:
        A group for each config, in the order in which configs come. Intransigence is filled in from single-task runs
        on the same stream, if there are any among the results.
    """
    results = list(results)
    references = {
        metrics.stream(one.config): one for one in reversed(results) if one.config.method == "single-task"
    }  # of several the first
    by_config: dict[str, list[Result]] = {}
    for result in results:
        by_config.setdefault(result.config.hash, []).append(result)
    return [_group(alike, references) for alike in by_config.values()]


def over_shared_seeds(groups: Sequence[Group]) -> list[Group]:
    """Keeps the seeds that all groups have, so that lines to be compared differ by nothing else.

    Args:
        groups: The groups to compare.

    Returns:
        The groups with their common seeds; unchanged where they share none.
    """
    shared = set.intersection(*(set(group.seeds) for group in groups)) if groups else set()
    return [group.with_seeds(shared) for group in groups] if shared else list(groups)


def _group(alike: Sequence[Result], references: References) -> Group:
    by_seed = {one.config.seed: one for one in sorted(alike, key=lambda one: str(one.environment.get("finished", "")))}
    newest = [by_seed[seed] for seed in sorted(by_seed)]
    measured = [_measures(result, references) for result in newest]
    return Group(
        tuple(newest), {key: tuple(m[key] for m in measured) for key, _, _ in MEASURES}, len(alike) - len(newest)
    )


def _measures(result: Result, references: References) -> dict[str, float | None]:
    """The table's numbers of one run, from its accuracies."""
    accuracy = result.accuracy
    return {
        "A": metrics.average_accuracy(accuracy),
        "F": metrics.forgetting(accuracy),
        "I": _intransigence(result, references),
        "std": metrics.task_deviation(accuracy),
        "learning_accuracy": metrics.learning_accuracy(accuracy),
        "first_task": accuracy[-1][0],
        "seconds": result.seconds,
    }


def _intransigence(result: Result, references: References) -> float | None:
    """As written in the result, else against a single-task run of the same stream, if there is one."""
    written = result.metrics.get("I")
    if isinstance(written, int | float):
        return float(written)
    other = references.get(metrics.stream(result.config))
    return None if other is None else metrics.intransigence(result.accuracy, other.accuracy)


# -- the paper's variants -------------------------------------------------------------------------------------------

#: Settings that parameter decoupling adds.
DECOUPLED = frozenset({"a_prime", "c_prime", "epsilon_prime"})
#: Named variants of ALASSO, and the settings that make them so.
VARIANTS = {
    "asymmetric only": frozenset({"omega_rule"}),
    "accurate only": frozenset({"a", "epsilon"}),
    "no decoupling": DECOUPLED,
}


def variant(config: RunConfig) -> str | None:
    """Names the paper's variant of ALASSO that a config is.

    Args:
        config: Of any method.

    Returns:
        A key of :data:`VARIANTS`: the asymmetric surrogate on SI's Ω, the accurate Ω in a symmetric surrogate, or
        ALASSO with a′ = a and c′ = c (unless the defaults say so); None for anything else.
    """
    if config.method != "alasso":
        return None
    own, default = config.settings, METHODS["alasso"].settings
    if own.get("omega_rule") == "si":
        return "asymmetric only"
    if (own.get("a"), own.get("epsilon")) == (1.0, 0.0):
        return "accurate only"
    past = (own.get("a_prime"), own.get("c_prime"))
    coupled = past == (own.get("a"), own.get("c")) and past != (default["a_prime"], default["c_prime"])
    return "no decoupling" if coupled else None
