"""Streams of rows with an image and a label, as Hugging Face's `datasets` has them; it is needed for the last test."""

import numpy as np
import pytest
import torch
from PIL import Image

from alasso import AlassoError
from alasso.bench import RunConfig, Stream, run
from alasso.bench.data import load_rows

COLOURS = {0: (250, 0, 0), 1: (0, 250, 0), 2: (0, 0, 250), 3: (250, 250, 0), 4: (0, 250, 250)}


def picture(label, size=(6, 4)):
    return Image.new("RGB", size, COLOURS[label])


def rows(labels=(0, 1, 2, 3) * 5, make=picture, **names):
    image, label = names.get("image", "image"), names.get("label", "label")
    return [{"id": i, image: make(y), label: y} for i, y in enumerate(labels)]


def read(dataset, **changes):
    return load_rows(
        dataset, **{"image": "image", "label": "label", "test": "test", "size": None, "name": "toy", **changes}
    )


def everything(examples):
    return examples.batch(torch.arange(len(examples)))


def test_each_class_is_in_one_task_with_its_images_and_its_column():
    stream = Stream.from_hf({"train": rows(), "test": rows((3, 2, 1, 0))}, seed=3)
    assert [task.head for task in stream.tasks] == [slice(0, 2), slice(2, 4)] and stream.input_shape == (3, 4, 6)
    column_of = {}
    for task in stream.tasks:
        for half, each in ((task.train, 5), (task.test, 1)):
            x, y = everything(half)
            assert sorted(y.tolist()) == [c for c in range(task.head.start, task.head.stop) for _ in range(each)]
            for image, column in zip(x, y.tolist(), strict=True):
                assert column_of.setdefault(tuple((255 * image[:, 0, 0]).round().int().tolist()), column) == column
    assert column_of.keys() == set(list(COLOURS.values())[:4]) and len(set(column_of.values())) == 4


def test_the_order_of_the_classes_is_of_the_seed_and_none_is_left_over():
    dataset = rows(tuple(COLOURS) * 5)
    names = [[task.name for task in Stream.from_hf(dataset, seed=seed).tasks] for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    assert [task.head for task in Stream.from_hf(dataset).tasks] == [slice(0, 3), slice(3, 5)]
    assert len(Stream.from_hf(dataset, classes_per_task=5)) == 1


def test_of_one_data_set_a_fifth_of_every_class_is_tested_on():
    images = read(rows([0] * 10 + [1] * 20 + [2] * 2, lambda y: np.full((2, 2), y)))
    assert np.bincount(images.test_labels).tolist() == [2, 4, 1]
    assert np.bincount(images.train_labels).tolist() == [8, 16, 1]
    assert (images.train_images[:, 0, 0, 0] == images.train_labels).all()


def test_texts_are_labels_and_other_columns_are_named():
    made = [{"img": picture(y), "kind": "zx"[y]} for y in (0, 1) * 5]
    images = read(made, image="img", label="kind")
    assert images.classes == ("x", "z") and images.train_labels[0] == 1


@pytest.mark.parametrize(
    ("make", "shape", "first"),
    [
        (lambda y: Image.new("L", (3, 2), 51), (1, 2, 3), 0.2),
        (lambda y: Image.new("1", (3, 2), 1), (1, 2, 3), 1.0),
        (lambda y: Image.new("RGBA", (3, 2), (51, 0, 0, 255)), (3, 2, 3), 0.2),
        (lambda y: Image.new("L" if y else "RGB", (3, 2), 51 if y else (51, 0, 0)), (3, 2, 3), 0.2),
        (lambda y: [[51, 0, 0], [0, 0, 0]], (1, 2, 3), 0.2),
        (lambda y: np.full((4, 5, 3), 51, dtype=np.uint8), (3, 4, 5), 0.2),
        (lambda y: torch.full((3, 4, 5), 0.2), (3, 4, 5), 0.2),
        (lambda y: np.full((4, 4, 1), -2.5), (1, 4, 4), -2.5),
    ],
)
def test_pictures_and_arrays(make, shape, first):
    stream = Stream.from_hf(rows(make=make))
    x, _ = everything(stream.tasks[0].train)
    assert stream.input_shape == tuple(x.shape[1:]) == shape and x.dtype == torch.float32
    assert x[0, 0, 0, 0] == pytest.approx(first)


def test_pictures_of_all_sizes_are_brought_to_one():
    mixed = rows(make=lambda y: picture(y, (8 + y, 5)))
    stream = Stream.from_hf(mixed, size=3)
    assert stream.input_shape == (3, 3, 3)
    x, _ = everything(stream.tasks[0].train)
    assert (x == x[:, :, :1, :1]).all()  # of one colour before and after
    with pytest.raises(AlassoError, match="images of 10×5 uint8, 11×5 uint8, 8×5 uint8: bring all to one; size="):
        Stream.from_hf(mixed)
    assert Stream.from_hf(rows(make=lambda y: np.zeros((4, 6))), size=5).input_shape == (1, 5, 5)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (rows(), {"image": "img"}, "no column 'img', only id, image, label: name both with image=, label="),
        (rows(), {"label": "fine"}, "no column 'fine', only id, image, label"),
        ({"train": rows(), "valid": rows()}, {}, "no split 'test', only train, valid: name the one to test on"),
        ({"test": rows()}, {}, "no split 'train', only test"),
        ([], {}, "has no rows"),
        (None, {}, "a dataset is a mapping of splits, or rows, not NoneType"),
        ([(picture(0), 0)], {}, "a row must be a mapping of columns, not tuple"),
        (rows(make=lambda y: {"bytes": b"", "path": ""}), {}, "column 'image' must hold images, .* not dict"),
        (rows(make=lambda y: None), {}, "'image' must hold images, .* not NoneType"),
        (rows(make=lambda y: "cat.png"), {}, "'image' must hold images, .* not str"),
        (rows(make=lambda y: np.zeros(64)), {}, r"not an array of the shape \(64,\)"),
        (rows(make=lambda y: np.zeros((5, 4, 2))), {}, r"not an array of the shape \(5, 4, 2\)"),
        (rows(make=lambda y: [[1, 2], [3]]), {}, "'image' must hold images"),
        (rows(make=lambda y: np.full((4, 4), 300)), {}, "between 0 and 255; column 'image' has others"),
        (rows([0.5, 1.0] * 5, lambda y: picture(0)), {}, "'label' must hold one label a row"),
        (rows([0, -1] * 5, lambda y: picture(0)), {}, "'label' must hold one label a row"),
        (rows([0, None] * 5, lambda y: picture(0)), {}, "'label' must hold one label a row"),
        (rows([[0], [0, 1]] * 5, lambda y: picture(0)), {}, "'label' must hold one label a row"),
        ({"train": rows(), "test": rows((0, 1, 2, 4))}, {}, "must have the same labels; only one has 3, 4"),
        (rows(), {"classes_per_task": 1}, "a task needs at least 2 classes"),
        (rows((0,) * 5), {}, "need 2 classes, own data has 1"),
    ],
)
def test_what_is_no_such_data_set_is_refused_in_a_line(dataset, options, message):
    with pytest.raises(AlassoError, match=message) as caught:
        Stream.from_hf(dataset, **options)
    assert "\n" not in str(caught.value)


