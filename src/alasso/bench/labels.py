"""Runs in words: what they are called, and what tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alasso.bench.config import RunConfig
from alasso.errors import AlassoError

MOST_NAMED = 2  # settings that a sweep's runs are named by, be they as usual or not; of more, those that are not


def count_of(count: int, thing: str, things: str | None = None) -> str:
    """
    >>> count_of(1, "task"), count_of(3, "task"), count_of(2, "class", "classes")
    ('1 task', '3 tasks', '2 classes')
    """
    return f"{count} {thing if count == 1 else things or thing + 's'}"


def label(config: RunConfig, varying: Sequence[str] = ()) -> str:
    """A run in a few words; ``varying`` names what it differs in from others of its method."""
    return ", ".join([" ".join([config.method, *_differences(config, varying)]), f"seed {config.seed}"])


def _differences(config: RunConfig, varying: Sequence[str]) -> list[str]:
    known = {**config.values(), **config.settings}
    named = [name for name in varying if name in known]
    if len(varying) > MOST_NAMED:
        usual = usual_values(config)
        named = [name for name in named if name not in usual or usual[name] != known[name]]
    return [f"{name}={known[name]}" for name in named]


def usual_values(config: RunConfig) -> dict[str, Any]:
    """Fields and settings that the benchmark has for the method; none where that is not known."""
    try:
        usual = RunConfig.for_benchmark(config.benchmark, config.method, path=config.path)
    except AlassoError:  # another benchmark or method, or one that needs another network
        return {}
    return {**usual.values(), **usual.settings}


def varying_settings(configs: Sequence[RunConfig]) -> list[str]:
    """Settings and fields in which rows of one method differ."""
    varying: list[str] = []
    for method in dict.fromkeys(config.method for config in configs):  # columns in the same order every time
        of_method = [c for c in configs if c.method == method]
        names = [*of_method[0].settings, *(n for n in RunConfig.field_names() if n not in ("settings", "seed"))]
        varying += [n for n in names if n not in varying and len({repr(value_of(c, n)) for c in of_method}) > 1]
    return varying


def value_of(config: RunConfig, name: str) -> Any:
    return config.settings.get(name, getattr(config, name, "–"))
