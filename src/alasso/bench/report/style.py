"""How methods are called and drawn: the same name, colour, marker and dash everywhere.

Colours are Okabe and Ito's, told apart with any colour vision; each has a twin for dark backgrounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Methods in the order of legends and tables.
METHOD_NAMES: dict[str, str] = {
    "alasso": "ALASSO",
    "alasso-memory": "ALASSO + memory",
    "si": "SI",
    "ewc": "EWC",
    "online-ewc": "online EWC",
    "mas": "MAS",
    "imm-mean": "IMM (mean)",
    "imm-mode": "IMM (mode)",
    "vcl": "VCL",
    "vcl-coreset": "VCL + coreset",
    "sgd-dropout": "SGD + dropout",
    "sgd": "SGD",
    "single-task": "single-task",
    "multi-task": "multi-task",
}
METHOD_ORDER = tuple(METHOD_NAMES)


@dataclass(frozen=True)
class Look:
    """How a line is drawn: colour on light and on dark, matplotlib's marker, and the lengths of its dashes.

    ``further``: for a method's further settings, hollow markers and a thinner line. ``hatch``: lines in its bars.
    """

    light: str
    dark: str
    marker: str = ""
    dashes: tuple[float, ...] = ()
    further: bool = False
    hatch: str = ""


_BLUE, _VERMILLION, _GREEN = ("#0072B2", "#4FB3EE"), ("#D55E00", "#F28A3C"), ("#009E73", "#2CC89B")
_SKY, _PINK, _WINE = ("#3D9BD1", "#8FD0F5"), ("#C0649A", "#E79BC5"), ("#882255", "#D977A8")
_GREY, _INK, _SOOT = ("#8A8A8A", "#9A9A9A"), ("#111111", "#F2F2F2"), ("#555555", "#C4C4C4")
_ORANGE, _VIOLET, _NAVY = ("#E69F00", "#F2BE4A"), ("#6A51A3", "#A995DC"), ("#00334F", "#9CC9E5")
_BROWN = ("#8C4F1B", "#CF9A66")

LOOKS: dict[str, Look] = {
    "alasso": Look(*_BLUE, "o"),
    "alasso-memory": Look(*_BLUE, "*", (5, 2)),
    "si": Look(*_VERMILLION, "s"),
    "ewc": Look(*_GREEN, "^"),
    "online-ewc": Look(*_GREEN, "v", (5, 2)),
    "mas": Look(*_PINK, "D"),
    "imm-mean": Look(*_WINE, "<"),
    "imm-mode": Look(*_WINE, ">", (5, 2)),
    "vcl": Look(*_SKY, "P"),
    "vcl-coreset": Look(*_SKY, "X", (5, 2)),
    "sgd-dropout": Look(*_GREY, "p", (5, 2)),
    "sgd": Look(*_GREY, "h"),
    "single-task": Look(*_INK, "", (6, 3)),
    "multi-task": Look(*_SOOT, "", (1.5, 2)),
}
VARIANT_LOOKS: dict[str, Look] = {
    "asymmetric only": Look(*_ORANGE, "v", (5, 2)),
    "accurate only": Look(*_VIOLET, "d", (5, 2)),
    "no decoupling": Look(*_BROWN, "X", (3, 2)),
}
#: Lines and bars of further settings of one method: its colour in another shade, and a dash and a hatch for each.
FURTHER_DASHES: tuple[tuple[float, ...], ...] = (
    (7, 2),
    (2.5, 1.5),
    (5, 1.5, 1, 1.5),
    (1, 1.3),
    (3, 1.3, 1, 1.3, 1, 1.3),
    (12, 3),
    (4.5, 3),
)
FURTHER_HATCHES = ("/", "\\", "x", ".", "-", "+", "|")
DARKEST, LIGHTEST, APART = (
    -0.56,
    0.48,
    0.2,
)  # shares of black and of white in further shades; nearest to the method's own
UNKNOWN_LOOK = Look(*_SOOT, "o")


def look_of(method: str, variant: str | None = None, place: int = 0, of: int = 1) -> Look:
    """``place``: 0 for the main one of ``of`` lines of a method or of its variant, 1, 2, … for the others in order."""
    look = VARIANT_LOOKS[variant] if variant in VARIANT_LOOKS else LOOKS.get(method, UNKNOWN_LOOK)
    if not place:
        return look
    share = further_shade(place, of)
    return replace(
        look,
        light=shaded(look.light, share),
        dark=shaded(look.dark, share if share > 0 else 0.6 * share),  # nothing goes under in a dark page
        dashes=FURTHER_DASHES[(place - 1) % len(FURTHER_DASHES)],
        further=True,
        hatch=FURTHER_HATCHES[(place - 1) % len(FURTHER_HATCHES)],
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
RAMP = (_NAVY, _BLUE, _GREEN, _ORANGE, _VERMILLION)


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
