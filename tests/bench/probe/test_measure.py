"""The batched measurement against the slow and obvious one."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from alasso.bench.probe.measure import Weight, losses, progress_bar, random_weights, task_loss


def networks():
    torch.manual_seed(3)
    shapes = {
        "mlp": ((6,), [nn.Flatten(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4)]),
        "dropout and tanh": ((6,), [nn.Linear(6, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 4)]),
        "one layer": ((6,), [nn.Linear(6, 4)]),
        "normalised": ((6,), [nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 4)]),
        "conv": ((2, 4, 4), [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)]),
    }
    plain = {name: (shape, nn.Sequential(*layers)) for name, (shape, layers) in shapes.items()}
    return {**plain, "wrapped": ((6,), nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, 4)))}


@torch.no_grad()
def losses_one_by_one(model, x, loss, weights, offsets):
    """The slow and obvious way: write the weight, run the network, write it back."""
    found = torch.empty(len(weights), len(offsets), dtype=offsets.dtype)
    for row, weight in enumerate(weights):
        tensor = model.get_parameter(weight.parameter)
        before = tensor[weight.index].clone()
        for column, offset in enumerate(offsets):
            tensor[weight.index] = before + offset
            found[row, column] = loss(model(x))
        tensor[weight.index] = before
    return found


def test_progress_is_a_bar_in_a_terminal_and_nothing_elsewhere():
    for terminal, shown in ((True, ("learning", "moving weights", "100%")), (False, ())):
        file = io.StringIO()
        with progress_bar(Console(file=file, force_terminal=terminal, width=100)) as watch:
            for what in ("learning", "moving weights"):
                for done in (1, 2):
                    watch(what, done, 2)
        assert all(word in file.getvalue() for word in shown) and bool(file.getvalue()) == terminal


@pytest.mark.parametrize("name", networks())
def test_batched_losses_equal_the_slow_and_obvious_loop(name, monkeypatch):
    monkeypatch.setattr("alasso.bench.probe.measure.CHUNK", 300)  # several chunks, the last one smaller
    shape, model = networks()[name]
    model = model.double().eval()
    x, y = torch.randn(9, *shape, dtype=torch.float64), torch.randint(1, 4, (9,))
    weights = random_weights(model, 10**6, torch.Generator().manual_seed(0))
    assert len(weights) == sum(p.numel() for p in model.parameters())
    offsets = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
    loss = task_loss(y, slice(1, 4))
    before = [p.clone() for p in model.parameters()]
    fast = losses(model, x, loss, weights, offsets)
    slow = losses_one_by_one(model, x, loss, weights, offsets)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_loss_is_cross_entropy_over_the_tasks_own_columns():
    outputs, y = torch.randn(8, 6), torch.randint(2, 5, (8,))
    expected = nn.functional.cross_entropy(outputs[:, 2:5], y - 2)
    torch.testing.assert_close(task_loss(y, slice(2, 5))(outputs), expected)


def test_weights_are_drawn_without_repeats_and_by_seed():
    model = networks()["mlp"][1]
    once, again = (random_weights(model, 20, torch.Generator().manual_seed(5)) for _ in range(2))
    assert once == again and len(set(once)) == 20
    assert isinstance(once[0], Weight)
