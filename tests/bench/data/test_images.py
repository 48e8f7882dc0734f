"""A user's own pictures, a folder a class."""

import re
import shutil

import numpy as np
import pytest
from PIL import Image

from alasso.bench import data
from alasso.bench.data import images as reading
from alasso.errors import AlassoError

from data_helpers import random_picture, sha256_of_arrays

#: Of the arrays of a small folder: split, order and pixels stay as they are.
ARRAYS = "422ed4d719c702044797ca6987b5bc1821492a588f55bb52ecaba99606e07a89"


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def lay_out_pictures(root, counts):
    for label, (name, count) in enumerate(counts.items()):
        for k in range(count):
            save(root / name / f"{k}.png", Image.new("RGB", (6 + k, 9), (label, k, 0)))
    return root


def test_folder_split_is_seeded_and_per_class(tmp_path):
    root = lay_out_pictures(tmp_path / "pets", {"dog": 10, "cat": 2, "train": 5})
    (root / "cat" / "notes.txt").write_text("not a picture")
    (root / ".hidden").mkdir()
    images = data.load_folder(root, 4)
    assert (images.name, images.scale) == ("pets", 255.0)
    assert re.fullmatch(r"folder, 17 images of 3 classes, [0-9a-f]{8}", images.edition)
    assert images.classes == ("cat", "dog", "train")
    assert np.bincount(images.train_labels).tolist() == [1, 8, 4]
    assert np.bincount(images.test_labels).tolist() == [1, 2, 1]
    assert images.train_images.shape == (13, 3, 4, 4)
    again = data.load_folder(str(root), 4)
    np.testing.assert_array_equal(images.test_images, again.test_images)
    seen = set(images.train_images[images.train_labels == 1][:, 1, 0, 0].tolist())
    held_out = set(images.test_images[images.test_labels == 1][:, 1, 0, 0].tolist())
    assert seen | held_out == set(range(10))
    lay_out_pictures(root, {"ant": 3})
    with_ant = data.load_folder(root, 4)
    np.testing.assert_array_equal(
        with_ant.test_images[with_ant.test_labels == 2], images.test_images[images.test_labels == 1]
    )


def test_a_folders_fingerprint_is_of_its_pictures_names_and_sizes(tmp_path):
    root = lay_out_pictures(tmp_path / "pets", {"dog": 10, "cat": 2})
    edition = data.folder_edition(root)
    assert edition == data.load_folder(root, 4).edition
    (root / "cat" / "notes.txt").write_text("not a picture")
    shutil.copytree(root, tmp_path / "copied")
    assert data.folder_edition(tmp_path / "copied") == edition
    (root / "dog" / "3.png").rename(root / "dog" / "other.png")
    renamed = data.folder_edition(root)
    save(root / "cat" / "0.png", Image.new("RGB", (60, 90), (9, 8, 7)))
    assert len({edition, renamed, data.folder_edition(root)}) == 3


def test_its_arrays_are_as_ever(tmp_path):
    for k, (name, count) in enumerate({"dog": 10, "cat": 2, "train": 5}.items()):
        for j in range(count):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{j}.png").write_bytes(random_picture(1000 * k + j, (6, 6)))
    assert sha256_of_arrays(data.load_folder(tmp_path, 6)) == ARRAYS


@pytest.mark.parametrize("half", ["test", "val"])
def test_folder_with_its_own_split(tmp_path, half):
    lay_out_pictures(tmp_path / "train", {"a": 3, "b": 2})
    lay_out_pictures(tmp_path / half, {"a": 1, "b": 1})
    images = data.load_folder(tmp_path, 5)
    assert images.classes == ("a", "b")
    assert images.train_labels.tolist() == [0, 0, 0, 1, 1]
    assert images.test_labels.tolist() == [0, 1]


