"""Results as one table for pandas, R or a spreadsheet: a row for each run, or for each pair of tasks of each run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from alasso.bench.io import check_file, write_whole
from alasso.bench.report.aggregate import groups
from alasso.bench.results import Result
from alasso.errors import AlassoError

Row = dict[str, Any]
ENDINGS = (".csv", ".parquet")


def row_of(result: Result) -> Row:
    """A run: its config, with a column for each setting, its measures, its data's editions, and where it ran.

    Args:
        result: The run's result.

    Returns:
        {column: value}; None where there is none.
    """
    row = {"name": result.name, **result.config.flat()}
    row |= {f"metrics.{name}": value for name, value in result.metrics.items()}
    row |= {"seconds": result.seconds, "peak_memory": result.peak_memory}
    row |= {f"data.{name}": edition for name, edition in result.data.items()}
    row |= {f"environment.{name}": value for name, value in result.environment.items()}
    return {name: value if isinstance(value, str | int | float | None) else str(value) for name, value in row.items()}


def pairs_of(result: Result) -> Iterator[Row]:
    """A row for each accuracy: after training one task, on one.

    Args:
        result: The run's result.

    Yields:
        {column: value}, with the columns of :func:`row_of` that tell the run; tasks count from 1.
    """
    about = {name: value for name, value in row_of(result).items() if not name.startswith(("metrics.", "environment."))}
    for after, accuracies in enumerate(result.accuracy, start=1):
        for on, accuracy in enumerate(accuracies, start=1):
            yield {**about, "after_task": after, "on_task": on, "accuracy": accuracy}


def write(found: Sequence[Result], output: Path, pairs: bool = False) -> int:
    """Write a table of results.

    Args:
        found: The results.
        output: A file that ends in .csv or .parquet.
        pairs: A row for each pair of tasks in place of each run.

    Returns:
        The number of rows.

    Raises:
        AlassoError: The file cannot be written, or pyarrow is missing.
    """
    check_file(output, *ENDINGS)
    rows = [row for result in found for row in (pairs_of(result) if pairs else [row_of(result)])]
    if not pairs:  # I is measured against a single-task run, which may be among these
        known = {r.name: i for one in groups(found) for r, i in zip(one.results, one.measures["I"], strict=True)}
        rows = [row | {"metrics.I": known[row["name"]]} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    write_whole(output, as_parquet(rows, columns) if output.suffix.lower() == ".parquet" else as_csv(rows, columns))
    return len(rows)


def as_csv(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns)
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise AlassoError("parquet needs pyarrow: pip install 'alasso[parquet]', or write a .csv") from error
    table = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and kinds != {int, float}:  # a setting may be a number in one run, "auto" in another
            values = [value if value is None else str(value) for value in values]
        table[name] = values
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), content)
    return content.getvalue()
