"""Files are fetched from a site on the loopback, unpacked without trust, checked, and read to the arrays as ever."""

import errno
import gzip
import hashlib
import io
import os
import stat
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from alasso.bench import data
from alasso.bench.config import RunConfig
from alasso.bench.data import files
from alasso.bench.data.datasets import CATALOG
from alasso.bench.streams import make_stream
from alasso.errors import AlassoError

from data_helpers import (
    HALVES,
    IDX_FILES,
    RANDOM,
    TEST_LABELS,
    TEST_PIXELS,
    TRAIN_LABELS,
    TRAIN_PIXELS,
    cifar100_archive,
    cifar_records,
    cut_short,
    data_file,
    files_below,
    flip_a_byte,
    lay_out_cifar100,
    lay_out_mnist,
    offer,
    offer_archive,
    serve_mnist,
    sha256,
    sha256_of_arrays,
    tar_gz,
    tiny_members,
)

NOWHERE = "http://127.0.0.1:1/"


@pytest.mark.usefixtures("small_mnist")
def test_fetch_and_load(site, tmp_path, monkeypatch, capsys):
    offer(monkeypatch, "mnist", serve_mnist(site))
    place = data.fetch("mnist", tmp_path)
    assert place == data.where("mnist", tmp_path)
    assert files_below(tmp_path) == sorted(f"MNIST/raw/{name}.gz" for name in IDX_FILES)
    assert len(data.load("mnist", tmp_path).train_images) == 20
    assert len(site.asked) == 4
    data.fetch("mnist", tmp_path)
    assert len(site.asked) == 4, "good files are not downloaded again"
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("small_mnist")
def test_fetch_replaces_only_what_is_damaged(site, tmp_path, monkeypatch):
    offer(monkeypatch, "mnist", serve_mnist(site))
    place = lay_out_mnist(tmp_path, packed=False)
    flip_a_byte(place / "train-images")
    data.fetch("mnist", tmp_path, progress=False)
    assert site.asked == ["/good/train-images.gz"]
    assert files_below(place) == ["test-images", "test-labels", "train-images.gz", "train-labels"]
    data.load("mnist", tmp_path)


@pytest.mark.usefixtures("small_mnist")
def test_fetch_goes_on_to_a_mirror(site, tmp_path, monkeypatch):
    for name in IDX_FILES:
        site.pages[f"/changed/{name}.gz"] = gzip.compress(b"something else")
    offer(monkeypatch, "mnist", NOWHERE, site.address + "absent/", site.address + "changed/", serve_mnist(site))
    data.fetch("mnist", tmp_path, progress=False)
    for name in IDX_FILES:
        asked = list(
            dict.fromkeys(page for page in site.asked if page.endswith(f"/{name}.gz"))
        )  # one may be tried twice
        assert asked == [f"/{mirror}/{name}.gz" for mirror in ("absent", "changed", "good")]
    assert IDX_FILES["train-images"].endswith(data.load("mnist", tmp_path).train_images.tobytes())


@pytest.mark.usefixtures("small_mnist")
def test_fetch_accepts_content_unwrapped_on_the_way(site, tmp_path, monkeypatch):
    offer(monkeypatch, "mnist", serve_mnist(site))
    site.pages["/good/train-images.gz"] = IDX_FILES["train-images"]
    data.fetch("mnist", tmp_path, progress=False)
    assert IDX_FILES["train-images"].endswith(data.load("mnist", tmp_path).train_images.tobytes())


@pytest.mark.usefixtures("small_mnist")
def test_fetch_refuses_wrong_content(site, tmp_path, monkeypatch):
    offer(monkeypatch, "mnist", serve_mnist(site))
    site.pages["/good/train-labels.gz"] = gzip.compress(b"something else")
    with pytest.raises(AlassoError, match=r"/good/train-labels\.gz: other content than published"):
        data.fetch("mnist", tmp_path, progress=False)
    assert files_below(tmp_path) == ["MNIST/raw/train-images.gz"]


