"""A run is one process's at a time: two that train it in one folder would write over each other's checkpoint."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from alasso.bench.atomic import disk_errors_as_advice
from alasso.errors import AlassoError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: two processes are not kept apart there
    fcntl = None

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what some file systems on a network answer


@contextmanager
def taken(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """While inside, these runs in this folder are this process's; refused where one of them is another's.

    The system gives a lock back however the process ends, so what was killed stands in nobody's way.
    """
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_taken(folder / f".{name}.lock", name))
        yield


@contextmanager
def _taken(path: Path, name: str) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    with disk_errors_as_advice(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _opened_and_locked(path)
    if file is None:
        raise AlassoError(f"{name} is being trained by another process; wait for it, or choose another folder by --out")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is given back: whoever comes later makes a new one
        os.close(file)


def _opened_and_locked(path: Path) -> int | None:
    """The file, open and locked; None where another has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        if _lies_at(path, file):
            return file
        os.close(file)  # its holder removed it between our opening and our locking it


def _lies_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
