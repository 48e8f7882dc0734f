"""An epoch's steps: recorded ones are those made one by one, and the same run gives the same bits."""

import numpy as np
import pytest
import torch
from torch import nn

import alasso
from alasso.bench import registry
from alasso.bench.config import RunConfig
from alasso.bench.learners.base import StepPlan, laid_out
from alasso.bench.learners.steps import WARM_UP, RecordedSteps, Steps, on_device, steps_for
from alasso.bench.streams import Examples, Stream, make_stream
from alasso.bench.training import run as training
from alasso.bench.training.checkpoint import Position
from alasso.bench.training.progress import Observer
from alasso.bench.training.run import Trainer, make_learner, run

from helpers import same, weights
from run_helpers import CPU, begun, small


class Replayed(RecordedSteps):
    """Recorded steps as a CPU can make them: a graph is a step on the examples that its place names."""

    def __init__(self, learner):
        Steps.__init__(self, learner)
        self.replays = 0

    def warm_up(self, plan):
        self.loss_sum += self.learner.step(self.t, plan)

    def record(self, place):
        steps = self

        class Graph:
            def replay(self):
                steps.replays += 1
                steps.loss_sum += steps.learner.step(steps.t, place)
                steps.learner.noted_steps(-1)  # as Python hears nothing of a graph's steps

        return Graph()


def trained(kind, config):
    learner = begun(config)
    steps = kind(learner)
    for t in range(2):
        learner.begin_task(t)
        learner.prepare(t)
        steps.begin_task(t)
        for epoch in range(4):
            steps.begin_epoch(plans := learner.epoch_plan(t, epoch))
            for i in range(len(plans)):
                steps.step(i)
        learner.end_task(t)
    return learner, steps


def replays_of_a_run(config):
    """All steps of a run but each task's first ones of either size, and those that a regularizer looks at."""
    looked_at = [i for i in (0, 1, 3, 7, 15, 31) if i >= WARM_UP] if hasattr(begun(config), "regularizer") else []
    return config.tasks * (4 * 15 - 2 * WARM_UP - len(looked_at))


@pytest.mark.parametrize("method", ["alasso", "alasso-memory", "multi-task"])
def test_each_size_of_batch_is_replayed_on_its_own_examples(method):
    """1,437 examples make 14 batches of 100 and one of 37."""
    config = small(method, tasks=2, epochs=4, batch_size=100, hidden=8)
    (direct, one_by_one), (recorded, replayed) = trained(Steps, config), trained(Replayed, config)
    assert replayed.replays == replays_of_a_run(config)
    assert same(weights(direct.model), weights(recorded.model)) and one_by_one.loss_sum == replayed.loss_sum
    if hasattr(direct, "regularizer"):
        assert direct.regularizer.steps == recorded.regularizer.steps


def test_plans_come_to_the_device_as_they_are():
    plans = [StepPlan(torch.arange(3), torch.arange(8).view(4, 2)), StepPlan(torch.arange(2), torch.arange(2)[None])]
    for brought, plan in zip(on_device(plans, CPU), plans, strict=True):
        assert torch.equal(brought.own, plan.own) and torch.equal(brought.others, plan.others)
    assert [plan.others for plan in on_device([StepPlan(torch.arange(3))], CPU)] == [None]


def test_on_a_cpu_steps_are_made_one_by_one_with_torchs_own_adam():
    learner = begun(small())
    assert type(steps_for(learner)) is Steps and type(learner.optimizer) is torch.optim.Adam


@pytest.mark.parametrize("size", [None, 130])
def test_examples_laid_out_are_the_examples(size):
    images = torch.randint(0, 256, (6, 3, 9, 9), dtype=torch.uint8)
    examples = Examples(images, torch.arange(6), rows=torch.tensor([4, 1, 5]), scale=255.0, size=size)
    ready = laid_out(examples, (3, size or 9, size or 9))
    index = torch.tensor([2, 0])
    for got, want in zip(ready.batch(index), examples.batch(index), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert ready.batch(index)[0].is_contiguous(memory_format=torch.channels_last) == (size == 130)


# -- on a GPU -----------------------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


def of_two_sizes(method, **changes):
    """Fifteen steps an epoch, the last one smaller."""
    return RunConfig.for_benchmark(
        "permuted-digits", method, **{"tasks": 3, "epochs": 4, "hidden": 64, "batch_size": 100, **changes}
    )


def trained_on_gpu(config, stream=None):
    """Weights, moments and accuracies at the end of a run."""
    stream = stream or make_stream(config, None, GPU)
    training.set_precision(config.precision)
    torch.manual_seed(config.seed)
    learner, position = make_learner(config, stream, None, GPU), Position()
    Trainer(learner, position, Observer()).train()
    moments = [value for state in learner.optimizer.state.values() for value in state.values()]
    return [*weights(learner.model), *(moment.clone() for moment in moments)], position.accuracy


@pytest.fixture
def replays(monkeypatch):
    made, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: made.append(1) or replay(graph))
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("method", [m for m in registry.METHODS if not m.startswith("vcl") and m != "sgd-dropout"])
def test_recorded_steps_equal_steps_made_one_by_one(method, monkeypatch, replays):
    config = of_two_sizes(method, precision="float32")
    recorded = run(config, device="cuda")
    assert len(replays) == replays_of_a_run(config)
    monkeypatch.setattr(training, "steps_for", Steps)
    direct = run(config, device="cuda")
    np.testing.assert_allclose(recorded.accuracy[-1], direct.accuracy[-1], atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["multi-task", "alasso-memory"])
