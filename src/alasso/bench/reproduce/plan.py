"""What has to be run: the runs of the chosen experiments that have no result file yet, each once."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from alasso.bench import probe as probe_findings
from alasso.bench.config import RunConfig
from alasso.bench.labels import count_of
from alasso.bench.probe import Plan as ProbePlan
from alasso.bench.reproduce.counting import slow_kind
from alasso.bench.reproduce.experiments import Experiment
from alasso.bench.results import DIVERGED, note_path, result_path

RUN_NAME = re.compile(r"_([0-9a-f]{10})_s\d+$")


@dataclass(frozen=True)
class Part:
    """Runs that are carried out together: one benchmark, one number of tasks."""

    benchmark: str
    tasks: int | None
    trained: tuple[RunConfig, ...]
    present: int  # runs of this part that have a result already

    @property
    def title(self) -> str:
        return part_title(self.trained[0])

    @property
    def configs(self) -> tuple[RunConfig, ...]:
        return self.trained


@dataclass(frozen=True)
class Probe:
    """One measurement of single weights."""

    config: RunConfig
    plan: ProbePlan

    def path(self, out: Path) -> Path:
        return probe_path(self.config, out)

    def is_there(self, out: Path) -> bool:
        """Whether it has been measured, and as is planned: what was measured otherwise is measured anew."""
        path = self.path(out)
        return path.exists() and probe_findings.read(path).plan == self.plan


@dataclass(frozen=True)
class Plan:
    """``parts`` and ``probes``: what is missing; ``present`` and ``probes_present``: how much is there already.

    ``runs``: how many are trained in parts;
    ``nothing_to_train``: by title, runs that are there already and belong to no part;
    ``diverged``: runs that came to no end before, and are
    not tried again.
    """

    parts: tuple[Part, ...]
    probes: tuple[Probe, ...]
    present: int
    probes_present: int = 0
    nothing_to_train: Mapping[str, int] = field(default_factory=dict)
    diverged: tuple[RunConfig, ...] = ()

    @property
    def runs(self) -> int:
        return sum(len(part.trained) for part in self.parts)

    @property
    def to_train(self) -> list[RunConfig]:
        """Every run that is begun, be it for a probe or for another run's sake."""
        in_parts = [config for part in self.parts for config in part.trained]
        return [*in_parts, *(probe.config for probe in self.probes)]

    @property
    def empty(self) -> bool:
        return not (self.runs or self.probes)


def part_title(config: RunConfig) -> str:
    """Methods that take several times as long as the others are parts of their own: no rate would fit both."""
    tasks = "all tasks" if config.tasks is None else count_of(config.tasks, "task")
    slower = f", {slow_kind(config)}" if slow_kind(config) else ""
    return f"{config.benchmark}, {tasks}{slower}"


def probe_path(config: RunConfig, out: Path) -> Path:
    return out / f"{config.name}.probe.json"


def probes_in(out: Path, config: RunConfig) -> list[Path]:
    """Probes of a run with any seed."""
    unseeded = config.name.removesuffix(f"_s{config.seed}")
    return sorted(out.glob(f"{glob.escape(unseeded)}_s*.probe.json"))


def results_in(out: Path) -> dict[Path, str]:
    """Result files of a folder with the config hash that their name holds; nothing is read."""
    return with_hashes(out.glob("*.json"))


def notes_in(out: Path) -> dict[Path, str]:
    """The same for notes of runs that diverged, those aside that have a result: it came at another time, and counts."""
    return with_hashes(path for path in out.glob(f"*{DIVERGED}") if not path.with_suffix(".json").exists())


def with_hashes(paths: Iterable[Path]) -> dict[Path, str]:
    named = {path: RUN_NAME.search(path.stem) for path in sorted(paths)}
    return {path: found[1] for path, found in named.items() if found}


def make_plan(
    experiments: Sequence[Experiment],
    seeds: int | None,
    out: Path,
) -> Plan:
    """A run that several experiments share is planned once: it is known by its config, not by its name."""
    wanted = runs_of(experiments, seeds)
    without = [config for config in wanted.values() if not result_path(config, out).exists()]
    diverged = [config for config in without if note_path(config, out).exists()]
    missing = [config for config in without if config not in diverged]
    present = Counter(part_title(config) for config in wanted.values() if result_path(config, out).exists())
    parts = _parts(missing, present)
    with_part = {part.title for part in parts}
    probes = _probes(experiments, seeds)
    to_measure = tuple(probe for probe in probes if not probe.is_there(out))
    return Plan(
        parts=tuple(parts),
        probes=to_measure,
        present=present.total(),
        probes_present=len(probes) - len(to_measure),
        nothing_to_train={title: count for title, count in present.items() if title not in with_part},
        diverged=tuple(diverged),
    )


def runs_of(experiments: Iterable[Experiment], seeds: int | None = None) -> dict[str, RunConfig]:
    """By name, each once."""
    return {config.name: config for one in experiments if one.probe is None for config in one.configs(seeds)}


def whole_parts(experiments: Iterable[Experiment], seeds: int | None = None) -> list[Part]:
    """What there is to run where nothing is there yet."""
    return _parts(list(runs_of(experiments, seeds).values()), Counter())


def _parts(missing: Sequence[RunConfig], present: Mapping[str, int]) -> list[Part]:
    trained: dict[str, list[RunConfig]] = {}
    for config in missing:
        trained.setdefault(part_title(config), []).append(config)
    return [
        Part(configs[0].benchmark, configs[0].tasks, tuple(configs), present[title])
        for title, configs in trained.items()
    ]


def _probes(experiments: Iterable[Experiment], seeds: int | None) -> list[Probe]:
    probes = [
        Probe(config, ProbePlan(**one.probe))
        for one in experiments
        if one.probe is not None
        for config in one.configs(seeds)
    ]
    return list({probe.config.name: probe for probe in probes}.values())
