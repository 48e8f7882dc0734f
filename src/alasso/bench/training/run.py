"""A run, top to bottom: stream, network, learner, tasks, epochs, steps; measured, saved, written down."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alasso.bench import metrics, models, results
from alasso.bench.config import RunConfig
from alasso.bench.data import editions
from alasso.bench.io import taken
from alasso.bench.learners.base import Learner, StepPlan
from alasso.bench.learners.steps import steps_for
from alasso.bench.registry import METHODS, loaded
from alasso.bench.results import Divergence, Result
from alasso.bench.streams import Stream, make_stream, with_edition, with_validation
from alasso.bench.training import checkpoint
from alasso.bench.training.checkpoint import Position
from alasso.bench.training.progress import Observer, Stopped, stop_on_request
from alasso.errors import AlassoError, DivergedError

if sys.platform != "win32":
    import resource

SMALL_NETWORK = 2_000_000  # weights


def run(
    config: RunConfig,
    *,
    stream: Stream | None = None,
    model: Callable[[], nn.Module] | None = None,
    out: Path | str | None = None,
    checkpoints: Path | str | None = None,
    data_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    reference: Result | None = None,
    observer: Observer | None = None,
    checkpoint_every: float = 30.0,
) -> Result:
    """Trains a method on a stream, task after task, and measures it on all tasks seen so far after each.

    Args:
        config: What to train. The result depends on it and the device alone; on a CPU, for networks above 2 million
            weights, also on the number of threads.
        stream: Tasks in place of those that the config names.
        model: A function that makes a network, in place of the one that the config names.
        out: Folder for the result, and for checkpoints until then; None writes no result.
        checkpoints: Folder for checkpoints, where there is no ``out``; they stay.
        data_dir: Folder with the data sets; a cache if None.
        device: ``auto`` (a GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        resume: Whether to resume from the checkpoint, if there is one.
        reference: A single-task run to measure intransigence against.
        observer: Hears of everything that happens.
        checkpoint_every: Seconds between checkpoints.

    Returns:
        What the run found.

    Raises:
        AlassoError: Something asked for does not fit together, or the folder holds results of another stream.
        DivergedError: The weights are no longer finite.
        Stopped: The user pressed Ctrl-C; the run is saved.
    """
    if not isinstance(config, RunConfig):
        raise AlassoError(f"a run takes a RunConfig, not a {type(config).__name__}: RunConfig.own(…) makes one")
    place = torch_device(device)
    set_precision(config.precision)
    folder = Path(out) if out is not None else None
    held = folder or (Path(checkpoints) if checkpoints is not None else None)
    saved = results.checkpoint_path(config, held) if held else None
    with taken(held, config.name) if held else nullcontext(), stop_on_request() as stop_requested:
        if stream is None:
            stream = make_stream(config, Path(data_dir) if data_dir is not None else None, place)
        else:
            stream = own_stream(stream, config, folder)
        torch.manual_seed(config.seed)
        learner, position = make_learner(config, stream, model, place), Position()
        if saved and resume and checkpoint.kept(saved):
            position = checkpoint.restore(saved, learner)
        elif saved:
            checkpoint.discard(saved)  # only now that device, data and network are there
        if position.commits[-1:] != [code := results.commit()]:
            position.commits.append(code)
        with few_threads_for(learner):
            trainer = Trainer(learner, position, observer or Observer(), saved, checkpoint_every, stop_requested)
            trainer.train()
            result = found_by(learner, position, reference)
        if folder and saved:
            write(result, folder, trainer)
            checkpoint.discard(saved)
    return result


def write(result: Result, folder: Path, trainer: Trainer) -> None:
    """Write the result; where that fails, a checkpoint, from which it can be written later."""
    try:
        results.write(result, folder)
    except AlassoError:
        with suppress(AlassoError):  # the disk may take neither
            trainer.save()
            trainer.writer.finish()
        raise


def own_stream(stream: Stream, config: RunConfig, folder: Path | None) -> Stream:
    """The user's stream, as the config asks; refuses one that does not fit the config or the folder's files."""
    if not isinstance(stream, Stream):
        raise AlassoError(f"stream must be a Stream, not a {type(stream).__name__}: Stream.of makes one of your data")
    if config.tasks not in (None, len(stream)):
        raise AlassoError(f"tasks={config.tasks}, but the stream has {len(stream)}: leave tasks out, or cut the stream")
    stream = with_edition(stream)
    if folder:
        files = [path(config, folder) for path in (results.result_path, results.checkpoint_path)]
        editions.refuse_other_streams(files, stream.editions)
    return with_validation(stream, config.seed) if config.validation else stream


def make_learner(
    config: RunConfig, stream: Stream, model: Callable[[], nn.Module] | None, device: torch.device
) -> Learner:
    """The learner of the config's method, with a fresh network."""

    def made() -> nn.Module:
        if model is not None:
            return models.built_by(model, stream.input_shape, stream.classes)
        dropout = config.method == "sgd-dropout"
        return models.build(config.model, stream.input_shape, stream.classes, hidden=config.hidden, dropout=dropout)

    learner: Learner = loaded(METHODS[config.method].learner)(config, stream, made, device)
    return learner


def found_by(learner: Learner, position: Position, reference: Result | None) -> Result:
    """The result of a run that has ended."""
    *earlier, last = position.commits
    accuracy, ahead, untrained = position.accuracy, position.ahead, position.untrained
    against = reference.accuracy if reference else None
    return Result(
        config=learner.config,
        environment={
            **results.environment(str(learner.device)),
            "commit": last,
            **({"earlier_commits": earlier} if earlier else {}),
        },
        data=learner.stream.editions,
        accuracy=accuracy,
        ahead=ahead,
        untrained=untrained,
        metrics=metrics.summary(accuracy, ahead=ahead, untrained=untrained, reference=against),
        seconds=round(position.seconds, 3),
        peak_memory=peak_memory(learner.device),
    )


class RunDiverged(DivergedError):
    """A run diverged; ``note`` says which, where and why."""

    def __init__(self, note: Divergence) -> None:
        super().__init__(note.why)
        self.note = note


class News(NamedTuple):
    """Loss and penalty of an epoch, there once they have ``arrived``."""

    task: int
    epoch: int
    numbers: Tensor
    arrived: torch.cuda.Event | None


class Trainer:
    """The loop over tasks, epochs and steps. Keeps the position, so that a run can resume anywhere."""

    def __init__(
        self,
        learner: Learner,
        position: Position,
        observer: Observer,
        saved: Path | None = None,
        checkpoint_every: float = 30.0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.learner, self.at, self.observer = learner, position, observer
        self.saved, self.checkpoint_every, self.stop_requested = saved, checkpoint_every, stop_requested
        self.config, self.tasks = learner.config, learner.stream.tasks
        self.steps = steps_for(learner)
        self.steps.loss_sum += position.loss_sum
        self.steps_in_epoch = [-(-len(task.train) // self.config.batch_size) for task in self.tasks]
        self.steps_in_all = self.config.epochs * sum(self.steps_in_epoch)
        self.news: News | None = None
        self.tells_later = learner.device.type == "cuda"
        self.writer = checkpoint.Writer()
        self.last_save = time.monotonic()
        self.began = self.last_save - position.seconds
        if learner.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(learner.device)

    def train(self) -> None:
        """Trains from where the run stands to its end.

        Raises:
            RunDiverged: Weights are no longer finite.
            Stopped: The user asked for it; the run is saved.
        """
        at, learner = self.at, self.learner
        self.observer.begin(self.config, learner.stream, self.steps_done(), self.steps_in_all)
        try:
            if not at.untrained:
                at.untrained = learner.accuracies_on(self.tasks)
            for t in range(at.task, len(self.tasks)):
                if at.epoch == at.step == 0:
                    learner.begin_task(t)
                learner.prepare(t)
                self.steps.begin_task(t)
                plans = learner.epoch_plan(t, at.epoch)
                for epoch in range(at.epoch, self.config.epochs):
                    self.train_epoch(t, epoch, plans)
                    # A GPU is still at work on its steps: time to plan the next.
                    plans = learner.epoch_plan(t, epoch + 1)
                self.tell()
                at.task, at.epoch = t + 1, 0
                self.end_task(t)
                if self.save_is_due() and t + 1 < len(self.tasks):
                    self.save()
        except DivergedError as error:
            raise RunDiverged(Divergence(self.config, len(at.accuracy) + 1, str(error))) from error
        finally:
            self.writer.wait()  # nobody who resumes from here may find a checkpoint that is still being written
        at.seconds = time.monotonic() - self.began

    def train_epoch(self, t: int, epoch: int, plans: Sequence[StepPlan]) -> None:
        at = self.at
        self.steps.begin_epoch(plans)
        while at.step < len(plans):
            self.steps.step(at.step)
            at.step += 1
            self.observer.step_done(t, epoch, self.steps_done())
            if self.stop_requested():
                self.tell()
                self.save()
                self.writer.finish()
                raise Stopped(f"task {t + 1}, epoch {epoch + 1}, step {at.step}")
            if self.save_is_due():
                self.save()
        at.epoch, at.step = epoch + 1, 0
        self.tell()  # of the epoch before: a GPU is still at work on the steps of this one
        self.news = self.news_of(t, epoch, len(plans)) if self.observer.wants_epochs else None
        self.steps.loss_sum.zero_()
        if not self.tells_later:
            self.tell()

    def end_task(self, t: int) -> None:
        """Consolidates the task and measures all so far."""
        at, learner = self.at, self.learner
        learner.end_task(t)
        at.accuracy.append(learner.accuracies(t, at.accuracy))
        if t + 1 < len(self.tasks):
            at.ahead += learner.accuracies_on([self.tasks[t + 1]])
        self.observer.task_done(t, at.accuracy, self.seconds_left())

    # -- telling ------------------------------------------------------------------------------------------------

    def news_of(self, t: int, epoch: int, steps: int) -> News:
        """Loss and penalty as they are now, on their way to the host."""
        loss = self.steps.loss_sum / steps
        here = torch.stack([loss, self.learner.penalty().to(loss)])
        if not here.is_cuda:
            return News(t, epoch, here, None)
        numbers = torch.empty_like(here, device="cpu", pin_memory=True).copy_(here, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return News(t, epoch, numbers, arrived)

    def tell(self) -> None:
        """Tells the observer of the last epoch, once."""
        news, self.news = self.news, None
        if news is None:
            return
        if news.arrived is not None:
            news.arrived.synchronize()
        loss, penalty = news.numbers.tolist()
        self.observer.epoch_done(news.task, news.epoch, loss, penalty, self.at.accuracy, self.seconds_left())

    def steps_done(self) -> int:
        done = self.config.epochs * sum(self.steps_in_epoch[: self.at.task]) + self.at.step
        return done + self.at.epoch * self.steps_in_epoch[self.at.task] if self.at.task < len(self.tasks) else done

    def seconds_left(self) -> float:
        done = self.steps_done()
        return (time.monotonic() - self.began) * (self.steps_in_all - done) / max(done, 1)

    # -- saving -------------------------------------------------------------------------------------------------

    def save_is_due(self) -> bool:
        return time.monotonic() - self.last_save > self.checkpoint_every

    def save(self) -> None:
        """Begins to write a checkpoint, if the run has a file for it."""
        self.last_save = time.monotonic()
        if self.saved is None:
            return
        self.writer.finish()
        self.at.loss_sum, self.at.seconds = self.steps.loss_sum.item(), self.last_save - self.began
        self.writer.save(self.saved, self.at, self.learner)


# -- where a run goes ---------------------------------------------------------------------------------------------


def torch_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is a GPU where there is one."""
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
    """Of products of float32 on a GPU, convolutions included: TF32, or float32 to the last bit; summed in one order."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.deterministic = True  # or else a run on images differs from itself


@contextmanager
def few_threads_for(learner: Learner) -> Iterator[None]:
    """While inside, one thread where more gain nothing and cost much: on busy cores, all wait for the slowest.

    More gain nothing for a small network on a CPU, nor beside a GPU, unless the host gathers the examples.
    """
    before = torch.get_num_threads()
    small = sum(p.numel() for p in learner.model.parameters()) < SMALL_NETWORK
    if small if learner.device.type == "cpu" else learner.resident:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes in use at once, on the GPU where the run was there, else by the process; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