def test_recorded_steps_on_batches_from_a_pool_equal_those_made_one_by_one(method, monkeypatch, replays):
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.rand(400, 64, generator=generator), torch.arange(400) % 2 + 2 * t) for t in range(3)]
    stream = Stream.of([(pair, pair) for pair in pairs], heads="own", device="cuda")
    config = RunConfig.own(method, epochs=4, batch_size=100, hidden=64, precision="float32")
    recorded = run(config, stream=stream, device="cuda")
    assert replays
    monkeypatch.setattr(training, "steps_for", Steps)
    direct = run(config, stream=stream, device="cuda")
    np.testing.assert_allclose(recorded.accuracy[-1], direct.accuracy[-1], atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("method", registry.METHODS)
def test_a_run_gives_the_same_bits_alone_and_after_others(method):
    config = of_two_sizes(method)
    alone, accuracy = trained_on_gpu(config)
    for other in (of_two_sizes("si", hidden=200, batch_size=64, seed=3), of_two_sizes(method, seed=1)):
        trained_on_gpu(other)
    again, accuracy_again = trained_on_gpu(config)
    assert same(alone, again) and accuracy == accuracy_again


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["sgd", "alasso"])
def test_a_run_on_images_gives_the_same_bits_twice(method):
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.rand(250, 3, 16, 16, generator=generator), torch.arange(250) % 3) for _ in range(2)]
    stream = Stream.of([(pair, pair) for pair in pairs], device="cuda")
    config = RunConfig.own(method, epochs=3, batch_size=100, model="cifar-cnn")
    (one, accuracy), (two, accuracy_again) = (trained_on_gpu(config, stream) for _ in range(2))
    assert same(one, two) and accuracy == accuracy_again


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["si", "ewc", "alasso", "imm-mode"])
def test_on_a_gpu_adam_penalty_and_path_are_one_pass(method):
    learner = make_learner(config := of_two_sizes(method), make_stream(config, None, GPU), None, GPU)
    assert isinstance(learner.optimizer, alasso.optim.Adam) and learner.optimizer.param_groups[0]["capturable"]
    assert isinstance(steps_for(learner), RecordedSteps)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["sgd", "si", "alasso", "ewc"])
def test_a_gpu_learns_what_a_cpu_learns(method):
    config = of_two_sizes(method, precision="float32")
    on_gpu, on_cpu = run(config, device="cuda"), run(config, device="cpu")
    np.testing.assert_allclose(on_gpu.accuracy[-1], on_cpu.accuracy[-1], atol=0.03)


@pytest.mark.gpu
def test_a_run_begun_on_a_gpu_is_resumed_there_bit_for_bit(tmp_path):
    config = of_two_sizes("alasso")
    whole = run(config, device="cuda")

    class StopsOnce(Observer):
        def step_done(self, task, epoch, done):
            if done == 75:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # as a kill: the last checkpoint is what is left
        run(config, device="cuda", out=tmp_path, observer=StopsOnce(), checkpoint_every=0.0)
    assert run(config, device="cuda", out=tmp_path, resume=True).accuracy == whole.accuracy


@pytest.mark.gpu
def test_steps_that_gather_on_the_host_are_not_recorded(replays):
    config = RunConfig.own("si", epochs=2, batch_size=100, hidden=16)
    x, y = torch.rand(300, 16), torch.arange(300) % 2
    stream = Stream.of([((x, y), (x, y))] * 2)  # on the CPU
    run(config, stream=stream, model=lambda: nn.Linear(16, 2), device="cuda")
    assert not replays
