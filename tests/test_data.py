"""The data sets: found, checked, fetched, unpacked and read, all with small stand-ins and no network."""

from __future__ import annotations

import errno
import gzip
import hashlib
import http.server
import io
import json
import re
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from alasso.bench import data
from alasso.bench.data import datasets as catalog
from alasso.bench.data import download, files, folder, tiny, unpack
from alasso.errors import AlassoError

RANDOM = np.random.RandomState(7)
TRAIN_PIXELS = RANDOM.randint(0, 256, (20, 4, 4)).astype(np.uint8)
TRAIN_LABELS = np.arange(20).astype(np.uint8) % 10
TEST_PIXELS = RANDOM.randint(0, 256, (10, 4, 4)).astype(np.uint8)
TEST_LABELS = np.arange(10).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


IDX_FILES = {
    "train-images": idx(TRAIN_PIXELS),
    "train-labels": idx(TRAIN_LABELS),
    "test-images": idx(TEST_PIXELS),
    "test-labels": idx(TEST_LABELS),
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def data_file(name: str, content: bytes, edition: str = "official") -> data.DataFile:
    return data.DataFile(name, {edition: sha256(content)})


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> data.DataSet:
    entry = replace(
        data.CATALOG["mnist"],
        shape=(1, 4, 4),
        train_files=tuple(data_file(name, IDX_FILES[name]) for name in ("train-images", "train-labels")),
        test_files=tuple(data_file(name, IDX_FILES[name]) for name in ("test-images", "test-labels")),
        addresses=(),
    )
    monkeypatch.setitem(catalog.CATALOG, "mnist", entry)
    return entry


def lay_out_mnist(root: Path, *, packed: bool = True) -> Path:
    place = root / "MNIST" / "raw"
    place.mkdir(parents=True)
    for name, content in IDX_FILES.items():
        path = place / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    return place


def cifar_records(labels: list[tuple[int, ...]], seed: int) -> bytes:
    random = np.random.RandomState(seed)
    return b"".join(bytes(label) + random.bytes(12) for label in labels)


HALVES = {
    ("official", "train.bin"): cifar_records([(1, 0), (1, 1), (0, 2)], seed=1),
    ("official", "test.bin"): cifar_records([(1, 0), (0, 2)], seed=2),
    ("re-split", "train.bin"): cifar_records([(1, 1), (1, 0), (0, 2)], seed=3),
    ("re-split", "test.bin"): cifar_records([(1, 1), (0, 2)], seed=4),
}


@pytest.fixture
def small_cifar100(monkeypatch: pytest.MonkeyPatch) -> data.DataSet:
    def both(name: str) -> tuple[data.DataFile]:
        return (data.DataFile(name, {e: sha256(HALVES[e, name]) for e in ("official", "re-split")}),)

    entry = replace(
        data.CATALOG["cifar100"],
        shape=(3, 2, 2),
        train_files=both("train.bin"),
        test_files=both("test.bin"),
    )
    monkeypatch.setitem(catalog.CATALOG, "cifar100", entry)
    return entry


def lay_out_cifar100(root: Path, train: str, test: str) -> Path:
    place = root / "cifar-100-binary"
    place.mkdir()
    (place / "train.bin").write_bytes(HALVES[train, "train.bin"])
    (place / "test.bin").write_bytes(HALVES[test, "test.bin"])
    return place


def tar_gz(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@dataclass
class Site:
    """A web site on the loopback: what it serves, what it breaks off, and what it was asked for."""

    address: str = ""
    pages: dict[str, bytes] = field(default_factory=dict)
    break_after: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "_PAUSE_SECONDS", 0.01)
    served = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            span = self.headers["Range"]
            served.asked.append((self.path, span))
            content = served.pages.get(self.path)
            if content is None:
                self.send_error(404)
                return
            if span and served.ranges:
                content = content[int(span.removeprefix("bytes=").removesuffix("-")) :]
                self.send_response(206)
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: served.break_after.pop(self.path, len(content))])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


