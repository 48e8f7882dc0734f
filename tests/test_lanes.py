"""Stacked runs against the same runs one by one."""

import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from alasso.bench import data, results
from alasso.bench._make_streams import make_stream, make_streams
from alasso.bench.config import RunConfig
from alasso.bench.stacking import lane_batches, lane_gradients, lanes, resizing, slots, stack
from alasso.bench.streams import Shelf, split
from alasso.bench.training import compiling
from alasso.bench.training import run as train
from alasso.bench.training import trainer as loop
from alasso.methods import _classes as regularizers

from helpers import StopAt
from lane_helpers import (
    CPU,
    InDouble,
    Nine,
    compared_step_by_step,
    difference_of_recorded_and_compiled_from_plain,
    everything,
    gone_on_with_alone_and_back,
    lane_of,
    largest_difference_from_alone,
    on_gpu,
    own_stream,
    trained,
    trained_in_pieces,
)

METHODS = [m for m in lanes.STACKABLE if m != "sgd-dropout"]


def small(method="alasso", **changes):
    fields = {"tasks": 3, "epochs": 2, "hidden": 16, "batch_size": 500, **changes}
    return RunConfig.for_benchmark("permuted-digits", method, **fields)


def mixed():
    """Methods, seeds and settings in one stack; Adam kept and Adam reset."""
    varied = [small("alasso", a=3.0, seed=1), small("si", c=2.0, learning_rate=3e-3), small("alasso", adam_eps=1e-3)]
    varied.append(small("alasso", c=0.5, epsilon=0.1, unmoved="unobserved"))
    return [*(small(m) for m in METHODS if m != "alasso-memory"), *varied, small("si", reset_optimizer=True)]


def plain():
    return [small("sgd"), small("single-task"), small("multi-task"), small("sgd", seed=1, reset_optimizer=True)]


def even():
    """Springs that are the same on both sides, of weights whose path is not observed; and a lane without any."""
    varied = [small("ewc", seed=1, lam=30.0), small("ewc", reset_optimizer=True), small("imm-mean", transfer="l2")]
    return [*(small(m) for m in ("ewc", "online-ewc", "mas", "sgd")), *varied]


@pytest.mark.parametrize(
    ("configs", "kind"), [(plain(), slots.PlainSlot), (even(), slots.EvenSlot), (mixed(), slots.SpringSlot)]
)
def test_every_step_of_a_stack_is_the_step_each_run_would_make_alone(configs, kind):
    found = compared_step_by_step(configs)
    assert found.kinds == {kind}
    assert found.steps == {3 * 2 * 3}
    assert found.difference <= 1, found.where
    for lane, alone in zip(found.together, found.alone, strict=True):
        assert lane.position.accuracy == alone.position.accuracy


def test_memory_lanes_rehearse_what_they_would_alone():
    configs = [small("alasso-memory", memory=20), small("sgd", memory=20, seed=1)]
    together = train.run_together(configs, model=InDouble, device="cpu")
    for config, stacked in zip(configs, together, strict=True):
        alone = train.run(config, model=InDouble, device="cpu")
        assert stacked.accuracy == alone.accuracy and stacked.environment["lanes"] == 2


def test_mixed_batches_are_not_stacked_over_images_that_lanes_do_not_share():
    configs = [small("multi-task"), small("alasso-memory", memory=20), small("sgd", seed=1)]
    streams = [make_stream(config, None, CPU) for config in configs]  # each with images of its own
    together = train.run_together(configs, streams=streams, model=InDouble, device="cpu")
    for config, stacked in zip(configs, together, strict=True):
        assert stacked.accuracy == train.run(config, model=InDouble, device="cpu").accuracy, config.method
    apart = [small("multi-task"), small("sgd", validation=True)]
    assert lanes.grouped(apart, 8) == [[config] for config in apart]


def test_streams_of_different_length_go_apart():
    configs = [RunConfig.own("sgd", epochs=2, seed=seed) for seed in (0, 1)]
    streams = [own_stream((40,) * tasks, seed) for tasks, seed in ((2, 0), (3, 1))]
    together = train.run_together(configs, streams=streams, model=Nine, device="cpu")
    assert [len(result.accuracy) for result in together] == [2, 3]


