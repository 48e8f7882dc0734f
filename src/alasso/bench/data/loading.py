"""Checking a data set against what was published, and reading it into arrays."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from alasso.bench.data.datasets import DataFile, DataSet, FileReport, data_set, refuse, shorten, where
from alasso.bench.data.images import ImageSet, Labels, Pixels
from alasso.bench.data.tiny import check_tiny, load_tiny
from alasso.errors import AlassoError

_LIMIT = 1 << 30
"""No published file is near this; unwrapping stops there so that a gzip bomb cannot fill the memory."""
_DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
_DIGITS_SEED = 0


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


def _check_digits(images: Pixels, labels: Labels) -> FileReport:
    found = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    if found == _DIGITS_SHA256:
        return FileReport("digits.csv.gz", "ok", f"sha256 {shorten(found)}", "scikit-learn")
    detail = "scikit-learn's digits are not those known"
    return FileReport(
        "digits.csv.gz", "wrong", f"{detail}: expected sha256 {shorten(_DIGITS_SHA256)}, found {shorten(found)}"
    )


def _load_digits(dataset: DataSet) -> ImageSet:
    images, labels = _read_digits()
    report = _check_digits(images, labels)
    if report.status != "ok":
        raise AlassoError(f"{report.detail}; install scikit-learn anew")
    # RandomState's stream is frozen for good, so the split is the same under every version of NumPy.
    random = np.random.RandomState(_DIGITS_SEED)
    test = np.zeros(len(labels), dtype=bool)
    for label in range(len(dataset.classes)):
        test[random.permutation(np.flatnonzero(labels == label))[: dataset.test_per_class]] = True
    halves = (images[~test], labels[~test], images[test], labels[test])
    return ImageSet(dataset.name, report.edition, *halves, dataset.classes, scale=16.0)
