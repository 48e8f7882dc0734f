"""What a probe measured, drawn: lines turned steep side right, and one weight's true loss beside its surrogates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from alasso.bench.config import count_of
from alasso.bench.io import write_whole
from alasso.bench.probe import Measured
from alasso.bench.registry import METHODS, Look
from alasso.bench.report.figures import save
from alasso.bench.report.style import INK, Line, label_ends, new_figure, pen, safe, style, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More lines of single weights would be a grey ground, and a page with several probes too large.
MOST_LINES = 150


def write_probe(measured: Measured, folder: Path) -> list[Path]:
    """Writes both figures and the numbers behind them.

    Args:
        measured: What a probe found.
        folder: Where the files go; made if it is missing.

    Returns:
        The files written.

    Raises:
        AlassoError: The folder takes no files.
    """
    written = []
    for name, figure in (("probe-sides", sides(measured)), ("probe-surrogates", surrogates(measured))):
        if figure is not None:
            written += save(figure, folder, name)
    numbers = folder / "probe.json"
    write_whole(numbers, measured.as_file())
    return [*written, numbers]


@style()
def sides(measured: Measured) -> Figure | None:
    """Draws the change of the loss along every weight's line, steep side right, and how uneven the sides are.

    Args:
        measured: What a probe found.

    Returns:
        The figure; None where no weight has a side that rises.
    """
    lines = measured.steep_right()
    lines = lines[lines[:, -1] > 0]
    if not len(lines):
        return None
    offsets, scaled = np.array(measured.offsets), lines / lines[:, [-1]]
    shown = scaled[:: -(-len(scaled) // MOST_LINES)]
    figure, (left, right) = new_figure(7.8, 3.5, columns=2, same_scale=False)
    left.plot(offsets, shown.T, color="#8A8A8A", lw=0.5, alpha=0.35)
    left.plot(offsets, np.median(scaled, axis=0), color=METHODS["alasso"].look.light, lw=2.4)
    left.axvline(0, color="#999999", lw=0.8)
    left.set(ylim=(-1.05, 1.08), xlabel="move of one weight, steep side right")
    left.set_ylabel("change of the loss / rise at the right end")
    weights = count_of(len(lines), "weight")
    note = f"{weights} with a side that rises, and their median"
    if len(shown) < len(lines):
        note = f"{len(shown)} of {weights} with a rising side; median of all"
    titled(left, "Each weight by itself", note)
    _evenness(right, measured)
    return figure


def _evenness(axes: Axes, measured: Measured) -> None:
    """How many weights are how symmetric."""
    evenness = measured.shallow_over_steep()
    axes.hist(evenness, bins=list(np.linspace(-1, 1, 21)), color=METHODS["alasso"].look.light, rwidth=0.92)
    axes.axvline(float(np.median(evenness)), color=INK, lw=1.2)
    axes.set(xlabel="change of the shallow side / rise of the steep side", ylabel="weights", xlim=(-1.02, 1.02))
    axes.set_xticks([-1, 0, 1], ["−1\nfalls as it rises", "0\nflat", "1\nsymmetric"])
    first, _, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    titled(axes, "How uneven the sides are", "line: median")


@style()
def surrogates(measured: Measured) -> Figure | None:
    """Draws the true loss, SI's and ALASSO's surrogate over the line of the sample's most important weight.

    Args:
        measured: What a probe found.

    Returns:
        The figure; None where no weight of the sample is important.
    """
    importance = np.array(measured.importance)
    if not importance.any():
        return None
    chosen = int(importance.argmax())
    offsets, came_from = np.array(measured.offsets), measured.came_from[chosen]
    figure, (axes,) = new_figure(6.4, 3.6)
    edge = offsets[0] if came_from < 0 else offsets[-1]
    axes.axvspan(min(0.0, edge), max(0.0, edge), color="#F0F0F0", lw=0, zorder=0)
    axes.axvspan(min(0.0, came_from), max(0.0, came_from), color="#DADADA", lw=0, zorder=0)
    across = axes.get_xaxis_transform()  # from the data's width and the axes' height
    axes.text(edge / 2, 0.97, "observed side", transform=across, ha="center", va="top", color="#666666")
    lines = [
        Line(label, offsets, values[chosen], np.zeros_like(offsets), _plain_line(method, dashes))
        for label, values, method, dashes in (
            ("true loss", measured.changes(), "single-task", ()),
            ("SI’s surrogate", measured.surrogate("SI"), "si", ()),
            ("ALASSO’s surrogate", measured.surrogate("ALASSO"), "alasso", (4, 2)),
        )
    ]
    for line in lines:
        axes.plot(line.x, line.mean, **pen(line.look))
    label_ends(axes, lines)
    axes.axvline(0, color="#999999", lw=0.8)
    axes.set_xlabel(safe(f"move of {measured.weights[chosen]} from where training left it"))
    axes.set_ylabel("change of the task's loss")
    where = "left" if came_from < 0 else "right"
    note = f"the sample’s most important; training moved it by {-came_from:+.3g}, from the {where}: the dark strip"
    titled(axes, "One weight’s line", note)
    return figure


def _plain_line(method: str, dashes: tuple[float, ...]) -> Look:
    """The method's colour alone: these lines are curves, not points of tasks."""
    return replace(METHODS[method].look, marker="", dashes=dashes)
