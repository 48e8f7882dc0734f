"""Tiny ImageNet: listing, checking and decoding its folder of JPEGs."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alasso.bench.data.datasets import OFFICIAL, UNVERIFIED, DataSet
from alasso.bench.data.files import (
    FileReport,
    marked_digest,
    part_file,
    refusal,
    shorten,
    write_marker,
)
from alasso.bench.data.images import ImageSet, Labels, Pixels, channels_first, decode_all, to_rgb
from alasso.errors import AlassoError

_CLASS_IDS = "wnids.txt"
_CLASS_NAMES = "words.txt"
_ANNOTATIONS = "val/val_annotations.txt"
_WHOLE = "images and labels"
"""The name under which the marker notes the digest of everything that the arrays are made from."""


@dataclass(frozen=True)
class _Listing:
    folder: Path
    classes: tuple[str, ...]
    train_paths: list[Path]
    train_labels: Labels
    test_paths: list[Path]
    test_labels: Labels


def check_folder(dataset: DataSet, folder: Path) -> list[FileReport]:
    """Report on the folder's parts, and on its content if it came from the published archive."""
    reports = _check_parts(dataset, folder)
    if any(report.status != "ok" for report in reports):
        return reports
    listing = _list_folder(folder)
    expected = marked_digest(folder, _WHOLE)
    if expected is None:
        return [*reports, FileReport(_WHOLE, "ok", "complete, but not from a checked archive", UNVERIFIED)]
    return [*reports, _compare(folder, expected, _digest(listing))]


def mark_folder(folder: Path) -> None:
    """Note the content of a folder fresh from an archive with the published md5."""
    write_marker(folder, {_WHOLE: _digest(_list_folder(folder))})


def load_tiny(dataset: DataSet, folder: Path) -> ImageSet:
    """Decode the folder, or take the arrays decoded before if they are still there and whole.

    Classes are numbered in the order of their WordNet ids, as a class-folder reader would number them.
    """
    if error := refusal(dataset, folder, _check_parts(dataset, folder)):
        raise error
    listing = _list_folder(folder)
    cached = _Cache(folder, marked_digest(folder, _WHOLE))
    arrays = cached.load(listing, dataset.shape)
    if arrays is None:
        arrays = _decode(dataset, listing)
        cached.save(*arrays)
    return ImageSet(
        name=dataset.name,
        edition=UNVERIFIED if cached.digest is None else OFFICIAL,
        train_images=arrays[0],
        train_labels=listing.train_labels,
        test_images=arrays[1],
        test_labels=listing.test_labels,
        classes=listing.classes,
    )


def _check_parts(dataset: DataSet, folder: Path) -> list[FileReport]:
    missing = [name for name in (_CLASS_IDS, "train", _ANNOTATIONS, "val/images") if not (folder / name).exists()]
    if missing:
        return [FileReport(name, "missing", f"{name} is not in {folder}") for name in missing]
    ids = _class_ids(folder)
    if len(set(ids)) != dataset.class_count:
        detail = f"{folder / _CLASS_IDS} names {len(set(ids))} classes instead of {dataset.class_count}"
        return [FileReport(_CLASS_IDS, "wrong", detail)]
    annotations = _annotations(folder)
    present = {path.name for path in _pictures(folder / "val" / "images")}
    if absent := {name for name, _ in annotations} - present:
        detail = f"{folder / 'val' / 'images'} lacks {len(absent)} pictures, among them {min(absent)}"
        return [FileReport("val/images", "wrong", detail)]
    labelled = Counter(wnid for _, wnid in annotations)
    if unknown := labelled.keys() - set(ids):
        detail = f"{folder / _ANNOTATIONS} names the class {min(unknown)}, which {_CLASS_IDS} does not have"
        return [FileReport(_ANNOTATIONS, "wrong", detail)]
    train_counts = {wnid: len(_pictures(folder / "train" / wnid / "images")) for wnid in ids}
    test_counts = {wnid: labelled[wnid] for wnid in ids}
    return [
        _count_report("train", folder / "train", train_counts, dataset.train_per_class),
        _count_report("val/images", folder / "val" / "images", test_counts, dataset.test_per_class),
    ]


def _count_report(name: str, place: Path, counts: dict[str, int], each: int) -> FileReport:
    for wnid, count in counts.items():
        if count != each:
            return FileReport(name, "wrong", f"{place} has {count} pictures of class {wnid} instead of {each}")
    return FileReport(name, "ok", f"{sum(counts.values())} pictures")


def _text(path: Path) -> str:
    # A damaged list is to be refused for what it lacks and not for its encoding.
    return path.read_text(encoding="utf-8", errors="replace")


def _class_ids(folder: Path) -> list[str]:
    return sorted(_text(folder / _CLASS_IDS).split())


