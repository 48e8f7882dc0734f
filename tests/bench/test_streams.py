"""Streams: reproducible orders, the user's own tasks, nothing of the test data in training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from alasso import AlassoError
from alasso.bench import data
from alasso.bench.config import RunConfig
from alasso.bench.data import ImageSet
from alasso.bench.registry import BENCHMARKS
from alasso.bench.streams import (
    Stream,
    fingerprint,
    left_over,
    make_stream,
    permuted,
    split,
    with_validation,
)

from run_helpers import CPU


def image_set(classes=6, per_class=10, channels=1, side=4, name="toy"):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    shape = (classes * per_class, channels, side, side)
    train, test = (rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(2))
    names = tuple(f"class {c}" for c in range(classes))
    return ImageSet(name, "made up", train, labels.copy(), test, labels.copy(), names)


def everything(examples):
    return examples.batch(torch.arange(len(examples)))


def test_first_task_is_the_image_as_it_is_and_pixels_are_divided_by_255():
    images = image_set()
    stream = permuted(images, 3, seed=0)
    x, y = everything(stream.tasks[0].train)
    np.testing.assert_array_equal(x.numpy(), images.train_images.reshape(60, 16).astype(np.float32) / 255)
    np.testing.assert_array_equal(y.numpy(), images.train_labels)
    assert stream.input_shape == (16,) and stream.classes == 6


def test_a_permutation_is_one_and_the_same_for_training_and_testing():
    stream = permuted(image_set(), 3, seed=0)
    for task in stream.tasks[1:]:
        assert torch.equal(task.train.pixels, task.test.pixels)
        assert sorted(task.train.pixels.tolist()) == list(range(16))
        x, _ = everything(task.train)
        plain, _ = everything(stream.tasks[0].train)
        assert torch.equal(x, plain[:, task.train.pixels]) and not torch.equal(x, plain)


def test_permutations_come_from_the_seed_and_do_not_depend_on_the_number_of_tasks():
    short, long = permuted(image_set(), 3, seed=5), permuted(image_set(), 9, seed=5)
    other = permuted(image_set(), 3, seed=6)
    for t in (1, 2):
        assert torch.equal(short.tasks[t].train.pixels, long.tasks[t].train.pixels)
        assert not torch.equal(short.tasks[t].train.pixels, other.tasks[t].train.pixels)


def test_all_tasks_share_one_copy_of_the_images_as_bytes():
    stream = permuted(image_set(), 5, seed=0)
    assert {task.train.images.data_ptr() for task in stream.tasks} == {stream.tasks[0].train.images.data_ptr()}
    assert stream.tasks[0].train.images.dtype == torch.uint8


def test_the_first_task_can_be_permuted_too():
    stream = permuted(image_set(), 2, seed=0, permute_first=True)
    assert stream.tasks[0].train.pixels.tolist() != list(range(16))


def test_split_tasks_hold_their_own_classes_and_columns():
    first, second = image_set(6, name="ten"), image_set(9, name="hundred")
    stream = split([(first, 1), (second, 2)], 3, seed=3, name="split-toy")
    assert [task.head for task in stream.tasks] == [slice(0, 3), slice(3, 6), slice(6, 9)]
    assert stream.classes == 9 and stream.editions == {"ten": "made up", "hundred": "made up"}
    for source, task in zip((first, second, second), stream.tasks, strict=True):
        rows = task.train.rows.numpy()
        assert len(set(source.train_labels[rows])) == 3 and len(rows) == 30
        _, y = everything(task.train)
        # One original class, one column; columns inside the task's own head.
        pairs = set(zip(source.train_labels[rows].tolist(), y.tolist(), strict=True))
        assert len(pairs) == 3 and {c for _, c in pairs} == set(range(task.head.start, task.head.stop))
        test_rows = task.test.rows.numpy()
        test_pairs = set(zip(source.test_labels[test_rows].tolist(), everything(task.test)[1].tolist(), strict=True))
        assert test_pairs == pairs


def test_class_order_comes_from_the_seed():
    names = [[task.name for task in split([(image_set(), 2)], 3, seed=s, name="x").tasks] for s in (0, 0, 1)]
    assert names[0] == names[1] != names[2]


def test_images_are_brought_to_the_size_asked_for():
    stream = split([(image_set(side=4, channels=3), 1)], 2, seed=0, name="x", size=9)
    x, _ = everything(stream.tasks[0].train)
    assert tuple(x.shape[1:]) == stream.input_shape == (3, 9, 9)
    assert x.min() >= 0 and x.max() <= 1


def test_left_over_classes_are_not_dropped():
    stream = split([(image_set(classes=5), 2)], 2, seed=0, name="x", all_classes=True)
    assert [task.head for task in stream.tasks] == [slice(0, 3), slice(3, 5)] and stream.classes == 5
    with pytest.raises(AlassoError, match="at least 2 classes"):
        split([(image_set(), 2)], 1, seed=0, name="x")


def test_too_many_tasks_for_the_classes_is_said():
    with pytest.raises(AlassoError, match="4 tasks of 2 classes need 8 classes, toy has 6"):
        split([(image_set(), 4)], 2, seed=0, name="x")


def test_validation_examples_come_from_training_and_are_not_trained_on():
    for stream in (permuted(image_set(), 2, seed=0), split([(image_set(), 2)], 3, seed=0, name="x")):
        held = with_validation(stream, seed=0)
        for before, after in zip(stream.tasks, held.tasks, strict=True):
            train, test = set(after.train.rows.tolist()), set(after.test.rows.tolist())
            assert not train & test and len(test) == round(len(before.train) / 6)
            assert after.test.images.data_ptr() == before.train.images.data_ptr()


class Listed(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((3,), float(i)), i % 2


def test_own_streams_from_datasets_and_tensors():
    x, y = torch.randn(8, 3), torch.arange(8) % 4
    stream = Stream.of([(TensorDataset(x, y), (x, y)), (Listed(6), Listed(4))])
    assert stream.classes == 4 and all(task.head == slice(0, 4) for task in stream.tasks)
    assert torch.equal(everything(stream.tasks[0].train)[0], x)
    assert everything(stream.tasks[1].train)[1].tolist() == [0, 1, 0, 1, 0, 1]


def test_own_streams_with_heads_of_their_own():
    x = torch.randn(4, 3)
    stream = Stream.of([((x, torch.tensor([0, 1, 0, 1])),) * 2, ((x, torch.tensor([5, 7, 6, 5])),) * 2], heads="own")
    assert [task.head for task in stream.tasks] == [slice(0, 2), slice(2, 5)]
    assert everything(stream.tasks[1].train)[1].tolist() == [2, 4, 3, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, y: Stream.of([]), "at least one"),
        (lambda x, y: Stream.of([((x, y), (x, y))], heads="two"), "heads must be shared or own"),
        (
            lambda x, y: Stream.of([((x, y), (x[:, :2], y))]),
            r"task 1 is tested on inputs of the shape \(2,\)",
        ),
        (lambda x, y: Stream.of([((x, y), (x, y)), ((x[:, :1], y), (x, y))]), r"task 2 is trained on .* shape \(1,\)"),
        (lambda x, y: Stream.of([((x, y[:2]), (x, y))]), "4 inputs and 2 labels"),
        (lambda x, y: Stream.of([((x, y.float()), (x, y))]), "class numbers"),
        (lambda x, y: Stream.of([Listed(4), Listed(2)]), "made of a list of pairs"),
        (lambda x, y: Stream.of([TensorDataset(x, y), TensorDataset(x, y)]), "made of a list of pairs"),
        (lambda x, y: Stream.of([(x, y), (x, y)]), "task 1 is neither a torch Dataset nor a pair"),
        (lambda x, y: Stream.of([((x, y), (x, y)), ((x, y),)]), "made of a list of pairs"),
        (lambda x, y: Stream.of(x), "a stream is made of a list of pairs: Stream.of"),
        (lambda x, y: Stream.of(TensorDataset(x, y)), "task 1 is neither a torch Dataset nor a pair"),
        (lambda x, y: Stream.of(3), "made of a list of pairs"),
        (lambda x, y: Stream.of([(3, (x, y))]), "neither a torch Dataset nor"),
    ],
)
def test_mistakes_in_own_streams_are_named(make, message):
    with pytest.raises(AlassoError, match=message):
        make(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))


ODD = "number classes alike in train and test, or leave these examples out"


@pytest.mark.parametrize(
    ("tasks", "heads", "message"),
    [
        ([([0, 1], [0, 1]), ([0, 1], [1, 2])], "shared", "task 2 is tested on labels [2], on which no task is trained"),
        ([([0, 1], [0, 3, 2])], "own", "task 1 is tested on labels [2, 3], on which it is not trained"),
        ([([0, 1], [0, 1]), ([2, 3], [1, 2])], "own", "task 2 is tested on labels [1], on which it is not trained"),
        (
            [([0, 1], [2, 3]), ([2, 3], [0, 1])],
            "shared",
            "task 1 is tested on labels [2, 3], on which it is not trained",
        ),
        ([(range(10), range(20))], "shared", "labels [10, 11, 12, 13, 14, 15, 16, 17], on which no task is trained"),
    ],
)
def test_test_labels_that_are_not_trained_on_are_refused(tasks, heads, message):
    with pytest.raises(AlassoError) as caught:
        Stream.of([tuple(labelled(labels) for labels in pair) for pair in tasks], heads=heads)
    assert str(caught.value).endswith(f"{message}: {ODD}")


def labelled(labels):
    return torch.randn(len(labels), 3), torch.tensor(list(labels))


@pytest.mark.parametrize("heads", ["shared", "own"])
def test_fewer_test_labels_than_training_labels_are_none_to_refuse(heads):
    assert len(Stream.of([(labelled([0, 1, 2]), labelled([1])), (labelled([0, 1]), labelled([0]))], heads=heads)) == 2


@pytest.mark.parametrize("tested", [([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 1], [0, 1])])  # the latter: forgetting alone
def test_tasks_that_share_a_head_may_be_tested_on_each_others_classes(tested):
    trained = ([0, 1], [2, 3])
    assert Stream.of([tuple(map(labelled, pair)) for pair in zip(trained, tested, strict=True)]).classes == 4


def test_the_fields_that_a_benchmark_takes_change_its_stream(monkeypatch):
    """The catalog's declaration against what the streams are made of."""

    def images(name, data_dir=None):
        few = {"cifar10": 10, "cifar100": 100, "tiny-imagenet": 200}.get(name, 10)
        pixels = np.zeros((2 * few, *((3, 8, 8) if few > 10 or name == "cifar10" else (8, 8))), dtype=np.uint8)
        labels = np.arange(2 * few) % few
        names = tuple(map(str, range(few)))
        return data.ImageSet(name, "toy", pixels, labels, pixels, labels, names)

    asked = []
    monkeypatch.setattr(data, "load", images)
    monkeypatch.setattr(data, "load_folder", lambda *of: asked.append(of) or images("folder"))
    tried = {"permute_first": True, "image_size": 6, "classes_per_task": 4, "path": "other"}
    for name in BENCHMARKS:
        plain = RunConfig.for_benchmark(name, "si", tasks=2, path="images" if name == "split-folder" else None)
        for field, value in tried.items():
            asked.clear()
            streams = [make_stream(c, None, CPU) for c in (plain, replace(plain, **{field: value}))]
            before, after = (
                (s.input_shape, s.classes, [t.train.pixels is None or t.train.pixels.tolist() for t in s.tasks])
                for s in streams
            )
            used = before != after or len(set(asked)) > 1
            assert used == (field in BENCHMARKS[name].takes), (name, field)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes_per_task": 4}, "2 of 6 classes left over, at 4 a task: added to the tasks there are"),
        ({"classes_per_task": 4, "tasks": 1}, "2 of 6 classes left over, at 4 a task: not used in 1 task"),
        ({"classes_per_task": 3}, None),
        ({"classes_per_task": 3, "tasks": 3}, None),  # too many: refused when the tasks are laid out
    ],
)
def test_left_over_classes_of_own_images_are_said_before_they_are_read(changes, said, tmp_path):
    for name in "abcdef":
        (tmp_path / name).mkdir()
        for i in range(2):
            (tmp_path / name / f"{i}.png").touch()  # no picture, only a name
    assert left_over(RunConfig.for_benchmark("split-folder", "si", path=str(tmp_path), **changes)) == said


def test_a_streams_fingerprint_is_of_its_examples_and_their_places():
    x, y = torch.rand(50, 3, 40, 40), torch.arange(50) % 4
    swapped, brighter = y.clone(), x.clone()
    swapped[7], brighter[-1] = 3 - y[7], 1.0
    streams = [
        Stream.of([((x, y), (x, y))] * 2),
        Stream.of([((x, y), (x, y))] * 2, heads="own"),
        Stream.of([((x, y), (x, y))]),
        Stream.of([((x, swapped), (x, y))] * 2),
        Stream.of([((x, y), (brighter, y))] * 2),
        Stream.of([((x.view(50, 40, 3, 40), y),) * 2] * 2),
    ]
    assert len({fingerprint(stream) for stream in streams}) == len(streams)
    assert fingerprint(Stream.of([((x.double().numpy(), y), (x.clone(), y))] * 2)) == fingerprint(streams[0])
