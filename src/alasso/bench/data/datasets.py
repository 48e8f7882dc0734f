"""What the data sets are: their files, the hashes of their content, where they lie and where to download them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alasso.bench.config import nearest
from alasso.errors import AlassoError

OFFICIAL = "official"
RE_SPLIT = "re-split"
UNVERIFIED = "unverified"


@dataclass(frozen=True)
class DataFile:
    """A published file, known by the sha256 of its content without any gzip wrapper.

    The wrapper does not count because mirrors compress the same content differently. ``sha256`` maps each
    known edition of the file to its hash.
    """

    name: str
    sha256: Mapping[str, str]


@dataclass(frozen=True)
class Archive:
    """A published tar.gz or zip, known by its publisher's md5, that holds the data set's folder."""

    md5: str
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name."""
        return self.addresses[0].rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """One data set: ``folder`` is its place below the data root, laid out as its publisher does.

    A set has either an ``archive`` or ``addresses`` below which its gzipped files lie, or neither when
    there is nothing to download.
    """

    name: str
    reader: Literal["idx", "cifar", "tiny-imagenet", "digits"]
    folder: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    train_files: tuple[DataFile, ...] = ()
    test_files: tuple[DataFile, ...] = ()
    addresses: tuple[str, ...] = ()
    archive: Archive | None = None
    label_bytes: int = 1
    """CIFAR only: how many label bytes open a record; the last of them is the class."""
    class_count: int = 0
    train_per_class: int = 0
    test_per_class: int = 0

    @property
    def files(self) -> tuple[DataFile, ...]:
        """All files, those for training first."""
        return self.train_files + self.test_files


@dataclass(frozen=True)
class FileReport:
    """What lies where one file (or folder of images) of a data set should be."""

    file: str
    status: Literal["ok", "missing", "wrong"]
    detail: str = ""
    edition: str = ""


def data_set(name: str) -> DataSet:
    """Finds a data set by its name.

    Args:
        name: One of ``CATALOG``.

    Returns:
        The catalog's entry.

    Raises:
        AlassoError: If the catalog has no such name.
    """
    try:
        return CATALOG[name]
    except KeyError:
        raise AlassoError(f"there is no data set {name!r}{nearest(name, CATALOG)}") from None


def data_root(data_dir: str | Path | None = None) -> Path:
    """Finds the folder below which data sets lie.

    Args:
        data_dir: The folder. Default: what ``ALASSO_DATA`` says, else the user's cache.

    Returns:
        The folder, which need not exist yet.
    """
    chosen = data_dir or os.environ.get("ALASSO_DATA")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("alasso")) / "data"


def where(name: str, data_dir: str | Path | None = None) -> Path:
    """Finds the folder that a data set's files lie in, or belong in.

    Args:
        name: The data set.
        data_dir: The folder with all data sets; see :func:`data_root`.

    Returns:
        The folder; for digits, scikit-learn's own file.

    Raises:
        AlassoError: If there is no such data set, or scikit-learn is not installed.
    """
    dataset = data_set(name)
    if dataset.reader != "digits":
        return data_root(data_dir) / dataset.folder
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise AlassoError("the digits come with scikit-learn, which is not installed")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def refuse(dataset: DataSet, folder: Path, reports: Sequence[FileReport]) -> None:
    """Raises AlassoError with the remedy unless all reports are ok."""
    remedy = f"`alasso data fetch {dataset.name}`"
    if missing := [report.file for report in reports if report.status == "missing"]:
        raise AlassoError(
            f"{dataset.name} is not in {folder}: missing {', '.join(missing)}; run {remedy}, "
            "or name the folder that holds your data sets with --data-dir or ALASSO_DATA"
        )
    for report in reports:
        if report.status == "wrong":
            raise AlassoError(f"{report.detail}; {remedy} downloads it again")


def shorten(digest: str) -> str:
    """Cuts a hash to what tells two apart."""
    return digest[:12] + "…"


def _official(names_and_hashes: Mapping[str, str]) -> tuple[DataFile, ...]:
    """Files of which one edition is known."""
    return tuple(DataFile(name, {OFFICIAL: sha256}) for name, sha256 in names_and_hashes.items())


def _like_mnist(name: str, folder: str, classes: Sequence[str], sha256: Sequence[str], *addresses: str) -> DataSet:
    """MNIST, and what has its layout; ``sha256`` of images and labels, for training and for testing."""
    names = (f"{half}-{kind}-ubyte" for half in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    files = _official(dict(zip(names, sha256, strict=True)))
    return DataSet(name, "idx", folder, (1, 28, 28), tuple(classes), files[:2], files[2:], addresses)


def _cifar_archive(name: str, md5: str) -> Archive:
    mirrors = (
        "https://www.cs.toronto.edu/~kriz/",
        "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/",
    )
    return Archive(md5, tuple(mirror + name for mirror in mirrors))


_FASHION_CLASSES = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_SETS = (
    _like_mnist(
        "mnist",
        "MNIST/raw",
        "0123456789",
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        # The publisher's own page comes last: it turns most downloads away.
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    _like_mnist(
        "fashion-mnist",
        "FashionMNIST/raw",
        _FASHION_CLASSES.split(","),
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    DataSet(
        name="cifar10",
        reader="cifar",
        folder="cifar-10-batches-bin",
        shape=(3, 32, 32),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        train_files=_official(
            {
                "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            }
        ),
        test_files=_official({"test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"}),
        archive=_cifar_archive("cifar-10-binary.tar.gz", md5="c32a1d4ab5d03f1284b67883e8d87530"),
    ),
    DataSet(
        name="cifar100",
        reader="cifar",
        folder="cifar-100-binary",
        shape=(3, 32, 32),
        classes=tuple(_CIFAR100_CLASSES.split()),
        label_bytes=2,
        # The re-split edition divides the same 60,000 images otherwise into 500 + 100 a class: results on it are
        # not results on CIFAR-100 as published, so reports name it.
        train_files=(
            DataFile(
                "train.bin",
                {
                    OFFICIAL: "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
                    RE_SPLIT: "e5b42caaa93b0e4f8e2767583c73718b9d2e1b45ce04ec51bb6fa53759f751ab",
                },
            ),
        ),
        test_files=(
            DataFile(
                "test.bin",
                {
                    OFFICIAL: "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
                    RE_SPLIT: "25b7f9dc89ee1e0f32e1d0e801625f431a1599f6a264546280eeeaac0f11cf60",
                },
            ),
        ),
        archive=_cifar_archive("cifar-100-binary.tar.gz", md5="03b5dce01913d631647c71ecec9e9cb8"),
    ),
    DataSet(  # its labelled validation images are the test set
        name="tiny-imagenet",
        reader="tiny-imagenet",
        folder="tiny-imagenet-200",
        shape=(3, 64, 64),
        classes=(),  # read from the folder: wnids.txt and words.txt
        class_count=200,
        train_per_class=500,
        test_per_class=50,
        archive=Archive(
            "90528d7ca1a48142e341f4ef8d21d0de",
            (
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "https://image-net.org/data/tiny-imagenet-200.zip",
            ),
        ),
    ),
    DataSet("digits", "digits", folder="", shape=(1, 8, 8), classes=tuple("0123456789"), test_per_class=36),
)
CATALOG: dict[str, DataSet] = {entry.name: entry for entry in _SETS}
