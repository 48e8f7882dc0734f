"""Unpacking a downloaded archive without trusting it."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO

from alasso.errors import AlassoError

MAX_BYTES = 2 << 30
MAX_MEMBERS = 200_000
_CHUNK = 1 << 20
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile),
    *(EOFError, zlib.error, NotImplementedError),  # the last: zipfile's word for a compression it does not know
)


@dataclass(frozen=True)
class _Member:
    name: str
    is_folder: bool
    is_file: bool
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, wanted: str, into: Path) -> Path:
    """Unpack the archive's folder ``wanted`` below the empty folder ``into``; refuse anything suspicious.

    Refused, with nothing left behind: names that leave the folder, links, devices, encrypted members, and
    more content than any of the data sets has (counted as it is written, not as the archive claims).
    """
    try:
        with _members(archive) as members:
            _write(archive, members, wanted, into)
    except _DAMAGE as error:
        _discard(into)
        raise AlassoError(f"{archive.name} is a damaged archive ({error}); nothing was unpacked") from error
    except BaseException:
        _discard(into)
        raise
    folder = into / wanted
    if not folder.is_dir():
        _discard(into)
        raise AlassoError(f"{archive.name} does not hold the folder {wanted}")
    return folder


def _write(archive: Path, members: Iterator[_Member], wanted: str, into: Path) -> None:
    room = MAX_BYTES
    for count, member in enumerate(members, start=1):
        if count > MAX_MEMBERS:
            raise AlassoError(f"{archive.name} is refused: it has more than {MAX_MEMBERS} members")
        path = _safe_path(archive, member)
        if path.parts[:1] != (wanted,):
            continue
        target = into / path
        if member.is_folder:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        source = member.open()
        assert source is not None, "only regular files are opened"
        with source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                room -= len(chunk)
                if room < 0:
                    raise AlassoError(f"{archive.name} is refused: it unpacks to more than {MAX_BYTES} bytes")
                sink.write(chunk)


def _safe_path(archive: Path, member: _Member) -> PurePosixPath:
    path = PurePosixPath(member.name)
    windows = PureWindowsPath(member.name)
    if path.is_absolute() or windows.drive or windows.root or ".." in windows.parts or "\0" in member.name:
        raise AlassoError(f"{archive.name} is refused: its member {member.name!r} would leave the folder")
    if not (member.is_folder or member.is_file):
        raise AlassoError(f"{archive.name} is refused: its member {member.name!r} is not a plain file")
    return path


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[_Member]]:
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as opened_zip:
            yield (_zip_member(opened_zip, info) for info in opened_zip.infolist())
    else:
        with tarfile.open(archive, "r:gz") as opened_tar:
            yield (_tar_member(opened_tar, info) for info in opened_tar)


def _zip_member(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    kind = stat.S_IFMT(info.external_attr >> 16)
    encrypted = bool(info.flag_bits & 0x1)
    return _Member(
        name=info.filename,
        is_folder=info.is_dir() and kind in (0, stat.S_IFDIR),
        is_file=not info.is_dir() and kind in (0, stat.S_IFREG) and not encrypted,
        open=lambda: opened.open(info),
    )


def _tar_member(opened: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    plain = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    return _Member(info.name, info.isdir(), plain, lambda: opened.extractfile(info))


def _discard(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
