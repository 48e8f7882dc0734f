"""Image sets in memory: their arrays, a user's own pictures, a folder a class, and Tiny ImageNet's folder."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from alasso.bench.config import count_of
from alasso.bench.data.datasets import OFFICIAL, UNVERIFIED, DataSet, FileReport, refuse, shorten
from alasso.bench.io import whole_file
from alasso.errors import AlassoError

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
_ClassPaths = dict[str, list[Path]]

MOST_PIXELS = 50_000_000  # of one picture: 150 MB in memory, and eight are read at a time
#: What pictures may be. Others hand the file to programs outside, as EPS does.
FORMATS = ("BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP")

_TEST_SHARE = 0.2
_SPLIT_SEED = 0


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A data set in memory: images as (count, channels, height, width) bytes, labels as class numbers.

    ``edition`` says which division or copy of the data this is and belongs beside every result on it.
    Pixels divided by ``scale`` lie between 0 and 1.
    """

    name: str
    edition: str
    train_images: Pixels
    train_labels: Labels
    test_images: Pixels
    test_labels: Labels
    classes: tuple[str, ...]
    scale: float = 255.0


def decode_all(
    paths: Sequence[Path], prepare: Callable[[Image.Image], Image.Image], shape: tuple[int, int, int]
) -> Pixels:
    """Decodes pictures side by side (Pillow lets go of the interpreter while it decodes) into one array."""
    images = np.empty((len(paths), *shape), dtype=np.uint8)

    def place(index: int) -> None:
        path = paths[index]
        try:
            with Image.open(path, formats=FORMATS) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise AlassoError(f"it has {opened.width}×{opened.height} pixels, more than {MOST_PIXELS:,}")
                pixels = np.asarray(prepare(opened), dtype=np.uint8).transpose(2, 0, 1)
        except UnidentifiedImageError as error:
            raise AlassoError(f"{path} cannot be read as a picture: it is none of {', '.join(FORMATS)}") from error
        except Exception as error:  # Pillow's readers raise what they happen to raise
            raise AlassoError(f"{path} cannot be read as a picture: {error or type(error).__name__}") from error
        if pixels.shape != shape:
            raise AlassoError(f"{path} is {pixels.shape[2]}×{pixels.shape[1]} pixels, not {shape[2]}×{shape[1]}")
        images[index] = pixels

    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is lower
        list(pool.map(place, range(len(paths))))
    return images


def to_rgb(image: Image.Image) -> Image.Image:
    """Any picture as 8-bit RGB: grey repeated, 16-bit scaled down, transparent parts on black."""
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        overlay = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", overlay.size, (0, 0, 0, 255)), overlay).convert("RGB")
    return image.convert("RGB")


def fitted(image: Image.Image, size: int) -> Image.Image:
    """Scaled so that it covers the square; what hangs over its sides is cut off."""
    return ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)


def load_folder(path: str | Path, size: int) -> ImageSet:
    """Reads a folder that has a subfolder a class.

    Pictures are scaled so that they cover the square, and what hangs over its sides is cut off. Where the
    folder has ``train`` and ``test`` (or ``val``) subfolders, these are the split; otherwise a fifth of
    every class, at least one picture, always the same for the same file names, is the test set.

    Args:
        path: The folder.
        size: Pixels a side that each picture is brought to.

    Returns:
        Images in RGB and labels, for training and for testing; classes in the order of their names.

    Raises:
        AlassoError: If the folder is not laid out like this, or a file is no picture.
    """
    root = Path(path).expanduser()
    train, test = _split(root)
    name, edition = root.resolve().name, _edition(root, train, test)
    return ImageSet(name, edition, *_read(train, size), *_read(test, size), classes=tuple(train))


def folder_classes(path: str | Path) -> tuple[str, ...]:
    """Lists the classes that :func:`load_folder` finds, without opening a picture.

    Args:
        path: The folder.

    Returns:
        Their names, in order.

    Raises:
        AlassoError: If the folder is not laid out as :func:`load_folder` needs it.
    """
    return tuple(_split(Path(path).expanduser())[0])


def folder_edition(path: str | Path) -> str:
    """Counts a folder's images and classes and takes their fingerprint, without opening a picture.

    The fingerprint is of names and sizes of files, so that a copied folder is the same. Another picture under an old
    name hardly ever has as many bytes; where it has, as uncompressed ones may, the fingerprint misses it.

    Args:
        path: The folder.

    Returns:
        The edition that :func:`load_folder` gives.

    Raises:
        AlassoError: If the folder is not laid out as :func:`load_folder` needs it.
    """
    root = Path(path).expanduser()
    return _edition(root, *_split(root))


