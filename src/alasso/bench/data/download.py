"""Downloading a data set: several addresses, retries, and nothing left behind that is not as published."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alasso.bench.data.datasets import OFFICIAL, Archive, DataFile, DataSet, data_set
from alasso.bench.data.files import (
    data_root,
    disk_errors,
    file_digest,
    inspect,
    part_file,
    read_content,
    refusal,
    shorten,
    where,
    write_marker,
)
from alasso.bench.data.loading import check
from alasso.bench.data.tiny import mark_folder
from alasso.bench.data.unpack import unpack
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from rich.progress import Progress

_ATTEMPTS = 3
_PAUSE_SECONDS = 0.5
_TIMEOUTS = (10, 30)
_CHUNK = 1 << 16

_Complaint = Callable[[Path], str | None]
"""Looks at a downloaded file and says what is wrong with its content, if anything."""


def fetch(name: str, data_dir: str | Path | None = None, *, progress: bool = True) -> Path:
    """Download what is not there yet, or not as published, and return the data set's folder.

    An archive that somebody has put into the data root is unpacked instead of downloaded.
    """
    dataset, folder = data_set(name), where(name, data_dir)
    if refusal(dataset, folder, check(name, data_dir)) is None:
        return folder
    root = data_root(data_dir)
    with disk_errors("write to", folder), no_empty_folders(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if dataset.archive is None:
            _fetch_files(dataset, folder, progress)
        else:
            _fetch_archive(dataset, dataset.archive, root, folder, progress)
    if error := refusal(dataset, folder, check(name, data_dir)):
        raise error
    return folder


@contextmanager
def no_empty_folders(folder: Path) -> Iterator[None]:
    """Folders on the way to this one that are made inside, and hold nothing when it fails, go again."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]  # the innermost first
    try:
        yield
    except BaseException:
        for place in new:
            with suppress(OSError):  # never made, or there is something in it
                place.rmdir()
        raise


def _fetch_files(dataset: DataSet, folder: Path, progress: bool) -> None:
    folder.mkdir(exist_ok=True)
    for file in dataset.files:
        if inspect(file, folder)[0].status == "ok":
            continue
        packed = folder / f"{file.name}.gz"
        addresses = [base + packed.name for base in dataset.addresses]
        troubles = _obtain(addresses, packed, partial(_wrong_content, file), progress)
        if troubles:
            raise AlassoError(_by_hand(dataset, folder, folder, troubles))
        # A damaged plain file would otherwise go on standing beside the good one.
        (folder / file.name).unlink(missing_ok=True)


def _fetch_archive(dataset: DataSet, archive: Archive, root: Path, folder: Path, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=root, prefix=".alasso-") as scratch:
        packed, troubles = _packed_archive(archive, root, Path(scratch), progress)
        if packed is None:
            raise AlassoError(_by_hand(dataset, folder, root, troubles))
        unpacking = Path(scratch) / "unpacked"
        unpacking.mkdir()
        unpacked = unpack(packed, dataset.folder, unpacking)
        _mark(dataset, archive, unpacked)
        _install(unpacked, folder)


def _packed_archive(archive: Archive, root: Path, scratch: Path, progress: bool) -> tuple[Path | None, list[str]]:
    """The archive that somebody put into the data root, else a download; or what is wrong with both."""
    troubles = []
    by_hand = root / archive.name
    if by_hand.is_file():
        wrong = _wrong_md5(archive, by_hand)
        if wrong is None:
            return by_hand, []
        troubles.append(f"{by_hand}: {wrong}")
    downloaded = scratch / archive.name
    failures = _obtain(archive.addresses, downloaded, partial(_wrong_md5, archive), progress)
    return (None, troubles + failures) if failures else (downloaded, [])


def _mark(dataset: DataSet, archive: Archive, unpacked: Path) -> None:
    if dataset.reader == "tiny-imagenet":
        mark_folder(unpacked)
        return
    absent = [file.name for file in dataset.files if not (unpacked / file.name).is_file()]
    if absent:
        raise AlassoError(f"{archive.name} does not hold {', '.join(absent)}")
    write_marker(unpacked, {file.name: file_digest(unpacked / file.name, "sha256") for file in dataset.files})


