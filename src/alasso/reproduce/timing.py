"""How long it will take: from what earlier parts and results took on this device, else from a short measurement.

Counted are optimizer steps; what a step takes is looked up in this order:

1. parts of an earlier reproduction on this device (``parts.csv``): they hold evaluation and stacking, too;
2. results on this device of the same benchmark and method, then of the same benchmark;
3. steps made just now, on random inputs of the benchmark's shape.
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
from typing import Any

from alasso.bench.atomic import disk_errors_as_advice
from alasso.bench.config import RunConfig
from alasso.bench.progress import Quiet
from alasso.bench.results import Result, device_of
from alasso.reproduce.plan import Plan, part_title
from alasso.wording import count_of

PARTS_FILE = "parts.csv"
COLUMNS = ("part", "device", "runs", "steps", "seconds", "finished")
EARLIER, RESULTS, MEASURED = "earlier parts", "results there", "measured now"

#: Training examples of a task, by benchmark; split CIFAR's first three tasks come from CIFAR-10.
EXAMPLES = {
    "permuted-digits": 1437,
    "permuted-mnist": 60_000,
    "permuted-fashion-mnist": 60_000,
    "split-cifar": 500,  # of a class
    "split-tiny-imagenet": 500,  # of a class
}
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


#: A GPU compiles and records its first steps; a CPU has only to touch its memory once, and each step is slow.
ON_GPU, ON_CPU = Watching(16, 2, 0.5), Watching(1, 1, 0.1)


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
            MEASURED: "from single runs measured just now: evaluation adds to it, stacking takes off",
        }
        known = [(source, count) for source, count in self.sources.items() if count]
        where = "; ".join(f"{count_of(count, 'run')} {names[source]}" for source, count in known)
        if len(known) == 1:
            where = names[known[0][0]]
        rest = f"; not counting {', '.join(self.uncounted)}" if self.uncounted else ""
        return f"about {human(self.seconds)} on {self.device} ({where}){rest}" if known else rest[2:]


def human(seconds: float) -> str:
    """
    >>> human(42), human(600), human(9000), human(400_000)
    ('42 s', '10 min', '2 h 30 min', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes < 48 * 60 else f"{seconds / 86_400:.1f} days"


def steps_of(config: RunConfig) -> int:
    """Optimizer steps of a whole run, on a benchmark whose size is known beforehand."""
    tasks, each = config.tasks or 1, EXAMPLES[config.benchmark]
    if config.benchmark.startswith("permuted-"):
        sizes = [each] * tasks
    else:
        sizes = [each * (config.classes_per_task or 1)] * tasks
        if config.benchmark == "split-cifar":
            sizes[:3] = [10 * size for size in sizes[:3]]
    return config.epochs * sum(-(-size // config.batch_size) for size in sizes)


def estimate(plan: Plan, known: Sequence[Result], out: Path, device: str, measure: Callable[..., float]) -> Estimate:
    """``measure(config)``: seconds of a step, found out when nothing better is known."""
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
        return steps_of(config) * measure(config) if seconds is None else seconds

    parts = {part.title: of_runs(part.trained) for part in plan.parts if part.benchmark in EXAMPLES}
    again = sum(of_runs(stack.runs) for stack in plan.again if stack.runs[0].benchmark in EXAMPLES)
    probes = 0.0
    for probe in (probe for probe in plan.probes if probe.config.benchmark in EXAMPLES):
        whole = from_results(probe.config, mine)
        one_task = steps_of(probe.config) / (probe.config.tasks or 1)
        probes += one_task * measure(probe.config) if whole is None else whole / (probe.config.tasks or 1)
    titles = [part.title for part in plan.parts] + [part_title(stack.runs[0]) for stack in plan.again]
    uncounted = tuple(dict.fromkeys(title for title in titles if title.partition(",")[0] not in EXAMPLES))
    return Estimate(device, parts, probes, again, sources, uncounted)


def steps_in(trained: Iterable[RunConfig]) -> int:
    return sum(steps_of(config) for config in trained)


def from_results(config: RunConfig, known: Sequence[Result]) -> float | None:
    """Seconds of a run, by what a step took in results of the same benchmark: of the same method if there are any."""
    of_benchmark = [result for result in known if result.config.benchmark == config.benchmark]
    of_method = [result for result in of_benchmark if result.config.method == config.method]
    rates = [result.seconds / steps_of(result.config) for result in of_method or of_benchmark]
    return statistics.median(rates) * steps_of(config) if rates else None


# -- what parts took ----------------------------------------------------------------------------------------------


def read_parts(out: Path) -> list[Row]:
    """What was noted; lines that are not whole are left aside."""
    path = out / PARTS_FILE
    if not path.exists():
        return []
    rows = []
    with path.open(newline="", encoding="utf-8") as stream:
        for raw in csv.DictReader(stream):
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


def note_part(out: Path, title: str, device: str, finished: Iterable[RunConfig], seconds: float) -> None:
    """One more line of ``parts.csv``: wall-clock time of a part, or of as much of it as was done."""
    done = list(finished)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    steps = sum(steps_of(config) for config in done if config.benchmark in EXAMPLES)
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
    """Seconds of a step, measured once for each benchmark and network, and once more for VCL."""

    def __init__(self, device: str, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.measured: dict[tuple[object, ...], float] = {}

    def __call__(self, config: RunConfig) -> float:
        variational = config.method.startswith("vcl")  # twice the weights and more; the others are near one another
        key = (config.benchmark, config.model, config.hidden, config.batch_size, variational)
        if key not in self.measured:
            if not self.measured:
                self.say("measuring how fast this device is")
            self.measured[key] = seconds_of_a_step(config, self.device)
        return self.measured[key]


def seconds_of_a_step(config: RunConfig, device: str) -> float:
    """Begin a run on random inputs of the benchmark's shape, watch it for a moment, and break it off.

    On a CPU it is a run without a method, unless that is VCL: compiling would take longer than all the rest, and a
    compiled step with the penalty takes about as long as a plain one.
    """
    import torch

    from alasso.bench.streams import Stream
    from alasso.bench.train import run, torch_device

    place = torch_device(device)
    on_cpu = place.type == "cpu"
    shape, classes = SHAPES[config.benchmark], config.classes_per_task or 10
    changes: dict[str, Any] = {"tasks": 1, "epochs": 10**6}
    if on_cpu and not config.method.startswith("vcl"):
        changes |= {"method": "sgd", "settings": {}, "memory": 0}
    elif "point_epochs" in config.settings:  # training before training; not what is measured
        changes["settings"] = {**config.settings, "point_epochs": 0}
    scale = 1.0
    if on_cpu and len(shape) == 3 and shape[-1] > 64:
        scale, changes["batch_size"] = config.batch_size / SMALL_BATCH, SMALL_BATCH
    config = dataclasses.replace(config, **changes)
    count = 8 * config.batch_size
    x, y = torch.rand(count, *shape), torch.arange(count) % classes
    stream = Stream.of([((x, y), (x[:classes], y[:classes]))], device=place)
    finish = torch.cuda.synchronize if place.type == "cuda" else lambda: None
    meter = Meter(ON_CPU if on_cpu else ON_GPU, finish)
    try:
        run(config, stream=stream, device=device, observer=meter)
    except Enough:
        return scale * meter.seconds
    raise AssertionError("a million epochs went by")


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
