"""Result files from anywhere: the good ones read, every other one named with the reason it was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alasso.bench import probe, results
from alasso.bench.labels import count_of
from alasso.bench.probe import Measured
from alasso.bench.results import Result
from alasso.errors import AlassoError

PROBES = ("probe.json", "probe.json.xz")


@dataclass(frozen=True)
class Collected:
    """What was found.

    Args:
        results: Whole results, none twice.
        left_out: One sentence for every file that is no whole result, and for every run that diverged.
        probes: What probes measured.
    """

    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    probes: list[Measured] = field(default_factory=list)


def collect(paths: Sequence[Path]) -> Collected:
    """Reads every result and probe among files and folders.

    Args:
        paths: Files, and folders, which are searched to the bottom. A run and its copies count once.

    Returns:
        What was found. Runs of a search, measured on held-out examples, are left out where there are others.

    Raises:
        AlassoError: One of the paths does not exist.
    """
    found = Collected()
    by_name: dict[str, list[Result]] = {}
    for result in results.read_all(paths):
        if isinstance(result, AlassoError):
            found.left_out.append(str(result))
            continue
        alike = by_name.setdefault(result.name, [])
        if result not in alike:
            alike.append(result)
            found.results.append(result)
    found.left_out.extend(_diverged(paths))
    for path in results.files_below(paths, PROBES):
        if path.name.endswith(PROBES):
            try:
                found.probes.append(probe.read(path))
            except AlassoError as error:
                found.left_out.append(str(error))
    tested = [result for result in found.results if not result.config.validation]
    searched = len(found.results) - len(tested)
    if tested and searched:
        what = f"{count_of(searched, 'run')} of a search, measured on held-out examples"
        found.left_out.append(f"{what}; to see them, name their folder alone")
        return Collected(tested, found.left_out, found.probes)
    return found


def _diverged(paths: Iterable[Path]) -> list[str]:
    """One sentence for every run that diverged and has no result of another time."""
    said = []
    for note in results.files_below(paths, (results.DIVERGED,)):
        if note.name.endswith(results.DIVERGED) and not note.with_suffix(".json").exists():
            try:
                found = results.read_note(note)
            except AlassoError as error:
                said.append(str(error))
            else:
                said.append(f"{found.config.name} diverged in task {found.task}: {found.why}")
    return said
