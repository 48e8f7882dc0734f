"""Data sets of files: compared with what was published, and read to the same arrays as ever."""

import gzip
import hashlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from alasso.bench import data
from alasso.bench.config import RunConfig
from alasso.bench.data import loading
from alasso.bench.data.datasets import CATALOG
from alasso.bench.streams import make_stream
from alasso.errors import AlassoError

from data_helpers import (
    HALVES,
    IDX_FILES,
    TEST_LABELS,
    TEST_PIXELS,
    TRAIN_LABELS,
    TRAIN_PIXELS,
    cifar_records,
    cut_short,
    data_file,
    flip_a_byte,
    lay_out_cifar100,
    lay_out_mnist,
    sha256,
    sha256_of_arrays,
)

#: Of arrays as they were when the committed results were made on them.
DIGITS = "a729d934ea3250eaf42c5cd0636e8a43cb08882a2a608fb7c7a8654a006d011a"
FIRST_BATCHES = "b6b2dd8ee08a96e0e9eff9c0dbcfd351f7ee2c3143934e63487926136ace0d74"


def test_importing_is_light():
    heavy = "{'torch', 'sklearn', 'pooch', 'requests'}"
    code = f"import sys, alasso.bench.data; print(*{heavy} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_the_digits_and_their_split_are_as_ever():
    images = data.load("digits")
    assert sha256_of_arrays(images) == DIGITS
    assert (images.edition, images.scale) == ("scikit-learn", 16.0)
    assert images.train_images.shape == (1437, 1, 8, 8) and np.bincount(images.test_labels).tolist() == [36] * 10
    (report,) = data.check("digits")
    assert (report.status, report.edition) == ("ok", "scikit-learn")
    assert data.fetch("digits") == data.where("digits") and data.where("digits").is_file()


def test_other_digits_are_refused(monkeypatch):
    monkeypatch.setattr(loading, "_read_digits", lambda: (np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64)))
    with pytest.raises(AlassoError, match=r"digits are not those known: .*; install scikit-learn anew"):
        data.load("digits")
    assert data.check("digits")[0].status == "wrong"


def test_the_first_batches_of_permuted_digits_are_as_ever():
    stream = make_stream(RunConfig.for_benchmark("permuted-digits", "si", tasks=2), None, torch.device("cpu"))
    known = hashlib.sha256()
    for task in stream.tasks:
        for part in task.train.batch(torch.arange(32)):
            known.update(part.numpy().tobytes())
    assert known.hexdigest() == FIRST_BATCHES


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_idx_files_gzipped_or_not(tmp_path, packed):
    lay_out_mnist(tmp_path, packed=packed)
    images = data.load("mnist", tmp_path)
    assert (images.name, images.edition, images.scale) == ("mnist", "official", 255.0)
    assert images.train_images.dtype == np.uint8 and images.train_labels.dtype == np.int64
    assert images.train_images.flags.writeable
    np.testing.assert_array_equal(images.train_images[:, 0], TRAIN_PIXELS)
    np.testing.assert_array_equal(images.train_labels, TRAIN_LABELS)
    np.testing.assert_array_equal(images.test_images[:, 0], TEST_PIXELS)
    np.testing.assert_array_equal(images.test_labels, TEST_LABELS)
    assert images.classes == tuple("0123456789")
    assert [report.status for report in data.check("mnist", tmp_path)] == ["ok"] * 4


@pytest.mark.usefixtures("small_mnist")
def test_a_missing_file_is_named_with_the_remedy(tmp_path):
    place = lay_out_mnist(tmp_path)
    (place / "test-images.gz").unlink()
    with pytest.raises(AlassoError, match=r"missing test-images; run `alasso data fetch mnist`, .* --data-dir"):
        data.load("mnist", tmp_path)
    assert [report.status for report in data.check("mnist", tmp_path)] == ["ok", "ok", "missing", "ok"]


def change_content_in_good_wrapper(path):
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1] + b"!"))


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize(
    ("harm", "packed"),
    [
        *((flip_a_byte, True), (flip_a_byte, False), (cut_short, True), (cut_short, False)),
        (change_content_in_good_wrapper, True),
    ],
)
def test_damage_is_named(tmp_path, harm, packed):
    place = lay_out_mnist(tmp_path, packed=packed)
    harmed = place / ("train-images.gz" if packed else "train-images")
    harm(harmed)
    with pytest.raises(AlassoError) as caught:
        data.load("mnist", tmp_path)
    message = str(caught.value)
    assert str(harmed) in message and "\n" not in message
    assert f"expected sha256 {sha256(IDX_FILES['train-images'])[:12]}…, found " in message
    assert "`alasso data fetch mnist` downloads it anew" in message
    assert data.check("mnist", tmp_path)[0].status == "wrong"


@pytest.mark.usefixtures("small_mnist")
def test_a_good_file_beside_a_damaged_one_is_used(tmp_path):
    place = lay_out_mnist(tmp_path)
    (place / "train-images").write_bytes(b"half")
    assert len(data.load("mnist", tmp_path).train_images) == 20


@pytest.mark.usefixtures("small_mnist")
def test_a_gzip_bomb_is_not_unwrapped(tmp_path, monkeypatch):
    place = lay_out_mnist(tmp_path)
    monkeypatch.setattr(loading, "_LIMIT", 1 << 20)
    (place / "train-images.gz").write_bytes(gzip.compress(bytes(8 << 20)))
    assert len(loading._content(place / "train-images.gz")) == 1 << 20
    assert data.check("mnist", tmp_path)[0].status == "wrong"


@pytest.mark.usefixtures("small_cifar100")
@pytest.mark.parametrize("edition", ["official", "re-split"])
def test_cifar_records_and_editions(tmp_path, edition):
    lay_out_cifar100(tmp_path, edition, edition)
    images = data.load("cifar100", tmp_path)
    assert images.edition == edition
    assert {report.edition for report in data.check("cifar100", tmp_path)} == {edition}
    records = np.frombuffer(HALVES[edition, "train.bin"], dtype=np.uint8).reshape(3, 14)
    np.testing.assert_array_equal(images.train_labels, records[:, 1])
    np.testing.assert_array_equal(images.train_images, records[:, 2:].reshape(3, 3, 2, 2))
    assert len(images.test_images) == 2 and images.train_images.flags.c_contiguous


@pytest.mark.usefixtures("small_cifar100")
def test_mixed_editions_are_refused(tmp_path):
    """One's training images are the other's test images."""
    lay_out_cifar100(tmp_path, "official", "re-split")
    with pytest.raises(AlassoError, match=r"train\.bin is official, test\.bin is re-split"):
        data.load("cifar100", tmp_path)
    assert [report.status for report in data.check("cifar100", tmp_path)] == ["wrong", "wrong"]


def test_cifar10_batches_are_joined_in_order(tmp_path, monkeypatch):
    contents = {f"data_batch_{k}.bin": cifar_records([(k,), (k + 1,)], seed=k) for k in range(1, 6)}
    contents["test_batch.bin"] = cifar_records([(9,)], seed=9)
    known = [data_file(name, content) for name, content in contents.items()]
    entry = replace(CATALOG["cifar10"], shape=(3, 2, 2), train_files=tuple(known[:5]), test_files=tuple(known[5:]))
    monkeypatch.setitem(CATALOG, "cifar10", entry)
    (tmp_path / entry.folder).mkdir()
    for name, content in contents.items():
        (tmp_path / entry.folder / name).write_bytes(content)
    images = data.load("cifar10", tmp_path)
    assert images.train_labels.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert images.train_images[2].tobytes() == contents["data_batch_2.bin"][1:13]
