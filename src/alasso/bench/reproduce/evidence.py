"""What result files say about the runs of experiments, by ``experiment/run``; what is missing is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from alasso.bench.data.version import short
from alasso.bench.metrics import same_stream
from alasso.bench.probe import Measured, Plan, read
from alasso.bench.report.aggregate import MEASURES, Group, groups
from alasso.bench.reproduce.experiments import Experiment, config_of
from alasso.bench.reproduce.plan import notes_in, probes_in, results_in
from alasso.bench.results import Result, read_note
from alasso.bench.results import read as read_checked
from alasso.errors import AlassoError

Values = dict[int, float]  # seed → value
AS_PUBLISHED = ("official", "scikit-learn")


class NotRun(Exception):
    """Results that a computation needs are not there; ``missing`` names them.

    ``apart``: runs that are there, but with no seed in common, so that they cannot be compared.
    """

    def __init__(self, missing: Sequence[str] = (), *, apart: Sequence[str] = ()) -> None:
        self.missing, self.apart = list(missing), sorted(set(apart))
        super().__init__(", ".join(self.missing) or no_seed_in_common(self.apart))


class Evidence:
    """Results of a folder that belong to a study; of others it knows nothing."""

    def __init__(
        self, experiments: Mapping[str, Experiment], results: Iterable[Result], out: Path | None = None
    ) -> None:
        self.experiments, self.out = experiments, out
        self.by_hash = {group.config.hash: group for group in groups(results)}
        self.ended_early: dict[str, dict[int, int]] = {}  # config hash → seed → in which task the run diverged

    @staticmethod
    def of_folder(experiments: Mapping[str, Experiment], out: Path) -> Evidence:
        """Only files named as the experiments' runs would be: what else lies there is not read."""
        wanted = {config_of(experiments, f"{e.id}/{run}").hash for e in experiments.values() for run in e.runs}
        paths = [path for path, config_hash in results_in(out).items() if config_hash in wanted]
        found = Evidence(experiments, [read_or_advise(path) for path in paths], out)
        for path in [path for path, config_hash in notes_in(out).items() if config_hash in wanted]:
            note = read_note(path)
            found.ended_early.setdefault(note.config.hash, {})[note.config.seed] = note.task
        return found

    def config_hash(self, reference: str) -> str:
        return config_of(self.experiments, reference).hash

    def group(self, reference: str) -> Group | None:
        return self.by_hash.get(self.config_hash(reference))

    def how_it_diverged(self, reference: str) -> str:
        """In words, of the seeds that came to no end; empty where there are none."""
        tasks = sorted(self.ended_early.get(self.config_hash(reference), {}).items())
        said = ", ".join(f"seed {seed} in task {task}" for seed, task in tasks)
        return f"diverged: {said}" if tasks else ""

    def all_diverged(self, *references: str) -> bool:
        """Whether of the seeds that experiments ask for none is left in which all of these can come to an end."""
        if not references or not all(map(self.is_run, references)):
            return False
        asked_for = min(self.experiments[reference.partition("/")[0]].seeds for reference in references)
        early = {seed for ref in references for seed in self.ended_early.get(self.config_hash(ref), {})}
        return bool(early) and early >= set(range(asked_for))

    def is_run(self, reference: str) -> bool:
        name, _, run = reference.partition("/")
        return name in self.experiments and run in self.experiments[name].runs

    def divergences(self, references: Iterable[str]) -> str:
        """The same of several runs, each by its name; empty where all came to an end."""
        said = {reference: self.how_it_diverged(reference) for reference in references if "/" in reference}
        return "; ".join(f"{reference} {how}" for reference, how in said.items() if how)

    def groups(self, references: Sequence[str]) -> dict[str, Group]:
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
        """The measure of each run for every seed that it has."""
        check_measure(measure)
        found = {ref: _known(group, measure) for ref, group in self.groups(references).items()}
        if missing := [ref for ref, values in found.items() if not values]:
            raise NotRun(list(dict.fromkeys(map(self.awaited_bound, missing))))
        return found

    def awaited_bound(self, reference: str) -> str:
        """The single-task run that I of a run is measured against."""
        bounds = self.single_task_beside(reference)
        name = reference.partition("/")[0]
        return next((bound for bound in bounds if bound.startswith(f"{name}/")), [*bounds, f"{name}/single-task"][0])

    def single_task_beside(self, reference: str) -> list[str]:
        """Runs of single-task on the same stream, of whichever experiment."""
        config = config_of(self.experiments, reference)
        return [
            f"{one.id}/{run}"
            for one in self.experiments.values()
            if one.probe is None
            for run in one.runs
            if (bound := one.config(run)).method == "single-task" and same_stream(bound, config)
        ]

    def results_of(self, names: Iterable[str]) -> list[Result]:
        """All results of some experiments, none twice."""
        found: dict[str, Result] = {}
        for name in names:
            for run in self.experiments[name].runs if name in self.experiments else ():
                if group := self.group(f"{name}/{run}"):
                    found |= {result.name: result for result in group.results}
        return list(found.values())

    def edition(self, references: Iterable[str]) -> str:
        """Data sets behind some runs that are not as published, with the edition their result files name: in full only
        where there are several of one data set.
        """
        found: dict[str, set[str]] = {}
        for group in filter(None, map(self.group, references)):
            for result in group.results:
                for name, edition in result.data.items():
                    found.setdefault(name, set()).add(edition)
        return ", ".join(f"{name} {said}" for name, said in sorted(_not_as_published(found).items()))

    def probes(self, reference: str) -> dict[int, Measured]:
        """What the probes of a run measured, by seed."""
        if self.out is None:
            raise NotRun([reference])
        asked = Plan(**self.experiments[reference.partition("/")[0]].probe or {})
        paths = probes_in(self.out, config_of(self.experiments, reference))
        found = [measured for measured in map(read, paths) if measured.plan == asked]
        if not found:
            raise NotRun([reference])
        return {measured.seed: measured for measured in sorted(found, key=lambda one: one.seed)}


def no_seed_in_common(references: Sequence[str]) -> str:
    """
    >>> no_seed_in_common(["x/si", "x/ewc", "y/si"])
    'x/si, x/ewc and y/si have no seed in common'
    """
    *others, last = references or [""]
    return f"{', '.join(others)} and {last} have no seed in common" if others else last


def check_measure(measure: str) -> None:
    if measure not in (known := [key for key, _, _ in MEASURES]):
        raise AlassoError(f"there is no measure {measure!r}; there are {', '.join(known)}")


def read_or_advise(path: Path) -> Result:
    try:
        return read_checked(path)
    except AlassoError as error:
        raise AlassoError(f"{error}; delete it, and `alasso reproduce` makes it again") from error


def _not_as_published(found: Mapping[str, set[str]]) -> dict[str, str]:
    return {
        name: " and ".join(sorted(own)) if len(own) > 1 else short(*own)
        for name, editions in found.items()
        if (own := editions - set(AS_PUBLISHED))
    }


def _known(group: Group, measure: str) -> Values:
    values = zip(group.seeds, group.measures[measure], strict=True)
    return {seed: value for seed, value in values if value is not None}
