"""What files may hold: one schema for each kind of file, checked before anything else looks at the content.

A *check* takes a value and what to call it, and raises AlassoError where the value is none of its kind. Files come from
strangers and from broken disks: sizes, depth, numbers and names are bounded before they are used.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from alasso.errors import AlassoError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Check = Callable[[Any, str], None]

MOST_BYTES = 256 << 20  # of a file, unpacked; a result of 5,000 tasks has as many
MOST_OF_TOML = 1 << 20  # such files are written by hand
MOST_DOTS = 100  # on a line of TOML: its reader takes the square of a dotted key's length
MOST_TEXT = 100_000  # letters of one text
DEEPEST = 24  # levels of lists and tables inside each other
LARGEST = 3.4e38  # what is more is infinite in float32
LARGEST_WHOLE = 2**63 - 1
MOST_RUNS = 10_000  # that one command plans


# -- reading ------------------------------------------------------------------------------------------------------


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Reads a file, compressed (``.xz``) or not.

    Args:
        path: The file.
        most: Bytes that it may have, unpacked.

    Returns:
        Its text.

    Raises:
        AlassoError: It cannot be read, is too large or damaged.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(most + 1)
        if path.suffix == ".xz":
            content = _unpacked(content, most)
        if len(content) > most:
            raise AlassoError(f"{path} has more than {most >> 20} MB; no file of alasso is so large")
        return content.decode()
    except OSError as error:
        raise AlassoError(f"{path} cannot be read: {error.strerror or error}") from error
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise AlassoError(f"{path} is damaged or not a result file") from error


def _unpacked(content: bytes, most: int) -> bytes:
    """The content of an xz file as far as one byte above ``most``."""
    found = b""
    while content and len(found) <= most:
        stream = lzma.LZMADecompressor(memlimit=most)
        found += stream.decompress(content, max_length=most + 1 - len(found))
        if not stream.eof and len(found) <= most:
            raise EOFError
        content = stream.unused_data
    return found


def from_json(text: str) -> Any:
    """Parses JSON.

    Args:
        text: The text.

    Returns:
        What it holds; lists, tables, text and numbers that are not out of all bounds.

    Raises:
        AlassoError: It is no JSON, or has something twice, too deep, too large or not finite.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        raise AlassoError("is not a whole JSON file") from error
    except RecursionError as error:
        raise AlassoError(f"has more than {DEEPEST} levels inside each other") from error
    except AlassoError:
        raise
    except ValueError as error:  # Python reads no number of more than 4,300 digits
        raise AlassoError("has a number of thousands of digits") from error
    check_bounds(found)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise AlassoError(f"says {shown(twice)} twice")
    return found


