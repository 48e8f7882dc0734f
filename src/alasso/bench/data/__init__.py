"""The benchmarks' image sets: where they lie, whether they are what was published, and their arrays.

Nothing is taken on trust: before a file is read, its content is compared with the hash of the published one,
whether this package downloaded it or somebody laid it out by hand.
"""

from alasso.bench.data.datasets import CATALOG, Archive, DataFile, DataSet, FileReport, data_root, data_set, where
from alasso.bench.data.files import check, fetch, load
from alasso.bench.data.images import ImageSet, folder_classes, folder_edition, load_folder
from alasso.bench.data.rows import load_rows

__all__ = [
    "CATALOG",
    "Archive",
    "DataFile",
    "DataSet",
    "FileReport",
    "ImageSet",
    "check",
    "data_root",
    "data_set",
    "fetch",
    "folder_classes",
    "folder_edition",
    "load",
    "load_folder",
    "load_rows",
    "where",
]
