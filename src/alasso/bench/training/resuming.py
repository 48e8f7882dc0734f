"""What ``--resume`` finds. A checkpoint is known by its whole config: with a setting changed it is another run's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alasso.bench.config import RunConfig
from alasso.bench.labels import label
from alasso.bench.training.waypoints import carriers
from alasso.errors import AlassoError

MOST_NAMED = 4  # differing fields that a line spells out


def check(configs: Sequence[RunConfig], out: Path) -> str | None:
    """Before runs are resumed: a line on what starts anew, None if all is as it seems or was but not begun yet.

    Refused is what can only be a slip: nothing of what was asked for is here, with whatever seed, but an unfinished run
    of the same method with other settings is.
    """
    new = without_trace(configs, out)
    other = astray(new, configs, out)
    if other is None:
        return f"nothing to resume in {out}; starting" if len(new) == len(configs) else None
    if len(new) == len(configs) and not any(_was_run(config, out) for config in configs):
        what = label(other.asked) if len(configs) == 1 else f"any of these {len(configs)} runs"
        raise AlassoError(
            f"there is nothing to resume in {out} for {what}; {other}: "
            "give its settings to go on with it, or leave out --resume to start anew"
        )
    what = f"{label(other.asked)} has" if len(new) == 1 else f"{len(new)} of {len(configs)} runs have"
    return f"{what} nothing to resume in {out} and will start anew; {other}"


@dataclass(frozen=True)
class Astray:
    """A run that was to be resumed and has nothing here, and the unfinished run in the folder that is most like it."""

    asked: RunConfig
    begun: RunConfig
    others: int  # unfinished runs of this benchmark and method besides that one

    def __str__(self) -> str:
        """
        >>> asked = RunConfig.for_benchmark("permuted-digits", "si", epochs=20, c=0.5)
        >>> print(Astray(asked, RunConfig.for_benchmark("permuted-digits", "si", epochs=10, c=0.5), 1))
        of si one was begun there with epochs=10, not 20 (and 1 other)
        """
        named = [f"{name}={theirs}, not {ours}" for name, (ours, theirs) in self.asked.unlike(self.begun).items()]
        if len(named) > MOST_NAMED:
            named[MOST_NAMED:] = [f"{len(named) - MOST_NAMED} other settings"]
        others = f" (and {self.others} other{'s' if self.others > 1 else ''})" if self.others else ""
        return f"of {self.asked.method} one was begun there with {'; '.join(named)}{others}"


def without_trace(configs: Sequence[RunConfig], out: Path) -> list[RunConfig]:
    """Runs that have neither a checkpoint nor a result; one on the way of a longer one goes on with that."""
    carrier_of = carriers(configs)
    return [
        config
        for config in configs
        if not _has_trace(config, out) and not _has_trace(carrier_of.get(config.name, config), out)
    ]


def astray(new: Iterable[RunConfig], asked: Iterable[RunConfig], out: Path) -> Astray | None:
    """Of runs that have nothing here, the one that an unfinished run which was not asked for is most like."""
    wanted = {config.name for config in asked}
    found: list[Astray] = []
    begun_by_method: dict[str, list[RunConfig]] = {}
    for config in new:
        if config.method not in begun_by_method:
            begun = unfinished(config.benchmark, config.method, out)
            begun_by_method[config.method] = [other for other in begun if other.name not in wanted]
        if alike := begun_by_method[config.method]:
            nearest = min(alike, key=lambda other: (len(config.unlike(other)), other.name))
            found.append(Astray(config, nearest, len(alike) - 1))
    return min(found, key=lambda one: len(one.asked.unlike(one.begun)), default=None)


def unfinished(benchmark: str, method: str, out: Path) -> list[RunConfig]:
    """Configs of the checkpoints in a folder that have no result beside them; files that are none are left aside."""
    from alasso.bench.training import checkpoint

    paths = sorted(out.glob(f"{benchmark}_{method}_*.checkpoint"))
    found = [checkpoint.config_in(path) for path in paths if not path.with_suffix(".json").exists()]
    return [config for config in found if config is not None]


def _was_run(config: RunConfig, out: Path) -> bool:
    """Whether this very config was begun or finished here with any seed."""
    return any(out.glob(f"{config.benchmark}_{config.method}_{config.hash}_s*"))


def _has_trace(config: RunConfig, out: Path) -> bool:
    return any((out / f"{config.name}.{kind}").exists() for kind in ("checkpoint", "json"))
