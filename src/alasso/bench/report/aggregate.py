"""Results in order: seeds of one config together, variants of a method recognised.

A *group* is all seeds of one config.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from alasso.bench import metrics
from alasso.bench.config import RunConfig
from alasso.bench.intransigence import same_stream
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.bench.results import Result
from alasso.errors import AlassoError

Array = npt.NDArray[np.float64]
Curve = Callable[[Sequence[Sequence[float]]], list[float]]

#: Measures of the table: key, heading, whether more is better (None: neither).
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


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """Subtracts seed by seed.

    Args:
        first: Seed → value.
        second: Seed → value.

    Returns:
        Seed → second − first, for the seeds that both have.
    """
    return {seed: second[seed] - first[seed] for seed in sorted(first.keys() & second.keys())}


# -- which variant a config is ------------------------------------------------------------------------------------


def is_asymmetric_only(config: RunConfig) -> bool:
    """The paper's first ablation: the asymmetric surrogate on SI's Ω."""
    return config.method == "alasso" and config.settings.get("omega_rule") == "si"


def is_accurate_only(config: RunConfig) -> bool:
    """The paper's second ablation: the accurate Ω in a symmetric surrogate."""
    own = config.settings
    return (
        config.method == "alasso"
        and not is_asymmetric_only(config)
        and (own.get("a"), own.get("epsilon")) == (1.0, 0.0)
    )


def is_coupled(config: RunConfig) -> bool:
    """Without parameter decoupling: a′ = a and c′ = c, unless that is where the defaults stand anyway."""
    if config.method != "alasso" or is_asymmetric_only(config) or is_accurate_only(config):
        return False
    own, default = config.settings, METHODS["alasso"].settings
    past = (own.get("a_prime"), own.get("c_prime"))
    return past == (own.get("a"), own.get("c")) and past != (default["a_prime"], default["c_prime"])


def has_memory(config: RunConfig) -> bool:
    """Keeps examples of past tasks."""
    return config.memory > 0 or config.method == "vcl-coreset"


#: Variants with a name: predicate, what they are called, and the settings that make them so.
DECOUPLED = frozenset({"a_prime", "c_prime", "epsilon_prime"})
VARIANTS: tuple[tuple[Callable[[RunConfig], bool], str, frozenset[str]], ...] = (
    (is_asymmetric_only, "asymmetric only", frozenset({"omega_rule"})),
    (is_accurate_only, "accurate only", frozenset({"a", "epsilon"})),
    (is_coupled, "no decoupling", DECOUPLED),
)


def variant(config: RunConfig) -> str | None:
    """Name of the variant, None for the method itself."""
    return next((name for is_it, name, _ in VARIANTS if is_it(config)), None)


def has_default_settings(config: RunConfig) -> bool:
    """The method as the catalog has it on this benchmark, measured on test examples."""
    if config.validation or (has_memory(config) and config.method not in ("alasso-memory", "vcl-coreset")):
        return False
    default = dict(METHODS[config.method].settings) if config.method in METHODS else {}
    if config.benchmark in BENCHMARKS:
        default |= BENCHMARKS[config.benchmark].settings.get(config.method, {})
    return dict(config.settings) == default


def fields_off_preset(config: RunConfig) -> int:
    """How many fields of a run (epochs, precision, …) are not as the benchmark has them; tasks and seed aside."""
    if config.benchmark not in BENCHMARKS or config.method not in METHODS:
        return 0
    try:
        path = config.path if "path" in BENCHMARKS[config.benchmark].takes else None
        usual = RunConfig.for_benchmark(config.benchmark, config.method, path=path).values()
    except AlassoError:  # the method goes with another network alone
        return 0
    ignored = ("tasks", "seed", "settings", "path")
    return sum(value != usual[name] for name, value in config.values().items() if name not in ignored)


