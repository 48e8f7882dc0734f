"""The Avalanche plugin, with the real library. Avalanche imports torchvision, and is not there where that is not."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from alasso import ALASSO, EWC, IMM, MAS, SI, OnlineEWC

from helpers import mlp, same, toy_tasks, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say when they are imported
    pytest.importorskip("avalanche", reason="needs avalanche-lib, which needs torchvision", exc_type=ImportError)
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import AvalancheDataset
    from avalanche.benchmarks.utils.data_attribute import DataAttribute
    from avalanche.training.plugins import SupervisedPlugin, SynapticIntelligencePlugin
    from avalanche.training.supervised import Naive

    from alasso.integrations.avalanche import AlassoPlugin

pytestmark = pytest.mark.filterwarnings("ignore")
TASKS = toy_tasks(3)


def stream():
    datasets = []
    for task in TASKS:
        x, y = (torch.cat(parts) for parts in zip(*task, strict=True))
        attributes = [
            DataAttribute(y.tolist(), name="targets"),
            DataAttribute([0] * len(y), name="targets_task_labels", use_in_getitem=True),
        ]
        datasets.append(AvalancheDataset([TensorDataset(x, y)], data_attributes=attributes))
    return benchmark_from_datasets(train=datasets).train_stream


class Recorder(SupervisedPlugin):
    def __init__(self):
        super().__init__()
        self.batches = []

    def before_training_exp(self, strategy, *args, **kwargs):
        self.batches = []

    def before_forward(self, strategy, *args, **kwargs):
        self.batches.append((strategy.mb_x.clone(), strategy.mb_y.clone()))


def strategy(model, optimizer, *plugins):
    return Naive(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=16,
        train_epochs=1,
        device="cpu",
        plugins=list(plugins),
        evaluator=None,
    )


@pytest.mark.parametrize("kind", [ALASSO, SI, EWC, OnlineEWC, MAS, IMM])
def test_experiences_are_tasks_of_a_loop(kind):
    model = mlp(6, 12, 4)
    other = copy.deepcopy(model)
    plugin, recorder, reg = AlassoPlugin(kind(model)), Recorder(), kind(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    training = strategy(model, optimizer, plugin, recorder)
    for experience in stream():
        training.train(experience)
        reg.attach(other_optimizer)
        for x, y in recorder.batches:
            other_optimizer.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            other_optimizer.step()
        reg.consolidate(recorder.batches)
    assert plugin.regularizer.tasks == 3
    for p, q in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    if kind in (ALASSO, SI):
        assert same(weights(model), weights(other))


def test_si_against_avalanches_own_put_right(monkeypatch):
    """One experience, in which there is no penalty yet: Ω before Avalanche clips it to 1e-3.

    As it is, Avalanche's plugin compares views of the weights, which move along with them, so on a CPU its Ω stays
    zero: it is given copies.
    """

    def copied_weights(model, target, excluded_parameters):
        for name, parameter in SynapticIntelligencePlugin.allowed_parameters(model, excluded_parameters):
            target[name].data = parameter.detach().clone().flatten()

    monkeypatch.setattr(SynapticIntelligencePlugin, "extract_weights", staticmethod(copied_weights))
    model = mlp(6, 12, 4)
    other = copy.deepcopy(model)
    ours, theirs = AlassoPlugin(SI(model, xi=1e-3)), SynapticIntelligencePlugin(si_lambda=0.0, eps=1e-3)
    for net, plugin in ((model, ours), (other, theirs)):
        torch.manual_seed(0)
        strategy(net, torch.optim.SGD(net.parameters(), lr=0.1), plugin).train(next(iter(stream())))
    assert same(weights(model), weights(other))
    for name, omega in ours.regularizer.importance().items():
        expected = (-theirs.syn_data["cum_trajectory"][name].data).clamp(min=0).view_as(omega)
        assert expected.any()
        torch.testing.assert_close(omega, expected, rtol=1e-4, atol=1e-7)
