"""Checkpoints: everything a run needs to resume bit for bit, in one file that is whole or not there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from alasso.bench.config import RunConfig
from alasso.bench.data import editions
from alasso.bench.io import whole_file
from alasso.bench.learners.base import Learner
from alasso.errors import AlassoError

VERSION = 3


@dataclass
class Position:
    """Where a run stands and what it has found so far; ``step`` counts within the epoch."""

    task: int = 0
    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0  # over the steps of the running epoch
    seconds: float = 0.0
    accuracy: list[list[float]] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    untrained: list[float] = field(default_factory=list)
    commits: list[str | None] = field(default_factory=list)  # of the code that has trained it, one after another


class Writer:
    """Writes checkpoints beside the training: copies the state at once, and brings it to the disk while steps go on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: list[Future[None]] = []

    def save(self, path: Path, position: Position, learner: Learner) -> None:
        """Begins to write; :meth:`finish` waits for the end."""
        content = {
            "version": VERSION,
            "config": learner.config.to_json(),
            "data": dict(learner.stream.editions),
            "position": copy.deepcopy(asdict(position)),
            "learner": copied_to_host(learner.state_dict()),
            "random": random_state(learner.device),
        }
        self._pending.append(self._pool.submit(_write, path, content))

    def wait(self) -> None:
        """Waits until nothing is being written; says nothing about errors."""
        wait(self._pending)
        self._pending.clear()

    def finish(self) -> None:
        """Waits for what is being written.

        Raises:
            AlassoError: The disk refused it.
        """
        while self._pending:
            self._pending.pop(0).result()


class _Sink:
    """A stream for torch's writer, which cannot stand an exception: keeps a disk's refusal for later.

    Writes piece by piece: while the system takes a piece, Python is free for the training.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.refusal: Exception | None = None

    def write(self, content: memoryview) -> int:
        if self.refusal is None:
            try:
                self.stream.write(content)
            except Exception as error:
                self.refusal = error
        return len(content)

    def flush(self) -> None:
        """The file is flushed as a whole."""


def _write(path: Path, content: dict[str, Any]) -> None:
    # Checksums take eight times as long as the rest, beside a training that wants the processor; a file that is
    # written whole needs none.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with whole_file(path) as stream:
            sink = _Sink(stream)
            torch.save(content, sink)  # type: ignore[arg-type]
            if sink.refusal:
                raise sink.refusal
    finally:
        torch.serialization.set_crc32_options(before)


def copied_to_host(state: Any) -> Any:
    """The same nesting with every tensor copied; training changes its own meanwhile."""
    copied = _copying_to_host(state)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copied


def _copying_to_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        state = state.detach()
        # Pinned memory takes copies from a GPU ten times as fast; torch keeps it for the next time.
        return torch.empty_like(state, device="cpu", pin_memory=state.is_cuda).copy_(state, non_blocking=True)
    if isinstance(state, dict):
        return {key: _copying_to_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_copying_to_host(value) for value in state]
    return state


def load(
    path: Path, config: RunConfig, device: torch.device, data: Mapping[str, str]
) -> tuple[Position, dict[str, Any]]:
    """Reads a checkpoint and sets torch's random state; never runs code from the file.

    Args:
        path: The file.
        config: The run that is to be resumed.
        device: Where its tensors go.
        data: Editions of the data sets that the run is made on now.

    Returns:
        Where the run stands, and the learner's state.

    Raises:
        AlassoError: The file is no checkpoint, or of another version, run or edition of the data.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        version, saved_config = content["version"], content["config"]
    except Exception as error:  # torch.load raises what the unzipper or the unpickler happens to raise
        raise AlassoError(f"{path} is not a checkpoint of alasso; delete it to start over") from error
    if version != VERSION:
        raise AlassoError(f"{path} has version {version}, this library reads {VERSION}; delete it to start over")
    if saved_config != (ours := config.to_json()):
        differing = sorted(k for k in {**saved_config, **ours} if saved_config.get(k) != ours.get(k))
        raise AlassoError(
            f"{path} is a checkpoint of another run: {', '.join(differing)} differ; delete it to start over"
        )
    if editions.unlike(content["data"], data):
        before, after = editions.in_words(content["data"]), editions.in_words(data)
        raise AlassoError(f"{path} was trained on other data ({before}; now {after}); delete it to start over")
    restore_random_state(content["random"], device)
    return Position(**content["position"]), content["learner"]


def config_in(path: Path) -> RunConfig | None:
    """Whose checkpoint it is; None where the file is none of this version."""
    content = without_weights(path)
    return RunConfig.from_json(content["config"]) if content else None


def without_weights(path: Path) -> dict[str, Any] | None:
    """What a checkpoint holds, its weights not read; None where the file is none of this version."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return content if content["version"] == VERSION else None
    except Exception:  # as in :func:`load`
        return None


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
