"""A run, top to bottom: stream, network, learner, tasks, epochs, steps; measured, checkpointed, written down."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from alasso.bench import checkpoint, metrics, models, results
from alasso.bench.benchmarks import make_stream
from alasso.bench.checkpoint import Position
from alasso.bench.config import RunConfig
from alasso.bench.graphs import steps_for
from alasso.bench.learners import Learner
from alasso.bench.methods import LEARNERS
from alasso.bench.progress import Observer, Quiet, Stopped
from alasso.bench.results import Result
from alasso.bench.streams import Stream
from alasso.errors import AlassoError

SMALL_NETWORK = 2_000_000  # weights


def run(
    config: RunConfig,
    *,
    stream: Stream | None = None,
    model: Callable[[], nn.Module] | None = None,
    out: Path | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    reference: Result | None = None,
    observer: Observer | None = None,
    checkpoint_every: float = 30.0,
) -> Result:
    """Train ``config.method`` on the stream, task after task, and measure it on all tasks seen so far after each.

    With ``out``, the result is written there, and a checkpoint beside it while the run goes on; ``resume`` continues
    from it. ``stream`` and ``model`` (a function that makes one) replace those that the config names.
    """
    observer = observer or Quiet()
    place = torch_device(device)
    stream = stream or make_stream(config, data_dir, place)
    saved = out / f"{config.name}.checkpoint" if out else None
    torch.set_float32_matmul_precision("high" if config.precision == "tf32" else "highest")
    torch.manual_seed(config.seed)
    learner = make_learner(config, stream, model, place)
    position = Position()
    if saved and resume and saved.exists():
        position, state = checkpoint.load(saved, config, place)
        learner.load_state_dict(state)

    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    with stop_on_request() as stop_requested, few_threads_for(learner.model, place):
        trainer = Trainer(config, stream, learner, position, saved, checkpoint_every, observer, stop_requested)
        trainer.train()
        environment = results.environment(str(place))

    result = Result(
        config=config,
        environment=environment,
        data=stream.editions,
        accuracy=trainer.accuracy,
        ahead=trainer.ahead,
        untrained=trainer.untrained,
        metrics=metrics.summary(
            trainer.accuracy,
            ahead=trainer.ahead,
            untrained=trainer.untrained,
            reference=reference.accuracy if reference else None,
        ),
        seconds=round(trainer.seconds(), 3),
        peak_memory=peak_memory(place),
    )
    if out:
        results.write(result, out)
    if saved:
        saved.unlink(missing_ok=True)
    return result


class Trainer:
    """The loop, with the place it has reached."""

    def __init__(
        self,
        config: RunConfig,
        stream: Stream,
        learner: Learner,
        position: Position,
        saved: Path | None,
        checkpoint_every: float,
        observer: Observer,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.config, self.stream, self.learner = config, stream, learner
        self.position, self.saved, self.checkpoint_every = position, saved, checkpoint_every
        self.observer, self.stop_requested = observer, stop_requested
        self.accuracy = position.accuracy or []
        self.ahead = position.ahead or []
        self.untrained = position.untrained or []
        self.writer = checkpoint.Writer()
        self._seconds_before, self._started = position.seconds, time.monotonic()
        self._last_save = self._started
        self.steps = steps_for(learner)
        self.steps.loss_sum += position.loss_sum

    def train(self) -> None:
        learner, position, tasks = self.learner, self.position, self.stream.tasks
        self.observer.begin(self.config, self.stream, self.steps_done(), self.steps_in_all())
        if not self.untrained:
            self.untrained = [learner.accuracy(task) for task in tasks]
        for t in range(position.task, len(tasks)):
            if position.epoch == position.step == 0:
                learner.begin_task(t)
            learner.prepare(t)
            self.steps.begin(t)
            for epoch in range(position.epoch, self.config.epochs):
                self.train_epoch(t, epoch)
            learner.end_task(t)
            self.accuracy.append(learner.accuracies(t, self.accuracy))
            if t + 1 < len(tasks):
                self.ahead.append(learner.accuracy(tasks[t + 1]))
            position.task, position.epoch = t + 1, 0
            self.observer.task_done(t, self.accuracy, self.seconds_left())
            if t + 1 < len(tasks):
                self.save()
        self.writer.finish()

    def train_epoch(self, t: int, epoch: int) -> None:
        position = self.position
        plans = self.learner.epoch_plan(t, epoch)
        for plan in plans[position.step :]:
            self.steps.step(t, plan)
            position.step += 1
            self.observer.step_done(t, epoch, self.steps_done())
            if self.stop_requested():
                self.save()
                self.writer.finish()
                raise Stopped(f"task {t + 1}, epoch {epoch + 1}, step {position.step}")
            if time.monotonic() - self._last_save > self.checkpoint_every:
                self.save()
        position.epoch, position.step = epoch + 1, 0
        if self.observer.wants_epochs:
            loss = float(self.steps.loss_sum) / len(plans)
            self.observer.epoch_done(t, epoch, loss, self.learner.penalty(), self.accuracy, self.seconds_left())
        self.steps.loss_sum.zero_()

    # -- where it stands ----------------------------------------------------------------------------------------

    def save(self) -> None:
        self._last_save = time.monotonic()
        if self.saved is None:
            return
        position = self.position
        position.loss_sum, position.seconds = float(self.steps.loss_sum), self.seconds()
        position.accuracy, position.ahead, position.untrained = self.accuracy, self.ahead, self.untrained
        self.writer.save(self.saved, self.config, position, self.learner.state_dict(), self.learner.device)

    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def steps_of(self, t: int) -> int:
        """Steps of one epoch of task t."""
        return -(-len(self.stream.tasks[t].train) // self.config.batch_size)

    def steps_in_all(self) -> int:
        return self.config.epochs * sum(self.steps_of(t) for t in range(len(self.stream)))

    def steps_done(self) -> int:
        position = self.position
        before = self.config.epochs * sum(self.steps_of(t) for t in range(position.task))
        running = position.epoch * self.steps_of(position.task) if position.task < len(self.stream) else 0
        return before + running + position.step

    def seconds_left(self) -> float:
        done = self.steps_done()
        return self.seconds() * (self.steps_in_all() - done) / max(done, 1)


# -- parts ------------------------------------------------------------------------------------------------------


def make_learner(
    config: RunConfig, stream: Stream, model: Callable[[], nn.Module] | None, device: torch.device
) -> Learner:
    def from_config() -> nn.Module:
        dropout = config.method == "sgd-dropout"
        return models.build(config.model, stream.input_shape, stream.classes, hidden=config.hidden, dropout=dropout)

    return LEARNERS[config.method](config, stream, model or from_config, device)


def torch_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise AlassoError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise AlassoError(f"device {name}: torch sees no GPU here; use --device cpu")
    # Tensors name their device with its number.
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at once: on the GPU where the run was there, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def few_threads_for(model: nn.Module, device: torch.device) -> Iterator[None]:
    """One thread for a small network on a CPU: more gain it nothing, and cost it much where the cores are busy."""
    before = torch.get_num_threads()
    if device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL_NETWORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stop_on_request() -> Iterator[Callable[[], bool]]:
    """While inside, the first Ctrl-C asks the run to stop at the next step; the second one stops at once."""
    requested = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True

    try:
        before = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not in the main thread: nobody can press Ctrl-C here
        yield lambda: False
        return
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, before)
