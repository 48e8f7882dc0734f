"""The commands alasso data fetch, check and where."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from alasso.bench.cli.console import Terminal, say
from alasso.bench.cli.options import DataDir, Quiet
from alasso.bench.labels import count_of

data_app = typer.Typer(help="Data sets: download, check, locate.", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(help="Data sets; all of them if none is named.")]


@data_app.command()
def fetch(names: Names = None, data_dir: DataDir = None, quiet: Quiet = False) -> None:
    """Download data sets from their publishers, and check them."""
    from alasso.bench import data

    for name in names or data.CATALOG:
        where = data.fetch(name, data_dir, progress=not quiet)
        print(f"{name}: ready in {where}")


@data_app.command()
def check(names: Names = None, data_dir: DataDir = None) -> None:
    """Compare the files on the disk with what was published; a data set that is not there is wrong if it is named."""
    from rich.table import Table

    from alasso.bench import data

    table = Table()
    for column in ("data set", "file", "state", "edition", ""):
        table.add_column(column, overflow="fold")
    missing, wrong = [], []
    for name in names or data.CATALOG:
        reports = data.check(name, data_dir)
        if all(report.status == "missing" for report in reports):
            files = count_of(len(reports), "file")
            table.add_row(name, files, "[yellow]missing", "", f"not in {data.where(name, data_dir)}")
            missing.append(name)
            continue
        for report in reports:
            style = {"ok": "green", "missing": "yellow", "wrong": "red"}[report.status]
            table.add_row(name, report.file, f"[{style}]{report.status}", report.edition, report.detail)
        if any(report.status != "ok" for report in reports):
            wrong.append(name)
    Terminal().print(table)
    to_fetch = [*missing, *wrong] if names else wrong
    if to_fetch:
        into = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else ""
        say(f"To download what is missing or wrong: alasso data fetch {' '.join(dict.fromkeys(to_fetch))}{into}")
        raise typer.Exit(2)
    if missing:
        say("What is there is as published; what is missing is needed only by the benchmarks that use it.")


@data_app.command()
def where(names: Names = None, data_dir: DataDir = None) -> None:
    """Say where data sets are looked for."""
    from alasso.bench import data

    for name in names or data.CATALOG:
        print(f"{name}: {data.where(name, data_dir)}")