def serve_mnist(site: Site, base: str = "good/") -> str:
    for name, content in IDX_FILES.items():
        site.pages[f"/{base}{name}.gz"] = gzip.compress(content)
    return site.address + base


def offer(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    monkeypatch.setitem(catalog.CATALOG, name, replace(catalog.CATALOG[name], addresses=addresses))


def offer_archive(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, *addresses: str) -> None:
    entry = catalog.CATALOG[name]
    assert entry.archive is not None
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    archive = replace(entry.archive, md5=md5, addresses=addresses)
    monkeypatch.setitem(catalog.CATALOG, name, replace(entry, archive=archive))


def files_below(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_importing_is_light() -> None:
    heavy = "{'torch', 'sklearn', 'PIL', 'pooch', 'requests', 'rich'}"
    code = f"import sys, alasso.bench.data; print(*{heavy} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_catalog_names_every_set() -> None:
    expected = ["mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "digits"]
    assert list(data.CATALOG) == expected
    for entry in data.CATALOG.values():
        assert all(len(digest) == 64 for file in entry.files for digest in file.sha256.values())
        assert entry.archive is None or (len(entry.archive.md5) == 32 and len(entry.archive.addresses) > 1)
    assert len(data.CATALOG["cifar100"].classes) == len(set(data.CATALOG["cifar100"].classes)) == 100


@pytest.mark.parametrize("use", [data.load, data.check, data.fetch, data.where])
def test_unknown_name(use: Callable[[str], object]) -> None:
    with pytest.raises(AlassoError, match=r"no data set 'mnits'; did you mean 'mnist'\? There are: mnist, "):
        use("mnits")


def test_data_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ALASSO_DATA", raising=False)
    assert data.data_root(None).name == "data"
    assert "alasso" in data.data_root(None).parts
    monkeypatch.setenv("ALASSO_DATA", str(tmp_path))
    assert data.data_root(None) == tmp_path
    assert data.data_root("elsewhere") == Path("elsewhere")
    assert data.where("cifar10") == tmp_path / "cifar-10-batches-bin"


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_load_idx(tmp_path: Path, packed: bool) -> None:
    lay_out_mnist(tmp_path, packed=packed)
    images = data.load("mnist", tmp_path)
    assert (images.name, images.edition, images.scale) == ("mnist", "official", 255.0)
    assert images.train_images.dtype == np.uint8
    assert images.train_labels.dtype == np.int64
    assert images.train_images.flags.writeable
    np.testing.assert_array_equal(images.train_images[:, 0], TRAIN_PIXELS)
    np.testing.assert_array_equal(images.train_labels, TRAIN_LABELS)
    np.testing.assert_array_equal(images.test_images[:, 0], TEST_PIXELS)
    np.testing.assert_array_equal(images.test_labels, TEST_LABELS)
    assert images.classes == tuple("0123456789")
    assert [report.status for report in data.check("mnist", tmp_path)] == ["ok"] * 4


@pytest.mark.usefixtures("small_mnist")
def test_load_resizes(tmp_path: Path) -> None:
    lay_out_mnist(tmp_path)
    images = data.load("mnist", tmp_path, size=2)
    assert images.train_images.shape == (20, 1, 2, 2)
    assert abs(int(images.train_images.mean()) - int(TRAIN_PIXELS.mean())) < 10
    np.testing.assert_array_equal(data.load("mnist", tmp_path, size=4).test_images[:, 0], TEST_PIXELS)
    with pytest.raises(AlassoError, match="at least 1 pixel, not 0"):
        data.load("mnist", tmp_path, size=0)


@pytest.mark.usefixtures("small_mnist")
def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    place = lay_out_mnist(tmp_path)
    (place / "test-images.gz").unlink()
    with pytest.raises(AlassoError, match=r"missing test-images; run `alasso data fetch mnist`"):
        data.load("mnist", tmp_path)
    assert [report.status for report in data.check("mnist", tmp_path)] == ["ok", "ok", "missing", "ok"]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def change_content_in_good_wrapper(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1] + b"!"))


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize(
    ("harm", "packed"),
    [
        *((flip_a_byte, True), (flip_a_byte, False), (cut_short, True), (cut_short, False)),
        (change_content_in_good_wrapper, True),
    ],
)
def test_damage_is_named(tmp_path: Path, harm: Callable[[Path], None], packed: bool) -> None:
    place = lay_out_mnist(tmp_path, packed=packed)
    harmed = place / ("train-images.gz" if packed else "train-images")
    harm(harmed)
    with pytest.raises(AlassoError) as caught:
        data.load("mnist", tmp_path)
    message = str(caught.value)
    assert str(harmed) in message
    assert f"expected sha256 {sha256(IDX_FILES['train-images'])[:12]}…, found " in message
    assert "`alasso data fetch mnist` downloads it anew" in message
    assert data.check("mnist", tmp_path)[0].status == "wrong"


@pytest.mark.usefixtures("small_mnist")
def test_good_file_beside_a_damaged_one_is_used(tmp_path: Path) -> None:
    place = lay_out_mnist(tmp_path)
    (place / "train-images").write_bytes(b"half")
    assert len(data.load("mnist", tmp_path).train_images) == 20


@pytest.mark.usefixtures("small_mnist")
def test_gzip_bomb_is_not_unwrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = lay_out_mnist(tmp_path)
    monkeypatch.setattr(files, "_CONTENT_LIMIT", 1 << 20)
    (place / "train-images.gz").write_bytes(gzip.compress(bytes(8 << 20)))
    assert len(files.read_content(place / "train-images.gz")) == 2 << 20
    assert data.check("mnist", tmp_path)[0].status == "wrong"


@pytest.mark.usefixtures("small_mnist")
def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out_mnist(tmp_path)

    def forbid(*_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", forbid)
    with pytest.raises(AlassoError, match=r"cannot read .*: permission denied"):
        data.load("mnist", tmp_path)


@pytest.mark.usefixtures("small_cifar100")
@pytest.mark.parametrize("edition", ["official", "re-split"])
def test_cifar_records_and_editions(tmp_path: Path, edition: str) -> None:
    lay_out_cifar100(tmp_path, edition, edition)
    images = data.load("cifar100", tmp_path)
    assert images.edition == edition
    assert {report.edition for report in data.check("cifar100", tmp_path)} == {edition}
    records = np.frombuffer(HALVES[edition, "train.bin"], dtype=np.uint8).reshape(3, 14)
    np.testing.assert_array_equal(images.train_labels, records[:, 1])
    np.testing.assert_array_equal(images.train_images, records[:, 2:].reshape(3, 3, 2, 2))
    assert len(images.test_images) == 2


@pytest.mark.usefixtures("small_cifar100")
def test_mixed_editions_are_refused(tmp_path: Path) -> None:
    lay_out_cifar100(tmp_path, "official", "re-split")
    with pytest.raises(AlassoError, match=r"train\.bin is official, test\.bin is re-split"):
        data.load("cifar100", tmp_path)
    assert [report.status for report in data.check("cifar100", tmp_path)] == ["wrong", "wrong"]


def test_cifar10_batches_are_joined_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {f"data_batch_{k}.bin": cifar_records([(k,), (k + 1,)], seed=k) for k in range(1, 6)}
    contents["test_batch.bin"] = cifar_records([(9,)], seed=9)
    known = [data_file(name, content) for name, content in contents.items()]
    entry = replace(data.CATALOG["cifar10"], shape=(3, 2, 2), train_files=tuple(known[:5]), test_files=tuple(known[5:]))
    monkeypatch.setitem(catalog.CATALOG, "cifar10", entry)
    (tmp_path / entry.folder).mkdir()
    for name, content in contents.items():
        (tmp_path / entry.folder / name).write_bytes(content)
    images = data.load("cifar10", tmp_path)
    assert images.train_labels.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert images.train_images[2].tobytes() == contents["data_batch_2.bin"][1:13]


def test_digits_split_is_fixed_and_stratified() -> None:
    images = data.load("digits")
    assert images.scale == 16.0
    assert images.train_images.shape == (1437, 1, 8, 8)
    assert images.train_images.max() == 16
    assert np.bincount(images.test_labels).tolist() == [36] * 10
    assert sha256(images.test_images.tobytes() + images.test_labels.astype(np.uint8).tobytes()).startswith(
        "5becaef9c969bed2"
    )
    (report,) = data.check("digits")
    assert (report.status, report.edition) == ("ok", "scikit-learn")
    assert data.fetch("digits") == data.where("digits")
    assert data.where("digits").is_file()


@pytest.mark.usefixtures("small_mnist")
def test_fetch_and_load(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, "mnist", serve_mnist(site))
    place = data.fetch("mnist", tmp_path)
    assert place == data.where("mnist", tmp_path)
    assert files_below(place) == sorted(f"{name}.gz" for name in IDX_FILES)
    assert len(data.load("mnist", tmp_path).train_images) == 20
    assert len(site.asked) == 4
    data.fetch("mnist", tmp_path)
    assert len(site.asked) == 4, "good files are not downloaded again"
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("small_mnist")
def test_fetch_replaces_only_what_is_damaged(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "mnist", serve_mnist(site))
    place = lay_out_mnist(tmp_path, packed=False)
    flip_a_byte(place / "train-images")
    data.fetch("mnist", tmp_path, progress=False)
    assert [path for path, _ in site.asked] == ["/good/train-images.gz"]
    assert files_below(place) == ["test-images", "test-labels", "train-images.gz", "train-labels"]
    data.load("mnist", tmp_path)


@pytest.mark.usefixtures("small_mnist")
def test_fetch_goes_on_to_a_mirror(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IDX_FILES:
        site.pages[f"/changed/{name}.gz"] = gzip.compress(b"something else")
    dead = "http://127.0.0.1:1/"
    offer(monkeypatch, "mnist", dead, site.address + "absent/", site.address + "changed/", serve_mnist(site))
    data.fetch("mnist", tmp_path, progress=False)
    data.load("mnist", tmp_path)
    absent = [path for path, _ in site.asked if path == "/absent/train-images.gz"]
    assert len(absent) == 1, "a page that is not there is not asked for again"


@pytest.mark.usefixtures("small_mnist")
def test_fetch_accepts_content_unwrapped_on_the_way(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, "mnist", serve_mnist(site))
    site.pages["/good/train-images.gz"] = IDX_FILES["train-images"]
    data.fetch("mnist", tmp_path, progress=False)
    assert IDX_FILES["train-images"].endswith(data.load("mnist", tmp_path).train_images.tobytes())


@pytest.mark.usefixtures("small_mnist")
def test_fetch_refuses_wrong_content(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "mnist", serve_mnist(site))
    site.pages["/good/train-labels.gz"] = gzip.compress(b"something else")
    with pytest.raises(AlassoError) as caught:
        data.fetch("mnist", tmp_path, progress=False)
    message = str(caught.value)
    assert "/good/train-labels.gz: wrong content (expected sha256 " in message
    assert f"found {sha256(b'something else')[:12]}…), deleted" in message
    assert files_below(tmp_path) == ["MNIST/raw/train-images.gz"]


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize("ranges", [True, False], ids=["resumed", "from the start"])
def test_fetch_after_a_broken_transfer(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    offer(monkeypatch, "mnist", serve_mnist(site))
    site.ranges = ranges
    site.break_after["/good/train-images.gz"] = 100
    monkeypatch.setattr(download, "_CHUNK", 50)
    data.fetch("mnist", tmp_path, progress=False)
    data.load("mnist", tmp_path)
    assert site.asked[:2] == [("/good/train-images.gz", None), ("/good/train-images.gz", "bytes=100-")]


@pytest.mark.usefixtures("small_mnist", "site")
def test_fetch_without_network_says_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "mnist", "http://127.0.0.1:1/", "http://127.0.0.1:1/mirror/")
    with pytest.raises(AlassoError) as caught:
        data.fetch("mnist", tmp_path / "made")
    message = str(caught.value)
    assert message.startswith("mnist could not be downloaded:\n  http://127.0.0.1:1/train-images.gz: no connection")
    assert f"into {tmp_path / 'made' / 'MNIST' / 'raw'} " in message
    for name, content in IDX_FILES.items():
        assert f"{name}.gz, sha256 {sha256(content)}" in message
        assert f"http://127.0.0.1:1/mirror/{name}.gz" in message
    assert list(tmp_path.iterdir()) == []  # not even folders


@pytest.mark.usefixtures("small_mnist")
@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "the disk is full; free some space or"), (errno.EACCES, "permission denied; choose")],
)
def test_fetch_onto_a_disk_that_refuses(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    offer(monkeypatch, "mnist", serve_mnist(site))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    def half_then_refuse(address: str, part: Path, progress: bool) -> None:
        part.write_bytes(b"half")
        refuse()

    monkeypatch.setattr(download, "_receive", half_then_refuse)
    with pytest.raises(AlassoError) as caught:
        data.fetch("mnist", tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_below(tmp_path) == []

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(AlassoError, match=said):
        data.fetch("mnist", tmp_path / "new")


def cifar100_archive() -> bytes:
    return tar_gz({f"cifar-100-binary/{name}": HALVES["official", name] for name in ("train.bin", "test.bin")})


@pytest.mark.usefixtures("small_cifar100")
def test_fetch_archive(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = cifar100_archive()
    site.pages = {"/bad": packed[:-1], "/good": packed}
    offer_archive(monkeypatch, "cifar100", packed, site.address + "bad", site.address + "good")
    place = data.fetch("cifar100", tmp_path, progress=False)
    assert data.load("cifar100", tmp_path).edition == "official"
    assert files_below(tmp_path) == [f"cifar-100-binary/{n}" for n in (".alasso.json", "test.bin", "train.bin")]
    assert stat.S_IMODE(place.stat().st_mode) & 0o500 == 0o500
    data.fetch("cifar100", tmp_path, progress=False)
    assert [path for path, _ in site.asked] == ["/bad", "/good"]


def test_marker_vouches_for_files_from_a_checked_archive(
    small_cifar100: data.DataSet, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = tuple(data.DataFile(file.name, {"official": "0" * 64}) for file in small_cifar100.files)
    entry = replace(small_cifar100, train_files=unknown[:1], test_files=unknown[1:])
    monkeypatch.setitem(catalog.CATALOG, "cifar100", entry)
    packed = cifar100_archive()
    site.pages["/good"] = packed
    offer_archive(monkeypatch, "cifar100", packed, site.address + "good")
    place = data.fetch("cifar100", tmp_path, progress=False)
    assert data.load("cifar100", tmp_path).edition == "official"
    flip_a_byte(place / "test.bin")
    with pytest.raises(AlassoError, match=r"test\.bin is damaged"):
        data.load("cifar100", tmp_path)
    (place / files.MARKER).write_text("{ not json")
    assert [report.status for report in data.check("cifar100", tmp_path)] == ["wrong", "wrong"]


@pytest.mark.usefixtures("small_cifar100")
def test_fetch_repairs_a_folder_and_leaves_other_files_be(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = cifar100_archive()
    site.pages["/good"] = packed
    offer_archive(monkeypatch, "cifar100", packed, site.address + "good")
    place = lay_out_cifar100(tmp_path, "official", "re-split")
    (place / "mine.txt").write_text("keep")
    data.fetch("cifar100", tmp_path, progress=False)
    assert data.load("cifar100", tmp_path).edition == "official"
    assert (place / "mine.txt").read_text() == "keep"


@pytest.mark.usefixtures("small_cifar100", "site")
def test_archive_laid_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = cifar100_archive()
    offer_archive(monkeypatch, "cifar100", packed, "http://127.0.0.1:1/cifar")
    by_hand = tmp_path / "cifar-100-binary.tar.gz"
    by_hand.write_bytes(packed[:-1])
    with pytest.raises(AlassoError) as caught:
        data.fetch("cifar100", tmp_path, progress=False)
    message = str(caught.value)
    assert f"{by_hand}: wrong content (expected md5 " in message
    assert f"put this file into {tmp_path} and run `alasso data fetch cifar100` again" in message
    assert f"cifar-100-binary.tar.gz, md5 {catalog.CATALOG['cifar100'].archive.md5}" in message  # type: ignore[union-attr]
    by_hand.write_bytes(packed)
    data.fetch("cifar100", tmp_path, progress=False)
    assert data.load("cifar100", tmp_path).edition == "official"
    assert by_hand.exists()


@pytest.mark.usefixtures("small_cifar100", "site")
def test_archive_onto_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = cifar100_archive()
    offer_archive(monkeypatch, "cifar100", packed, "http://127.0.0.1:1/cifar")
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(packed)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(unpack, "_safe_path", full)
    with pytest.raises(AlassoError, match="the disk is full"):
        data.fetch("cifar100", tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-100-binary.tar.gz"]


def special_tar(path: Path, name: str, kind: bytes, link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("data/fine"))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        archive.addfile(info)
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    place = tmp_path / "unpacked"
    place.mkdir()
    return place


@pytest.mark.parametrize("name", ["../out", "data/../../out", "/out", "..\\out", "C:\\out", "C:out"])
@pytest.mark.parametrize("form", ["tar.gz", "zip"])
def test_unpack_refuses_names_that_leave(tmp_path: Path, target: Path, name: str, form: str) -> None:
    archive = tmp_path / f"evil.{form}"
    if form == "zip":
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("data/fine", b"fine")
            opened.writestr(name, b"evil")
    else:
        archive.write_bytes(tar_gz({"data/fine": b"fine", name: b"evil"}))
    with pytest.raises(AlassoError, match=r"evil\..* is refused: its member .* would leave the folder"):
        unpack.unpack(archive, "data", target)
    assert files_below(tmp_path) == [archive.name]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_unpack_refuses_links_and_devices(tmp_path: Path, target: Path, kind: bytes) -> None:
    archive = special_tar(tmp_path / "evil.tar.gz", "data/odd", kind, link="/etc/passwd")
    with pytest.raises(AlassoError, match="'data/odd' is not a plain file"):
        unpack.unpack(archive, "data", target)
    assert list(target.iterdir()) == []


def test_unpack_refuses_a_link_in_a_zip(tmp_path: Path, target: Path) -> None:
    archive = tmp_path / "evil.zip"
    info = zipfile.ZipInfo("data/odd")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(info, "/etc/passwd")
    with pytest.raises(AlassoError, match="'data/odd' is not a plain file"):
        unpack.unpack(archive, "data", target)


@pytest.mark.parametrize("form", ["tar.gz", "zip"])
def test_unpack_refuses_bombs(tmp_path: Path, target: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / f"bomb.{form}"
    if form == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
            opened.writestr("data/a", bytes(3000))
            opened.writestr("data/b", bytes(3000))
    else:
        archive.write_bytes(tar_gz({"data/a": bytes(3000), "data/b": bytes(3000)}))
    monkeypatch.setattr(unpack, "MAX_BYTES", 5000)
    with pytest.raises(AlassoError, match="more than 5000 bytes"):
        unpack.unpack(archive, "data", target)
    monkeypatch.setattr(unpack, "MAX_MEMBERS", 1)
    with pytest.raises(AlassoError, match="more than 1 members"):
        unpack.unpack(archive, "data", target)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["cut.tar.gz", "cut.zip"])
def test_unpack_damaged_or_foreign_archive(tmp_path: Path, target: Path, name: str) -> None:
    archive = tmp_path / name
    archive.write_bytes(tar_gz({"data/a": RANDOM.bytes(3000)})[:1000])
    with pytest.raises(AlassoError, match=f"{name} is a damaged archive"):
        unpack.unpack(archive, "data", target)
    other = tmp_path / "other.tar.gz"
    other.write_bytes(tar_gz({"else/a": b"a"}))
    with pytest.raises(AlassoError, match=r"other\.tar\.gz does not hold the folder data"):
        unpack.unpack(other, "data", target)
    assert list(target.iterdir()) == []


def jpeg(value: int, mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (8, 8), value if mode == "L" else (value, 10, 200)).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def tiny_members() -> dict[str, bytes]:
    """Three pictures of each of two classes, listed out of order, and one test picture of each."""
    top = "tiny-imagenet-200"
    members = {
        f"{top}/wnids.txt": b"n02\nn01\n",
        f"{top}/words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tbullfrog\nn03\tunused\n",
        f"{top}/val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t5\t5\nval_1.JPEG\tn01\t0\t0\t5\t5\n",
        f"{top}/val/images/val_0.JPEG": jpeg(220),
        f"{top}/val/images/val_1.JPEG": jpeg(20),
    }
    for wnid, value in (("n01", 10), ("n02", 210)):
        for k in range(3):
            mode = "L" if k == 2 else "RGB"
            members[f"{top}/train/{wnid}/images/{wnid}_{k}.JPEG"] = jpeg(value + k, mode)
    return members


@pytest.fixture
def small_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(data.CATALOG["tiny-imagenet"], shape=(3, 8, 8), class_count=2, train_per_class=3, test_per_class=1)
    monkeypatch.setitem(catalog.CATALOG, "tiny-imagenet", entry)


def lay_out_tiny(root: Path) -> Path:
    for name, content in tiny_members().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root / "tiny-imagenet-200"


def assert_tiny(images: data.ImageSet) -> None:
    assert images.classes == ("goldfish", "bullfrog")
    assert images.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.test_labels.tolist() == [1, 0]
    assert images.train_images.shape == (6, 3, 8, 8)
    assert abs(int(images.train_images[5, 0, 0, 0]) - 212) < 4
    assert (images.train_images[5, 0] == images.train_images[5, 2]).all(), "grey becomes RGB"
    assert abs(int(images.test_images[0, 0, 0, 0]) - 220) < 8


@pytest.mark.usefixtures("small_tiny")
def test_tiny_imagenet_by_hand_and_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out_tiny(tmp_path)
    first = data.load("tiny-imagenet", tmp_path)
    assert_tiny(first)
    assert first.edition == "unverified"
    assert {"tiny-imagenet-200.train.npy", "tiny-imagenet-200.test.npy"} < set(files_below(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(tiny, "_decode_jpeg", None)
        again = data.load("tiny-imagenet", tmp_path)
    assert_tiny(again)
    assert again.train_images.flags.writeable, "torch warns of arrays that are not"
    (tmp_path / "tiny-imagenet-200.train.npy").write_bytes(b"half")
    assert_tiny(data.load("tiny-imagenet", tmp_path))


@pytest.mark.usefixtures("small_tiny")
def test_tiny_imagenet_without_room_for_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out_tiny(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert_tiny(data.load("tiny-imagenet", tmp_path))
    assert not [name for name in files_below(tmp_path) if name.endswith((".npy", ".part"))]


@pytest.mark.usefixtures("small_tiny")
def test_tiny_imagenet_fetched_is_vouched_for(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as opened:
        for name, content in tiny_members().items():
            opened.writestr(name, content)
    site.pages["/tiny"] = stream.getvalue()
    offer_archive(monkeypatch, "tiny-imagenet", stream.getvalue(), site.address + "tiny")
    place = data.fetch("tiny-imagenet", tmp_path, progress=False)
    images = data.load("tiny-imagenet", tmp_path)
    assert_tiny(images)
    assert images.edition == data.check("tiny-imagenet", tmp_path)[-1].edition == "official"
    (place / "train/n01/images/n01_0.JPEG").write_bytes(jpeg(99))
    assert data.check("tiny-imagenet", tmp_path)[-1].status == "wrong"
    (tmp_path / "tiny-imagenet-200.cache.json").unlink()
    with pytest.raises(AlassoError, match="tiny-imagenet-200 has changed: expected sha256"):
        data.load("tiny-imagenet", tmp_path)


def write_annotations(place: Path, text: str) -> None:
    (place / "val/val_annotations.txt").write_text(text)


@pytest.mark.usefixtures("small_tiny")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda place: (place / "wnids.txt").unlink(), "missing wnids.txt; run `alasso data fetch tiny"),
        (lambda place: (place / "wnids.txt").write_text("n01"), "names 1 classes instead of 2"),
        (lambda place: (place / "train/n02/images/n02_1.JPEG").unlink(), "has 2 pictures of class n02 instead"),
        (lambda place: (place / "val/images/val_1.JPEG").unlink(), "lacks 1 pictures, among them val_1.JPEG"),
        (lambda place: write_annotations(place, "val_0.JPEG\tn09\t0\n"), "names the class n09"),
        (lambda place: write_annotations(place, "val_0.JPEG\tn01\t0\n"), "has 0 pictures of class n02"),
        (lambda place: cut_short(place / "train/n01/images/n01_0.JPEG"), "n01_0.JPEG cannot be read"),
        (
            lambda place: Image.new("RGB", (9, 8)).save(place / "val/images/val_1.JPEG"),
            "val_1.JPEG is 9×8 pixels, not 8×8",
        ),
    ],
)
def test_tiny_imagenet_damage(tmp_path: Path, harm: Callable[[Path], object], said: str) -> None:
    harm(lay_out_tiny(tmp_path))
    with pytest.raises(AlassoError, match=said):
        data.load("tiny-imagenet", tmp_path)


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def lay_out_pictures(root: Path, counts: dict[str, int]) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        for k in range(count):
            save(root / name / f"{k}.png", Image.new("RGB", (6 + k, 9), (label, k, 0)))
    return root


def test_folder_split_is_seeded_and_per_class(tmp_path: Path) -> None:
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


def test_a_folders_fingerprint_is_of_its_pictures_names_and_sizes(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("half", ["test", "val"])
def test_folder_with_its_own_split(tmp_path: Path, half: str) -> None:
    lay_out_pictures(tmp_path / "train", {"a": 3, "b": 2})
    lay_out_pictures(tmp_path / half, {"a": 1, "b": 1})
    images = data.load_folder(tmp_path, 5)
    assert images.classes == ("a", "b")
    assert images.train_labels.tolist() == [0, 0, 0, 1, 1]
    assert images.test_labels.tolist() == [0, 1]


def test_folder_takes_every_kind_of_picture(tmp_path: Path) -> None:
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


def test_folder_turns_pictures_upright(tmp_path: Path) -> None:
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


def test_folder_mistakes(tmp_path: Path) -> None:
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
    with pytest.raises(AlassoError, match="at least 1 pixel"):
        data.load_folder(tmp_path, 0)


def test_folder_split_mistakes(tmp_path: Path) -> None:
    lay_out_pictures(tmp_path / "train", {"a": 2, "b": 2})
    lay_out_pictures(tmp_path / "test", {"a": 1})
    with pytest.raises(AlassoError, match="same class folders; only one has b"):
        data.load_folder(tmp_path, 8)
    (tmp_path / "test" / "b").mkdir()
    with pytest.raises(AlassoError, match=r"test/b has 0 pictures; it needs at least 1"):
        data.load_folder(tmp_path, 8)


def test_folder_seed_is_documented_by_its_split() -> None:
    order = np.random.RandomState(folder._SPLIT_SEED).permutation(10)
    assert order[:2].tolist() == [2, 8], "the split of everybody's folders would change"


def test_marker_is_plain_json(tmp_path: Path) -> None:
    files.write_marker(tmp_path, {"train.bin": "abc"})
    assert json.loads((tmp_path / ".alasso.json").read_text()) == {
        "edition": "official",
        "sha256": {"train.bin": "abc"},
    }


def test_progress_bar_speaks_poochs_language() -> None:
    from rich.progress import Progress

    with Progress(disable=True) as progress:
        bar = download._RichBar(progress, "train-images.gz")
        bar.total = 100
        bar.update(30)
        assert (bar.total, progress.tasks[0].completed) == (100, 30)
        bar.reset()
        bar.update(100)
        bar.close()
        assert progress.finished
