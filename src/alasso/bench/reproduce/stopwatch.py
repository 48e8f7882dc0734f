"""How fast a device is: a run on random inputs is begun, watched for a moment and broken off."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from alasso.bench.config import RunConfig
from alasso.bench.registry import METHODS
from alasso.bench.reproduce.counting import is_variational
from alasso.bench.training.progress import Observer

if TYPE_CHECKING:
    import torch

    from alasso.bench.reproduce.plan import Probe
    from alasso.bench.streams import Stream

SHAPES = {
    "permuted-digits": (64,),
    "permuted-mnist": (784,),
    "permuted-fashion-mnist": (784,),
    "split-cifar": (3, 32, 32),
    "split-tiny-imagenet": (3, 224, 224),
}
SMALL_BATCH = 4  # on a CPU a batch of large images takes seconds: a small one is measured and scaled


@dataclass(frozen=True)
class Watching:
    """How long steps are watched: so many to warm up, then several ``looks`` of ``seconds``, and a step, at least.

    With looks that take longer than ``patience`` in all, fewer do.
    """

    warm_up: int
    looks: int
    seconds: float
    patience: float = 2.0


ANSWERS = 3  # to a batch each
MOVED, FEW_PLACES, MORE_PLACES, TIMES = 40, 1, 5, 3  # of a probe's weights, to so many places each, so many times

#: A GPU compiles and records its first steps; a CPU has only to touch its memory once, and each step is slow.
ON_GPU, ON_CPU = Watching(16, 5, 0.1), Watching(1, 5, 0.2)


class Pace(NamedTuple):
    """Seconds of an optimizer step, and of the answer to a test example."""

    step: float
    answer: float


def device_name(device: str) -> str:
    """As result files name it."""
    from alasso.bench.results import cpu_name

    if device == "cpu":
        return cpu_name()  # without the seconds that torch takes to be imported
    import torch

    from alasso.bench.training.run import torch_device

    place = torch_device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else cpu_name()


class Stopwatch:
    """How fast runs are, measured once for each benchmark and network, and once more for VCL; and probes likewise."""

    def __init__(self, device: str, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.measured: dict[tuple[object, ...], Pace] = {}
        self.moved: dict[tuple[object, ...], float] = {}

    def __call__(self, config: RunConfig) -> Pace:
        # VCL has twice the weights and more; the others are near one another.
        key = (*network_of(config), config.batch_size, is_variational(config))
        if key not in self.measured:
            self.say_once()
            pace = Pace(seconds_of_a_step(config, self.device), seconds_of_an_answer(config, self.device))
            self.measured[key] = pace
        return self.measured[key]

    def moving(self, probe: Probe) -> float:
        """Seconds in which the weights of a probe are moved."""
        key = (*network_of(probe.config), probe.plan)
        if key not in self.moved:
            self.say_once()
            self.moved[key] = seconds_of_moving(probe, self.device)
        return self.moved[key]

    def say_once(self) -> None:
        if not self.measured and not self.moved:
            self.say("measuring how fast this device is")


def network_of(config: RunConfig) -> tuple[object, ...]:
    return config.benchmark, config.image_size, config.model, config.hidden


def seconds_of_a_step(config: RunConfig, device: str) -> float:
    """Begin a run on random inputs of the benchmark's shape, watch it for a moment, and break it off."""
    from alasso.bench.training.run import run, torch_device

    place = torch_device(device)
    on_cpu = place.type == "cpu"
    stand_in, scale = to_measure(config, on_cpu=on_cpu)
    meter = Meter(ON_CPU if on_cpu else ON_GPU, waiting_for(place))
    try:
        run(stand_in, stream=random_stream(stand_in, place), device=device, observer=meter)
    except Enough:
        return scale * meter.seconds
    raise AssertionError("a million epochs went by")


def seconds_of_an_answer(config: RunConfig, device: str) -> float:
    """Test a network as it begins on a batch of random inputs."""
    from alasso.bench.training.run import few_threads_for, make_learner, torch_device

    place = torch_device(device)
    stand_in, _ = to_measure(config, on_cpu=place.type == "cpu")
    stream, finish = random_stream(stand_in, place), waiting_for(place)
    learner = make_learner(stand_in, stream, None, place)
    taken = []
    with few_threads_for(learner):
        for _ in range(1 + ANSWERS):  # the first one touches its memory, or chooses its kernels
            finish()
            began = time.monotonic()
            learner.accuracies_on(stream.tasks)
            finish()
            taken.append(time.monotonic() - began)
    return statistics.median(taken[1:]) / len(stream.tasks[0].test)


