"""LaTeX to MathML when the site is built: browsers draw it by themselves, without a network and without scripts.

latex2mathml knows most of what the documents use. What it lacks is seen to here: rows and columns of ``aligned``,
script letters (browsers ignore ``mathvariant``), accents that sit close to their letter, and a few names.
"""

from __future__ import annotations

import html
import re
from typing import Literal

from latex2mathml import converter

_SCRIPT = {letter: chr(0x1D49C + ord(letter) - ord("A")) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"} | dict(
    zip("BEFHILMR", "ℬℰℱℋℐℒℳℛ", strict=True)  # older than the block, and not repeated in it
)
_NAMES = {
    r"\arg\min": r"\operatorname{arg\,min}",
    r"\big\|": r"\big‖",
    r"\dotsc": r"\ldots",
}
_TAG = re.compile(r"\\tag\{([^}]*)\}")
_ALIGNED = re.compile(r"^\s*\\begin\{aligned\}(.*)\\end\{aligned\}\s*$", re.S)


def mathml(latex: str, display: bool) -> str:
    """A ``math`` element; a displayed one in a scrolling box, with its number, ``\\tag{…}``, at the right."""
    latex = prepared(latex)
    if not display:
        return convert(latex, display="inline")
    number = "".join(f'<span class="equation-number">({html.escape(tag)})</span>' for tag in _TAG.findall(latex))
    latex = _TAG.sub("", latex)
    aligned = _ALIGNED.match(latex)
    drawn = table(aligned.group(1)) if aligned else convert(latex, display="block")
    return f'<div class="equation"><div class="equation-body">{drawn}</div>{number}</div>'


def convert(latex: str, display: Literal["inline", "block"]) -> str:
    """latex2mathml, with the accents ˆ and ˜ in the place of the characters ^ and ~, which are large and far away."""
    drawn = converter.convert(latex, display=display)
    for far, near in (("&#x0005E;", "&#x2C6;"), ("&#x0007E;", "&#x2DC;")):
        drawn = re.sub(rf"<mo[^>]*>{far}</mo></mover>", f"<mo>{near}</mo></mover>", drawn)
    return drawn.replace("<mover>", '<mover accent="true">')


def prepared(latex: str) -> str:
    """The same in words that latex2mathml knows."""
    for name, known in _NAMES.items():
        latex = latex.replace(name, known)
    latex = re.sub(r"\\mathcal\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))", lambda m: f"{{{_SCRIPT[m[1] or m[2]]}}}", latex)
    return re.sub(r"\\mathrm\s+(\w)", r"\\mathrm{\1}", latex)


def table(aligned: str) -> str:
    """Rows and columns as a table: columns are flush right and left in turn, as LaTeX has them."""
    rows = []
    for row in split_outside(aligned, r"\\"):
        if row.strip():
            cells = enumerate(split_outside(row, "&"))
            rows.append("<mtr>" + "".join(cell(text, right=i % 2 == 0) for i, text in cells) + "</mtr>")
    return (
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">'
        f'<mtable displaystyle="true">{"".join(rows)}</mtable></math>'
    )


def cell(latex: str, right: bool) -> str:
    inner = re.sub(r"^<math[^>]*>|</math>$", "", convert(latex, display="block")) if latex.strip() else ""
    return f'<mtd class="{"flush-right" if right else "flush-left"}">{inner}</mtd>'


def split_outside(latex: str, mark: str) -> list[str]:
    """Split at a mark that is in no inner environment and no braces."""
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
            # An escaped character is never a mark; two backslashes within an environment are one thing.
            place += 2 if latex.startswith((r"\\", r"\{", r"\}", r"\&"), place) else 1
    return [*parts, latex[start:]]


_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


def drawn(page: str) -> str:
    """A page of HTML with the LaTeX that arithmatex marked drawn."""
    page = _BLOCK.sub(lambda match: mathml(html.unescape(match.group(1)), display=True), page)
    return _INLINE.sub(lambda match: mathml(html.unescape(match.group(1)), display=False), page)