def _class_names(folder: Path, ids: Sequence[str]) -> tuple[str, ...]:
    """The first of each class's names; its id where there is no list of names."""
    names: dict[str, str] = {}
    if (folder / _CLASS_NAMES).is_file():
        for line in _text(folder / _CLASS_NAMES).splitlines():
            wnid, _, words = line.partition("\t")
            names[wnid] = words.split(",")[0].strip()
    return tuple(names.get(wnid) or wnid for wnid in ids)


def _pictures(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.JPEG"))


def _annotations(folder: Path) -> list[tuple[str, str]]:
    rows = (line.split("\t") for line in _text(folder / _ANNOTATIONS).splitlines())
    return [(row[0], row[1]) for row in rows if len(row) > 1]


def _list_folder(folder: Path) -> _Listing:
    ids = _class_ids(folder)
    number = {wnid: index for index, wnid in enumerate(ids)}
    by_class = [_pictures(folder / "train" / wnid / "images") for wnid in ids]
    counts = [len(paths) for paths in by_class]
    annotations = _annotations(folder)
    return _Listing(
        folder=folder,
        classes=_class_names(folder, ids),
        train_paths=[path for paths in by_class for path in paths],
        train_labels=np.repeat(np.arange(len(ids), dtype=np.int64), counts),
        test_paths=[folder / "val" / "images" / name for name, _ in annotations],
        test_labels=np.array([number[wnid] for _, wnid in annotations], dtype=np.int64),
    )


def _digest(listing: _Listing) -> str:
    """One hash of all that the arrays are made from: names, pictures and labels."""
    total = hashlib.sha256()
    for path in (
        listing.folder / _CLASS_IDS,
        listing.folder / _ANNOTATIONS,
        *listing.train_paths,
        *listing.test_paths,
    ):
        total.update(path.relative_to(listing.folder).as_posix().encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _compare(folder: Path, expected: str, found: str) -> FileReport:
    if found == expected:
        return FileReport(_WHOLE, "ok", f"sha256 {shorten(found)}", OFFICIAL)
    detail = f"{folder} has changed: expected sha256 {shorten(expected)}, found {shorten(found)}"
    return FileReport(_WHOLE, "wrong", detail)


def _decode(dataset: DataSet, listing: _Listing) -> tuple[Pixels, Pixels]:
    expected = marked_digest(listing.folder, _WHOLE)
    if expected is not None and (
        error := refusal(dataset, listing.folder, [_compare(listing.folder, expected, _digest(listing))])
    ):
        raise error

    def decode(path: Path) -> Pixels:
        return _decode_jpeg(path, dataset.shape)

    return (
        decode_all(listing.train_paths, decode, dataset.shape),
        decode_all(listing.test_paths, decode, dataset.shape),
    )


def _decode_jpeg(path: Path, shape: tuple[int, int, int]) -> Pixels:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(path.read_bytes())) as opened:
            pixels = channels_first(to_rgb(opened))
    except (OSError, ValueError, SyntaxError) as error:
        raise AlassoError(f"{path} cannot be read as a picture: {error}") from error
    if pixels.shape != shape:
        raise AlassoError(f"{path} is {pixels.shape[2]}×{pixels.shape[1]} pixels, not {shape[2]}×{shape[1]}")
    return pixels


class _Cache:
    """The decoded arrays beside the data set's folder, for decoding takes far longer than reading them."""

    def __init__(self, folder: Path, digest: str | None) -> None:
        self.digest = digest
        self._train = folder.with_name(f"{folder.name}.train.npy")
        self._test = folder.with_name(f"{folder.name}.test.npy")
        self._note = folder.with_name(f"{folder.name}.cache.json")

    def load(self, listing: _Listing, shape: tuple[int, int, int]) -> tuple[Pixels, Pixels] | None:
        """The arrays, mapped and not read; None unless they are of this content and of the right count."""
        try:
            if json.loads(self._note.read_text(encoding="utf-8")) != {"sha256": self.digest}:
                return None
            # Copy-on-write mapping: torch warns of arrays that it could write through to the file.
            train: Pixels = np.load(self._train, mmap_mode="c")
            test: Pixels = np.load(self._test, mmap_mode="c")
        except (OSError, ValueError, EOFError):
            return None
        if train.shape != (len(listing.train_paths), *shape) or test.shape != (
            len(listing.test_paths),
            *shape,
        ):
            return None
        return (train, test) if train.dtype == test.dtype == np.uint8 else None

    def save(self, train: Pixels, test: Pixels) -> None:
        """Write the arrays, each whole or not at all; a disk that refuses costs only time next time."""
        try:
            self._note.unlink(missing_ok=True)
            for path, array in ((self._train, train), (self._test, test)):
                with part_file(path) as part:
                    with part.open("wb") as stream:
                        np.save(stream, array)
                    part.replace(path)
            with part_file(self._note) as part:
                part.write_text(json.dumps({"sha256": self.digest}), encoding="utf-8")
                part.replace(self._note)
        except OSError:
            return
