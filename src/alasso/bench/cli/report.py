"""The commands that read results: report, export and compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from alasso.bench.cli.console import Terminal, say
from alasso.bench.config import count_of
from alasso.bench.io import check_file, check_writable, write_whole
from alasso.bench.report import compare as comparing
from alasso.bench.report import export as exporting
from alasso.bench.report import page
from alasso.bench.report.figures import FORMATS, write_figures
from alasso.bench.report.sections import collect
from alasso.bench.report.watch import serve
from alasso.errors import AlassoError

PORT = 8321
MOST_REASONS = 3  # that a line has room for


def report(
    results: Annotated[list[Path], typer.Argument(help="Result files or folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Also draw every figure here, as PNG, SVG and PDF.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page here while runs train.")] = False,
    port: Annotated[
        int | None, typer.Option(help=f"For --watch; 0 takes a free one. Default: {PORT}.", min=0, max=65535)
    ] = None,
) -> None:
    """Make one self-contained page, and figures, from results."""
    if watch:
        return follow(results, PORT if port is None else port)
    if port is not None:
        raise AlassoError("--port is for --watch: give both, or leave it out")
    check_file(output, ".html", ".htm")
    if figures is not None:
        check_writable(figures)
    found = collect(results)
    if not found.results and not found.probes:
        why = "".join(f"; {line}" for line in found.left_out[:MOST_REASONS])
        raise AlassoError(f"there are no results in {' or '.join(map(str, results))}{why}")
    content = page.build(found).encode()
    write_whole(output, content)
    for line in found.left_out:
        say(f"left out: {line}")
    probes = f", {count_of(len(found.probes), 'probe')}" if found.probes else ""
    say(f"{output}: {count_of(len(found.results), 'result')}{probes}, {len(content) / 1e6:.1f} MB")
    if figures is not None:
        written, absent = write_figures(found.results, figures)
        for line in absent:
            say(line)
        say(f"{figures}: {count_of(len(written) // len(FORMATS), 'figure')} as {', '.join(FORMATS)}")
    return None


def export(
    results: Annotated[list[Path], typer.Argument(help="Result files or folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The table to write: .csv or .parquet.")] = Path(
        "runs.csv"
    ),
    pairs: Annotated[bool, typer.Option("--pairs", help="A row for each accuracy in place of each run.")] = False,
) -> None:
    """Write results as one table, CSV or parquet."""
    found = collect(results)
    if not found.results:
        raise AlassoError(f"there are no results in {' or '.join(map(str, results))}")
    rows = exporting.write(found.results, output, pairs)
    for line in found.left_out:
        say(f"left out: {line}")
    say(f"{output}: {count_of(len(found.results), 'result')}, {count_of(rows, 'row')}")


def follow(paths: Sequence[Path], port: int) -> None:
    if len(paths) > 1 or not paths[0].is_dir():
        raise AlassoError(f"--watch follows one folder, not {' '.join(map(str, paths))}")
    serve(paths[0], port, say)


def compare(
    results: Annotated[list[Path], typer.Argument(help="Result files or folders.")],
) -> None:
    """Show results side by side.

    With the difference to the first and its standard error over seeds.
    """
    columns, left_out = comparing.columns_of(results)
    for line in left_out:
        say(f"left out: {line}")
    console = Terminal()
    for place, comparison in enumerate(comparing.comparisons(columns)):
        if place:
            console.print()
        console.print(comparing.table(comparison))
        console.print(comparing.explanation(comparison), style="dim", markup=False)
