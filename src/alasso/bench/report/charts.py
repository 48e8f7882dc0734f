"""Interactive charts of one section, as data that BokehJS draws in the page. No chart runs code of its own.

Whatever draws one group carries as ``tags`` its colour on light, its colour on dark and the group's key: that is how
the page's dark mode and its legend find it. Its ``name`` is what hovering shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alasso.bench import metrics
from alasso.bench.registry import Look
from alasso.bench.report.aggregate import Array, Curve, Group
from alasso.bench.report.drawing import group_look, tick_places
from alasso.bench.report.figures import EVERY, bar_groups, decoupling_groups, group_lines, memory_groups
from alasso.bench.report.sections import Section
from alasso.errors import AlassoError

HEIGHT = 340
MARKERS = {
    "o": "circle",
    "s": "square",
    "^": "triangle",
    "v": "inverted_triangle",
    "D": "diamond",
    "d": "diamond",
    "*": "star",
    "<": "hex",
    ">": "hex",
    "P": "square_pin",
    "X": "triangle_pin",
    "p": "square_pin",
    "h": "hex",
    "": "dot",
}


def bokeh() -> Any:
    """The plotting interface, or one sentence how to get it."""
    try:
        import bokeh.plotting
    except ImportError as error:
        raise AlassoError("the page needs bokeh: pip install 'alasso[bench]'") from error
    return bokeh.plotting


def library() -> tuple[str, str]:
    """BokehJS itself, to be put into the page, and its version."""
    bokeh()
    import bokeh as package
    from bokeh.resources import Resources

    scripts = Resources(mode="inline", components=["bokeh"]).js_raw
    return "\n".join(scripts), str(package.__version__)


def as_data(plot: Any) -> dict[str, Any]:
    """The chart as JSON for ``Bokeh.embed.embed_item``."""
    from bokeh.embed import json_item

    return dict(json_item(plot))


def section_charts(section: Section, with_matrix: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Chart name → its JSON, for those that this section's results give.

    ``with_matrix``: groups whose whole accuracy matrix is in the page, for the charts that the page fills in from it.
    """
    accuracy = "mean accuracy"
    charts = {
        "mean-accuracy": lines_over_tasks(section, section.groups, metrics.accuracy_curve, accuracy),
        "spread": lines_over_tasks(section, section.groups, metrics.deviation_curve, "std over tasks"),
    }
    if section.tasks > 1 and with_matrix:
        charts["one-task"] = one_task_over_time(section, with_matrix)
        charts["matrix"] = matrix_chart(section, with_matrix[0])
    if bar_groups(section) and section.tasks >= EVERY:
        charts["bars"] = bars(section)
    for name, groups in (("decoupling", decoupling_groups(section)), ("memory", memory_groups(section))):
        if groups:
            charts[name] = lines_over_tasks(section, groups, metrics.accuracy_curve, accuracy, always=True)
    return {name: as_data(chart) for name, chart in charts.items()}


# -- kinds of charts ----------------------------------------------------------------------------------------------


def lines_over_tasks(section: Section, groups: Sequence[Group], of: Curve, ylabel: str, always: bool = False) -> Any:
    """Mean over seeds with its band; unless ``always``, groups outside the headline wait for the legend."""
    plot = new_plot("tasks learned", ylabel, section.tasks)
    points = []
    for group, line in zip(groups, group_lines(section, groups, of), strict=True):
        source = {
            "x": line.x,
            "mean": line.mean,
            "low": line.mean - line.deviation,
            "high": line.mean + line.deviation,
            "deviation": line.deviation,
        }
        common = {"x": "x", "source": column_source(source, group)}
        if len(group.results) > 1:
            band = plot.varea(**common, y1="low", y2="high", fill_color=line.look.light, fill_alpha=0.16)
            tag(band, section, group, line.look, always)
        points.append(line_and_points(plot, section, group, line.look, common, always))
    add_hover(
        plot, points, [("tasks learned", "@x"), (ylabel, "@mean{0.0000}"), ("± over seeds", "@deviation{0.0000}")]
    )
    return plot


def one_task_over_time(section: Section, groups: Sequence[Group]) -> Any:
    """Accuracy of one task while others are learned; the page's slider says which task, and fills in the numbers."""
    plot = new_plot("tasks learned", "accuracy of the task", section.tasks)
    points = []
    for group in groups:
        first = group.matrices.mean(axis=0)[:, 0]
        source = column_source({"x": np.arange(1.0, section.tasks + 1), "mean": first}, group)
        look = group_look(section, group)
        points.append(line_and_points(plot, section, group, look, {"x": "x", "source": source}))
    add_hover(plot, points, [("tasks learned", "@x"), ("accuracy", "@mean{0.0000}")])
    return plot


def bars(section: Section) -> Any:
    """Final accuracy at every fifth task, side by side."""
    shown = bar_groups(section)
    tasks = np.arange(EVERY, section.tasks + 1, EVERY, dtype=float)
    plot = new_plot("task", "final accuracy", section.tasks)
    plot.y_range.start, plot.y_range.end = 0, 1
    plot.x_range.start, plot.x_range.end = EVERY / 2, float(tasks[-1]) + EVERY / 2
    plot.xaxis.ticker = [int(t) for t in tasks]
    width = 0.82 * EVERY / len(shown)
    drawn = []
    for number, group in enumerate(shown):
        look = group_look(section, group)
        at = tasks + (number - (len(shown) - 1) / 2) * width
        final = group.matrices.mean(axis=0)[-1, EVERY - 1 :: EVERY]
        source = column_source({"x": at, "task": tasks, "mean": final}, group)
        bar = plot.vbar("x", top="mean", width=width * 0.92, source=source, fill_color=look.light, line_color=None)
        if look.hatch:
            bar.glyph.update(hatch_pattern=look.hatch, hatch_color="white", hatch_alpha=0.6, hatch_scale=6)
        drawn.append(tag(bar, section, group, look, always=True))
    add_hover(plot, drawn, [("task", "@task"), ("final accuracy", "@mean{0.0000}")])
    return plot


