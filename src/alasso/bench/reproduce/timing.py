"""How long it will take: from what earlier parts and results took on this device, else from a short measurement.

Counted are optimizer steps; what a step takes is looked up in this order:

1. parts of an earlier reproduction on this device (``parts.csv``): they hold evaluation and stacking, too;
2. results on this device of the same benchmark and method, then of methods of its kind;
3. steps, and answers, made just now, on random inputs of the benchmark's shape. Answers are counted apart, for VCL's
   take as long as its training.

A probe's task is reckoned likewise; how long its weights take to be moved is always measured, on a few of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alasso.bench.config import RunConfig
from alasso.bench.labels import count_of
from alasso.bench.reproduce.counting import EXAMPLES, answers_of, coreset_steps, plain_steps, slow_kind, steps_of
from alasso.bench.reproduce.parts import read_parts, summed
from alasso.bench.reproduce.plan import Plan, Probe, part_title
from alasso.bench.reproduce.stopwatch import Pace, plainly
from alasso.bench.results import Result, device_of

Measure = Callable[[RunConfig], Pace]
Moving = Callable[[Probe], float]

EARLIER, RESULTS, MEASURED = "earlier parts", "results there", "measured now"


@dataclass(frozen=True)
class Estimate:
    """Seconds of each part, of the probes, and where the figures come from (source → runs)."""

    device: str
    parts: dict[str, float] = field(default_factory=dict)
    probes: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)
    measured_probes: int = 0
    uncounted: tuple[str, ...] = ()  # parts of which it is not known how many steps they take

    @property
    def seconds(self) -> float:
        return sum(self.parts.values()) + self.probes

    def sentence(self) -> str:
        names = {
            EARLIER: "from parts carried out on this device before",
            RESULTS: "from results of this device",
            MEASURED: "estimated from a short measurement; compiling and the report take extra, training several runs "
            "at once takes less",
        }
        known = {source: [count_of(count, "run")] for source, count in self.sources.items() if count}
        if self.measured_probes:
            known.setdefault(MEASURED, []).append(count_of(self.measured_probes, "probe"))
        where = "; ".join(f"{' and '.join(counts)} {names[source]}" for source, counts in known.items())
        if len(known) == 1:
            where = names[next(iter(known))]
        rest = f"; not counting {', '.join(self.uncounted)}" if self.uncounted else ""
        return f"about {roughly(self.seconds)} on {self.device} ({where}){rest}" if known else rest[2:]


MINUTE, HOUR, DAY = 60, 3600, 86_400
MONTH, YEAR = 30.44 * DAY, 365.25 * DAY

#: From so many seconds on, in which unit.
UNITS = (
    (0, 1, "s"),
    (90, MINUTE, "min"),
    (90 * MINUTE, HOUR, "h"),
    (2 * DAY, DAY, "days"),
    (2 * MONTH, MONTH, "months"),
    (2 * YEAR, YEAR, "years"),
)


def roughly(seconds: float) -> str:
    """An estimate, which knows no more than two digits.

    >>> roughly(42.4), roughly(196), roughly(9000), roughly(5998), roughly(400_000), roughly(300.9 * DAY)
    ('42 s', '3.3 min', '2.5 h', '1.7 h', '4.6 days', '9.9 months')
    """
    size, unit = next((size, unit) for least, size, unit in reversed(UNITS) if seconds >= least)
    return f"{float(f'{seconds / size:.2g}'):g} {unit}"


def human(seconds: float) -> str:
    """A time that was taken.

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


def estimate(
    plan: Plan, known: Sequence[Result], out: Path, device: str, measure: Measure, moving: Moving = lambda probe: 0.0
) -> Estimate:
    """``measure``: how fast a run is, found out when nothing better is known; ``moving``: how long the weights of a
    probe take to be moved.
    """
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
    to_probe = [probe for probe in plan.probes if probe.config.benchmark in EXAMPLES]
    probes = 0.0
    for probe in to_probe:
        whole = from_results(probe.config, mine)
        step = measure(probe.config).step if whole is None else whole / steps_of(probe.config)
        probes += steps_of_probe(probe) * step + moving(probe)
    titles = [part.title for part in plan.parts]
    uncounted = tuple(dict.fromkeys(title for title in titles if title.partition(",")[0] not in EXAMPLES))
    return Estimate(device, parts, probes, sources, len(to_probe), uncounted)


def steps_of_probe(probe: Probe) -> float:
    """It learns the first task."""
    return steps_of(probe.config) / (probe.config.tasks or 1)


def at_pace(config: RunConfig, measure: Measure) -> float:
    """Seconds of a run: its steps, its answers, and what VCL trains beside its tasks."""
    pace, beside = measure(config), 0.0
    if count := plain_steps(config):
        beside = count * measure(plainly(config)).step
    return (steps_of(config) + coreset_steps(config)) * pace.step + answers_of(config) * pace.answer + beside


def from_results(config: RunConfig, known: Sequence[Result]) -> float | None:
    """Seconds of a run, by what a step took in results of the same benchmark: of the same method if there are any, else
    of those that take about as long.
    """
    of_benchmark = [result for result in known if result.config.benchmark == config.benchmark]
    of_method = [result for result in of_benchmark if result.config.method == config.method]
    of_kind = [result for result in of_benchmark if slow_kind(result.config) == slow_kind(config)]
    rates = [result.seconds / steps_of(result.config) for result in of_method or of_kind]
    return statistics.median(rates) * steps_of(config) if rates else None
