"""A data set's files: fetched, checked against what was published, read into arrays."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import shutil
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from alasso.bench.data.datasets import (
    Archive,
    DataFile,
    DataSet,
    FileReport,
    data_root,
    data_set,
    refuse,
    shorten,
    where,
)
from alasso.bench.data.images import ImageSet, Labels, Pixels, check_tiny, load_tiny, mark_folder
from alasso.bench.io import disk_errors_as_advice
from alasso.bench.schema import shown
from alasso.errors import AlassoError

MAX_BYTES = 2 << 30
MAX_MEMBERS = 200_000
MOST_AT_ONCE = 64 << 20
"""Bytes that an archive's header may have: they go into the memory."""
MOST_OF_A_FILE, MOST_OF_AN_ARCHIVE = 64 << 20, 320 << 20
"""Bytes to download: the largest published ones are 31 and 248 million."""
_RETRIES = 1
_TIMEOUT = 30
_LIMIT = 1 << 28
"""No published file is near this; unwrapping stops there so that a gzip bomb cannot fill the memory."""
_OLD = 86_400.0
"""Seconds after which a download's folder is of a process that was killed."""
_DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
_DIGITS_SEED = 0
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE)
_SCRATCH = ".alasso-"


# -- fetching --------------------------------------------------------------------------------------------------------


def fetch(name: str, data_dir: str | Path | None = None, *, progress: bool = True) -> Path:
    """Downloads what is missing or not as published.

    An archive that lies in the data root is unpacked instead of downloaded.

    Args:
        name: The data set.
        data_dir: The folder with all data sets. Default: ``ALASSO_DATA``, else the user's cache.
        progress: Whether to show a bar in a terminal.

    Returns:
        The data set's folder.

    Raises:
        AlassoError: If no address has the data set as published, or the disk refuses it.
    """
    dataset, root, folder = data_set(name), data_root(data_dir), where(name, data_dir)
    if all(report.status == "ok" for report in check(name, data_dir)):
        return folder
    with disk_errors_as_advice(folder):
        root.mkdir(parents=True, exist_ok=True)
        _remove_old_scratch(root)
        with tempfile.TemporaryDirectory(dir=root, prefix=_SCRATCH) as scratch:
            if dataset.archive is None:
                _fetch_files(dataset, folder, Path(scratch), progress)
            else:
                _fetch_archive(dataset, dataset.archive, root, folder, Path(scratch), progress)
    refuse(dataset, folder, check(name, data_dir))
    return folder


def _remove_old_scratch(root: Path) -> None:
    for left in root.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if not left.is_symlink() and time.time() - left.stat().st_mtime > _OLD:
                shutil.rmtree(left, ignore_errors=True)


def _fetch_files(dataset: DataSet, folder: Path, scratch: Path, progress: bool) -> None:
    wanted = [file for file in dataset.files if inspect(file, folder)[0].status != "ok"]
    by_hand = f"put {', '.join(f'{file.name}.gz' for file in wanted)} into {folder}"
    for file in wanted:
        addresses = [f"{base}{file.name}.gz" for base in dataset.addresses]
        packed = _first_good(dataset, addresses, partial(_is_file, file), scratch, by_hand, progress, MOST_OF_A_FILE)
        folder.mkdir(parents=True, exist_ok=True)
        packed.replace(folder / packed.name)
        # A damaged plain file would otherwise go on standing beside the good one.
        (folder / file.name).unlink(missing_ok=True)


def _fetch_archive(dataset: DataSet, archive: Archive, root: Path, folder: Path, scratch: Path, progress: bool) -> None:
    laid_out = root / archive.name
    sources: list[str | Path] = [*([laid_out] if laid_out.is_file() else []), *archive.addresses]
    by_hand = f"put {archive.name} into {root} and run `alasso data fetch {dataset.name}` again"
    packed = _first_good(
        dataset, sources, partial(_is_archive, archive), scratch, by_hand, progress, MOST_OF_AN_ARCHIVE
    )
    unpacked = unpack(packed, dataset.folder, scratch / "unpacked")
    if dataset.reader == "tiny-imagenet":
        mark_folder(unpacked)
    if folder.exists():  # it may hold more than ours
        shutil.copytree(unpacked, folder, copy_function=shutil.move, dirs_exist_ok=True)
    else:
        unpacked.replace(folder)


def _is_file(file: DataFile, path: Path) -> bool:
    return inspect(file, path.parent)[0].status == "ok"


def _is_archive(archive: Archive, path: Path) -> bool:
    import pooch

    return bool(pooch.file_hash(str(path), "md5") == archive.md5)


