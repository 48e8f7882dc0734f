"""Results that were lost come back as they were: trained again in the stack they came from, each run in its place.

On a GPU, how sums are rounded depends on how many runs are stacked, and what is drawn at random on a run's place among
them. A result names the runs of its stack; so those that are left tell of those that are not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alasso.bench.config import RunConfig
from alasso.bench.reproduce.experiments import Experiment
from alasso.bench.results import Result, device_of
from alasso.bench.training.waypoints import but_for_tasks, can_be_passed_through

NAME = re.compile(r"(?P<stem>.+)_s(?P<seed>\d+)")


@dataclass(frozen=True)
class LostStack:
    """``runs``: all of a stack, in their places; ``lost``: those whose results are missing, and shorter ones that
    these come past.
    """

    runs: tuple[RunConfig, ...]
    lost: tuple[RunConfig, ...]

    @property
    def folder(self) -> str:
        """Name of the folder that it is trained in: its own, so that it is gone on with where it was stopped."""
        names = " ".join(config.name for config in self.runs)
        return f".again-{hashlib.sha256(names.encode()).hexdigest()[:10]}"

    @property
    def configs(self) -> list[RunConfig]:
        return [*self.runs, *(config for config in self.lost if config not in self.runs)]


@dataclass(frozen=True)
class Lost:
    """``stacks`` that can be trained again; ``alone``: missing runs that were in others, of which nobody knows the
    ``unknown`` runs any more.
    """

    stacks: tuple[LostStack, ...] = ()
    alone: tuple[RunConfig, ...] = ()
    unknown: frozenset[str] = frozenset()


def lost_stacks(
    missing: Sequence[RunConfig],
    present: Iterable[Result],
    experiments: Iterable[Experiment],
    here: Callable[[], Mapping[str, Any]],
) -> Lost:
    """The stacks that missing runs were in, by what results of the same machine and versions say.

    ``here``: the environment that runs would have now; asked for only if it matters.
    """
    wanted = {config.name: config for config in missing}
    newest_first = sorted(present, key=lambda result: str(result.environment.get("finished") or ""), reverse=True)
    known = configs_by_stem([*missing, *(one.config(run) for one in experiments for run in one.runs)], newest_first)
    found: list[LostStack] = []
    broken: dict[str, set[str]] = {}  # name of a missing run → runs of its stack that are not known
    for result in newest_first:
        names, diverged = (result.environment.get(part, []) for part in ("stack", "diverged"))
        lost = [name for name in names if name in wanted and name not in diverged]
        if not lost or not found_with(result, here()):
            continue
        runs = [config for name in names if (config := config_named(name, known))]
        if len(runs) == len(names):
            found.append(LostStack(tuple(runs), tuple(wanted.pop(name) for name in lost)))
        else:
            broken |= {name: {one for one in names if not config_named(one, known)} for name in lost}
    stacks = with_shorter_ones(once_each(found), wanted.values())
    back = {config.name for stack in stacks for config in stack.lost}
    alone = [name for name in broken if name not in back]
    unknown = frozenset(one for name in alone for one in broken[name])
    return Lost(tuple(stacks), tuple(wanted[name] for name in alone), unknown)


def found_with(result: Result, environment: Mapping[str, Any]) -> bool:
    """Whether it was found on this machine, with these versions."""
    of_result = result.environment
    same_versions = all(of_result.get(key) == environment.get(key) for key in ("alasso", "torch", "cuda"))
    return same_versions and device_of(of_result) == device_of(environment)


def once_each(stacks: Iterable[LostStack]) -> list[LostStack]:
    """A stack whose results at 30 and at 100 tasks are lost is trained once: the longer runs come past the shorter."""
    by_runs: dict[tuple[str, ...], LostStack] = {}
    for stack in sorted(stacks, key=lambda stack: stack.runs[0].tasks or 0, reverse=True):
        key = tuple(but_for_tasks(c) if can_be_passed_through(c) else c.name for c in stack.runs)
        longer = by_runs.get(key)
        by_runs[key] = replace(longer, lost=longer.lost + stack.lost) if longer else stack
    return list(by_runs.values())


def with_shorter_ones(stacks: Iterable[LostStack], missing: Iterable[RunConfig]) -> list[LostStack]:
    """The stacks, and what is ``missing`` without a result that tells of it but lies on their way: it costs nothing."""
    left, found = list(missing), []
    for stack in stacks:
        passed = {but_for_tasks(run): run.tasks or 0 for run in stack.runs if can_be_passed_through(run)}
        on_the_way = [config for config in left if (config.tasks or 0) < passed.get(but_for_tasks(config), 0)]
        found.append(replace(stack, lost=stack.lost + tuple(on_the_way)))
        left = [config for config in left if config not in on_the_way]
    return found


def configs_by_stem(planned: Iterable[RunConfig], present: Iterable[Result]) -> dict[str, RunConfig]:
    """Every config that is known, at every length: a stack of runs of 100 tasks also wrote results of 30."""
    known = [*planned, *(result.config for result in present)]
    lengths = {config.tasks for config in known}
    at_lengths = [replace(config, tasks=tasks) for config in known for tasks in lengths]
    return {NAME.fullmatch(config.name)["stem"]: config for config in at_lengths}  # type: ignore[index]


def config_named(name: str, known: Mapping[str, RunConfig]) -> RunConfig | None:
    parts = NAME.fullmatch(name)
    config = known.get(parts["stem"]) if parts else None
    return replace(config, seed=int(parts["seed"])) if parts and config else None
