"""Runs on a Ray cluster, a task a run: nodes train and tell, the process that asked writes results, notes and logs.

A node needs the same version of alasso and the data sets. It needs no shared folder: results travel to who asked. Where
it sees the folder of results, runs keep their checkpoints there, and those of a lost node resume on another.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

import alasso
from alasso.bench import results
from alasso.bench.config import RunConfig, count_of
from alasso.bench.io import Taken, write_whole
from alasso.bench.results import Divergence, Result
from alasso.bench.streams import Stream
from alasso.bench.training.progress import Accuracy, Observer, Pruned, Stopped
from alasso.bench.training.run import RunDiverged, run, torch_device
from alasso.errors import AlassoError

#: What became of a run: its result; how it diverged, and where; or None, if it was not worth finishing.
Outcome = Result | tuple[Divergence, dict[str, Any]] | None

MOST_LOST = 3  # times that a run may be lost with its node
LEASE = 120.0  # seconds after which a file system on a network gives back what a lost node had locked
STEPS_EVERY = 0.5  # seconds between two letters about steps
LOOK_EVERY = 0.2  # seconds between two looks at what has come


class Lost(str):
    """That a run was lost with its node and starts again, in words."""


@dataclass
class Flight:
    """A run that is on a node, or waits for one."""

    config: RunConfig
    ref: Any
    lost: int
    pruned: bool = False
    watched: ExitStack = field(default_factory=ExitStack)
    observer: Observer | None = None  # from the first letter on


def trained(
    configs: Sequence[RunConfig],
    cluster: Cluster,
    folder: Path,
    how: Mapping[str, Any],
    observers: Callable[[RunConfig], AbstractContextManager[Observer]],
    stop_requested: Callable[[], bool],
) -> Generator[tuple[RunConfig, Outcome | Lost], None, None]:
    """Trains runs on a cluster, as many at a time as there is room for.

    Args:
        configs: The runs.
        cluster: The cluster.
        folder: Where checkpoints go, if the nodes see it.
        how: Arguments of :func:`run`.
        observers: Makes what is told of a run, here.
        stop_requested: Whether Ctrl-C was pressed.

    Yields:
        Each run and what became of it, in the order in which they end; a lost one each time it is lost.

    Raises:
        AlassoError: A node refused a run, or one was lost again and again.
        Stopped: The user pressed Ctrl-C; what has ended was yielded.
    """
    ray, numbers, stopping, ended = cluster.ray, count(), False, 0
    letters = cluster.letterbox()
    mark = folder.absolute() / f".{uuid.uuid4().hex}.shared"  # who sees it shares the folder
    write_whole(mark, b"")
    task = ray.remote(num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_retries=0)(work)
    how = {**how, "device": "cuda" if cluster.gpus else "cpu"}
    flights: dict[int, Flight] = {}

    def send(config: RunConfig, lost: int = 0) -> None:
        number, again = next(numbers), {"resume": True} if lost else {}
        ref = task.remote(config, number, letters, mark, cluster.cpus, versions(), {**how, **again})
        flights[number] = Flight(config, ref, lost)

    try:
        for config in configs:
            send(config)
        while flights:
            number_of = {flight.ref: number for number, flight in flights.items()}
            ready, _ = ray.wait(list(number_of), timeout=LOOK_EVERY)
            for number, event, arguments in ray.get(letters.take.remote()):
                if number in flights:
                    deliver(ray, flights[number], observers, event, arguments)
            for ref in ready:
                flight = flights.pop(number_of[ref])
                flight.watched.close()
                outcome = landed(ray, flight)
                if isinstance(outcome, Lost) and not flight.pruned:
                    if stopping:
                        continue
                    if flight.lost == MOST_LOST:
                        raise AlassoError(f"{flight.config.name} was lost {MOST_LOST + 1} times; {outcome}")
                    send(flight.config, flight.lost + 1)
                ended += isinstance(outcome, Result)
                yield flight.config, None if flight.pruned else outcome
            if stop_requested() and not stopping:
                stopping = True
                for flight in flights.values():
                    ray.cancel(flight.ref)
        if stopping:
            kept = sum(results.checkpoint_path(config, folder).exists() for config in configs)
            raise Stopped(f"{count_of(ended, 'finished run')} and {count_of(kept, 'checkpoint')}")
    finally:
        mark.unlink(missing_ok=True)
        for flight in flights.values():
            ray.cancel(flight.ref)
            flight.watched.close()
        ray.kill(letters)


def deliver(
    ray: Any,
    flight: Flight,
    observers: Callable[[RunConfig], AbstractContextManager[Observer]],
    event: str,
    arguments: Sequence[Any],
) -> None:
    """Tells a run's observer what its node has written."""
    if flight.pruned:
        return
    if flight.observer is None:
        flight.observer = flight.watched.enter_context(observers(flight.config))
    try:
        if event == "begin":
            flight.observer.begin(flight.config, *arguments)
        else:
            getattr(flight.observer, event)(*arguments)
    except Pruned:
        flight.pruned = True
        ray.cancel(flight.ref)


def landed(ray: Any, flight: Flight) -> Outcome | Lost:
    """What became of a run.

    Raises:
        AlassoError: The node has refused the run.
    """
    try:
        outcome: Outcome = ray.get(flight.ref)
        return outcome
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AlassoError):
            raise error.cause from None
        if isinstance(error.cause, Stopped | ray.exceptions.RayError):  # cancelled, or the node was told to stop
            return Lost("its node was told to stop; starts again")
        raise
    except ray.exceptions.RayError as error:
        return Lost(f"its node was lost ({type(error).__name__}); starts again")


