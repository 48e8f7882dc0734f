"""Results from anywhere, in sections, one a benchmark; what stands for a method there, and what each group is called.

:func:`collect` reads the good files, and names every other one with the reason it was left out. A *section* is all
groups of one benchmark with one number of tasks. Within a section each method has one *standard* group. Where a method
has several groups, each is named by what tells it apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from alasso.bench import probe, results
from alasso.bench.config import RunConfig, count_of, usual_values
from alasso.bench.probe import Measured
from alasso.bench.registry import BENCHMARKS, METHODS, Look, label_of
from alasso.bench.report.aggregate import VARIANTS, Group, groups
from alasso.bench.report.style import look_of, on_ramp, plain
from alasso.bench.results import Result
from alasso.errors import AlassoError

Thing = TypeVar("Thing")
PROBES = ("probe.json", "probe.json.xz")
FEW = 6  # groups that a figure shows without a choice
MOST_LINES = 12  # lines of a sweep that can still be told apart
MOST_DRAWN = 60  # groups of a section that the page draws; tables have all
MOST_IN_LABEL = 3  # settings that the label of a benchmark's own preset spells out


# -- results from files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collected:
    """What was found.

    Args:
        results: Whole results, none twice.
        left_out: One sentence for every file that is no whole result, and for every run that diverged.
        probes: What probes measured.
    """

    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    probes: list[Measured] = field(default_factory=list)


def collect(paths: Sequence[Path]) -> Collected:
    """Reads every result and probe among files and folders.

    Args:
        paths: Files, and folders, which are searched to the bottom. A run and its copies count once.

    Returns:
        What was found. Runs of a search, measured on held-out examples, are left out where there are others.

    Raises:
        AlassoError: One of the paths does not exist.
    """
    found = Collected()
    by_name: dict[str, list[Result]] = {}
    for result in results.read_all(paths):
        if isinstance(result, AlassoError):
            found.left_out.append(str(result))
            continue
        alike = by_name.setdefault(result.name, [])
        if result not in alike:
            alike.append(result)
            found.results.append(result)
    found.left_out.extend(_diverged(paths))
    for path in results.files_below(paths, PROBES):
        if path.name.endswith(PROBES):
            try:
                found.probes.append(probe.read(path))
            except AlassoError as error:
                found.left_out.append(str(error))
    tested = [result for result in found.results if not result.config.validation]
    searched = len(found.results) - len(tested)
    if tested and searched:
        what = f"{count_of(searched, 'run')} of a search, measured on held-out examples"
        found.left_out.append(f"{what}; to see them, name their folder alone")
        return Collected(tested, found.left_out, found.probes)
    return found


def _diverged(paths: Iterable[Path]) -> list[str]:
    """One sentence for every run that diverged and has no result of another time."""
    said = []
    for note in results.files_below(paths, (results.DIVERGED,)):
        if note.name.endswith(results.DIVERGED) and not note.with_suffix(".json").exists():
            try:
                found = results.read_note(note)
            except AlassoError as error:
                said.append(str(error))
            else:
                said.append(f"{found.config.name} diverged in task {found.task}: {found.why}")
    return said


# -- sections --------------------------------------------------------------------------------------------------------


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
        return f"{self.benchmark}{where}, {count_of(self.tasks, 'task')}"

    @cached_property
    def is_sweep(self) -> bool:
        return is_sweep(self.groups)

    @cached_property
    def standard(self) -> dict[str, Group]:
        """The group that stands for each method."""
        methods = dict.fromkeys(group.method for group in self.groups)
        return {method: min(of_method(self.groups, method), key=standing) for method in methods}

    @cached_property
    def headline(self) -> list[Group]:
        """What the main figures show at first: all of a few; else each method once and the ablations, and of a sweep as
        many more as can be told apart, if that is two at least.
        """
        if len(self.groups) <= FEW:
            return list(self.groups)
        ablations = [group for group in self.groups if group.variant in ("asymmetric only", "accurate only")]
        best = {group.variant: group for group in sorted(ablations, key=standing, reverse=True)}
        chosen = {group.config.hash for group in (*self.standard.values(), *best.values())}
        room = MOST_LINES - len(chosen)
        if self.is_sweep and room > 1:
            others = [group.config.hash for group in self.groups if group.config.hash not in chosen]
            chosen |= set(evenly(others, room))
        return [group for group in self.groups if group.config.hash in chosen]

    @cached_property
    def drawn(self) -> list[Group]:
        """What can be shown at all, in the order of the groups: of very many, the headline and the most accurate."""
        if len(self.groups) <= MOST_DRAWN:
            return list(self.groups)
        best = sorted(self.groups, key=lambda group: -(group.mean("A") or 0.0))
        chosen = list(dict.fromkeys(group.config.hash for group in (*self.headline, *best)))[:MOST_DRAWN]
        return [group for group in self.groups if group.config.hash in set(chosen)]

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Config hash → the method's or variant's look; further settings have shades and dashes, or, in a sweep of one
        method, hues.
        """
        families: dict[tuple[str, str | None], list[Group]] = {}
        for group in self.groups:
            families.setdefault((group.method, group.variant), []).append(group)
        looks = {}
        for (method, variant), family in families.items():
            main = min(family, key=standing)
            for place, group in enumerate(sorted(family, key=lambda group: group is not main)):
                looks[group.config.hash] = look_of(method, variant, place, len(family))
            if self.is_sweep and len(self.standard) == 1 and not variant:
                for step, group in enumerate(sorted(family, key=by_settings)):
                    key = group.config.hash
                    looks[key] = on_ramp(step / max(1, len(family) - 1), looks[key])
        return looks

    @cached_property
    def labels(self) -> dict[str, str]:
        """Config hash → method and what tells the group apart from the method's others here: ``ALASSO a=3``."""
        return labels(self.groups)

    @cached_property
    def figure_labels(self) -> dict[str, str]:
        """The same for figures that show the headline alone."""
        return {**self.labels, **labels(self.headline)}

    def label(self, group: Group) -> str:
        return self.labels[group.config.hash]

    def figure_label(self, group: Group) -> str:
        return self.figure_labels[group.config.hash]

    def look(self, group: Group) -> Look:
        return self.looks[group.config.hash]


