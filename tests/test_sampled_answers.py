"""Answers of networks with Gaussian weights in lots of samples, the weights given, against `vcl.predict`."""

import copy
import math

import pytest
import torch

from alasso import vcl
from alasso.bench import models
from alasso.bench._make_streams import make_stream
from alasso.bench.config import RunConfig
from alasso.bench.learners import vcl as variational
from alasso.bench.learners import vcl_predict as sampled_answers
from alasso.bench.learners.vcl_predict import SampledAnswers
from alasso.bench.training import compiling
from alasso.bench.training import run as train

from lane_helpers import on_gpu

double = torch.float64
HEAD = slice(2, 5)


def network(device="cpu", dtype=double):
    torch.manual_seed(0)
    return vcl.convert(models.build("mlp", (1, 4, 4), 10, hidden=32), initial_logvar=-2.0).to(device, dtype)


@pytest.fixture
def not_compiled(monkeypatch):
    monkeypatch.setattr(sampled_answers, "compiled_once", lambda make, plain, key: make())


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_answers_with_weights_given_are_those_of_predict(samples, not_compiled, monkeypatch):
    model, x = network(), torch.randn(9, 1, 4, 4, dtype=double)
    for module in (vcl, sampled_answers):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 30)  # three samples of nine examples at once
    answers = SampledAnswers(network(), None, samples, bf16=False)
    with torch.no_grad():
        model[1].weight_mean += 0.1  # other weights than those it was made with
    torch.manual_seed(3)
    ours = answers(model, x, HEAD)
    torch.manual_seed(3)
    theirs = vcl.predict(model, x, samples, head=lambda outputs: outputs[:, HEAD])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert model.training and not ours.requires_grad


def learner_on(device, **changes):
    fields = {"tasks": 2, "hidden": 64, "test_samples": 20, "point_epochs": 0, "precision": "float32", **changes}
    config = RunConfig.for_benchmark("permuted-digits", "vcl", **fields)
    torch.manual_seed(config.seed)
    return train.make_learner(config, make_stream(config, None, torch.device(device)), None, torch.device(device))


def test_few_rows_and_networks_of_unknown_make_are_not_compiled(monkeypatch, not_compiled):
    asked = []
    monkeypatch.setattr(variational, "compiles_on", lambda device: True)
    monkeypatch.setattr(
        sampled_answers.SumOverSamples, "forward", lambda *inputs: asked.append(1) or torch.zeros(500, 10)
    )
    learner = learner_on("cpu")
    x = torch.zeros(500, *learner.stream.input_shape)
    learner.probabilities(x, slice(0, 10))
    assert not asked
    monkeypatch.setattr(variational, "WORTH_COMPILING", 20 * 500)
    learner.probabilities(x, slice(0, 10))
    assert asked
    asked.clear()
    learner.built_as = None
    learner.probabilities(x, slice(0, 10))
    assert not asked


# -- from other random numbers: the same in distribution ----------------------------------------------------------


def uncertain_in_one_layer(device, layer, **changes):
    """A learner that answers from one sample of weights, of which one layer's alone are uncertain; and examples."""
    learner = learner_on(device, test_samples=1, initial_logvar=-2.0, **changes)
    for other in set(range(3)) - {layer}:
        times_as_noisy(vcl.bayes_layers(learner.model)[other], 1e-6)
    return learner, learner.stream.tasks[0].test.batch(torch.arange(360, device=device))[0]


TIMES = 200  # so often an answer is asked for


def times_as_noisy(layer, share):
    with torch.no_grad():
        for logvar in (layer.weight_logvar, layer.bias_logvar):
            logvar += 2 * math.log(share)


def moments(answer):
    """Mean and variance of a random answer, example by example and class by class."""
    found = torch.stack([answer().double() for _ in range(TIMES)])
    return found.mean(0), found.var(0)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_answers_spread_as_those_of_predict_and_would_not_with_other_noise(layer, not_compiled):
    learner, x = uncertain_in_one_layer("cpu", layer)
    _, theirs = moments(lambda: vcl.predict(learner.model, x, 1))
    for share, low, high in ((1.0, 0.95, 1.05), (0.8, 0.0, 0.8), (1.2, 1.2, 9.0), (1e-6, 0.0, 0.01)):
        model = copy.deepcopy(learner.model)
        times_as_noisy(vcl.bayes_layers(model)[layer], share)
        answers = SampledAnswers(model, None, 1, bf16=False)
        _, ours = moments(lambda answers=answers, model=model: answers(model, x, slice(0, 10)))
        assert low <= ours.mean() / theirs.mean() <= high, share


@on_gpu
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(("precision", "rounding"), [("float32", 0.0), ("tf32", 1e-3), ("bf16", 1e-2)])
def test_on_a_gpu_compiled_answers_are_distributed_as_those_of_predict(precision, rounding, layer, monkeypatch):
    monkeypatch.setattr(variational, "WORTH_COMPILING", 1)
    learner, x = uncertain_in_one_layer("cuda", layer, precision=precision)
    mean, variance = moments(lambda: learner.probabilities(x, slice(0, 10)))
    their_mean, their_variance = moments(lambda: vcl.predict(learner.model, x, 1))
    assert learner.compiled_answers is not None
    assert all(isinstance(run, compiling.OrPlain) and run.run is not run.plain for run in kernels_of(learner))
    assert 0.95 <= variance.mean() / their_variance.mean() <= 1.05
    assert ((mean - their_mean).abs() <= 6 * (2 * their_variance / TIMES).sqrt() + rounding + 1e-6).all()


def kernels_of(learner):
    found = [run for key, run in compiling._made.items() if key[0] == learner.built_as and "answers" in key]
    assert found
    return found


@on_gpu
def test_on_a_gpu_compiled_answers_are_the_same_from_the_same_seed_and_leave_no_trace(monkeypatch):
    monkeypatch.setattr(variational, "WORTH_COMPILING", 1)
    learner = learner_on("cuda", initial_logvar=-1.0)
    x = torch.rand(300, *learner.stream.input_shape, device="cuda")

    def answers():
        torch.manual_seed(5)
        return learner.probabilities(x, slice(0, 10))

    first = answers()
    assert torch.equal(first, answers())
    assert not torch.equal(first, learner.probabilities(x, slice(0, 10)))  # the numbers go on
    torch.manual_seed(6)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(6)
    learner.accuracies_on(learner.stream.tasks)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
