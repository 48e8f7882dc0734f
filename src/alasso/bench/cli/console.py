"""What commands share: their options, how they say things, the table of runs."""

from __future__ import annotations

import shlex
import signal
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from alasso.bench.cli.main import STOPPED
from alasso.bench.config import count_of, value_of
from alasso.bench.metrics import with_intransigence
from alasso.bench.results import Result
from alasso.errors import AlassoError

CAPTION = "A: mean accuracy at the end. F: forgetting. I: intransigence (needs a single-task run)."
DETAILS_CAPTION = " first task: its accuracy at the end. std: of the accuracies over tasks."
SEEDS_CAPTION = " ±: standard deviation over seeds."


def known_device(name: str) -> str:
    """Refuses what is no device on any machine."""
    number = name.removeprefix("cuda:")
    if name not in ("auto", "cpu", "cuda") and (number == name or not number.isdecimal()):
        raise AlassoError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:N")
    return name


DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with data sets. Default: ALASSO_DATA, else a cache.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", callback=known_device)]
AllowModel = Annotated[
    list[str] | None,
    typer.Option(
        metavar="module:factory", help="Import this network of your own, which a file names; else none is imported."
    ),
]
Shard = Annotated[
    str | None, typer.Option(metavar="I/N", help="Only every N-th run, from the I-th on: 1/8 to 8/8 make the whole.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Train on a Ray cluster: auto, HOST:PORT, or local, of this machine."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


class Terminal(Console):
    """Rich's own console ends the program where nobody reads on (``| head``); a run must save first."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def say(line: str) -> None:
    """Prints a line as it is: no colours in file names and numbers, no markup in brackets."""
    Terminal().print(line, highlight=False, soft_wrap=True, markup=False)


def end_stopped(where: object, words: Sequence[str]) -> typer.Exit:
    """Says what is saved and which command continues; the caller raises what it returns."""
    with suppress(ValueError):  # not in the main thread: nobody can press Ctrl-C here
        signal.signal(signal.SIGINT, lambda number, frame: None)  # all is saved: another one would disturb the end
    saved = f"; saved up to {where}" if str(where) else ""
    say(f"\nStopped{saved}. Go on with:\n  {shlex.join(['alasso', *words])}")
    return typer.Exit(STOPPED)


def table(found: Sequence[Result], width: int, varying: Sequence[str]) -> Table:
    """One row for all seeds of a config: mean ± standard deviation over seeds; ``varying`` settings have a column."""
    groups: dict[str, list[Result]] = {}
    for result in found:
        groups.setdefault(result.config.hash + result.config.method, []).append(result)
    details = ("first task", "std", "seconds") if width >= 100 else ("seconds",)
    caption = CAPTION + DETAILS_CAPTION * (len(details) > 1) + SEEDS_CAPTION * (len(found) > len(groups))
    shown = Table(
        title=in_common(found), title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD
    )
    shown.add_column("method", no_wrap=True)
    for name in (*varying, "A", "F", "I", *details, "seeds"):
        shown.add_column(name, justify="right")
    for group in groups.values():
        with_reference = [with_intransigence(result, found) for result in group]
        columns = {
            "first task": spread([r.accuracy[-1][0] for r in group]),
            "std": spread([r.metrics["std"] for r in group]),
            "seconds": f"{statistics.fmean(r.seconds for r in group):.1f}",
        }
        shown.add_row(
            group[0].config.method,
            *(str(value_of(group[0].config, name)) for name in varying),
            spread([r.metrics["A"] for r in group]),
            spread([r.metrics["F"] for r in group]),
            spread([r.metrics["I"] for r in with_reference]),
            *(columns[name] for name in details),
            str(len(group)),
        )
    return shown


def in_common(found: Sequence[Result]) -> str:
    """The benchmark, and the numbers of tasks and epochs that all of these share."""
    counts = {"task": {len(r.accuracy) for r in found}, "epoch": {r.config.epochs for r in found}}
    shared = [count_of(same.pop(), thing) for thing, same in counts.items() if len(same) == 1]
    return ", ".join([found[0].config.benchmark, *shared])


def spread(values: Sequence[float | None], digits: int = 3) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean
