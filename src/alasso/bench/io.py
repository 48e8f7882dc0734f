"""Whole files or none, one sentence when the disk refuses, and locks that keep two processes apart."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from alasso.errors import AlassoError

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
    """Refuses, before the work whose outcome it is to hold, a file that cannot be written or has another ending."""
    if path.is_dir():
        raise AlassoError(f"{path} is a folder; name a file to write")
    if endings and path.suffix.lower() not in endings:
        raise AlassoError(f"{path} is no name for what is to be written there; end it in {endings[0]}")
    check_writable(path.parent, named=path)


def check_writable(folder: Path, named: Path | None = None) -> None:
    """Refuses a folder that takes no files, before the work that is to end there.

    ``named``: what the refusal names, if not the folder.
    """
    with disk_errors_as_advice(named or folder):
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        probe = there / ".alasso-can-write"
        probe.write_bytes(b"")
        probe.unlink()


# -- a run is one process's at a time: two in one folder would write over each other's checkpoint -------------------


@contextmanager
def taken(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Hold runs in a folder while inside; the system gives a lock back however the process ends.

    Args:
        folder: Where the runs' checkpoints and results lie; made if it is not there.
        names: The runs.

    Raises:
        AlassoError: If another process holds one of them.
    """
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_taken(_lock_file(folder, name), name))
        yield


def refuse_those_of_others(folder: Path, names: Iterable[str]) -> None:
    """Raises AlassoError as :func:`taken` would, before any of the runs is trained."""
    for name in names:
        if _is_taken(_lock_file(folder, name)):
            raise AlassoError(_refusal(name))


def is_anothers(folder: Path) -> bool:
    """Whether a process is training runs in this folder."""
    return any(map(_is_taken, folder.glob(".*.lock")))


@contextmanager
def _taken(path: Path, name: str) -> Iterator[None]:
    with disk_errors_as_advice(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquired(path)
    if lock is None:
        raise AlassoError(_refusal(name))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before the release, so that nobody takes a file that is about to go
        lock.release()


def _acquired(path: Path) -> FileLock | None:
    """The lock, taken where the file system has locks; None if another has it."""
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
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
        lock.release()
    return lock is None


def _lock_file(folder: Path, name: str) -> Path:
    return folder / f".{name}.lock"


def _refusal(name: str) -> str:
    return f"{name} is being trained by another process; wait for it, or choose another folder"
