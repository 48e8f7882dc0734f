"""What the data sets are: their files, the hashes of their content and where they can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from alasso.bench.config import nearest
from alasso.errors import AlassoError

OFFICIAL = "official"
RE_SPLIT = "re-split"
UNVERIFIED = "unverified"


@dataclass(frozen=True)
class DataFile:
    """A published file, known by the sha256 of its content without any gzip wrapper.

    The wrapper is left out because mirrors compress the same content differently. ``sha256`` maps each
    known edition of the file to its hash.
    """

    name: str
    sha256: Mapping[str, str]


@dataclass(frozen=True)
class Archive:
    """A published tar.gz or zip, known by its publisher's md5, that holds the data set's folder."""

    name: str
    md5: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class DataSet:
    """One data set: ``folder`` is its place below the data root, laid out as its publisher does.

    A set has either an ``archive`` or ``addresses`` below which its gzipped files lie, or neither when
    there is nothing to download.
    """

    name: str
    title: str
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
        return self.train_files + self.test_files


def data_set(name: str) -> DataSet:
    """The catalog's entry of that name."""
    try:
        return CATALOG[name]
    except KeyError:
        raise AlassoError(f"there is no data set {name!r}{nearest(name, CATALOG)}") from None


def _official(name: str, sha256: str) -> DataFile:
    return DataFile(name, {OFFICIAL: sha256})


_MNIST = DataSet(
    name="mnist",
    title="MNIST handwritten digits",
    reader="idx",
    folder="MNIST/raw",
    shape=(1, 28, 28),
    classes=tuple("0123456789"),
    train_files=(
        _official("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        _official("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    ),
    test_files=(
        _official("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        _official("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    # The publisher's own page comes last: it turns most downloads away.
    addresses=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
)

_FASHION_MNIST = DataSet(
    name="fashion-mnist",
    title="Fashion-MNIST clothing",
    reader="idx",
    folder="FashionMNIST/raw",
    shape=(1, 28, 28),
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    train_files=(
        _official("train-images-idx3-ubyte", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        _official("train-labels-idx1-ubyte", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    ),
    test_files=(
        _official("t10k-images-idx3-ubyte", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        _official("t10k-labels-idx1-ubyte", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    ),
    addresses=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
)

_CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10",
    reader="cifar",
    folder="cifar-10-batches-bin",
    shape=(3, 32, 32),
    classes=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    train_files=(
        _official("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        _official("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        _official("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        _official("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        _official("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ),
    test_files=(_official("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),),
    archive=Archive(
        name="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        addresses=(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/cifar-10-binary.tar.gz",
        ),
    ),
)

_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_CIFAR100 = DataSet(
    name="cifar100",
    title="CIFAR-100, fine labels",
    reader="cifar",
    folder="cifar-100-binary",
    shape=(3, 32, 32),
    classes=tuple(_CIFAR100_CLASSES.split()),
    label_bytes=2,
    # The re-split edition holds the same 60,000 images, divided otherwise into 500 + 100 a class: results
    # on it are not results on CIFAR-100 as published, so it goes by its own name wherever it is reported.
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
    archive=Archive(
        name="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        addresses=(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/cifar-100-binary.tar.gz",
        ),
    ),
)

_TINY_IMAGENET = DataSet(
    name="tiny-imagenet",
    title="Tiny ImageNet, its labelled validation images as the test set",
    reader="tiny-imagenet",
    folder="tiny-imagenet-200",
    shape=(3, 64, 64),
    classes=(),  # read from the folder: wnids.txt and words.txt
    class_count=200,
    train_per_class=500,
    test_per_class=50,
    archive=Archive(
        name="tiny-imagenet-200.zip",
        md5="90528d7ca1a48142e341f4ef8d21d0de",
        addresses=(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "https://image-net.org/data/tiny-imagenet-200.zip",
        ),
    ),
)

_DIGITS = DataSet(
    name="digits",
    title="scikit-learn's 8×8 handwritten digits",
    reader="digits",
    folder="",
    shape=(1, 8, 8),
    classes=tuple("0123456789"),
    test_per_class=36,
)

CATALOG: dict[str, DataSet] = {
    entry.name: entry for entry in (_MNIST, _FASHION_MNIST, _CIFAR10, _CIFAR100, _TINY_IMAGENET, _DIGITS)
}