# -- groups -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """All seeds of one config, one result a seed, in order. ``measures``: one value a seed, None if unknown."""

    results: tuple[Result, ...]
    measures: Mapping[str, tuple[float | None, ...]]
    repeats: int = 0  # results left aside because a newer one has the same config and seed

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

    def with_seeds(self, seeds: Container[int]) -> Group:
        kept = [i for i, seed in enumerate(self.seeds) if seed in seeds]
        measures = {name: tuple(values[i] for i in kept) for name, values in self.measures.items()}
        return replace(self, results=tuple(self.results[i] for i in kept), measures=measures)

    @cached_property
    def matrices(self) -> Array:
        """(seeds, tasks, tasks), NaN above the diagonal."""
        return np.stack([metrics.lower_triangle(result.accuracy) for result in self.results])

    def values(self, measure: str) -> dict[int, float]:
        """Seed → value, where it is known."""
        values = zip(self.seeds, self.measures[measure], strict=True)
        return {seed: value for seed, value in values if value is not None}

    def mean(self, measure: str) -> float | None:
        return mean_and_spread(self.measures[measure])[0]

    def curve(self, of: Curve) -> tuple[Array, Array]:
        """Mean and standard deviation over seeds of a curve of each result's accuracies."""
        return mean_and_deviation(np.array([of(result.accuracy) for result in self.results]))


def over_shared_seeds(groups: Sequence[Group]) -> list[Group]:
    """The same with the seeds that all of them have, so that lines to be compared differ by nothing else; as they are
    where no seed is shared.
    """
    shared = set.intersection(*(set(group.seeds) for group in groups)) if groups else set()
    return [group.with_seeds(shared) for group in groups] if shared else list(groups)


def mean_and_deviation(values: Array) -> tuple[Array, Array]:
    """Over the first axis; a single seed has no deviation: zero."""
    if len(values) == 1:
        return values[0], np.zeros_like(values[0])
    return values.mean(axis=0), values.std(axis=0, ddof=1)


def mean_and_spread(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation of the known ones; None where there are too few."""
    known = np.array([value for value in values if value is not None])
    return (
        float(known.mean()) if len(known) else None,
        float(known.std(ddof=1)) if len(known) > 1 else None,
    )


def groups(results: Iterable[Result]) -> list[Group]:
    """Results by config; of several with the same config and seed the one that finished last counts."""
    results = list(results)
    references = [result for result in results if result.config.method == "single-task"]
    by_config: dict[str, dict[int, Result]] = {}
    repeats: dict[str, int] = {}
    for result in results:
        seeds = by_config.setdefault(result.config.hash, {})
        before = seeds.get(result.config.seed)
        repeats[result.config.hash] = repeats.get(result.config.hash, 0) + (before is not None)
        if before is None or _finished(result) >= _finished(before):
            seeds[result.config.seed] = result
    return [
        _group([seeds[seed] for seed in sorted(seeds)], repeats[key], references) for key, seeds in by_config.items()
    ]


def _group(results: Sequence[Result], repeats: int, references: Sequence[Result]) -> Group:
    measured = [measures(result, references) for result in results]
    return Group(tuple(results), {key: tuple(m[key] for m in measured) for key, _, _ in MEASURES}, repeats)


def measures(result: Result, references: Sequence[Result]) -> dict[str, float | None]:
    """The table's numbers of one run, from its accuracies."""
    accuracy = result.accuracy
    return {
        "A": metrics.average_accuracy(accuracy),
        "F": metrics.forgetting(accuracy),
        "I": intransigence(result, references),
        "std": metrics.task_deviation(accuracy),
        "learning_accuracy": metrics.learning_accuracy(accuracy),
        "first_task": accuracy[-1][0],
        "seconds": result.seconds,
    }


def intransigence(result: Result, references: Sequence[Result]) -> float | None:
    """As written in the result, else against a single-task run of the same stream, if there is one."""
    written = result.metrics.get("I")
    if isinstance(written, int | float):
        return float(written)
    for other in references:
        if same_stream(other.config, result.config):
            return metrics.intransigence(result.accuracy, other.accuracy)
    return None


def _finished(result: Result) -> str:
    return str(result.environment.get("finished", ""))


# -- comparing -------------------------------------------------------------------------------------------------------


def differences(config: RunConfig, other: RunConfig) -> list[str]:
    """Fields and settings of ``config`` that ``other`` has otherwise, seed aside."""
    return [name for name in config.unlike(other) if name != "seed"]


def without_seed(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in config.flat().items() if name != "seed"}


def by_settings(group: Group) -> tuple[Any, ...]:
    values = [
        (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))
        for value in without_seed(group.config).values()
    ]
    return (group.variant or "", values)


def standing(group: Group) -> tuple[Any, ...]:
    """Smaller stands higher: the method itself, its default settings, the usual fields, more seeds, more accuracy."""
    return (
        group.variant is not None,
        not has_default_settings(group.config),
        fields_off_preset(group.config),
        -len(group.results),
        -(group.mean("A") or 0.0),
        group.config.hash,
    )
