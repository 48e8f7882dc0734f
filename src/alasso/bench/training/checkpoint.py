"""Checkpoints: everything a run needs to go on as if nothing had happened, in one file that is whole or not there."""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from alasso.bench.config import RunConfig
from alasso.bench.data import version as editions
from alasso.bench.io import whole_file
from alasso.errors import AlassoError

VERSION = 2


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
    seconds_at: dict[int, float] = field(default_factory=dict)  # by tasks learned; older checkpoints have none
    stack: list[dict[str, Any]] = field(default_factory=list)  # configs of the runs it was begun with, in their places
    diverged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # those that left it, after so many tasks
    commits: list[str | None] = field(default_factory=list)  # of the code that has trained it, one after another

    def after(self, tasks: int) -> Position:
        """Where a run of so many tasks ended, if this one came past."""
        return Position(
            task=tasks,
            seconds=self.seconds_at[tasks],
            accuracy=self.accuracy[:tasks],
            ahead=self.ahead[: tasks - 1],
            untrained=self.untrained[:tasks],
            stack=self.stack,
            diverged=[(after, config) for after, config in self.diverged if after <= tasks],
            commits=self.commits,
        )


class Writer:
    """Writes checkpoints beside the training: the state is copied at once, and laid on the disk while steps go on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._pending: list[Future[None]] = []

    def save(
        self,
        path: Path,
        config: RunConfig,
        position: Position,
        learner_state: dict[str, Any],
        device: torch.device,
        data: Mapping[str, str] | None = None,
    ) -> None:
        """``data`` says which edition of which data set the run is made on."""
        content = {
            "version": VERSION,
            "config": config.to_json(),
            "data": dict(data or {}),
            "position": copy.deepcopy(asdict(position)),
            "learner": copied_to_host(learner_state),
            "random": random_state(device),
        }
        self._pending.append(self._pool.submit(_write, path, content))

    def wait(self) -> None:
        """Until nothing is being written, whatever became of it."""
        concurrent.futures.wait(self._pending)
        self._pending.clear()

    def finish(self) -> None:
        """Wait for what is being written; a disk that refused is heard of here."""
        while self._pending:
            self._pending.pop(0).result()


class Sink:
    """A stream for torch's writer, which cannot stand an exception: a disk's refusal is kept for later.

    Written piece by piece: while the system takes a piece, Python is free for the training.
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
    # Checksums take eight times as long as the rest, beside a training that wants the processor; that the file is
    # whole is seen to by writing it whole.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with whole_file(path) as stream:
            sink = Sink(stream)
            torch.save(content, sink)  # type: ignore[arg-type]
            if sink.refusal:
                raise sink.refusal
    finally:
        torch.serialization.set_crc32_options(before)


def copied_to_host(state: Any) -> Any:
    """The same nesting with every tensor copied, so that training may go on changing its own."""
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
    path: Path, config: RunConfig, device: torch.device, data: Mapping[str, str] | None = None
) -> tuple[Position, dict[str, Any]]:
    """Position and learner state; also sets torch's random state. No code in the file is ever run."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        version, saved_config = content["version"], content["config"]
    except Exception as error:  # torch.load raises what the unzipper or the unpickler happens to raise
        raise AlassoError(f"{path} is not a checkpoint of alasso; delete it to start over") from error
    if version != VERSION:
        raise AlassoError(f"{path} has version {version}, this library reads {VERSION}; delete it to start over")
    if saved_config != config.to_json():
        ours = config.to_json()
        differing = sorted(k for k in {**saved_config, **ours} if saved_config.get(k) != ours.get(k))
        raise AlassoError(
            f"{path} is a checkpoint of another run: {', '.join(differing)} differ; delete it to start over"
        )
    if editions.unlike(content["data"], now := data or {}):
        before, after = editions.in_words(content["data"]), editions.in_words(now)
        raise AlassoError(f"{path} was begun on other data ({before}; now {after}); delete it to start over")
    restore_random_state(content["random"], device)
    return Position(**content["position"]), content["learner"]


def stack_in(path: Path) -> tuple[str, ...]:
    """Names of the runs that a checkpoint's run was begun with and that did not leave, in their places; none where the
    file is none of this version, or says nothing about it.
    """
    position = Position(**content["position"]) if (content := without_weights(path)) else Position()
    diverged = [config for _, config in position.diverged]
    return tuple(RunConfig.from_json(config).name for config in position.stack if config not in diverged)


def place_in(path: Path) -> tuple[int, int, int] | None:
    """Task, epoch and step that a checkpoint's run stands at; None where the file is none of this version."""
    content = without_weights(path)
    return (content["position"]["task"], content["position"]["epoch"], content["position"]["step"]) if content else None


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
