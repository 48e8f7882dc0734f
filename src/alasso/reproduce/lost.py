"""Results that were lost come back as they were: trained again in the stack they came from, each run in its place.

On a GPU, how sums are rounded depends on how many runs are stacked, and what is drawn at random on a run's place among
them. A result names the runs of its stack; so those that are left tell of those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alasso.bench.config import RunConfig
from alasso.bench.results import Result
from alasso.reproduce.experiments import Experiment


@dataclass(frozen=True)
class LostStack:
    """``runs``: all of a stack, in their places; ``lost``: those of them whose results are missing."""

    runs: tuple[RunConfig, ...]
    lost: tuple[RunConfig, ...]


def lost_stacks(
    missing: Sequence[RunConfig],
    present: Iterable[Result],
    experiments: Iterable[Experiment],
    here: Callable[[], Mapping[str, Any]],
) -> list[LostStack]:
    """The stacks that missing runs were in, by what results of the same machine and versions say.

    ``here``: the environment that runs would have now; asked for only if it matters.
    """
    wanted = {config.name: config for config in missing}
    present = sorted(present, key=lambda result: str(result.environment.get("finished")), reverse=True)
    there = {result.name for result in present}
    known = configs_by_stem([*missing, *(one.config(run) for one in experiments for run in one.runs)], present)
    found: list[LostStack] = []
    for result in present:
        names = result.environment.get("stack", ())
        lost = [name for name in names if name in wanted]
        if not lost or not are_lost(result, there) or not is_of(result, here()):
            continue
        runs = [named(name, known) for name in names]
        if all(runs):
            found.append(LostStack(tuple(run for run in runs if run), tuple(wanted.pop(name) for name in lost)))
    return found


def are_lost(result: Result, there: set[str]) -> bool:
    """Whether more of its stack's results are missing than runs had left the stack at its end, having diverged."""
    names = result.environment["stack"]
    missing = sum(name not in there for name in names)
    return missing > len(names) - int(result.environment["lanes"])


def is_of(result: Result, environment: Mapping[str, Any]) -> bool:
    """Whether it was found on this machine, with these versions."""
    return all(result.environment.get(key) == environment.get(key) for key in ("alasso", "torch", "cuda")) and (
        device_of(result.environment) == device_of(environment)
    )


def device_of(environment: Mapping[str, Any]) -> str:
    return str(environment.get("gpu") or environment.get("cpu"))


def configs_by_stem(planned: Iterable[RunConfig], present: Iterable[Result]) -> dict[str, RunConfig]:
    """Every config that is known, at every length: a stack of runs of 100 tasks also wrote results of 30."""
    known = [*planned, *(result.config for result in present)]
    lengths = {config.tasks for config in known}
    return {stem(config.name): config for one in known for config in (replace(one, tasks=n) for n in lengths)}


def stem(name: str) -> str:
    """
    >>> stem("permuted-digits_si_0123456789_s12")
    'permuted-digits_si_0123456789'
    """
    return name.rpartition("_s")[0]


def named(name: str, known: Mapping[str, RunConfig]) -> RunConfig | None:
    config = known.get(stem(name))
    return config and replace(config, seed=int(name.rpartition("_s")[2]))
