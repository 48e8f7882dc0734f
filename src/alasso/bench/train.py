"""A run, top to bottom: stream, network, learner, tasks, epochs, steps; measured, checkpointed, written down."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alasso.bench import checkpoint, metrics, models, results
from alasso.bench.benchmarks import make_streams
from alasso.bench.checkpoint import Position
from alasso.bench.config import RunConfig
from alasso.bench.graphs import DirectSteps, GraphedSteps
from alasso.bench.lanes import StackedSteps, can_share_a_stack, stackable, that_fit
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
    (result,) = run_together(
        [config],
        streams=[stream] if stream else None,
        model=model,
        out=out,
        data_dir=data_dir,
        device=device,
        resume=resume,
        references=[reference],
        observers=[observer or Quiet()],
        checkpoint_every=checkpoint_every,
    )
    return result


def run_together(
    configs: Sequence[RunConfig],
    *,
    streams: Sequence[Stream] | None = None,
    model: Callable[[], nn.Module] | None = None,
    out: Path | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    resume: bool = False,
    references: Sequence[Result | None] | None = None,
    observers: Sequence[Observer] | None = None,
    checkpoint_every: float = 30.0,
) -> list[Result]:
    """Several runs side by side, as lanes of one stacked network where they can be; the same results as one by one."""
    place = torch_device(device)
    streams = streams or make_streams(configs, data_dir, place)
    set_precision(configs[0].precision)
    lanes = []
    for i, (config, stream) in enumerate(zip(configs, streams, strict=True)):
        saved = out / f"{config.name}.checkpoint" if out else None
        observer = observers[i] if observers else Quiet()
        lanes.append(begun(config, stream, model, place, saved if resume else None, saved, observer))

    reference_of = dict(zip((c.name for c in configs), references or [None] * len(configs), strict=True))
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    with stop_on_request() as stop_requested, few_threads_for(lanes[0].learner.model, place):
        found: dict[str, Result] = {}
        groups = in_step(lanes)
        while groups:
            group = groups.pop(0)
            Trainer(group, checkpoint_every, stop_requested).train()
            environment = results.environment(str(place))
            for lane in group:
                found[lane.config.name] = result = lane.result(environment, reference_of[lane.config.name])
                if out:
                    results.write(result, out)
                if lane.saved:
                    lane.saved.unlink(missing_ok=True)
                del lane.learner  # what comes next may need its memory
            if stop_requested() and groups:
                raise Stopped("the end of a run")
    return [found[config.name] for config in configs]


@dataclass
class Lane:
    """One run: what it is, where it stands, who watches it."""

    config: RunConfig
    stream: Stream
    learner: Learner
    position: Position
    saved: Path | None
    observer: Observer
    beside: int = 1  # runs trained together with this one, itself included

    def result(self, environment: dict[str, Any], reference: Result | None) -> Result:
        position = self.position
        return Result(
            config=self.config,
            environment={**environment, "lanes": self.beside},
            data=self.stream.editions,
            accuracy=position.accuracy,
            ahead=position.ahead,
            untrained=position.untrained,
            metrics=metrics.summary(
                position.accuracy,
                ahead=position.ahead,
                untrained=position.untrained,
                reference=reference.accuracy if reference else None,
            ),
            seconds=round(position.seconds, 3),
            peak_memory=peak_memory(self.learner.device),
        )


class Planned(NamedTuple):
    """Which examples the steps of an epoch are made on."""

    place: tuple[int, int]  # task, epoch
    steps_of_lane: list[int]
    steps: Any


class News(NamedTuple):
    """What an epoch came to: of some lanes loss and penalty, a row a lane, there once they have ``arrived``."""

    task: int
    epoch: int
    lanes: list[int]
    numbers: Tensor
    arrived: torch.cuda.Event | None


class Trainer:
    """The loop over tasks, epochs and steps, of one run or of several in step with one another."""

    def __init__(self, lanes: Sequence[Lane], checkpoint_every: float, stop_requested: Callable[[], bool]) -> None:
        self.lanes, self.checkpoint_every, self.stop_requested = lanes, checkpoint_every, stop_requested
        self.epochs, self.batch_size = lanes[0].config.epochs, lanes[0].config.batch_size
        first = lanes[0].position
        self.task, self.epoch, self.step = first.task, first.epoch, first.step
        self.writer = checkpoint.Writer()
        self.ahead: Planned | None = None
        self.news: News | None = None
        self.tells_later = lanes[0].learner.device.type == "cuda"
        self.steps_of = [
            max(-(-len(lane.stream.tasks[t].train) // self.batch_size) for lane in lanes)
            for t in range(len(lanes[0].stream))
        ]  # in one epoch of each task
        self._seconds_before, self._started = [lane.position.seconds for lane in lanes], time.monotonic()
        self._last_save = self._started
        self.steps = steps_for([lane.learner for lane in lanes])
        self.steps.loss_sum += self.steps.loss_sum.new_tensor([lane.position.loss_sum for lane in lanes])

    def train(self) -> None:
        for lane in self.lanes:
            lane.beside = len(self.lanes)
            lane.observer.begin(lane.config, lane.stream, self.steps_done(), self.steps_in_all())
            if not lane.position.untrained:
                lane.position.untrained = lane.learner.accuracies_on(lane.stream.tasks)
        tasks = len(self.lanes[0].stream)
        for t in range(self.task, tasks):
            for lane in self.lanes:
                if self.epoch == self.step == 0:
                    lane.learner.begin_task(t)
                lane.learner.prepare(t)
            self.steps.begin(t)
            for epoch in range(self.epoch, self.epochs):
                self.train_epoch(t, epoch)
            self.tell()
            self.task, self.epoch = t + 1, 0
            for lane in self.lanes:
                self.end_task(lane, t)
            if t + 1 < tasks:
                self.save()
        self.writer.wait()  # a last checkpoint that the disk refused is of no use any more
        self.note_position()

    def train_epoch(self, t: int, epoch: int) -> None:
        if self.ahead is None or self.ahead.place != (t, epoch):
            self.ahead = self.planned(t, epoch)
        steps_of_lane = self.ahead.steps_of_lane
        self.steps.begin_epoch(self.ahead.steps, steps_of_lane)
        for i in range(self.step, max(steps_of_lane)):
            self.steps.step(i)
            self.step = i + 1
            self.lanes[0].observer.step_done(t, epoch, self.steps_done())
            if self.stop_requested():
                self.tell()
                self.save()
                self.writer.finish()
                raise Stopped(f"task {t + 1}, epoch {epoch + 1}, step {self.step}")
            if time.monotonic() - self._last_save > self.checkpoint_every:
                self.save()
        self.epoch, self.step = epoch + 1, 0
        # A GPU is still at work on the steps of this epoch: time to tell of the one before, and to plan the next.
        self.tell()
        self.news = self.news_of(t, epoch, steps_of_lane)
        self.steps.loss_sum.zero_()
        if epoch + 1 < self.epochs:
            self.ahead = self.planned(t, epoch + 1)
        if not self.tells_later:
            self.tell()

    def news_of(self, t: int, epoch: int, steps_of_lane: Sequence[int]) -> News | None:
        """Losses and penalties as they are now, on their way to the host; None if nobody wants them."""
        told = [i for i, lane in enumerate(self.lanes) if lane.observer.wants_epochs]
        if not told:
            return None
        losses = [self.steps.loss_sum[i] / steps_of_lane[i] for i in told]
        penalties = [self.lanes[i].learner.penalty().to(losses[0].dtype) for i in told]
        here = torch.stack([torch.stack(losses), torch.stack(penalties)], 1)
        if not here.is_cuda:
            return News(t, epoch, told, here, None)
        numbers = torch.empty_like(here, device="cpu", pin_memory=True).copy_(here, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return News(t, epoch, told, numbers, arrived)

    def tell(self) -> None:
        """Tell observers of the last epoch they have not heard of."""
        news, self.news = self.news, None
        if news is None:
            return
        if news.arrived is not None:
            news.arrived.synchronize()
        for i, (loss, penalty) in zip(news.lanes, news.numbers.tolist(), strict=True):
            lane = self.lanes[i]
            left = self.seconds_left()
            lane.observer.epoch_done(news.task, news.epoch, loss, penalty, lane.position.accuracy, left)

    def planned(self, t: int, epoch: int) -> Planned:
        plans = [lane.learner.epoch_plan(t, epoch) for lane in self.lanes]
        return Planned((t, epoch), [len(steps) for steps in plans], self.steps.planned(plans))

    def end_task(self, lane: Lane, t: int) -> None:
        learner, position, tasks = lane.learner, lane.position, lane.stream.tasks
        learner.end_task(t)
        position.accuracy.append(learner.accuracies(t, position.accuracy))
        if t + 1 < len(tasks):
            position.ahead += learner.accuracies_on([tasks[t + 1]])
        lane.observer.task_done(t, position.accuracy, self.seconds_left())

    # -- where it stands ----------------------------------------------------------------------------------------

    def save(self) -> None:
        self._last_save = time.monotonic()
        self.writer.finish()
        self.note_position()
        for lane in self.lanes:
            if lane.saved is not None:
                learner = lane.learner
                state, editions = learner.state_dict(), lane.stream.editions
                self.writer.save(lane.saved, lane.config, lane.position, state, learner.device, editions)

    def note_position(self) -> None:
        seconds = time.monotonic() - self._started
        for lane, loss_sum, before in zip(self.lanes, self.steps.loss_sum.tolist(), self._seconds_before, strict=True):
            position = lane.position
            position.task, position.epoch, position.step, position.loss_sum = self.task, self.epoch, self.step, loss_sum
            position.seconds = before + seconds / len(self.lanes)  # a lane's share of the time they took together

    def steps_in_all(self) -> int:
        return self.epochs * sum(self.steps_of)

    def steps_done(self) -> int:
        running = self.epoch * self.steps_of[self.task] if self.task < len(self.steps_of) else 0
        return self.epochs * sum(self.steps_of[: self.task]) + running + self.step

    def seconds_left(self) -> float:
        done = self.steps_done()
        seconds = time.monotonic() - self._started + sum(self._seconds_before)
        return seconds * (self.steps_in_all() - done) / max(done, 1)


# -- parts ------------------------------------------------------------------------------------------------------


def begun(
    config: RunConfig,
    stream: Stream,
    model: Callable[[], nn.Module] | None,
    device: torch.device,
    resume_from: Path | None,
    saved: Path | None,
    observer: Observer,
) -> Lane:
    """A run at its start, or where its checkpoint left it."""
    torch.manual_seed(config.seed)
    learner, position = make_learner(config, stream, model, device), Position()
    if resume_from and resume_from.exists():
        position, state = checkpoint.load(resume_from, config, device, stream.editions)
        learner.load_state_dict(state)
    return Lane(config, stream, learner, position, saved, observer)


def in_step(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Lanes that can be trained as one: stackable, at the same place, and no more than the memory holds.

    A stack that was killed may have left its lanes at different places.
    """
    groups: dict[Any, list[Lane]] = {}
    for lane in lanes:
        position = lane.position
        alone = len(lanes) > 1 and not stackable(lane.learner)
        place = (position.task, position.epoch, position.step)
        widths = tuple(task.head.stop - task.head.start for task in lane.stream.tasks)
        groups.setdefault(lane.config.name if alone else (place, widths), []).append(lane)
    apart = [
        [[lane] for lane in g] if not can_share_a_stack([lane.learner for lane in g]) else [g] for g in groups.values()
    ]
    fitting = that_fit(lanes[0].learner) if len(lanes) > 1 else 1
    return [group[i : i + fitting] for parts in apart for group in parts for i in range(0, len(group), fitting)]


