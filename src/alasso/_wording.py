"""Numbers in sentences, and sentences that several places say."""

from __future__ import annotations


def count_of(count: int, thing: str, things: str | None = None) -> str:
    """
    >>> count_of(1, "task"), count_of(3, "task"), count_of(2, "class", "classes")
    ('1 task', '3 tasks', '2 classes')
    """
    return f"{count} {thing if count == 1 else things or thing + 's'}"


def to_install(extra: str) -> str:
    """
    >>> to_install("report")
    "pip install 'alasso[report]', in a clone pip install '.[report]'"
    """
    return f"pip install 'alasso[{extra}]', in a clone pip install '.[{extra}]'"