@pytest.mark.usefixtures("small_mnist")
def test_a_broken_transfer_is_tried_again(site, tmp_path, monkeypatch):
    offer(monkeypatch, "mnist", serve_mnist(site))
    site.break_after["/good/train-images.gz"] = 100
    data.fetch("mnist", tmp_path, progress=False)
    data.load("mnist", tmp_path)
    assert site.asked[:2] == ["/good/train-images.gz"] * 2


@pytest.mark.usefixtures("small_mnist", "site")
def test_without_a_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    offer(monkeypatch, "mnist", NOWHERE, f"{NOWHERE}mirror/")
    with pytest.raises(AlassoError) as caught:
        data.fetch("mnist", tmp_path / "made")
    lines = str(caught.value).splitlines()
    assert lines[0] == "mnist could not be downloaded:"
    assert lines[1].startswith(f"  {NOWHERE}train-images.gz: no connection") and "mirror" in lines[2]
    packed = ", ".join(f"{name}.gz" for name in IDX_FILES)
    assert lines[3] == f"Without a network, put {packed} into {tmp_path / 'made' / 'MNIST' / 'raw'}."
    assert files_below(tmp_path) == []


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "the disk is full; free some space"), (errno.EACCES, "no permission to write there")],
)
def test_a_disk_that_refuses_is_one_line(site, tmp_path, monkeypatch, number, said):
    offer(monkeypatch, "mnist", serve_mnist(site))

    def refuse(*_):
        raise OSError(number, "refused")

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", refuse)
    with pytest.raises(AlassoError, match=said) as caught:
        data.fetch("mnist", tmp_path)
    assert "\n" not in str(caught.value) and files_below(tmp_path) == []


@pytest.mark.usefixtures("small_cifar100")
def test_fetch_archive(site, tmp_path, monkeypatch):
    packed = cifar100_archive()
    site.pages = {"/bad/a.tar.gz": packed[:-1], "/good/a.tar.gz": packed}
    offer_archive(monkeypatch, "cifar100", packed, site.address + "bad/a.tar.gz", site.address + "good/a.tar.gz")
    data.fetch("cifar100", tmp_path, progress=False)
    assert data.load("cifar100", tmp_path).edition == "official"
    assert files_below(tmp_path) == ["cifar-100-binary/test.bin", "cifar-100-binary/train.bin"]
    data.fetch("cifar100", tmp_path, progress=False)
    assert site.asked == ["/bad/a.tar.gz", "/good/a.tar.gz"]


@pytest.mark.usefixtures("small_cifar100")
def test_fetch_repairs_a_folder_and_leaves_other_files_be(site, tmp_path, monkeypatch):
    packed = cifar100_archive()
    site.pages["/good.tar.gz"] = packed
    offer_archive(monkeypatch, "cifar100", packed, site.address + "good.tar.gz")
    place = lay_out_cifar100(tmp_path, "official", "re-split")
    (place / "mine.txt").write_text("keep")
    data.fetch("cifar100", tmp_path, progress=False)
    assert data.load("cifar100", tmp_path).edition == "official"
    assert (place / "mine.txt").read_text() == "keep"


@pytest.mark.usefixtures("small_cifar100", "site")
def test_an_archive_laid_by_hand(tmp_path, monkeypatch):
    packed = cifar100_archive()
    offer_archive(monkeypatch, "cifar100", packed, f"{NOWHERE}cifar-100-binary.tar.gz")
    by_hand = tmp_path / "cifar-100-binary.tar.gz"
    by_hand.write_bytes(packed[:-1])
    with pytest.raises(AlassoError) as caught:
        data.fetch("cifar100", tmp_path, progress=False)
    message = str(caught.value)
    assert f"{by_hand}: other content than published" in message
    assert f"put {by_hand.name} into {tmp_path} and run `alasso data fetch cifar100` again" in message
    by_hand.write_bytes(packed)
    data.fetch("cifar100", tmp_path, progress=False)
    assert data.load("cifar100", tmp_path).edition == "official"
    assert by_hand.exists()


