"""A run is one process's at a time: two that train it in one folder would write over each other's checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from alasso.bench.io import disk_errors_as_advice
from alasso.errors import AlassoError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: two processes are not kept apart there
    fcntl = None

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what some file systems on a network answer
TRIES = 100


@contextmanager
def taken(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """While inside, these runs in this folder are this process's; refused where one of them is another's.

    The system gives a lock back however the process ends, so what was killed stands in nobody's way.
    """
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_taken(_lock_of(name, folder), name))
        yield


def refuse_those_of_others(folder: Path, names: Iterable[str]) -> None:
    """As :func:`taken` would, before any of them is trained."""
    for name in names:
        if is_taken(_lock_of(name, folder)):
            raise AlassoError(_refusal(name))


def is_anothers(folder: Path) -> bool:
    """Whether a process is training runs in this folder."""
    return any(is_taken(lock) for lock in folder.glob(".*.lock"))


def is_taken(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _locked(file)
    finally:
        os.close(file)


def _lock_of(name: str, folder: Path) -> Path:
    return folder / f".{name}.lock"


def _refusal(name: str) -> str:
    return f"{name} is being trained by another process; wait for it, or choose another folder"


@contextmanager
def _taken(path: Path, name: str) -> Iterator[None]:
    with disk_errors_as_advice(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _opened_and_locked(path)
    if file is None:
        raise AlassoError(_refusal(name))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before it is given back: whoever comes later makes a new one
        os.close(file)


def _opened_and_locked(path: Path) -> int | None:
    """The file, open and locked; None where another has it."""
    for _ in range(TRIES):
        file = _opened(path)
        if not _locked(file):
            os.close(file)
            return None
        if _lies_at(path, file):
            return file
        os.close(file)  # its holder removed it between our opening and our locking it
    return _opened(path)  # a file system that cannot tell


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _locked(file: int) -> bool:
    """Whether it is ours now; also where there are no locks to be had."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    return True


def _lies_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
