"""Batches of several tasks: an episodic memory beside new data, or all tasks mixed evenly."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from alasso.bench.config import RunConfig
from alasso.bench.data import ImageSet
from alasso.bench.learners import replay
from alasso.bench.learners.base import Learner, MultiTask, StepPlan
from alasso.bench.learners.replay import EpisodicMemory, Mixture, even_mixture, mixed_in_one_go, only_own_head
from alasso.bench.streams import Stream, Task, permuted, split

from run_helpers import CPU


def image_set(name="toy", classes=6, per_class=10, side=4):
    """Every image says by its pixels whether it is of the training or the test half, and which one it is."""
    labels = np.repeat(np.arange(classes), per_class)
    count = len(labels)
    images = np.zeros((count, 1, side, side), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(count)
    test = images.copy()
    test[:, 0, 3, 3] = 255
    names = tuple(map(str, range(classes)))
    return ImageSet(name, "made up", images, labels, test, labels.copy(), names)


def permuted_stream(count=4):
    return permuted(image_set(), count, seed=0)


def split_stream():
    return split([(image_set("first"), 1), (image_set("second"), 2)], 3, seed=0, name="x")


def learner(stream, kind=Learner, method="sgd", **changes):
    config = RunConfig.own(method, epochs=1, batch_size=12, hidden=8, **changes)
    torch.manual_seed(0)
    return kind(config, stream, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, stream.classes)), CPU)


def of_several_sizes():
    """Images of one task are larger: a batch is brought to one size, but no pool can hold them."""
    one, other = (
        split([(image_set("x", side=side), 1)], 3, seed=0, name="x", size=4).tasks[0].train for side in (4, 5)
    )
    return Stream("x", (Task("a", one, one, slice(0, 3)), Task("b", other, other, slice(0, 3))), (1, 4, 4), 3, {})


def of_several_scales():
    """Pixels of one task are divided by something else: from a pool, they would come out wrong."""
    stream = split_stream()
    (first, *others) = stream.tasks
    return replace(stream, tasks=(replace(first, train=replace(first.train, scale=100.0)), *others))


def of_several_dtypes():
    stream = split_stream()
    (first, *others) = stream.tasks
    as_floats = replace(first.train, images=first.train.images.double())
    return replace(stream, tasks=(replace(first, train=as_floats), *others))


def of_all_rows():
    """Tasks that are whole sets of images, of different lengths, and columns of their own."""
    return Stream.of([(pair, pair) for pair in (of_class(0, 4), of_class(1, 9), of_class(2, 8))], heads="own")


def of_class(label, count):
    return torch.rand(count, 16), torch.full((count,), label)


WAYS = [(permuted_stream, "shared"), (split_stream, "pool"), (of_all_rows, "pool")] + [
    (make, None) for make in (of_several_sizes, of_several_scales, of_several_dtypes)
]


@pytest.mark.parametrize(("make", "way"), WAYS)
def test_a_mixture_gives_the_very_examples_that_its_pairs_name(make, way):
    stream = make()
    mixture = Mixture(stream.tasks)
    assert [name for name in ("shared", "pool") if getattr(mixture, name) is not None] == ([way] if way else [])
    assert mixed_in_one_go(stream.tasks) == (way is not None)
    last_task = len(stream.tasks) - 1
    pairs = torch.tensor([[last_task, 5], [0, 3], [1, 7], [0, 3], [last_task, 0]])
    x, y, first, last = mixture.batch(pairs, CPU)
    found = sorted(
        (*a.flatten().tolist(), int(b), int(c), int(d)) for a, b, c, d in zip(x, y, first, last, strict=True)
    )
    expected = []
    for t, i in pairs.tolist():
        task = stream.tasks[t]
        one, label = task.train.batch(torch.tensor([i]))
        expected.append((*one.flatten().tolist(), int(label), task.head.start, task.head.stop))
    assert found == sorted(expected)


@pytest.mark.parametrize("make", [split_stream, of_all_rows])
def test_a_pool_of_what_is_kept_holds_no_more_and_gives_the_same(make):
    stream = make()
    kept = [torch.tensor([3, 1]), torch.tensor([7]), torch.tensor([0, 5, 2])]
    pairs = torch.tensor([[2, 5], [0, 3], [1, 7], [0, 1], [2, 0], [2, 2]])
    some, everything = Mixture(stream.tasks, kept), Mixture(stream.tasks)
    assert some.pool is not None and len(some.pool.examples) == 6
    for got, want in zip(some.batch(pairs, CPU), everything.batch(pairs, CPU), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_images_that_would_take_too_much_room_a_second_time_are_not_pooled(monkeypatch):
    stream = split_stream()
    needed = sum(len(task.train) * task.train.images[0].nbytes for task in stream.tasks)
    for room, way in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(replay, "POOLED_AT_MOST", room)
        assert (Mixture(stream.tasks).pool is not None) == mixed_in_one_go(stream.tasks) == way
    assert mixed_in_one_go(stream.tasks, at_most=2)  # of each task, of which there is room for


@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [12, 25])
def test_multi_task_batches_hold_all_tasks_evenly(tasks, batch_size):
    sizes = [60] * tasks
    pairs = even_mixture(sizes, seed=0)
    assert len(pairs) == 60  # as many steps as any other method makes on the last task
    for batch in pairs.split(batch_size):
        counts = torch.bincount(batch[:, 0], minlength=tasks)
        assert counts.max() - counts.min() <= 1
    for t in range(tasks):
        examples = pairs[pairs[:, 0] == t, 1].tolist()
        assert len(set(examples)) == len(examples)  # none twice within an epoch


def test_multi_task_with_a_small_task_goes_round_it():
    pairs = even_mixture([3, 12], seed=0)
    assert sorted(pairs[pairs[:, 0] == 0, 1].tolist()) == [0, 0, 1, 1, 2, 2]


def test_multi_task_draws_every_example_equally_often():
    drawn = torch.cat([even_mixture([20, 20, 20], seed) for seed in range(600)])
    for t in range(3):
        counts = torch.bincount(drawn[drawn[:, 0] == t, 1], minlength=20)
        assert counts.sum() == 600 * len(range(t, 20, 3))
        assert (counts / counts.sum() * 20 - 1).abs().max() < 0.28  # five standard deviations


def test_multi_task_learner_trains_on_every_task_so_far():
    stream = permuted_stream(3)
    multi = learner(stream, MultiTask, "multi-task")
    multi.prepare(2)
    seen = torch.cat([plan.others for plan in multi.epoch_plan(2, 0)])
    assert torch.bincount(seen[:, 0]).tolist() == [20, 20, 20]
    assert len(multi.epoch_plan(2, 0)) == len(learner(stream).epoch_plan(2, 0))


def test_the_softmax_of_a_mixed_batch_is_over_each_examples_own_columns():
    outputs = torch.randn(2, 6, dtype=torch.float64)
    masked = only_own_head(outputs, torch.tensor([0, 3]), torch.tensor([3, 6]))
    torch.testing.assert_close(masked.softmax(1)[0, :3], outputs[0, :3].softmax(0))
    torch.testing.assert_close(masked.softmax(1)[1, 3:], outputs[1, 3:].softmax(0))
    assert masked.softmax(1)[0, 3:].sum() == 0


def test_memory_holds_training_examples_only_and_as_many_as_asked():
    stream = permuted_stream()
    memory = EpisodicMemory(size=7, share=0.5)
    for task in stream.tasks:
        memory.remember(task, torch.Generator().manual_seed(1))
    x, *_ = Mixture(stream.tasks).batch(memory.pairs(), CPU)
    assert len(x) == 4 * 7
    # Test images carry one white pixel that no training image has.
    assert (x == 1.0).sum() == 0
    for kept in memory.kept:
        assert len(set(kept.tolist())) == 7


@pytest.mark.parametrize(("share", "beside"), [(0.5, 12), (0.25, 4), (0.75, 36)])
def test_share_of_memory_in_a_batch(share, beside):
    stream = permuted_stream()
    one = learner(stream, memory=5, memory_share=share)
    one.end_task(0)
    one.prepare(1)
    for plan in one.epoch_plan(1, 0):
        assert len(plan.own) == 12 and len(plan.others) == beside
        assert set(plan.others[:, 0].tolist()) == {0}
        assert set(plan.others[:, 1].tolist()) <= set(one.memory.kept[0].tolist())


def test_no_memory_is_rehearsed_in_the_first_task():
    one = learner(permuted_stream(), memory=5)
    one.prepare(0)
    assert all(plan.others is None for plan in one.epoch_plan(0, 0))


def test_the_loss_of_a_batch_with_memory_is_the_mean_over_both():
    stream = split_stream()
    one = learner(stream, memory=5)
    one.end_task(0)
    one.prepare(1)
    plan = StepPlan(torch.arange(6), torch.stack([torch.zeros(4, dtype=torch.long), one.memory.kept[0][:4]], 1))
    total = 0.0
    for task, index in ((stream.tasks[1], plan.own), (stream.tasks[0], plan.others[:, 1])):
        x, y = task.train.batch(index)
        outputs = one.model(x)[:, task.head]
        total += nn.functional.cross_entropy(outputs, y - task.head.start, reduction="sum").item()
    assert one.loss(1, plan).item() == pytest.approx(total / 10, rel=1e-5)
