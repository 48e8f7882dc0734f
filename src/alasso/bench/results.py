"""Result files: one JSON a run, written once and whole, with all that is needed to run it again."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import alasso
from alasso.bench import metrics
from alasso.bench.config import RunConfig
from alasso.bench.io import write_whole
from alasso.bench.labels import count_of
from alasso.errors import AlassoError

SCHEMA = 1


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
    peak_memory: int  # bytes

    @property
    def name(self) -> str:
        return self.config.name

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "config": self.config.to_json()}


def result_path(config: RunConfig, folder: Path) -> Path:
    return folder / f"{config.name}.json"


def checkpoint_path(config: RunConfig, folder: Path) -> Path:
    """Beside the result to be, while the run goes on."""
    return folder / f"{config.name}.checkpoint"


def write(result: Result, folder: Path) -> Path:
    path = result_path(result.config, folder)
    text = json.dumps(result.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, (compact_rows(text) + "\n").encode())
    return path


def read(path: Path) -> Result:
    """A result file, or one clear sentence why it is none."""
    if path.is_dir():
        raise AlassoError(f"{path} is a folder; name one result file")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AlassoError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise AlassoError(f"{path} is not a whole JSON file") from error
    if not isinstance(raw, dict) or "schema" not in raw:
        raise AlassoError(f"{path} is not a result of alasso")
    if raw.pop("schema") != SCHEMA:
        raise AlassoError(f"{path} has a schema this version does not know; it reads schema {SCHEMA}")
    try:
        result = Result(**{**raw, "config": RunConfig.from_json(raw["config"])})
        check_kinds(result)
        metrics.lower_triangle(result.accuracy)
        check_length(result)
        check_stack(result)
    except KeyError as error:
        raise AlassoError(f"{path} is not a result of alasso: it has no {error}") from error
    except (TypeError, AlassoError) as error:
        raise AlassoError(f"{path} is not a result of alasso: {error}") from error
    return result


def check_kinds(result: Result) -> None:
    """Numbers where numbers belong: what was edited by hand may hold texts in their place."""
    if not all(isinstance(part, dict) for part in (result.environment, result.data, result.metrics)):
        raise AlassoError("environment, data and metrics must be objects")
    if not isinstance(result.accuracy, list) or not all(map(is_list_of_numbers, result.accuracy)):
        raise AlassoError("accuracy must be a list of lists of numbers")
    for name in ("ahead", "untrained"):
        if not is_list_of_numbers(getattr(result, name)):
            raise AlassoError(f"{name} must be a list of numbers")
    for name in ("seconds", "peak_memory"):
        if not is_number(getattr(result, name)):
            raise AlassoError(f"{name} must be a number")
    if not all(value is None or is_number(value) for value in result.metrics.values()):
        raise AlassoError("metrics must be numbers, or null")
    if not all(isinstance(edition, str) for edition in result.data.values()):
        raise AlassoError("data must name editions, which are texts")


def is_list_of_numbers(value: object) -> bool:
    return isinstance(value, list) and all(map(is_number, value))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_length(result: Result) -> None:
    """Rows were lost, or put in by hand, where there are not as many as tasks."""
    if result.config.tasks not in (None, len(result.accuracy)):
        raise AlassoError(
            f"it has {count_of(len(result.accuracy), 'row')} of accuracy for {count_of(result.config.tasks, 'task')}"
        )


def check_stack(result: Result) -> None:
    """Where a result names the runs it was trained with, it is one of them, and none is there twice."""
    for part in ("stack", "diverged"):
        names = result.environment.get(part, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise AlassoError(f"its {part} is no list of names")
    stack = result.environment.get("stack", [])
    if len(set(stack)) < len(stack) or (stack and result.name not in stack):
        raise AlassoError("its stack names a run twice, or not the run itself")


def device_of(environment: Mapping[str, Any]) -> str:
    """What did the computing."""
    return str(environment.get("gpu") or environment.get("cpu"))


def read_all(folder: Path) -> Iterator[Result | AlassoError]:
    """Every result in a folder; what cannot be read comes as the error that says why."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield read(path)
        except AlassoError as error:
            yield error


def compact_rows(text: str) -> str:
    """Rows of numbers on one line each: a hundred tasks stay readable in a diff."""
    lines: list[str] = []
    row: list[str] | None = None
    for line in text.split("\n"):
        bare = line.strip()
        if row is not None:
            row.append(line)
            if bare in ("]", "],"):
                first, *others = row
                lines.append("".join([first, *map(str.strip, others)]).replace(",", ", ").rstrip())
                row = None
            elif not _is_number(bare.rstrip(",")):
                lines += row  # no row of numbers after all
                row = None
        elif bare.endswith("["):
            row = [line]
        else:
            lines.append(line)
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- where it ran -----------------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    """Machine, versions and commit."""
    import numpy
    import torch

    cuda = device.startswith("cuda")
    return {
        "alasso": alasso.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
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
    """The commit this package runs from, with a + if files differ from it; None for an installed package.

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
