"""The loop that a run is: tasks, epochs and steps, of one learner or of several in step with one another."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alasso.bench import metrics
from alasso.bench.config import RunConfig
from alasso.bench.learners.base import Learner
from alasso.bench.results import Result
from alasso.bench.stacking.lanes import StackedSteps, stackable
from alasso.bench.streams import Stream
from alasso.bench.training import checkpoint
from alasso.bench.training.checkpoint import Position
from alasso.bench.training.cuda_graphs import DirectSteps, GraphedSteps
from alasso.bench.training.diverged import Divergence
from alasso.bench.training.progress import LanesDiverged, Observer, Stopped
from alasso.bench.training.waypoints import Waypoint
from alasso.errors import AlassoError, DivergedError


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
    waypoints: Sequence[Waypoint] = ()
    random: dict[str, Tensor] = field(default_factory=dict)  # torch's random state when it was begun, or left off

    def result(self, environment: dict[str, Any], reference: Result | None) -> Result:
        return self._result(self.config, self.position, environment, reference)

    def reached(self) -> list[Waypoint]:
        """Waypoints that it has come past and that have no result yet."""
        return [w for w in self.waypoints if w.result is None and w.tasks in self.position.seconds_at]

    def result_of(self, waypoint: Waypoint, environment: dict[str, Any]) -> Result:
        """What the waypoint's run would have found by itself."""
        return self._result(waypoint.config, self.position.after(waypoint.tasks), environment, waypoint.reference)

    def _result(
        self, config: RunConfig, position: Position, environment: dict[str, Any], reference: Result | None
    ) -> Result:
        return Result(
            config=config,
            environment={
                **environment,
                "commit": position.commits[-1],
                **({"earlier_commits": position.commits[:-1]} if position.commits[1:] else {}),
                "lanes": self.beside,
                "stack": names_at_length(position.stack, config.tasks),
                "diverged": names_at_length([config for _, config in position.diverged], config.tasks),
            },
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


def names_at_length(configs: Sequence[dict[str, Any]], tasks: int | None) -> list[str]:
    """What runs are called that have so many tasks."""
    return [replace(RunConfig.from_json(config), tasks=tasks).name for config in configs]


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

    def __init__(
        self,
        lanes: Sequence[Lane],
        checkpoint_every: float,
        stop_requested: Callable[[], bool],
        write_waypoints: Callable[[Sequence[Lane]], None] = lambda lanes: None,
    ) -> None:
        self.lanes, self.checkpoint_every, self.stop_requested = lanes, checkpoint_every, stop_requested
        self.write_waypoints = write_waypoints
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
        self.steps = steps_for([lane.learner for lane in lanes], self.steps_done() > 0)
        self.steps.loss_sum += self.steps.loss_sum.new_tensor([lane.position.loss_sum for lane in lanes])

    def train(self) -> None:
        try:
            self._train()
        finally:  # nothing may be written behind the back of those who go on from here
            self.writer.wait()
        self.note_position()

    def _train(self) -> None:
        for lane in self.lanes:
            lane.beside = len(self.lanes)
            if self.steps_done() == 0:
                lane.position.stack = [one.config.to_json() for one in self.lanes]
            lane.observer.begin(lane.config, lane.stream, self.steps_done(), self.steps_in_all())
            if not lane.position.untrained:
                lane.position.untrained = lane.learner.accuracies_on(lane.stream.tasks)
        self.write_waypoints(self.lanes)  # those that a checkpoint lies beyond
        for t in range(self.task, len(self.lanes[0].stream)):
            for lane in self.lanes:
                if self.epoch == self.step == 0:
                    lane.learner.begin_task(t)
                lane.learner.prepare(t)
            self.steps.begin(t)
            for epoch in range(self.epoch, self.epochs):
                self.train_epoch(t, epoch)
            self.tell()
            self.task, self.epoch = t + 1, 0
            self.finish_task(t)

    def train_epoch(self, t: int, epoch: int) -> None:
        if self.ahead is None or self.ahead.place != (t, epoch):
            self.ahead = self.planned(t, epoch)
        steps_of_lane = self.ahead.steps_of_lane
        self.steps.begin_epoch(self.ahead.steps, steps_of_lane)
        while self.step < max(steps_of_lane):
            self.step += self.steps.step(self.step)
            self.lanes[0].observer.step_done(t, epoch, self.steps_done())
            if self.stop_requested():
                self.tell()
                self.save()
                self.writer.finish()
                raise Stopped(f"task {t + 1}, epoch {epoch + 1}, step {self.step}")
            if self.save_is_due():
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

    def finish_task(self, t: int) -> None:
        """Measure and save all lanes; where some diverged, the others can be gone on with from here."""
        diverged = {i: why for i, lane in enumerate(self.lanes) if (why := self.end_task(lane, t))}
        sound = [lane for i, lane in enumerate(self.lanes) if i not in diverged]
        for lane, seconds in zip(self.lanes, self.seconds_of_lanes(), strict=True):
            lane.position.seconds_at[t + 1] = seconds
        for lane in sound:
            lane.position.diverged += [(t + 1, self.lanes[i].config.to_json()) for i in diverged]
        if diverged or (self.save_is_due() and t + 1 < len(self.lanes[0].stream)):
            self.save(sound)
        with self.saved_if_refused(sound):
            self.write_waypoints(sound)
        if diverged:
            self.writer.finish()  # what the others go on from
            raise LanesDiverged([Divergence(self.lanes[i].config, t + 1, why) for i, why in diverged.items()])

    def end_task(self, lane: Lane, t: int) -> str | None:
        """Hold on to the task and measure all so far; or, if the run diverged, why it is thought so."""
        learner, position, tasks = lane.learner, lane.position, lane.stream.tasks
        try:
            learner.end_task(t)
        except DivergedError as error:
            return str(error)
        position.accuracy.append(learner.accuracies(t, position.accuracy))
        if t + 1 < len(tasks):
            position.ahead += learner.accuracies_on([tasks[t + 1]])
        lane.observer.task_done(t, position.accuracy, self.seconds_left())
        return None

    # -- where it stands ----------------------------------------------------------------------------------------

    def save_is_due(self) -> bool:
        return time.monotonic() - self._last_save > self.checkpoint_every

    def save(self, lanes: Sequence[Lane] | None = None) -> None:
        """A checkpoint of each of these lanes, or of all."""
        self._last_save = time.monotonic()
        self.writer.finish()
        self.note_position()
        for lane in self.lanes if lanes is None else lanes:
            if lane.saved is not None:
                learner = lane.learner
                state, editions = learner.state_dict(), lane.stream.editions
                self.writer.save(lane.saved, lane.config, lane.position, state, learner.device, editions)

    @contextmanager
    def saved_if_refused(self, lanes: Sequence[Lane]) -> Iterator[None]:
        """Where a result cannot be written, that must not cost what was trained since the last checkpoint."""
        try:
            yield
        except AlassoError:
            self.save(lanes)
            self.writer.finish()
            raise

    def note_position(self) -> None:
        noted = zip(self.lanes, self.steps.loss_sum.tolist(), self.seconds_of_lanes(), strict=True)
        for lane, loss_sum, seconds in noted:
            position = lane.position
            position.task, position.epoch, position.step, position.loss_sum = self.task, self.epoch, self.step, loss_sum
            position.seconds = seconds

    def seconds_of_lanes(self) -> list[float]:
        """What each run took so far: before, and its share of the time they took together."""
        share = (time.monotonic() - self._started) / len(self.lanes)
        return [before + share for before in self._seconds_before]

    def steps_in_all(self) -> int:
        return self.epochs * sum(self.steps_of)

    def steps_done(self) -> int:
        running = self.epoch * self.steps_of[self.task] if self.task < len(self.steps_of) else 0
        return self.epochs * sum(self.steps_of[: self.task]) + running + self.step

    def seconds_left(self) -> float:
        done = self.steps_done()
        seconds = time.monotonic() - self._started + sum(self._seconds_before)
        return seconds * (self.steps_in_all() - done) / max(done, 1)


def steps_for(learners: Sequence[Learner], goes_on: bool = False) -> DirectSteps | StackedSteps:
    """How steps are made: stacked and recorded where that can be, one by one elsewhere."""
    (first, *others) = learners
    on_gpu = first.device.type == "cuda"
    if others or (on_gpu and stackable(first)):
        return StackedSteps(learners, goes_on)
    return GraphedSteps(first) if on_gpu and first.can_be_recorded else DirectSteps(first)


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at once: on the GPU where the run was there, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
