"""What parts of a reproduction took by the clock, one line each in ``parts.csv``."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alasso.bench.config import RunConfig
from alasso.bench.io import disk_errors_as_advice
from alasso.bench.reproduce.counting import EXAMPLES, steps_in
from alasso.errors import AlassoError

PARTS_FILE = "parts.csv"
COLUMNS = ("part", "device", "runs", "steps", "seconds", "finished")


@dataclass(frozen=True)
class Row:
    """One part as it was carried out; ``steps`` is 0 where it is not known how many its runs have."""

    part: str
    device: str
    runs: int
    steps: int
    seconds: float
    finished: str

    def seconds_for(self, configs: Sequence[RunConfig]) -> float | None:
        """What these would take at its rate."""
        return self.seconds / self.steps * steps_in(configs) if self.steps else None


def read_parts(out: Path) -> list[Row]:
    """What was noted; lines that are not whole are left aside."""
    path = out / PARTS_FILE
    if not path.exists():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as stream:
        reader = csv.DictReader(stream)
        if reader.fieldnames is not None and list(reader.fieldnames) != list(COLUMNS):
            raise AlassoError(
                f"{path} is no table of times: its first line is not {','.join(COLUMNS)}; delete the file"
            )
        for raw in reader:
            try:
                rows.append(
                    Row(raw["part"], raw["device"], int(raw["runs"]), int(raw["steps"]), float(raw["seconds"]),
                        raw["finished"])
                )  # fmt: skip
            except (KeyError, TypeError, ValueError):
                continue
    return rows


def summed(rows: Iterable[Row]) -> list[Row]:
    """One row for each part and device."""
    by_part: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_part.setdefault((row.part, row.device), []).append(row)
    return [
        Row(
            part,
            device,
            sum(row.runs for row in noted),
            sum(row.steps for row in noted),
            sum(row.seconds for row in noted),
            max(row.finished for row in noted),
        )
        for (part, device), noted in by_part.items()
    ]


def note_part(
    out: Path,
    title: str,
    device: str,
    finished: Iterable[RunConfig],
    seconds: float,
    ended_early: Iterable[RunConfig] = (),
) -> None:
    """One more line of ``parts.csv``: wall-clock time of a part, or of as much of it as was done.

    ``ended_early``: runs that diverged, up to there; their steps took time, too.
    """
    done = list(finished)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    steps = steps_in(config for config in (*done, *ended_early) if config.benchmark in EXAMPLES)
    path = out / PARTS_FILE
    with disk_errors_as_advice(out):
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerow([title, device, len(done), steps, f"{seconds:.1f}", now])
