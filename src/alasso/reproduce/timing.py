"""How long it will take: from what earlier parts and results took on this device, else from a short measurement.

Counted are optimizer steps; what a step takes is looked up in this order:

1. parts of an earlier reproduction on this device (``parts.csv``): they hold evaluation and stacking, too;
2. results on this device of the same benchmark and method, then of methods of its kind;
3. steps, and answers, made just now, on random inputs of the benchmark's shape. Answers are counted apart, for VCL's
   take as long as its training.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alasso.bench.atomic import disk_errors_as_advice
from alasso.bench.catalog import METHODS
from alasso.bench.config import RunConfig
from alasso.bench.progress import Quiet
from alasso.bench.results import Result, device_of
from alasso.errors import AlassoError
from alasso.reproduce.counting import (
    EXAMPLES,
    answers_of,
    coreset_steps,
    is_variational,
    plain_steps,
    slow_kind,
    steps_in,
    steps_of,
)
from alasso.reproduce.plan import Plan, Probe, part_title
from alasso.wording import count_of

if TYPE_CHECKING:
    import torch

    from alasso.bench.streams import Stream

PARTS_FILE = "parts.csv"
COLUMNS = ("part", "device", "runs", "steps", "seconds", "finished")
EARLIER, RESULTS, MEASURED = "earlier parts", "results there", "measured now"

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
    """How long steps are watched: so many to warm up, then ``seconds``, but no fewer than ``least`` steps."""

    warm_up: int
    least: int
    seconds: float


ANSWERS = 3  # to a batch each

#: A GPU compiles and records its first steps; a CPU has only to touch its memory once, and each step is slow.
ON_GPU, ON_CPU = Watching(16, 2, 0.5), Watching(1, 1, 0.1)


class Pace(NamedTuple):
    """Seconds of an optimizer step, and of the answer to a test example."""

    step: float
    answer: float


Measure = Callable[[RunConfig], Pace]

#: Of a step's time, for as many examples: a third of it goes forward, and twice the digits take twice as long.
ANSWER_IN_DOUBLE = 2 / 3


@dataclass(frozen=True)
class Row:
    """One part as it was carried out; ``steps`` is 0 where it is not known how many its runs have."""

    part: str
    device: str
    runs: int
    steps: int
    seconds: float
    finished: str

    def seconds_for(self, configs: Sequence[RunConfig]) -> float | None:
        """What these would take at its rate."""
        return self.seconds / self.steps * steps_in(configs) if self.steps else None


@dataclass(frozen=True)
class Estimate:
    """Seconds of each part, of the probes, and where the figures come from (source → runs)."""

    device: str
    parts: dict[str, float] = field(default_factory=dict)
    probes: float = 0.0
    again: float = 0.0  # stacks of lost results
    sources: dict[str, int] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()  # parts of which it is not known how many steps they take

    @property
    def seconds(self) -> float:
        return sum(self.parts.values()) + self.probes + self.again

    def sentence(self) -> str:
        names = {
            EARLIER: "from parts carried out on this device before",
            RESULTS: "from results of this device",
            MEASURED: "from single runs measured just now: compiling and the report add to it, stacking takes off",
        }
        known = [(source, count) for source, count in self.sources.items() if count]
        where = "; ".join(f"{count_of(count, 'run')} {names[source]}" for source, count in known)
        if len(known) == 1:
            where = names[known[0][0]]
        rest = f"; not counting {', '.join(self.uncounted)}" if self.uncounted else ""
        return f"about {human(self.seconds)} on {self.device} ({where}){rest}" if known else rest[2:]


def human(seconds: float) -> str:
    """
    >>> human(42), human(196), human(600), human(9000), human(400_000)
    ('42 s', '3.5 min', '10 min', '2 h 30 min', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 300:  # where a minute is much
        return f"{round(seconds / 30) / 2:g} min"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 48 * 60 else f"{seconds / 86_400:.1f} days"


def estimate(plan: Plan, known: Sequence[Result], out: Path, device: str, measure: Measure) -> Estimate:
    """``measure``: how fast a run is, found out when nothing better is known."""
    noted = {row.part: row for row in summed(read_parts(out)) if row.device == device}
    mine = [
        result for result in known if device_of(result.environment) == device and result.config.benchmark in EXAMPLES
    ]
    sources = {EARLIER: 0, RESULTS: 0, MEASURED: 0}

    def of_runs(configs: Sequence[RunConfig]) -> float:
        before = noted.get(part_title(configs[0]))
        if before and (seconds := before.seconds_for(configs)) is not None:
            sources[EARLIER] += len(configs)
            return seconds
        return sum(of_run(config) for config in configs)

    def of_run(config: RunConfig) -> float:
        seconds = from_results(config, mine)
        sources[MEASURED if seconds is None else RESULTS] += 1
        return at_pace(config, measure) if seconds is None else seconds

    parts = {part.title: of_runs(part.trained) for part in plan.parts if part.benchmark in EXAMPLES}
    again = sum(of_runs(stack.runs) for stack in plan.again if stack.runs[0].benchmark in EXAMPLES)
    probes = 0.0
    for probe in (probe for probe in plan.probes if probe.config.benchmark in EXAMPLES):
        whole = from_results(probe.config, mine)
        step = measure(probe.config).step if whole is None else whole / steps_of(probe.config)
        probes += of_probe(probe, step)
    titles = [part.title for part in plan.parts] + [part_title(stack.runs[0]) for stack in plan.again]
    uncounted = tuple(dict.fromkeys(title for title in titles if title.partition(",")[0] not in EXAMPLES))
    return Estimate(device, parts, probes, again, sources, uncounted)


def of_probe(probe: Probe, step: float) -> float:
    """Seconds of a probe, where an optimizer step takes so long: its task is learned, then answered time and again."""
    config, plan = probe.config, probe.plan
    one_task = steps_of(config) / (config.tasks or 1) * step
    return one_task + plan.weights * plan.offsets * plan.examples / config.batch_size * ANSWER_IN_DOUBLE * step


def at_pace(config: RunConfig, measure: Measure) -> float:
    """Seconds of a run: its steps, its answers, and what VCL trains beside its tasks."""
    pace, beside = measure(config), 0.0
    if count := plain_steps(config):
        beside = count * measure(plainly(config)).step
    return (steps_of(config) + coreset_steps(config)) * pace.step + answers_of(config) * pace.answer + beside


def plainly(config: RunConfig) -> RunConfig:
    """The same network without a method."""
    return dataclasses.replace(config, method="sgd", settings={}, memory=0)


def from_results(config: RunConfig, known: Sequence[Result]) -> float | None:
    """Seconds of a run, by what a step took in results of the same benchmark: of the same method if there are any, else
    of those that take about as long.
    """
    of_benchmark = [result for result in known if result.config.benchmark == config.benchmark]
    of_method = [result for result in of_benchmark if result.config.method == config.method]
    of_kind = [result for result in of_benchmark if slow_kind(result.config) == slow_kind(config)]
    rates = [result.seconds / steps_of(result.config) for result in of_method or of_kind]
    return statistics.median(rates) * steps_of(config) if rates else None


# -- what parts took ----------------------------------------------------------------------------------------------


def read_parts(out: Path) -> list[Row]:
    """What was noted; lines that are not whole are left aside."""
    path = out / PARTS_FILE
    if not path.exists():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as stream:
        reader = csv.DictReader(stream)
        if reader.fieldnames is not None and list(reader.fieldnames) != list(COLUMNS):
            raise AlassoError(
                f"{path} is no table of times: its first line is not {','.join(COLUMNS)}; delete the file"
            )
        for raw in reader:
            try:
                rows.append(
                    Row(raw["part"], raw["device"], int(raw["runs"]), int(raw["steps"]), float(raw["seconds"]),
                        raw["finished"])
                )  # fmt: skip
            except (KeyError, TypeError, ValueError):
                continue
    return rows


def summed(rows: Iterable[Row]) -> list[Row]:
    """One row for each part and device."""
    by_part: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_part.setdefault((row.part, row.device), []).append(row)
    return [
        Row(
            part,
            device,
            sum(row.runs for row in noted),
            sum(row.steps for row in noted),
            sum(row.seconds for row in noted),
            max(row.finished for row in noted),
        )
        for (part, device), noted in by_part.items()
    ]


def note_part(
    out: Path,
    title: str,
    device: str,
    finished: Iterable[RunConfig],
    seconds: float,
    ended_early: Iterable[RunConfig] = (),
) -> None:
    """One more line of ``parts.csv``: wall-clock time of a part, or of as much of it as was done.

    ``ended_early``: runs that diverged, up to there; their steps took time, too.
    """
    done = list(finished)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    steps = steps_in(config for config in (*done, *ended_early) if config.benchmark in EXAMPLES)
    path = out / PARTS_FILE
    with disk_errors_as_advice(out):
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerow([title, device, len(done), steps, f"{seconds:.1f}", now])


# -- measuring ----------------------------------------------------------------------------------------------------


def device_name(device: str) -> str:
    """As result files name it."""
    from alasso.bench.results import cpu_name

    if device == "cpu":
        return cpu_name()  # without the seconds that torch takes to be imported
    import torch

    from alasso.bench.train import torch_device

    place = torch_device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else cpu_name()


class Stopwatch:
    """How fast runs are, measured once for each benchmark and network, and once more for VCL."""

    def __init__(self, device: str, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.measured: dict[tuple[object, ...], Pace] = {}

    def __call__(self, config: RunConfig) -> Pace:
        # VCL has twice the weights and more; the others are near one another.
        key = (config.benchmark, config.model, config.hidden, config.batch_size, is_variational(config))
        if key not in self.measured:
            if not self.measured:
                self.say("measuring how fast this device is")
            pace = Pace(seconds_of_a_step(config, self.device), seconds_of_an_answer(config, self.device))
            self.measured[key] = pace
        return self.measured[key]


def seconds_of_a_step(config: RunConfig, device: str) -> float:
    """Begin a run on random inputs of the benchmark's shape, watch it for a moment, and break it off."""
    from alasso.bench.train import run, torch_device

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
    from alasso.bench.train import few_threads_for, make_learner, torch_device

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
    scale, shape = 1.0, SHAPES[config.benchmark]
    if on_cpu and len(shape) == 3 and shape[-1] > 64:
        scale, changes["batch_size"] = config.batch_size / SMALL_BATCH, SMALL_BATCH
    return dataclasses.replace(config, **changes), scale


def random_stream(config: RunConfig, place: torch.device) -> Stream:
    """One task of eight batches, tested on one."""
    import torch

    from alasso.bench.streams import Stream

    count, classes = 8 * config.batch_size, config.classes_per_task or 10
    x, y = torch.rand(count, *SHAPES[config.benchmark]), torch.arange(count) % classes
    return Stream.of([((x, y), (x[: config.batch_size], y[: config.batch_size]))], device=place)


def waiting_for(place: torch.device) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if place.type == "cuda" else lambda: None


class Enough(Exception):
    """The meter has seen what it needs."""


class Meter(Quiet):
    """Watches steps after those that warm up."""

    def __init__(self, watching: Watching, finish: Callable[[], None]) -> None:
        self.watching, self.finish = watching, finish
        self.began: float | None = None
        self.seconds, self.before = 0.0, 0

    def step_done(self, task: int, epoch: int, done: int) -> None:
        if done < self.watching.warm_up:
            return
        if self.began is None:
            self.finish()
            self.began, self.before = time.monotonic(), done
        made = done - self.before  # steps may come several at once
        enough = made >= self.watching.least
        if enough and time.monotonic() - self.began > self.watching.seconds:
            self.finish()
            self.seconds = (time.monotonic() - self.began) / made
            raise Enough
