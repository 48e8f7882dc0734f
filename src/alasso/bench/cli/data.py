"""The commands data fetch and data check."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from alasso.bench import data
from alasso.bench.cli.console import DataDir, Quiet, Terminal, say

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
