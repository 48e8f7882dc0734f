"""The command alasso list: what there is to run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from alasso.wording import count_of


def list_() -> None:
    """Benchmarks, methods and their settings, and the paper's experiments."""
    from alasso.bench.catalog import BENCHMARKS, METHODS
    from alasso.reproduce.experiments import read_experiments
    from alasso.reproduce.show import experiments_table

    benchmarks = Table(title="Benchmarks", title_justify="left")
    for column in ("name", "what it is", "as it is run"):
        benchmarks.add_column(column, no_wrap=column == "name")  # names have to be typed
    for name, benchmark in BENCHMARKS.items():
        p = benchmark.preset
        count = "all classes" if p["tasks"] is None else count_of(p["tasks"], "task")
        run = f"{count} × {count_of(p['epochs'], 'epoch')}, batches of {p['batch_size']}, {p['model']}"
        benchmarks.add_row(name, benchmark.title, run)
    methods = Table(title="Methods", title_justify="left")
    for column in ("name", "what it is", "settings and defaults"):
        methods.add_column(column, no_wrap=column == "name")
    for name, method in METHODS.items():
        methods.add_row(name, method.title, "  ".join(f"{k}={v}" for k, v in method.settings.items()) or "–")
    own = Table(
        title="Where a benchmark sets them otherwise (found by alasso search, or the paper's)", title_justify="left"
    )
    own.add_column("benchmark", no_wrap=True)
    own.add_column("settings")
    for name, benchmark in BENCHMARKS.items():
        if benchmark.settings:
            each = (f"{m}: {' '.join(f'{k}={v}' for k, v in s.items())}" for m, s in benchmark.settings.items())
            own.add_row(name, "; ".join(each))
    console = Console()
    console.print(benchmarks, methods, own, experiments_table(read_experiments()))
