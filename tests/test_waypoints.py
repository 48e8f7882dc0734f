"""A longer run passes through a shorter one: the same file as if that had been run by itself, and trained once."""

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

from alasso.bench import results
from alasso.bench.config import RunConfig
from alasso.bench.data import load
from alasso.bench.io import taken
from alasso.bench.learners import base as learners
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.bench.stacking import lanes
from alasso.bench.streams import split
from alasso.bench.training import checkpoint
from alasso.bench.training import run as train
from alasso.bench.training import sweep as runs
from alasso.bench.training.waypoints import Waypoint, carriers
from alasso.errors import AlassoError, DivergedError

from helpers import StopAt

STEPS = 3  # of an epoch: 1437 examples, 500 a batch
SHORT, LONG = 3, 5
QUICK_VCL = {"point_epochs": 1, "test_samples": 2}
QUICK = {"vcl": QUICK_VCL, "vcl-coreset": {**QUICK_VCL, "coreset": 20, "coreset_epochs": 1}}


def small(tasks, method="alasso", **changes):
    fields = {"epochs": 1, "hidden": 8, "batch_size": 500, **QUICK.get(method, {}), **changes}
    return RunConfig.for_benchmark("permuted-digits", method, tasks=tasks, **fields)


def pair(method="alasso", **changes):
    return small(SHORT, method, **changes), small(LONG, method, **changes)


def carried_out(configs, out, reference=lambda config: None, **options):
    return runs.carry_out(configs, runs.Options(out=out, device="cpu", quiet=True, **options), Console(), reference)


def file_of(config, out):
    return out / f"{config.name}.json"


def found(result):
    """All of a result that does not depend on the clock and on what else the process did."""
    raw = result.to_json()
    del raw["environment"]["finished"], raw["seconds"], raw["peak_memory"]
    return raw


@pytest.fixture
def trained(monkeypatch):
    """Names of all runs that were trained."""
    names, run_together = [], train.run_together

    def noting(configs, **options):
        names.extend(config.name for config in configs)
        return run_together(configs, **options)

    monkeypatch.setattr(train, "run_together", noting)
    return names


def stop_after(steps, monkeypatch):
    @contextmanager
    def stop_on_request():
        yield StopAt(steps)

    monkeypatch.setattr(train, "stop_on_request", stop_on_request)


# -- which runs lie on the way of others ------------------------------------------------------------------------------


def test_the_longest_of_all_carries_the_others():
    three, five, eight = (small(tasks) for tasks in (3, 5, 8))
    others = [small(4, seed=1), small(4, a=3.0), small(4, epochs=2), small(4, "si"), small(4, permute_first=True)]
    found = carriers([five, eight, *others, three])
    assert found == {five.name: eight, three.name: eight}


def test_split_benchmarks_are_not_nested_because_their_head_grows():
    digits = load("digits", None)
    widths = [split([(digits, tasks)], 2, 0, name="x").classes for tasks in (SHORT, LONG)]
    assert widths == [6, 10]
    assert {name for name, one in BENCHMARKS.items() if one.nested} == {n for n in BENCHMARKS if "permuted" in n}
    assert carriers([RunConfig.for_benchmark("split-cifar", "si", tasks=tasks) for tasks in (10, 30)]) == {}
    assert carriers([RunConfig.own("si", tasks=tasks) for tasks in (2, 3)]) == {}


# -- the same as by itself ----------------------------------------------------------------------------------------


VARIANTS = [
    *((method, {}) for method in METHODS),
    ("imm-mode", {"transfer": "l2-drop"}),
    ("ewc", {"labels": "sampled"}),
    ("si", {"memory": 20, "validation": True}),
    ("sgd", {"optimizer": "sgd", "permute_first": True}),
    ("si", {"reset_optimizer": True}),
    ("vcl-coreset", {"choose": "k-center"}),
]


@pytest.mark.parametrize(("method", "changes"), VARIANTS)
def test_a_waypoints_file_is_that_of_the_run_by_itself(method, changes, tmp_path, trained):
    short, long = pair(method, **changes)
    both = carried_out([short, long], tmp_path / "both")
    assert trained == [long.name] and [result.config for result in both] == [short, long]
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == sorted(
        f"{c.name}.json" for c in (short, long)
    )
    on_the_way = results.read(file_of(short, tmp_path / "both"))
    assert on_the_way == both[0]
    (alone,) = carried_out([short], tmp_path / "alone")
    assert found(on_the_way) == found(alone)
    assert len(alone.ahead) == SHORT - 1 and len(alone.untrained) == SHORT
    assert 0 < on_the_way.seconds < both[1].seconds and on_the_way.peak_memory > 0
    (long_alone,) = carried_out([long], tmp_path / "alone")
    assert found(both[1]) == found(long_alone)