@pytest.mark.usefixtures("small_tiny")
def test_tiny_imagenet_fetched_is_vouched_for(site, tmp_path, monkeypatch):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as opened:
        for name, content in tiny_members().items():
            opened.writestr(name, content)
    site.pages["/tiny.zip"] = stream.getvalue()
    offer_archive(monkeypatch, "tiny-imagenet", stream.getvalue(), site.address + "tiny.zip")
    place = data.fetch("tiny-imagenet", tmp_path, progress=False)
    images = data.load("tiny-imagenet", tmp_path)
    assert images.edition == data.check("tiny-imagenet", tmp_path)[-1].edition == "official"
    (place / "train/n01/images/n01_0.JPEG").write_bytes(tiny_members()["tiny-imagenet-200/val/images/val_0.JPEG"])
    assert data.check("tiny-imagenet", tmp_path)[-1].status == "wrong"
    for cached in tmp_path.glob("*.npy"):
        cached.unlink()
    with pytest.raises(AlassoError, match="tiny-imagenet-200 has changed: expected sha256"):
        data.load("tiny-imagenet", tmp_path)


@pytest.fixture
def inside(tmp_path):
    """Where to unpack; what lands beside it has left it."""
    return tmp_path / "outside" / "inside"


@pytest.mark.parametrize("name", ["../out", "data/../../out", "/alasso-out", "..\\out", "C:\\out"])
@pytest.mark.parametrize("form", ["tar.gz", "zip"])
def test_nothing_leaves_the_folder(tmp_path, inside, name, form):
    archive = tmp_path / f"evil.{form}"
    if form == "zip":
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("data/fine", b"fine")
            opened.writestr(name, b"evil")
    else:
        archive.write_bytes(tar_gz({"data/fine": b"fine", name: b"evil"}))
    try:
        files.unpack(archive, "data", inside)
    except AlassoError as error:
        assert "is a damaged or unsafe archive" in str(error)
    left = [name for name in files_below(tmp_path) if not name.startswith("outside/inside/")]
    assert left == [archive.name] and not Path("/alasso-out").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_out_and_devices_are_refused(tmp_path, inside, kind):
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        info = tarfile.TarInfo("data/odd")
        info.type, info.linkname = kind, "/etc/passwd"
        opened.addfile(info)
    with pytest.raises(AlassoError, match="unsafe archive"):
        files.unpack(archive, "data", inside)
    assert files_below(tmp_path) == [archive.name]


def test_a_link_in_a_zip_is_not_followed(tmp_path, inside):
    info = zipfile.ZipInfo("data/odd")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as opened:
        opened.writestr(info, "/etc/passwd")
    unpacked = files.unpack(tmp_path / "evil.zip", "data", inside)
    assert not (unpacked / "odd").is_symlink()


@pytest.mark.parametrize("form", ["tar.gz", "zip"])
@pytest.mark.parametrize(("limit", "most"), [("MAX_BYTES", 5000), ("MAX_MEMBERS", 1)])
def test_bombs_are_refused(tmp_path, inside, form, limit, most, monkeypatch):
    archive = tmp_path / f"bomb.{form}"
    if form == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
            opened.writestr("data/a", bytes(3000))
            opened.writestr("data/b", bytes(3000))
    else:
        archive.write_bytes(tar_gz({"data/a": bytes(3000), "data/b": bytes(3000)}))
    monkeypatch.setattr(files, limit, most)
    with pytest.raises(AlassoError, match="holds 2 files of 6000 bytes or more, more than any data set"):
        files.unpack(archive, "data", inside)
    assert not inside.exists()


