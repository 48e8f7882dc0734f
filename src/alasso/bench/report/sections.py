"""Groups of results in sections, one a benchmark; what stands for a method there, and what each group is called.

A *section* is all groups of one benchmark with one number of tasks. Within a section each method has one *standard*
group. Where a method has several groups, each is named by what tells it apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from alasso.bench.config import RunConfig
from alasso.bench.registry import BENCHMARKS, METHODS, label_of
from alasso.bench.report.aggregate import (
    VARIANTS,
    Group,
    by_settings,
    differences,
    fields_off_preset,
    groups,
    has_default_settings,
    standing,
    without_seed,
)
from alasso.bench.report.style import plain
from alasso.bench.results import Result
from alasso.errors import AlassoError


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
        return {method: min(found, key=standing) for method, found in by_method.items()}

    @cached_property
    def headline(self) -> list[Group]:
        """What the main figures show at first: all of a few; else each method once and the ablations, and of a sweep as
        many more as can be told apart, if that is two at least.
        """
        if len(self.groups) <= FEW:
            return list(self.groups)
        ablations = [group for group in self.groups if group.variant in ("asymmetric only", "accurate only")]
        best = {group.variant: group for group in sorted(ablations, key=standing, reverse=True)}
        chosen = among(self.groups, [*self.standard.values(), *best.values()])
        room = MOST_LINES - len(chosen)
        if self.is_sweep and room > 1:
            chosen += spread_out([group for group in self.groups if not among([group], chosen)], room)
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
            main = min(family, key=standing)
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
    name = label_of(group.method)
    if group.variant:
        name += f", {group.variant}"
    standard, ours = min(alike, key=standing), without_seed(group.config)
    family = [without_seed(other.config) for other in alike if other.variant == group.variant]
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
    known = [method for method in METHODS if method in methods]
    sweep = is_sweep(found)
    ordered: list[Group] = []
    for method in [*known, *sorted(methods - set(known))]:
        alike = sorted(of_method(found, method), key=by_settings)
        standard = min(alike, key=standing)
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
