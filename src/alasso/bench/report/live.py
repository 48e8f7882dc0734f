"""Runs that are still going on, read from the CSV logs that ``alasso run --log csv`` writes beside its results."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from alasso.bench.registry import Look, label_of
from alasso.bench.report.style import look_of, plain
from alasso.bench.training.progress import CsvLog

MOST = 12  # running logs shown, the latest

#: Live charts: key, what the ordinate and the abscissa are called.
CHARTS = (
    ("mean_accuracy", "mean accuracy", "tasks learned"),
    ("learned", "accuracy of the task just learned", "tasks learned"),
    ("loss", "loss", "epochs"),
    ("penalty", "penalty", "epochs"),
)


@dataclass
class Progress:
    """One log: values by task, and by epoch counted through all tasks."""

    label: str
    look: Look = field(repr=False)
    method: str = ""
    tasks: list[float] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    mean_accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    penalty: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("look", "method")}

    def series(self, key: str) -> tuple[Sequence[float], Sequence[float]]:
        """Abscissa and ordinate of a live chart."""
        values: list[float] = getattr(self, key)
        return (self.tasks if key in ("learned", "mean_accuracy") else range(1, len(values) + 1)), values


def running(folder: Path) -> list[Progress]:
    """Logs that have no result beside them yet, the latest ones, in the order of their names."""
    logs = [path for path in folder.rglob("*.csv") if path.is_file() and not path.with_suffix(".json").exists()]
    latest = sorted(logs, key=lambda path: path.stat().st_mtime)[-MOST:]
    found = [progress for path in sorted(latest) if (progress := read_log(path)) is not None]
    return told_apart(found)


def told_apart(found: Sequence[Progress]) -> list[Progress]:
    """Several runs of one method each in a look of its own."""
    methods = [progress.method for progress in found]
    return [
        replace(
            progress,
            look=look_of(
                progress.method, None, methods[:number].count(progress.method), methods.count(progress.method)
            ),
        )
        for number, progress in enumerate(found)
    ]


def read_log(path: Path) -> Progress | None:
    """A log as far as it is written, None if it is something else."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = csv.DictReader(lines)
            if tuple(rows.fieldnames or ()) != CsvLog.columns:
                return None
            parsed = [row for row in map(_numbers, rows) if row is not None]
    except (OSError, UnicodeDecodeError, csv.Error):
        return None
    return _progress(path.stem, without_repeats(parsed))


def without_repeats(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """A run started over or resumed appends to its log: what it did again replaces what came before."""
    kept: list[Mapping[str, float]] = []
    for row in rows:
        while kept and _place(kept[-1]) >= _place(row):
            kept.pop()
        kept.append(row)
    return kept


def _place(row: Mapping[str, float]) -> tuple[float, float]:
    return row["task"], row.get("epoch", math.inf)  # the row of a whole task follows its epochs


def _numbers(row: Mapping[str, str | None]) -> dict[str, float] | None:
    """None for a line that is not written to its end."""
    try:
        numbers = {name: float(text) for name, text in row.items() if text}
    except (TypeError, ValueError):
        return None
    whole = {"loss", "penalty"} if "epoch" in numbers else {"learned", "mean_accuracy"}
    return numbers if {"task", *whole} <= set(numbers) and all(map(math.isfinite, numbers.values())) else None


def _progress(name: str, rows: Sequence[Mapping[str, float]]) -> Progress:
    method, label = _method_and_label(name)
    progress = Progress(label, look_of(method), method)
    for row in rows:
        if "epoch" in row:
            progress.loss.append(row["loss"])
            progress.penalty.append(row["penalty"])
        else:
            progress.tasks.append(row["task"])
            progress.learned.append(row["learned"])
            progress.mean_accuracy.append(row["mean_accuracy"])
    return progress


def _method_and_label(name: str) -> tuple[str, str]:
    """From a result's name, benchmark_method_hash_sSEED; any other name stands for itself.

    >>> _method_and_label("permuted-digits_si_0123456789_s2")
    ('si', 'SI, seed 2, permuted-digits 0123')
    """
    parts = name.split("_")
    if len(parts) != 4 or not parts[3].startswith("s"):
        return "", plain(name)
    benchmark, method, hash_, seed = parts
    return method, plain(f"{label_of(method)}, seed {seed[1:]}, {benchmark} {hash_[:4]}")