def _first_good(
    dataset: DataSet,
    sources: Sequence[str | Path],
    is_published: Callable[[Path], bool],
    scratch: Path,
    by_hand: str,
    progress: bool,
    most: int,
) -> Path:
    """The first of files and downloads that is as published."""
    import requests

    troubles = []
    for source in sources:
        try:
            path = source if isinstance(source, Path) else _download(source, scratch, progress, most)
            if is_published(path):
                return path
            trouble = "other content than published"
            if path.parent == scratch:
                path.unlink()
        except requests.HTTPError as error:
            trouble = f"the server answered {error.response.status_code}"
        except _TooLarge:
            trouble = f"more than {most >> 20} MB, which is not what was published"
        except requests.RequestException as error:
            trouble = f"no connection ({type(error).__name__})"
        troubles.append(f"  {source}: {trouble}")
    lines = [f"{dataset.name} could not be downloaded:", *troubles, f"Without a network, {by_hand}."]
    raise AlassoError("\n".join(lines))


class _TooLarge(Exception):
    """A server sends more than the published file can have."""


def _download(address: str, into: Path, progress: bool, most: int) -> Path:
    import pooch

    pooch.get_logger().setLevel("WARNING")
    base, _, name = address.rpartition("/")
    files = pooch.create(into, base_url=f"{base}/", registry={name: None}, retry_if_failed=_RETRIES)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console.quiet = not (progress and console.is_terminal)  # rich before 15 ends even a disabled bar with a line
    with Progress(*columns, console=console, transient=True, disable=console.quiet) as shown:
        downloader = pooch.HTTPDownloader(
            progressbar=_Bar(shown, name, most),
            chunk_size=1 << 16,
            timeout=_TIMEOUT,
            headers={"Accept-Encoding": "identity"},  # compressed on the way, an archive has another hash
        )
        return Path(files.fetch(name, downloader=downloader))


