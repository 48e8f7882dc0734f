"""What alasso raises and warns of."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class AlassoError(ValueError):
    """An error that the caller can fix; the message is one sentence that says what is wrong and how to fix it."""


class DivergedError(AlassoError):
    """Weights or importance became NaN or infinite."""


def warn(message: str) -> None:
    """Warn at the user's line: the nearest one outside alasso and torch.

    Args:
        message: One sentence that says what is wrong and what to do.
    """
    place: dict[str, Any] = {"stacklevel": 3}  # before Python 3.12, files cannot be skipped
    if sys.version_info >= (3, 12):
        torch = find_spec("torch")
        folders = [Path(__file__).parent, *(map(Path, torch.submodule_search_locations or ()) if torch else ())]
        place = {"skip_file_prefixes": tuple(map(str, folders))}
    warnings.warn(message, UserWarning, **place)