def test_lanes_may_have_tasks_of_different_length_and_heads_of_their_own():
    configs = [RunConfig.own(m, epochs=2, batch_size=32, seed=s) for m, s in (("alasso", 0), ("si", 1), ("ewc", 2))]
    streams = [own_stream(sizes, seed) for sizes, seed in (((100, 33, 70), 0), ((64, 90, 40), 1), ((70, 70, 70), 2))]
    together = train.run_together(configs, streams=streams, model=Nine, device="cpu")
    for config, stream, stacked in zip(configs, streams, together, strict=True):
        assert stacked.accuracy == train.run(config, stream=stream, model=Nine, device="cpu").accuracy


def test_a_lanes_seconds_are_its_share_of_the_stacks():
    began = time.monotonic()
    together = train.run_together([small(seed=seed) for seed in range(3)], device="cpu")
    elapsed = time.monotonic() - began
    assert len({result.seconds for result in together}) == 1
    assert 0 < sum(result.seconds for result in together) <= elapsed


def test_a_stack_in_pieces_equals_the_undisturbed_one(tmp_path):
    configs = [small("alasso"), small("si", seed=3), small("ewc"), small("single-task"), small("imm-mode")]
    undisturbed = train.run_together(configs, device="cpu")
    pieces = trained_in_pieces(configs, tmp_path)
    assert [lane.position.accuracy for lane in pieces] == [result.accuracy for result in undisturbed]


def test_a_lane_of_a_stack_goes_on_alone_and_back(tmp_path):
    """A stack keeps its weights in another memory layout than a run alone."""
    configs = [small("alasso", tasks=2), small("si", tasks=2), small("sgd", tasks=2, seed=1)]
    streams = make_streams(configs, None, CPU)
    lanes_ = gone_on_with_alone_and_back(configs, streams, tmp_path)
    for config, stream, lane in zip(configs, streams, lanes_, strict=True):
        assert largest_difference_from_alone(config, stream, lane) < 1e-9, config.method


def test_lanes_left_at_different_places_go_on_apart(tmp_path):
    configs = [small("alasso"), small("alasso", seed=1)]
    stream = make_stream(configs[0], None, CPU)
    file = tmp_path / f"{configs[0].name}.checkpoint"
    with pytest.raises(train.Stopped):
        loop.Trainer([train.begun(configs[0], stream, None, CPU, None, file, train.Quiet())], 1e9, StopAt(4)).train()
    together = train.run_together(configs, out=tmp_path, device="cpu", resume=True)
    for config, result in zip(configs, together, strict=True):
        assert result.accuracy == train.run(config, device="cpu").accuracy
        assert result.environment["lanes"] == 1
        assert results.read(tmp_path / f"{config.name}.json").accuracy == result.accuracy
    assert not list(tmp_path.glob("*.checkpoint"))


def test_a_network_with_state_of_its_own_goes_alone():
    configs = [small("si"), small("si", seed=1)]

    def with_batch_norm():
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    together = train.run_together(configs, model=with_batch_norm, device="cpu")
    assert [result.environment["lanes"] for result in together] == [1, 1]


def test_grouping_keeps_what_differs_in_shape_apart():
    configs = [
        small("alasso"), small("si", seed=1), small("sgd-dropout"), small("vcl"), small("ewc", hidden=32),
        small("alasso", a=2.0), small("ewc", labels="sampled"), small("imm-mean", transfer="drop"),
    ]  # fmt: skip
    groups = [[c.method for c in group] for group in lanes.grouped(configs, 8)]
    assert groups == [["alasso", "si", "alasso"], ["sgd-dropout"], ["vcl"], ["ewc"], ["ewc"], ["imm-mean"]]
    assert [len(g) for g in lanes.grouped([small(seed=s) for s in range(17)], 16)] == [9, 8]
    assert lanes.grouped(configs, 1) == [[config] for config in configs]
    split = [RunConfig.for_benchmark("split-cifar", m) for m in ("multi-task", "alasso-memory", "alasso", "si")]
    assert [len(g) for g in lanes.grouped(split, 8)] == [1, 1, 2]


