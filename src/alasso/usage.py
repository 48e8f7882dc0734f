"""Mistakes that the argument parser finds, in one line like every other mistake of the user's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from alasso.errors import AlassoError
from alasso.report.names import plain

#: What the parser raises; typer has click inside it or beside it, depending on its version, and shows this class alone.
ParserError: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


class OnceEach(TyperCommand):
    """A command that refuses a second value where there is room for one; the parser would drop the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        refuse_repeated(given)
        return super().parse_args(ctx, args)


def refuse_repeated(given: Sequence[Any]) -> None:
    """``given``: the parameters of a command line, each as often as it is there. Flags may be repeated."""
    for one in given:
        takes_one_value = one.param_type_name == "option" and not one.multiple and not one.is_flag
        if takes_one_value and given.count(one) > 1:
            raise AlassoError(f"{one.opts[0]} takes one value: give it once, not {given.count(one)} times")


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