def test_folder_takes_every_kind_of_picture(tmp_path):
    sixteen_bit = Image.fromarray(np.full((8, 8), 200 << 8, dtype=np.uint16))
    clear = Image.new("P", (8, 8), 0)
    clear.putpalette([200, 100, 50])
    pictures = {
        "a_grey.png": (Image.new("L", (8, 8), 77), (77, 77, 77)),
        "b_rgba.png": (Image.new("RGBA", (8, 8), (200, 100, 50, 0)), (0, 0, 0)),
        "c_sixteen.png": (sixteen_bit, (200, 200, 200)),
        "d_palette.png": (clear, (200, 100, 50)),
        "e_bit.png": (Image.new("1", (8, 8), 1), (255, 255, 255)),
        "f.gif": (Image.new("RGB", (8, 8), (255, 0, 0)), (255, 0, 0)),
        "g.BMP": (Image.new("RGB", (3, 30), (1, 2, 3)), (1, 2, 3)),
    }
    for name, (picture, _) in pictures.items():
        save(tmp_path / "train" / "all" / name, picture)
    save(tmp_path / "test" / "all" / "z.png", Image.new("RGB", (8, 8)))
    images = data.load_folder(tmp_path, 8).train_images
    assert [tuple(image[:, 4, 4].tolist()) for image in images] == [pixel for _, pixel in pictures.values()]


def test_folder_turns_pictures_upright(tmp_path):
    picture = Image.new("RGB", (16, 16))
    picture.paste((255, 255, 255), (0, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: upside down
    for half in ("train", "test"):
        (tmp_path / half / "all").mkdir(parents=True)
        picture.save(tmp_path / half / "all" / "a.jpg", exif=exif, quality=95)
    image = data.load_folder(tmp_path, 16).train_images[0]
    assert image[:, 2].max() < 30
    assert image[:, 13].min() > 225


def test_folder_mistakes(tmp_path):
    with pytest.raises(AlassoError, match="there is no folder"):
        data.load_folder(tmp_path / "absent", 8)
    with pytest.raises(AlassoError, match="has no class folders: it needs one folder a class"):
        data.load_folder(tmp_path, 8)
    lay_out_pictures(tmp_path, {"a": 2, "b": 1})
    with pytest.raises(AlassoError, match=r"class folder .*/b has 1 picture; it needs at least 2"):
        data.load_folder(tmp_path, 8)
    (tmp_path / "b" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(AlassoError, match=r"broken\.png cannot be read as a picture"):
        data.load_folder(tmp_path, 8)


def test_a_picture_of_very_many_pixels_is_refused_unread(tmp_path, monkeypatch):
    lay_out_pictures(tmp_path, {"a": 2, "b": 2})
    Image.new("1", (13_300, 13_300)).save(tmp_path / "a" / "vast.png")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was read"))
    with pytest.raises(AlassoError, match=r"vast\.png cannot be .*it has 13300×13300 pixels, more than 50,000,000"):
        reading.decode_all([tmp_path / "a" / "vast.png"], reading.to_rgb, (3, 8, 8))


@pytest.mark.parametrize("name", ["x.eps", "x.png"])
def test_no_picture_is_handed_to_a_program_outside(name, tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    lay_out_pictures(tmp_path, {"a": 2, "b": 2})
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / name, format="EPS")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("it was handed out"))
    with pytest.raises(AlassoError, match=f"{name} cannot be read as a picture: it is none of BMP, GIF"):
        data.load_folder(tmp_path, 8)


def test_folder_split_mistakes(tmp_path):
    lay_out_pictures(tmp_path / "train", {"a": 2, "b": 2})
    lay_out_pictures(tmp_path / "test", {"a": 1})
    with pytest.raises(AlassoError, match="same class folders; only one has b"):
        data.load_folder(tmp_path, 8)
    (tmp_path / "test" / "b").mkdir()
    with pytest.raises(AlassoError, match=r"test/b has 0 pictures; it needs at least 1"):
        data.load_folder(tmp_path, 8)


def test_folder_seed_is_documented_by_its_split():
    order = np.random.RandomState(reading._SPLIT_SEED).permutation(10)
    assert order[:2].tolist() == [2, 8], "the split of everybody's folders would change"
