"""Who calls whom: what only the interpreter's stack of frames can tell."""

from __future__ import annotations

import sys
from types import FrameType

OURS = __name__.partition(".")[0]


def is_within(outer: FrameType | None, inner: FrameType | None) -> bool:
    """Whether one call was made, however deep, within another that has not ended."""
    while outer is not None and inner is not None:
        if inner is outer:
            return True
        inner = inner.f_back
    return False


def users_stacklevel() -> int:
    """For a warning where this is called: the line that it is about is the nearest outside this library and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (OURS, "torch"):
        level, frame = level + 1, frame.f_back
    return level
