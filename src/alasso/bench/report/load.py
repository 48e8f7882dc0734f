"""Result files from anywhere: the good ones read, every other one named with the reason it was left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alasso.bench import results
from alasso.bench.labels import count_of
from alasso.bench.probe import findings as probe_findings
from alasso.bench.probe.findings import Measured
from alasso.bench.results import Result
from alasso.bench.training import diverged as divergence
from alasso.errors import AlassoError

PROBE = "probe.json"
#: Files that runs and probes leave beside their results; a shell's ``*`` names them too.
BESIDE_RESULTS = (".csv", ".checkpoint", PROBE, divergence.SUFFIX)


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
    for path in json_files(paths):
        try:
            result = read_checked(path)
        except AlassoError as error:
            found.left_out.append(str(error))
            continue
        alike = by_name.setdefault(result.name, [])
        if result not in alike:
            alike.append(result)
            found.results.append(result)
    found.left_out.extend(diverged(paths))
    for path in files_of(paths, f"*{PROBE}", lambda file: file.name.endswith(PROBE)):
        try:
            found.probes.append(probe_findings.read(path))
        except AlassoError as error:
            found.left_out.append(str(error))
    return without_searches(found)


def diverged(paths: Iterable[Path]) -> list[str]:
    """One sentence for every run that came to no end, and has no result of another time."""
    notes = files_of(paths, f"*{divergence.SUFFIX}", lambda file: file.name.endswith(divergence.SUFFIX))
    said = []
    for note in (note for note in notes if not note.with_suffix(".json").exists()):
        try:
            found = divergence.read(note)
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


def json_files(paths: Iterable[Path]) -> list[Path]:
    """Files that should be results."""
    return files_of(paths, "*.json", lambda file: not file.name.endswith(BESIDE_RESULTS))


def files_of(paths: Iterable[Path], pattern: str, wanted: Callable[[Path], bool]) -> list[Path]:
    """Files to read, each once by whatever ways it is reached."""
    files: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise AlassoError(f"there is no file or folder {path}")
        below = sorted(path.rglob(pattern)) if path.is_dir() else [path]
        for file in below:
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts[:-1])  # as runs made again are
            if file.is_file() and not hidden and wanted(file):
                files.setdefault(file.resolve(), file)
    return list(files.values())


def read_checked(path: Path) -> Result:
    """A result all of whose parts can be shown, whatever the file holds."""
    try:
        result = results.read(path)
    except AlassoError:  # which is a ValueError, and says more
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise AlassoError(f"{path} is not a result of alasso") from error
    if not _is_positive_number(result.seconds):
        raise AlassoError(f"{path} is not a result of alasso: seconds must be a number")
    return result


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
