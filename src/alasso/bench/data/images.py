"""Image arrays: the set that a stream is cut from, and the ways of bringing pictures into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from alasso.errors import AlassoError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

_RESIZED_AT_ONCE = 10_000


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


def _workers() -> int:
    return min(8, os.cpu_count() or 1)


def decode_all(paths: Sequence[Path], decode: Callable[[Path], Pixels], shape: tuple[int, int, int]) -> Pixels:
    """Decode pictures side by side (Pillow lets go of the interpreter while it decodes) into one array."""
    images = np.empty((len(paths), *shape), dtype=np.uint8)

    def place(index: int) -> None:
        images[index] = decode(paths[index])

    with ThreadPoolExecutor(_workers()) as pool:
        for _ in pool.map(place, range(len(paths))):
            pass
    return images


def resized(images: Pixels, size: int) -> Pixels:
    """Every image brought to ``size`` × ``size`` by antialiased bilinear interpolation."""
    import torch

    require_size(size)
    count, channels, height, width = images.shape
    if (height, width) == (size, size):
        return images
    result = np.empty((count, channels, size, size), dtype=np.uint8)
    for start in range(0, count, _RESIZED_AT_ONCE):
        batch = torch.from_numpy(images[start : start + _RESIZED_AT_ONCE])
        small = torch.nn.functional.interpolate(batch, size=(size, size), mode="bilinear", antialias=True)
        result[start : start + _RESIZED_AT_ONCE] = small.numpy()
    return result


def require_size(size: int) -> None:
    if size < 1:
        raise AlassoError(f"an image's size must be at least 1 pixel, not {size}")


def channels_first(image: Image) -> Pixels:
    pixels: Pixels = np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
    return pixels


def to_rgb(image: Image) -> Image:
    """Any picture as 8-bit RGB: grey repeated, 16-bit scaled down, transparent parts on black."""
    from PIL import Image

    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        overlay = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", overlay.size, (0, 0, 0, 255)), overlay).convert("RGB")
    return image.convert("RGB")
