"""Finding, reading and identifying a data set's files on the disk."""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib.util
import json
import os
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from alasso.bench.data.datasets import OFFICIAL, DataFile, DataSet, data_set
from alasso.errors import AlassoError

MARKER = ".alasso.json"
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20
_CONTENT_LIMIT = 1 << 30
"""No published file is near this; reading stops there so that a gzip bomb cannot fill the memory."""


@dataclass(frozen=True)
class FileReport:
    """What was found where one file (or folder of images) of a data set should be."""

    file: str
    status: Literal["ok", "missing", "wrong"]
    detail: str = ""
    edition: str = ""


def data_root(data_dir: str | Path | None = None) -> Path:
    """The folder below which data sets lie: the argument, else ``ALASSO_DATA``, else the user's cache."""
    chosen = data_dir or os.environ.get("ALASSO_DATA")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("alasso")) / "data"


def where(name: str, data_dir: str | Path | None = None) -> Path:
    """The folder that a data set's files lie in, or belong in; for digits, scikit-learn's own file."""
    dataset = data_set(name)
    if dataset.reader != "digits":
        return data_root(data_dir) / dataset.folder
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise AlassoError("the digits come with scikit-learn, which is not installed")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def shorten(digest: str) -> str:
    """The start of a hash: enough to tell two apart, short enough for a message."""
    return digest[:12] + "…"


def file_digest(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_content(path: Path) -> bytes:
    """A file's content without its gzip wrapper, if it has one; of a damaged wrapper, what can be had.

    The wrapper is told by the file's first bytes and not its name, for some servers unwrap on the way.
    """
    with path.open("rb") as stream:
        if stream.read(2) != _GZIP_MAGIC:
            stream.seek(0)
            return stream.read()
    content = bytearray()
    with gzip.open(path) as unwrapped:
        try:
            while len(content) <= _CONTENT_LIMIT and (chunk := unwrapped.read(_CHUNK)):
                content += chunk
        except (EOFError, zlib.error, gzip.BadGzipFile):
            pass  # what came so far has another hash than the whole, and that is what gets reported
    return bytes(content)


def inspect(file: DataFile, folder: Path) -> tuple[FileReport, bytes]:
    """Say what lies at a file's place, and give its content if that is as published."""
    found = [path for path in (folder / file.name, folder / f"{file.name}.gz") if path.is_file()]
    if not found:
        return FileReport(file.name, "missing", f"{file.name} (or {file.name}.gz) is not in {folder}"), b""
    accepted = {sha256: edition for edition, sha256 in file.sha256.items()}
    accepted |= _marked(folder, file.name)
    for path in found:
        try:
            content = read_content(path)
        except OSError as error:
            report = FileReport(path.name, "wrong", f"{path} cannot be read: {error.strerror or error}")
            continue
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 in accepted:
            return FileReport(path.name, "ok", f"sha256 {shorten(sha256)}", accepted[sha256]), content
        expected = " or ".join(shorten(known) for known in file.sha256.values())
        difference = f"expected sha256 {expected}, found {shorten(sha256)}"
        detail = f"{path} is damaged or not the published file: {difference}"
        report = FileReport(path.name, "wrong", detail)
    return report, b""


def settle_edition(reports: Sequence[FileReport]) -> list[FileReport]:
    """Refuse files of different editions side by side: one's training images are the other's test images."""
    editions = {report.edition for report in reports if report.status == "ok"}
    if len(editions) <= 1:
        return list(reports)
    mixture = ", ".join(f"{report.file} is {report.edition}" for report in reports if report.status == "ok")
    detail = f"the files are of different editions ({mixture}) and do not belong together"
    return [replace(r, status="wrong", detail=detail) if r.status == "ok" else r for r in reports]


def refusal(dataset: DataSet, folder: Path, reports: Sequence[FileReport]) -> AlassoError | None:
    """The error that says what keeps a data set from being used, or None where nothing does."""
    remedy = f"`alasso data fetch {dataset.name}`"
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        state = "is empty" if folder.exists() else "does not exist"
        return AlassoError(
            f"{dataset.name} is not in {folder}, which {state}; run {remedy}, "
            "or name the folder that holds your data sets with --data-dir or ALASSO_DATA"
        )
    if missing := [report.file for report in reports if report.status == "missing"]:
        return AlassoError(f"{dataset.name} is not complete in {folder}: missing {', '.join(missing)}; run {remedy}")
    for report in reports:
        if report.status == "wrong":
            return AlassoError(f"{report.detail}; {remedy} downloads it anew")
    return None


def write_marker(folder: Path, sha256: dict[str, str]) -> None:
    """Note beside files from an archive of the right md5 what their content is, to check it later on."""
    marker = {"edition": OFFICIAL, "sha256": sha256}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _marked(folder: Path, name: str) -> dict[str, str]:
    """The hash that the marker notes for a file, with its edition; empty where there is none."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return {str(marker["sha256"][name]): str(marker["edition"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def marked_digest(folder: Path, name: str) -> str | None:
    return next(iter(_marked(folder, name)), None)


@contextmanager
def part_file(destination: Path) -> Iterator[Path]:
    """A temporary name in the destination's folder; whatever is still under it at the end is removed."""
    part = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def disk_errors(act: Literal["read", "write to"], folder: Path) -> Iterator[None]:
    """Turn the disk's refusals into one sentence for the user."""
    elsewhere = "choose another folder with --data-dir or ALASSO_DATA"
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"the disk is full; free some space or {elsewhere}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = f"permission denied; {elsewhere}"
        else:
            hint = f"{error.strerror or error}; {elsewhere}"
        raise AlassoError(f"cannot {act} {folder}: {hint}") from error
