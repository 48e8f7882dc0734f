"""Who calls whom: what only the interpreter's stack of frames can tell."""

from __future__ import annotations

import sys
from types import FrameType

OURS = __name__.partition(".")[0]


def is_parents_step(hooks_call: FrameType, optimizer: object) -> bool:
    """Whether torch runs the hooks of ``optimizer`` for the step() of a parent class, called within its own step()."""
    frame = hooks_call.f_back
    while frame is not None:
        if frame.f_code is hooks_call.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def users_stacklevel() -> int:
    """For a warning where this is called: the line that it is about is the nearest outside this library and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (OURS, "torch"):
        level, frame = level + 1, frame.f_back
    return level
