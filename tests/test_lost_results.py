"""Results that were deleted come back as they were, from the stack that they were trained in."""

import dataclasses

import pytest

from alasso.bench import lanes, results, runs, train
from alasso.bench.config import RunConfig
from alasso.bench.results import Result
from alasso.reproduce import timing
from alasso.reproduce.experiments import read_experiments
from alasso.reproduce.lost import LostStack, lost_stacks
from alasso.reproduce.plan import result_path

from run_helpers import in_process

EXPERIMENT = """
title = "{title}"
benchmark = "permuted-digits"
seeds = 2
[fields]
tasks = {tasks}
epochs = 1
hidden = 8
[runs]
alasso = {{}}
si = {{}}
sgd-dropout = {{}}
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Runs of two and of three tasks, of which a CPU takes three at once, as a GPU would."""
    monkeypatch.setattr(timing, "ON_CPU", timing.Watching(1, 1, 0.02))
    monkeypatch.setattr(lanes, "most_on", lambda device: 3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study" / "experiments").mkdir(parents=True)
    for name, tasks in (("short", 2), ("long", 3)):
        file = tmp_path / "study" / "experiments" / f"{name}.toml"
        file.write_text(EXPERIMENT.format(title=name, tasks=tasks))
    (tmp_path / "study" / "claims.toml").write_text("")
    return tmp_path / "study"


def reproduced(study, out, monkeypatch, capsys, *words):
    options = ["--study", study, "--out", out, "--device", "cpu", *words]
    code, output, errors = in_process(["reproduce", *options], monkeypatch, capsys)
    assert not code, errors
    return output


@pytest.mark.parametrize(
    ("experiment", "run", "seed"), [("long", "sgd-dropout", 0), ("short", "sgd-dropout", 1), ("short", "si", 0)]
)
def test_a_deleted_result_is_restored_to_the_last_digit_and_nothing_else_is_touched(
    experiment, run, seed, study, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("bokeh", reason="the report extra is not installed")
    out = tmp_path / "out"
    reproduced(study, out, monkeypatch, capsys)
    gone = result_path(read_experiments(study)[experiment].config(run, seed), out)
    before = results.read(gone)
    stack = before.environment["stack"]
    assert len(stack) == before.environment["lanes"] == 2 and before.name in stack
    gone.unlink()
    left = {path: path.read_bytes() for path in out.glob("*_s*.json")}

    said = reproduced(study, out, monkeypatch, capsys, "--plan")
    assert "To do: 1 lost result, trained again with the 1 run of the same stack; 11 already in" in said
    assert "lost results, in" in said
    reproduced(study, out, monkeypatch, capsys, "--quiet")
    assert results.read(gone).accuracy == before.accuracy
    assert {path: path.read_bytes() for path in left} == left and not (out / "again").exists()
    assert "Nothing to run: all 12 results" in reproduced(study, out, monkeypatch, capsys, "--plan")


def test_without_its_stack_a_run_that_draws_at_random_would_be_another(study):
    """What makes the test above one that can fail."""
    pair = [read_experiments(study)["short"].config("sgd-dropout", seed) for seed in (0, 1)]
    first, _ = train.run_together(pair, device="cpu")
    assert train.run(pair[0], device="cpu").accuracy != first.accuracy


def config(method="si", seed=0, tasks=2):
    return RunConfig.for_benchmark("permuted-digits", method, seed=seed, tasks=tasks, epochs=1, hidden=8)


HERE = {"alasso": "1", "torch": "2", "cuda": "12", "gpu": "one", "cpu": "any"}


def result_in_stack(own, stack, lanes=None, **environment):
    names = [one.name for one in stack]
    where = {**HERE, "finished": "2025", "stack": names, "lanes": len(names) if lanes is None else lanes}
    return Result(own, {**where, **environment}, {}, [[1.0], [1.0, 1.0]], [0.1], [0.1, 0.1], {}, 1.0, 1)


STACK = [config(method, seed) for method in ("si", "ewc") for seed in (0, 1)]


def found(missing, present, here=HERE):
    return lost_stacks(missing, present, [], lambda: here)


def test_results_that_are_left_tell_of_those_that_are_not():
    left, lost = STACK[:2], STACK[2:]
    assert found(lost, [result_in_stack(one, STACK) for one in left]) == [LostStack(tuple(STACK), tuple(lost))]
    assert found([config("mas")], [result_in_stack(one, STACK) for one in left]) == []


def test_what_the_stack_was_is_said_by_the_newest_result():
    other = [config("si", 0), config("ewc", 0)]
    known = [result_in_stack(STACK[0], STACK, finished="2024"), result_in_stack(other[0], other, finished="2025")]
    assert found([other[1]], known) == [LostStack(tuple(other), (other[1],))]


@pytest.mark.parametrize("change", [{"gpu": "another"}, {"torch": "3"}, {"alasso": "2"}, {"cuda": None}])
def test_on_another_machine_or_with_other_versions_nothing_would_come_back_equal(change):
    left = [result_in_stack(one, STACK) for one in STACK[:3]]
    assert found(STACK[3:], left, {**HERE, **change}) == []
    assert len(found(STACK[3:], left, {**HERE, "cpu": "another"})) == 1  # the GPU is what computes


def test_a_run_that_left_its_stack_because_it_diverged_is_not_lost():
    """It has no result, and never had; but if others of the stack are lost, it has its place there again."""
    left = [result_in_stack(one, STACK, lanes=3) for one in STACK[:3]]
    assert found(STACK[3:], left) == []
    assert found(STACK[2:], left[:2]) == [LostStack(tuple(STACK), tuple(STACK[2:]))]


def test_runs_of_a_stack_are_known_by_any_seed_and_length():
    """Of a longer run in the stack, the study may hold neither this seed nor a shorter one by itself."""
    stack = [config("si", 7), config("ewc", 0)]
    known = [result_in_stack(stack[1], stack), result_in_stack(config("si", 1, tasks=3), [])]
    again = found([config("mas"), stack[0]], known)
    assert [one.runs for one in again] == [tuple(stack)]
    nobody = [dataclasses.replace(config("si", 7), hidden=9), stack[1]]
    assert found([stack[0]], [result_in_stack(stack[1], [*nobody, stack[0]])]) == []


def test_a_run_that_goes_on_remembers_the_stack_it_was_begun_with(tmp_path):
    def stops(task, epoch, loss, penalty, accuracy, left):
        raise KeyboardInterrupt

    pair = [config("si", seed) for seed in (0, 1)]
    names = [one.name for one in pair]
    breaking = type("Breaking", (train.Quiet,), {"epoch_done": staticmethod(stops), "wants_epochs": True})()
    with pytest.raises(KeyboardInterrupt):
        train.run_together(pair, device="cpu", out=tmp_path, observers=[breaking] * 2, checkpoint_every=0.0)
    alone = train.run(pair[0], device="cpu", out=tmp_path, resume=True)
    assert alone.environment["stack"] == names and alone.environment["lanes"] == 1
    assert runs.is_done(pair[0], runs.Options(out=tmp_path))
