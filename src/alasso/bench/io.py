"""Writing files so that they are whole or not there at all, and saying plainly when the disk refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from alasso.errors import AlassoError


@contextmanager
def disk_errors_as_advice(path: Path) -> Iterator[None]:
    """One sentence in place of an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "the disk is full; free some space, or choose another folder"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "no permission to write there; choose another folder"
        else:
            advice = f"{error.strerror or error}; choose another place"
        raise AlassoError(f"cannot write to {path}: {advice}") from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write beside ``path``, then put it in place at once. What was there stays until then."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with disk_errors_as_advice(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """The file with this content, whole or as it was before."""
    with whole_file(path) as stream:
        stream.write(content)


def check_file(path: Path, *endings: str) -> None:
    """Whether this file can be written, and has a name that says what it is: lest a slip writes over something else.

    To be found out before the work whose outcome the file is to hold.
    """
    if path.is_dir():
        raise AlassoError(f"{path} is a folder; name a file to write")
    if endings and path.suffix.lower() not in endings:
        raise AlassoError(f"{path} is no name for what is to be written there; end it in {endings[0]}")
    check_writable(path.parent, named=path)


def check_writable(folder: Path, named: Path | None = None) -> None:
    """Whether the folder, or the one it would be made in, takes files; found out before work that is to end there.

    ``named``: what a refusal names, if not the folder.
    """
    with disk_errors_as_advice(named or folder):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        probe = there / ".alasso-can-write"
        probe.write_bytes(b"")
        probe.unlink()
