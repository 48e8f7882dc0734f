"""Words of the command line made into values; a word that makes none is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from alasso.errors import AlassoError

#: Options that take several values after one flag: --seed 0 1 2
SEVERAL = ("--method", "--seed", "--set", "--log", "--only", "--skip")
#: Options of ``alasso run`` that take none.
FLAGS = ("--permute-first", "--resume", "--restart", "--quiet", "-q")


def asked_for(
    benchmark: str,
    file: Path | None,
    methods: list[str] | None,
    seeds: list[int] | None,
    fields: dict[str, Any],
    settings: dict[str, list[str]],
    chosen: dict[str, dict[str, Any]],
) -> list[Any]:
    """The configs of a command line; what it leaves open comes from the file, from what a search chose, then from the
    benchmark's preset.
    """
    from alasso.bench.config import from_toml
    from alasso.bench.training import sweep as runs

    from_file, file_settings = from_toml(file) if file else ({}, {})
    if from_file.pop("benchmark", benchmark) != benchmark:
        raise AlassoError(f"{file} is for another benchmark than {benchmark}")
    file_methods = [str(name) for name in listed(from_file.pop("method", "alasso"))]
    file_seeds = listed(from_file.pop("seed", 0))
    of_line = settings
    settings = {name: listed(value) for name, value in file_settings.items()} | settings
    for name, values in {**settings, "method": file_methods, "seed": file_seeds}.items():
        if not values:
            raise AlassoError(f"{file}: {name} is an empty list")
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return runs.combinations(
            benchmark, methods or file_methods, seeds or file_seeds, from_file | given, settings, chosen
        )
    except AlassoError as error:
        on_the_line = {name: values for name, values in settings.items() if name in of_line}
        without_file = partial(runs.combinations, benchmark, methods or ["alasso"], seeds or [0], given, on_the_line)
        if file is None or _refusal_of(without_file) == str(error):
            raise
        raise AlassoError(f"{file}: {error}") from error


def _refusal_of(make: Callable[[], object]) -> str | None:
    try:
        make()
    except AlassoError as error:
        return str(error)
    return None


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def parsed_settings(words: Sequence[str]) -> dict[str, list[str]]:
    """``["a=1,2", "c=1"]`` → ``{"a": ["1", "2"], "c": ["1"]}``"""
    settings: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name or not values:
            raise AlassoError(f"--set takes name=value or name=value,value, not {word!r}")
        if name in settings:
            raise AlassoError(f"--set has {name} twice; several values go in one: {name}=1,2")
        settings[name] = values.split(",")
    return settings


def refuse_given_twice(options: dict[str, Any], settings: dict[str, list[str]]) -> None:
    """One of two values would be dropped without a word."""
    for name in settings:
        if options.get(name) is not None:
            option = {"path": "PATH", "learning_rate": "--lr"}.get(name, f"--{name.replace('_', '-')}")
            raise AlassoError(f"{name} is given by {option} and by --set: give it once")


def refuse_value_of_flag(words: Sequence[str], path: Path | None) -> None:
    """A word behind a flag is taken for the PATH that only images of one's own have."""
    for flag, word in pairwise(words):
        if path is not None and flag in FLAGS and Path(word) == path:
            raise AlassoError(f"{flag} takes no value: leave out {word!r}")


def not_for_all(configs: Sequence[Any], settings: dict[str, list[str]]) -> list[str]:
    """Lines on settings that only some of the methods have; the others are run without them."""
    lines = []
    for name in settings:
        lacking = dict.fromkeys(c.method for c in configs if name not in c.settings and not hasattr(c, name))
        if lacking:
            lines.append(f"{name} is no setting of {', '.join(lacking)}: run without it")
    return lines


def checked_interval(seconds: float) -> float:
    if not seconds > 0:
        raise AlassoError(f"--checkpoint-every takes a number of seconds above 0, not {seconds:g}")
    return seconds


def checked_logs(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in ("csv", "tensorboard"):
            raise AlassoError(f"--log takes csv or tensorboard, not {name!r}")
    return tuple(names)


def spread_values(words: Sequence[str]) -> list[str]:
    """``--seed 0 1 2`` → ``--seed 0 --seed 1 --seed 2``: what people type, in the form the parser takes.

    >>> spread_values(["run", "x", "--seed", "0", "1", "-q"])
    ['run', 'x', '--seed', '0', '--seed', '1', '-q']

    A flag without any value stays as it is, for the parser to refuse.

    >>> spread_values(["run", "x", "--seed"])
    ['run', 'x', '--seed']

    Values with commas between them are refused, except of --set, where they belong to one setting.
    """
    if words[:1] == ["demo"]:  # which has one seed
        return list(words)
    spread: list[str] = []
    flag = None
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():  # --seed -1 is a mistake of another kind
            flag = word if word in SEVERAL else None
            refuse_commas(*word.partition("=")[::2])
            spread.append(word)
        elif flag is not None:
            refuse_commas(flag, word)
            spread += [word] if spread[-1] == flag else [flag, word]
        else:
            spread.append(word)
    return spread


def refuse_commas(flag: str, word: str) -> None:
    values = [value.strip() for value in word.split(",") if value.strip()]
    if flag in SEVERAL and flag != "--set" and "," in word and values:
        raise AlassoError(f"{flag} takes its values with spaces between them: {flag} {' '.join(values)}")
