"""Learners: what each kind of method does in the one training loop."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from alasso.bench.config import RunConfig
from alasso.bench.learners import base
from alasso.bench.streams import make_stream
from alasso.bench.training.run import make_learner, run
from alasso.errors import AlassoError, DivergedError

from helpers import same, weights
from run_helpers import CPU, begun, small


def test_adams_epsilon_reaches_the_optimizer():
    config = small(adam_eps=1e-3)
    learner = make_learner(config, make_stream(config, None, CPU), None, CPU)
    assert learner.optimizer.param_groups[0]["eps"] == 1e-3


def test_a_clipped_loss_is_that_of_clipped_probabilities():
    """As Keras has it: −log clip(p), whose gradient is zero for an example beyond the clip, on either side."""
    outputs = torch.tensor([[9.0, 0, 0], [0, 2, 1], [-9, 0, 0]], dtype=torch.float64, requires_grad=True)
    y, clip = torch.tensor([0, 1, 0]), 1e-3
    p = outputs.softmax(1)[range(3), y].clamp(clip, 1 - clip)
    loss = base.mean_cross_entropy(outputs, y, clip)
    torch.testing.assert_close(loss, -p.log().mean(), rtol=1e-12, atol=0)
    (got,) = torch.autograd.grad(base.mean_cross_entropy(outputs, y, clip), outputs)
    (plain,) = torch.autograd.grad(base.mean_cross_entropy(outputs, y, 0.0), outputs)
    assert got[0].tolist() == got[2].tolist() == [0, 0, 0]
    torch.testing.assert_close(got[1], plain[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["alasso", "imm-mean"])
def test_resetting_the_optimizer_leaves_no_old_one_attached(method):
    learner, optimizers = begun(small(method, reset_optimizer=True)), []
    for t in range(3):
        learner.begin_task(t)
        optimizers.append(learner.optimizer)
    assert len(set(map(id, optimizers))) == 3
    for optimizer, seen in zip(optimizers, (0, 0, 1), strict=True):
        before = learner.regularizer.steps
        learner.optimizer = optimizer
        learner.step(2, learner.epoch_plan(2, 0)[0])
        assert learner.regularizer.steps - before == seen


def test_own_columns_are_the_outputs_where_they_are_all_there_are():
    outputs, y = torch.randn(4, 6), torch.tensor([2, 3, 2, 4])
    assert base.own_columns(outputs, y, slice(0, 6))[0] is outputs
    own, labels = base.own_columns(outputs, y, slice(2, 5))
    assert torch.equal(own, outputs[:, 2:5]) and labels.tolist() == [0, 1, 0, 2]


def test_a_layer_that_is_not_trained_stays_as_it_is():
    def frozen():
        network = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
        network[0].requires_grad_(False)
        made.append(network)
        return network

    made = []
    run(small("si", tasks=2, epochs=1), model=frozen, device="cpu")
    torch.manual_seed(0)
    assert torch.equal(made[0][0].weight, nn.Linear(64, 8).weight)


def test_dropping_nodes_needs_some():
    with pytest.raises(AlassoError, match="finds no hidden"):
        run(small("imm-mean", transfer="drop", tasks=2, epochs=1), model=lambda: nn.Linear(64, 10), device="cpu")


@pytest.mark.parametrize("method", ["vcl", "vcl-coreset"])
def test_a_run_that_diverges_is_no_result(method):
    with pytest.raises(DivergedError, match="no longer finite"):
        run(small(method, tasks=2, epochs=1, learning_rate=1e30), device="cpu")


def test_a_coreset_as_large_as_a_task_is_refused():
    with pytest.raises(AlassoError, match="smaller than a task, of which one has 1437 examples, not 1437"):
        run(small("vcl-coreset", coreset=1437), device="cpu")


def test_training_on_coresets_leaves_no_trace():
    learner = begun(small("vcl-coreset", tasks=1, coreset=40, coreset_epochs=1, point_epochs=1))
    learner.begin_task(0)
    learner.prepare(0)
    assert learner.data_size == 1437 - 40 == sum(len(plan.own) for plan in learner.epoch_plan(0, 0))
    before, random = weights(learner.model), torch.get_rng_state()
    learner.accuracies(0, [])
    assert same(before, weights(learner.model)) and torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("device", "shape", "size"),
    [("cpu", (784,), 256), ("cuda", (784,), 2674), ("cuda", (2,), 8192), ("cuda", (3, 224, 224), 256)],
)
def test_passes_over_a_task_go_in_pieces_that_a_gpu_is_kept_busy_by(device, shape, size):
    config = RunConfig.for_benchmark("permuted-mnist", "ewc")
    learner = SimpleNamespace(device=torch.device(device), config=config, stream=SimpleNamespace(input_shape=shape))
    assert base.Regularized.assessed_at_once.fget(learner) == size


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_importance_does_not_depend_on_the_pieces_of_the_pass(method, monkeypatch):
    config = RunConfig.for_benchmark("permuted-digits", method, tasks=1, epochs=1, hidden=16)
    stream = make_stream(config, None, CPU)

    def importance(size):
        monkeypatch.setattr(base.Regularized, "assessed_at_once", size)
        learner = begun(config, stream)
        learner.end_task(0)
        return learner.regularizer.importance()

    whole, pieces = importance(10**6), importance(100)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-4, atol=1e-9)


def test_single_task_forgets_nothing_and_starts_afresh():
    result = run(RunConfig.for_benchmark("permuted-digits", "single-task", tasks=3, epochs=6, hidden=64), device="cpu")
    for earlier, later in zip(result.accuracy, result.accuracy[1:], strict=False):
        assert later[:-1] == earlier
    assert result.metrics["F"] == 0 and result.metrics["A"] > 0.8


def test_memory_helps_and_is_an_option_of_any_method():
    config = {"tasks": 3, "epochs": 6, "hidden": 64}
    plain = run(RunConfig.for_benchmark("permuted-digits", "sgd", **config), device="cpu")
    helped = run(RunConfig.for_benchmark("permuted-digits", "sgd", memory=100, **config), device="cpu")
    assert helped.metrics["A"] > plain.metrics["A"] + 0.05
    assert RunConfig.for_benchmark("permuted-digits", "alasso-memory").memory == 200
    with pytest.raises(AlassoError, match="memory_share between 0 and 1"):
        RunConfig.for_benchmark("permuted-digits", "sgd", memory=5, memory_share=1.0)
