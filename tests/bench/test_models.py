"""The paper's networks, layer by layer, and networks of the user's own."""

import sys

import pytest
import torch
from torch import nn

from alasso import AlassoError
from alasso.bench import models


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


FACTORIES = """
import torch
from torch import nn
def good(input_shape, classes): return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))
def takes_nothing(): return nn.Linear(64, 10)
def no_module(input_shape, classes): return 3
def no_weights(input_shape, classes): return nn.Flatten()
def narrow(input_shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes - 1))
def other_inputs(input_shape, classes): return nn.Linear(63, classes)
class Pair(nn.Linear):
    def forward(self, x): return x, x
def pair(input_shape, classes): return Pair(64, classes)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module of that name, beside which the command is run."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "factories", raising=False)


@pytest.mark.parametrize(
    "factory, said",
    [
        ("takes_nothing", r"'factories:takes_nothing' fails when it is called with \(\(64,\), 10\): TypeError: "),
        ("no_module", "'factories:no_module' must return an nn.Module with weights to train, not this int"),
        ("no_weights", "'factories:no_weights' must return an nn.Module with weights to train, not this Flatten"),
        ("narrow", r"must answer two inputs with a tensor of shape \(2, 10\), not \(2, 9\)"),
        ("other_inputs", r"'factories:other_inputs' cannot take inputs of shape \(64,\): RuntimeError: "),
        ("pair", r"must answer two inputs with a tensor of shape \(2, 10\), not tuple"),
    ],
)
def test_a_network_of_ones_own_that_cannot_answer_is_refused_before_training(factory, said, factories):
    with pytest.raises(AlassoError, match=said) as refusal:
        models.build(f"factories:{factory}", (64,), 10)
    assert "\n" not in str(refusal.value)


def test_asking_a_network_of_ones_own_leaves_no_trace(factories):
    torch.manual_seed(0)
    model, after = models.build("factories:good", (64,), 10), torch.rand(1)
    torch.manual_seed(0)
    expected = nn.Linear(64, 10)
    assert torch.equal(model[2].weight, expected.weight) and torch.equal(after, torch.rand(1))
    assert all(layer.train for layer in model.modules())


def test_a_network_from_python_draws_what_it_drew_before_it_was_tried(tmp_path):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.rand_like(x))

    def unchecked():
        torch.manual_seed(0)
        return [Noisy(6, 2).weight, torch.rand(1)]

    torch.manual_seed(0)
    drawn = [models.built_by(lambda: Noisy(6, 2), (6,), 2).weight, torch.rand(1)]
    assert all(torch.equal(*pair) for pair in zip(drawn, unchecked(), strict=True))
