"""The paper's figures from results: each a function of a list of results, None where what it shows was not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from alasso.bench import metrics
from alasso.bench.registry import Look
from alasso.bench.report.aggregate import DECOUPLED, Array, Curve, Group, differences, has_memory, over_shared_seeds
from alasso.bench.report.drawing import (
    WIDTH,
    Line,
    darkened,
    draw_lines,
    group_look,
    new_figure,
    safe,
    seeds_note,
    style,
    task_ticks,
    tick_places,
    titled,
)
from alasso.bench.report.sections import Section, one_section
from alasso.bench.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHOSEN_TASKS = 5  # lines in the figure of single tasks over time
BAR_METHODS = ("single-task", "ewc", "si", "alasso")
EVERY = 5  # bars at every fifth task, as in the paper
MOST_NAMED = 3  # runs that a figure does not draw


def mean_accuracy(results: Sequence[Result]) -> Figure:
    """The paper's main figure: mean accuracy over the tasks seen so far, each method once, with the ablations."""
    section = one_section(results)
    return _over_tasks(
        section, section.headline, metrics.accuracy_curve, "Mean accuracy", "mean accuracy of tasks seen"
    )


def task_deviation(results: Sequence[Result]) -> Figure:
    """How unequal the tasks are: standard deviation of accuracy over the tasks seen so far."""
    section = one_section(results)
    return _over_tasks(
        section, section.headline, metrics.deviation_curve, "Spread over tasks", "standard deviation over tasks seen"
    )


def decoupling(results: Sequence[Result]) -> Figure | None:
    """ALASSO with and without parameter decoupling."""
    section = one_section(results)
    shown = decoupling_groups(section)
    title = "Parameter decoupling"
    return _over_tasks(section, shown, metrics.accuracy_curve, title, "mean accuracy of tasks seen") if shown else None


def decoupling_groups(section: Section) -> list[Group]:
    """ALASSO with decoupling and the one without that equals it in all else; nothing if there is no such pair."""
    of_alasso = [group for group in section.groups if group.method == "alasso"]
    pairs = [
        [group, coupled]
        for coupled in of_alasso
        for group in of_alasso
        if coupled.variant == "no decoupling" and group is not coupled
        if set(differences(group.config, coupled.config)) <= DECOUPLED
    ]
    return over_shared_seeds(min(pairs, key=lambda pair: pair[0] is not section.standard["alasso"], default=[]))


def memory(results: Sequence[Result]) -> Figure | None:
    """Methods that keep examples, beside the same methods without."""
    section = one_section(results)
    shown = memory_groups(section)
    title = "Episodic memory"
    return _over_tasks(section, shown, metrics.accuracy_curve, title, "mean accuracy of tasks seen") if shown else None


def memory_groups(section: Section) -> list[Group]:
    """Methods with memory and their like without, nothing if none has memory."""
    with_memory = [group for group in section.groups if has_memory(group.config)]
    without = [section.standard[method] for method in ("alasso", "vcl") if method in section.standard]
    return over_shared_seeds([*with_memory, *without]) if with_memory else []


def chosen_tasks(results: Sequence[Result]) -> Figure | None:
    """Accuracy of single tasks while later ones are learned, SI beside ALASSO."""
    section = one_section(results)
    pair = [section.standard[method] for method in ("si", "alasso") if method in section.standard]
    if not pair or section.tasks < 2:
        return None
    chosen = spaced_tasks(section.tasks)
    with style():
        figure, panels = new_figure(3.6 * len(pair) + 0.6, 3.6, columns=len(pair))
        for axes, group in zip(panels, pair, strict=True):
            draw_lines(axes, _task_lines(group, chosen))
            titled(axes, section.figure_label(group), seeds_note([group]))
            task_ticks(axes, section.tasks)
            axes.set_xlabel("task just learned")
        panels[0].set_ylabel("accuracy of one task")
    return figure


