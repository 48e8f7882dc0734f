"""A small search, on held-out training examples, whose outcome is a file: what was tried, what was chosen.
``alasso run --settings FILE`` and :func:`chosen_settings` read it. It tries a grid, climbs in the strength as
:func:`alasso.tune` does, or asks Optuna.

The paper says that each method uses settings optimised for itself. The search never sees the test examples: a sixth of
each task's training examples is held out and measured on instead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from alasso._tune import Trial, strength_among
from alasso._tune import climb as uphill
from alasso.bench import results, schema
from alasso.bench.config import RunConfig, count_of, known, other_setting
from alasso.bench.io import check_file, write_whole
from alasso.bench.registry import BENCHMARKS, METHODS, with_memory
from alasso.bench.results import Result
from alasso.bench.training import sweep
from alasso.bench.training.trials import search_by_trials
from alasso.errors import AlassoError

SCHEMA = 1
HELD_OUT = {"validation": True}


def search(
    benchmark: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    fields: dict[str, Any],
    options: sweep.Options,
    file: Path,
    console: Console,
    values: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    climb: int | None = None,
    tpe: int | None = None,
) -> dict[str, Any]:
    """Tries every combination of each method's values, climbs in its strength, or asks Optuna.

    Methods not named keep what ``file`` says of them, and so do those named, of values that are not tried again, if the
    search was the same in all else.

    Args:
        benchmark: Name of the benchmark.
        methods: Names of the methods.
        seeds: Seeds to take the mean over.
        fields: Fields of all runs.
        options: Where and how to train.
        file: The outcome; added to if it is there.
        console: Shows progress.
        values: Values to try of some settings, in place of those that a method's own search has.
        climb: How many strengths to try at most, each next to the best so far, in place of a grid.
        tpe: How many trials Optuna's TPE may suggest, between the values, in place of a grid.

    Returns:
        The outcome.

    Raises:
        AlassoError: Something asked for does not fit, or all runs of a method diverged.
    """
    check_file(file)
    outcome = _read(file, benchmark)
    methods, seeds = list(dict.fromkeys(methods)), list(dict.fromkeys(seeds))
    _refuse_unknown(benchmark, methods, values)
    spaces = {method: _strength(method) if climb else _space(method, values) for method in methods}

    def configs_of(method: str, space: Mapping[str, Sequence[Any]]) -> list[RunConfig]:
        return sweep.combinations(benchmark, [method], seeds, {**fields, **HELD_OUT}, dict(space))

    def searched(method: str, space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        return _searched(configs_of(method, space), list(spaces[method]), seeds, options, console)

    for method in methods:  # before anything is run
        configs_of(method, {} if climb else spaces[method])

    def asked(method: str, space: Mapping[str, Sequence[Any]], trials: int) -> dict[str, Any]:
        whole = configs_of(method, space)
        typed = {name: list(dict.fromkeys(config.settings[name] for config in whole)) for name in space}
        preset = configs_of(method, {})[0].settings
        configs, notes = search_by_trials(typed, preset, partial(configs_of, method), trials, options, console)
        if not configs:
            return {"tried": [], **notes}
        return {**_searched(configs, list(space), seeds, replace(options, quiet=True), console), **notes}

    without: list[str] = []
    for method, space in spaces.items():
        if climb:
            found = _climbed(searched, method, next(iter(space)), climb)
        else:
            found = asked(method, space, tpe) if tpe else searched(method, space)
        if not found["tried"]:
            without.append(f"{method} diverged with all of its settings: {found.get('diverged')}")
            continue
        if before := outcome["methods"].get(method):
            if _alike(before, found):
                found = _with_earlier(before, found)
            else:
                said = f"{method}: what {file} said of it, from a search on other tasks, seeds or settings, is replaced"
                console.print(said, highlight=False, soft_wrap=True)
        outcome["methods"][method] = found
        outcome["chosen"][method] = {name: found["tried"][0][name] for name in found["space"]}
        write_whole(file, (results.as_text(outcome) + "\n").encode())
    if without:
        raise AlassoError(" | ".join(without))
    return outcome


def grid(
    benchmark: str,
    methods: Sequence[str],
    seeds: Sequence[int],
    fields: Mapping[str, Any],
    values: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> list[RunConfig]:
    """Makes the runs of a search: every combination of each method's values, with every seed.

    Args:
        benchmark: Name of the benchmark.
        methods: Names of the methods.
        seeds: Seeds.
        fields: Fields of all runs.
        values: Values of some settings, in place of those that a method's own search has.

    Returns:
        The configs.

    Raises:
        AlassoError: Something asked for does not fit.
    """
    _refuse_unknown(benchmark, methods, values)
    spaces = {method: _space(method, values) for method in methods}
    measured = {**fields, **HELD_OUT}
    return [c for name, space in spaces.items() for c in sweep.combinations(benchmark, [name], seeds, measured, space)]


def _refuse_unknown(benchmark: str, methods: Sequence[str], values: Mapping[str, Sequence[Any]]) -> None:
    if benchmark == "split-folder":
        raise AlassoError("there is no search on split-folder; alasso run split-folder PATH --set a=1,2 tries values")
    known(benchmark, BENCHMARKS, "benchmark")
    for method in methods:
        known(method, METHODS, "method")
    settings = sorted({name for method in methods for name in METHODS[method].settings})
    for name in values:
        if name not in settings:
            who = f"{methods[0]} has no" if len(methods) == 1 else f"none of {', '.join(methods)} has a"
            raise AlassoError(
                f"{who} setting {name!r}{other_setting(name, settings)}; a search tries settings of methods"
            )


def _space(method: str, values: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The values to try of each setting: the method's own, and what was asked for in place of them or besides."""
    asked = {name: tried for name, tried in values.items() if name in METHODS[method].settings}
    if not (space := {**METHODS[method].search, **asked}):
        raise AlassoError(f"{method} has no settings to search for")
    return {name: list(tried) for name, tried in space.items()}


