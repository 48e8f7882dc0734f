"""Image sets in memory: their arrays, and a user's own pictures, a folder a class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from alasso.bench.labels import count_of
from alasso.errors import AlassoError

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
_ClassPaths = dict[str, list[Path]]

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
            with Image.open(path) as opened:
                pixels = np.asarray(prepare(opened), dtype=np.uint8).transpose(2, 0, 1)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise AlassoError(f"{path} cannot be read as a picture: {error}") from error
        if pixels.shape != shape:
            raise AlassoError(f"{path} is {pixels.shape[2]}×{pixels.shape[1]} pixels, not {shape[2]}×{shape[1]}")
        images[index] = pixels

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
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
        # RandomState's stream is frozen for good, and a fresh one a class keeps the others' split as it
        # was when a class is added.
        order = np.random.RandomState(_SPLIT_SEED).permutation(len(paths))
        held_out = set(order[: max(1, round(_TEST_SHARE * len(paths)))].tolist())
        test[name] = [picture for index, picture in enumerate(paths) if index in held_out]
        train[name] = [picture for index, picture in enumerate(paths) if index not in held_out]
    return train, test


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
        upright = to_rgb(ImageOps.exif_transpose(picture))
        return ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR)

    return decode_all(paths, square, (3, size, size)), labels
