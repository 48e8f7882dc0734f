"""A small grid search, on held-out training examples, whose outcome is a file: what was tried, what was chosen.

The paper says that each method uses settings optimised for itself. The search never sees the test examples: a sixth of
each task's training examples is held out and measured on instead.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from alasso.bench import results, runs
from alasso.bench.atomic import check_writable, write_whole
from alasso.bench.catalog import METHODS
from alasso.bench.config import known
from alasso.bench.results import Result
from alasso.errors import AlassoError

SCHEMA = 1


def search(
    benchmark: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    fields: dict[str, Any],
    options: runs.Options,
    file: Path,
    console: Console,
) -> dict[str, Any]:
    """Try every combination of each method's values; methods not named keep what ``file`` says of them."""
    outcome = _read(file, benchmark)
    check_writable(file.parent)
    for method in methods:  # before anything is run
        if not known(method, METHODS, "method").search:
            raise AlassoError(f"{method} has no settings to search for")
    for method in methods:
        space = METHODS[method].search
        values: dict[str, Any] = {name: list(tried) for name, tried in space.items()}
        configs = runs.combinations(benchmark, [method], seeds, {**fields, "validation": True}, values)
        found = runs.carry_out(configs, options, console)
        tried = _grouped(found, list(space))
        best = max(tried, key=lambda row: row["A"])
        outcome["methods"][method] = {
            "space": values,
            "tried": sorted(tried, key=lambda row: -row["A"]),
            "run": {k: v for k, v in configs[0].to_json().items() if k not in ("settings", "seed", "method")},
            "seeds": list(seeds),
            "environment": results.environment(options.device),
        }
        outcome["chosen"][method] = {name: best[name] for name in space}
        write_whole(file, (results.compact_rows(json.dumps(outcome, indent=1)) + "\n").encode())
    return outcome


def _grouped(found: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each combination of values: mean A over seeds, and A of each seed."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in found:
        groups.setdefault(tuple(result.config.settings[name] for name in names), []).append(result)
    return [
        {
            **dict(zip(names, values, strict=True)),
            "A": round(statistics.fmean(float(r.metrics["A"] or 0) for r in group), 5),
            "A_of_seeds": [round(float(r.metrics["A"] or 0), 5) for r in group],
        }
        for values, group in groups.items()
    ]


def _read(file: Path, benchmark: str) -> dict[str, Any]:
    if not file.exists():
        return {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "measured_on": "a sixth of each task's training examples, held out; the test examples were not used",
            "chosen": {},
            "methods": {},
        }
    try:
        outcome: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if outcome["schema"] == SCHEMA and outcome["benchmark"] == benchmark:
            return outcome
    except (ValueError, KeyError, TypeError):
        pass
    raise AlassoError(f"{file} is not the outcome of a search on {benchmark}; name another file with --file")
