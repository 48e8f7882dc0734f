"""The paper's two tables as figures: sensitivity to a, and the measures A, F, I."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from alasso.bench.config import RunConfig
from alasso.bench.labels import count_of
from alasso.bench.report.aggregate import Group, is_accurate_only
from alasso.bench.report.drawing import new_figure, safe, style, titled
from alasso.bench.report.sections import Section, sections
from alasso.bench.report.style import number
from alasso.bench.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_MEASURES = (("A", max), ("F", min), ("I", min))


def sensitivity_rows(results: Sequence[Result]) -> dict[tuple[str, int], dict[float, Group]]:
    """For each benchmark and number of tasks the full method's groups by a, where there are two or more."""
    rows = {}
    for section in sections(results):
        standard = section.standard.get("alasso")
        if standard is None:
            continue
        alike = [group for group in section.groups if differ_in_a_alone(group.config, standard.config)]
        alike.sort(key=lambda group: not is_accurate_only(group.config))  # of two with a = 1 the one with ε counts
        by_a = {float(group.config.settings["a"]): group for group in alike}
        if len(by_a) > 1:
            rows[(section.benchmark, section.tasks)] = dict(sorted(by_a.items()))
    return rows


def differ_in_a_alone(config: RunConfig, other: RunConfig) -> bool:
    """Whether two runs of ALASSO are the same but for a, if that; with a = 1 the symmetric one, without ε, will do."""
    ignored = {"a", "epsilon"} if is_accurate_only(config) else {"a"}

    def without_a(given: RunConfig) -> dict[str, object]:
        raw = given.to_json()
        settings = {key: value for key, value in raw["settings"].items() if key not in ignored}
        return {**raw, "settings": settings, "seed": None}

    return without_a(config) == without_a(other)


def sensitivity(results: Sequence[Result]) -> Figure | None:
    """The paper's table of mean accuracy by a, as a heat map."""
    rows = sensitivity_rows(results)
    if not rows:
        return None
    values = sorted({a for row in rows.values() for a in row})
    grid = np.array([[(row[a].mean("A") or np.nan) if a in row else np.nan for a in values] for row in rows.values()])
    names = [f"{benchmark}\n{count_of(tasks, 'task')}" for benchmark, tasks in rows]
    with style():
        figure, (axes,) = new_figure(2.2 + 0.62 * len(values), 1.5 + 0.55 * len(rows))
        image = axes.imshow(grid, cmap="cividis", aspect="auto")
        axes.grid(False)
        axes.set_xticks(range(len(values)), [f"{a:g}" for a in values])
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("a, overestimation of the unobserved side")
        for spine in axes.spines.values():
            spine.set_visible(False)
        low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                ink = "white" if value < (low + high) / 2 else "#222222"
                axes.text(column, row, f"{value:.3f}", ha="center", va="center", color=ink)
        bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=12)
        bar.outline.set_visible(False)
        titled(axes, "Sensitivity to a", "mean accuracy A after all tasks")
    return figure


def measures_table(results: Sequence[Result]) -> Figure:
    """Accuracy, forgetting and intransigence of every method on every benchmark; the best of each column in bold."""
    found = sections(results)
    rows = table_rows(found)
    columns = [(section, key) for section in found for key, _ in TABLE_MEASURES]
    with style():
        figure, (axes,) = new_figure(2.0 + 1.15 * len(columns), 0.9 + 0.27 * len(rows))
        axes.set_axis_off()
        axes.set(xlim=(0, 2 + len(columns)), ylim=(len(rows) + 0.6, -2))
        for number, (section, key) in enumerate(columns):
            axes.text(2.9 + number, -0.4, f"${key}_{{{section.tasks}}}$", ha="right")
            if number % len(TABLE_MEASURES) == 0:
                axes.text(2.15 + number, -1.3, safe(section.title), weight="bold")
                axes.plot(
                    [2.15 + number, 2.0 + number + len(TABLE_MEASURES) - 0.1], [-1.0, -1.0], color="#777777", lw=0.6
                )
        for row, (label, cells) in enumerate(rows.items()):
            axes.text(0, row + 0.6, safe(label))
            for number, (text, best) in enumerate(cells):
                axes.text(2.9 + number, row + 0.6, text, ha="right", weight="bold" if best else "normal")
        for y in (0.0, len(rows) + 0.3):
            axes.axhline(y - 0.1, color="#777777", lw=0.8)
    return figure


def table_rows(found: Sequence[Section]) -> dict[str, list[tuple[str, bool]]]:
    """Label → one (text, whether the best) for every section and measure. Upper bounds do not compete."""
    labels = list(dict.fromkeys(section.figure_label(group) for section in found for group in section.headline))
    rows: dict[str, list[tuple[str, bool]]] = {label: [] for label in labels}
    for section in found:
        by_label = {section.figure_label(group): group for group in section.headline}
        rivals = [group for group in by_label.values() if group.method not in ("single-task", "multi-task")]
        for key, better in TABLE_MEASURES:
            known = [value for group in rivals if (value := group.mean(key)) is not None]
            best = better(known) if known else None
            for label in labels:
                group = by_label.get(label)
                value = group.mean(key) if group else None
                is_best = value is not None and value == best and any(group is rival for rival in rivals)
                rows[label].append((number(value), is_best))
    return rows
