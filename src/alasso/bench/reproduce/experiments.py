"""Experiments as files, and what results say about their runs.

The folder ``paper`` at the repository's root holds experiments: ``experiments/*.toml``, beside ``claims.toml`` and
``template.md``. ``experiment/run`` names one run of one experiment wherever one is meant.

A run that is trained writes a JSON file of its own. Results that are kept for good, as those of ``paper/results``, go
several to a JSON-lines file. Both are read alike; of two results of one run the newer counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from alasso.bench import probe
from alasso.bench.config import RunConfig, nearest
from alasso.bench.data.editions import short
from alasso.bench.io import write_whole
from alasso.bench.metrics import same_stream
from alasso.bench.registry import BENCHMARKS
from alasso.bench.report.aggregate import MEASURES, Group, groups
from alasso.bench.results import DIVERGED, Divergence, Result, read_file, read_note, result_files
from alasso.bench.schema import EXPERIMENT, MOST_RUNS, read_text, read_toml
from alasso.errors import AlassoError

Values = dict[int, float]  # seed → value
PAPER = Path("paper")
AS_PUBLISHED = ("official", "scikit-learn")


# -- what to run -----------------------------------------------------------------------------------------------------


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


def read_experiments(folder: Path) -> dict[str, Experiment]:
    """Reads all experiments.

    Args:
        folder: The folder that :func:`find_paper` finds.

    Returns:
        Experiments by id, in their order.

    Raises:
        AlassoError: A file is no description of an experiment.
    """
    found = [_read(path) for path in sorted((folder / "experiments").glob("*.toml"))]
    return {one.id: one for one in sorted(found, key=lambda one: (one.order, one.id))}


def _read(path: Path) -> Experiment:
    raw = read_toml(path)
    try:
        EXPERIMENT(raw, "")
        experiment = Experiment(id=path.stem, **raw)
        if experiment.seeds * len(experiment.runs) > MOST_RUNS:
            raise AlassoError(f"{len(experiment.runs)} runs of {experiment.seeds} seeds are more than {MOST_RUNS:,}")
        experiment.configs()  # which refuses unknown names and values out of range
        probe.Plan(**experiment.probe or {})
    except (AlassoError, TypeError) as error:  # a name of a probe that there is not
        said = re.sub(r"^\w+\.__init__\(\) ", "", str(error))
        raise AlassoError(f"{path}: {said}") from error
    return experiment


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


# -- what was found --------------------------------------------------------------------------------------------------


class NotRun(Exception):
    """Results that a computation needs are not there.

    Args:
        missing: Runs without any.
        apart: Runs that have some, but no seed in common, so that they cannot be compared.
    """

    def __init__(self, missing: Sequence[str] = (), *, apart: Sequence[str] = ()) -> None:
        self.missing, self.apart = list(missing), sorted(set(apart))
        super().__init__(", ".join(self.missing) or no_seed_in_common(self.apart))


class Evidence:
    """Results that belong to experiments.

    Args:
        experiments: All of them, by id.
        results: Results of whichever runs; those of other runs are left aside.
        probes: What was measured of single weights.
        notes: Which runs diverged; a run that has a result, too, finished another time, and counts.
        left_out: One sentence for each file that cannot be read, by the run it is named after.
    """

    def __init__(
        self,
        experiments: Mapping[str, Experiment],
        results: Iterable[Result],
        probes: Iterable[probe.Measured] = (),
        notes: Iterable[Divergence] = (),
        left_out: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.experiments, self.all_probes, self.left_out = experiments, list(probes), left_out
        own = {config_of(experiments, ref).hash for one in experiments.values() for ref in one.references}
        self.by_hash = {group.config.hash: group for group in groups(results) if group.config.hash in own}
        self.names = {result.name for group in self.by_hash.values() for result in group.results}
        self.ended_early: dict[str, dict[int, int]] = {}  # config hash → seed → in which task the run diverged
        for note in notes:
            if note.config.name not in self.names:
                self.ended_early.setdefault(note.config.hash, {})[note.config.seed] = note.task

    @staticmethod
    def of_folder(experiments: Mapping[str, Experiment], out: Path) -> Evidence:
        """Reads what lies in a folder.

        Args:
            experiments: All of them, by id.
            out: The folder.

        Returns:
            Its results, probes and notes of runs that diverged; none if the folder does not exist. What cannot be
            read is left out.
        """
        results: list[Result] = []
        probes: list[probe.Measured] = []
        notes: list[Divergence] = []
        left_out: dict[str, str] = {}
        for path in result_files(sorted(out.glob("*.json*"))):
            for found in read_file(path):
                if isinstance(found, AlassoError):
                    left_out[run_of(path)] = f"{found}; delete it, and `alasso reproduce` trains it again"
                else:
                    results.append(found)
        for path in (*sorted(out.glob("*.probe.json*")), *sorted(out.glob(f"*{DIVERGED}"))):
            try:
                if path.name.endswith(DIVERGED):
                    notes.append(read_note(path))
                else:
                    probes.append(probe.read(path))
            except AlassoError as error:
                left_out[run_of(path)] = str(error)
        return Evidence(experiments, results, probes, notes, left_out)

    def group(self, reference: str) -> Group | None:
        """All seeds of a run; None if there are none."""
        return self.by_hash.get(config_of(self.experiments, reference).hash)

    def groups(self, references: Sequence[str]) -> dict[str, Group]:
        """All seeds of each run."""
        found = {reference: self.group(reference) for reference in references}
        if missing := [reference for reference, group in found.items() if group is None]:
            raise NotRun(missing)
        return {reference: group for reference, group in found.items() if group is not None}

    def values(self, references: Sequence[str], measure: str = "A") -> dict[str, Values]:
        """The measure of each run for every seed that all of them have: differences are between like and like."""
        found = self.measured(references, measure)
        shared = sorted(set.intersection(*(set(values) for values in found.values())))
        if not shared:
            raise NotRun(apart=references)
        return {ref: {seed: values[seed] for seed in shared} for ref, values in found.items()}

    def measured(self, references: Sequence[str], measure: str) -> dict[str, Values]:
        """The measure of each run for every seed that it has; names all that is missing, not only the first."""
        if measure not in (known := [key for key, *_ in MEASURES]):
            raise AlassoError(f"there is no measure {measure!r}; there are {', '.join(known)}")
        found = {ref: group.values(measure) for ref, group in self.groups(references).items()}
        if missing := [ref for ref, values in found.items() if not values]:  # of I, which needs another run
            raise NotRun(list(dict.fromkeys(map(self._single_task_beside, missing))))
        return found

    def _single_task_beside(self, reference: str) -> str:
        """The run of single-task that I of a run is measured against; preferably of the same experiment."""
        config, own = config_of(self.experiments, reference), self.experiments[reference.partition("/")[0]]
        for one in (own, *self.experiments.values()):
            for run in one.runs if one.probe is None else ():
                bound = one.config(run)
                if bound.method == "single-task" and same_stream(bound, config):
                    return f"{one.id}/{run}"
        return f"{own.id}/single-task"

    def results_of(self, references: Iterable[str]) -> list[Result]:
        """All results of some runs, none twice."""
        found = [group for reference in references if (group := self.group(reference))]
        return list({result.name: result for group in found for result in group.results}.values())

    @cached_property
    def results(self) -> list[Result]:
        """All results of all experiments, none twice."""
        return self.results_of(reference for one in self.experiments.values() for reference in one.references)

    def probes(self, reference: str) -> dict[int, probe.Measured]:
        """What was measured of single weights of a run, as its experiment asks for it, by seed."""
        asked = probe.Plan(**self.experiments[reference.partition("/")[0]].probe or {})
        own, of_plan = config_of(self.experiments, reference), [one for one in self.all_probes if one.plan == asked]
        mine = [one for one in of_plan if RunConfig.from_json(one.config).hash == own.hash]
        if not mine:
            raise NotRun([reference])
        return {one.seed: one for one in sorted(mine, key=lambda one: one.seed)}

    def divergences(self, *references: str) -> str:
        """Which seeds of some runs diverged, in words; empty if none did."""
        said = {reference: self.how_it_diverged(reference) for reference in references}
        return "; ".join(f"{reference} {how}" for reference, how in said.items() if how)

    def how_it_diverged(self, reference: str) -> str:
        """Which seeds of a run diverged, in words; empty if none did."""
        tasks = sorted(self.ended_early.get(config_of(self.experiments, reference).hash, {}).items())
        said = ", ".join(f"seed {seed} in task {task}" for seed, task in tasks)
        return f"diverged: {said}" if tasks else ""

    def all_diverged(self, *references: str) -> bool:
        """Whether each seed that the experiments ask for diverged in one of these."""
        asked_for = [self.experiments[reference.partition("/")[0]].seeds for reference in references]
        hashes = [config_of(self.experiments, reference).hash for reference in references]
        early = {seed for config_hash in hashes for seed in self.ended_early.get(config_hash, {})}
        return bool(early) and early >= set(range(min(asked_for)))

    def editions(self, references: Iterable[str] | None = None) -> dict[str, set[str]]:
        """Editions of each data set behind some runs, as their result files name them; by default behind all."""
        found: dict[str, set[str]] = {}
        for result in self.results if references is None else self.results_of(references):
            for name, edition in result.data.items():
                found.setdefault(name, set()).add(edition)
        return found

    def edition(self, references: Iterable[str]) -> str:
        """Data sets behind some runs that are not as published; in full where there are several editions of one."""
        own = {name: editions - set(AS_PUBLISHED) for name, editions in sorted(self.editions(references).items())}
        said = {name: " and ".join(sorted(of)) if len(of) > 1 else short(*of) for name, of in own.items() if of}
        return ", ".join(f"{name} {edition}" for name, edition in said.items())


def pack(experiments: Iterable[Experiment], evidence: Evidence, out: Path) -> int:
    """Moves results from files of their own into one file an experiment, a line each; a run's older line goes.

    Args:
        experiments: Those whose results are moved; a run that several have goes to the first.
        evidence: What the folder holds.
        out: The folder.

    Returns:
        How many were moved.

    Raises:
        AlassoError: A file of lines is damaged, or the folder takes no files.
    """
    single, moved = {path.stem: path for path in out.glob("*.json")}, 0
    for one in experiments:
        own = {result.name: result for result in evidence.results_of(one.references) if result.name in single}
        if not own:
            continue
        file, lines = out / f"{one.id}.jsonl", []
        if file.exists():
            there = [line for line in read_text(file).split("\n") if line.strip()]
            for line, found in zip(there, read_file(file), strict=True):
                if isinstance(found, AlassoError):
                    raise found
                lines += [] if found.name in own else [line]
        lines += [json.dumps(result.to_json(), separators=(",", ":")) for result in own.values()]
        write_whole(file, "".join(f"{line}\n" for line in lines).encode())
        for name in own:
            single.pop(name).unlink()
        moved += len(own)
    return moved


def run_of(path: Path) -> str:
    """The run that a file in a folder of results is named after.

    >>> run_of(Path("x_s0.json.xz")), run_of(Path("x_s0.probe.json")), run_of(Path("x_s0.diverged"))
    ('x_s0', 'x_s0.probe', 'x_s0')
    """
    return re.sub(r"(\.jsonl?|\.diverged)?(\.xz)?$", "", path.name)


def no_seed_in_common(references: Sequence[str]) -> str:
    """
    >>> no_seed_in_common(["x/si", "x/ewc", "y/si"])
    'x/si, x/ewc and y/si have no seed in common'
    """
    return f"{', '.join(references[:-1])} and {references[-1]} have no seed in common"
