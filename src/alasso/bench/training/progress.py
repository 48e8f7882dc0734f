"""What a person sees, and what is logged, while a run trains; and how Ctrl-C stops it."""

from __future__ import annotations

import csv
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from alasso.bench.config import RunConfig
from alasso.bench.io import disk_errors_as_advice
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.bench.streams import Stream  # torch: a page that follows runs needs none

Accuracy = list[list[float]]


class Stopped(Exception):
    """The user asked to stop; the run is saved up to the place the message names."""


class Pruned(Exception):
    """The run is not worth finishing; an observer raises it."""


AT_ONCE = 1.0  # seconds after the first Ctrl-C from which on a second one counts


class StopRequest:
    """The first Ctrl-C is a request, another one stops at once.

    One that comes right after the first does not count: it was pressed twice, or sent to the process and its group.
    """

    when: float | None = None

    def on_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        if self.when is not None and time.monotonic() - self.when > AT_ONCE:
            raise KeyboardInterrupt
        self.when = self.when or time.monotonic()


@contextmanager
def stop_on_request() -> Iterator[Callable[[], bool]]:
    """While inside, tells whether Ctrl-C was pressed. Inside another such block, both hear the same request: a sweep
    stops also when Ctrl-C comes in the last moments of a run.
    """
    before = signal.getsignal(signal.SIGINT)
    around = getattr(before, "__self__", None)
    request = around if isinstance(around, StopRequest) else StopRequest()
    try:
        signal.signal(signal.SIGINT, request.on_ctrl_c)
    except ValueError:  # not in the main thread: nobody can press Ctrl-C here
        yield lambda: False
        return
    try:
        yield lambda: request.when is not None
    finally:
        signal.signal(signal.SIGINT, before)


class Observer:
    """Told of everything that happens in a run; this one ignores it.

    ``wants_epochs``: whether losses are worth bringing to the host.
    """

    wants_epochs = False

    def begin(self, config: RunConfig, stream: Stream, done: int, total: int) -> None:
        """Training begins, or resumes, with ``done`` of ``total`` steps made."""

    def step_done(self, task: int, epoch: int, done: int) -> None:
        """A step was made."""

    def epoch_done(
        self, task: int, epoch: int, loss: float, penalty: float, accuracy: Accuracy, seconds_left: float
    ) -> None:
        """An epoch ended, perhaps some time ago."""

    def task_done(self, task: int, accuracy: Accuracy, seconds_left: float) -> None:
        """A task was learned, and all so far measured."""


class PlainLines(Observer):
    """One line a task, for logs and pipes; ``label`` says which run of several."""

    def __init__(self, say: Callable[[str], object], label: str) -> None:
        self.say, self.label = say, label
        self.tasks = 0

    def begin(self, config: RunConfig, stream: Stream, done: int, total: int) -> None:
        self.tasks = len(stream)
        if done:
            self._say(f"{self.label}: resuming at {done / total:.0%}")

    def task_done(self, task: int, accuracy: Accuracy, seconds_left: float) -> None:
        row = accuracy[-1]
        self._say(
            f"{self.label}: task {task + 1}/{self.tasks}: this task {row[-1]:.3f}, "
            f"mean {sum(row) / len(row):.3f}, {clock(seconds_left)} left"
        )

    def _say(self, line: str) -> None:
        """Where nobody reads on, or the disk is full: stops as by Ctrl-C, and so saves the run."""
        try:
            self.say(line)
        except OSError:
            self.say = lambda line: None
            signal.raise_signal(signal.SIGINT)


