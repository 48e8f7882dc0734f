"""How methods are called and drawn: the same name, colour, marker and dash everywhere.

Colours are Okabe and Ito's, told apart with any colour vision; each has a twin for dark backgrounds.
"""

from __future__ import annotations

from dataclasses import replace

from alasso.bench.registry import BLUE, GREEN, METHODS, SOOT, VERMILLION, Look

_ORANGE, _VIOLET, _NAVY = ("#E69F00", "#F2BE4A"), ("#6A51A3", "#A995DC"), ("#00334F", "#9CC9E5")
_BROWN = ("#8C4F1B", "#CF9A66")

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
UNKNOWN_LOOK = Look(*SOOT, "o")


def look_of(method: str, variant: str | None = None, place: int = 0, of: int = 1) -> Look:
    """``place``: 0 for the main one of ``of`` lines of a method or of its variant, 1, 2, … for the others in order."""
    look = METHODS[method].look if method in METHODS else UNKNOWN_LOOK
    look = VARIANT_LOOKS.get(variant or "", look)
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
