"""How methods are called and drawn: the same name, colour, marker and dash everywhere, in one style of figures.

Colours are Okabe and Ito's, told apart with any colour vision; each has a twin for dark backgrounds. This is the only
place that sets matplotlib's fonts, sizes and axes. matplotlib is loaded when the first figure is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from alasso.bench.registry import BLUE, GREEN, METHODS, SOOT, VERMILLION, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from alasso.bench.report.aggregate import Array, Group

# -- words and numbers -----------------------------------------------------------------------------------------------


def plain(value: object, longest: int = 60) -> str:
    """Text fit to be shown on a line of a terminal, a figure or a page: printable, and not endless.

    >>> plain("a\\x1b[31mb"), plain("x" * 9, 5), plain(0.30000000000000004)
    ('a?[31mb', 'xxxx…', '0.3')
    """
    text = f"{value:g}" if isinstance(value, float) else str(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(-0.0001), number(-0.25), number(None)
    ('0.000', '−0.250', '–')
    """
    if value is None:
        return "–"
    shown = f"{value:.{digits}f}"
    if float(shown) == 0:
        shown = shown.removeprefix("-")
    return shown.replace("-", "−")


# -- looks -----------------------------------------------------------------------------------------------------------

_ORANGE, _VIOLET, _NAVY = ("#E69F00", "#F2BE4A"), ("#6A51A3", "#A995DC"), ("#00334F", "#9CC9E5")
_BROWN = ("#8C4F1B", "#CF9A66")

VARIANT_LOOKS: dict[str, Look] = {
    "asymmetric only": Look(*_ORANGE, "v", (5, 2)),
    "accurate only": Look(*_VIOLET, "d", (5, 2)),
    "no decoupling": Look(*_BROWN, "X", (3, 2)),
}
#: Lines and bars of further settings of one method: its colour in another shade, and a dash and a hatch for each.
FURTHER = (
    ((7, 2), "/"),
    ((2.5, 1.5), "\\"),
    ((5, 1.5, 1, 1.5), "x"),
    ((1, 1.3), "."),
    ((3, 1.3, 1, 1.3, 1, 1.3), "-"),
    ((12, 3), "+"),
    ((4.5, 3), "|"),
)
#: Shares of black and of white in further shades; nearest to the method's own.
DARKEST, LIGHTEST, APART = -0.56, 0.48, 0.2
UNKNOWN_LOOK = Look(*SOOT, "o")


def look_of(method: str, variant: str | None = None, place: int = 0, of: int = 1) -> Look:
    """``place``: 0 for the main one of ``of`` lines of a method or of its variant, 1, 2, … for the others in order."""
    look = METHODS[method].look if method in METHODS else UNKNOWN_LOOK
    look = VARIANT_LOOKS.get(variant or "", look)
    if not place:
        return look
    share = further_shade(place, of)
    dashes, hatch = FURTHER[(place - 1) % len(FURTHER)]
    return replace(
        look,
        light=shaded(look.light, share),
        dark=shaded(look.dark, share if share > 0 else 0.6 * share),  # nothing goes under in a dark page
        dashes=dashes,
        further=True,
        hatch=hatch,
    )


def further_shade(place: int, of: int) -> float:
    """Share of black, below zero, or of white: from dark to light in order, none too near the method's own colour.

    >>> [round(further_shade(place, 5), 2) for place in (1, 2, 3, 4)], further_shade(1, 2)
    ([-0.56, -0.35, 0.27, 0.48], 0.48)
    """
    along = (place - 1) / (of - 2) if of > 2 else 1.0
    share = DARKEST + along * (LIGHTEST - DARKEST - 2 * APART)
    return share if share < -APART else share + 2 * APART


def shaded(colour: str, share: float) -> str:
    """Mixed with black or white; what is nearly so already, with the other one.

    >>> shaded("#0072B2", -0.5), shaded("#0072B2", 0.5), shaded("#111111", -0.5)
    ('#003959', '#80B8D8', '#888888')
    """
    lightness = sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / (3 * 255)
    to_white = lightness < 0.2 or (share > 0 and lightness < 0.9)
    return _between(colour, "#FFFFFF" if to_white else "#000000", abs(share))


#: Colours of a sweep, from its smallest setting to its largest, on light and on dark.
RAMP = (_NAVY, BLUE, GREEN, _ORANGE, VERMILLION)


def on_ramp(share: float, look: Look) -> Look:
    """``look`` in the colour of this place between the ends of a sweep, 0 to 1.

    >>> on_ramp(0.0, UNKNOWN_LOOK).light, on_ramp(0.5, UNKNOWN_LOOK).light, on_ramp(1.0, UNKNOWN_LOOK).light
    ('#00334F', '#009E73', '#D55E00')
    """
    at = share * (len(RAMP) - 1)
    below = min(int(at), len(RAMP) - 2)
    light, dark = (_between(RAMP[below][i], RAMP[below + 1][i], at - below) for i in (0, 1))
    return replace(look, light=light, dark=dark)