class _Bar:
    """A progress bar with what pooch asks of one; it ends a transfer that is too long."""

    total: int = 0

    def __init__(self, progress: Progress, label: str, most: int) -> None:
        self._progress, self._task, self._most = progress, progress.add_task(label, total=None), most
        self._left = most

    def update(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _TooLarge
        self._progress.update(self._task, advance=count, total=self.total or None)

    def reset(self) -> None:
        self._left = self._most
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Its block in :func:`_download` closes it, also when a transfer breaks."""


def unpack(archive: Path, wanted: str, into: Path) -> Path:
    """Unpacks an archive; nothing lands outside ``into``, and no more than any of the data sets holds.

    Args:
        archive: A zip or tar.gz.
        wanted: The folder that it should hold.
        into: Where to unpack it.

    Returns:
        The unpacked folder.

    Raises:
        AlassoError: If the archive is damaged, too large, leads out of the folder or lacks ``wanted``.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened_zip:
                _refuse_absurd(archive, (member.file_size for member in opened_zip.infolist()))
                opened_zip.extractall(into)  # drops what leads out of the folder from names
        else:
            with gzip.open(archive) as stream, tarfile.open(fileobj=_InPieces(stream), mode="r:") as opened_tar:
                _refuse_absurd(archive, (member.size for member in opened_tar))
                opened_tar.extractall(into, filter="data")  # refuses what leads out of the folder
    except (AlassoError, MemoryError):
        raise
    except Exception as error:  # zipfile and tarfile raise what they happen to raise: IndexError for an empty name
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        raise AlassoError(f"{archive.name} is a damaged or unsafe archive: {shown(error)}") from error
    if not (into / wanted).is_dir():
        raise AlassoError(f"{archive.name} does not hold the folder {wanted}")
    return into / wanted


class _InPieces(io.RawIOBase):
    """What is read from an archive's stream; a header that would fill the memory is refused."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        if size > MOST_AT_ONCE:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._stream.read(size)

    def seek(self, place: int, whence: int = 0) -> int:
        """Goes to a place of the unpacked stream."""
        return self._stream.seek(place, whence)

    def tell(self) -> int:
        """The place in the unpacked stream."""
        return self._stream.tell()


def _refuse_absurd(archive: Path, sizes: Iterable[int]) -> None:
    total = 0
    for count, size in enumerate(sizes, 1):
        total += size
        if total > MAX_BYTES or count > MAX_MEMBERS or size < 0:
            raise AlassoError(f"{archive.name} holds {count} files of {total} bytes or more, more than any data set")


# -- checking --------------------------------------------------------------------------------------------------------


def check(name: str, data_dir: str | Path | None = None) -> list[FileReport]:
    """Compares what lies in a data set's folder with what was published, file by file.

    Args:
        name: The data set.
        data_dir: The folder with all data sets. Default: ``ALASSO_DATA``, else the user's cache.

    Returns:
        A report for each file.

    Raises:
        AlassoError: If there is no such data set.
    """
    dataset, folder = data_set(name), where(name, data_dir)
    if dataset.reader == "digits":
        return [_check_digits(*_read_digits())]
    if dataset.reader == "tiny-imagenet":
        return check_tiny(dataset, folder)
    return _of_one_edition([inspect(file, folder)[0] for file in dataset.files])


def inspect(file: DataFile, folder: Path) -> tuple[FileReport, bytes]:
    """Reports what lies at a file's place, gzipped or not; with its content if that is as published."""
    paths = [path for path in (folder / file.name, folder / f"{file.name}.gz") if path.is_file()]
    if not paths:
        return FileReport(file.name, "missing"), b""
    editions = {sha256: edition for edition, sha256 in file.sha256.items()}
    for path in paths:
        content = _content(path)
        found = hashlib.sha256(content).hexdigest()
        if found in editions:
            return FileReport(path.name, "ok", f"sha256 {shorten(found)}", editions[found]), content
    expected = " or ".join(map(shorten, editions))
    detail = f"{path} is damaged or not the published file: expected sha256 {expected}, found {shorten(found)}"
    return FileReport(path.name, "wrong", detail), b""


def _content(path: Path) -> bytes:
    """A file's content without its gzip wrapper, if it has one: some servers unwrap on the way."""
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        with gzip.open(path) as unwrapped:
            return unwrapped.read(_LIMIT)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return content  # damaged: no published file has this hash


def _of_one_edition(reports: Sequence[FileReport]) -> list[FileReport]:
    """Refuses files of different editions side by side: one's training images are the other's test images."""
    if len({report.edition for report in reports if report.status == "ok"}) <= 1:
        return list(reports)
    mixture = ", ".join(f"{report.file} is {report.edition}" for report in reports if report.status == "ok")
    detail = f"the files are of different editions ({mixture}) and do not belong together"
    return [replace(r, status="wrong", detail=detail) if r.status == "ok" else r for r in reports]


def _check_digits(images: Pixels, labels: Labels) -> FileReport:
    found = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    if found == _DIGITS_SHA256:
        return FileReport("digits.csv.gz", "ok", f"sha256 {shorten(found)}", "scikit-learn")
    detail = "scikit-learn's digits have changed"
    return FileReport(
        "digits.csv.gz", "wrong", f"{detail}: expected sha256 {shorten(_DIGITS_SHA256)}, found {shorten(found)}"
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def load(name: str, data_dir: str | Path | None = None) -> ImageSet:
    """Reads a data set, after comparing its content with what was published.

    The digits have no published split: 36 images of every class, drawn with a fixed seed, are the test set
    (360), the other 1,437 are for training.

    Args:
        name: The data set.
        data_dir: The folder with all data sets. Default: ``ALASSO_DATA``, else the user's cache.

    Returns:
        Images and labels, for training and for testing.

    Raises:
        AlassoError: If the data set is missing, damaged or not the published one.
    """
    dataset, folder = data_set(name), where(name, data_dir)
    if dataset.reader == "digits":
        return _load_digits(dataset)
    if dataset.reader == "tiny-imagenet":
        return load_tiny(dataset, folder)
    inspected = [inspect(file, folder) for file in dataset.files]
    reports = _of_one_edition([report for report, _ in inspected])
    refuse(dataset, folder, reports)
    contents = [content for _, content in inspected]
    train, test = contents[: len(dataset.train_files)], contents[len(dataset.train_files) :]
    return ImageSet(dataset.name, reports[0].edition, *_parse(dataset, train), *_parse(dataset, test), dataset.classes)


def _parse(dataset: DataSet, contents: Sequence[bytes]) -> tuple[Pixels, Labels]:
    if dataset.reader == "cifar":
        return _parse_cifar(contents, dataset.label_bytes, dataset.shape)
    images, labels = contents
    return _parse_idx(images).reshape(-1, *dataset.shape), _parse_idx(labels).astype(np.int64)


def _parse_idx(content: bytes) -> Pixels:
    """An idx file of bytes: two zeros, the type, the number of dimensions, the dimensions, the values."""
    dimensions = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4)
    values: Pixels = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).copy()
    return values.reshape([int(length) for length in shape])


def _parse_cifar(contents: Sequence[bytes], label_bytes: int, shape: tuple[int, int, int]) -> tuple[Pixels, Labels]:
    """CIFAR's binary records: the label bytes, the class last of them, then the image plane by plane."""
    channels, height, width = shape
    length = label_bytes + channels * height * width
    records = np.concatenate([np.frombuffer(content, dtype=np.uint8).reshape(-1, length) for content in contents])
    images = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, *shape)
    return images, records[:, label_bytes - 1].astype(np.int64)


def _read_digits() -> tuple[Pixels, Labels]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8)[:, np.newaxis], digits.target.astype(np.int64)


def _load_digits(dataset: DataSet) -> ImageSet:
    images, labels = _read_digits()
    report = _check_digits(images, labels)
    if report.status != "ok":
        raise AlassoError(f"{report.detail}; reinstall scikit-learn")
    # RandomState's stream is frozen for good, so the split is the same under every version of NumPy.
    random = np.random.RandomState(_DIGITS_SEED)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(len(dataset.classes)):
        test[random.permutation(np.flatnonzero(labels == label))[: dataset.test_per_class]] = True
    halves = (images[~test], labels[~test], images[test], labels[test])
    return ImageSet(dataset.name, report.edition, *halves, dataset.classes, scale=16.0)