def test_waypoints_of_a_stack(tmp_path, trained):
    pairs = [pair(method) for method in lanes.STACKABLE if method not in ("sgd-dropout", "alasso-memory")]
    pairs += [pair("alasso", seed=1), pair("si", c=2.0)]
    longer = [*(long for _, long in pairs), small(LONG, "mas", seed=2)]  # the last one passes through none
    shorter = [short for short, _ in pairs]
    together = carried_out([*shorter, *longer], tmp_path / "both", lanes=16)
    assert trained == [config.name for config in longer]
    assert {result.environment["lanes"] for result in together} == {len(longer)}
    for short, result in zip(shorter, together, strict=False):
        (alone,) = carried_out([short], tmp_path / "alone")
        assert result.config == short and result == results.read(file_of(short, tmp_path / "both"))
        assert torch.allclose(torch.tensor(result.accuracy[-1]), torch.tensor(alone.accuracy[-1]), atol=0.01)
    stacked = carried_out([*shorter, small(SHORT, "mas", seed=2)], tmp_path / "stacked", lanes=16)
    for result, same in zip(together[: len(shorter)], stacked, strict=False):
        assert found(result) == found(same)  # in the same company, bit for bit


def test_intransigence_of_a_waypoint_is_measured_against_its_own_reference(tmp_path):
    short, long = pair()
    references = {c.name: carried_out([dataclasses.replace(c, method="single-task", settings={})], tmp_path)[0]
                  for c in (short, long)}  # fmt: skip
    both = carried_out([short, long], tmp_path / "both", lambda config: references[config.name])
    (alone,) = carried_out([short], tmp_path / "alone", lambda config: references[config.name])
    assert both[0].metrics == alone.metrics and both[0].metrics["I"] is not None


# -- files that are there, and runs that are stopped ----------------------------------------------------------------


def test_a_file_that_is_there_is_kept_unless_all_is_done_again(tmp_path, trained):
    short, long = pair()
    carried_out([short], tmp_path)
    written = file_of(short, tmp_path).stat().st_mtime_ns
    carried_out([short, long], tmp_path)
    assert file_of(short, tmp_path).stat().st_mtime_ns == written and trained == [short.name, long.name]
    carried_out([short, long], tmp_path, restart=True)
    assert file_of(short, tmp_path).stat().st_mtime_ns > written
    assert trained == [short.name, long.name, long.name]


def test_a_shorter_run_whose_longer_one_is_finished_is_run_by_itself(tmp_path, trained):
    short, long = pair()
    first = carried_out([short, long], tmp_path)
    file_of(short, tmp_path).unlink()
    again = carried_out([short, long], tmp_path)
    assert trained == [long.name, short.name] and found(again[0]) == found(first[0])


def stopped_beyond_the_waypoint(configs, out, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(SHORT * STEPS + 1, patch)
        with pytest.raises(runs.Stopped, match=f"task {SHORT + 1}, epoch 1, step 1"):
            carried_out(configs, out, lanes=8)


@pytest.mark.parametrize("methods", [["alasso"], ["vcl"], ["alasso", "si", "sgd-dropout"]])
def test_a_run_stopped_later_has_written_its_waypoint(methods, tmp_path, monkeypatch, trained):
    pairs = [pair(method) for method in methods]
    configs = [config for both in pairs for config in both]
    undisturbed = carried_out(configs, tmp_path / "undisturbed", lanes=8)
    stopped_beyond_the_waypoint(configs, tmp_path, monkeypatch)
    written = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    assert {file_of(short, tmp_path) for short, _ in pairs} >= set(written) and written
    resumed = carried_out(configs, tmp_path, resume=True, lanes=8)
    assert [found(result) for result in resumed] == [found(result) for result in undisturbed]
    assert all(path.read_bytes() == before for path, before in written.items())
    assert not {short.name for short, _ in pairs} & set(trained)


def test_a_waypoint_behind_a_checkpoint_is_written_at_once(tmp_path, monkeypatch, trained):
    short, long = pair()
    stopped_beyond_the_waypoint([short, long], tmp_path, monkeypatch)
    before = results.read(file_of(short, tmp_path))
    file_of(short, tmp_path).unlink()
    with monkeypatch.context() as patch:
        stop_after(1, patch)
        with pytest.raises(runs.Stopped):
            carried_out([short, long], tmp_path, resume=True)
    again = results.read(file_of(short, tmp_path))
    assert found(again) == found(before) and again.seconds == before.seconds
    assert set(trained) == {long.name}


def test_a_checkpoint_from_before_waypoints_still_loads_and_the_shorter_run_goes_by_itself(
    tmp_path, monkeypatch, trained
):
    short, long = pair()
    undisturbed = carried_out([short, long], tmp_path / "undisturbed")
    stopped_beyond_the_waypoint([short, long], tmp_path, monkeypatch)
    file_of(short, tmp_path).unlink()
    saved = results.checkpoint_path(long, tmp_path)
    content = torch.load(saved, weights_only=True)
    del content["position"]["seconds_at"]
    torch.save(content, saved)
    trained.clear()
    resumed = carried_out([short, long], tmp_path, resume=True)
    assert trained == [long.name, short.name]
    assert [found(result) for result in resumed] == [found(result) for result in undisturbed]


def test_a_checkpoint_of_the_shorter_run_goes_when_its_result_is_written(tmp_path):
    short, long = pair("sgd")
    results.checkpoint_path(short, tmp_path).write_bytes(b"begun")
    carried_out([short, long], tmp_path, resume=True)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}