def _edition(root: Path, train: _ClassPaths, test: _ClassPaths) -> str:
    pictures = [picture for name in train for picture in sorted((*train[name], *test[name]))]
    known = hashlib.sha256()
    for picture in pictures:
        line = f"{picture.relative_to(root).as_posix()}\0{picture.stat().st_size}\0"
        known.update(line.encode(errors="surrogateescape"))
    images = f"{count_of(len(pictures), 'image')} of {count_of(len(train), 'class', 'classes')}"
    return f"folder, {images}, {known.hexdigest()[:8]}"


def _split(root: Path) -> tuple[_ClassPaths, _ClassPaths]:
    if not root.is_dir():
        raise AlassoError(f"there is no folder {root}")
    test_root = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    # A class may well be called "train": only the pair is taken for a split.
    if test_root is None or not (root / "train").is_dir():
        return _seeded_split(root)
    train, test = _class_paths(root / "train", at_least=1), _class_paths(test_root, at_least=1)
    if odd := sorted(set(train) ^ set(test)):
        raise AlassoError(
            f"{root / 'train'} and {test_root} must have the same class folders; only one has {', '.join(odd)}"
        )
    return train, test


def _seeded_split(root: Path) -> tuple[_ClassPaths, _ClassPaths]:
    train: _ClassPaths = {}
    test: _ClassPaths = {}
    for name, paths in _class_paths(root, at_least=2).items():
        tested = held_out(len(paths))
        test[name] = [picture for picture, is_tested in zip(paths, tested, strict=True) if is_tested]
        train[name] = [picture for picture, is_tested in zip(paths, tested, strict=True) if not is_tested]
    return train, test


def held_out(count: int) -> npt.NDArray[np.bool_]:
    """Which of a class's examples are its test set: a fifth, at least one."""
    # RandomState's stream is frozen for good, and a fresh one a class keeps the others' split as it was when a class
    # is added.
    order = np.random.RandomState(_SPLIT_SEED).permutation(count)
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[order[: max(1, round(_TEST_SHARE * count))]] = True
    return chosen


def _class_paths(root: Path, at_least: int) -> _ClassPaths:
    """Every class folder's pictures, classes and pictures in the order of their names."""
    suffixes = set(Image.registered_extensions())
    folders = sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not folders:
        raise AlassoError(f"{root} has no class folders: it needs one folder a class, with the class's pictures")
    found: _ClassPaths = {}
    for folder in folders:
        pictures = (child for child in folder.iterdir() if child.suffix.lower() in suffixes and child.is_file())
        found[folder.name] = sorted(picture for picture in pictures if not picture.name.startswith("."))
        if (count := len(found[folder.name])) < at_least:
            raise AlassoError(
                f"the class folder {folder} has {count_of(count, 'picture')}; it needs at least {at_least}"
            )
    return found


def _read(classes: _ClassPaths, size: int) -> tuple[Pixels, Labels]:
    paths = [picture for pictures in classes.values() for picture in pictures]
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), list(map(len, classes.values())))

    def square(picture: Image.Image) -> Image.Image:
        return fitted(to_rgb(ImageOps.exif_transpose(picture)), size)

    return decode_all(paths, square, (3, size, size)), labels


# -- Tiny ImageNet's folder of JPEGs -------------------------------------------------------------------------------

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
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads((folder / _MARKER).read_text(encoding="utf-8"))["sha256"][_WHOLE])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise AlassoError(f"{path} is damaged: it is no text") from error


def _list_folder(folder: Path) -> _Listing:
    ids = sorted(set(_lines(folder / _CLASS_IDS)))
    number = {wnid: index for index, wnid in enumerate(ids)}
    by_class = [sorted((folder / "train" / wnid / "images").glob("*.JPEG")) for wnid in ids]
    annotations = [line.split("\t") for line in _lines(folder / _ANNOTATIONS)]
    if odd := next((row[0] for row in annotations if len(row) < 2 or "\0" in row[0]), None):
        raise AlassoError(f"{folder / _ANNOTATIONS} is damaged: it names no class for {odd:.60}")
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
    names = {wnid: words for wnid, _, words in (line.partition("\t") for line in _lines(folder / _CLASS_NAMES))}
    return tuple(names.get(wnid, wnid).split(",")[0].strip() for wnid in ids)


def _digest(listing: _Listing) -> str:
    """One hash of all that the arrays are made from: names, pictures and labels."""
    total = hashlib.sha256()
    lists = (listing.folder / _CLASS_IDS, listing.folder / _ANNOTATIONS)
    for path in (*lists, *listing.train_paths, *listing.test_paths):
        total.update(path.relative_to(listing.folder).as_posix().encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
