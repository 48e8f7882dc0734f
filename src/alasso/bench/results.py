"""Result files: what one run found, with all that is needed to run it again.

A run writes one JSON file. Results that are kept for good go several to a file, one JSON object a line (``.jsonl``);
either may be compressed (``.xz``). Everything here reads them all.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import alasso
from alasso.bench import metrics, schema
from alasso.bench.config import RunConfig, count_of
from alasso.bench.io import write_whole
from alasso.bench.schema import read_text
from alasso.errors import AlassoError

SCHEMA = 1
ROUNDING = 1e-6  # by which measures of one matrix may differ
#: How the names of files with results end.
ENDINGS = (".json", ".jsonl", ".json.xz", ".jsonl.xz")
#: How the names of notes of diverged runs end. They hold JSON, too; but *.json is for results.
DIVERGED = ".diverged"
#: How the names of files end that runs and probes leave beside them.
BESIDE = (".csv", ".checkpoint", ".checkpoint.before", "probe.json", "probe.json.xz", DIVERGED)


@dataclass(frozen=True)
class Result:
    """What one run found. ``accuracy[t][j]``: after training task t, on task j ≤ t, both counted from 0."""

    config: RunConfig
    environment: dict[str, Any]
    data: dict[str, str]  # data set → edition
    accuracy: list[list[float]]
    ahead: list[float]  # ahead[t]: on task t+1 after training task t, not having seen it
    untrained: list[float]  # on each task before any training
    metrics: dict[str, float | None]
    seconds: float
    peak_memory: int | None  # bytes

    @property
    def name(self) -> str:
        """Name of the run, and of its file without the ending."""
        return self.config.name

    def to_json(self) -> dict[str, Any]:
        """The content of a result file."""
        return {"schema": SCHEMA, **asdict(self), "config": self.config.to_json()}


# -- writing ----------------------------------------------------------------------------------------------------


def result_path(config: RunConfig, folder: Path) -> Path:
    """Where a run writes its result."""
    return folder / f"{config.name}.json"


def checkpoint_path(config: RunConfig, folder: Path) -> Path:
    """Where a run keeps its checkpoint while it trains."""
    return folder / f"{config.name}.checkpoint"


def write(result: Result, folder: Path) -> Path:
    """Writes a result into a file of its own.

    Args:
        result: What a run found.
        folder: Where the file goes; made if it is missing.

    Returns:
        The file, named after the run.

    Raises:
        AlassoError: The folder takes no files.
    """
    path = result_path(result.config, folder)
    write_whole(path, (as_text(result.to_json()) + "\n").encode())
    return path


def as_text(value: Any, indent: int = 0) -> str:
    """Formats JSON with indents, but a list of plain values on one line: a row of a matrix stays a row.

    >>> print(as_text({"accuracy": [[0.9], [0.8, 0.9]]}))
    {
     "accuracy": [
      [0.9],
      [0.8, 0.9]
     ]
    }
    """
    if isinstance(value, Mapping) and value:
        items = [f"{json.dumps(name)}: {as_text(item, indent + 1)}" for name, item in value.items()]
        brackets = "{}"
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = [as_text(item, indent + 1) for item in value]
        brackets = "[]"
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    line = "\n" + " " * indent
    return brackets[0] + ",".join(f"{line} {item}" for item in items) + line + brackets[1]


# -- reading ----------------------------------------------------------------------------------------------------


def read(path: Path) -> Result:
    """Reads a file that holds one result.

    Args:
        path: The file; see :data:`ENDINGS`.

    Returns:
        The result.

    Raises:
        AlassoError: The file cannot be read, holds no result, or several.
    """
    if path.is_dir():
        raise AlassoError(f"{path} is a folder; name one result file")
    found = read_file(path)
    if len(found) != 1:
        raise AlassoError(f"{path} holds {len(found)} results; name a file with one")
    if isinstance(found[0], AlassoError):
        raise found[0]
    return found[0]


def read_all(paths: Iterable[Path]) -> Iterator[Result | AlassoError]:
    """Reads every result in files and folders.

    Args:
        paths: Files, and folders, which are searched to the bottom.

    Yields:
        Each result, or the error that says why one cannot be read.

    Raises:
        AlassoError: One of the paths does not exist.
    """
    for path in result_files(paths):
        yield from read_file(path)


def result_files(paths: Iterable[Path]) -> list[Path]:
    """Lists the files with results below some paths; a file that is named itself needs no certain ending."""
    return [path for path in files_below(paths, ENDINGS) if not path.name.endswith(BESIDE)]


def files_below(paths: Iterable[Path], endings: tuple[str, ...]) -> list[Path]:
    """Lists files by the ends of their names, each once; a file that is named itself is taken as it is."""
    files: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise AlassoError(f"there is no file or folder {path}")
        inside = [file for file in path.rglob("*") if file.name.endswith(endings)] if path.is_dir() else [path]
        for file in sorted(inside):
            if file.is_file():
                files.setdefault(file.resolve(), file)
    return list(files.values())


def read_file(path: Path) -> list[Result | AlassoError]:
    """Reads all results of one file; in place of one that cannot be read, the error that says why."""
    try:
        text = read_text(path)
    except AlassoError as error:
        return [error]
    if not path.name.removesuffix(".xz").endswith(".jsonl"):
        return [_parsed(text, str(path))]
    lines = enumerate(text.split("\n"), 1)
    return [_parsed(line, f"{path}, line {number},") for number, line in lines if line.strip()]


def _parsed(text: str, where: str) -> Result | AlassoError:
    try:
        raw = schema.from_json(text)
    except AlassoError as error:
        return AlassoError(f"{where} {error}")
    if not isinstance(raw, dict) or "schema" not in raw:
        return AlassoError(f"{where} is not a result of alasso")
    if raw["schema"] != SCHEMA:
        return AlassoError(f"{where} has a schema this version does not know; it reads schema {SCHEMA}")
    try:
        schema.RESULT(raw, "")
        del raw["schema"]
        return checked(Result(**{**raw, "config": RunConfig.from_json(raw["config"])}))
    except AlassoError as error:
        return AlassoError(f"{where} is not a result of alasso: {error}")


def checked(result: Result) -> Result:
    """Checks that a row of accuracies is there for each task, and that the measures are theirs."""
    rows, tasks = len(result.accuracy), result.config.tasks
    found = metrics.summary(result.accuracy, ahead=result.ahead, untrained=result.untrained)
    if tasks not in (None, rows):
        raise AlassoError(f"it has {count_of(rows, 'row')} of accuracy for {count_of(tasks, 'task')}")
    if len(result.untrained) != rows:
        raise AlassoError(f"untrained has {len(result.untrained)} numbers for {count_of(rows, 'task')}")
    for name, value in found.items():
        written = result.metrics.get(name)
        if name != "I" and written is not None and value is not None and abs(written - value) > ROUNDING:
            raise AlassoError(f"metrics say {name} = {written:g}, but the accuracies give {value:g}")
    return result


# -- runs that diverged -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Divergence:
    """Which run diverged, in which task, counted from 1, and why. With its note, ``alasso reproduce`` does not
    train it again.
    """

    config: RunConfig
    task: int
    why: str


def note_path(config: RunConfig, folder: Path) -> Path:
    """Where the note of a diverged run lies."""
    return folder / f"{config.name}{DIVERGED}"


def write_note(note: Divergence, environment: Mapping[str, Any], folder: Path) -> None:
    """Writes the note of a diverged run."""
    content = {"config": note.config.to_json(), "task": note.task, "why": note.why, "environment": environment}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_whole(note_path(note.config, folder), (text + "\n").encode())


def read_note(path: Path) -> Divergence:
    """Reads the note of a diverged run.

    Raises:
        AlassoError: The file is not such a note.
    """
    try:
        raw = schema.from_json(read_text(path))
        schema.NOTE(raw, "")
        return Divergence(RunConfig.from_json(raw["config"]), raw["task"], raw["why"])
    except AlassoError as error:
        raise AlassoError(f"{path} is not a note of a diverged run; delete it to train the run again") from error


# -- where it ran -----------------------------------------------------------------------------------------------


def device_of(environment: Mapping[str, Any]) -> str:
    """Names the GPU, or else the CPU, that did the computing."""
    return str(environment.get("gpu") or environment.get("cpu"))


def environment(device: str) -> dict[str, Any]:
    """Describes the machine, the versions and the commit that a run is trained with."""
    import torch

    cuda = device.startswith("cuda")
    return {
        "alasso": alasso.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Names the commit this package runs from, with a + if files differ from it; None for an installed package.

    ``ALASSO_COMMIT`` stands in where the source is a copy without its history.
    """
    if given := os.environ.get("ALASSO_COMMIT"):
        if not re.fullmatch(r"[0-9a-f]{7,40}\+?", given):
            raise AlassoError(f"ALASSO_COMMIT must be a commit, as git rev-parse HEAD gives it, not {given!r}")
        return given
    return source_commit()


@functools.cache  # asked when training begins: the files may be others when a result is written
def source_commit() -> str | None:
    source = Path(__file__).resolve().parent
    try:
        head = _git(source, "rev-parse", "HEAD")
        changed = _git(source, "status", "--porcelain", "--", str(Path(alasso.__file__).parent))
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
