"""Result files from anywhere: the good ones read, every other one named with the reason it was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alasso.bench import results
from alasso.bench.labels import count_of
from alasso.bench.probe import findings as probe_findings
from alasso.bench.probe.findings import Measured
from alasso.bench.results import Result
from alasso.errors import AlassoError

PROBES = ("probe.json", "probe.json.xz")


@dataclass(frozen=True)
class Collected:
    """What was found; ``left_out`` holds one sentence for every JSON file that is no whole result."""

    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    probes: list[Measured] = field(default_factory=list)


def collect(paths: Sequence[Path]) -> Collected:
    """Every result among files and folders, folders searched to the bottom; a run and its copies count once."""
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
    found.left_out.extend(diverged(paths))
    for path in [path for path in results.files_below(paths, PROBES) if path.name.endswith(PROBES)]:
        try:
            found.probes.append(probe_findings.read(path))
        except AlassoError as error:
            found.left_out.append(str(error))
    return without_searches(found)


def diverged(paths: Iterable[Path]) -> list[str]:
    """One sentence for every run that came to no end, and has no result of another time."""
    notes = [path for path in results.files_below(paths, (results.DIVERGED,)) if path.name.endswith(results.DIVERGED)]
    said = []
    for note in (note for note in notes if not note.with_suffix(".json").exists()):
        try:
            found = results.read_note(note)
        except AlassoError as error:
            said.append(str(error))
        else:
            said.append(f"{found.config.name} diverged in task {found.task}: {found.why}")
    return said


def without_searches(found: Collected) -> Collected:
    """Runs of a search were measured on held-out examples: beside others they are left out, alone they are shown."""
    tested = [result for result in found.results if not result.config.validation]
    searched = len(found.results) - len(tested)
    if not tested or not searched:
        return found
    said = (
        f"{count_of(searched, 'run')} of a search, measured on held-out examples; to see them, name their folder alone"
    )
    return Collected(tested, [*found.left_out, said], found.probes)