class Bars:
    """Live bars in a terminal: one for all runs, one for each run that is on."""

    def __init__(self, console: Console, runs: int) -> None:
        # On a narrow terminal the words matter more than the bar.
        bar = [BarColumn(bar_width=20), TaskProgressColumn()] if console.width >= 110 else []
        self.bars = Progress(
            TextColumn("[bold]{task.description}"),
            *bar,
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self.runs = runs
        self.overall = self.bars.add_task("all runs", total=runs, note="", visible=runs > 1)

    def done(self, number: int) -> None:
        self.bars.update(self.overall, completed=number, note=f"{number} of {self.runs} done")


class RunBar(Observer):
    """One run's live bar, until it is closed."""

    wants_epochs = True

    def __init__(self, bars: Bars, label: str) -> None:
        self.bars = bars.bars
        self.current = self.bars.add_task(label, total=1, note="")
        self.loss = ""
        self.last_drawn = 0.0

    def close(self) -> None:
        self.bars.remove_task(self.current)

    def begin(self, config: RunConfig, stream: Stream, done: int, total: int) -> None:
        self.tasks = len(stream)
        self.epochs = config.epochs
        self.bars.update(self.current, total=total, completed=done)

    def step_done(self, task: int, epoch: int, done: int) -> None:
        now = time.monotonic()
        if now - self.last_drawn > 0.1:
            self.last_drawn = now
            note = f"task {task + 1}/{self.tasks} epoch {epoch + 1}/{self.epochs}{self.loss}"
            self.bars.update(self.current, completed=done, note=note)

    def epoch_done(
        self, task: int, epoch: int, loss: float, penalty: float, accuracy: Accuracy, seconds_left: float
    ) -> None:
        so_far = f" acc {sum(accuracy[-1]) / len(accuracy[-1]):.3f}" if accuracy else ""
        self.loss = f" loss {loss:.3f} penalty {penalty:.3f}{so_far}, {clock(seconds_left)} left"


class CsvLog(Observer):
    """Loss and penalty of every epoch, accuracy of every task, as rows of a CSV file.

    A run that resumes or restarts keeps the rows before its own first row, and no others: it tells the rest again.
    """

    wants_epochs = True
    columns = ("seconds", "task", "epoch", "loss", "penalty", "learned", "mean_accuracy")

    def __init__(self, path: Path) -> None:
        with disk_errors_as_advice(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a+", newline="", encoding="utf-8")
        self.rows, self.begun = csv.writer(self.file), False
        self.started = time.monotonic()

    def epoch_done(
        self, task: int, epoch: int, loss: float, penalty: float, accuracy: Accuracy, seconds_left: float
    ) -> None:
        self._row(task + 1, epoch + 1, f"{loss:.6g}", f"{penalty:.6g}", "", "")

    def task_done(self, task: int, accuracy: Accuracy, seconds_left: float) -> None:
        row = accuracy[-1]
        self._row(task + 1, "", "", "", f"{row[-1]:.4f}", f"{sum(row) / len(row):.4f}")

    def _row(self, task: int, epoch: int | str, *values: str) -> None:
        if not self.begun:
            self.file.seek(0)
            whole = [row for row in csv.reader(self.file) if len(row) == len(self.columns)][1:]
            self.file.truncate(0)
            self.rows.writerow(self.columns)
            self.rows.writerows(row for row in whole if _place(*row[1:3]) < _place(task, epoch))
            self.begun = True
        self.rows.writerow((f"{time.monotonic() - self.started:.3f}", task, epoch, *values))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _place(task: int | str, epoch: int | str) -> tuple[int, float]:
    """Orders rows; that of a task's end, which has no epoch, comes after its epochs."""
    return int(task), float(epoch or "inf")


class Tracker(Observer):
    """The same for a tracker, by names: losses by the number of the epoch in all, accuracies by the task's."""

    wants_epochs = True

    def begin(self, config: RunConfig, stream: Stream, done: int, total: int) -> None:
        self.epochs = config.epochs

    def epoch_done(
        self, task: int, epoch: int, loss: float, penalty: float, accuracy: Accuracy, seconds_left: float
    ) -> None:
        self.tell({"loss": loss, "penalty": penalty}, "epoch", task * self.epochs + epoch + 1)

    def task_done(self, task: int, accuracy: Accuracy, seconds_left: float) -> None:
        row = accuracy[-1]
        self.tell({"accuracy/learned": row[-1], "accuracy/mean": sum(row) / len(row)}, "task", task + 1)

    def tell(self, values: dict[str, float], axis: str, number: int) -> None:
        """Pass on values by name; ``axis`` says what the number counts."""
        raise NotImplementedError

    def close(self) -> None:
        """End the run."""


class TensorBoardLog(Tracker):
    """For TensorBoard."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise AlassoError("TensorBoard is not installed: pip install 'alasso[tensorboard]'") from error
        self.writer: Any = SummaryWriter(str(folder / "tensorboard" / config.name))

    def tell(self, values: dict[str, float], axis: str, number: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, number)

    def close(self) -> None:
        self.writer.close()


class WandbLog(Tracker):
    """For W&B; with ``WANDB_MODE=offline`` into files alone."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise AlassoError("W&B is not installed: pip install 'alasso[wandb]'") from error
        about, place = config.to_json(), str(folder)
        try:  # on a cluster several runs train at the same time
            self.run: Any = wandb.init(project="alasso", name=config.name, config=about, dir=place, reinit="create_new")
        except wandb.Error as error:
            raise AlassoError(f"W&B: {error}; with WANDB_MODE=offline it needs no account") from error
        for axis, names in (("epoch", ("loss", "penalty")), ("task", ("accuracy/*",))):
            self.run.define_metric(axis, hidden=True)
            for name in names:
                self.run.define_metric(name, step_metric=axis)

    def tell(self, values: dict[str, float], axis: str, number: int) -> None:
        self.run.log({**values, axis: number})

    def close(self) -> None:
        self.run.finish()


class MlflowLog(Tracker):
    """For MLflow: the server that ``MLFLOW_TRACKING_URI`` names, else a data base beside the results."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise AlassoError("MLflow is not installed: pip install 'alasso[mlflow]'") from error
        self.refusal: type[Exception] = MlflowException
        with disk_errors_as_advice(folder):
            folder.mkdir(parents=True, exist_ok=True)
        beside = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        with self.refused_in_a_line():
            self.client: Any = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or beside)
            experiment = self.client.get_experiment_by_name("alasso")
            number = experiment.experiment_id if experiment else self.client.create_experiment("alasso")
            self.id = self.client.create_run(number, run_name=config.name).info.run_id
            for name, value in config.flat().items():
                self.client.log_param(self.id, name, value)

    @contextmanager
    def refused_in_a_line(self) -> Iterator[None]:
        """A server that is away ends the run, which resumes from its last checkpoint."""
        try:
            yield
        except self.refusal as error:
            raise AlassoError(f"MLflow: {' '.join(str(error).split()):.300}") from error

    def tell(self, values: dict[str, float], axis: str, number: int) -> None:
        with self.refused_in_a_line():
            for name, value in values.items():
                self.client.log_metric(self.id, name, value, step=number)

    def close(self) -> None:
        with self.refused_in_a_line():
            self.client.set_terminated(self.id)


TRACKERS: dict[str, Callable[[Path, RunConfig], Tracker]] = {
    "tensorboard": TensorBoardLog,
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}


class Several(Observer):
    """Passes everything on to several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        self.wants_epochs = any(o.wants_epochs for o in observers)

    def begin(self, config: RunConfig, stream: Stream, done: int, total: int) -> None:
        for observer in self.observers:
            observer.begin(config, stream, done, total)

    def step_done(self, task: int, epoch: int, done: int) -> None:
        for observer in self.observers:
            observer.step_done(task, epoch, done)

    def epoch_done(
        self, task: int, epoch: int, loss: float, penalty: float, accuracy: Accuracy, seconds_left: float
    ) -> None:
        for observer in self.observers:
            observer.epoch_done(task, epoch, loss, penalty, accuracy, seconds_left)

    def task_done(self, task: int, accuracy: Accuracy, seconds_left: float) -> None:
        for observer in self.observers:
            observer.task_done(task, accuracy, seconds_left)


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(4000)
    ('1:15', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