def _strength(method: str) -> dict[str, list[Any]]:
    """The method's strength, with no values."""
    return {strength_among(method, METHODS[method].settings): []}


def _climbed(
    searched: Callable[[str, Mapping[str, Sequence[Any]]], dict[str, Any]], method: str, name: str, most: int
) -> dict[str, Any]:
    """What was tried for one method on a climb in its strength from the preset."""
    found = searched(method, {})
    first = found["space"][name][0]
    values = [first]

    def trained(strength: float) -> Trial:
        nonlocal found
        values.append(float(f"{strength:.3g}"))
        found = searched(method, {name: values})
        return Trial(values[-1], _score(found, name, values[-1]), ())

    uphill([Trial(first, _score(found, name, first), ())], trained, most)
    return found


def _score(found: Mapping[str, Any], name: str, value: float) -> float:
    return max((row["A"] for row in found["tried"] if row[name] == value), default=-math.inf)


def _searched(
    configs: Sequence[RunConfig], names: Sequence[str], seeds: Sequence[int], options: sweep.Options, console: Console
) -> dict[str, Any]:
    """What was tried for one method, the best first. Settings of which a seed diverged are none to choose from."""
    found, diverged = _carried_out(configs, options, console)
    whole = [row for row in _grouped(found, names) if len(row["A_of_seeds"]) == len(set(seeds))]
    return {
        "space": {name: list(dict.fromkeys(config.settings[name] for config in configs)) for name in names},
        "tried": sorted(whole, key=lambda row: -row["A"]),
        "run": {k: v for k, v in configs[0].to_json().items() if k not in ("settings", "seed", "method")},
        "seeds": list(seeds),
        "environment": found[0].environment if found else {},
        **({"diverged": diverged} if diverged else {}),
    }