def sections(results: Iterable[Result]) -> list[Section]:
    """One for each benchmark, number of tasks and folder of images, in the order of the registry."""
    by_place: dict[tuple[str, int, str | None], list[Group]] = {}
    for group in groups(results):
        place = (group.config.benchmark, len(group.results[0].accuracy), group.config.path)
        by_place.setdefault(place, []).append(group)
    order = {name: number for number, name in enumerate(BENCHMARKS)}
    places = sorted(by_place, key=lambda p: (order.get(p[0], len(order)), p[0], p[1], p[2] or ""))
    return [Section(*place, groups=tuple(in_order(by_place[place]))) for place in places]


def one_section(results: Iterable[Result]) -> Section:
    """The section of results that all belong to one."""
    found = sections(results)
    if len(found) != 1:
        raise AlassoError(f"this figure shows one benchmark with one number of tasks, not {len(found)}")
    return found[0]


def telling_first(found: Sequence[Section]) -> list[Section]:
    """To be read from the top: the section with the most runs, then the others of its benchmark, then all others.

    Of two with as many runs the one with the benchmark's own number of tasks opens.
    """
    if not found:
        return []

    def runs(section: Section) -> tuple[int, bool]:
        known = BENCHMARKS.get(section.benchmark)
        usual = known is not None and section.tasks == known.preset["tasks"]
        return -sum(len(group.results) for group in section.groups), not usual

    first = min(found, key=runs)  # min keeps to the order
    return sorted(found, key=lambda section: (section is not first, section.benchmark != first.benchmark))


# -- order --------------------------------------------------------------------------------------------------------


def in_order(found: Sequence[Group]) -> list[Group]:
    """Methods as legends name them; of each method the standard group first, the others by their settings.

    In a sweep only the benchmark's own preset goes first: the best of the others stays in its place.
    """
    methods = {group.method for group in found}
    known = [method for method in METHODS if method in methods]
    sweep = is_sweep(found)
    ordered: list[Group] = []
    for method in [*known, *sorted(methods - set(known))]:
        alike = sorted(of_method(found, method), key=by_settings)
        first = min(alike, key=standing)
        if not sweep or is_preset(first.config):
            alike.sort(key=lambda group: group is not first)
        ordered += alike
    return ordered


