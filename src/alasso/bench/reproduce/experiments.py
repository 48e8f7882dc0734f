"""Experiments as files: which runs a figure or a table of the paper needs.

A *study* is a folder: ``experiments/*.toml``, ``claims.toml`` and, if there is one, ``document.md``. The paper's is the
folder ``paper`` beside this file. ``experiment/run`` names one run of one experiment wherever one is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from alasso.bench.config import RunConfig, nearest, read_toml
from alasso.bench.probe import Plan as ProbePlan
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.errors import AlassoError

PAPER = Path(__file__).with_name("paper")


@dataclass(frozen=True)
class Experiment:
    """Runs that belong together. ``runs``: name → method and what the run changes of its preset."""

    id: str
    title: str
    paper: str  # where it stands there
    benchmark: str
    seeds: int
    cost: str
    runs: Mapping[str, Mapping[str, Any]]
    fields: Mapping[str, Any] = field(default_factory=dict)
    probe: Mapping[str, Any] | None = None  # weights of the first task are moved one by one, instead of a whole run
    quick: Mapping[str, Any] | None = None  # what the small version on a CPU changes; None: it has none
    order: int = 0

    def config(self, run: str, seed: int = 0) -> RunConfig:
        if run not in self.runs:
            raise AlassoError(f"experiment {self.id} has no run {run!r}{nearest(run, self.runs)}")
        changes = {"method": run, **self.fields, **self.runs[run], "seed": seed}
        return RunConfig.for_benchmark(self.benchmark, changes.pop("method"), **changes)

    def configs(self, seeds: int | None = None) -> list[RunConfig]:
        """Every run, for ``seeds`` seeds from 0 on."""
        return [self.config(run, seed) for run in self.runs for seed in range(seeds or self.seeds)]

    def data(self) -> tuple[str, ...]:
        """Names of the data sets it needs."""
        return BENCHMARKS[self.benchmark].data

    def in_small(self) -> Experiment | None:
        """The quick version: one seed, on the benchmark that needs no download."""
        if self.quick is None:
            return None
        changes = dict(self.quick)
        benchmark = changes.pop("benchmark", self.benchmark)
        probe = self.probe
        if probe is not None:
            probe = {**probe, **{name: changes.pop(name) for name in PROBE if name in changes}}
        fields = {**self.fields, **changes}
        return replace(self, benchmark=benchmark, seeds=1, fields=fields, probe=probe, quick=None)


REQUIRED = ("title", "benchmark", "runs")
DEFAULTS: dict[str, Any] = {"paper": "", "seeds": 1, "cost": "", "fields": {}, "probe": None, "quick": None, "order": 0}


KINDS: dict[str, type] = {
    **dict.fromkeys(("title", "paper", "benchmark", "cost"), str),
    **dict.fromkeys(("seeds", "order"), int),
    **dict.fromkeys(("runs", "fields", "probe", "quick"), dict),
}
PROBE = ("weights", "offsets", "span", "examples")
WORDS = {str: "a text", int: "a whole number", dict: "a table"}


def read_experiment(path: Path) -> Experiment:
    raw = read_toml(path)
    if lacking := [name for name in REQUIRED if name not in raw]:
        raise AlassoError(f"{path}: {lacking[0]} is missing")
    if unknown := sorted(set(raw) - set(REQUIRED) - set(DEFAULTS)):
        raise AlassoError(f"{path}: no such field: {unknown[0]!r}{nearest(unknown[0], (*REQUIRED, *DEFAULTS))}")
    for name, kind in KINDS.items():
        if name in raw and (not isinstance(raw[name], kind) or isinstance(raw[name], bool)):
            raise AlassoError(f"{path}: {name} must be {WORDS[kind]}, not {raw[name]!r}")
    if raw.get("seeds", 1) < 1:
        raise AlassoError(f"{path}: seeds must be 1 or more: how many there are, counted from seed 0")
    for name, run in raw["runs"].items():
        if not isinstance(run, dict) or not isinstance(run.get("method", name), str):
            raise AlassoError(f'{path}: run {name!r} must be a table with one method: {{ method = "…" }}')
        if "method" not in run and name not in METHODS:
            raise AlassoError(f'{path}: run {name!r} names no method; write {{ method = "…" }}')
        if "seed" in {**raw.get("fields", {}), **run}:
            raise AlassoError(f"{path}: seed is no field of a run; how many there are, from 0 on, says seeds = …")
    if unknown := sorted(set(raw.get("probe") or {}) - set(PROBE)):
        raise AlassoError(f"{path}: [probe] has no {unknown[0]!r}{nearest(unknown[0], PROBE)}")
    try:
        ProbePlan(**raw.get("probe") or {})
    except AlassoError as error:
        raise AlassoError(f"{path}: [probe]: {error}") from error
    experiment = Experiment(id=path.stem, **{**DEFAULTS, **raw})
    try:
        experiment.configs()
        if small := experiment.in_small():
            small.configs()
            ProbePlan(**small.probe or {})
    except AlassoError as error:
        raise AlassoError(f"{path}: {error}") from error
    return experiment


def read_experiments(folder: Path = PAPER, *, quick: bool = False) -> dict[str, Experiment]:
    """All of a study in their order; ``quick``: the small versions of those that have one."""
    if not folder.is_dir():
        raise AlassoError(f"there is no folder {folder}")
    found = [read_experiment(path) for path in sorted((folder / "experiments").glob("*.toml"))]
    if not found:
        raise AlassoError(f"{folder} holds no experiments: a folder experiments with a .toml file for each is missing")
    if quick:
        found = [small for experiment in found if (small := experiment.in_small())]
        if not found:
            raise AlassoError(f"no experiment of {folder} has a small version, which a table [quick] would say")
    return {experiment.id: experiment for experiment in sorted(found, key=lambda one: (one.order, one.id))}


def chosen(experiments: Mapping[str, Experiment], only: Sequence[str], skip: Sequence[str]) -> list[Experiment]:
    """Those asked for by id; all of them if none is named."""
    for name in (*only, *skip):
        if name not in experiments:
            raise AlassoError(f"there is no experiment {name!r}{nearest(name, experiments)}")
    return [one for one in experiments.values() if (not only or one.id in only) and one.id not in skip]


def config_of(experiments: Mapping[str, Experiment], reference: str) -> RunConfig:
    """The config, with seed 0, of ``experiment/run``."""
    name, slash, run = reference.partition("/")
    if not slash:
        raise AlassoError(f"{reference!r} names no run: write experiment/run")
    if name not in experiments:
        raise AlassoError(f"{reference!r} names no run: there is no experiment {name!r}{nearest(name, experiments)}")
    return experiments[name].config(run)
