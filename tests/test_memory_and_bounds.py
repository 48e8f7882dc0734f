"""Episodic memory, mixed batches, the two upper bounds, the search on held-out examples, recorded steps."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from alasso import AlassoError
from alasso.bench import intransigence as references
from alasso.bench import models
from alasso.bench import registry as catalog
from alasso.bench.config import RunConfig
from alasso.bench.data import ImageSet
from alasso.bench.learners import replay as remembering
from alasso.bench.learners.base import Learner, StepPlan
from alasso.bench.learners.replay import EpisodicMemory, Mixture, mixed_in_one_go, only_own_head
from alasso.bench.learners.upper_bounds import MultiTask, even_mixture
from alasso.bench.streams import Stream, Task, permuted, split
from alasso.bench.training import cuda_graphs as graphs
from alasso.bench.training import run as train
from alasso.bench.training import search as searching
from alasso.bench.training import sweep as runs
from alasso.bench.training import trainer as loop

CPU = torch.device("cpu")


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


# -- mixed batches ----------------------------------------------------------------------------------------------


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
        monkeypatch.setattr(remembering, "POOLED_AT_MOST", room)
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


# -- memory -----------------------------------------------------------------------------------------------------


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


def test_memory_helps_and_is_an_option_of_any_method():
    config = {"tasks": 3, "epochs": 6, "hidden": 64}
    plain = train.run(RunConfig.for_benchmark("permuted-digits", "sgd", **config), device="cpu")
    helped = train.run(RunConfig.for_benchmark("permuted-digits", "sgd", memory=100, **config), device="cpu")
    assert helped.metrics["A"] > plain.metrics["A"] + 0.05
    assert RunConfig.for_benchmark("permuted-digits", "alasso-memory").memory == 200
    with pytest.raises(AlassoError, match="memory_share between 0 and 1"):
        RunConfig.for_benchmark("permuted-digits", "sgd", memory=5, memory_share=1.0)


# -- upper bounds -----------------------------------------------------------------------------------------------


def test_single_task_forgets_nothing_and_starts_afresh():
    result = train.run(
        RunConfig.for_benchmark("permuted-digits", "single-task", tasks=3, epochs=6, hidden=64), device="cpu"
    )
    for earlier, later in zip(result.accuracy, result.accuracy[1:], strict=False):
        assert later[:-1] == earlier
    assert result.metrics["F"] == 0 and result.metrics["A"] > 0.8


def test_intransigence_appears_in_the_table_beside_a_single_task_run(tmp_path):
    configs = runs.combinations("permuted-digits", ["single-task", "sgd"], [0], {"tasks": 2, "epochs": 1}, {})
    found = runs.carry_out(configs, runs.Options(out=tmp_path, device="cpu", quiet=True), Console(quiet=True))
    single, plain = found
    assert plain.metrics["I"] is None
    measured = references.with_intransigence(plain, found).metrics["I"]
    assert math.isclose(measured, np.mean(np.array(single.accuracy[-1]) - [row[-1] for row in plain.accuracy]))


# -- search -----------------------------------------------------------------------------------------------------


def test_search_writes_what_was_tried_and_chosen_and_never_looks_at_test_examples(tmp_path, monkeypatch):
    method = catalog.METHODS["si"]
    monkeypatch.setitem(method.search, "c", (0.1, 1.0))
    monkeypatch.setitem(method.search, "xi", (0.01,))
    used, carry_out = [], runs.carry_out

    def watched(configs, *rest):
        used.extend(configs)
        return carry_out(configs, *rest)

    monkeypatch.setattr(runs, "carry_out", watched)
    file = tmp_path / "outcome.json"
    options = runs.Options(out=tmp_path / "runs", device="cpu", quiet=True, resume=True)
    fields = {"tasks": 2, "epochs": 1, "hidden": 8}
    outcome = searching.search("permuted-digits", ["si"], [0, 1], fields, options, file, Console(quiet=True))
    assert len(used) == 4 and all(config.validation for config in used)
    assert json.loads(file.read_text()) == outcome
    tried = outcome["methods"]["si"]["tried"]
    assert [row["A"] for row in tried] == sorted((row["A"] for row in tried), reverse=True)
    assert outcome["chosen"]["si"] == {name: tried[0][name] for name in ("c", "xi")}
    with pytest.raises(AlassoError, match="not the outcome of a search on permuted-mnist"):
        searching.search("permuted-mnist", ["si"], [0], fields, options, file, Console(quiet=True))


def test_search_knows_its_methods_before_anything_is_run(tmp_path):
    options = runs.Options(out=tmp_path / "runs", device="cpu", quiet=True)
    for wrong, said in (("alsso", "did you mean 'alasso'"), ("single-task", "no settings to search for")):
        with pytest.raises(AlassoError, match=said):
            searching.search(
                "permuted-digits", ["si", wrong], [0], {"tasks": 2}, options, tmp_path / "found.json", Console()
            )
    assert not list(tmp_path.rglob("*.json"))


def test_a_search_tries_the_values_it_is_told_to_and_the_methods_own_of_all_else(tmp_path, monkeypatch):
    method = catalog.METHODS["si"]
    monkeypatch.setitem(method.search, "c", (0.1, 1.0))
    monkeypatch.setitem(method.search, "xi", (0.01, 0.1))
    options = runs.Options(out=tmp_path / "runs", device="cpu", quiet=True)
    fields = {"tasks": 2, "epochs": 1, "hidden": 8}
    file, values = tmp_path / "found.json", {"c": ["0.5", "2", "2"], "gamma": ["0.5"]}
    methods = ["si", "online-ewc"]
    outcome = searching.search("permuted-digits", methods, [0], fields, options, file, Console(quiet=True), values)
    assert outcome["methods"]["si"]["space"] == {"c": [0.5, 2.0], "xi": [0.01, 0.1]}
    assert {(row["c"], row["xi"]) for row in outcome["methods"]["si"]["tried"]} == {
        (c, xi) for c in (0.5, 2.0) for xi in (0.01, 0.1)
    }
    online = outcome["methods"]["online-ewc"]["space"]
    assert online == {"lam": list(catalog.METHODS["online-ewc"].search["lam"]), "gamma": [0.5]}
    assert set(outcome["chosen"]["online-ewc"]) == {"lam", "gamma"}


def test_searches_that_differ_in_the_values_alone_are_taken_together(tmp_path, capsys):
    options = runs.Options(out=tmp_path / "runs", device="cpu", quiet=True, resume=True)
    fields, file = {"tasks": 2, "epochs": 1, "hidden": 8}, tmp_path / "found.json"

    def searched(values, seeds=(0,), **changes):
        given = {"c": values, "xi": ["0.1"]}
        asked = {**fields, **changes}
        outcome = searching.search("permuted-digits", ["si"], seeds, asked, options, file, Console(), given)
        return outcome["methods"]["si"], outcome["chosen"]["si"]

    first, _ = searched(["1", "3"])
    both, chosen = searched(["0.5", "3"])
    assert both["space"]["c"] == [0.5, 1.0, 3.0] and len(both["tried"]) == 3
    assert [row["A"] for row in both["tried"]] == sorted((row["A"] for row in both["tried"]), reverse=True)
    assert chosen["c"] == both["tried"][0]["c"] and both["earlier"] == [first["environment"]]
    assert "is replaced" not in capsys.readouterr().out
    for changes in ({"seeds": (0, 1)}, {"epochs": 2}):
        alone, _ = searched(["2", "2"], **changes)
        assert [row["c"] for row in alone["tried"]] == [2.0] and "earlier" not in alone
        assert "from a search on other tasks, seeds or settings, is replaced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lamb": ["1"]}, "si has no setting 'lamb'"),
        ({"batch_size": ["64"]}, "a search tries settings of methods"),
        ({"c": ["much"]}, "much"),
    ],
)
def test_a_search_refuses_values_of_what_is_no_setting_before_anything_is_run(tmp_path, values, said):
    options = runs.Options(out=tmp_path / "runs", device="cpu", quiet=True)
    with pytest.raises(AlassoError, match=said):
        searching.search("permuted-digits", ["si"], [0], {}, options, tmp_path / "f.json", Console(), values)
    assert not list(tmp_path.rglob("*.json"))


def test_committed_searches_are_what_the_presets_use():
    for name, benchmark in catalog.BENCHMARKS.items():
        for method, chosen in catalog.searched(name).items():
            settings = RunConfig.for_benchmark(name, method).settings
            assert all(settings[key] == value for key, value in chosen.items()), (name, method)
            assert benchmark.settings[method] == chosen


# -- recorded steps ---------------------------------------------------------------------------------------------


def mlp_that_drops_nothing():
    network = models.build("mlp", (64,), 10, hidden=64, dropout=True)
    for layer in network.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    return network


@pytest.mark.gpu
@pytest.mark.parametrize("method", [m for m in catalog.METHODS if not m.startswith("vcl")])
def test_recorded_steps_equal_steps_made_one_by_one(method, monkeypatch):
    config = RunConfig.for_benchmark(
        "permuted-digits", method, tasks=3, epochs=4, hidden=64, precision="float32", batch_size=100
    )
    # Dropout draws other numbers when it is compiled; at a rate of 0 the rest of its steps can be compared.
    model = mlp_that_drops_nothing if method == "sgd-dropout" else None
    recorded = train.run(config, model=model, device="cuda")
    monkeypatch.setattr(loop, "steps_for", lambda learners, goes_on: graphs.DirectSteps(*learners))
    direct = train.run(config, model=model, device="cuda")
    np.testing.assert_allclose(recorded.accuracy[-1], direct.accuracy[-1], atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["multi-task", "alasso-memory"])
def test_recorded_steps_on_batches_from_a_pool_equal_those_made_one_by_one(method, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.rand(400, 64, generator=generator), torch.arange(400) % 2 + 2 * t) for t in range(3)]
    stream = Stream.of([(pair, pair) for pair in pairs], heads="own", device="cuda")
    config = RunConfig.own(method, epochs=4, batch_size=100, hidden=64, precision="float32")
    replayed, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replayed.append(1) or replay(graph))
    recorded = train.run(config, stream=stream, device="cuda")
    assert replayed
    monkeypatch.setattr(loop, "steps_for", lambda learners, goes_on: graphs.DirectSteps(*learners))
    direct = train.run(config, stream=stream, device="cuda")
    np.testing.assert_allclose(recorded.accuracy[-1], direct.accuracy[-1], atol=0.01)
