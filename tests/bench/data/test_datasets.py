"""The catalog: what it names, and where that lies."""

from pathlib import Path

import pytest

from alasso.bench import data
from alasso.errors import AlassoError


def test_the_catalog_names_every_set():
    assert list(data.CATALOG) == ["mnist", "fashion-mnist", "cifar10", "cifar100", "tiny-imagenet", "digits"]
    for entry in data.CATALOG.values():
        assert all(len(digest) == 64 for file in entry.files for digest in file.sha256.values())
        assert entry.archive is None or (len(entry.archive.md5) == 32 and len(entry.archive.addresses) > 1)
    assert [file.name for file in data.CATALOG["mnist"].files] == [
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ]
    assert [file.sha256.keys() for file in data.CATALOG["cifar100"].files] == [{"official", "re-split"}] * 2
    assert data.CATALOG["tiny-imagenet"].archive.name == "tiny-imagenet-200.zip"
    assert len(data.CATALOG["cifar100"].classes) == len(set(data.CATALOG["cifar100"].classes)) == 100
    assert data.CATALOG["fashion-mnist"].classes[9] == "Ankle boot"


@pytest.mark.parametrize("use", [data.load, data.check, data.fetch, data.where])
def test_an_unknown_name_is_refused_with_the_nearest(use):
    with pytest.raises(AlassoError, match=r"no data set 'mnits'; did you mean 'mnist'\? There are: mnist, "):
        use("mnits")


def test_where_data_sets_lie(monkeypatch, tmp_path):
    monkeypatch.delenv("ALASSO_DATA", raising=False)
    assert data.data_root().name == "data" and "alasso" in data.data_root().parts
    monkeypatch.setenv("ALASSO_DATA", str(tmp_path))
    assert data.data_root() == tmp_path
    assert data.data_root("elsewhere") == Path("elsewhere")
    assert data.where("cifar10") == tmp_path / "cifar-10-batches-bin"