def _between(one: str, other: str, share: float) -> str:
    channels = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02X}" for a, b in channels)


# -- figures ---------------------------------------------------------------------------------------------------------

INK = "#222222"
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
    """The library, loaded at the first figure: pages and tables do without it."""
    import matplotlib.figure

    return matplotlib


@contextmanager
def style() -> Iterator[None]:
    """The style, around what draws or saves a figure; also a decorator: ``@style()``."""
    with matplotlib().rc_context(STYLE):
        yield


def new_figure(
    width: float = WIDTH, height: float = HEIGHT, columns: int = 1, same_scale: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side, off screen: no window system, nothing kept by pyplot."""
    figure = matplotlib().figure.Figure(figsize=(width, height), layout="constrained")
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


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Mean, band, a marker now and then, and the name at the right end of each line."""
    for number, line in enumerate(lines):
        every = max(1, len(line.x) // 8)
        low, high = line.mean - line.deviation, line.mean + line.deviation
        axes.fill_between(line.x, low, high, color=line.look.light, alpha=0.15, lw=0)
        # Markers of different lines at different places: lines that coincide stay visible.
        markers = (number % every, every)
        order = 2.0 if line.look.further else 2.1
        axes.plot(line.x, line.mean, **pen(line.look), markevery=markers, label=safe(line.label), zorder=order)
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
    """Names beside the last points, each behind a piece of its line, so that none lies on another."""
    axes.margins(x=0.02)
    low, high = axes.get_ylim()
    points = axes.bbox.height * 72 / STYLE["figure.dpi"]
    across = axes.get_yaxis_transform()  # from the axes' width and the data's height
    places = pushed_apart([float(line.mean[-1]) for line in lines], (high - low) * 11.0 / points, high)
    for line, y in zip(lines, places, strict=True):
        sample = {**pen(line.look), "markevery": (1, 2), "label": "_sample"}
        axes.plot(SAMPLE, (y, y, y), transform=across, clip_on=False, **sample)
        axes.annotate(
            safe(line.label),
            xy=(SAMPLE[-1], y),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=shaded(line.look.light, -0.25),  # to be read on white
            annotation_clip=False,
        )
    axes.set_ylim(low, high)


def pushed_apart(values: Sequence[float], apart: float, ceiling: float) -> list[float]:
    """Values moved little, so that neighbours are ``apart`` from each other and none is above the ceiling.

    >>> [round(place, 3) for place in pushed_apart([0.5, 0.5, 2.0], 1.0, ceiling=9.0)]
    [0.0, 1.0, 2.0]
    >>> pushed_apart([2.5, 0.5, 1.5], 1.0, ceiling=2.0)
    [2.0, 0.0, 1.0]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed = [values[i] for i in order]
    for _ in range(200):
        for i in range(1, len(placed)):
            overlap = max(0.0, apart - (placed[i] - placed[i - 1]))
            placed[i - 1] -= overlap / 2
            placed[i] += overlap / 2
    held = [min(place, ceiling - apart * below) for below, place in enumerate(reversed(placed))]
    by_value = dict(zip(reversed(order), held, strict=True))
    return [by_value[i] for i in range(len(values))]


def safe(text: str) -> str:
    """A dollar sign would start a formula."""
    return plain(text, 120).replace("$", r"\$")


def seeds_note(groups: Sequence[Group]) -> str:
    """How many seeds lie behind a figure, and what its bands are."""
    counts = {len(group.results) for group in groups}
    if counts == {1}:
        return "one seed"
    shown = str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"mean of {shown} seeds, band ± one standard deviation"


def titled(axes: Axes, title: str, *notes: str) -> None:
    """Title, and under it in grey, a line each, what one must know to read the figure."""
    lines = "\n".join(safe(note) for note in notes if note)
    axes.set_title(safe(title), pad=8 + 12 * len(lines.splitlines()))
    at: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(lines, (0, 1), (0, 7), **at, fontsize=8, color="#666666")


def tick_places(tasks: int) -> list[int]:
    """Whole numbers with room between them, among them the first and the last task.

    >>> tick_places(3), tick_places(30), tick_places(95)
    ([1, 2, 3], [1, 5, 10, 15, 20, 25, 30], [1, 10, 20, 30, 40, 50, 60, 70, 80, 95])
    """
    step = next(step for step in (1, 2, 5, 10, 20, 50, 10**6) if tasks <= 10 * step)
    inner = [t for t in range(step, tasks, step) if t != 1 and tasks - t >= 0.6 * step]
    return [1, *inner, tasks] if tasks > 1 else [1]
