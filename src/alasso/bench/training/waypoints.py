"""Waypoints: a run of 100 tasks passes through the run of 30 that equals it in all else, which is not trained again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from alasso.bench.config import RunConfig
from alasso.bench.registry import BENCHMARKS
from alasso.bench.results import Result


@dataclass
class Waypoint:
    """A shorter run on the way of a longer one; it has its result once the longer one has come past."""

    config: RunConfig
    reference: Result | None = None  # the single-task run that its intransigence is measured against
    result: Result | None = None

    @property
    def tasks(self) -> int:
        return self.config.tasks or 0


def carriers(configs: Iterable[RunConfig]) -> dict[str, RunConfig]:
    """By name, each run that lies on the way of others of these: the longest one of those, which carries it along."""
    nested = [config for config in configs if can_be_passed_through(config)]
    longest: dict[str, RunConfig] = {}
    for config in sorted(nested, key=lambda one: one.tasks or 0):
        longest[but_for_tasks(config)] = config
    found = {config.name: longest[but_for_tasks(config)] for config in nested}
    return {name: carrier for name, carrier in found.items() if carrier.name != name}


def on_the_way(configs: Sequence[RunConfig]) -> dict[str, list[RunConfig]]:
    """The same seen from the other side: by name of the longer run, the shorter ones that it carries along."""
    carrier_of = carriers(configs)
    found: dict[str, list[RunConfig]] = {}
    for config in configs:
        if config.name in carrier_of:
            found.setdefault(carrier_of[config.name].name, []).append(config)
    return found


def can_be_passed_through(config: RunConfig) -> bool:
    benchmark = BENCHMARKS.get(config.benchmark)
    return benchmark is not None and benchmark.nested and config.tasks is not None


def but_for_tasks(config: RunConfig) -> str:
    """The same for runs that differ in nothing but how many tasks they have."""
    return replace(config, tasks=None).name
