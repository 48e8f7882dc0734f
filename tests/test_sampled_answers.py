"""Answers of networks with Gaussian weights in lots of samples, the weights given, against `vcl.predict`."""

import pytest
import torch

from alasso.bench import compiling, models, sampled_answers, train, variational
from alasso.bench.benchmarks import make_stream
from alasso.bench.config import RunConfig
from alasso.bench.sampled_answers import SampledAnswers
from alasso.methods import vcl

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


@on_gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_on_a_gpu_compiled_answers_are_those_of_predict(precision, monkeypatch):
    """From other random numbers: over so many samples, probabilities stray by ½/√samples at most, on either side."""
    samples = 4000
    learner = learner_on("cuda", test_samples=samples, initial_logvar=-2.0, precision=precision)
    task = learner.stream.tasks[0]
    x, _ = learner.batch(task.test, torch.arange(len(task.test)))
    theirs = vcl.predict(learner.model, x, samples)
    ours = learner.probabilities(x, slice(0, 10))
    assert learner.asked is not None
    assert all(isinstance(run, compiling.OrPlain) and run.run is not run.plain for run in kernels_of(learner))
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=5 * 0.5 * (2 / samples) ** 0.5 + 0.01)
    torch.testing.assert_close(ours.sum(1).float(), torch.ones(len(x), device="cuda"))


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
