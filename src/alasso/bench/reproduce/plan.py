"""What has to be run, how long that takes, and running it.

A run that several experiments share is planned once: it is known by its config, not by its name. What is finished
stays finished wherever a reproduction is stopped, and the same command resumes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from alasso.bench.config import RunConfig, count_of
from alasso.bench.data import check
from alasso.bench.io import write_whole
from alasso.bench.probe import Plan as ProbePlan
from alasso.bench.probe.measure import probe_first_task
from alasso.bench.registry import BENCHMARKS
from alasso.bench.reproduce.experiments import Evidence, Experiment, NotRun
from alasso.bench.results import Result, device_of
from alasso.bench.training import sweep
from alasso.bench.training.progress import stop_on_request
from alasso.errors import AlassoError


@dataclass(frozen=True)
class Part:
    """Runs of one benchmark and number of tasks, which are carried out together.

    Args:
        title: Benchmark and tasks.
        missing: Runs without a result.
        present: How many have one.
        used_by: The experiments that have these runs.
    """

    title: str
    missing: Sequence[RunConfig]
    present: int
    used_by: Sequence[str]


@dataclass(frozen=True)
class Probe:
    """One measurement of single weights."""

    config: RunConfig
    plan: ProbePlan


@dataclass(frozen=True)
class Plan:
    """What to do for some experiments.

    Args:
        parts: Their runs.
        probes: Measurements that are missing.
        probes_present: How many are there.
        diverged: Runs that diverged before, and are not tried again.
    """

    parts: Sequence[Part]
    probes: Sequence[Probe]
    probes_present: int
    diverged: Sequence[RunConfig]

    @property
    def missing(self) -> list[RunConfig]:
        """All runs without a result."""
        return [config for part in self.parts for config in part.missing]

    @property
    def present(self) -> int:
        """How many runs and measurements are there."""
        return sum(part.present for part in self.parts) + self.probes_present

    @property
    def empty(self) -> bool:
        """Whether nothing is left to do."""
        return not self.missing and not self.probes

    def to_do(self) -> str:
        """Counts what is missing, in words."""
        counts = ((len(self.missing), "run"), (len(self.probes), "probe"))
        return " and ".join(count_of(count, kind) for count, kind in counts if count)


def make_plan(
    experiments: Iterable[Experiment], evidence: Evidence, seeds: int | None = None, shard: str | None = None
) -> Plan:
    """Finds out what is missing.

    Args:
        experiments: Those to carry out.
        evidence: What is there.
        seeds: How many seeds of each run; None: as many as each experiment asks for.
        shard: Which share of all runs, done or not, as ``I/N``; None takes all.

    Returns:
        The plan.

    Raises:
        AlassoError: There is no such shard.
    """
    experiments = list(experiments)
    share = {config.name for config in sweep.shard_of([c for one in experiments for c in one.configs(seeds)], shard)}
    configs = {one.id: [config for config in one.configs(seeds) if config.name in share] for one in experiments}
    trained = [(one.id, config) for one in experiments if one.probe is None for config in configs[one.id]]
    wanted = {config.name: config for _, config in trained}
    early = {
        name: config for name, config in wanted.items() if config.seed in evidence.ended_early.get(config.hash, {})
    }
    aside = early.keys() | (evidence.left_out.keys() - evidence.names)  # a damaged file is not written over
    parts = []
    for title in dict.fromkeys(map(part_title, wanted.values())):
        own = {name: config for name, config in wanted.items() if part_title(config) == title and name not in aside}
        missing = [config for name, config in own.items() if name not in evidence.names]
        users = list(dict.fromkeys(user for user, config in trained if part_title(config) == title))
        parts.append(Part(title, missing, len(own) - len(missing), users))
    probed = [one for one in experiments if one.probe is not None]
    probes = [probe for one in probed for probe in _missing_probes(one, evidence, seeds) if probe.config.name in share]
    there = sum(len(configs[one.id]) for one in probed) - len(probes)
    return Plan(parts, probes, there, list(early.values()))


def _missing_probes(experiment: Experiment, evidence: Evidence, seeds: int | None) -> list[Probe]:
    plan, missing = ProbePlan(**experiment.probe or {}), []
    for run in experiment.runs:
        try:
            there = set(evidence.probes(f"{experiment.id}/{run}"))
        except NotRun:
            there = set()
        missing += [experiment.config(run, seed) for seed in range(seeds or experiment.seeds) if seed not in there]
    return [Probe(config, plan) for config in missing if f"{config.name}.probe" not in evidence.left_out]


def part_title(config: RunConfig) -> str:
    """Benchmark and number of tasks."""
    return f"{config.benchmark}, {'all tasks' if config.tasks is None else count_of(config.tasks, 'task')}"


# -- how long it takes ----------------------------------------------------------------------------------------------


def estimate(configs: Iterable[RunConfig], known: Iterable[Result]) -> tuple[float, str] | None:
    """Estimates how long runs take: as long as the slowest finished run of the same benchmark and method.

    Args:
        configs: The runs.
        known: Finished runs, on whichever device.

    Returns:
        Seconds, and the devices of the finished runs; None where no finished run tells of one of them.
    """
    slowest: dict[tuple[str, str], tuple[float, str]] = {}  # seconds of a task and epoch, device
    for result in known:
        pace = result.seconds / (len(result.accuracy) * result.config.epochs), device_of(result.environment)
        key = result.config.benchmark, result.config.method
        slowest[key] = max(pace, slowest.get(key, pace))
    total, devices = 0.0, dict[str, None]()
    for config in configs:
        if (config.benchmark, config.method) not in slowest:
            return None
        seconds, device = slowest[config.benchmark, config.method]
        total += seconds * (config.tasks or 1) * config.epochs
        devices[device] = None
    return total, " and ".join(devices)


UNITS = ((2 * 86_400, 86_400, "days"), (90 * 60, 3_600, "h"), (90, 60, "min"), (0, 1, "s"))


def roughly(seconds: float) -> str:
    """
    >>> roughly(42.4), roughly(196), roughly(9000), roughly(400_000)
    ('42 s', '3.3 min', '2.5 h', '4.6 days')
    """
    size, unit = next((size, unit) for least, size, unit in UNITS if seconds >= least)
    return f"{float(f'{seconds / size:.2g}'):g} {unit}"


# -- running it -----------------------------------------------------------------------------------------------------


def check_data(plan: Plan, experiments: Sequence[Experiment], data_dir: Path | None) -> None:
    """Refuses to begin without the data sets.

    Args:
        plan: What is to be run.
        experiments: Those that were chosen.
        data_dir: The folder of data sets; None: the usual one.

    Raises:
        AlassoError: One is not whole; how to get it, and which experiments do without.
    """
    configs = [*plan.missing, *(probe.config for probe in plan.probes)]
    names = dict.fromkeys(name for config in configs for name in BENCHMARKS[config.benchmark].data)
    if absent := [name for name in names if not _is_whole(name, data_dir)]:
        waiting = [one.id for one in experiments if set(one.data) & set(absent)]
        without = f"; or do without: --skip {' '.join(waiting)}" if len(waiting) < len(experiments) else ""
        raise AlassoError(
            f"data not found: {', '.join(absent)}; name their folder with --data-dir, "
            f"or run `alasso data fetch {' '.join(absent)}`{without}"
        )


def _is_whole(name: str, data_dir: Path | None) -> bool:
    try:
        return all(report.status == "ok" for report in check(name, data_dir))
    except AlassoError:
        return False


def carry_out(plan: Plan, options: sweep.Options, console: Console, say: Callable[[str], None]) -> None:
    """Trains what is missing, part by part, then measures; a run that diverges does not keep the others waiting.

    Args:
        plan: What to do.
        options: Where and how.
        console: Where progress is shown.
        say: Takes a line about each part.
    """
    with stop_on_request() as stop_requested:
        for part in (part for part in plan.parts if part.missing):
            if stop_requested():  # in the last moments of the part before
                raise sweep.Stopped("the end of a part")
            say(f"{part.title}: {count_of(len(part.missing), 'run')}")
            try:
                sweep.carry_out(part.missing, options, console)
            except sweep.SomeDiverged as error:
                console.print(error.which, highlight=False, soft_wrap=True, markup=False)
        if stop_requested() and plan.probes:
            raise sweep.Stopped("the end of a part")
    for probe in plan.probes:
        measured = probe_first_task(probe.config, probe.plan, data_dir=options.data_dir, device=options.device, say=say)
        write_whole(options.out / f"{probe.config.name}.probe.json", measured.as_file())
