"""Turns LaTeX into MathML when the site is built, so that browsers draw equations without a network or scripts.

latex2mathml knows most of what the documents use. This file adds rows and columns of ``aligned``, script letters
(browsers ignore ``mathvariant``), accents close to their letter, and a few names.
"""

from __future__ import annotations

import html
import re
from typing import Literal

from latex2mathml import converter

_SCRIPT = {letter: chr(0x1D49C + ord(letter) - ord("A")) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"} | dict(
    zip("BEFHILMR", "ℬℰℱℋℐℒℳℛ", strict=True)  # Unicode had these before the block, and does not repeat them there
)
_NAMES = {
    r"\arg\min": r"\operatorname{arg\,min}",
    r"\big\|": r"\big‖",
    r"\dotsc": r"\ldots",
}
_TAG = re.compile(r"\\tag\{([^}]*)\}")
_ALIGNED = re.compile(r"^\s*\\begin\{aligned\}(.*)\\end\{aligned\}\s*$", re.S)
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


def drawn(page: str) -> str:
    """Draws every equation of a page.

    Args:
        page: HTML in which arithmatex marked the LaTeX.

    Returns:
        The page with MathML in place of the LaTeX.
    """
    page = _BLOCK.sub(lambda match: mathml(html.unescape(match.group(1)), display=True), page)
    return _INLINE.sub(lambda match: mathml(html.unescape(match.group(1)), display=False), page)


def mathml(latex: str, display: bool) -> str:
    """Draws one equation.

    Args:
        latex: The equation; ``\\tag{…}`` gives its number.
        display: Whether it stands on a line of its own.

    Returns:
        A ``math`` element; a displayed one in a box that scrolls, with its number at the right.
    """
    latex = _in_known_words(latex)
    if not display:
        return _converted(latex, display="inline")
    number = "".join(f'<span class="equation-number">({html.escape(tag)})</span>' for tag in _TAG.findall(latex))
    latex = _TAG.sub("", latex)
    aligned = _ALIGNED.match(latex)
    equation = _table(aligned.group(1)) if aligned else _converted(latex, display="block")
    return f'<div class="equation"><div class="equation-body">{equation}</div>{number}</div>'


def _converted(latex: str, display: Literal["inline", "block"]) -> str:
    """Calls latex2mathml, and replaces the wide characters ^ and ~ over a letter by the accents ˆ and ˜."""
    element = converter.convert(latex, display=display)
    for far, near in (("&#x0005E;", "&#x2C6;"), ("&#x0007E;", "&#x2DC;")):
        element = re.sub(rf"<mo[^>]*>{far}</mo></mover>", f"<mo>{near}</mo></mover>", element)
    return element.replace("<mover>", '<mover accent="true">')


def _in_known_words(latex: str) -> str:
    for name, known in _NAMES.items():
        latex = latex.replace(name, known)
    latex = re.sub(r"\\mathcal\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))", lambda m: f"{{{_SCRIPT[m[1] or m[2]]}}}", latex)
    return re.sub(r"\\mathrm\s+(\w)", r"\\mathrm{\1}", latex)


def _table(aligned: str) -> str:
    """Draws rows and columns as a table whose columns are flush right and left in turn, as in LaTeX."""
    rows = []
    for row in _split_outside(aligned, r"\\"):
        if row.strip():
            cells = enumerate(_split_outside(row, "&"))
            rows.append("<mtr>" + "".join(_cell(text, right=i % 2 == 0) for i, text in cells) + "</mtr>")
    return (
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">'
        f'<mtable displaystyle="true">{"".join(rows)}</mtable></math>'
    )


def _cell(latex: str, right: bool) -> str:
    inner = re.sub(r"^<math[^>]*>|</math>$", "", _converted(latex, display="block")) if latex.strip() else ""
    return f'<mtd class="{"flush-right" if right else "flush-left"}">{inner}</mtd>'


def _split_outside(latex: str, mark: str) -> list[str]:
    """Splits at a mark outside inner environments and braces."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(latex):
        if latex.startswith((r"\begin", "{"), place):
            depth += 1
        elif latex.startswith("}", place) or latex.startswith(r"\end{", place):
            depth -= 1
        if depth == 0 and latex.startswith(mark, place):
            parts.append(latex[start:place])
            place = start = place + len(mark)
        else:
            # An escaped character is never a mark.
            place += 2 if latex.startswith((r"\\", r"\{", r"\}", r"\&"), place) else 1
    return [*parts, latex[start:]]