def test_runs_on_large_images_go_one_by_one():
    def groups(side):
        configs = [RunConfig.for_benchmark("split-tiny-imagenet", m, image_size=side) for m in ("alasso", "si", "sgd")]
        return [[c.method for c in group] for group in lanes.grouped(configs, 8)]

    assert groups(64) == [["alasso", "si", "sgd"]]
    assert groups(224) == [["alasso"], ["si"], ["sgd"]]


def test_where_several_stacks_are_needed_methods_with_like_passes_go_together():
    configs = [small(m, seed=s) for s in (0, 1) for m in ("alasso", "single-task", "ewc", "si", "sgd", "mas")]
    groups = [[c.method for c in group] for group in lanes.grouped(configs, 4)]
    assert groups == [
        ["single-task", "sgd", "single-task", "sgd"],
        ["ewc", "mas", "ewc", "mas"],
        ["alasso", "si", "alasso", "si"],
    ]
    kinds = [slots.PlainSlot, slots.EvenSlot, slots.SpringSlot]
    for config in (small(m) for m in lanes.STACKABLE):
        learner = train.make_learner(config, make_stream(config, None, CPU), None, CPU)
        assert stack.kind_for([learner]) is kinds[lanes.pass_of(config)]


def test_padding_holds_every_example_once_and_shares_add_up():
    steps = [[torch.tensor([[0, 1], [0, 2], [1, 3]]), torch.tensor([[2, 4]])], [torch.tensor([[0, 5], [0, 6]])]]
    batch = lane_batches.padded([(torch.cat(lane), [len(step) for step in lane]) for lane in steps], torch.float64)
    assert batch.example.shape == (2, 2, 3)
    for lane, expected in enumerate(steps):
        for i, pairs in enumerate(expected):
            some = batch.share[i, lane] > 0
            got = torch.stack([batch.task[i, lane][some], batch.example[i, lane][some]], 1)
            assert got.tolist() == pairs.tolist()
            assert batch.share[i, lane].sum() == pytest.approx(1, abs=1e-15)
    assert batch.share[1, 1].sum() == 0


def test_a_narrow_layer_as_a_sum_is_the_layer():
    network = nn.Sequential(nn.Linear(7, lane_gradients.NARROW), nn.Linear(lane_gradients.NARROW, 40)).double()
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)

    def found():
        out = network(x)
        return [out, *torch.autograd.grad(out.pow(3).sum(), [x, *network.parameters()])]

    products = found()
    lane_gradients.make_sums_of_narrow_layers(network)
    assert [type(layer) for layer in network] == [lane_gradients.NarrowLinear, nn.Linear]
    for product, weighted_sum in zip(products, found(), strict=True):
        torch.testing.assert_close(weighted_sum, product, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.09])
def test_a_clipped_loss_of_a_stack_is_that_of_its_lanes_alone(clip):
    """A clip of 0.09 cuts off many examples, before and after they are learned: of ten classes, none is likely yet."""
    configs = [small(method, tasks=2, loss_clip=clip) for method in ("alasso", "single-task")]
    streams = make_streams(configs, None, CPU)
    together = [lane_of(config, stream) for config, stream in zip(configs, streams, strict=True)]
    loop.Trainer(together, 1e9, lambda: False).train()
    for config, stream, stacked in zip(configs, streams, together, strict=True):
        assert largest_difference_from_alone(config, stream, stacked) < 1e-9, config.method


class MadeInARow:
    """Stands in for a recording: so many steps, made one by one."""

    def __init__(self, steps, count):
        self.steps, self.count = steps, count

    def replay(self):
        for _ in range(self.count):
            self.steps._step()