def matrix_chart(section: Section, group: Group) -> Any:
    """Accuracy on every task after learning every task; the page says of which group, and fills in the numbers."""
    from bokeh.palettes import Cividis256

    models = bokeh_models()
    matrix = group.matrices.mean(axis=0)
    after, on = np.nonzero(~np.isnan(matrix))
    plot = new_plot("accuracy on task", "after learning task", section.tasks)
    plot.x_range.start, plot.x_range.end = 0.5, section.tasks + 0.5
    plot.y_range.start, plot.y_range.end = section.tasks + 0.5, 0.5
    plot.yaxis.ticker = tick_places(section.tasks)
    plot.ygrid.visible = False
    mapper = models.LinearColorMapper(list(Cividis256), low=0, high=1)
    source = {"x": on + 1, "y": after + 1, "value": matrix[after, on]}
    cells = plot.rect(
        "x",
        "y",
        1,
        1,
        source=source,
        fill_color={"field": "value", "transform": mapper},
        line_color=None,
        dilate=True,
        name="cells",
    )
    plot.add_layout(
        models.ColorBar(color_mapper=mapper, width=10, border_line_color=None, background_fill_alpha=0), "right"
    )
    tooltips = [("after learning task", "@y"), ("on task", "@x"), ("accuracy", "@value{0.0000}")]
    plot.add_tools(models.HoverTool(renderers=[cells], tooltips=tooltips))
    return plot


def live_chart(ylabel: str, xlabel: str, series: Mapping[str, tuple[Look, Any, Any]]) -> Any:
    """Lines that the page fills in as runs go on: label → (look, x, y)."""
    plot = new_plot(xlabel, ylabel, None)
    points = []
    for label, (look, x, y) in series.items():
        source = bokeh_models().ColumnDataSource({"x": list(x), "y": list(y)}, name=label)
        style = {"line_color": look.light, "line_dash": dashes(look)}
        line = plot.line("x", "y", source=source, line_width=2, **style)
        dots = plot.scatter("x", "y", source=source, size=5, fill_color=look.light, line_color=look.light)
        if look.further:
            dots.glyph.fill_alpha = 0.0
        line.tags = dots.tags = [look.light, look.dark, label]
        dots.name = label
        points.append(dots)
    add_hover(plot, points, [(xlabel, "@x"), (ylabel, "@y{0.0000}")])
    return plot


# -- parts --------------------------------------------------------------------------------------------------------


def bokeh_models() -> Any:
    import bokeh.models

    return bokeh.models


def new_plot(xlabel: str, ylabel: str, tasks: int | None) -> Any:
    plot = bokeh().figure(
        height=HEIGHT,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=12,
        x_axis_label=xlabel,
        y_axis_label=ylabel,
    )
    if tasks is not None:
        plot.x_range.start, plot.x_range.end = 0.5, max(tasks, 2) + 0.5
    plot.y_range.only_visible = True
    plot.y_range.default_span = 0.2  # of a single number, around which Bokeh would show two whole units
    plot.xgrid.visible = False
    for axis in plot.axis:
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font = axis.major_label_text_font = "system-ui, sans-serif"
    if tasks is not None:
        plot.xaxis.ticker = tick_places(tasks)
    return plot


def column_source(columns: Mapping[str, Array], group: Group) -> Any:
    data = {name: rounded(values) for name, values in columns.items()}
    return bokeh_models().ColumnDataSource(data, name=group.config.hash)


def rounded(values: Array) -> list[float]:
    """As many digits as hovering shows: rounded once, and pages with many lines stay small."""
    return [int(value) if value == int(value) else round(float(value), 4) for value in values]


def line_and_points(
    plot: Any, section: Section, group: Group, look: Look, common: dict[str, Any], always: bool = False
) -> Any:
    width = 1.6 if look.further else 2.4
    line = plot.line(**common, y="mean", line_color=look.light, line_width=width, line_dash=dashes(look))
    tag(line, section, group, look, always)
    size = 6 if section.tasks <= 40 else 3.5
    marker = MARKERS[look.marker]
    points = plot.scatter(**common, y="mean", size=size, marker=marker, fill_color=look.light, line_color=look.light)
    points.glyph.hit_dilation = 1.5
    if look.further:
        points.glyph.fill_alpha = 0.0  # hollow, on any background
    return tag(points, section, group, look, always)


def tag(renderer: Any, section: Section, group: Group, look: Look, always: bool = False) -> Any:
    """Make the renderer known to legend and dark mode."""
    renderer.nonselection_glyph = renderer.muted_glyph = None  # never shown, and each as long as the line itself
    renderer.name = section.label(group)
    renderer.tags = [look.light, look.dark, group.config.hash]
    renderer.visible = always or any(group is shown for shown in section.headline)
    return renderer


def dashes(look: Look) -> list[int]:
    return [max(1, round(2 * dash)) for dash in look.dashes]


def add_hover(plot: Any, renderers: Sequence[Any], rows: Sequence[tuple[str, str]]) -> None:
    tooltips = [("", "$name"), *rows]
    plot.add_tools(bokeh_models().HoverTool(renderers=list(renderers), tooltips=tooltips, point_policy="snap_to_data"))
