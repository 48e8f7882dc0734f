"""Small nets, tasks and loops shared by several test files."""

import itertools

import torch
from torch import nn


def mlp(*sizes, dtype=torch.float32):
    layers = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def toy_tasks(count=3, batches=8, dtype=torch.float32, inputs=6, classes=4, size=16):
    """Lists of (x, y) batches whose labels follow another random linear rule in each task."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(count):
        rule = torch.randn(inputs, classes, generator=generator, dtype=torch.float64)
        xs = torch.randn(batches, size, inputs, generator=generator, dtype=torch.float64)
        result.append([(x.to(dtype), (x @ rule).argmax(1)) for x in xs])
    return result


def step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def run(model, optimizer, batches):
    for batch in batches:
        step(model, optimizer, batch)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class StopAt:
    """Asks the run to stop after so many steps in all."""

    def __init__(self, steps):
        self.left = steps

    def __call__(self):
        self.left -= 1
        return self.left == 0