def _install(unpacked: Path, folder: Path) -> None:
    """Move a folder into place at once, or file by file where one is there: it may hold more than ours."""
    if not folder.exists():
        unpacked.replace(folder)
        return
    for source in [path for path in unpacked.rglob("*") if path.is_file()]:
        target = folder / source.relative_to(unpacked)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def _wrong_content(file: DataFile, path: Path) -> str | None:
    expected, found = file.sha256[OFFICIAL], hashlib.sha256(read_content(path)).hexdigest()
    return None if found == expected else _mismatch("sha256", expected, found)


def _wrong_md5(archive: Archive, path: Path) -> str | None:
    found = file_digest(path, "md5")
    return None if found == archive.md5 else _mismatch("md5", archive.md5, found)


def _mismatch(algorithm: str, expected: str, found: str) -> str:
    return f"wrong content (expected {algorithm} {shorten(expected)}, found {shorten(found)})"


def _by_hand(dataset: DataSet, folder: Path, put_into: Path, troubles: Sequence[str]) -> str:
    """Why the download failed, and all that somebody needs to do it without us."""
    lines = [f"{dataset.name} could not be downloaded:", *(f"  {trouble}" for trouble in troubles)]
    if dataset.archive is not None:
        lines += [
            f"Without a network, put this file into {put_into} and run `alasso data fetch {dataset.name}` again:",
            f"  {dataset.archive.name}, md5 {dataset.archive.md5}",
            *(f"    {address}" for address in dataset.archive.addresses),
            f"or lay its unpacked content out as {folder}",
        ]
    else:
        lines.append(
            f"Without a network, put these files, gzipped or not, into {put_into} "
            "(the hashes are of the content without gzip):"
        )
        for file in dataset.files:
            lines.append(f"  {file.name}.gz, sha256 {file.sha256[OFFICIAL]}")
            lines += [f"    {base}{file.name}.gz" for base in dataset.addresses]
    return "\n".join(lines)


def _obtain(addresses: Sequence[str], destination: Path, complaint: _Complaint, progress: bool) -> list[str]:
    """Leave the first good download at its destination, or say of each address what went wrong there."""
    troubles = []
    for address in addresses:
        with part_file(destination) as part:
            trouble = _transfer(address, part, progress)
            if trouble is None and (wrong := complaint(part)):
                trouble = f"{wrong}, deleted"
            if trouble is None:
                part.replace(destination)
                return []
        troubles.append(f"{address}: {trouble}")
    return troubles


def _transfer(address: str, part: Path, progress: bool) -> str | None:
    """Download one address, going on where a broken transfer stopped; the trouble if it cannot be done."""
    import requests

    trouble = "no attempt was made"
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            _receive(address, part, progress)
            return None
        except requests.HTTPError as error:
            status = 0 if error.response is None else error.response.status_code
            trouble = f"the server answered {status}"
            if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.unlink(missing_ok=True)
            elif status < HTTPStatus.INTERNAL_SERVER_ERROR:
                break
        except requests.ConnectTimeout:
            trouble = "the server did not answer"
            break
        except requests.ConnectionError:
            trouble = "the connection broke" if part.stat().st_size else "no connection"
        except requests.RequestException as error:
            trouble = f"the transfer broke ({type(error).__name__})"
    return trouble


def _receive(address: str, part: Path, progress: bool) -> None:
    import pooch

    have = part.stat().st_size if part.exists() else 0
    # Compressed on the way, neither the offset nor the bytes would be those of the published file.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    responses: list[Any] = []
    with part.open("ab") as sink, _bar(address, progress) as bar:

        def begin(response: Any, *_: Any, **__: Any) -> None:
            responses.append(response)
            if have and response.status_code == HTTPStatus.OK:  # the server sends all of it again
                sink.truncate(0)

        download = pooch.HTTPDownloader(
            progressbar=bar,
            chunk_size=_CHUNK,
            timeout=_TIMEOUTS,
            headers=headers,
            hooks={"response": begin},
        )
        try:
            download(address, sink, None)
        finally:
            for response in responses:  # pooch leaves a broken one open
                response.close()


class _RichBar:
    """A progress bar with the few methods that pooch calls."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[0].total

    @total.setter
    def total(self, count: int) -> None:
        self._progress.update(self._task, total=count or None)

    def update(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Left to the block that opened the bar, which also ends when a transfer breaks."""


@contextmanager
def _bar(address: str, wanted: bool) -> Iterator[_RichBar | bool]:
    if not wanted:
        yield False
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _RichBar(progress, address.rsplit("/", 1)[-1])
