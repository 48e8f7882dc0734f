"""Runs that came to no end: each leaves a note beside the results, so that nobody waits for it again unasked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alasso.bench.config import RunConfig
from alasso.bench.io import write_whole
from alasso.errors import AlassoError

SUFFIX = ".diverged"  # JSON, too; but who reads all *.json of a folder wants results


@dataclass(frozen=True)
class Divergence:
    """Which run diverged, in which task, counted from 1, and why it is thought so."""

    config: RunConfig
    task: int
    why: str


def note_path(config: RunConfig, folder: Path) -> Path:
    return folder / f"{config.name}{SUFFIX}"


def write(note: Divergence, environment: Mapping[str, Any], folder: Path) -> None:
    content = {"config": note.config.to_json(), "task": note.task, "why": note.why, "environment": environment}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_whole(note_path(note.config, folder), (text + "\n").encode())


def read(path: Path) -> Divergence:
    """A note, or one clear sentence why it is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        note = Divergence(RunConfig.from_json(raw["config"]), raw["task"], raw["why"])
        if not isinstance(note.task, int) or not isinstance(note.why, str):
            raise TypeError("task or why")
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise AlassoError(f"{path} is no note of a run that diverged; delete it, and the run is made again") from error
    return note
