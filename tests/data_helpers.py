"""Small stand-ins for the published data sets, and a site that serves them."""

import gzip
import hashlib
import io
import struct
import tarfile
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from alasso.bench.data import DataFile
from alasso.bench.data.datasets import CATALOG

RANDOM = np.random.RandomState(7)
TRAIN_PIXELS = RANDOM.randint(0, 256, (20, 4, 4)).astype(np.uint8)
TRAIN_LABELS = np.arange(20).astype(np.uint8) % 10
TEST_PIXELS = RANDOM.randint(0, 256, (10, 4, 4)).astype(np.uint8)
TEST_LABELS = np.arange(10).astype(np.uint8)


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


IDX_FILES = {
    "train-images": idx(TRAIN_PIXELS),
    "train-labels": idx(TRAIN_LABELS),
    "test-images": idx(TEST_PIXELS),
    "test-labels": idx(TEST_LABELS),
}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def sha256_of_arrays(images):
    """Of what an image set holds: types, shapes and values."""
    known = hashlib.sha256()
    for array in (images.train_images, images.train_labels, images.test_images, images.test_labels):
        known.update(str((array.dtype.str, array.shape)).encode() + array.tobytes())
    return known.hexdigest()


def data_file(name, content, edition="official"):
    return DataFile(name, {edition: sha256(content)})


def lay_out_mnist(root, *, packed=True):
    place = root / "MNIST" / "raw"
    place.mkdir(parents=True)
    for name, content in IDX_FILES.items():
        path = place / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(content) if packed else content)
    return place


def cifar_records(labels, seed):
    random = np.random.RandomState(seed)
    return b"".join(bytes(label) + random.bytes(12) for label in labels)


HALVES = {
    ("official", "train.bin"): cifar_records([(1, 0), (1, 1), (0, 2)], seed=1),
    ("official", "test.bin"): cifar_records([(1, 0), (0, 2)], seed=2),
    ("re-split", "train.bin"): cifar_records([(1, 1), (1, 0), (0, 2)], seed=3),
    ("re-split", "test.bin"): cifar_records([(1, 1), (0, 2)], seed=4),
}


def lay_out_cifar100(root, train, test):
    place = root / "cifar-100-binary"
    place.mkdir()
    (place / "train.bin").write_bytes(HALVES[train, "train.bin"])
    (place / "test.bin").write_bytes(HALVES[test, "test.bin"])
    return place


def tar_gz(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def cifar100_archive():
    return tar_gz({f"cifar-100-binary/{name}": HALVES["official", name] for name in ("train.bin", "test.bin")})


def random_picture(seed, size, mode="RGB"):
    """A PNG, whose decoded bytes are the same everywhere."""
    pixels = np.random.RandomState(seed).randint(0, 256, (*size, 3)).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, "PNG")
    return stream.getvalue()


def tiny_members():
    """Three pictures of each of two classes, listed out of order, and one test picture of each."""
    top = "tiny-imagenet-200"
    members = {
        f"{top}/wnids.txt": b"n02\nn01\n",
        f"{top}/words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tbullfrog\nn03\tunused\n",
        f"{top}/val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t5\t5\nval_1.JPEG\tn01\t0\t0\t5\t5\n",
        f"{top}/val/images/val_0.JPEG": random_picture(100, (8, 8)),
        f"{top}/val/images/val_1.JPEG": random_picture(101, (8, 8)),
    }
    for k, wnid in enumerate(("n01", "n02")):
        for j in range(3):
            content = random_picture(10 * k + j, (8, 8), mode="L" if j == 2 else "RGB")
            members[f"{top}/train/{wnid}/images/{wnid}_{j}.JPEG"] = content
    return members


def lay_out_tiny(root):
    for name, content in tiny_members().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root / "tiny-imagenet-200"


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])


def files_below(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@dataclass
class Site:
    """A web site on the loopback: what it serves, what it breaks off, and what it was asked for."""

    address: str = ""
    pages: dict = field(default_factory=dict)
    break_after: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)


def serve_mnist(site, base="good/"):
    for name, content in IDX_FILES.items():
        site.pages[f"/{base}{name}.gz"] = gzip.compress(content)
    return site.address + base


def offer(monkeypatch, name, *addresses):
    monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], addresses=addresses))


def offer_archive(monkeypatch, name, content, *addresses):
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    archive = replace(CATALOG[name].archive, md5=md5, addresses=addresses)
    monkeypatch.setitem(CATALOG, name, replace(CATALOG[name], archive=archive))
