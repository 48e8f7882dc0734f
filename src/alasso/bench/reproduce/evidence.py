"""What a folder of results says about the runs of experiments, by ``experiment/run``; what is missing is named.

A run that is trained writes a JSON file of its own into the folder. Results that are kept for good, as those of
``paper/results``, go several to a JSON-lines file. Both are read alike; of two results of one run the newer counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from alasso.bench import probe
from alasso.bench.config import RunConfig
from alasso.bench.data.version import short
from alasso.bench.metrics import same_stream
from alasso.bench.probe import Measured
from alasso.bench.report.aggregate import MEASURES, Group, groups
from alasso.bench.reproduce.experiments import Experiment, config_of
from alasso.bench.results import DIVERGED, Divergence, Result, read_all, read_note
from alasso.errors import AlassoError

Values = dict[int, float]  # seed → value
AS_PUBLISHED = ("official", "scikit-learn")


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
        notes: Which runs diverged; those that have a result came to it at another time, and count.
    """

    def __init__(
        self,
        experiments: Mapping[str, Experiment],
        results: Iterable[Result],
        probes: Iterable[Measured] = (),
        notes: Iterable[Divergence] = (),
    ) -> None:
        self.experiments, self.all_probes = experiments, list(probes)
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
            Its results, probes and notes of runs that diverged; none if the folder does not exist.

        Raises:
            AlassoError: A file cannot be read.
        """
        results = []
        for found in read_all(sorted(out.glob("*.json*"))):
            if isinstance(found, AlassoError):
                raise AlassoError(f"{found}; delete it, and `alasso reproduce` makes it again") from found
            results.append(found)
        probes = [probe.read(path) for path in sorted(out.glob("*.probe.json*"))]
        notes = [read_note(path) for path in sorted(out.glob(f"*{DIVERGED}"))]
        return Evidence(experiments, results, probes, notes)

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

    def probes(self, reference: str) -> dict[int, Measured]:
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
        """Whether no seed that experiments ask for is left in which all of these can come to an end."""
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


def no_seed_in_common(references: Sequence[str]) -> str:
    """
    >>> no_seed_in_common(["x/si", "x/ewc", "y/si"])
    'x/si, x/ewc and y/si have no seed in common'
    """
    return f"{', '.join(references[:-1])} and {references[-1]} have no seed in common"
