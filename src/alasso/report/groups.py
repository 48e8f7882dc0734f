"""Results in order: seeds of one config together, variants of a method recognised, one section a benchmark.

A *group* is all seeds of one config. A *section* is all groups of one benchmark with one number of tasks. Within a
section each method has one *standard* group. Where a method has several groups, each is named by what tells it apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from alasso.bench import metrics
from alasso.bench.catalog import BENCHMARKS, METHODS
from alasso.bench.config import RunConfig
from alasso.bench.results import Result
from alasso.bench.runs import same_stream
from alasso.errors import AlassoError
from alasso.report.names import METHOD_NAMES, METHOD_ORDER, plain

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

    @cached_property
    def matrices(self) -> Array:
        """(seeds, tasks, tasks), NaN above the diagonal."""
        return np.stack([metrics.lower_triangle(result.accuracy) for result in self.results])

    def mean(self, measure: str) -> float | None:
        return mean_and_spread(self.measures[measure])[0]

    def curve(self, of: Curve) -> tuple[Array, Array]:
        """Mean and standard deviation over seeds of a curve of each result's accuracies."""
        return mean_and_deviation(np.array([of(result.accuracy) for result in self.results]))


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


# -- sections -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """All groups of one benchmark and number of tasks, as :func:`in_order` has them."""

    benchmark: str
    tasks: int
    path: str | None
    groups: tuple[Group, ...]

    @property
    def title(self) -> str:
        where = f" of {plain(self.path)}" if self.path else ""
        return f"{self.benchmark}{where}, {self.tasks} {'task' if self.tasks == 1 else 'tasks'}"

    @property
    def runs(self) -> int:
        return sum(len(group.results) for group in self.groups)

    @property
    def has_usual_tasks(self) -> bool:
        """Whether it has as many tasks as the benchmark has unless told otherwise."""
        return self.benchmark in BENCHMARKS and self.tasks == BENCHMARKS[self.benchmark].preset["tasks"]

    @cached_property
    def standard(self) -> dict[str, Group]:
        """The group that stands for each method."""
        by_method = {group.method: of_method(self.groups, group.method) for group in self.groups}
        return {method: min(found, key=_standing) for method, found in by_method.items()}

    @cached_property
    def headline(self) -> list[Group]:
        """What the main figures show at first: all of a few; else each method once and the ablations, and of a sweep as
        many more as can be told apart.
        """
        if len(self.groups) <= FEW:
            return list(self.groups)
        ablations = [group for group in self.groups if group.variant in ("asymmetric only", "accurate only")]
        best = {group.variant: group for group in sorted(ablations, key=_standing, reverse=True)}
        chosen = among(self.groups, [*self.standard.values(), *best.values()])
        if self.is_sweep:
            further = [group for group in self.groups if not among([group], chosen)]
            chosen += spread_out(further, max(2, MOST_LINES - len(chosen)))
        return among(self.groups, chosen)

    @property
    def is_sweep(self) -> bool:
        return is_sweep(self.groups)

    def family(self, group: Group) -> list[Group]:
        """All of a method, or of a variant of it, that differ in settings alone: the main one first, then in order."""
        return self._families[(group.method, group.variant)]

    @cached_property
    def _families(self) -> dict[tuple[str, str | None], list[Group]]:
        found: dict[tuple[str, str | None], list[Group]] = {}
        for group in self.groups:
            found.setdefault((group.method, group.variant), []).append(group)
        for family in found.values():
            main = min(family, key=_standing)
            family.sort(key=lambda group: group is not main)
        return found

    @cached_property
    def labels(self) -> dict[str, str]:
        """Config hash → method and what tells the group apart from the method's others here: ``ALASSO a=3``."""
        return labels(self.groups)

    def label(self, group: Group) -> str:
        return self.labels[group.config.hash]

    @cached_property
    def _headline_labels(self) -> dict[str, str]:
        return labels(self.headline)

    def figure_label(self, group: Group) -> str:
        """For figures that show the headline alone: apart from the others in it."""
        return self._headline_labels.get(group.config.hash, self.label(group))


def of_method(groups: Iterable[Group], method: str) -> list[Group]:
    return [group for group in groups if group.method == method]


def is_sweep(groups: Sequence[Group]) -> bool:
    """Whether half of the groups or more are further settings of a method that is there already."""
    plain_ones = [group for group in groups if not group.variant]
    further = len(plain_ones) - len({group.method for group in plain_ones})
    return further > 0 and 2 * further >= len(groups)


FEW = 6  # groups that a figure shows without a choice
MOST_LINES = 12  # lines of a sweep that can still be told apart


def among(groups: Iterable[Group], chosen: Sequence[Group]) -> list[Group]:
    """Those that are chosen, in the order in which they come."""
    return [group for group in groups if any(group is other for other in chosen)]


