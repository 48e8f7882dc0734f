"""The commands report, compare and probe, as the command line registers them. Heavy imports wait for their turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from alasso.bench.cli.console import STOPPED, Terminal, say
from alasso.bench.cli.options import DataDir, Device
from alasso.bench.labels import count_of
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.bench.probe import Measured, Plan

PORT = 8321
MOST_REASONS = 3  # that a line has room for


def report(
    results: Annotated[list[Path], typer.Argument(help="Result files or folders; a run reached twice counts once.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(help="Also draw every figure as PNG, SVG and PDF into this folder.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on this machine and follow runs that go on.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help=f"With --watch: 0 for any that is free. Default: {PORT}.", min=0, max=65535)
    ] = None,
) -> None:
    """Make one self-contained page, and the paper's figures, from results."""
    from alasso.bench.io import check_file, check_writable, write_whole
    from alasso.bench.report import page
    from alasso.bench.report.load import collect

    if watch:
        return follow(results, PORT if port is None else port)
    if port is not None:
        raise AlassoError("--port is for --watch: give both, or leave it out")
    check_file(output, ".html", ".htm")
    if figures is not None:
        check_writable(figures)
    found = collect(results)
    if not found.results and not found.probes:
        raise AlassoError(f"there are no results in {' or '.join(map(str, results))}{reasons(found.left_out)}")
    content = page.build(found).encode()
    write_whole(output, content)
    for line in found.left_out:
        say(f"left out: {line}")
    probes = f", {count_of(len(found.probes), 'probe')}" if found.probes else ""
    say(f"{output}: {count_of(len(found.results), 'result')}{probes}, {len(content) / 1e6:.1f} MB")
    if figures is not None:
        from alasso.bench.report.figures import FORMATS, write_figures

        written, absent = write_figures(found.results, figures)
        for line in absent:
            say(line)
        say(f"{figures}: {count_of(len(written) // len(FORMATS), 'figure')} as {', '.join(FORMATS)}")
    return None


def reasons(left_out: Sequence[str]) -> str:
    """Why nothing is left, on the same line.

    >>> reasons([]), reasons(["a is no result", "b is none"])
    ('', ': a is no result; b is none')
    """
    said = list(left_out[:MOST_REASONS])
    if len(left_out) > MOST_REASONS:
        said.append(f"and {len(left_out) - MOST_REASONS} more")
    return f": {'; '.join(said)}" if said else ""


def follow(paths: Sequence[Path], port: int) -> None:
    from alasso.bench.report.watch import serve

    if len(paths) > 1:
        raise AlassoError(f"--watch follows one folder, not {len(paths)} paths; name the folder they are in")
    (folder,) = paths
    if not folder.is_dir():
        raise AlassoError(f"--watch follows a folder, and {folder} is none")
    serve(folder, port, say)


def compare(
    results: Annotated[list[Path], typer.Argument(help="Result files or folders; files of one config go together.")],
) -> None:
    """Results side by side, with the difference to the first and its standard error over seeds."""
    from alasso.bench.report import compare as comparing

    columns, left_out = comparing.columns_of(results)
    for line in left_out:
        say(f"left out: {line}")
    console = Terminal()
    for place, comparison in enumerate(comparing.comparisons(columns)):
        if place:
            console.print()
        console.print(comparing.table(comparison))
        console.print(comparing.explanation(comparison), style="dim", markup=False)


def refuse_probe_of_another(out: Path, config: dict[str, Any]) -> None:
    """Figures of another run in that folder would be written over."""
    from alasso.bench.probe import read

    if (there := out / "probe.json").exists() and read(there).config != config:
        raise AlassoError(f"{there} is the probe of another run: give another folder by --out, or delete it")


def probe(
    result: Annotated[Path, typer.Argument(help="A result file; its first task is learned again.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the figures and the measurement.")] = Path("probe"),
    weights: Annotated[int, typer.Option(help="Weights drawn at random.", min=1)] = 200,
    offsets: Annotated[int, typer.Option(help="Places on each weight's line.", min=3)] = 41,
    span: Annotated[float, typer.Option(help="How far a weight is moved to either side.")] = 1.0,
    examples: Annotated[int, typer.Option(help="Training examples of the task, drawn at random.", min=1)] = 1000,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """How a task's loss changes when single weights leave their optimum, and what SI and ALASSO make of it."""
    from alasso.bench.probe import Plan
    from alasso.bench.probe.figures import write_probe

    plan = Plan(weights=weights, offsets=offsets, span=span, examples=examples)
    try:
        measured = measure(result, out, plan, data_dir, device)
    except KeyboardInterrupt:
        say("\nStopped; nothing was saved.")
        raise typer.Exit(STOPPED) from None
    for path in write_probe(measured, out):
        say(str(path))
    for line in measured.statement():
        say(line)


def measure(result: Path, out: Path, plan: Plan, data_dir: Path | None, device: str) -> Measured:
    """Find out first whether its outcome can be written."""
    from alasso.bench.io import check_writable
    from alasso.bench.probe.measure import probe_first_task, progress_bar
    from alasso.bench.results import read

    check_writable(out)
    config = read(result).config
    refuse_probe_of_another(out, config.to_json())
    with progress_bar(Terminal()) as watch:
        return probe_first_task(config, plan, data_dir=data_dir, device=device, say=say, watch=watch)