def seconds_of_moving(probe: Probe, device: str) -> float:
    """Move some of the weights that the probe will move, to fewer places: time grows evenly with the places, from what
    is worked out once.
    """
    import torch

    from alasso.bench import models
    from alasso.bench.probe.measure import losses, random_weights, task_loss
    from alasso.bench.training.run import torch_device

    config, plan, place = probe.config, probe.plan, torch_device(device)
    classes = config.classes_per_task or 10
    network = models.build(config.model, shape_of(config), classes, hidden=config.hidden)
    model, finish = network.to(place).double().eval(), waiting_for(place)
    weights = random_weights(model, plan.weights, torch.Generator().manual_seed(config.seed))
    some = weights[:: -(-len(weights) // MOVED)]  # they come in the order of layers, of which some take longer
    x = torch.rand(plan.examples, *shape_of(config), dtype=torch.float64, device=place)
    loss = task_loss(torch.arange(plan.examples, device=place) % classes, slice(0, classes))

    def seconds(places: int) -> float:
        finish()
        began = time.monotonic()
        losses(model, x, loss, some, torch.linspace(-plan.span, plan.span, places, dtype=torch.float64, device=place))
        finish()
        return time.monotonic() - began

    seconds(1)  # touches its memory
    few, more = (statistics.median(seconds(places) for _ in range(TIMES)) for places in (FEW_PLACES, MORE_PLACES))
    a_pair = max(more - few, 0.0) / (len(some) * (MORE_PLACES - FEW_PLACES))
    once = max(few - a_pair * len(some) * FEW_PLACES, 0.0)
    return once + a_pair * len(weights) * plan.offsets


def to_measure(config: RunConfig, *, on_cpu: bool) -> tuple[RunConfig, float]:
    """What is begun in place of a run, and how many times as long a step of the run itself takes.

    On a CPU it is a run without a method, unless that is VCL: compiling would take longer than all the rest, and a
    compiled step with the penalty takes about as long as a plain one.
    """
    changes: dict[str, Any] = {"tasks": 1, "epochs": 10**6}
    if is_variational(config):  # without coresets, and without training before training: these are counted apart
        own = {name: value for name, value in config.settings.items() if name in METHODS["vcl"].settings}
        changes |= {"method": "vcl", "settings": {**own, "point_epochs": 0}}
    elif on_cpu:
        config = plainly(config)
    scale, shape = 1.0, shape_of(config)
    if on_cpu and len(shape) == 3 and shape[-1] > 64:
        scale, changes["batch_size"] = config.batch_size / SMALL_BATCH, SMALL_BATCH
    return dataclasses.replace(config, **changes), scale


def shape_of(config: RunConfig) -> tuple[int, ...]:
    """Of an input; images may be brought to another size."""
    shape, size = SHAPES[config.benchmark], config.image_size
    return (shape[0], size, size) if size and len(shape) == 3 else shape


def plainly(config: RunConfig) -> RunConfig:
    """The same network without a method."""
    return dataclasses.replace(config, method="sgd", settings={}, memory=0)


def random_stream(config: RunConfig, place: torch.device) -> Stream:
    """One task of eight batches, tested on one."""
    import torch

    from alasso.bench.streams import Stream

    count, classes = 8 * config.batch_size, config.classes_per_task or 10
    x, y = torch.rand(count, *shape_of(config)), torch.arange(count) % classes
    return Stream.of([((x, y), (x[: config.batch_size], y[: config.batch_size]))], device=place)


def waiting_for(place: torch.device) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if place.type == "cuda" else lambda: None


class Enough(Exception):
    """The meter has seen what it needs."""


class Meter(Observer):
    """Watches steps after those that warm up, in several looks: a median is not led astray by what else runs."""

    def __init__(self, watching: Watching, finish: Callable[[], None]) -> None:
        self.watching, self.finish = watching, finish
        self.began: float | None = None
        self.before = 0
        self.looks: list[tuple[float, int]] = []  # seconds, steps

    @property
    def seconds(self) -> float:
        """Of a step."""
        return statistics.median(seconds / steps for seconds, steps in self.looks)

    def step_done(self, task: int, epoch: int, done: int) -> None:
        if done < self.watching.warm_up:
            return
        if self.began is None:
            self.finish()
            self.began, self.before = time.monotonic(), done
        elif time.monotonic() - self.began > self.watching.seconds:
            self.finish()
            now = time.monotonic()
            self.looks.append((now - self.began, done - self.before))  # steps may come several at once
            self.began, self.before = now, done
            if self.has_seen_enough:
                raise Enough

    @property
    def has_seen_enough(self) -> bool:
        watched = sum(seconds for seconds, _ in self.looks)
        return len(self.looks) >= self.watching.looks or watched > self.watching.patience
