"""What commands say to whom they run for, beside their tables."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import typer
from rich.console import Console

STOPPED = 130  # as shells report a program ended by Ctrl-C


class Terminal(Console):
    """Rich's own ends the program where nobody reads on (``| head``); what is being trained is to be saved first."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def say(line: str) -> None:
    """A line as it is: file names and numbers are not coloured, brackets are no markup."""
    Terminal().print(line, highlight=False, soft_wrap=True, markup=False)


def end_stopped(where: object, words: Sequence[str]) -> typer.Exit:
    """Say what is saved and which command goes on; to be raised."""
    saved = f"; saved up to {where}" if str(where) else ""
    say(f"\nStopped{saved}. Go on with:\n  {shlex.join(['alasso', *words])}")
    return typer.Exit(STOPPED)


def is_out_of_memory(error: Exception) -> bool:
    """Of Python, of torch on a CPU, of torch on a GPU: they share no class."""
    return isinstance(error, MemoryError) or any(
        words in str(error)
        for words in ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
    )
