"""The command line. Heavy imports wait until a command needs them, so that ``--help`` answers at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

import alasso
from alasso import usage
from alasso.bench import commands as running
from alasso.bench.arguments import spread_values
from alasso.bench.data_commands import data_app
from alasso.bench.listing import list_
from alasso.errors import AlassoError
from alasso.report import commands as reporting
from alasso.reproduce import commands as reproducing
from alasso.saying import STOPPED, is_out_of_memory

app = typer.Typer(
    help="Continual learning by asymmetric loss approximation: run, compare, reproduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(running.run)
app.command()(running.demo)
app.command()(running.search)
app.command("list")(list_)
app.command()(reporting.report)
app.command()(reporting.compare)
app.command()(reporting.probe)
app.command()(reproducing.reproduce)
app.add_typer(data_app, name="data")


def version(show: bool) -> None:
    if show:
        print(f"alasso {alasso.__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Say the version.")] = False,
) -> None:
    pass


@contextmanager
def terminated_like_ctrl_c() -> Iterator[None]:
    """A polite kill, as from ``timeout`` or a job queue, ends a command as Ctrl-C does: what was trained is saved."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # ignored, as in what a script puts in the background
            raise KeyboardInterrupt
        on_ctrl_c(number, frame)

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Entry point: a mistake of the user's is one line and exit code 2."""
    try:
        with terminated_like_ctrl_c():
            sys.exit(app(spread_values(sys.argv[1:]), prog_name="alasso", standalone_mode=False) or 0)
    except AlassoError as error:
        print(f"alasso: {error}", file=sys.stderr)
        sys.exit(2)
    except usage.ParserError as error:
        if not usage.is_help(error):
            print(f"alasso: {usage.in_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:  # what older versions of the parser make of Ctrl-C
        sys.exit(STOPPED)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        less = "a smaller image_size, batch_size or hidden, or with fewer --lanes"
        print(f"alasso: out of memory; a run takes less with {less}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `alasso … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
