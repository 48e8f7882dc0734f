"""The command alasso list: what there is to run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from alasso.bench.cli.console import Terminal
from alasso.bench.labels import count_of
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.bench.reproduce.experiments import PAPER, read_experiments


def list_() -> None:
    """Show benchmarks, methods, their settings and the experiments."""
    Terminal().print(benchmarks(), methods(), settings_of_benchmarks(), *experiments())


def experiments() -> list[Table]:
    """None where the paper's folder is not here."""
    table = _table("Experiments (alasso reproduce --only …)", "id", "what it is", "in the paper", "on one H200")
    for one in read_experiments(PAPER).values():
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
