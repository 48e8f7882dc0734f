"""Tiny ImageNet's folder: listed, checked, decoded, and decoded once."""

import errno

import numpy as np
import pytest
from PIL import Image

from alasso.bench import data
from alasso.bench.data import images
from alasso.errors import AlassoError

from data_helpers import files_below, lay_out_tiny, sha256_of_arrays

pytestmark = pytest.mark.usefixtures("small_tiny")

#: Of the arrays of data_helpers.tiny_members: labels, order and decoding stay as they are.
ARRAYS = "a2279a0adeca59731199c296e4a949d793992e2022994ac5731e005f1169bd88"


def test_labels_order_and_pixels_are_as_ever_also_from_the_cache(tmp_path, monkeypatch):
    lay_out_tiny(tmp_path)
    first = data.load("tiny-imagenet", tmp_path)
    assert first.classes == ("goldfish", "bullfrog") and first.edition == "unverified"
    assert first.train_labels.tolist() == [0, 0, 0, 1, 1, 1] and first.test_labels.tolist() == [1, 0]
    assert sha256_of_arrays(first) == ARRAYS
    assert len(list(tmp_path.glob("*.npy"))) == 2
    with monkeypatch.context() as patched:
        patched.setattr(images, "decode_all", None)
        again = data.load("tiny-imagenet", tmp_path)
    assert sha256_of_arrays(again) == ARRAYS
    assert again.train_images.flags.writeable, "torch warns of arrays that are not"
    next(tmp_path.glob("*.train.npy")).write_bytes(b"half")
    assert sha256_of_arrays(data.load("tiny-imagenet", tmp_path)) == ARRAYS


def test_without_room_for_the_cache_it_still_loads(tmp_path, monkeypatch):
    lay_out_tiny(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert sha256_of_arrays(data.load("tiny-imagenet", tmp_path)) == ARRAYS
    assert not [name for name in files_below(tmp_path) if name.endswith((".npy", ".part"))]


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_annotations(place, text):
    (place / "val/val_annotations.txt").write_text(text)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda place: (place / "wnids.txt").unlink(), "missing wnids.txt; run `alasso data fetch tiny"),
        (lambda place: (place / "wnids.txt").write_text("n01"), "names 1 classes instead of 2"),
        (lambda place: (place / "train/n02/images/n02_1.JPEG").unlink(), "has 2 pictures of class n02 instead"),
        (lambda place: (place / "val/images/val_1.JPEG").unlink(), "val/images has 0 pictures of class n01"),
        (lambda place: write_annotations(place, "val_0.JPEG\tn09\t0\n"), "val/images has 0 pictures of class n01"),
        (lambda place: write_annotations(place, "val_0.JPEG\tn01\t0\n"), "has 0 pictures of class n02"),
        (lambda place: cut_in_half(place / "train/n01/images/n01_0.JPEG"), "n01_0.JPEG cannot be read as a picture"),
        (
            lambda place: Image.new("RGB", (9, 8)).save(place / "val/images/val_1.JPEG"),
            "val_1.JPEG is 9×8 pixels, not 8×8",
        ),
    ],
)
def test_damage_is_named(tmp_path, harm, said):
    harm(lay_out_tiny(tmp_path))
    with pytest.raises(AlassoError, match=said):
        data.load("tiny-imagenet", tmp_path)