def _not_finite(word: str) -> Any:
    raise AlassoError(f"has {word} for a number")


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Args:
        path: The file.

    Returns:
        What it holds, as :func:`from_json` does.

    Raises:
        AlassoError: It cannot be read; one sentence says why.
    """
    text = read_text(path, MOST_OF_TOML)
    try:
        for number, line in enumerate(text.splitlines(), 1):
            if line.count(".") > MOST_DOTS:
                raise AlassoError(f"line {number} has more than {MOST_DOTS} dots; break it into several lines")
        found: dict[str, Any] = tomllib.loads(text)
        check_bounds(found)
    except tomllib.TOMLDecodeError as error:
        raise AlassoError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise AlassoError(f"{path} has more than {DEEPEST} levels inside each other") from error
    except AlassoError as error:
        raise AlassoError(f"{path}: {error}") from error
    except ValueError as error:  # as in from_json, and dates that there are not
        raise AlassoError(f"{path} is not valid TOML: {shown(str(error))}") from error
    return found


def check_bounds(content: Any) -> None:
    """Refuses numbers, text and depth that nothing here has a use for."""
    left = [(content, 0)]
    while left:
        value, depth = left.pop()
        if depth > DEEPEST:
            raise AlassoError(f"has more than {DEEPEST} levels inside each other")
        if isinstance(value, dict):
            left += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            if set(map(type, value)) != {float} or not all(map(math.isfinite, value)):
                left += [(item, depth + 1) for item in value]
        elif isinstance(value, str):
            if len(value) > MOST_TEXT or (not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value)):
                raise AlassoError("has a text that is too long or no Unicode")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise AlassoError("has a number that is not finite")
        elif isinstance(value, int):  # and booleans
            if abs(value) > LARGEST_WHOLE:
                raise AlassoError("has a number beyond 2⁶³")
        elif value is not None:
            raise AlassoError("has a date or time where no date belongs")


def shown(value: object) -> str:
    """A value in a message: short, and on one line.

    >>> shown("a\\nb"), shown(10**5000), shown("x" * 99)
    ("'a\\\\nb'", 'a number of more than 40 digits', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…")
    """
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    try:
        said = " ".join(repr(value[:200] if isinstance(value, str | bytes) else value).split())
    except Exception:  # what another library's object raises, or one that is nested too deeply
        said = f"a {type(value).__name__}"
    return said if len(said) <= 64 else said[:63] + "…"


# -- checks -------------------------------------------------------------------------------------------------------


def _refuse(name: str, wanted: str, value: object) -> None:
    raise AlassoError(f"{name} must be {wanted}, not {shown(value)}")


def number(least: float = -LARGEST, most: float = LARGEST) -> Check:
    """A number between two others."""
    wanted = "a number" if (least, most) == (-LARGEST, LARGEST) else f"a number from {least:g} to {most:g}"

    def check(value: Any, name: str) -> None:
        if type(value) not in (int, float) or not least <= value <= most:
            _refuse(name, wanted, value)

    return check


def whole(least: int, most: int = LARGEST_WHOLE) -> Check:
    """A whole number between two others."""
    wanted = f"a whole number from {least} " + ("on" if most == LARGEST_WHOLE else f"to {most}")

    def check(value: Any, name: str) -> None:
        if type(value) is not int or not least <= value <= most:
            _refuse(name, wanted, value)

    return check


def numbers(least: float = -LARGEST, most: float = LARGEST) -> Check:
    """A list of numbers; quick with many."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
            _refuse(name, "a list of numbers", value)
        if value and not (least <= min(value) and max(value) <= most):
            odd = next(one for one in value if not least <= one <= most)
            raise AlassoError(f"{name} must have numbers from {least:g} to {most:g}, not {shown(odd)}")

    return check


def one_of(wanted: str, *kinds: type) -> Check:
    """A value of one of these types, none derived from them: True is no number."""

    def check(value: Any, name: str) -> None:
        if type(value) not in kinds:
            _refuse(name, wanted, value)

    return check


def or_none(other: Check) -> Check:
    """Null, or what the other check takes."""
    return lambda value, name: None if value is None else other(value, name)


def listed(item: Check) -> Check:
    """A list of such items."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, list):
            _refuse(name, "a list", value)
        for place, one in enumerate(value, 1):
            item(one, f"{name}[{place}]")

    return check


def mapped(item: Check) -> Check:
    """A table of such items by any names."""

    def check(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            _refuse(name, "a table", value)
        for key, one in value.items():
            item(one, f"{name}.{key:.60}")

    return check


def table(needed: Mapping[str, Check], others: Mapping[str, Check] | None = None, rest: Check | None = None) -> Check:
    """A table with these names.

    Args:
        needed: Names that it has.
        others: Names that it may have.
        rest: What stands under any other name; None: there is no other name.

    Returns:
        The check.
    """
    known = {**needed, **(others or {})}

    def check(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            _refuse(name, "a table", value)
        before = f"{name}." if name else ""
        if rest is None and (unknown := [key for key in value if key not in known]):
            raise AlassoError(f"{name or 'it'} has a field that there is not: {shown(unknown[0])}")
        if lacking := [key for key in needed if key not in value]:
            raise AlassoError(f"{name or 'it'} lacks {', '.join(lacking)}")
        for key, one in value.items():
            known.get(key, rest or ANYTHING)(one, f"{before}{key:.60}")

    return check


TEXT = one_of("text", str)
FLAG = one_of("true or false", bool)
SCALAR = one_of("a number, text, true or false", int, float, str, bool)
ANYTHING: Check = lambda value, name: None  # noqa: E731 - within the bounds of every file
TABLE = mapped(ANYTHING)
SHARES = numbers(0, 1)


# -- kinds of files -----------------------------------------------------------------------------------------------

#: Every config is checked by RunConfig besides, which knows its fields.
RESULT = table(
    {
        "schema": whole(1),
        "config": TABLE,
        "environment": TABLE,
        "data": mapped(TEXT),
        "accuracy": listed(SHARES),
        "ahead": SHARES,
        "untrained": SHARES,
        "metrics": table(dict.fromkeys(("A", "F", "I", "std"), or_none(number(-1, 1))), rest=or_none(number())),
        "seconds": number(0),
        "peak_memory": or_none(number(0, LARGEST_WHOLE)),
    }
)
NOTE = table({"config": TABLE, "task": whole(1), "why": TEXT}, {"environment": TABLE})
PROBE = table(
    {
        "config": TABLE,
        "plan": TABLE,
        "seconds": number(0),
        "accuracy": number(0, 1),
        "offsets": numbers(),
        "weights": listed(TEXT),
        "losses": listed(numbers()),
        "importance": numbers(),
        "came_from": numbers(),
        "springs": listed(numbers()),
        "environment": TABLE,
        "examples": whole(1),
    }
)
_TRIED = table({"A": number(0, 1), "A_of_seeds": SHARES}, rest=SCALAR)
_SEARCHED = table(
    {
        "space": mapped(listed(SCALAR)),
        "tried": listed(_TRIED),
        "run": TABLE,
        "seeds": listed(whole(0)),
        "environment": TABLE,
    },
    {"diverged": TEXT, "stopped_early": whole(0), "earlier": listed(TABLE)},
)
SEARCH = table(
    {"schema": whole(1), "benchmark": TEXT, "chosen": mapped(mapped(SCALAR))},
    {"measured_on": TEXT, "methods": mapped(_SEARCHED)},
)
EXPERIMENT = table(
    {"title": TEXT, "benchmark": TEXT, "runs": mapped(mapped(SCALAR))},
    {
        "paper": TEXT,
        "seeds": whole(1, MOST_RUNS),
        "cost": TEXT,
        "fields": mapped(SCALAR),
        "probe": mapped(SCALAR),
        "order": whole(-MOST_RUNS, MOST_RUNS),
    },
)
CLAIM = table(
    dict.fromkeys(("id", "topic", "where", "says", "why", "how"), TEXT),
    {
        "paper": one_of("a number or text", int, float, str),
        "at_least": number(),
        "at_most": number(),
        "note": TEXT,
        "counted": FLAG,
    },
    rest=ANYTHING,
)
CLAIMS = table({}, {"claim": listed(TABLE), "untested": listed(table(dict.fromkeys(("where", "says", "why"), TEXT)))})
_VALUES = one_of("a number, text, or a list of these", int, float, str, bool, list)
RUN = table({}, {"settings": mapped(_VALUES)}, ANYTHING)
