"""``alasso compare``: results side by side, the difference to the first one and its standard error over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from alasso.bench.config import count_of
from alasso.bench.registry import label_of
from alasso.bench.report.aggregate import MEASURES, Difference, Group, difference, groups
from alasso.bench.report.sections import collect, sections
from alasso.bench.report.style import number, plain
from alasso.errors import AlassoError

MOST_ACROSS = 3  # columns of a table that a terminal has room for


@dataclass(frozen=True)
class Comparison:
    """The same thing in each column; None where a column has nothing like it."""

    title: str
    columns: list[Group | None]
    names: list[str]

    @property
    def present(self) -> list[tuple[str, Group]]:
        named = zip(self.names, self.columns, strict=True)
        return [(name, group) for name, group in named if group is not None]


# -- what is compared with what -----------------------------------------------------------------------------------


def columns_of(paths: Sequence[Path]) -> tuple[dict[str, list[Group]], list[str]]:
    """Sorts results into columns.

    Args:
        paths: A folder is a column. Files are put together by config, so that the seeds of one config make one column;
            a single folder by itself is taken apart in the same way.

    Returns:
        Columns by name, and a line for each file left out.

    Raises:
        AlassoError: There are no results, or only one thing.
    """
    left_out: list[str] = []
    columns: dict[str, list[Group]] = {}
    loose: list[Path] = []
    for path in paths:
        if path.is_dir() and len(paths) > 1:
            found = collect([path])
            left_out += found.left_out
            columns[_unused(plain(path), columns)] = groups(found.results)
        else:
            loose.append(path)
    found = collect(loose)
    left_out += found.left_out
    named = [(section, group) for section in sections(found.results) for group in section.groups]
    labels = [section.label(group) for section, group in named]
    for section, group in sorted(named, key=lambda pair: place_among(paths, pair[1])):  # in the order they were given
        name = section.label(group)
        columns[_unused(name if labels.count(name) == 1 else f"{name} on {section.title}", columns)] = [group]
    empty = [name for name, inside in columns.items() if not inside]
    if empty or not columns:
        where = empty[0] if empty else " or ".join(map(str, loose))
        unread = f" ({left_out[0]})" if left_out else ""
        raise AlassoError(f"there are no results in {where}{unread}")
    if len(columns) < 2:
        why = left_out[0] if left_out else "there is only one thing here"
        raise AlassoError(f"{why}; compare takes two or more results, configs or folders")
    return columns, left_out


def place_among(paths: Sequence[Path], group: Group) -> int:
    """Where among the files given the first one of a group is; a folder's results stay as they are."""
    names = {result.name for result in group.results}
    return next((i for i, path in enumerate(paths) if path.stem in names), 0)


def comparisons(columns: dict[str, list[Group]]) -> list[Comparison]:
    """Pairs what is alike.

    Args:
        columns: As :func:`columns_of` gives them.

    Returns:
        Columns of one config each are compared benchmark by benchmark; folders, config by config or else by method.
    """
    names = list(columns)
    if all(len(inside) == 1 for inside in columns.values()):
        return _by_place({name: inside[0] for name, inside in columns.items()})
    rest = [list(inside) for inside in columns.values()]
    matched = _matched(rest, names, lambda group: group.config.hash)
    return matched + _matched(rest, names, _method_key, alone_too=True)


def _by_place(named: dict[str, Group]) -> list[Comparison]:
    """A table for each benchmark and number of tasks; one for all where none has two things to compare."""
    places: dict[str, dict[str, Group]] = {}
    for name, group in named.items():
        (section,) = sections(group.results)
        places.setdefault(section.title, {})[name] = group
    if all(len(inside) == 1 for inside in places.values()):
        places = {"": named}
    return [
        Comparison(
            _common_title(list(inside.values())),
            list(inside.values()),
            [name.removesuffix(f" on {place}") for name in inside],
        )
        for place, inside in places.items()
    ]


def _matched(
    rest: list[list[Group]], names: list[str], key: Callable[[Group], str], alone_too: bool = False
) -> list[Comparison]:
    """Take out of ``rest`` what two columns or more have by ``key`` exactly once; with ``alone_too``, all there is."""
    keys = dict.fromkeys(key(group) for inside in rest for group in inside)
    found = []
    for wanted in keys:
        inside = [[group for group in column if key(group) == wanted] for column in rest]
        if max(map(len, inside)) > 1:
            if alone_too:
                raise AlassoError(
                    f"several configs of {wanted} are in one folder and not in the others; compare their files instead"
                )
            continue
        row = [groups_[0] if groups_ else None for groups_ in inside]
        if sum(group is not None for group in row) < 2 and not alone_too:
            continue
        for column, taken in zip(rest, row, strict=True):
            if taken is not None:
                column.remove(taken)
        found.append(Comparison(_common_title([group for group in row if group]), row, names))
    return found


