"""What a probe measured, drawn: lines turned steep side right, and one weight's true loss beside its surrogates."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from alasso.bench.atomic import write_whole
from alasso.report.drawing import darkened, new_figure, safe, style, titled
from alasso.report.figure_files import save
from alasso.report.names import LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from alasso.report.probe import Measured


def write_probe(measured: Measured, folder: Path) -> list[Path]:
    """Both figures and the numbers behind them."""
    written = []
    for name, figure in (("probe-sides", sides(measured)), ("probe-surrogates", surrogates(measured))):
        if figure is not None:
            written += save(figure, folder, name)
    numbers = folder / "probe.json"
    write_whole(numbers, (json.dumps(asdict(measured), ensure_ascii=False) + "\n").encode())
    return [*written, numbers]


def sides(measured: Measured) -> Figure | None:
    """Left, the change of the loss along every weight's line, steep side right; right, how uneven the sides are."""
    lines = measured.steep_right()
    if not len(lines):
        return None
    offsets = np.array(measured.offsets)
    with style():
        figure, (left, right) = new_figure(7.8, 3.5, columns=2, same_scale=False)
        end = np.where(np.abs(lines[:, -1]) > 0, np.abs(lines[:, -1]), 1.0)
        scaled = lines / end[:, None]
        for line in scaled:
            left.plot(offsets, line, color="#8A8A8A", lw=0.5, alpha=0.35)
        left.plot(offsets, np.median(scaled, axis=0), color=LOOKS["alasso"].light, lw=2.4)
        left.axvline(0, color="#999999", lw=0.8)
        left.set_ylim(-0.35, 1.08)
        left.set(xlabel="move of one weight, steep side right", ylabel="change of the loss / change at the right end")
        titled(left, "Each weight by itself", f"{len(lines)} weights that matter, and their median")
        _ratio_steps(right, measured)
    return figure


def _ratio_steps(axes: Axes, measured: Measured) -> None:
    """Share of weights whose sides differ by at least so much."""
    ratios = np.sort(measured.ratios())
    share = 1 - np.arange(len(ratios)) / len(ratios)
    shown = np.isfinite(ratios) & (ratios < 1e3)
    axes.step(ratios[shown], share[shown], where="post", color=LOOKS["alasso"].light)
    axes.set(xscale="log", xlim=(1, 1e3), ylim=(0, 1.02))
    axes.set_xlabel("rise of the steep side / rise of the shallow side")
    axes.set_ylabel("share of weights beyond")
    falls = float(np.isinf(ratios).mean())
    titled(axes, "How uneven the sides are", f"for {falls:.0%} the loss even falls on the shallow side")


def surrogates(measured: Measured) -> Figure | None:
    """True loss, SI's and ALASSO's surrogate over the line of the sample's most important weight."""
    importance = np.array(measured.importance)
    if not importance.any():
        return None
    chosen = int(importance.argmax())
    offsets, change = np.array(measured.offsets), measured.changes()[chosen]
    came_from = measured.came_from[chosen]
    with style():
        figure, (axes,) = new_figure(6.4, 3.6)
        edge = offsets[0] if came_from < 0 else offsets[-1]
        axes.axvspan(min(0.0, edge), max(0.0, edge), color="#F0F0F0", lw=0, zorder=0)
        where = "left" if came_from < 0 else "right"
        axes.annotate(
            "observed side",
            (edge / 2, 0.97),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            color="#666666",
        )
        axes.plot(offsets, change, color="#111111", label="true loss")
        for name, dashes in (("SI", (5, 2)), ("ALASSO", (None, None))):
            colour = LOOKS[name.lower()].light
            axes.plot(
                offsets, measured.surrogates[name][chosen], color=colour, dashes=dashes, label=f"{name}’s surrogate"
            )
        axes.axvline(0, color="#999999", lw=0.8)
        axes.set(
            xlabel=safe(f"move of {measured.weights[chosen]} from its optimum"), ylabel="change of the task's loss"
        )
        note = f"training moved it by {-came_from:+.3g}: it came from the {where}"
        titled(axes, "One weight’s line", note)
        axes.legend(frameon=False, labelcolor=["#111111", *(darkened(LOOKS[m].light) for m in ("si", "alasso"))])
    return figure
