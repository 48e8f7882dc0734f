"""Matplotlib in one style: what every figure shares. The only place that sets fonts, sizes and axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alasso.bench.registry import Look
from alasso.bench.report.aggregate import Array, Group, by_settings
from alasso.bench.report.sections import Section
from alasso.bench.report.style import look_of, on_ramp, plain
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#D9D9D9"
WIDTH, HEIGHT = 6.4, 4.0  # inches: a column and a half of a paper
SAMPLE = (1.02, 1.075, 1.13)  # where the piece of a line before its name lies, in widths of the axes

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same letters on every machine
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E8E8E8",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # TrueType: text stays text
    "svg.fonttype": "none",
    "svg.hashsalt": "alasso",  # the same figure gives the same file
}


def matplotlib() -> Any:
    """The package, or one sentence how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise AlassoError("figures need matplotlib: pip install 'alasso[bench]'") from error
    return matplotlib


@contextmanager
def style() -> Iterator[None]:
    with matplotlib().rc_context(STYLE):
        yield


def new_figure(
    width: float = WIDTH, height: float = HEIGHT, columns: int = 1, same_scale: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, off screen: no window system, nothing kept by pyplot."""
    matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, sharey=same_scale, squeeze=False)
    return figure, list(axes[0])


@dataclass(frozen=True)
class Line:
    """A mean over seeds with its deviation, ready to draw."""

    label: str
    x: Array
    mean: Array
    deviation: Array
    look: Look


def group_look(section: Section, group: Group) -> Look:
    """The method's or variant's look; further settings have shades and dashes, or, in a sweep of one method, hues."""
    family = section.family(group)
    place = next((number for number, other in enumerate(family) if other.config.hash == group.config.hash), 0)
    look = look_of(group.method, group.variant, place, len(family))
    if group.variant or not section.is_sweep or len(section.standard) > 1:
        return look
    step = [other.config.hash for other in sorted(family, key=by_settings)].index(group.config.hash)
    return on_ramp(step / max(1, len(family) - 1), look)


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Mean, band, a marker now and then, and the name at the right end of each line."""
    for number, line in enumerate(lines):
        every = max(1, len(line.x) // 8)
        axes.fill_between(
            line.x, line.mean - line.deviation, line.mean + line.deviation, color=line.look.light, alpha=0.15, lw=0
        )
        axes.plot(
            line.x,
            line.mean,
            **pen(line.look),
            # Markers of different lines at different places: lines that coincide stay visible.
            markevery=(number % every, every),
            label=safe(line.label),
            zorder=2.0 if line.look.further else 2.1,
        )
    label_ends(axes, lines)


def pen(look: Look) -> dict[str, Any]:
    """A look as matplotlib takes it: a method's own line strongest, further settings thinner with hollow markers."""
    return {
        "color": look.light,
        "linewidth": STYLE["lines.linewidth"] * (0.75 if look.further else 1.0),
        "dashes": look.dashes or (None, None),
        "marker": look.marker or None,
        "markerfacecolor": "white" if look.further else look.light,
        "markeredgewidth": 1.0,
    }


def label_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Names beside the last points, each behind a piece of its line, pushed apart so that none lies on another."""
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    height = axes.bbox.height * 72 / STYLE["figure.dpi"]  # points
    apart = (high - low) * 11.0 / height
    ends = np.array([line.mean[-1] for line in lines])
    across = axes.get_yaxis_transform()  # from the axes' width and the data's height
    for line, y in zip(lines, held_down(pushed_apart(ends, apart), apart, high), strict=True):
        axes.plot(
            SAMPLE, (y, y, y), transform=across, clip_on=False, **pen(line.look), markevery=(1, 2), label="_sample"
        )
        axes.annotate(
            safe(line.label),
            xy=(SAMPLE[-1], float(y)),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=darkened(line.look.light),
            annotation_clip=False,
        )
    axes.set_ylim(low, high)


def pushed_apart(values: Array, apart: float) -> Array:
    """Values moved as little as a few sweeps allow, so that neighbours are ``apart`` from each other.

    >>> pushed_apart(np.array([0.5, 0.5, 2.0]), 1.0).tolist()
    [0.0, 1.0, 2.0]
    """
    order = np.argsort(values, kind="stable")
    placed = values[order].astype(float)
    for _ in range(500):
        overlap = np.maximum(apart - np.diff(placed), 0.0)
        if overlap.max(initial=0.0) < apart * 1e-3:
            break
        placed[:-1] -= overlap / 2
        placed[1:] += overlap / 2
    result = np.empty_like(placed)
    result[order] = placed
    return result


def held_down(placed: Array, apart: float, ceiling: float) -> Array:
    """The same, none above the ceiling, where titles are; neighbours stay ``apart``.

    >>> held_down(np.array([2.5, 0.5, 1.5]), 1.0, ceiling=2.0).tolist()
    [2.0, 0.0, 1.0]
    """
    held: Array = placed.copy()
    highest = ceiling
    for i in np.argsort(-placed, kind="stable"):
        held[i] = min(held[i], highest)
        highest = held[i] - apart
    return held


def darkened(colour: str, share: float = 0.25) -> str:
    """A colour that can be read as text on white."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(channel * (1 - share)):02X}" for channel in channels)


def safe(text: str) -> str:
    """A dollar sign would start a formula."""
    return plain(text, 120).replace("$", r"\$")


def seeds_note(groups: Sequence[Group]) -> str:
    counts = {len(group.results) for group in groups}
    if counts == {1}:
        return "one seed"
    shown = str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"mean of {shown} seeds, band ± one standard deviation"


def titled(axes: Axes, title: str, *notes: str) -> None:
    """Title, and under it in grey, a line each, what one must know to read the figure."""
    lines = [safe(note) for note in notes if note]
    axes.set_title(safe(title), pad=8 + 12 * len(lines))
    if lines:
        axes.annotate(
            "\n".join(lines),
            (0, 1),
            (0, 7),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8,
            color="#666666",
        )


def tick_places(tasks: int) -> list[int]:
    """Whole numbers with room between them, among them the first and the last task.

    >>> tick_places(3), tick_places(30), tick_places(95)
    ([1, 2, 3], [1, 5, 10, 15, 20, 25, 30], [1, 10, 20, 30, 40, 50, 60, 70, 80, 95])
    """
    step = next(step for step in (1, 2, 5, 10, 20, 50, 10**6) if tasks <= 10 * step)
    inner = [t for t in range(step, tasks, step) if t != 1 and tasks - t >= 0.6 * step]
    return [1, *inner, tasks] if tasks > 1 else [1]


def task_ticks(axes: Axes, tasks: int) -> None:
    axes.set_xticks(tick_places(tasks))
