"""Tiny ImageNet: listing, checking and decoding its folder of JPEGs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alasso.bench.data.datasets import OFFICIAL, UNVERIFIED, DataSet, FileReport, refuse, shorten
from alasso.bench.data.images import ImageSet, Labels, decode_all, to_rgb
from alasso.bench.io import whole_file
from alasso.errors import AlassoError

_CLASS_IDS = "wnids.txt"
_CLASS_NAMES = "words.txt"
_ANNOTATIONS = "val/val_annotations.txt"
_MARKER = ".alasso.json"
_WHOLE = "images and labels"
"""The name under which the marker notes the digest of everything that the arrays are made from."""


@dataclass(frozen=True)
class _Listing:
    """What the folder names, its labels as places in ``ids``; -1 for an id that is not in the list."""

    folder: Path
    ids: list[str]
    train_paths: list[Path]
    train_labels: Labels
    test_paths: list[Path]
    test_labels: Labels


def check_tiny(dataset: DataSet, folder: Path) -> list[FileReport]:
    """Reports on the folder's parts, and on its content if it came from the published archive."""
    reports = _check_parts(dataset, folder)
    if any(report.status != "ok" for report in reports):
        return reports
    return [*reports, _check_content(_list_folder(folder))]


def mark_folder(folder: Path) -> None:
    """Notes what a folder fresh from an archive with the published md5 holds, to check it later on."""
    marker = {"edition": OFFICIAL, "sha256": {_WHOLE: _digest(_list_folder(folder))}}
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def load_tiny(dataset: DataSet, folder: Path) -> ImageSet:
    """Decodes the folder, or takes the arrays decoded before if they are still there and whole.

    Classes are numbered in the order of their WordNet ids, as a class-folder reader would number them.
    """
    refuse(dataset, folder, _check_parts(dataset, folder))
    listing, digest = _list_folder(folder), _marked_digest(folder)
    # Named after the content: what was decoded from other pictures stays unused.
    cached = [folder.with_name(f"{folder.name}.{(digest or UNVERIFIED)[:12]}.{half}.npy") for half in ("train", "test")]
    try:
        # Copy-on-write mapping: torch warns of arrays that it could write through to the file.
        train, test = (np.load(path, mmap_mode="c") for path in cached)
    except (OSError, ValueError, EOFError):
        refuse(dataset, folder, [_check_content(listing)])
        train, test = (decode_all(paths, to_rgb, dataset.shape) for paths in (listing.train_paths, listing.test_paths))
        with suppress(AlassoError):  # a full disk costs only time next time
            for path, array in zip(cached, (train, test), strict=True):
                with whole_file(path) as stream:
                    np.save(stream, array)
    return ImageSet(
        name=dataset.name,
        edition=OFFICIAL if digest else UNVERIFIED,
        train_images=train,
        train_labels=listing.train_labels,
        test_images=test,
        test_labels=listing.test_labels,
        classes=_class_names(folder, listing.ids),
    )


def _check_parts(dataset: DataSet, folder: Path) -> list[FileReport]:
    missing = [name for name in (_CLASS_IDS, "train", _ANNOTATIONS, "val/images") if not (folder / name).exists()]
    if missing:
        return [FileReport(name, "missing") for name in missing]
    listing, classes = _list_folder(folder), dataset.class_count
    if len(listing.ids) != classes:
        detail = f"{folder / _CLASS_IDS} names {len(listing.ids)} classes instead of {classes}"
        return [FileReport(_CLASS_IDS, "wrong", detail)]
    present = listing.test_labels[[path.exists() for path in listing.test_paths]]
    return [
        _count_report("train", folder, listing.train_labels, classes, dataset.train_per_class),
        _count_report("val/images", folder, present, classes, dataset.test_per_class),
    ]


def _count_report(name: str, folder: Path, labels: Labels, classes: int, each: int) -> FileReport:
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    if (counts == each).all():
        return FileReport(name, "ok", f"{len(labels)} pictures")
    odd = int(np.flatnonzero(counts != each)[0])
    wnid = _list_folder(folder).ids[odd]
    return FileReport(name, "wrong", f"{folder / name} has {counts[odd]} pictures of class {wnid} instead of {each}")


def _check_content(listing: _Listing) -> FileReport:
    expected = _marked_digest(listing.folder)
    if expected is None:
        return FileReport(_WHOLE, "ok", "complete, but not from a checked archive", UNVERIFIED)
    found = _digest(listing)
    if found == expected:
        return FileReport(_WHOLE, "ok", f"sha256 {shorten(found)}", OFFICIAL)
    detail = f"{listing.folder} has changed: expected sha256 {shorten(expected)}, found {shorten(found)}"
    return FileReport(_WHOLE, "wrong", detail)


def _marked_digest(folder: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / _MARKER).read_text(encoding="utf-8"))["sha256"][_WHOLE])
    return None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _list_folder(folder: Path) -> _Listing:
    ids = sorted(set(_lines(folder / _CLASS_IDS)))
    number = {wnid: index for index, wnid in enumerate(ids)}
    by_class = [sorted((folder / "train" / wnid / "images").glob("*.JPEG")) for wnid in ids]
    annotations = [line.split("\t") for line in _lines(folder / _ANNOTATIONS)]
    return _Listing(
        folder=folder,
        ids=ids,
        train_paths=[path for paths in by_class for path in paths],
        train_labels=np.repeat(np.arange(len(ids), dtype=np.int64), list(map(len, by_class))),
        test_paths=[folder / "val" / "images" / row[0] for row in annotations],
        test_labels=np.array([number.get(row[1], -1) for row in annotations], dtype=np.int64),
    )


def _class_names(folder: Path, ids: Sequence[str]) -> tuple[str, ...]:
    """The first of each class's names."""
    names = dict(line.split("\t") for line in _lines(folder / _CLASS_NAMES))
    return tuple(names[wnid].split(",")[0].strip() for wnid in ids)


def _digest(listing: _Listing) -> str:
    """One hash of all that the arrays are made from: names, pictures and labels."""
    total = hashlib.sha256()
    lists = (listing.folder / _CLASS_IDS, listing.folder / _ANNOTATIONS)
    for path in (*lists, *listing.train_paths, *listing.test_paths):
        total.update(path.relative_to(listing.folder).as_posix().encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