def test_steps_recorded_in_a_row_are_the_steps_one_by_one(monkeypatch):
    """Lanes whose epochs have 10 and 7 steps, then 4 and 9: five in a row where five are left, and single ones."""
    configs = [RunConfig.own(method, epochs=2, batch_size=10) for method in ("alasso", "si")]
    streams = [own_stream(sizes, seed) for seed, sizes in enumerate([(100, 40), (70, 90)])]

    def trained():
        pairs = zip(configs, streams, strict=True)
        group = [train.begun(config, stream, Nine, CPU, None, None, train.Quiet()) for config, stream in pairs]
        loop.Trainer(group, 1e9, lambda: False).train()
        return group

    plain = trained()
    begin_epoch, make_steps = lanes.StackedSteps.begin_epoch, lanes.StackedSteps._make_steps
    calls, steps_of_tasks = [], []

    def begin_recorded(steps, *planned):
        begin_epoch(steps, *planned)
        steps.recordings = {count: MadeInARow(steps, count) for count in (lanes.TOGETHER, 1)}

    def made(steps, left):
        calls.append(make_steps(steps, left))
        return calls[-1]

    def note_steps(trainer, lane, t):
        steps_of_tasks.append(lane.learner.regularizer.steps)
        end_task(trainer, lane, t)

    end_task = loop.Trainer.end_task
    monkeypatch.setattr(lanes.StackedSteps, "begin_epoch", begin_recorded)
    monkeypatch.setattr(lanes.StackedSteps, "_make_steps", made)
    monkeypatch.setattr(loop.Trainer, "end_task", note_steps)
    in_rows = trained()
    assert calls == [5, 5] * 2 + [5, 1, 1, 1, 1] * 2
    assert steps_of_tasks == [2 * 10, 2 * 7, 2 * 4, 2 * 9]
    for got, want in zip(in_rows, plain, strict=True):
        expected = everything(want)
        assert all(torch.equal(value, expected[name]) for name, value in everything(got).items())


def noise(count, side):
    """So many images of four classes, in which there is nothing to be seen."""
    images = np.random.default_rng(0).integers(0, 256, (count, 3, side, side), dtype=np.uint8)
    labels = np.arange(count) % 4
    return data.ImageSet("own", "own", images, labels, images[:8], labels[:8], tuple("abcd"))


@pytest.mark.parametrize("room", [0, 4 * 2 * 60 * 3 * 12**2 * 4 - 1, 4 * 2 * 60 * 3 * 12**2 * 4])
def test_images_are_brought_to_size_once_a_task_where_there_is_room(room, monkeypatch):
    """And what the steps are given is the same to the last bit."""
    streams = [split([(noise(120, 5), 2)], 2, seed, name="x", size=12, device=CPU) for seed in (0, 1)]
    steps = lane_batches.OwnExamples(streams)
    monkeypatch.setattr(resizing, "room_on", lambda device: room)
    monkeypatch.setattr(resizing, "AT_ONCE", 7)
    example = torch.tensor([[0, 59, 31], [5, 5, 58]])
    for t in (0, 1):
        steps.begin(t)
        x, y = steps.gathered(example)
        for lane, stream in enumerate(streams):
            task = stream.tasks[t]
            assert len(task.train) == 60
            want, labels_of = task.train.batch(example[lane])
            assert torch.equal(x[lane], want) and torch.equal(y[lane], labels_of - task.head.start)
        kept = [of_lane.images.shape[-1] for of_lane in steps.examples]
        assert kept == [12 if room >= 4 * 2 * 60 * 3 * 12**2 * 4 else 5] * 2


def test_lanes_with_the_same_images_share_one_copy_of_them(monkeypatch):
    monkeypatch.setattr(resizing, "room_on", lambda device: 10**12)
    shelf, source = Shelf(CPU), noise(120, 5)
    own = [split([(source, 2)], 2, seed, name="x", size=12, device=shelf).tasks[1].train for seed in (3, 4, 3)]
    first, second, third = resizing.brought_to_size(own)
    assert first is third and first is not second
    for examples, resized in zip(own, (first, second, third), strict=True):
        x, y = examples.batch(torch.arange(60))
        assert torch.equal(resized.images, x) and torch.equal(resized.labels, y)


def test_the_room_for_images_is_that_for_all_lanes(monkeypatch):
    source = noise(120, 5)
    own = [split([(source, 2)], 2, seed, name="x", size=12, device=CPU).tasks[0].train for seed in range(3)]
    needed = 3 * 60 * 3 * 12**2 * 4
    assert sum(map(resizing.bytes_at_size, own)) == needed
    for room, resized in ((4 * needed, True), (4 * needed - 1, False)):
        monkeypatch.setattr(resizing, "room_on", lambda device, room=room: room)
        assert [examples.images.shape[-1] == 12 for examples in resizing.brought_to_size(own)] == [resized] * 3