# -- on a node ------------------------------------------------------------------------------------------------------


def work(
    config: RunConfig, number: int, post: Any, mark: Path, cpus: int, asked: str, how: dict[str, Any]
) -> Result | tuple[Divergence, dict[str, Any]]:
    """Trains one run; ``number`` is what its letters are signed with, ``asked`` the versions of who asked."""
    import ray

    host = socket.gethostname()
    if (here := versions()) != asked:
        raise AlassoError(f"{host} has {here}, this machine {asked}: install the same on every node")
    torch.set_num_threads(cpus)
    messenger = Messenger(lambda event, *arguments: post.put.remote((number, event, arguments)))
    give_up = time.monotonic() + LEASE
    while True:
        try:
            found = run(config, checkpoints=mark.parent if mark.exists() else None, observer=messenger, **how)
            with suppress(ray.exceptions.RayError, KeyboardInterrupt):  # cancelled at its end, it has ended
                ray.get(messenger.sent)  # nothing comes after the result
            return found
        except RunDiverged as error:
            return error.note, results.environment(str(torch_device(how["device"])))
        except AlassoError as error:
            if not isinstance(error, Taken) or time.monotonic() > give_up:
                raise (Taken if isinstance(error, Taken) else AlassoError)(f"{error} (on {host})") from error
            time.sleep(1.0)  # it may have been taken by itself, on a node that is lost


class Messenger(Observer):
    """Writes to the process that asked for a run what an observer is told of it."""

    wants_epochs = True

    def __init__(self, send: Callable[..., object]) -> None:
        self.send = send
        self.sent: Any = None
        self.last_step = 0.0

    def begin(self, config: RunConfig, stream: Stream, done: int, total: int) -> None:
        self.sent = self.send("begin", range(len(stream)), done, total)

    def step_done(self, task: int, epoch: int, done: int) -> None:
        if (now := time.monotonic()) - self.last_step > STEPS_EVERY:
            self.last_step = now
            self.sent = self.send("step_done", task, epoch, done)

    def epoch_done(
        self, task: int, epoch: int, loss: float, penalty: float, accuracy: Accuracy, seconds_left: float
    ) -> None:
        self.sent = self.send("epoch_done", task, epoch, loss, penalty, accuracy, seconds_left)

    def task_done(self, task: int, accuracy: Accuracy, seconds_left: float) -> None:
        self.sent = self.send("task_done", task, accuracy, seconds_left)


# -- the cluster ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process has joined, and what a run takes of a node."""

    ray: Any  # the library
    cpus: int
    gpus: int

    @staticmethod
    def joined(address: str, device: str) -> Cluster:
        """Joins a cluster.

        Args:
            address: ``auto``, ``HOST:PORT``, or ``local`` for one of this machine alone.
            device: ``auto``, ``cpu`` or ``cuda``; a run on a GPU has one to itself.

        Returns:
            The cluster. A run takes as many CPUs as ``OMP_NUM_THREADS`` says, one if it does not.

        Raises:
            AlassoError: Ray is not installed, there is no such cluster, or Ray cannot give a run this device.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise AlassoError(f"device {device}: Ray gives each run a GPU; use auto, cpu or cuda")
        ray = connected(address)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        seen = ray.cluster_resources().get("GPU", 0) >= 1
        cpus = int(threads) if threads.isdecimal() else 1
        return Cluster(ray, max(cpus, 1), int(device == "cuda" or (device == "auto" and seen)))

    @property
    def places(self) -> int:
        """For how many runs at a time there is room, when nobody else uses the cluster."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return sum(int(min(has.get(what, 0) // n for what, n in wanted.items() if n)) for has in nodes)

    def letterbox(self) -> Any:
        """A place on this machine for what nodes write; each one's letters stay in their order."""

        class Letters:  # in here, it goes to its process by value, and that process needs no torch
            def __init__(self) -> None:
                self.there: list[Any] = []

            def put(self, letter: Any) -> None:
                self.there.append(letter)

            def take(self) -> list[Any]:
                taken, self.there = self.there, []
                return taken

        node = self.ray.get_runtime_context().get_node_id()
        here = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return self.ray.remote(num_cpus=0, scheduling_strategy=here)(Letters).remote()

    def room(self, runs: int) -> str:
        """The same in words; where there is no room at all, a cluster that grows may make some."""
        if self.places:
            return f"{count_of(runs, 'run')} on Ray, {min(runs, self.places)} at a time"
        return f"waiting: Ray has no node with {count_of(self.cpus, 'CPU')}{' and a GPU' * self.gpus} yet"


def connected(address: str) -> Any:
    """The library Ray, after it has joined a cluster; SIGTERM goes on to mean what it meant."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise AlassoError("Ray is not installed: pip install 'alasso[ray]'") from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody unasked
        before = signal.getsignal(signal.SIGTERM)
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal() and "/" not in host:  # Ray itself would wait for minutes
                socket.create_connection((host, int(port)), timeout=10.0).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split()).partition(". ")[0]
            raise AlassoError(f"cannot join Ray at {address}: {why:.300}") from error
        finally:
            with suppress(ValueError):  # not in the main thread: Ray has changed nothing
                signal.signal(signal.SIGTERM, before)
    return ray


def versions() -> str:
    """What must be the same on every node."""
    commit = results.commit()
    return f"alasso {alasso.__version__}{f' at commit {commit[:12]}{commit[40:]}' if commit else ''}"
