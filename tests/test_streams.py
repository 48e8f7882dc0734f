"""Streams and networks: the paper's sizes, reproducible orders, nothing of the test data in training."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from alasso import AlassoError
from alasso.bench import data, models
from alasso.bench._make_streams import inputs_and_classes, make_stream
from alasso.bench.config import RunConfig
from alasso.bench.data import ImageSet
from alasso.bench.streams import Stream, permuted, split, with_validation


def image_set(classes=6, per_class=10, channels=1, side=4, name="toy"):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    shape = (classes * per_class, channels, side, side)
    train, test = (rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(2))
    names = tuple(f"class {c}" for c in range(classes))
    return ImageSet(name, "made up", train, labels.copy(), test, labels.copy(), names)


def everything(examples):
    return examples.batch(torch.arange(len(examples)))


# -- permuted ---------------------------------------------------------------------------------------------------


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


# -- split ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("benchmark", "changes"),
    [
        ("permuted-digits", {}),
        ("permuted-mnist", {"tasks": 2}),
        ("split-cifar", {"tasks": 2}),
        ("split-cifar", {"tasks": 5, "classes_per_task": 2, "image_size": 40}),
        ("split-tiny-imagenet", {"tasks": 2, "image_size": 70}),
        ("split-folder", {}),
        ("split-folder", {"tasks": 1, "image_size": 9}),
    ],
)
def test_inputs_and_classes_are_known_before_data_are_read(benchmark, changes, tmp_path, monkeypatch):
    from PIL import Image

    for name in "abcde":  # at two a task, one is left over
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")

    def made_up(name, data_dir):
        known = data.data_set(name)
        channels, side, _ = known.shape
        return image_set(len(known.classes) or known.class_count, 1, channels, side, name)

    monkeypatch.setattr(data, "load", made_up)
    path = {"path": str(tmp_path)} if benchmark == "split-folder" else {}
    config = RunConfig.for_benchmark(benchmark, "si", **changes, **path)
    stream = make_stream(config, None, torch.device("cpu"))
    assert inputs_and_classes(config) == (stream.input_shape, stream.classes)


# -- one's own --------------------------------------------------------------------------------------------------


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


class Uneven(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.zeros(i + 1), 0


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
        (lambda x, y: Stream.of([(Uneven(), Uneven())]), r"task 1 has inputs of several shapes, \(1,\) and \(2,\)"),
        (lambda x, y: Stream.of([((x, y[:2]), (x, y))]), "4 inputs and 2 labels"),
        (lambda x, y: Stream.of([((x, y.float()), (x, y))]), "class numbers"),
        (lambda x, y: Stream.of([Listed(4), Listed(2)]), r"task 1 is no pair \(train, test\): write Stream.of"),
        (lambda x, y: Stream.of([TensorDataset(x, y), TensorDataset(x, y)]), "task 1 is no pair"),
        (lambda x, y: Stream.of([(x, y), (x, y)]), "task 1 is no pair"),
        (lambda x, y: Stream.of([((x, y), (x, y)), ((x, y),)]), "task 2 is no pair"),
        (lambda x, y: Stream.of(x), "a stream is made of a list of pairs, not of a Tensor: Stream.of"),
        (lambda x, y: Stream.of(TensorDataset(x, y)), "a list of pairs, not of a TensorDataset"),
        (lambda x, y: Stream.of(3), "a list of pairs, not of a int"),
        (lambda x, y: Stream.of([((x, y[0]), (x, y))]), "single numbers for inputs or labels"),
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
        ([([0, 1], [0, 1]), ([0, 1], [1, 2])], "shared", "task 2 is tested on labels 2, on which no task is trained"),
        ([([0, 1], [0, 3, 2])], "own", "task 1 is tested on labels 2, 3, and trained on 0, 1"),
        ([([0, 1], [0, 1]), ([2, 3], [1, 2])], "own", "task 2 is tested on labels 1, and trained on 2, 3"),
        ([([0, 1], [2, 3]), ([2, 3], [0, 1])], "shared", "task 1 is tested on labels 2, 3, and trained on 0, 1"),
        ([(range(10), range(20))], "shared", "labels 10, 11, 12, 13, 14, 15, 16, 17, …, on which no task is trained"),
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


# -- networks, against the tables of the supplement ------------------------------------------------------------------


def parameters_and_shapes(model, shape):
    shapes = []
    for module in model:
        module.register_forward_hook(lambda module, args, out: shapes.append((type(module).__name__, *out.shape[1:])))
    model.eval()(torch.zeros(1, *shape))
    return sum(p.numel() for p in model.parameters()), shapes


def test_permuted_mnist_network():
    count, shapes = parameters_and_shapes(models.build("mlp", (784,), 10), (784,))
    assert count == 784 * 2000 + 2000 + 2000 * 2000 + 2000 + 2000 * 10 + 10
    assert shapes == [
        ("Flatten", 784), ("Linear", 2000), ("ReLU", 2000), ("Linear", 2000), ("ReLU", 2000), ("Linear", 10),
    ]  # fmt: skip


def test_split_cifar_network():
    count, shapes = parameters_and_shapes(models.build("cifar-cnn", (3, 32, 32), 90), (3, 32, 32))
    convs = (3 * 9 * 4 + 4) + (4 * 9 * 4 + 4) + (4 * 9 * 8 + 8) + (8 * 9 * 8 + 8)
    assert count == convs + (512 * 64 + 64) + (64 * 90 + 90)
    assert [s for s in shapes if s[0] != "ReLU"] == [
        ("Conv2d", 4, 32, 32), ("Conv2d", 4, 32, 32), ("MaxPool2d", 4, 16, 16), ("Dropout", 4, 16, 16),
        ("Conv2d", 8, 16, 16), ("Conv2d", 8, 16, 16), ("MaxPool2d", 8, 8, 8), ("Dropout", 8, 8, 8),
        ("Flatten", 512), ("Linear", 64), ("Dropout", 64), ("Linear", 90),
    ]  # fmt: skip
    dropouts = [m.p for m in models.build("cifar-cnn", (3, 32, 32), 90) if isinstance(m, nn.Dropout)]
    assert dropouts == [0.25, 0.25, 0.5]


def test_split_tiny_imagenet_network():
    model = models.build("tiny-imagenet-cnn", (3, 224, 224), 180)
    count, shapes = parameters_and_shapes(model, (3, 224, 224))
    pairs = ((3, 32), (32, 32), (32, 64), (64, 64), (64, 64))
    assert count == sum(n * 9 * m + m for n, m in pairs) + (3136 * 2048 + 2048) + (2048 * 180 + 180)
    assert [s for s in shapes if s[0] == "MaxPool2d"] == [
        ("MaxPool2d", c, s, s) for c, s in ((32, 112), (32, 56), (64, 28), (64, 14), (64, 7))
    ]
    assert [m.p for m in model if isinstance(m, nn.Dropout)] == [0.25] * 5 + [0.5]
    assert shapes[-1] == ("Linear", 180)


def test_networks_start_with_glorot_weights_and_zero_biases():
    for name, shape in (("mlp", (16,)), ("cifar-cnn", (3, 32, 32))):
        for module in models.build(name, shape, 5, hidden=30):
            if isinstance(module, nn.Linear | nn.Conv2d):
                fan = sum(nn.init._calculate_fan_in_and_fan_out(module.weight))
                bound = (6 / fan) ** 0.5
                assert not module.bias.any() and 0.8 * bound < module.weight.abs().max() <= bound


def test_dropout_network_of_goodfellow():
    model = models.build("mlp", (16,), 5, hidden=8, dropout=True)
    assert [m.p for m in model if isinstance(m, nn.Dropout)] == [0.2, 0.5, 0.5]


def test_a_network_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\ndef tiny(shape, classes): return nn.Linear(*shape, classes)"
    )
    monkeypatch.chdir(tmp_path)
    assert models.build("my_nets:tiny", (7,), 3).weight.shape == (3, 7)
    for name, message in (
        ("my_nets:huge", "has no function huge"),
        ("no_such_module:f", "cannot be imported"),
        ("resnet", "one of mlp, cifar-cnn, tiny-imagenet-cnn or module:factory"),
    ):
        with pytest.raises(AlassoError, match=message):
            models.build(name, (7,), 3)


def test_a_network_for_images_refuses_vectors():
    with pytest.raises(AlassoError, match="takes images of at least 32"):
        models.build("tiny-imagenet-cnn", (3, 16, 16), 5)