def steps_for(learners: Sequence[Learner]) -> DirectSteps | StackedSteps:
    """How steps are made: stacked and recorded where that can be, one by one elsewhere."""
    (first, *others) = learners
    on_gpu = first.device.type == "cuda"
    if others or (on_gpu and stackable(first)):
        return StackedSteps(learners)
    return GraphedSteps(first) if on_gpu and first.can_be_recorded else DirectSteps(first)


def make_learner(
    config: RunConfig, stream: Stream, model: Callable[[], nn.Module] | None, device: torch.device
) -> Learner:
    dropout = config.method == "sgd-dropout"

    def from_config() -> nn.Module:
        return models.build(config.model, stream.input_shape, stream.classes, hidden=config.hidden, dropout=dropout)

    learner = LEARNERS[config.method](config, stream, model or from_config, device)
    if model is None and config.model in models.MODELS:
        learner.built_as = (config.model, stream.input_shape, stream.classes, config.hidden, dropout)
    return learner


def torch_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise AlassoError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise AlassoError(f"device {name}: use auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise AlassoError(f"device {name}: torch sees no GPU here; use --device cpu")
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise AlassoError(f"device {name}: torch sees {torch.cuda.device_count()} GPU here, counted from cuda:0")
    torch.cuda.set_device(number)  # streams and recorded steps belong to the current device
    return torch.device("cuda", number)  # tensors name their device with its number


def set_precision(precision: str) -> None:
    """Of products of float32 on a GPU, convolutions included: TF32, or float32 to the last bit."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


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
