"""Files that are whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write beside ``path``, bring it to the disk, then put it in place at once. What was there stays until then.

    Yields:
        The stream to write to.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # of a name that nobody else has
    try:
        with part.open("xb") as stream:  # which follows no link
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk, where the system can: a new name may be lost with the power otherwise."""
    with suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