def _alike(before: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether two searches of a method can be taken together: the same settings, tried on the same tasks and seeds."""
    names = [sorted(search.get("space", ())) for search in (before, found)]
    return names[0] == names[1] and all(before.get(part) == found[part] for part in ("run", "seeds"))


def _with_earlier(before: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Both searches as one; of what was tried in both, the later one counts."""
    names = list(found["space"])
    again = [[row[name] for name in names] for row in found["tried"]]
    kept = [row for row in before["tried"] if [row[name] for name in names] not in again]
    if not kept:
        return dict(found)
    said = [search["diverged"] for search in (before, found) if "diverged" in search]
    return {
        **found,
        "space": {name: _all_values(before["space"][name], found["space"][name]) for name in names},
        "tried": sorted([*kept, *found["tried"]], key=lambda row: -row["A"]),
        "earlier": [*before.get("earlier", []), before["environment"]],
        **({"diverged": "; ".join(dict.fromkeys(said))} if said else {}),
    }


def _all_values(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    values = list(dict.fromkeys([*one, *other]))
    return values if any(isinstance(value, bool | str) for value in values) else sorted(values)


def _carried_out(
    configs: Sequence[RunConfig], options: sweep.Options, console: Console
) -> tuple[list[Result], str | None]:
    """What the runs found, and which of them diverged; a search leaves those settings out."""
    try:
        return sweep.carry_out(configs, options, console), None
    except sweep.SomeDiverged as error:
        return error.finished, error.which


def chosen_settings(file: Path, benchmark: str) -> dict[str, dict[str, Any]]:
    """Reads what a search chose.

    Args:
        file: The outcome of :func:`search`.
        benchmark: The benchmark that it must be of.

    Returns:
        Settings by method.

    Raises:
        AlassoError: There is no such file, or it is not the outcome of a search on this benchmark.
    """
    if not file.exists():
        raise AlassoError(f"there is no file {file}; alasso search {benchmark} --file {file} writes one")
    return with_memory(_read(file, benchmark)["chosen"])


def chosen_line(outcome: dict[str, Any], method: str) -> str:
    """What was chosen, how good it was, and whether something better may lie beyond what was tried.

    >>> tried = [{"c": 4.0, "A": 0.9}, {"c": 2.0, "A": 0.8}, {"c": 1.0, "A": 0.7}]
    >>> searched = {"tried": tried, "space": {"c": [1.0, 2.0, 4.0]}}
    >>> chosen_line({"chosen": {"si": {"c": 4.0}}, "methods": {"si": searched}}, "si")
    'si: c=4.0, A = 0.900 on held-out examples (c: the largest tried)'
    """
    chosen, searched = outcome["chosen"][method], outcome["methods"][method]
    tried, space = searched["tried"], searched["space"]
    ties = sum(row["A"] == tried[0]["A"] for row in tried)
    notes = [f"as good as {count_of(ties - 1, 'other')} of {len(tried)} tried"] if ties > 1 else []
    if ties < len(tried):
        notes += [f"{name}: the {which} tried" for name in chosen for which in edge(chosen[name], space[name])]
    values = " ".join(f"{name}={value}" for name, value in chosen.items())
    at_edge = f" ({', '.join(notes)})" if notes else ""
    stopped = f"; {count_of(n, 'trial')} stopped early" if (n := searched.get("stopped_early")) else ""
    left_out = f"; left out: {searched['diverged']}" if "diverged" in searched else ""
    return f"{method}: {values}, A = {tried[0]['A']:.3f} on held-out examples{at_edge}{stopped}{left_out}"


def edge(value: Any, tried: Sequence[Any]) -> list[str]:
    """Whether a number is the largest or smallest of several."""
    if isinstance(value, bool | str) or len(set(tried)) < 2:
        return []
    return [which for which, end in (("smallest", min(tried)), ("largest", max(tried))) if value == end]


def _grouped(found: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each combination of values: mean A over seeds, and A of each seed."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in found:
        groups.setdefault(tuple(result.config.settings[name] for name in names), []).append(result)
    return [
        {
            **dict(zip(names, values, strict=True)),
            "A": round(statistics.fmean(float(r.metrics["A"] or 0) for r in group), 5),
            "A_of_seeds": [round(float(r.metrics["A"] or 0), 5) for r in group],
        }
        for values, group in groups.items()
    ]


def _read(file: Path, benchmark: str) -> dict[str, Any]:
    outcome: dict[str, Any]
    if not file.exists():
        return {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "measured_on": "a sixth of each task's training examples, held out; the test examples were not used",
            "chosen": {},
            "methods": {},
        }
    text = schema.read_text(file)
    try:
        outcome = schema.from_json(text)
        schema.SEARCH(outcome, "")
        for method, searched in outcome.setdefault("methods", {}).items():
            if lacking := [name for row in searched["tried"] for name in searched["space"] if name not in row]:
                raise AlassoError(f"what was tried for {method:.60} lacks {lacking[0]:.60}")
    except AlassoError as error:
        raise AlassoError(f"{file} is not the outcome of a search on {benchmark}: {error}") from error
    if outcome["schema"] != SCHEMA or outcome["benchmark"] != benchmark:
        raise AlassoError(f"{file} is not the outcome of a search on {benchmark}")
    for method, name in [(method, name) for method, chosen in outcome["chosen"].items() for name in chosen]:
        if name not in known(method, METHODS, f"method in {file}:").settings:
            raise AlassoError(
                f"{file}: {method} has no setting {name!r}{other_setting(name, METHODS[method].settings)}"
            )
    return outcome
