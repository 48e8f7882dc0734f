"""Whole files or none, one sentence when the disk refuses, and locks that keep two processes apart."""

from __future__ import annotations

import errno
import glob
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from alasso import _files
from alasso.errors import AlassoError

DEAD_AFTER = 3600.0  # seconds without a byte
PATIENCE = 0.5  # seconds: who only looks whether a lock is free holds it for less
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what some file systems on a network answer


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
    with disk_errors_as_advice(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead_parts(path)
        with _files.whole_file(path) as stream:
            yield stream


def _remove_dead_parts(path: Path) -> None:
    """Removes what processes left that were killed while they wrote this file: one that lives has written lately."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            if time.time() - part.lstat().st_mtime > DEAD_AFTER:
                part.unlink()


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """The file with this content, whole or as it was before."""
    with whole_file(path) as stream:
        stream.write(content)


def check_file(path: Path, *endings: str) -> None:
    """Refuses, before the work begins, a file that cannot be written or has another ending."""
    if path.is_dir():
        raise AlassoError(f"{path} is a folder; name a file to write")
    if endings and path.suffix.lower() not in endings:
        raise AlassoError(f"{path} has the wrong ending; name a file that ends in {' or '.join(endings)}")
    check_writable(path.parent, named=path)


def check_writable(folder: Path, named: Path | None = None) -> None:
    """Refuses, before the work begins, a folder that takes no files.

    ``named``: what the refusal names, if not the folder.
    """
    with disk_errors_as_advice(named or folder):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        tempfile.TemporaryFile(dir=there).close()  # of a name that nobody else has


# -- locks: two processes that train one run would write over each other's checkpoint ------------------------------


class Taken(AlassoError):
    """Another process trains the run."""


@contextmanager
def taken(folder: Path, name: str) -> Iterator[None]:
    """Holds a run in a folder while inside; the system gives the lock back however the process ends.

    Args:
        folder: Where the run's checkpoint and result lie; made if it is not there.
        name: The run.

    Raises:
        Taken: Another process holds it.
    """
    path = _lock_file(folder, name)
    with disk_errors_as_advice(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquired(path)
    if lock is None:
        raise Taken(_refusal(name))
    try:
        for killed in folder.glob(f".{name}.*.part"):  # of processes that were killed while they wrote
            killed.unlink(missing_ok=True)
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the release, so that nobody takes a file that is about to go
        lock.release()


def refuse_taken(folder: Path, names: Iterable[str]) -> None:
    """Raises :class:`Taken` as :func:`taken` would, before any of the runs is trained."""
    for name in names:
        if _is_taken(_lock_file(folder, name)):
            raise Taken(_refusal(name))


def _acquired(path: Path) -> FileLock | None:
    """The lock, taken where the file system has locks; None if another has it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=PATIENCE, poll_interval=0.02)
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        path.touch()
    return lock


def _is_taken(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        lock = _acquired(path)
    except OSError:
        return False
    if lock:
        with suppress(OSError):
            path.unlink()  # it may have gone and come again meanwhile
        lock.release()
    return lock is None


def _lock_file(folder: Path, name: str) -> Path:
    return folder / f".{name}.lock"


def _refusal(name: str) -> str:
    return f"{name} is being trained by another process; wait for it, or choose another folder"