def evenly(things: Sequence[Thing], most: int) -> list[Thing]:
    """All things, or so many of them from the first to the last.

    >>> evenly("abcde", 3), evenly("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    if len(things) <= most:
        return list(things)
    return [things[round(place * (len(things) - 1) / (most - 1))] for place in range(most)]


def of_method(groups: Iterable[Group], method: str) -> list[Group]:
    return [group for group in groups if group.method == method]


def is_sweep(groups: Sequence[Group]) -> bool:
    """Whether half of the groups or more are further settings of a method that is there already."""
    plain_ones = [group for group in groups if not group.variant]
    further = len(plain_ones) - len({group.method for group in plain_ones})
    return further > 0 and 2 * further >= len(groups)


def standing(group: Group) -> tuple[Any, ...]:
    """Smaller stands higher: the method itself, its usual settings, the usual fields, more seeds, more accuracy."""
    changed = changes(group.config)
    of_method = [name for name in changed if name in group.config.settings or name in ("memory", "validation")]
    return (
        group.variant is not None,
        bool(of_method),
        len(changed) - len(of_method),
        -len(group.results),
        -(group.mean("A") or 0.0),
        group.config.hash,
    )


def changes(config: RunConfig) -> list[str]:
    """Settings and fields that are not as the benchmark has them for the method; tasks and seed aside."""
    usual = usual_values(config) or (METHODS[config.method].settings if config.method in METHODS else {})
    own = config.flat().items()
    return [name for name, value in own if usual.get(name, value) != value and name not in ("tasks", "seed", "path")]


def is_preset(config: RunConfig) -> bool:
    """Whether a run is what its benchmark has for the method."""
    return config.benchmark in BENCHMARKS and not changes(config)


def by_settings(group: Group) -> tuple[Any, ...]:
    values = without_seed(group.config).values()
    order = [(0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for value in values]
    return (group.variant or "", order)


# -- labels -------------------------------------------------------------------------------------------------------


def labels(groups: Sequence[Group]) -> dict[str, str]:
    """Config hash → label, for groups that are shown together.

    A method's name stands alone only where it is the method's only group but for variants with names of their own.
    """
    named: dict[str, str] = {}
    for method in dict.fromkeys(group.method for group in groups):
        alike = of_method(groups, method)
        standard = min(alike, key=standing)
        for variant in dict.fromkeys(group.variant for group in alike):
            named |= _family_labels([group for group in alike if group.variant == variant], standard)
    shown = Counter(named.values())
    # Long texts may be cut to the same one.
    return {key: label if shown[label] == 1 else f"{label} [{key[:6]}]" for key, label in named.items()}


def _family_labels(family: Sequence[Group], standard: Group) -> dict[str, str]:
    """Labels of all groups of one method and variant, by config hash."""
    name = label_of(standard.method) + (f", {family[0].variant}" if family[0].variant else "")
    of_variant = VARIANTS.get(family[0].variant or "", frozenset())
    values = [without_seed(group.config) for group in family]
    varied = {key for key in values[0] if len({repr(one.get(key)) for one in values}) > 1}
    counts: dict[tuple[str, ...], Counter[str]] = {}  # names → how many groups have the same values of these
    found = {}
    for group, ours in zip(family, values, strict=True):
        apart = tuple(key for key in differences(group.config, standard.config) if key not in of_variant)
        if apart not in counts:
            counts[apart] = Counter(_spelled(one, apart) for one in values)
        if counts[apart][_spelled(ours, apart)] > 1:
            if len(varied) > MOST_IN_LABEL and is_preset(group.config):
                found[group.config.hash] = f"{name}, preset"
                continue
            apart = tuple(key for key in ours if key in apart or key in varied)
        found[group.config.hash] = " ".join([name, *(f"{key}={plain(ours[key], 24)}" for key in apart)])
    return found


def _spelled(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return repr([values.get(name) for name in names])


def differences(config: RunConfig, other: RunConfig) -> list[str]:
    """Fields and settings of ``config`` that ``other`` has otherwise, seed aside."""
    return [name for name in config.unlike(other) if name != "seed"]


def without_seed(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in config.flat().items() if name != "seed"}