def test_what_is_recorded_goes_before_the_images_it_reads():
    streams = [own_stream([20, 20], seed) for seed in (0, 1)]
    learners = [lane_of(RunConfig.own("si", seed=s), stream).learner for s, stream in enumerate(streams)]
    steps = lanes.StackedSteps(learners)
    begin, left = steps.source.begin, []
    steps.source.begin = lambda t: left.append((steps.recordings, steps.recorded_for)) or begin(t)
    for _ in range(2):
        steps.recordings, steps.recorded_for = {1: object()}, "something"
        steps.begin(0)
    assert left == [({}, None)] * 2


def test_this_torch_knows_what_the_compiler_is_asked_for():
    """A wish it does not know is left out, and would be missed by nobody."""
    wishes = lane_gradients.WRITTEN_OUT | compiling.CHOSEN_WITHOUT_TIMING
    assert all(hasattr(compiling.inductor_config(), name) for name in wishes)


def test_the_compiler_is_asked_for_what_it_knows_and_never_to_choose_by_timing(monkeypatch):
    asked = []
    monkeypatch.setattr(compiling.torch, "compile", lambda function, **how: asked.append(how["options"]))
    for options in (None, {"unroll_reductions_threshold": 17, "of_another_version": 1}):
        compiling.OrPlain(lambda x: x, lambda x: x, "same", dynamic=False, options=options)
    assert asked == [{"deterministic": True}, {"deterministic": True, "unroll_reductions_threshold": 17}]


def test_processes_that_compile_are_kept_before_anything_is_compiled(monkeypatch):
    config = SimpleNamespace(quiesce_async_compile_pool=True)
    monkeypatch.setattr(compiling, "inductor_config", lambda: config)
    monkeypatch.setattr(train, "compiles_on", lambda place: True)
    attach, kept = regularizers.ALASSO.attach, []
    monkeypatch.setattr(
        regularizers.ALASSO,
        "attach",
        lambda *rest: kept.append(not config.quiesce_async_compile_pool) or attach(*rest),
    )
    train.run(small(tasks=1, epochs=1), device="cpu")
    assert kept and all(kept)
    monkeypatch.setattr(compiling, "inductor_config", SimpleNamespace)
    compiling.keep_compiling_processes()  # a torch that dismisses none has no such wish


def trained_together(model=None, methods=("alasso", "si")):
    """Everything of two small lanes after two tasks."""
    configs = [small(method, tasks=2, epochs=1, hidden=8) for method in methods]
    streams = make_streams(configs, None, CPU)
    pairs = zip(configs, streams, strict=True)
    group = [train.begun(config, stream, model, CPU, None, None, train.Quiet()) for config, stream in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself while it compiles
        loop.Trainer(group, 1e9, lambda: False).train()
    return [everything(lane) for lane in group]


def test_tied_weights_are_trained_alone():
    def tied():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        network[2].weight = network[0].weight
        return network

    configs = [small("si", tasks=2, epochs=1, seed=s) for s in (0, 1)]
    alone = [train.run(config, model=tied, device="cpu").accuracy for config in configs]
    assert [result.accuracy for result in train.run_together(configs, model=tied, device="cpu")] == alone


@pytest.mark.parametrize(
    ("small_tensors", "methods"),
    [
        (1, ("alasso", "si")),
        (1 << 16, ("alasso", "si")),
        (1 << 16, ("sgd", "single-task")),
        (1 << 16, ("ewc", "mas")),
    ],
)
def test_compiled_steps_equal_plain_ones(small_tensors, methods, request, monkeypatch, caplog):
    plain = trained_together(InDouble, methods)
    monkeypatch.setattr(stack, "SMALL", small_tensors)
    request.getfixturevalue("compiled_on_a_cpu")
    with caplog.at_level("INFO", "alasso"):
        compiled = trained_together(InDouble, methods)
    assert "not compiled" not in caplog.text
    for got, want in zip(compiled, plain, strict=True):
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)


