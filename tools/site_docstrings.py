"""Turns docstrings into Markdown for the documentation site: roles, maths and doctests.

Docstrings are written to be read in the source. mkdocstrings parses their Google-style sections afterwards.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:func|class|meth|mod):`~?([^`]+)`")
_INLINE_MATHS = re.compile(r":math:`([^`]+)`")
_MATHS = re.compile(r"^\.\. math::[ ]*(?P<first>[^\n]*)\n(?P<rest>(?:[ ]+[^\n]*\n|[ ]*\n)*)", re.M)
_CASES = re.compile(r"\\begin\{cases\}.*?\\end\{cases\}", re.S)


class MarkdownDocstrings(Extension):
    """Rewrites every docstring as griffe reads it."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites one docstring.

        Args:
            obj: What griffe has just read.
        """
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Turns a docstring into Markdown.

    Args:
        text: The docstring without its indentation.

    Returns:
        The same text with ``$…$`` for maths, backticks for roles and fences around doctests.
    """
    text = _MATHS.sub(lambda match: displayed(match["first"], match["rest"]), text.rstrip() + "\n")
    text = _INLINE_MATHS.sub(r"$\1$", text)
    text = _ROLE.sub(r"`\1`", text)
    return fenced_doctests(text).rstrip()


def displayed(first: str, rest: str) -> str:
    """Turns the body of a ``.. math::`` directive into a ``$$`` block.

    Args:
        first: What stands on the directive's own line.
        rest: The indented lines below it.

    Returns:
        One block; equations separated by blank lines become its rows.
    """
    body = first.strip() + "\n" + textwrap.dedent(rest)
    equations = [part.strip() for part in re.split(r"\n\s*\n", body) if part.strip()]
    latex = " \\\\\n".join(equations)
    if len(equations) > 1 or re.search(r"(?<!\\)&", _CASES.sub("", latex)):
        latex = f"\\begin{{aligned}}\n{latex}\n\\end{{aligned}}"
    return f"\n$$\n{latex}\n$$\n\n"


def fenced_doctests(text: str) -> str:
    """Puts a fence around every doctest.

    Args:
        text: A docstring.

    Returns:
        The same text, with each block that begins with ``>>>`` as a code block.
    """
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
