"""Checking a data set and reading it into arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from alasso.bench.data.datasets import DataSet, data_set
from alasso.bench.data.files import FileReport, disk_errors, inspect, refusal, settle_edition, shorten, where
from alasso.bench.data.images import ImageSet, Labels, Pixels, resized
from alasso.bench.data.tiny import check_folder, load_tiny
from alasso.errors import AlassoError

_DIGITS_EDITION = "scikit-learn"
_DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
_DIGITS_SEED = 0


def check(name: str, data_dir: str | Path | None = None) -> list[FileReport]:
    """Compare what lies in a data set's folder with what was published, file by file."""
    dataset, folder = data_set(name), where(name, data_dir)
    if dataset.reader == "digits":
        return [_check_digits(*_read_digits())]
    with disk_errors("read", folder):
        if dataset.reader == "tiny-imagenet":
            return check_folder(dataset, folder)
        return settle_edition([inspect(file, folder)[0] for file in dataset.files])


def load(name: str, data_dir: str | Path | None = None, *, size: int | None = None) -> ImageSet:
    """Read a data set whose content has been compared with what was published.

    With ``size``, images are brought to ``size`` × ``size`` pixels. The digits have no published split: 36
    images of every class, drawn with a fixed seed, are the test set (360), the other 1,437 are for training.
    """
    dataset, folder = data_set(name), where(name, data_dir)
    with disk_errors("read", folder):
        if dataset.reader == "digits":
            images = _load_digits(dataset)
        elif dataset.reader == "tiny-imagenet":
            images = load_tiny(dataset, folder)
        else:
            images = _load_files(dataset, folder)
    if size is None:
        return images
    return replace(
        images,
        train_images=resized(images.train_images, size),
        test_images=resized(images.test_images, size),
    )


def _load_files(dataset: DataSet, folder: Path) -> ImageSet:
    inspected = [inspect(file, folder) for file in dataset.files]
    reports = settle_edition([report for report, _ in inspected])
    if error := refusal(dataset, folder, reports):
        raise error
    contents = [content for _, content in inspected]
    cut = len(dataset.train_files)
    train_images, train_labels = _parse(dataset, contents[:cut])
    test_images, test_labels = _parse(dataset, contents[cut:])
    return ImageSet(
        name=dataset.name,
        edition=reports[0].edition,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=dataset.classes,
    )


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
    batches = [np.frombuffer(content, dtype=np.uint8).reshape(-1, length) for content in contents]
    images = np.empty((sum(map(len, batches)), length - label_bytes), dtype=np.uint8)
    np.concatenate([batch[:, label_bytes:] for batch in batches], out=images)
    labels = np.concatenate([batch[:, label_bytes - 1] for batch in batches]).astype(np.int64)
    return images.reshape(-1, *shape), labels


def _read_digits() -> tuple[Pixels, Labels]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8)[:, np.newaxis], digits.target.astype(np.int64)


def _check_digits(images: Pixels, labels: Labels) -> FileReport:
    found = hashlib.sha256(images.tobytes() + labels.astype(np.uint8).tobytes()).hexdigest()
    if found == _DIGITS_SHA256:
        return FileReport("digits.csv.gz", "ok", f"sha256 {shorten(found)}", _DIGITS_EDITION)
    detail = (
        f"scikit-learn's digits are not those known: expected sha256 {shorten(_DIGITS_SHA256)}, found {shorten(found)}"
    )
    return FileReport("digits.csv.gz", "wrong", detail)


def _load_digits(dataset: DataSet) -> ImageSet:
    images, labels = _read_digits()
    report = _check_digits(images, labels)
    if report.status != "ok":
        raise AlassoError(f"{report.detail}; install scikit-learn anew")
    # RandomState's stream is frozen for good, so the split is the same under every version of NumPy.
    random = np.random.RandomState(_DIGITS_SEED)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in range(len(dataset.classes)):
        of_class = np.flatnonzero(labels == label)
        held_out[random.permutation(of_class)[: dataset.test_per_class]] = True
    return ImageSet(
        name=dataset.name,
        edition=report.edition,
        train_images=images[~held_out],
        train_labels=labels[~held_out],
        test_images=images[held_out],
        test_labels=labels[held_out],
        classes=dataset.classes,
        scale=16.0,
    )
