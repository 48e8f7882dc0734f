"""Numbers in sentences, and sentences that several places say."""

from __future__ import annotations


def count_of(count: int, thing: str, things: str | None = None) -> str:
    """
    >>> count_of(1, "task"), count_of(3, "task"), count_of(2, "class", "classes")
    ('1 task', '3 tasks', '2 classes')
    """
    return f"{count} {thing if count == 1 else things or thing + 's'}"
