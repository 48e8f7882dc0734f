"""Mistakes that the argument parser finds, in one line like every other mistake of the user's."""

from __future__ import annotations

import re
from typing import Any

import typer

from alasso.bench.report.style import plain

#: What the parser raises; typer has click inside it or beside it, depending on its version, and shows this class alone.
ParserError: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


def is_help(error: Any) -> bool:
    """Whether it is no mistake but help that was printed already: a command group without a command."""
    return type(error).__name__ == "NoArgsIsHelpError"


def in_one_line(error: Any) -> str:
    """What is wrong, what was probably meant, and where to read more."""
    close = list(getattr(error, "possibilities", None) or [])  # the nearest first
    said = reworded(str(error.message if close else error.format_message()))
    if said.startswith("missing argument"):
        said += ", which comes before the options"  # those that take several values would take it for one of them
    if close:
        said += f"; did you mean {close[0]}?"
    context = getattr(error, "ctx", None)
    if context is None:
        return said
    return f"{said}{' See' if said.endswith('?') else '; see'} {context.command_path} --help"


def reworded(message: str) -> str:
    """A parser's sentences as one of ours, on one line.

    >>> reworded("No such command 'rn'. Did you mean 'run'?")
    "no such command 'rn'; did you mean 'run'?"
    >>> reworded("Invalid value for '--tasks': Input should be a valid integer, unable to parse string as an integer")
    "invalid value for '--tasks': it should be a valid integer"
    """
    line = plain(" ".join(message.split()), longest=400).removesuffix(".")
    line = re.sub(r"\. ([A-Z])", lambda start: f"; {start[1].lower()}", line)
    line = re.sub(r": Input should (.*?)(, unable to .*)?$", r": it should \1", line)
    return line[:1].lower() + line[1:]
