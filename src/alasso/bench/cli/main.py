"""The command line ``alasso``: which commands there are, how they end, and one line for every mistake."""

from __future__ import annotations

import io
import os
import pkgutil
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

import alasso
from alasso.errors import AlassoError

#: Where each command is, and what the help says of it. Its module is imported when it is called.
COMMANDS = {
    "demo": ("run:demo", "Train five methods on ten small tasks: a minute on a CPU."),
    "list": ("catalog:list_", "Show benchmarks, methods, their settings and the experiments."),
    "run": ("run:run", "Train methods on a benchmark and measure what they forget."),
    "search": ("run:search", "Find settings for each method on held-out training examples."),
    "report": ("report:report", "Make one self-contained page, and figures, from results."),
    "export": ("report:export", "Write results as one table, CSV or parquet."),
    "compare": ("report:compare", "Show results side by side."),
    "probe": ("run:probe", "Measure a task's loss around its optimum, weight by weight."),
    "reproduce": ("reproduce:reproduce", "Run the paper's missing experiments and judge each of its claims."),
    "data": ("catalog:data_app", "Download data sets, or check those on the disk."),
}
#: Options that take several values after one flag: --seed 0 1 2
SEVERAL = ("--allow-model", "--method", "--seed", "--set", "--log", "--only", "--skip")
COLUMNS = shutil.get_terminal_size().columns
#: How help looks: in a narrow terminal, boxes with columns would cut the options' names.
HELP: Literal["rich"] | None = "rich" if COLUMNS >= 60 else None
STOPPED = 130  # as shells report a program ended by Ctrl-C

#: What the parser raises; typer has click inside it or beside it, depending on its version, and shows this class alone.
ParserError: type[Exception] = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")


class LazyGroup(TyperGroup):
    """Puts the command itself in place of its line in the help, when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command with all its options, and what is left of the command line."""
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None, "the parser refuses what is no command"
        found = pkgutil.resolve_name(f"alasso.bench.cli.{COMMANDS[name][0]}")
        if not isinstance(found, typer.Typer):
            command, found = found, typer.Typer(add_completion=False)
            found.command(name)(command)
        found.rich_markup_mode = HELP
        return name, typer.main.get_command(found), rest


app = typer.Typer(
    cls=LazyGroup,
    help="Continual learning by asymmetric loss approximation: run, compare, reproduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": COLUMNS},
)
for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)


def version(show: bool) -> None:
    if show:
        print(f"alasso {alasso.__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


def spread_values(words: Sequence[str]) -> list[str]:
    """``--seed 0 1 2`` or ``--seed 0,1,2`` → ``--seed 0 --seed 1 --seed 2``: what people type, as the parser takes it.

    >>> spread_values(["run", "x", "--seed", "0", "1", "-q"])
    ['run', 'x', '--seed', '0', '--seed', '1', '-q']
    >>> spread_values(["run", "x", "--method", "si,ewc", "--set", "a=1,2"])
    ['run', 'x', '--method', 'si', '--method', 'ewc', '--set', 'a=1,2']

    A flag without any value stays as it is, for the parser to refuse.

    >>> spread_values(["run", "x", "--seed"])
    ['run', 'x', '--seed']
    """
    if words[:1] == ["demo"]:  # which has one seed
        return list(words)
    spread: list[str] = []
    flag = None
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():  # --seed -1 is a mistake of another kind
            flag = word if word in SEVERAL else None
            spread.append(word)
        elif flag is not None:
            values = [word] if flag == "--set" else filter(None, word.split(","))
            for value in values:
                spread += [value] if spread[-1] == flag else [flag, value]
        else:
            spread.append(word)
    return spread


@contextmanager
def terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM (``timeout``, a job queue) and a closed terminal stop a command like Ctrl-C: progress is saved first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # ignored, as in what a script puts in the background
            raise KeyboardInterrupt
        on_ctrl_c(number, frame)

    asked = [signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:  # as ``nohup`` has it
        asked.append(hang_up)
    before = {number: signal.signal(number, interrupt) for number in asked}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def silence() -> None:
    """Sends all further output nowhere, also what the interpreter writes at its end."""
    with suppress(OSError, ValueError):  # there may be no such file at all, as in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Runs the command line; a mistake of the user's is one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an encoding without Greek letters costs letters, not a command
    warnings.formatwarning = lambda message, *place: f"alasso: {message}\n"  # as mistakes are said: in one line
    try:
        with terminated_like_ctrl_c():
            sys.exit(app(spread_values(sys.argv[1:]), prog_name="alasso", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):  # Ctrl-C before or after the work, and what the parser makes of it
        sys.exit(STOPPED)
    except BrokenPipeError:  # `alasso … | head`
        silence()
        sys.exit(141)
    except Exception as error:
        line = explained(error)
        if line is None:
            raise
        if line:
            print(f"alasso: {line}", file=sys.stderr)
        sys.exit(2)


def explained(error: Exception) -> str | None:
    """One line for the user; empty where the parser has printed help; None for a mistake of ours."""
    if isinstance(error, AlassoError):
        return str(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # a command group without a command
        return ""
    if isinstance(error, ParserError):
        return in_one_line(error)
    if is_out_of_memory(error):
        return "out of memory; a run takes less with a smaller image_size, batch_size or hidden"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in ("alasso", "torch"):
        return f"this command needs {error.name}: pip install 'alasso[bench]'"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError):
        silence()
        return f"cannot write the output: {error.strerror or error}"
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Of Python, of torch on a CPU, of torch on a GPU: they share no class."""
    said = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )


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
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split())).removesuffix(".")
    line = re.sub(r"\. ([A-Z])", lambda start: f"; {start[1].lower()}", line)
    line = re.sub(r": Input should (.*?)(, unable to .*)?$", r": it should \1", line)
    return line[:1].lower() + line[1:]