@pytest.mark.parametrize("name", ["cut.tar.gz", "cut.zip"])
def test_a_damaged_or_foreign_archive_is_named(tmp_path, inside, name):
    archive = tmp_path / name
    archive.write_bytes(tar_gz({"data/a": RANDOM.bytes(3000)})[:1000])
    with pytest.raises(AlassoError, match=f"{name} is a damaged or unsafe archive"):
        files.unpack(archive, "data", inside)
    other = tmp_path / "other.tar.gz"
    other.write_bytes(tar_gz({"else/a": b"a"}))
    with pytest.raises(AlassoError, match=r"other\.tar\.gz does not hold the folder data"):
        files.unpack(other, "data", inside)


def test_the_progress_bar_speaks_poochs_language():
    from rich.progress import Progress

    with Progress(disable=True) as progress:
        bar = files._Bar(progress, "train-images.gz", most=100)
        bar.total = 100
        bar.update(30)
        assert (progress.tasks[0].total, progress.tasks[0].completed) == (100, 30)
        bar.reset()
        bar.update(100)
        bar.close()
        assert progress.finished
        with pytest.raises(files._TooLarge):
            bar.update(1)


@pytest.mark.usefixtures("small_mnist")
def test_a_server_that_never_ends_fills_no_disk(site, tmp_path, monkeypatch):
    offer(monkeypatch, "mnist", serve_mnist(site))
    monkeypatch.setattr(files, "MOST_OF_A_FILE", 1 << 20)
    site.pages["/good/train-images.gz"] = bytes(40 << 20)
    with pytest.raises(AlassoError, match=r"/good/train-images\.gz: more than 1 MB, which is not what was published"):
        data.fetch("mnist", tmp_path, progress=False)
    assert len(site.asked) == 1 and not files_below(tmp_path)


def test_what_a_killed_download_left_goes_after_a_day(tmp_path):
    for name, age in (("old", 2 * 86_400), ("new", 60)):
        (tmp_path / f".alasso-{name}").mkdir()
        (tmp_path / f".alasso-{name}" / "half").write_text("x")
        os.utime(tmp_path / f".alasso-{name}", (time.time() - age,) * 2)
    files._remove_old_scratch(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".alasso-new"]


def test_an_archive_with_an_empty_name_is_one_line(tmp_path, inside):
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as opened:
        opened.writestr("a", b"")
    content = bytearray((tmp_path / "x.zip").read_bytes())
    directory = content.index(b"PK\x01\x02")
    content[directory + 28] = 0  # the length of its name; the name is a comment then
    content[directory + 32] = 1
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(AlassoError, match=r"x\.zip is a damaged or unsafe archive"):
        files.unpack(tmp_path / "x.zip", "data", inside)


def test_a_header_that_would_fill_the_memory_is_refused_unread(tmp_path, inside):
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 3 << 30
    with gzip.open(tmp_path / "x.tar.gz", "wb", 1) as stream:
        stream.write(header.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(100):
            stream.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(AlassoError, match=r"x\.tar\.gz is a damaged or unsafe archive"):
        files.unpack(tmp_path / "x.tar.gz", "data", inside)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 32 << 20


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
    monkeypatch.setattr(files, "_read_digits", lambda: (np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64)))
    with pytest.raises(AlassoError, match=r"digits have changed: .*; reinstall scikit-learn"):
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
    assert "`alasso data fetch mnist` downloads it again" in message
    assert data.check("mnist", tmp_path)[0].status == "wrong"


@pytest.mark.usefixtures("small_mnist")
def test_a_good_file_beside_a_damaged_one_is_used(tmp_path):
    place = lay_out_mnist(tmp_path)
    (place / "train-images").write_bytes(b"half")
    assert len(data.load("mnist", tmp_path).train_images) == 20


@pytest.mark.usefixtures("small_mnist")
def test_a_gzip_bomb_is_not_unwrapped(tmp_path, monkeypatch):
    place = lay_out_mnist(tmp_path)
    monkeypatch.setattr(files, "_LIMIT", 1 << 20)
    (place / "train-images.gz").write_bytes(gzip.compress(bytes(8 << 20)))
    assert len(files._content(place / "train-images.gz")) == 1 << 20
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
