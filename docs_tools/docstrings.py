"""Docstrings to Markdown. They are written to be read in the source: roles, maths, doctests and keywords need marks."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:func|class|meth|mod):`~?([^`]+)`")
_INLINE_MATHS = re.compile(r":math:`([^`]+)`")
_MATHS = re.compile(r"^\.\. math::[ ]*(?P<first>[^\n]*)\n(?P<rest>(?:[ ]+[^\n]*\n|[ ]*\n)*)", re.M)
_KEYWORD = re.compile(r"^(``[^\n]+?``(?:, ``[^\n`]+``)*)  (\S)", re.M)


class MarkdownDocstrings(Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring in Markdown."""
    text = _MATHS.sub(lambda match: displayed(match["first"], match["rest"]), text.rstrip() + "\n")
    text = _INLINE_MATHS.sub(r"$\1$", text)
    text = _ROLE.sub(r"`\1`", text)
    text = fenced_doctests(text)
    return keywords_as_list(text).rstrip()


def displayed(first: str, rest: str) -> str:
    """A block of maths: equations that stand apart become rows."""
    body = first.strip() + "\n" + textwrap.dedent(rest)
    equations = [part.strip() for part in re.split(r"\n\s*\n", body) if part.strip()]
    latex = " \\\\\n".join(equations)
    if len(equations) > 1 or re.search(
        r"(?<!\\)&", re.sub(r"\\begin\{cases\}.*?\\end\{cases\}", "", latex, flags=re.S)
    ):
        latex = f"\\begin{{aligned}}\n{latex}\n\\end{{aligned}}"
    return f"\n$$\n{latex}\n$$\n\n"


def fenced_doctests(text: str) -> str:
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        if line.startswith(">>>") and not within:
            lines += ["", "```pycon"]
            within = True
        elif within and not line.strip():
            lines.append("```")
            within = False
        lines.append(line)
    return "\n".join([*lines, "```"] if within else lines) + "\n"


def keywords_as_list(text: str) -> str:
    """Lines that begin with a keyword and two spaces, as items of a list; a line that goes on is part of its item."""
    paragraphs = text.split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        if _KEYWORD.match(paragraph):
            lines = [re.sub(_KEYWORD, r"- \1: \2", line) for line in paragraph.splitlines()]
            paragraphs[i] = "\n".join(line if line.startswith("- ") else "    " + line for line in lines)
    return "\n\n".join(paragraphs)
