"""The command line. Heavy imports wait until a command needs them, so that ``--help`` answers at once."""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated

import typer

import alasso
from alasso.bench.cli import errors as usage
from alasso.bench.cli import report as reporting
from alasso.bench.cli import reproduce as reproducing
from alasso.bench.cli import run as running
from alasso.bench.cli.arguments import spread_values
from alasso.bench.cli.console import STOPPED, is_out_of_memory
from alasso.bench.cli.data import data_app
from alasso.bench.cli.listing import list_
from alasso.errors import AlassoError

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
    """A polite kill, as from ``timeout`` or a job queue, ends a command as Ctrl-C does, and so does a terminal that is
    closed: what was trained is saved.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # ignored, as in what a script puts in the background
            raise KeyboardInterrupt
        on_ctrl_c(number, frame)

    asked = [signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # which Windows has not
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:  # as ``nohup`` has it
        asked.append(hang_up)
    try:
        before = {number: signal.signal(number, interrupt) for number in asked}
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


#: What stands for letters that the encoding of a terminal or a file has not; a question mark for any other.
PLAIN = {
    "−": "-", "–": "-", "±": "+-", "×": "x", "→": "->", "≥": ">=", "≤": "<=", "…": "...", "’": "'", "′": "'", "†": "+",
    "Ω": "Omega", "ω": "omega", "ξ": "xi", "λ": "lambda", "γ": "gamma", "ε": "epsilon", "θ": "theta",
}  # fmt: skip


def plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def write_what_can_be_written() -> None:
    codecs.register_error("plainly", plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plainly")


def silence() -> None:
    """Nothing more is written to where it cannot be, not even when the interpreter ends."""
    with suppress(OSError, ValueError):  # there may be no such file at all, as in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point: a mistake of the user's is one line and exit code 2."""
    write_what_can_be_written()
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
        less = "a smaller image_size, batch_size or hidden"
        print(f"alasso: out of memory; a run takes less with {less}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `alasso … | head`
        silence()
        sys.exit(141)
    except OSError as error:
        if error.filename is not None:  # of a file, about which its writer or reader should have said more
            raise
        silence()
        print(f"alasso: cannot write the output: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