def task_bars(results: Sequence[Result]) -> Figure | None:
    """Final accuracy at every fifth task, a bar a method."""
    section = one_section(results)
    shown = bar_groups(section)
    tasks = list(range(EVERY, section.tasks + 1, EVERY))
    if not shown or not tasks:
        return None
    columns = legend_columns([section.figure_label(group) for group in shown])
    with style():
        figure, (axes,) = new_figure(height=3.2 + 0.17 * -(-len(shown) // columns))
        width = 0.82 / len(shown)
        for number, group in enumerate(shown):
            final = group.matrices[:, -1, :][:, [t - 1 for t in tasks]]
            deviation = final.std(axis=0, ddof=1) if len(final) > 1 else None
            at = np.arange(len(tasks)) + (number - (len(shown) - 1) / 2) * width
            look = group_look(section, group)
            axes.bar(
                at,
                final.mean(axis=0),
                width * 0.92,
                yerr=deviation,
                color=look.light,
                hatch=3 * look.hatch or None,
                edgecolor="white",
                linewidth=0,
                error_kw={"lw": 0.8, "ecolor": "#444444"},
                label=safe(section.figure_label(group)),
            )
        axes.set_xticks(range(len(tasks)), [str(t) for t in tasks])
        axes.set(xlabel="task", ylabel="final accuracy", ylim=(0, 1))
        titled(axes, f"Every {EVERY}th task after learning all: {section.title}", _bars_note(shown), not_drawn(section))
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5, columnspacing=1.5)
    return figure


def legend_columns(labels: Sequence[str]) -> int:
    """As many columns of a legend as the width of a figure takes.

    >>> legend_columns(["ALASSO", "EWC", "SI", "single-task"]), legend_columns(["ALASSO unmoved=unobserved"] * 12)
    (4, 2)
    """
    letter, handle = 5.6, 42.0  # points: a letter at the legend's size, and what stands before and between names
    widest = max(len(safe(label)) for label in labels) * letter + handle
    return max(1, min(len(labels), 4, int(72 * WIDTH // widest)))


def bar_groups(section: Section) -> list[Group]:
    """The paper's four methods; of a sweep, what it shows at first."""
    if section.is_sweep:
        return section.headline
    return [section.standard[method] for method in BAR_METHODS if method in section.standard]


def not_drawn(section: Section) -> str:
    """Which lines of other figures have no bars, and why; nothing where all have."""
    others = [section.figure_label(group) for group in section.headline if group not in bar_groups(section)]
    if not others:
        return ""
    if len(others) > MOST_NAMED:
        return f"the paper's four methods alone: {len(others)} other runs are not drawn"
    return f"the paper's four methods alone, not drawn: {', '.join(others)}"


def accuracy_matrix(result: Result, label: str | None = None) -> Figure:
    """All that one run found: accuracy on every task after learning every task. ``label``: what the run is called."""
    section = one_section([result])
    matrix = metrics.lower_triangle(result.accuracy)
    with style():
        figure, (axes,) = new_figure(4.6, 4.0)
        tasks = len(matrix)
        image = axes.imshow(matrix, cmap="cividis", vmin=0, vmax=1, extent=(0.5, tasks + 0.5, tasks + 0.5, 0.5))
        axes.grid(False)
        task_ticks(axes, tasks)
        axes.set_yticks(tick_places(tasks))
        axes.set(xlabel="accuracy on task", ylabel="after learning task")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=24)
        bar.outline.set_visible(False)
        bar.set_label("accuracy")
        titled(axes, f"{label or section.label(section.groups[0])}, seed {result.config.seed}", section.title)
        if tasks <= 12:
            _write_cells(axes, matrix)
    return figure


# -- parts --------------------------------------------------------------------------------------------------------


def group_lines(
    section: Section, groups: Sequence[Group], of: Curve, label: Callable[[Group], str] | None = None
) -> list[Line]:
    lines = []
    for group in groups:
        mean, deviation = group.curve(of)
        x = np.arange(1.0, len(mean) + 1)
        lines.append(Line((label or section.label)(group), x, mean, deviation, group_look(section, group)))
    return lines


def spaced_tasks(tasks: int, count: int = CHOSEN_TASKS) -> list[int]:
    """Evenly spaced tasks from the first on, counted from 0, none of them the last.

    >>> spaced_tasks(30), spaced_tasks(3)
    ([0, 6, 12, 18, 24], [0, 1])
    """
    return list(range(0, tasks - 1, max(1, -(-(tasks - 1) // count))))


def _over_tasks(section: Section, groups: Sequence[Group], of: Curve, title: str, ylabel: str) -> Figure:
    with style():
        figure, (axes,) = new_figure(height=3.4 + 0.08 * max(0, len(groups) - 8))
        draw_lines(axes, group_lines(section, groups, of, section.figure_label))
        task_ticks(axes, section.tasks)
        axes.set(xlabel="number of tasks learned", ylabel=ylabel)
        titled(axes, f"{title}: {section.title}", seeds_note(groups) + _left_out(section, groups))
    return figure


def _left_out(section: Section, groups: Sequence[Group]) -> str:
    """Of a sweep, a figure may show a part only, and says so; that it has each method once needs no saying."""
    hidden = len(section.groups) - len(groups)
    return f"; {len(groups)} of {len(section.groups)} settings" if section.is_sweep and hidden else ""


def _task_lines(group: Group, chosen: Sequence[int]) -> list[Line]:
    """A line a task, from the moment it was learned; the older the task, the darker."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    lines = []
    for number, task in enumerate(chosen):
        values = group.matrices[:, task:, task]
        deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
        colour = to_hex(colormaps["viridis"](0.8 * number / max(1, len(chosen) - 1)))
        x = np.arange(task + 1.0, task + 1 + values.shape[1])
        lines.append(Line(f"task {task + 1}", x, values.mean(axis=0), deviation, Look(colour, colour, "o")))
    return lines


def _bars_note(groups: Sequence[Group]) -> str:
    return seeds_note(groups).replace("band", "bar")


def _write_cells(axes: Axes, matrix: Array) -> None:
    for (row, column), value in np.ndenumerate(matrix):
        if not np.isnan(value):
            ink = "white" if value < 0.55 else darkened("#222222")
            axes.text(column + 1, row + 1, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=ink)
