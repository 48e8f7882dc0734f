"""Intransigence: which run the others are measured against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from alasso.bench import metrics
from alasso.bench.config import FIELDS, RunConfig
from alasso.bench.labels import label
from alasso.bench.results import Result
from alasso.errors import AlassoError

NOT_THE_STREAM = ("method", "settings", "reset_optimizer", "memory", "memory_share")


def check_reference(reference: Result, configs: Iterable[RunConfig]) -> None:
    """Refuse, before anything is run, what intransigence cannot be measured against."""
    if reference.config.method != "single-task":
        raise AlassoError(f"intransigence is measured against a single-task run, not one of {reference.config.method}")
    for config in configs:
        # Another seed is another stream of the same kind; all else has to be the same.
        theirs = replace(reference.config, seed=config.seed)
        if not same_stream(config, theirs):
            name = stream_differences(config, theirs)[0]
            ours = getattr(config, name)
            raise AlassoError(f"the reference run has {name}={getattr(theirs, name)}, {label(config)} has {ours}")


def other_seed(reference: Result, configs: Iterable[RunConfig]) -> str | None:
    """What is to be said of a reference that learned other tasks of the same kind; None where all learned the same."""
    theirs = reference.config.seed
    others = sorted({config.seed for config in configs} - {theirs})
    if not others:
        return None
    return (
        f"I of seed {', '.join(map(str, others))} is against a reference of seed {theirs}: other tasks of the same kind"
    )


def with_intransigence(result: Result, found: Sequence[Result]) -> Result:
    """With I filled in, if a single-task run on the same stream is among those found."""
    if result.metrics["I"] is not None:
        return result
    for other in found:
        if other.config.method == "single-task" and same_stream(other.config, result.config):
            measured = metrics.intransigence(result.accuracy, other.accuracy)
            return replace(result, metrics={**result.metrics, "I": measured})
    return result


def same_stream(one: RunConfig, other: RunConfig) -> bool:
    """Whether two runs learned the same tasks with the same network and effort."""
    return not stream_differences(one, other)


def stream_differences(one: RunConfig, other: RunConfig) -> list[str]:
    return [name for name in FIELDS if name not in NOT_THE_STREAM and getattr(one, name) != getattr(other, name)]
