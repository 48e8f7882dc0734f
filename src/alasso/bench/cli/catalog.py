"""What there is: the command alasso list, and alasso data, which fetches and checks data sets."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from alasso.bench import data
from alasso.bench.cli.console import DataDir, Quiet, Terminal, say
from alasso.bench.config import count_of
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.bench.reproduce.experiments import PAPER, read_experiments
from alasso.errors import AlassoError

# -- alasso list -----------------------------------------------------------------------------------------------------


def list_() -> None:
    """Show benchmarks, methods, their settings and the experiments."""
    Terminal().print(benchmarks(), methods(), settings_of_benchmarks(), *experiments())


def experiments() -> list[Table]:
    """None where the paper's folder is not here."""
    table = _table("Experiments (alasso reproduce --only …)", "id", "what it is", "in the paper", "on one H200")
    try:
        found = read_experiments(PAPER)
    except AlassoError as error:
        say(f"experiments are left out: {error}")
        return []
    for one in found.values():
        table.add_row(one.id, one.title, one.paper, one.cost)
    return [table] if table.row_count else []


def benchmarks() -> Table:
    table = _table("Benchmarks", "name", "what it is", "as it is run")
    for name, benchmark in BENCHMARKS.items():
        p = benchmark.preset
        count = "all classes" if p["tasks"] is None else count_of(p["tasks"], "task")
        run = f"{count} × {count_of(p['epochs'], 'epoch')}, batches of {p['batch_size']}, {p['model']}"
        table.add_row(name, benchmark.title, run)
    return table


def methods() -> Table:
    table = _table("Methods", "name", "what it is", "settings and defaults")
    for name, method in METHODS.items():
        table.add_row(name, method.title, _spelled(method.settings, "  ") or "–")
    return table


def settings_of_benchmarks() -> Table:
    title = "Where a benchmark sets them otherwise (found by alasso search, or the paper's)"
    table = _table(title, "benchmark", "settings")
    for name, benchmark in BENCHMARKS.items():
        if benchmark.settings:
            table.add_row(name, "; ".join(f"{m}: {_spelled(s)}" for m, s in benchmark.settings.items()))
    return table


def _table(title: str, name: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(name, no_wrap=True)  # names have to be typed
    for column in columns:
        table.add_column(column)
    return table


def _spelled(settings: Mapping[str, Any], between: str = " ") -> str:
    return between.join(f"{name}={value}" for name, value in settings.items())


# -- alasso data -----------------------------------------------------------------------------------------------------

data_app = typer.Typer(
    help="Download data sets, or check those on the disk.", no_args_is_help=True, add_completion=False
)

Names = Annotated[list[str] | None, typer.Argument(help="Data sets. Default: all.", show_default=False)]
STYLES = {"ok": "green", "missing": "yellow", "wrong": "red"}


@data_app.command()
def fetch(names: Names = None, data_dir: DataDir = None, quiet: Quiet = False) -> None:
    """Download data sets from their publishers and check them."""
    for name in names or data.CATALOG:
        where = data.fetch(name, data_dir, progress=not quiet)
        say(f"{name}: ready in {where}")


@data_app.command()
def check(names: Names = None, data_dir: DataDir = None) -> None:
    """Compare the files on the disk with the published ones.

    A missing data set is a mistake only if you name it.
    """
    table = Table(box=SIMPLE_HEAD)
    for column in ("data set", "file", "state", "edition"):
        table.add_column(column, no_wrap=True)
    to_fetch, notes = [], []
    for name in names or data.CATALOG:
        reports = data.check(name, data_dir)
        absent = all(report.status == "missing" for report in reports)
        if (absent and names) or (not absent and any(report.status != "ok" for report in reports)):
            to_fetch.append(name)
        if absent:
            reports = [data.FileReport("all files", "missing", f"not in {data.where(name, data_dir)}")]
        for report in reports:
            table.add_row(name, report.file, f"[{STYLES[report.status]}]{report.status}", report.edition)
            if report.status != "ok" and report.detail:
                notes.append(f"{name}: {report.detail}")
    Terminal().print(table)
    for note in notes:
        say(note)
    if to_fetch:
        into = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
        say(f"To download what is missing or wrong: alasso data fetch {' '.join(to_fetch)}{into}")
        raise typer.Exit(2)