def test_what_cannot_be_compiled_runs_as_it_is(request, monkeypatch, caplog):
    plain = trained_together(InDouble)
    request.getfixturevalue("compiled_on_a_cpu")
    compiling.compiled.cache_clear()

    def refusing(function, **options):
        def run(*arguments):
            raise RuntimeError("beyond the compiler")

        return run

    monkeypatch.setattr(compiling.torch, "compile", refusing)
    with caplog.at_level("INFO", "alasso"):
        uncompiled = trained_together(InDouble)
    compiling.compiled.cache_clear()
    assert "is not compiled: beyond the compiler" in caplog.text
    for got, want in zip(uncompiled, plain, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_stacks_of_networks_built_alike_share_what_is_compiled(compiled_on_a_cpu):
    first = trained_together()
    known = dict(compiling._made)
    assert known
    for got, want in zip(trained_together(), first, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert compiling._made == known


def test_a_network_of_ones_own_shares_nothing():
    """It may look like another and compute something else."""
    config = small(tasks=1, epochs=1)
    stream = make_stream(config, None, CPU)
    assert train.make_learner(config, stream, None, CPU).built_as is not None
    assert train.make_learner(config, stream, InDouble, CPU).built_as is None
    gradients = lane_gradients.LaneGradients(nn.Sequential(), None, 2, False, 0.0, CPU)
    before = dict(compiling._made)
    batch = lane_gradients.LaneBatch(*(torch.zeros(2, 1) for _ in range(4)))
    assert gradients.compiled(batch) is gradients.compiled(batch)
    assert compiling._made == before


@on_gpu
def test_on_a_gpu_a_stack_learns_what_its_lanes_learn_alone_on_a_cpu():
    configs = [small(m, precision="float32", epochs=5) for m in METHODS if m != "alasso-memory"]
    for config, stacked in zip(configs, train.run_together(configs, device="cuda"), strict=True):
        alone = train.run(config, device="cpu")
        np.testing.assert_allclose(stacked.accuracy[-1], alone.accuracy[-1], atol=0.02, err_msg=config.method)


def stacked_tensors(device, lanes_, outs, inputs):
    """Weights in the middle of a training: θ, m, v, anchor, stiffness, side, ω."""
    generator = torch.Generator().manual_seed(1)
    theta, m, anchor, path = (torch.randn(lanes_, outs, inputs, generator=generator) * 0.1 for _ in range(4))
    v, stiffness = (torch.rand(lanes_, outs, inputs, generator=generator) for _ in range(2))
    side = torch.randint(-1, 3, (lanes_, outs, inputs), generator=generator, dtype=torch.int8)
    return [tensor.to(device) for tensor in (theta, m, v, anchor, stiffness, side, path)]


@on_gpu
@pytest.mark.parametrize("kind", [slots.PlainSlot, slots.EvenSlot, slots.SpringSlot])
@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("count", [1, 33, 70_001])
def test_the_compiled_pass_equals_the_plain_one(count, one_shape, kind):
    values = ([1e-3, 2e-3, 3e-3], [0.5, 0.7, 1.0], [True, False, True])
    pace = [torch.tensor(of_lanes).cuda()[:, None] for of_lanes in values]
    gradient = torch.randn(3, count, generator=torch.Generator().manual_seed(0)).cuda()
    got = [tensor.flatten(1) for tensor in stacked_tensors("cuda", 3, 1, count)[: len(kind._fields)]]
    before = [tensor.clone() for tensor in got]
    epsilon = torch.tensor([[1e-8], [1e-8], [1e-3]]).cuda()
    run = compiling.compiled(slots.PASSES[kind], 3, tuple(gradient.shape) if one_shape else ())
    numbers = ([1.0, 1.8, 3.0], [0.0, 1e-6, 0.1]) if kind is slots.SpringSlot else ()
    tilt = [torch.tensor(of_lanes).cuda()[:, None] for of_lanes in numbers]
    run(*got, gradient, *pace, epsilon, *tilt)
    assert run.run is not run.plain
    want = [tensor.double() if tensor.is_floating_point() else tensor for tensor in before]
    rest = [pace[2], *(tensor.double() for tensor in (epsilon, *tilt))]
    slots.PASSES[kind](*want, gradient.double(), *(p.double() for p in pace[:2]), *rest)
    for new, old, expected in zip(got, before, want, strict=True):
        torch.testing.assert_close(new.to(expected.dtype), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(new[1], old[1]), "a lane that is not active stays as it is"


@on_gpu
@pytest.mark.parametrize("small_tensors", [1, 1 << 16])
@pytest.mark.parametrize("count", [1, 3])
def test_recorded_and_compiled_steps_equal_plain_ones(count, small_tensors, monkeypatch):
    """The network of the paper, narrower: recorded and compiled against neither."""
    monkeypatch.setattr(stack, "SMALL", small_tensors)
    configs = [
        RunConfig.for_benchmark("permuted-digits", "alasso", tasks=2, epochs=4, hidden=128, seed=s, precision="float32")
        for s in range(count)
    ]
    assert difference_of_recorded_and_compiled_from_plain(configs, monkeypatch) < 0.02


def gradients_of_large_images(device, seen=None):
    """Of a network on images that are large enough to be laid out anew: by a lane alone, and by autograd in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU())
    net = nn.Sequential(net, nn.Flatten(), nn.LazyLinear(2)).double()
    images, labels = torch.randn(6, 3, 20, 24, dtype=torch.float64), torch.arange(6) % 2
    nn.functional.cross_entropy(net(images), labels).backward()
    if seen is not None:
        net[0][0].register_forward_pre_hook(lambda layer, args: seen.extend([args[0], layer.weight]))
    want = {name: p.grad for name, p in net.named_parameters()}

    dtype = torch.float64 if device.type == "cpu" else torch.float32
    weights = {name: p.detach().to(device, dtype) for name, p in net.named_parameters()}
    x, y = images.to(device, dtype)[None], labels.to(device)[None]
    batch = lane_gradients.LaneBatch(
        x, y, torch.full_like(x[:, :, 0, 0, 0], 1 / 6), torch.arange(2, device=device)[None]
    )
    return lane_gradients.LaneGradients(net, None, 1, False, 0.0, device)(weights, batch)[0], want


def test_large_images_are_laid_out_for_convolutions_and_gradients_stay_the_same(monkeypatch):
    weights, small_images = {"w": torch.zeros(4, 3, 3, 3), "b": torch.zeros(4)}, torch.zeros(2, 3, 16, 16)
    assert lane_gradients.laid_out_for_convolutions(weights, small_images) == (weights, small_images)
    monkeypatch.setattr(lane_gradients, "LARGE_IMAGE", 16 * 16)
    laid_out, images = lane_gradients.laid_out_for_convolutions(weights, small_images)
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in (laid_out["w"], images))
    assert laid_out["b"] is weights["b"]

    seen = []
    got, want = gradients_of_large_images(CPU, seen)
    assert len(seen) == 2 and all(one.is_contiguous(memory_format=torch.channels_last) for one in seen)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-14)


@on_gpu
def test_on_a_gpu_gradients_of_large_images_are_those_of_autograd(monkeypatch):
    monkeypatch.setattr(lane_gradients, "LARGE_IMAGE", 16 * 16)
    train.set_precision("float32")
    got, want = gradients_of_large_images(torch.device("cuda", 0))
    for name, gradient in want.items():
        torch.testing.assert_close(got[name].cpu().double(), gradient, rtol=1e-4, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("count", [1, 3])
def test_on_a_gpu_a_run_on_images_equals_itself_to_the_last_bit(count):
    """Convolutions are summed in one order, however the GPU's blocks come along."""
    # Of one function the compiler makes eight variants and no more: with those of other tests behind it, the first run
    # would begin compiled and end without.
    compiling.compiled.cache_clear()
    torch._dynamo.reset()
    train.set_precision("tf32")
    configs = [RunConfig.own("alasso", model="cifar-cnn", epochs=5, seed=seed) for seed in range(count)]
    source, gpu = noise(2000, 32), torch.device("cuda", 0)

    def once():
        streams = [split([(source, 2)], 2, seed, name="x", size=None, device=gpu) for seed in range(count)]
        return [everything(lane) for lane in trained(configs, streams, model=None)]

    for first, again in zip(once(), once(), strict=True):
        for part in first:
            assert torch.equal(first[part], again[part]), part


@on_gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "float32"])
def test_on_a_gpu_every_precision_stays_near_float64(precision):
    config = small("alasso", precision=precision, epochs=5)
    exact = train.run(config, model=InDouble, device="cpu")
    fast = train.run(config, model=lambda: InDouble().net.float(), device="cuda")
    np.testing.assert_allclose(fast.accuracy[-1], exact.accuracy[-1], atol=0.05)
