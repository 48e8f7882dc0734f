"""Checkpoints: everything a run needs to resume bit for bit, in a file that is whole or refused, and the one before."""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from alasso._digest import UNREADABLE, Sink
from alasso.bench import sealed
from alasso.bench.config import RunConfig
from alasso.bench.data import editions
from alasso.bench.io import whole_file
from alasso.bench.learners import fits
from alasso.bench.learners.base import Learner
from alasso.errors import AlassoError, warn


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
        head = {
            "config": learner.config.to_json(),
            "data": dict(learner.stream.editions),
            "position": copy.deepcopy(asdict(position)),
        }
        content = {"learner": copied_to_host(learner.state_dict()), "random": random_state(learner.device)}
        self._pending.append(self._pool.submit(_write, path, head, content))

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


def _write(path: Path, head: dict[str, Any], content: dict[str, Any]) -> None:
    line = json.dumps(head).encode() + b"\n"
    with whole_file(path) as stream:
        stream.write(sealed.first_line(line, "0" * 64))
        sink = Sink(stream)
        sink.write(memoryview(line))
        sink.save(content)
        stream.seek(0)
        stream.write(sealed.first_line(line, sink.digest.hexdigest()))
        stream.flush()
        _keep(path)


def _keep(path: Path) -> None:
    """What is there becomes the checkpoint before; under its own name, too, it stays until it is replaced."""
    if path.exists():
        spare = path.with_name(f".{before(path).name}.{os.getpid()}.part")
        try:
            os.link(path, spare)
            spare.replace(before(path))
            spare.unlink(missing_ok=True)  # where both were the same file already
        except OSError:  # some file systems have no links
            path.replace(before(path))


def before(path: Path) -> Path:
    """Where the checkpoint before the newest lies."""
    return path.with_name(f"{path.name}.before")


def kept(path: Path) -> list[Path]:
    """What there is of a run's two checkpoints, the newest first."""
    return [file for file in (path, before(path)) if file.exists()]


def discard(path: Path) -> None:
    """Deletes a run's checkpoints, the older one first: the other can always stand alone."""
    before(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


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


def restore(path: Path, learner: Learner) -> Position:
    """Puts the newest whole checkpoint of a run into its learner; never runs code from a file.

    Args:
        path: Where the newest one lies.
        learner: Made for the run that is to be resumed.

    Returns:
        Where the run stands.

    Raises:
        AlassoError: None is whole, or it is of another version, run or edition of the data, or does not fit the run.
    """
    position, state, random = load(path, learner.config, learner.device, learner.stream.editions)
    try:
        fits.check_position(position, learner.config, learner.stream)
        learner.load_state_dict(state)
        fits.check_counts(state, position)
        restore_random_state(random, learner.device)
    except (AlassoError, LookupError, TypeError, AttributeError) as error:
        why = error if isinstance(error, AlassoError) else f"{type(error).__name__}: {error}"
        raise AlassoError(f"{path} does not fit its run: {why}; delete it to start over") from error
    return position


def load(
    path: Path, config: RunConfig, device: torch.device, data: Mapping[str, str]
) -> tuple[Position, dict[str, Any], dict[str, torch.Tensor]]:
    """Reads a run's newest checkpoint; goes back to the one before, and says so, where it is damaged or gone.

    Args:
        path: Where the newest one lies.
        config: The run that is to be resumed.
        device: Where its tensors go.
        data: Editions of the data sets that the run is made on now.

    Returns:
        Where the run stands, the learner's state, and torch's random state.

    Raises:
        AlassoError: Both are damaged, or it is of another version, run or edition of the data.
    """
    head, body = _newest_whole(path)
    if (saved_config := head["config"]) != (ours := config.to_json()):
        differing = sorted(k for k in {**saved_config, **ours} if saved_config.get(k) != ours.get(k))
        raise AlassoError(
            f"{path} is a checkpoint of another run: {', '.join(differing)} differ; delete it to start over"
        )
    if editions.unlike(head["data"], data):
        said, now = editions.in_words(head["data"]), editions.in_words(data)
        raise AlassoError(f"{path} was trained on other data ({said}; now {now}); delete it to start over")
    try:
        content = torch.load(io.BytesIO(body), map_location=device, weights_only=True)
        return Position(**head["position"]), content["learner"], content["random"]
    except UNREADABLE as error:
        if "memory" in str(error):  # it says nothing against the file
            raise
        raise AlassoError(f"{path} is not a checkpoint of alasso; delete it to start over") from error


def _newest_whole(path: Path) -> tuple[dict[str, Any], bytes]:
    """Head and body of the newest checkpoint that is as it was written."""
    damaged = []
    for file in kept(path):
        try:
            found = sealed.read(file)
        except sealed.Damaged as error:
            damaged.append(error)
            continue
        if file != path:
            why = damaged[0] if damaged else f"{path} is gone"
            warn(f"{why}: resuming from the checkpoint before it")
            file.replace(path)  # the next one may not take its place among the damaged
        return found
    if len(damaged) == 1:
        raise AlassoError(f"{damaged[0]}; delete it to start over") from damaged[0]
    raise AlassoError(f"{path} and the checkpoint before it are damaged; delete both to start over") from damaged[0]


def config_in(path: Path) -> RunConfig | None:
    """Whose checkpoint it is; None where that cannot be read."""
    head = sealed.head_of(path)
    try:
        return RunConfig.from_json(head["config"]) if head else None
    except (AlassoError, LookupError, TypeError, AttributeError, ValueError):
        return None


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Sets torch's random state to what :func:`random_state` returned, here or on another device."""
    here = random_state(device)
    fits.check_tensors({name: state[name] for name in here if name == "cpu" or name in state}, here)
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
