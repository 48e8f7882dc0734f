"""An image set made of rows that hold an image and a label each, as the library `datasets` of Hugging Face has them.

Nothing here imports that library: a data set is what iterates over mappings, and several are a mapping of splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from alasso.bench.data.images import ImageSet, fitted, held_out, to_rgb
from alasso.errors import AlassoError

Array = npt.NDArray[Any]
GREY = ("1", "L")  # Pillow's modes that stay one channel
CHANNELS = (1, 3)
MOST_NAMED = 8  # labels in a message


def load_rows(dataset: Any, *, image: str, label: str, test: str, size: int | None, name: str) -> ImageSet:
    """Reads images and labels from rows.

    Args:
        dataset: Splits, of which ``"train"`` is trained on; or one data set, of which a fifth of every class, at least
            one row, always the same, is the test set.
        image: The column of images, Pillow's or arrays. Whole numbers are divided by 255, floats taken as they are.
        label: The column of labels: whole numbers from 0 on, or texts.
        test: The split that is tested on.
        size: Pixels a side that Pillow's images are brought to; None leaves them as they are.
        name: What the image set is called.

    Returns:
        Images and labels, for training and for testing; classes in the order of their labels.

    Raises:
        AlassoError: A split or a column is missing, or does not hold what it should.
    """
    splits = _splits(dataset, test)
    read = [_columns(rows, image, label, size) for rows in splits]
    images = _stacked([one for part, _ in read for one in part], image)
    values, labels = np.unique(_plain([one for _, part in read for one in part], label), return_inverse=True)
    tested = np.arange(len(labels)) >= len(read[0][1])
    if len(splits) == 1:
        for number in range(len(values)):
            tested[labels == number] = held_out(int((labels == number).sum()))
    if odd := sorted({*labels[tested]} ^ {*labels[~tested]}):
        names = ", ".join(str(values[number]) for number in odd[:MOST_NAMED])
        raise AlassoError(f"rows to train on and rows to test on must have the same labels; only one has {names}")
    return ImageSet(
        name=name,
        edition="",
        train_images=images[~tested],
        train_labels=labels[~tested],
        test_images=images[tested],
        test_labels=labels[tested],
        classes=_names(splits[0], label, values),
        scale=255.0 if images.dtype == np.uint8 else 1.0,
    )


def _splits(dataset: Any, test: str) -> tuple[Iterable[Any], ...]:
    """What is trained on, and what is tested on if that is apart."""
    if not isinstance(dataset, Iterable):
        raise AlassoError(f"a dataset is a mapping of splits, or rows, not {type(dataset).__name__}")
    if not isinstance(dataset, Mapping):
        return (dataset,)
    for split in ("train", test):
        if split not in dataset:
            has = ", ".join(map(str, dataset)) or "none"
            raise AlassoError(
                f"the dataset has no split {split!r}, only {has}: name the one to test on with test=, or pass one alone"
            )
    return dataset["train"], dataset[test]


def _columns(rows: Iterable[Any], image: str, label: str, size: int | None) -> tuple[list[Array], list[Any]]:
    """Images as (channels, height, width), and labels as they are."""
    images, labels = [], []
    for row in rows:
        if not isinstance(row, Mapping):
            raise AlassoError(f"a row must be a mapping of columns, not {type(row).__name__}")
        for column in (image, label):
            if column not in row:
                raise AlassoError(
                    f"there is no column {column!r}, only {', '.join(row)}: name both with image=, label="
                )
        images.append(_pixels(row[image], image, size))
        labels.append(row[label])
    if not labels:
        raise AlassoError("the dataset has no rows")
    return images, labels


def _pixels(value: Any, column: str, size: int | None) -> Array:
    if isinstance(value, Image.Image):
        picture = value.convert("L") if value.mode in GREY else to_rgb(value)
        value = picture if size is None else fitted(picture, size)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.ndim == 2:
        array = array[None]
    elif array.ndim == 3 and array.shape[2] in CHANNELS:
        array = array.transpose(2, 0, 1)
    if array.ndim != 3 or array.shape[0] not in CHANNELS or array.dtype.kind not in "iuf":
        what = f"an array of the shape {array.shape}" if array.ndim else type(value).__name__
        raise AlassoError(f"column {column!r} must hold images, of Pillow or arrays, grey or in colour, not {what}")
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.size and not 0 <= array.min() <= array.max() <= 255:
        raise AlassoError(f"whole numbers of an image lie between 0 and 255; column {column!r} has others")
    return array.astype(np.uint8)


def _stacked(images: Sequence[Array], column: str) -> Array:
    """All in one array; grey images among those in colour get three channels."""
    channels = max(len(one) for one in images)
    images = [np.broadcast_to(one, (channels, *one.shape[1:])) for one in images]
    kinds = sorted({f"{one.shape[2]}×{one.shape[1]} {one.dtype}" for one in images})
    if len(kinds) > 1:
        raise AlassoError(f"column {column!r} holds images of {', '.join(kinds[:3])}: bring all to one; size= does it")
    return np.stack(images)


def _plain(labels: Sequence[Any], column: str) -> Array:
    try:
        values = np.asarray([one.item() if hasattr(one, "item") else one for one in labels])
    except (ValueError, RuntimeError):  # lists of different lengths, tensors of many numbers
        values = np.asarray(None)
    if values.ndim != 1 or values.dtype.kind not in "iuU" or (values.dtype.kind == "i" and values.min() < 0):
        raise AlassoError(f"column {column!r} must hold one label a row: a whole number from 0 on, or a text")
    return values


def _names(rows: Any, label: str, values: Array) -> tuple[str, ...]:
    """Names of the classes: those that the data set gives the numbers, else the labels themselves."""
    named = getattr((getattr(rows, "features", None) or {}).get(label), "names", None)
    return tuple(str(named[value] if named and value.dtype.kind in "iu" else value) for value in values)
