"""Downloading a data set from several addresses, and unpacking it without trusting it."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from alasso.bench.data.datasets import Archive, DataFile, DataSet, data_root, data_set, refuse, where
from alasso.bench.data.loading import check, inspect
from alasso.bench.data.tiny import mark_folder
from alasso.bench.io import disk_errors_as_advice
from alasso.errors import AlassoError

MAX_BYTES = 2 << 30
MAX_MEMBERS = 200_000
_RETRIES = 1
_TIMEOUT = 30


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
        with tempfile.TemporaryDirectory(dir=root, prefix=".alasso-") as scratch:
            if dataset.archive is None:
                _fetch_files(dataset, folder, Path(scratch), progress)
            else:
                _fetch_archive(dataset, dataset.archive, root, folder, Path(scratch), progress)
    refuse(dataset, folder, check(name, data_dir))
    return folder


def _fetch_files(dataset: DataSet, folder: Path, scratch: Path, progress: bool) -> None:
    wanted = [file for file in dataset.files if inspect(file, folder)[0].status != "ok"]
    by_hand = f"put {', '.join(f'{file.name}.gz' for file in wanted)} into {folder}"
    for file in wanted:
        addresses = [f"{base}{file.name}.gz" for base in dataset.addresses]
        packed = _first_good(dataset, addresses, partial(_is_file, file), scratch, by_hand, progress)
        folder.mkdir(parents=True, exist_ok=True)
        packed.replace(folder / packed.name)
        # A damaged plain file would otherwise go on standing beside the good one.
        (folder / file.name).unlink(missing_ok=True)


def _fetch_archive(dataset: DataSet, archive: Archive, root: Path, folder: Path, scratch: Path, progress: bool) -> None:
    laid_out = root / archive.name
    sources: list[str | Path] = [*([laid_out] if laid_out.is_file() else []), *archive.addresses]
    by_hand = f"put {archive.name} into {root} and run `alasso data fetch {dataset.name}` again"
    packed = _first_good(dataset, sources, partial(_is_archive, archive), scratch, by_hand, progress)
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
) -> Path:
    """The first of files and downloads that is as published."""
    import requests

    troubles = []
    for source in sources:
        try:
            path = source if isinstance(source, Path) else _download(source, scratch, progress)
            if is_published(path):
                return path
            trouble = "other content than published"
            if path.parent == scratch:
                path.unlink()
        except requests.HTTPError as error:
            trouble = f"the server answered {error.response.status_code}"
        except requests.RequestException as error:
            trouble = f"no connection ({type(error).__name__})"
        troubles.append(f"  {source}: {trouble}")
    lines = [f"{dataset.name} could not be downloaded:", *troubles, f"Without a network, {by_hand}."]
    raise AlassoError("\n".join(lines))


def _download(address: str, into: Path, progress: bool) -> Path:
    import pooch

    pooch.get_logger().setLevel("WARNING")
    base, _, name = address.rpartition("/")
    files = pooch.create(into, base_url=f"{base}/", registry={name: None}, retry_if_failed=_RETRIES)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = not (progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as shown:
        downloader = pooch.HTTPDownloader(
            progressbar=_Bar(shown, name),
            chunk_size=1 << 16,
            timeout=_TIMEOUT,
            headers={"Accept-Encoding": "identity"},  # compressed on the way, an archive has another hash
        )
        return Path(files.fetch(name, downloader=downloader))


class _Bar:
    """A progress bar with what pooch asks of one."""

    total: int = 0

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress, self._task = progress, progress.add_task(label, total=None)

    def update(self, count: int) -> None:
        self._progress.update(self._task, advance=count, total=self.total or None)

    def reset(self) -> None:
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
                _refuse_absurd(archive, [member.file_size for member in opened_zip.infolist()])
                opened_zip.extractall(into)  # drops what leads out of the folder from names
        else:
            with tarfile.open(archive) as opened_tar:
                _refuse_absurd(archive, [member.size for member in opened_tar])
                opened_tar.extractall(into, filter="data")  # refuses what leads out of the folder
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise AlassoError(f"{archive.name} is a damaged or unsafe archive: {error}") from error
    if not (into / wanted).is_dir():
        raise AlassoError(f"{archive.name} does not hold the folder {wanted}")
    return into / wanted


def _refuse_absurd(archive: Path, sizes: Sequence[int]) -> None:
    if sum(sizes) > MAX_BYTES or len(sizes) > MAX_MEMBERS:
        raise AlassoError(f"{archive.name} holds {len(sizes)} files of {sum(sizes)} bytes, more than any data set")