def _method_key(group: Group) -> str:
    return f"{label_of(group.method)} on {group.config.benchmark}"


def _common_title(found: Sequence[Group]) -> str:
    """What the groups have in common."""
    places = {f"{g.config.benchmark}, {count_of(len(g.results[0].accuracy), 'task')}" for g in found}
    methods = {label_of(group.method) for group in found}
    place = places.pop() if len(places) == 1 else "different benchmarks or numbers of tasks"
    return f"{methods.pop()} on {place}" if len(methods) == 1 else place


def _unused(name: str, taken: dict[str, list[Group]]) -> str:
    return name if name not in taken else _unused(name + "′", taken)


# -- showing ------------------------------------------------------------------------------------------------------


def table(comparison: Comparison) -> Table:
    """Draws a comparison.

    Args:
        comparison: One of :func:`comparisons`.

    Returns:
        Measures down and things across; of many things, things down and measures across.
    """
    draw = _things_across if len(comparison.present) <= MOST_ACROSS else _things_down
    return draw(comparison.title, comparison.present)


def _things_across(title: str, present: Sequence[tuple[str, Group]]) -> Table:
    shown = _titled_table(title, box=HEAVY_HEAD)
    for place, (name, group) in enumerate(present):
        shown.add_column(_name_and_seeds(name, group), justify="right")
        if place:
            shown.add_column("difference", justify="right")
    for measure, heading, more_is_better in MEASURES:
        digits = 1 if measure == "seconds" else 4
        cells = []
        for place, (_, group) in enumerate(present):
            cells.append(_value_cell(group, measure, digits))
            if place:
                cells.append(_difference_cell(difference(present[0][1], group, measure), digits, more_is_better))
        shown.add_row(heading, *cells)
    return shown


def _things_down(title: str, present: Sequence[tuple[str, Group]]) -> Table:
    """Each difference under its value; measures that nothing has are left out, and so are the less telling ones.

    Without a frame and with short headings, four measures and the longest name of a method have room in 80 columns.
    """
    measures = [m for m in MEASURES if m[0] in ("A", "F", "I", "std") and any(g.values(m[0]) for _, g in present)]
    shown = _titled_table(title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    shown.caption = ", ".join(heading for _, heading, _ in measures)
    for measure, _, _ in measures:
        shown.add_column(measure, justify="right", no_wrap=True)
    for place, (name, group) in enumerate(present):
        cells = []
        for measure, _, more_is_better in measures:
            cell = _value_cell(group, measure, 3)
            if place:
                apart = _difference_cell(difference(present[0][1], group, measure), 3, more_is_better)
                cell = cell.append("\n").append_text(apart)
            cells.append(cell)
        shown.add_row(_name_and_seeds(name, group), *cells)
    return shown


def _titled_table(title: str, **shape: Any) -> Table:
    shown = Table(title=Text(title), title_style="bold", caption_style="dim", **shape)
    shown.title_justify = shown.caption_justify = "left"
    shown.add_column("")
    return shown


def _name_and_seeds(name: str, group: Group) -> Text:
    return Text(f"{plain(name, 160)}\n{count_of(len(group.results), 'seed')}")


def _value_cell(group: Group, measure: str, digits: int) -> Text:
    found = group.over_seeds(measure)
    if found is None:
        return Text("–")
    spread = "" if found.deviation is None else f" ± {number(found.deviation, digits)}"
    return Text(number(found.value, digits) + spread)


def _difference_cell(found: Difference | None, digits: int, more_is_better: bool | None) -> Text:
    if found is None:
        return Text("–")
    sign = "+" if found.mean > 0 else ""
    cell = f"{sign}{number(found.mean, digits)}"
    if found.error is None:
        return Text(cell)
    cell += f" ± {number(found.error, digits)}"
    # Coloured only where it is more than two standard errors from nothing.
    clear = more_is_better is not None and abs(found.mean) > 2 * found.error
    style = ("green" if (found.mean > 0) == more_is_better else "red") if clear else ""
    return Text(cell, style=style)


def explanation(comparison: Comparison) -> str:
    """Says how the differences were worked out, in a line under the table."""
    (_, first), *others = comparison.present
    found = [one for _, group in others if (one := difference(first, group, "A"))]
    if not found:
        return "nothing else here to compare it with"
    seeds = (
        "over the seeds that both have" if all(one.pairs for one in found) else "seed by seed where seeds are shared"
    )
    known = [one.error is not None for one in found]
    error = "" if all(known) else "; a standard error needs two seeds or more of each"
    return f"difference to the first{' ± its standard error' if any(known) else ''}, {seeds}{error}"