def test_a_run_records_a_fingerprint_of_the_data():
    config = RunConfig.own("sgd", epochs=1, hidden=4)
    recorded = [run(config, stream=Stream.from_hf(rows(), name=name)).data for name in ("colours", "colours", "others")]
    assert recorded[0] == recorded[1] and list(recorded[2]) == ["others"]
    assert recorded[0]["colours"].startswith("own data, 20 examples in 2 tasks, ")


@pytest.mark.filterwarnings("ignore")  # other libraries' remarks are not the point here
def test_with_the_library_itself():
    datasets = pytest.importorskip("datasets")
    kinds = datasets.ClassLabel(names=["red", "green", "blue", "yellow"])
    features = datasets.Features({"id": datasets.Value("int64"), "image": datasets.Image(), "label": kinds})
    made = datasets.Dataset.from_list(rows(), features=features)
    parts = made.train_test_split(test_size=8, stratify_by_column="label", seed=0)
    plain = Stream.from_hf(parts, seed=1)
    assert [len(task.train) for task in plain.tasks] == [6, 6] and [len(task.test) for task in plain.tasks] == [4, 4]
    assert sorted(", ".join(task.name.removeprefix("own data: ") for task in plain.tasks).split(", ")) == sorted(
        kinds.names
    )
    assert len(Stream.from_hf(made)) == 2
    for same in (parts.with_format("numpy"), parts.with_format("torch")):
        other = Stream.from_hf(same, seed=1)
        for task, again in zip(plain.tasks, other.tasks, strict=True):
            assert task.name == again.name and torch.equal(everything(task.train)[0], everything(again.train)[0])
    grids = datasets.Features({"image": datasets.Array2D((4, 6), "uint8"), "label": datasets.Value("string")})
    listed = [{"image": np.full((4, 6), 51, dtype=np.uint8), "label": "ab"[i % 2]} for i in range(10)]
    stream = Stream.from_hf(datasets.Dataset.from_list(listed, features=grids))
    assert stream.input_shape == (1, 4, 6) and float(everything(stream.tasks[0].test)[0].mean()) == pytest.approx(0.2)
    with pytest.raises(AlassoError, match="no column 'img', only id, image, label"):
        Stream.from_hf(made, image="img")
