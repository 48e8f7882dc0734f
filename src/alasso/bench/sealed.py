"""A checkpoint's file: a first line with digests, a head in JSON, a body. Nothing is used before they are compared.

alasso checkpoint 4 SHA-256 OF THE HEAD SHA-256 OF ALL THAT FOLLOWS THIS LINE
{"config": …, "data": …, "position": …}
what torch.save makes of the tensors
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, BinaryIO

from alasso.errors import AlassoError

VERSION = 4
FIRST_LINE = re.compile(rb"alasso checkpoint (\d{1,9}) ([0-9a-f]{64}) ([0-9a-f]{64})\n")
LONGEST_FIRST_LINE = 256
BY_TORCH_ALONE = b"PK\x03\x04"  # how the files of earlier versions begin


class Damaged(AlassoError):
    """The file is not what was written."""


class OtherVersion(AlassoError):
    """The file is whole, but of another version."""


def first_line(head: bytes, everything: str) -> bytes:
    """The first line, for a head and the digest of head and body."""
    return f"alasso checkpoint {VERSION} {hashlib.sha256(head).hexdigest()} {everything}\n".encode()


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Reads a checkpoint's head and body, and compares the digests.

    Args:
        path: The file.

    Returns:
        The head, and what torch wrote.

    Raises:
        AlassoError: It cannot be read, is damaged, or is of another version.
    """
    try:
        with path.open("rb") as stream:
            head, everything = _head(stream, path)
            body = stream.read()
    except OSError as error:
        raise AlassoError(f"{path} cannot be read: {error.strerror or error}") from error
    found = hashlib.sha256(head)
    found.update(body)
    if found.hexdigest() != everything:
        raise Damaged(f"{path} is damaged")
    return _parsed(head, path), body


def head_of(path: Path) -> dict[str, Any] | None:
    """A checkpoint's head alone; None where the file is damaged or of another version: :func:`read` says why."""
    try:
        with path.open("rb") as stream:
            return _parsed(_head(stream, path)[0], path)
    except (OSError, AlassoError):
        return None


def _head(stream: BinaryIO, path: Path) -> tuple[bytes, str]:
    """The head as it was written, and the digest of everything."""
    line = stream.readline(LONGEST_FIRST_LINE)
    if line.startswith(BY_TORCH_ALONE):
        raise OtherVersion(f"{path} is of an earlier version of alasso; delete it to start over")
    if not (known := FIRST_LINE.fullmatch(line)):
        raise Damaged(f"{path} is damaged, or not a checkpoint of alasso")
    version, of_head, everything = (part.decode() for part in known.groups())
    head = stream.readline()
    if hashlib.sha256(head).hexdigest() != of_head:
        raise Damaged(f"{path} is damaged")
    if int(version) != VERSION:
        raise OtherVersion(
            f"{path} has version {version}, this library reads {VERSION}; delete it to start over, or use that version"
        )
    return head, everything


def _parsed(head: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(head)
        parts = [parsed[name] for name in ("config", "data", "position")]
        whole = all(isinstance(part, dict) for part in parts) and all(
            isinstance(v, str) for v in parsed["data"].values()
        )
    except (ValueError, RecursionError, LookupError, TypeError):
        whole = False
    if not whole:
        raise Damaged(f"{path} is not a checkpoint of alasso")
    return dict(parsed)
