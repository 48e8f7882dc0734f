"""Experiments as files: which runs a figure or a table of the paper needs.

The folder ``paper`` at the repository's root holds them: ``experiments/*.toml``, ``claims.toml`` and ``template.md``.
``experiment/run`` names one run of one experiment wherever one is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from alasso.bench.config import RunConfig, nearest, read_toml
from alasso.bench.probe import Plan as ProbePlan
from alasso.bench.registry import BENCHMARKS
from alasso.errors import AlassoError

PAPER = Path("paper")
PROBE = ("weights", "offsets", "span", "examples")


@dataclass(frozen=True)
class Experiment:
    """Runs that belong together.

    Args:
        id: Name of its file, and of the experiment on the command line.
        title: What it is, in a line.
        benchmark: What all its runs train on.
        runs: By name, the method and what the run changes of its preset; without a method, the name is the method.
        paper: Where it stands in the paper.
        seeds: How many, from 0 on.
        cost: How long it takes, in words.
        fields: What all its runs change.
        probe: What to measure of single weights after the first task, instead of training to the end.
        quick: What the small version on a CPU changes; None: it has none.
        order: Experiments are run and listed in this order.
    """

    id: str
    title: str
    benchmark: str
    runs: Mapping[str, Mapping[str, Any]]
    paper: str = ""
    seeds: int = 1
    cost: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    probe: Mapping[str, Any] | None = None
    quick: Mapping[str, Any] | None = None
    order: int = 0

    @cached_property
    def first_seeds(self) -> dict[str, RunConfig]:
        """Every run with seed 0, made once: making a config takes long."""
        changes = {name: {"method": name, **self.fields, **run} for name, run in self.runs.items()}
        return {name: RunConfig.for_benchmark(self.benchmark, **change) for name, change in changes.items()}

    def config(self, run: str, seed: int = 0) -> RunConfig:
        """Describes one run.

        Args:
            run: Its name in this experiment.
            seed: Its seed.

        Returns:
            What to train.

        Raises:
            AlassoError: The experiment has no such run.
        """
        if run not in self.runs:
            raise AlassoError(f"experiment {self.id} has no run {run!r}{nearest(run, self.runs)}")
        first = self.first_seeds[run]
        return first if seed == first.seed else replace(first, seed=seed)

    def configs(self, seeds: int | None = None) -> list[RunConfig]:
        """Lists every run.

        Args:
            seeds: How many seeds of each; None: as many as the experiment asks for.

        Returns:
            What to train, seed by seed of each run.
        """
        return [self.config(run, seed) for run in self.runs for seed in range(seeds or self.seeds)]

    @property
    def references(self) -> list[str]:
        """Its runs as ``experiment/run``."""
        return [f"{self.id}/{run}" for run in self.runs]

    @property
    def data(self) -> tuple[str, ...]:
        """Names of the data sets it needs."""
        return BENCHMARKS[self.benchmark].data

    def in_small(self) -> Experiment:
        """Makes the quick version: one seed, on the benchmark that needs no download.

        Returns:
            An experiment with the same runs.
        """
        changes = dict(self.quick or {})
        benchmark = changes.pop("benchmark", self.benchmark)
        probe = self.probe and {**self.probe, **{name: changes.pop(name) for name in PROBE if name in changes}}
        return replace(self, benchmark=benchmark, seeds=1, fields={**self.fields, **changes}, probe=probe)


def find_paper(folder: Path | None = None) -> Path:
    """Finds the folder of experiments and claims.

    Args:
        folder: The folder, if it is not ``paper`` in the current one.

    Returns:
        The folder, which exists.

    Raises:
        AlassoError: There is none.
    """
    folder = folder or PAPER
    if not (folder / "experiments").is_dir():
        raise AlassoError(
            f"there is no folder {folder / 'experiments'}: the paper's experiments, claims and results come with "
            "alasso's source, in its folder paper; go there, or name the folder with --paper"
        )
    return folder


def read_experiments(folder: Path, *, quick: bool = False) -> dict[str, Experiment]:
    """Reads all experiments.

    Args:
        folder: The folder that :func:`find_paper` finds.
        quick: The small versions of those that have one.

    Returns:
        Experiments by id, in their order.

    Raises:
        AlassoError: A file is no description of an experiment.
    """
    found = [_read(path) for path in sorted((folder / "experiments").glob("*.toml"))]
    if quick:
        found = [one.in_small() for one in found if one.quick is not None]
    return {one.id: one for one in sorted(found, key=lambda one: (one.order, one.id))}


def _read(path: Path) -> Experiment:
    raw = read_toml(path)
    try:
        experiment = Experiment(id=path.stem, **raw)
        _check(experiment)
        if experiment.quick is not None:
            _check(experiment.in_small())
    except (AlassoError, TypeError, AttributeError) as error:  # a field that is missing, unknown or no table
        said = re.sub(r"^\w+\.__init__\(\) ", "", str(error))
        raise AlassoError(f"{path}: {said}") from error
    return experiment


def _check(experiment: Experiment) -> None:
    """Makes every config, which refuses unknown names and values out of range."""
    if type(experiment.seeds) is not int or experiment.seeds < 1:
        raise AlassoError(f"seeds must be a whole number from 1 on, not {experiment.seeds!r}")
    experiment.configs()
    ProbePlan(**experiment.probe or {})


def chosen(experiments: Mapping[str, Experiment], only: Iterable[str], skip: Iterable[str]) -> list[Experiment]:
    """Picks experiments by id.

    Args:
        experiments: All of them.
        only: Those to take; none named: all.
        skip: Those to leave out.

    Returns:
        The chosen ones, in their order.

    Raises:
        AlassoError: A name is unknown, or nothing is left.
    """
    only, skip = list(only), list(skip)
    for name in (*only, *skip):
        if name not in experiments:
            raise AlassoError(f"there is no experiment {name!r}{nearest(name, experiments)}")
    some = [one for one in experiments.values() if (not only or one.id in only) and one.id not in skip]
    if not some:
        raise AlassoError("no experiment is left; name fewer with --skip")
    return some


def config_of(experiments: Mapping[str, Experiment], reference: str) -> RunConfig:
    """Describes the run that ``experiment/run`` names.

    Args:
        experiments: All of them.
        reference: The name.

    Returns:
        The run, with seed 0.

    Raises:
        AlassoError: There is no such run.
    """
    name, slash, run = reference.partition("/")
    if not slash or name not in experiments:
        raise AlassoError(f"{reference!r} names no run: write experiment/run{nearest(name, experiments)}")
    return experiments[name].config(run)
