"""A user's own pictures, a folder a class, as an image set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alasso.bench.data.images import (
    ImageSet,
    Labels,
    Pixels,
    channels_first,
    decode_all,
    require_size,
    to_rgb,
)
from alasso.bench.labels import count_of
from alasso.errors import AlassoError

_TEST_SHARE = 0.2
_SPLIT_SEED = 0

_ClassPaths = dict[str, list[Path]]


def load_folder(path: str | Path, size: int) -> ImageSet:
    """Read a folder that has a subfolder a class, each picture brought to ``size`` × ``size`` RGB.

    Pictures are scaled so that they cover the square, and what hangs over its sides is cut off. Where the
    folder has ``train`` and ``test`` (or ``val``) subfolders, these are the split; otherwise a fifth of
    every class, at least one picture, always the same for the same file names, is the test set.
    """
    root = Path(path).expanduser()
    require_size(size)
    train, test = _split(root)
    train_images, train_labels = _read(train, size)
    test_images, test_labels = _read(test, size)
    return ImageSet(
        name=root.resolve().name,
        edition=_edition(root, train, test),
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=tuple(train),
    )


def folder_classes(path: str | Path) -> tuple[str, ...]:
    """The classes that :func:`load_folder` finds; no picture is opened."""
    return tuple(_split(Path(path).expanduser())[0])


def folder_edition(path: str | Path) -> str:
    """How many images of how many classes :func:`load_folder` finds, and a fingerprint; no picture is opened.

    The fingerprint is of names and sizes of files, so that a copied folder is the same. Another picture under an old
    name hardly ever has as many bytes; where it has, as uncompressed ones may, it is not noticed.
    """
    root = Path(path).expanduser()
    return _edition(root, *_split(root))


def _edition(root: Path, train: _ClassPaths, test: _ClassPaths) -> str:
    known = hashlib.sha256()
    count = 0
    for name, size in _names_and_sizes(root, train, test):
        known.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        count += 1
    images = f"{count_of(count, 'image')} of {count_of(len(train), 'class', 'classes')}"
    return f"folder, {images}, {known.hexdigest()[:8]}"


def _names_and_sizes(root: Path, train: _ClassPaths, test: _ClassPaths) -> Iterator[tuple[str, int]]:
    for name in train:
        for picture in sorted((*train[name], *test[name])):
            try:
                yield picture.relative_to(root).as_posix(), picture.stat().st_size
            except OSError as error:
                raise AlassoError(f"{picture} cannot be read: {error.strerror}") from error


def _split(root: Path) -> tuple[_ClassPaths, _ClassPaths]:
    if not root.is_dir():
        raise AlassoError(f"there is no folder {root}")
    return _published_split(root) or _seeded_split(root)


def _published_split(root: Path) -> tuple[_ClassPaths, _ClassPaths] | None:
    test_root = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    # A class may well be called "train": only the pair is taken for a split.
    if test_root is None or not (root / "train").is_dir():
        return None
    train, test = _class_paths(root / "train"), _class_paths(test_root)
    if list(train) != list(test):
        odd = ", ".join(sorted(set(train) ^ set(test)))
        raise AlassoError(f"{root / 'train'} and {test_root} must have the same class folders; only one has {odd}")
    for half_root, half in ((root / "train", train), (test_root, test)):
        for name, paths in half.items():
            _require_pictures(half_root / name, paths, at_least=1)
    return train, test


def _seeded_split(root: Path) -> tuple[_ClassPaths, _ClassPaths]:
    train: _ClassPaths = {}
    test: _ClassPaths = {}
    for name, paths in _class_paths(root).items():
        _require_pictures(root / name, paths, at_least=2)
        # RandomState's stream is frozen for good, and a fresh one a class keeps the others' split as it
        # was when a class is added.
        order = np.random.RandomState(_SPLIT_SEED).permutation(len(paths))
        held_out = {int(index) for index in order[: max(1, round(_TEST_SHARE * len(paths)))]}
        test[name] = [picture for index, picture in enumerate(paths) if index in held_out]
        train[name] = [picture for index, picture in enumerate(paths) if index not in held_out]
    return train, test


def _class_paths(root: Path) -> _ClassPaths:
    """Every class folder's pictures, classes and pictures in the order of their names."""
    from PIL import Image

    suffixes = set(Image.registered_extensions())
    folders = sorted(child for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not folders:
        raise AlassoError(f"{root} has no class folders: it needs one folder a class, with the class's pictures")
    return {
        folder.name: sorted(
            child
            for child in folder.iterdir()
            if child.is_file() and child.suffix.lower() in suffixes and not child.name.startswith(".")
        )
        for folder in folders
    }


def _require_pictures(folder: Path, paths: list[Path], at_least: int) -> None:
    if len(paths) < at_least:
        raise AlassoError(
            f"the class folder {folder} has {count_of(len(paths), 'picture')}; it needs at least {at_least}"
        )


def _read(classes: _ClassPaths, size: int) -> tuple[Pixels, Labels]:
    paths = [picture for pictures in classes.values() for picture in pictures]
    counts = [len(pictures) for pictures in classes.values()]
    labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return decode_all(paths, lambda picture: _square(picture, size), (3, size, size)), labels


def _square(path: Path, size: int) -> Pixels:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            upright = to_rgb(ImageOps.exif_transpose(opened))
            return channels_first(ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise AlassoError(f"{path} cannot be read as a picture: {error}") from error