def spread_out(groups: Sequence[Group], most: int) -> list[Group]:
    """At most so many, evenly over their order, the first and the last among them."""
    if len(groups) <= most:
        return list(groups)
    return [groups[round(place * (len(groups) - 1) / (most - 1))] for place in range(most)]


# -- labels -------------------------------------------------------------------------------------------------------

MOST_IN_LABEL = 3  # settings that the label of a benchmark's own preset spells out


def labels(groups: Sequence[Group]) -> dict[str, str]:
    """Config hash → label, for groups that are shown together.

    A method's name stands alone only where it is the method's only group but for variants with names of their own.
    """
    named = {group.config.hash: _label(group, of_method(groups, group.method)) for group in groups}
    shown = list(named.values())
    # Long texts may be cut to the same one.
    return {key: label if shown.count(label) == 1 else f"{label} [{key[:6]}]" for key, label in named.items()}


def _label(group: Group, alike: Sequence[Group]) -> str:
    name = METHOD_NAMES.get(group.method, group.method)
    if group.variant:
        name += f", {group.variant}"
    standard, ours = min(alike, key=_standing), _flat(group.config)
    family = [_flat(other.config) for other in alike if other.variant == group.variant]
    varied = [key for key in ours if any(ours[key] != theirs.get(key) for theirs in family)]
    own = next((keys for _, called, keys in VARIANTS if called == group.variant), frozenset())
    apart = [key for key in differences(group.config, standard.config) if key not in own]
    if sum(all(theirs.get(key) == ours[key] for key in apart) for theirs in family) > 1:
        if len(varied) > MOST_IN_LABEL and is_preset(group.config):
            return f"{name}, preset"
        apart = [key for key in ours if key in apart or key in varied]
    return " ".join([name, *(f"{key}={plain(ours[key], 24)}" for key in apart)])


def is_preset(config: RunConfig) -> bool:
    """Whether a run is what its benchmark has for the method."""
    return config.benchmark in BENCHMARKS and has_default_settings(config) and not fields_off_preset(config)


def sections(results: Iterable[Result]) -> list[Section]:
    """One for each benchmark, number of tasks and folder of images, in the order of the catalog."""
    by_place: dict[tuple[str, int, str | None], list[Group]] = {}
    for group in groups(results):
        place = (group.config.benchmark, len(group.results[0].accuracy), group.config.path)
        by_place.setdefault(place, []).append(group)
    order = list(BENCHMARKS)
    places = sorted(
        by_place, key=lambda p: (order.index(p[0]) if p[0] in order else len(order), p[0], p[1], p[2] or "")
    )
    return [Section(*place, groups=tuple(in_order(by_place[place]))) for place in places]


def telling_first(found: Sequence[Section]) -> list[Section]:
    """To be read from the top: the section with the most runs, then the others of its benchmark, then all others.

    Of two with as many runs the one with the benchmark's own number of tasks opens.
    """
    if not found:
        return []
    first = min(found, key=lambda section: (-section.runs, not section.has_usual_tasks))  # min keeps to the order
    return sorted(found, key=lambda section: (section is not first, section.benchmark != first.benchmark))


def in_order(found: Sequence[Group]) -> list[Group]:
    """Methods as legends name them; of each method the standard group first, the others by their settings.

    In a sweep only the benchmark's own preset goes first: the best of the others stays in its place.
    """
    methods = {group.method for group in found}
    known = [method for method in METHOD_ORDER if method in methods]
    sweep = is_sweep(found)
    ordered: list[Group] = []
    for method in [*known, *sorted(methods - set(known))]:
        alike = sorted(of_method(found, method), key=by_settings)
        standard = min(alike, key=_standing)
        if sweep and not is_preset(standard.config):
            ordered += alike
        else:
            ordered += [standard, *(group for group in alike if group is not standard)]
    return ordered


def one_section(results: Iterable[Result]) -> Section:
    """The section of results that all belong to one."""
    found = sections(results)
    if len(found) != 1:
        raise AlassoError(f"this figure shows one benchmark with one number of tasks, not {len(found)}")
    return found[0]


def differences(config: RunConfig, other: RunConfig) -> dict[str, Any]:
    """Fields and settings of ``config`` that ``other`` has otherwise, seed aside."""
    ours, theirs = _flat(config), _flat(other)
    return {key: value for key, value in ours.items() if value != theirs.get(key)}


def _flat(config: RunConfig) -> dict[str, Any]:
    raw = config.values()
    raw.pop("seed")
    return {**raw.pop("settings"), **raw}


def by_settings(group: Group) -> tuple[Any, ...]:
    values = [
        (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))
        for value in _flat(group.config).values()
    ]
    return (group.variant or "", values)


def _standing(group: Group) -> tuple[Any, ...]:
    """Smaller stands higher: the method itself, its default settings, the usual fields, more seeds, more accuracy."""
    return (
        group.variant is not None,
        not has_default_settings(group.config),
        fields_off_preset(group.config),
        -len(group.results),
        -(group.mean("A") or 0.0),
        group.config.hash,
    )