@pytest.mark.parametrize("count", [1, 2])
def test_a_longer_run_that_diverges_before_its_waypoint_loses_both_and_no_other(count, tmp_path):
    lost, kept = (pair(learning_rate=rate) for rate in (1e30, 1e-3))
    with pytest.raises(DivergedError) as caught:
        carried_out([*lost, *kept], tmp_path, lanes=count)
    assert all(f"tasks={tasks}" in str(caught.value) for tasks in (SHORT, LONG))
    notes = {f"{config.name}.diverged" for config in lost}
    assert {path.name for path in tmp_path.iterdir()} == {f"{config.name}.json" for config in kept} | notes


def test_a_run_that_diverges_where_a_shorter_one_ends_leaves_neither(tmp_path, monkeypatch):
    short, long = pair()
    end_task = learners.Learner.end_task

    def diverges(learner, t):
        if t == SHORT - 1:
            raise DivergedError("the training diverged")
        end_task(learner, t)

    monkeypatch.setattr(learners.Learner, "end_task", diverges)
    with pytest.raises(DivergedError, match=rf"tasks={LONG}, seed 0; .*tasks={SHORT}, seed 0: the training diverged"):
        carried_out([short, long], tmp_path)
    notes = {f"{config.name}.diverged" for config in (short, long)}
    assert {path.name for path in tmp_path.iterdir()} == notes


def test_a_position_passes_through_a_shorter_one():
    whole = checkpoint.Position(3, 0, 0, 0.0, 9.0, [[1.0], [0.5, 1.0], [0.2, 0.5, 1.0]], [0.1, 0.2], [0.0, 0.1, 0.2])
    whole.seconds_at = {1: 3.0, 2: 6.5, 3: 9.0}
    two = checkpoint.Position(2, 0, 0, 0.0, 6.5, [[1.0], [0.5, 1.0]], [0.1], [0.0, 0.1])
    assert whole.after(2) == two


# -- what cannot be written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [SHORT, LONG])
def test_a_result_that_cannot_be_written_does_not_cost_the_training(refused, tmp_path, monkeypatch):
    configs = pair("sgd")
    with monkeypatch.context() as patched:
        write = results.write

        def full(result, folder):
            if result.config.tasks == refused:
                raise AlassoError("the disk is full")
            return write(result, folder)

        patched.setattr(results, "write", full)
        with pytest.raises(AlassoError, match="the disk is full"):
            carried_out(configs, tmp_path)
    (saved,) = tmp_path.glob("*.checkpoint")
    assert checkpoint.place_in(saved) == (refused, 0, 0)
    alone = [train.run(config, device="cpu") for config in configs]
    gone_on_with = carried_out(configs, tmp_path, resume=True)
    assert [result.accuracy for result in gone_on_with] == [result.accuracy for result in alone]
    assert sorted(tmp_path.iterdir()) == sorted(file_of(config, tmp_path) for config in configs)


def test_a_shorter_run_of_another_process_is_not_written_in_passing(tmp_path):
    short, long = pair("sgd")
    with taken(tmp_path, [short.name]), pytest.raises(AlassoError, match=f"{short.name} is being trained"):
        train.run_together([long], device="cpu", out=tmp_path, waypoints=[[Waypoint(short)]])
    assert not list(tmp_path.iterdir())
