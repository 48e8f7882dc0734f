"""Results that were deleted come back as they were, from the stack that they were trained in."""

import dataclasses
import json

import pytest
import torch
from rich.console import Console

from alasso.bench import results
from alasso.bench._make_streams import make_streams
from alasso.bench.config import RunConfig
from alasso.bench.io import taken
from alasso.bench.learners import base as learners
from alasso.bench.report.load import collect
from alasso.bench.reproduce import counting, show, stopwatch, timing
from alasso.bench.reproduce import execute as carrying
from alasso.bench.reproduce.experiments import read_experiments
from alasso.bench.reproduce.lost import Lost, LostStack, lost_stacks
from alasso.bench.reproduce.plan import make_plan
from alasso.bench.reproduce.study import Study
from alasso.bench.results import Result, result_path
from alasso.bench.stacking import lanes
from alasso.bench.training import run as train
from alasso.bench.training import sweep as runs
from alasso.bench.training import trainer as loop
from alasso.bench.training.progress import Stopped
from alasso.errors import AlassoError, DivergedError

from helpers import StopAt
from lane_helpers import CPU, everything
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
    """Runs of two and of three tasks, of which a CPU takes four at once, as a GPU would."""
    monkeypatch.setattr(stopwatch, "ON_CPU", stopwatch.Watching(1, 1, 0.02))
    monkeypatch.setattr(lanes, "most_on", lambda device: 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study" / "experiments").mkdir(parents=True)
    for name, tasks in (("short", 2), ("long", 3)):
        file = tmp_path / "study" / "experiments" / f"{name}.toml"
        file.write_text(EXPERIMENT.format(title=name, tasks=tasks))
    (tmp_path / "study" / "claims.toml").write_text("")
    return tmp_path / "study"


@pytest.fixture
def reproduce(study, tmp_path, monkeypatch, capsys):
    """``alasso reproduce`` of the study, without its page, which takes the most of the time: what it says."""
    monkeypatch.setattr(Study, "page", lambda study, judged: None)

    def reproduced(*words, code=0):
        options = ["--study", study, "--out", tmp_path / "out", "--device", "cpu", *words]
        ended, output, errors = in_process(["reproduce", *options], monkeypatch, capsys)
        assert (ended or 0) == code, errors
        return output + errors

    return reproduced


@pytest.fixture
def result_of(study, tmp_path):
    """By experiment, run and seed: where its result is."""
    return lambda experiment, run, seed: result_path(
        read_experiments(study)[experiment].config(run, seed), tmp_path / "out"
    )


@pytest.fixture
def trained(monkeypatch):
    """Every task that a run ends, as it does: name of the run, task."""
    seen, end_task = [], loop.Trainer.end_task

    def seeing(trainer, lane, t):
        seen.append((lane.config.name, t))
        return end_task(trainer, lane, t)

    monkeypatch.setattr(loop.Trainer, "end_task", seeing)
    return seen


def stop_after(tasks, monkeypatch):
    """Training is stopped, as by Ctrl-C, when so many tasks of stacks have ended."""
    finish_task, ended = loop.Trainer.finish_task, []

    def finishing(trainer, t):
        finish_task(trainer, t)
        ended.append(t)
        if len(ended) == tasks:
            trainer.save()
            trainer.writer.finish()
            raise Stopped(f"task {t + 1}")

    monkeypatch.setattr(loop.Trainer, "finish_task", finishing)


def diverge(method, seed, task, monkeypatch):
    end_task = learners.Learner.end_task

    def diverges(learner, t):
        if (learner.config.method, learner.config.seed, t) == (method, seed, task):
            raise DivergedError("the training diverged")
        end_task(learner, t)

    monkeypatch.setattr(learners.Regularized, "end_task", diverges)


def lose(paths):
    before = [results.read(path).accuracy for path in paths]
    for path in paths:
        path.unlink()
    return before


def contents(out):
    return {path: path.read_bytes() for path in out.glob("*_s*.json")}


@pytest.mark.parametrize(
    ("experiment", "run", "seed", "others"),
    [("long", "sgd-dropout", 0, 1), ("short", "sgd-dropout", 1, 1), ("short", "si", 0, 3), ("long", "alasso", 1, 3)],
)
def test_a_deleted_result_is_restored_to_the_last_digit_and_nothing_else_is_touched(
    experiment, run, seed, others, reproduce, result_of, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    (out / "again").mkdir(parents=True)
    (out / "again" / "thesis.txt").write_text("mine")
    reproduce()
    gone = result_of(experiment, run, seed)
    stack = results.read(gone).environment["stack"]
    assert len(stack) == results.read(gone).environment["lanes"] == others + 1 and gone.stem in stack
    before, left = lose([gone]), contents(out)

    said = reproduce("--plan")
    runs_beside = "1 other run" if others == 1 else f"{others} other runs"
    assert f"To do: 1 lost result, trained again with {runs_beside} of its stack; 11 already in" in said
    monkeypatch.setattr(lanes, "most_on", lambda device: 1)  # as large a stack as it was, whatever is usual now
    said = reproduce()
    assert "No claim rests on these experiments." in said and "verdict" not in said
    assert [results.read(gone).accuracy] == before and "not as before" not in said
    assert {path: content for path, content in contents(out).items() if path != gone} == left
    assert not list(out.glob(".again*")) and (out / "again" / "thesis.txt").read_text() == "mine"
    assert "Nothing to run: all 12 results" in reproduce("--plan")


def test_without_its_stack_a_run_that_draws_at_random_would_be_another(study):
    """What makes the test above one that can fail."""
    pair = [read_experiments(study)["short"].config("sgd-dropout", seed) for seed in (0, 1)]
    first, _ = train.run_together(pair, device="cpu")
    assert train.run(pair[0], device="cpu").accuracy != first.accuracy


def test_several_lost_at_once_and_a_stack_that_lost_both_lengths_is_trained_once(reproduce, result_of, trained):
    reproduce()
    gone = [result_of("long", "si", 0), result_of("short", "si", 0), result_of("short", "alasso", 1)]
    gone.append(result_of("short", "sgd-dropout", 0))
    before = lose(gone)
    assert "To do: 4 lost results, trained again with 4 other runs of their stacks; 8 already" in reproduce("--plan")
    trained.clear()
    reproduce("--quiet")
    assert [results.read(path).accuracy for path in gone] == before
    assert len(trained) == len(set(trained)) == 4 * 3 + 2 * 2  # four runs of three tasks, two of two


def test_what_was_lost_and_not_asked_for_comes_back_with_the_others(reproduce, result_of):
    reproduce()
    gone = [result_of("long", "si", 0), result_of("long", "alasso", 1)]
    before = lose(gone)
    assert "1 lost result, trained again with 3 other runs" in reproduce("--only", "long", "--seeds", 1, "--plan")
    reproduce("--only", "long", "--seeds", 1, "--quiet")
    assert [results.read(path).accuracy for path in gone] == before


@pytest.mark.parametrize("leftover", ["", "a result", "a checkpoint less", "different places"])
def test_a_stack_trained_again_can_be_stopped_and_gone_on_with(
    leftover, reproduce, result_of, tmp_path, monkeypatch, trained
):
    """As a whole: where it was killed while results were written, it is begun anew."""
    reproduce()
    gone = result_of("long", "sgd-dropout", 1)
    before = lose([gone])
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        assert "Stopped; saved up to task 2. Go on with:" in reproduce("--quiet", code=130)
    (aside,) = (tmp_path / "out").glob(".again-*")
    assert len(list(aside.glob("*.checkpoint"))) == 2 and not gone.exists()
    if leftover == "a result":
        other = result_of("long", "sgd-dropout", 0)
        raw = json.loads(other.read_text())
        raw["environment"]["finished"] = "later"
        (aside / other.name).write_text(json.dumps(raw))
        assert len(collect([tmp_path / "out"]).results) == 11, "nothing is shown twice"
    elif leftover == "a checkpoint less":
        next(aside.glob("*.checkpoint")).unlink()
    elif leftover == "different places":
        move_back(next(aside.glob("*.checkpoint")))
    trained.clear()
    reproduce("--quiet")
    assert [results.read(gone).accuracy] == before and not aside.exists()
    assert [t for _, t in trained] == ([0, 0, 1, 1, 2, 2] if leftover else [2, 2])


def move_back(checkpoint_file):
    """As if it had been killed before this one was written."""
    content = torch.load(checkpoint_file, weights_only=True)
    content["position"]["task"] -= 1
    torch.save(content, checkpoint_file)


def test_short_results_written_in_passing_do_not_keep_a_stack_from_being_gone_on_with(
    reproduce, result_of, monkeypatch, trained
):
    reproduce()
    gone = [result_of("long", "si", 0), result_of("short", "si", 0)]
    before = lose(gone)
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        reproduce("--quiet", code=130)
    trained.clear()
    reproduce("--quiet")
    assert [results.read(path).accuracy for path in gone] == before and {t for _, t in trained} == {2}


def test_folders_of_stacks_of_which_nothing_is_missing_any_more_are_removed(
    reproduce, result_of, tmp_path, monkeypatch
):
    """Stopped with one result lost; then a longer one is lost, too, and both come back from another stack."""
    reproduce()
    lose([result_of("short", "si", 0)])
    with monkeypatch.context() as patched:
        stop_after(1, patched)
        reproduce("--quiet", code=130)
    lose([result_of("long", "si", 0)])
    reproduce("--quiet")
    reproduce("--quiet")
    assert not list((tmp_path / "out").glob(".again-*"))


@pytest.mark.parametrize("task", [0, 1])
def test_a_run_that_diverged_is_not_lost_but_has_its_place_in_the_stack_again(
    task, reproduce, result_of, monkeypatch, trained
):
    """In the task in which the shorter run ends, or before."""
    diverge("si", 1, task, monkeypatch)
    assert "seed 1: the training diverged" in reproduce("--only", "long", "short").replace("\n", " ")
    trained.clear()
    reproduce("--only", "long", "short", "--quiet")
    assert not trained  # it is not tried once more, either

    gone = result_of("long", "si", 0)
    assert len(results.read(gone).environment["stack"]) == 4 and results.read(gone).environment["lanes"] == 3
    before = lose([gone])
    assert "lost result" in reproduce("--only", "long", "--quiet", "--plan")
    trained.clear()
    reproduce("--only", "long", "--quiet")
    assert [results.read(gone).accuracy] == before
    assert trained.count((result_of("long", "si", 1).stem, task)) >= 1


def test_a_lost_run_that_diverges_this_time_is_noted_and_not_tried_again(
    reproduce, result_of, monkeypatch, trained, tmp_path
):
    """As it may where anything else has changed."""
    reproduce("--only", "long", "--quiet")
    gone = result_of("long", "si", 1)
    lose([gone])
    diverge("si", 1, 1, monkeypatch)
    assert "the training diverged" in reproduce("--only", "long").replace("\n", " ")
    assert not gone.exists() and gone.with_suffix(".diverged").exists()
    trained.clear()
    reproduce("--only", "long", "--quiet")
    assert not trained and not list((tmp_path / "out").glob(".again-*"))


def test_runs_that_were_begun_are_gone_on_with_and_not_taken_for_lost(
    reproduce, result_of, tmp_path, monkeypatch, trained
):
    """Killed when two results of a stack of four were written."""
    out = tmp_path / "out"
    reproduce("--only", "long", "--quiet")
    whole = contents(out)
    before = lose(list(whole))
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        reproduce("--only", "long", "--quiet", code=130)
    assert len(list(out.glob("*.checkpoint"))) == 4
    for seed in (0, 1):
        written = result_of("long", "alasso", seed)
        written.write_bytes(whole[written])
        written.with_suffix(".checkpoint").unlink()
    trained.clear()
    assert "lost" not in reproduce("--only", "long")
    assert [results.read(path).accuracy for path in whole] == before
    assert sorted(t for name, t in trained if "_si_" in name) == [2, 2] and not list(out.glob("*.checkpoint"))


def test_a_result_whose_companions_come_out_otherwise_is_said_not_to_be_as_before(reproduce, result_of):
    reproduce()
    gone, beside = result_of("long", "sgd-dropout", 0), result_of("long", "sgd-dropout", 1)
    lose([gone])
    raw = json.loads(beside.read_text())
    raw["accuracy"][0][0] += 0.25
    beside.write_text(json.dumps(raw))
    said = reproduce().replace("\n", " ")
    assert (
        f"not as before: {beside.stem}, which was trained again beside what was lost, differs from its result" in said
    )
    assert gone.exists()


def test_companions_whose_results_are_of_another_stack_say_nothing(reproduce, result_of):
    """One was made again by itself since."""
    reproduce()
    gone, beside = result_of("long", "si", 1), result_of("long", "si", 0)
    before = lose([gone])
    raw = json.loads(beside.read_text())
    raw["accuracy"][0][0] += 0.25
    raw["environment"]["stack"] = [beside.stem]
    beside.write_text(json.dumps(raw))
    assert "not as before" not in reproduce() and [results.read(gone).accuracy] == before


def test_a_companion_that_diverges_this_time_is_said(tmp_path):
    stack = LostStack(tuple(STACK), tuple(STACK[3:]))
    for one in STACK[:3]:
        results.write(result_in_stack(one, STACK, diverged=[]), tmp_path)
    for one in (STACK[0], STACK[2], STACK[3]):
        results.write(result_in_stack(one, STACK, diverged=[STACK[1].name], lanes=3), tmp_path / "aside")
    (said,) = carrying.not_as_before(stack, tmp_path / "aside", tmp_path)
    assert said.startswith(f"{STACK[1].name}, which was trained again beside what was lost, differs")
    results.write(result_in_stack(STACK[1], STACK, diverged=[]), tmp_path / "aside")
    assert carrying.not_as_before(stack, tmp_path / "aside", tmp_path) == []


def test_a_shorter_run_of_a_benchmark_without_passing_through_is_trained_in_its_own_stack():
    """The classes of a split stream's tasks may depend on how many there are."""
    stacks = [[split_config(seed, tasks) for seed in (0, 1)] for tasks in (2, 3)]
    left = [result_in_stack(stack[1], stack) for stack in stacks]
    assert [one.runs for one in found([stack[0] for stack in stacks], left)] == [tuple(s) for s in reversed(stacks)]


def split_config(seed, tasks):
    return RunConfig.for_benchmark("split-cifar", "si", seed=seed, tasks=tasks)


def test_a_stack_that_the_memory_does_not_hold_any_more_is_said(reproduce, result_of, monkeypatch):
    reproduce()
    lose([result_of("long", "sgd-dropout", 0)])
    monkeypatch.setattr(train, "that_fit", lambda learner: 1)
    said = reproduce().replace("\n", " ")
    assert "not as before" in said and "this device does not hold the stack as one" in said


def test_time_table_and_data_count_lost_stacks(tmp_path):
    stack = LostStack(tuple(STACK), tuple(STACK[:1]))
    plan = make_plan([], None, tmp_path, lambda missing: Lost((stack,)))
    assert not plan.empty
    seconds = timing.estimate(plan, [], tmp_path, "abacus", lambda config: stopwatch.Pace(0.5, 0.0))
    assert seconds.again == seconds.seconds == 0.5 * counting.steps_in(STACK)
    cells = {column.header: list(column.cells) for column in show.plan_table(plan, seconds, []).columns}
    assert cells["runs"] == ["4"] and cells["about"] == [timing.roughly(seconds.again)]

    cifar = RunConfig.for_benchmark("split-cifar", "si")
    assert carrying.absent_data(
        make_plan([], None, tmp_path, lambda missing: Lost((LostStack((cifar,), (cifar,)),))), tmp_path
    )
    own = RunConfig.own("si")
    uncounted = make_plan([], None, tmp_path, lambda missing: Lost((LostStack((own,), (own,)),)))
    unknown = timing.estimate(uncounted, [], tmp_path, "abacus", lambda config: stopwatch.Pace(0.5, 0.0))
    assert unknown.sentence().startswith("not counting own")
    assert list(show.plan_table(uncounted, unknown, []).columns[-1].cells) == ["?"]


# -- what results say of stacks ---------------------------------------------------------------------------------


def config(method="si", seed=0, tasks=2):
    return RunConfig.for_benchmark("permuted-digits", method, seed=seed, tasks=tasks, epochs=1, hidden=8)


HERE = {"alasso": "1", "torch": "2", "cuda": "12", "gpu": "one", "cpu": "any"}


def result_in_stack(own, runs_of_stack, **environment):
    names = [one.name for one in runs_of_stack]
    where = {**HERE, "finished": "2025", "lanes": len(names), "stack": names}
    return Result(own, {**where, **environment}, {}, [[1.0], [1.0, 1.0]], [0.1], [0.1, 0.1], {}, 1.0, 1)


STACK = [config(method, seed) for method in ("si", "ewc") for seed in (0, 1)]


def found(missing, present, here=HERE):
    return list(lost_stacks(missing, present, [], lambda: here).stacks)


def test_results_that_are_left_tell_of_those_that_are_not():
    left, lost = STACK[:2], STACK[2:]
    assert found(lost, [result_in_stack(one, STACK) for one in left]) == [LostStack(tuple(STACK), tuple(lost))]
    assert found([config("mas")], [result_in_stack(one, STACK) for one in left]) == []


def test_what_the_stack_was_is_said_by_the_newest_result():
    other = [config("si", 0), config("ewc", 0)]
    newest, older = result_in_stack(other[0], other), result_in_stack(STACK[0], STACK, finished="2024")
    undated = result_in_stack(STACK[2], STACK, finished=None)
    assert found([other[1]], [older, undated, newest]) == [LostStack(tuple(other), (other[1],))]


@pytest.mark.parametrize("newer", [2, 3])
def test_of_two_lengths_the_longer_is_trained(newer):
    stacks = [[config("si", seed, tasks) for seed in (0, 1)] for tasks in (2, 3)]
    left = [result_in_stack(s[1], s, finished="2025" if s[1].tasks == newer else "2024") for s in stacks]
    (one,) = found([stack[0] for stack in stacks], left)
    assert one.runs == tuple(stacks[1]) and one.lost == (stacks[1][0], stacks[0][0])
    assert one.configs == [*stacks[1], stacks[0][0]]


def test_shorter_runs_that_nothing_tells_of_come_back_on_the_way_of_longer_ones():
    stack, shorter = ([config("si", seed, tasks) for seed in (0, 1)] for tasks in (3, 2))
    others = [config("si", 2, tasks=2), config("si", 1, tasks=4)]
    (one,) = found([stack[0], *shorter, *others], [result_in_stack(stack[1], stack)])
    assert one.runs == tuple(stack) and one.lost == (stack[0], *shorter)
    assert found(shorter, [result_in_stack(stack[1], stack)]) == []  # nothing says that they were ever there


@pytest.mark.parametrize("change", [{"gpu": "another"}, {"torch": "3"}, {"alasso": "2"}, {"cuda": None}])
def test_on_another_machine_or_with_other_versions_nothing_would_come_back_equal(change):
    left = [result_in_stack(one, STACK) for one in STACK[:3]]
    assert found(STACK[3:], left, {**HERE, **change}) == []
    assert len(found(STACK[3:], left, {**HERE, "cpu": "another"})) == 1  # the GPU is what computes


def test_runs_of_a_stack_are_known_by_any_seed_and_length():
    """Of a longer run in the stack, the study may hold neither this seed nor a shorter one by itself."""
    stack = [config("si", 7), config("ewc", 0)]
    known = [result_in_stack(stack[1], stack), result_in_stack(config("si", 1, tasks=3), [])]
    again = found([config("mas"), stack[0]], known)
    assert [one.runs for one in again] == [tuple(stack)]
    nobody = dataclasses.replace(config("si", 7), hidden=9)
    assert found([stack[0]], [result_in_stack(stack[1], [nobody, *stack])]) == []


def test_runs_whose_stack_is_not_known_any_more_are_counted():
    gone = [dataclasses.replace(config("si", seed), hidden=9) for seed in (7, 8)]
    stack = [*gone, *STACK]
    left = [result_in_stack(one, stack) for one in STACK[2:]]
    lost = lost_stacks(STACK[:2], left, [], lambda: HERE)
    assert (lost.stacks, lost.alone) == ((), tuple(STACK[:2])) and lost.unknown == {one.name for one in gone}
    older = result_in_stack(STACK[2], STACK, finished="2024")  # by which they come back after all
    assert lost_stacks(STACK[:2], [*left, older], [], lambda: HERE) == Lost(
        (LostStack(tuple(STACK), tuple(STACK[:2])),)
    )


def test_results_that_come_back_with_other_rounding_are_said(study, reproduce, result_of):
    reproduce("--only", "long", "--quiet")
    lose([result_of("long", "si", 0), result_of("long", "alasso", 0), result_of("long", "alasso", 1)])
    file = study / "experiments" / "long.toml"
    file.write_text(file.read_text().replace("alasso = {}\n", ""))
    (study / "experiments" / "short.toml").unlink()
    line = "1 result was trained in a stack of which 2 runs are no longer planned; it comes back with other rounding."
    for words in (["--plan"], []):
        said = " ".join(reproduce(*words).split())
        assert "To do: 1 run; 3 already" in said and line in said
    assert result_of("long", "si", 0).exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stack": None}, "its stack is no list of names"),
        ({"stack": 3}, "its stack is no list of names"),
        ({"stack": [["si"]]}, "its stack is no list of names"),
        ({"stack": [STACK[0].name, 3]}, "its stack is no list of names"),
        ({"stack": [STACK[0].name] * 2}, "its stack names a run twice, or not the run itself"),
        ({"stack": [STACK[1].name]}, "its stack names a run twice, or not the run itself"),
        ({"diverged": "si"}, "its diverged is no list of names"),
    ],
)
def test_a_result_with_a_damaged_stack_is_named_in_one_line(change, why, tmp_path):
    path = results.write(result_in_stack(STACK[0], STACK, **change), tmp_path)
    assert collect([tmp_path]).left_out == [f"{path} is not a result of alasso: {why}"]


@pytest.mark.parametrize("odd", ["permuted-digits_si_0123456789_s-4", "permuted-digits_si_0123456789_sx", "", "x"])
def test_a_stack_with_a_name_that_is_none_is_not_known(odd):
    left = result_in_stack(STACK[0], STACK)
    left.environment["stack"].append(odd)
    assert found(STACK[1:], [left]) == []


# -- runs that are stopped and gone on with ---------------------------------------------------------------------


def carried_out(configs, out, **options):
    how = runs.Options(out=out, device="cpu", quiet=True, **{"lanes": 2, **options})
    return [result.accuracy for result in runs.carry_out(configs, how, Console())]


def stopped_pair(out, monkeypatch):
    """Two runs that were begun as one stack, and stopped after their first task."""
    pair = [config("si", seed) for seed in (0, 1)]
    with monkeypatch.context() as patched:
        stop_after(1, patched)
        with pytest.raises(Stopped):
            carried_out(pair, out)
    return pair


@pytest.mark.parametrize("tasks", [1, 3, 4])
def test_a_sweep_that_was_stopped_goes_on_in_the_same_stacks(tasks, tmp_path, monkeypatch):
    """In other stacks, runs that draw at random would be others: stopped in the first stack, in the second, and where
    it ended.
    """
    seven = [config("sgd-dropout", seed) for seed in range(7)]  # in stacks of 3, 3 and 1
    whole = carried_out(seven, tmp_path / "whole", lanes=3)
    with monkeypatch.context() as patched:
        stop_after(tasks, patched)
        with pytest.raises(Stopped):
            carried_out(seven, tmp_path / "stopped", lanes=3)
    assert carried_out(seven, tmp_path / "stopped", lanes=3, resume=True) == whole


def test_runs_that_were_begun_in_two_stacks_go_on_in_one(tmp_path, monkeypatch, trained):
    three = [config("sgd-dropout", seed) for seed in range(3)]
    for pair, how in ((three[:2], {}), (three[1:], {"restart": True})):
        with monkeypatch.context() as patched:
            stop_after(1, patched)
            with pytest.raises(Stopped):
                carried_out(pair, tmp_path, **how)
    trained.clear()
    carried_out(three, tmp_path, resume=True)
    assert len(trained) == len(set(trained)) == 3


def test_fewer_lanes_than_were_begun_with_are_taken_at_their_word(tmp_path, monkeypatch):
    pair = stopped_pair(tmp_path, monkeypatch)
    how = runs.Options(tmp_path, device="cpu", resume=True, lanes=1)
    assert [result.environment["lanes"] for result in runs.carry_out(pair, how, Console(quiet=True))] == [1, 1]


@pytest.mark.parametrize("other", [{"method": "si"}, {}, "si"])
def test_what_is_no_config_is_refused(other):
    with pytest.raises(AlassoError, match=f"a run takes a RunConfig, not a {type(other).__name__}"):
        train.run(other)


def test_a_run_that_is_given_twice_is_refused(tmp_path):
    with pytest.raises(AlassoError, match=f"{config().name} is given twice"):
        train.run_together([config(), config()], device="cpu", out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_a_stack_draws_is_by_the_seed_of_its_last_run(monkeypatch):
    """Results of dropout, VCL and IMM that are there were drawn so."""
    drawn = []
    monkeypatch.setattr(loop.Trainer, "train", lambda trainer: drawn.append(torch.rand(1).item()))
    monkeypatch.setattr(loop.Lane, "result", lambda lane, environment, reference: None)
    for seeds in ([0, 1], [2, 1], [1, 2]):
        train.run_together([config("sgd-dropout", seed) for seed in seeds], device="cpu")
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("method", ["si", "sgd-dropout"])
def test_a_stack_that_was_stopped_in_the_middle_ends_where_it_would_have_to_the_last_bit(method, tmp_path):
    """With this width, how tensors lie in memory shows in how sums are rounded."""
    fields = {"tasks": 1, "epochs": 1, "hidden": 800}
    configs = [RunConfig.for_benchmark("permuted-digits", method, seed=seed, **fields) for seed in (0, 1)]

    def lanes_from(folder):
        saved = [results.checkpoint_path(one, folder) for one in configs]
        streams = make_streams(configs, None, CPU)
        begun = zip(configs, streams, saved, strict=True)
        return [train.begun(one, stream, None, CPU, file, file, train.Quiet()) for one, stream, file in begun]

    whole = lanes_from(tmp_path / "nowhere")
    loop.Trainer(whole, 1e9, lambda: False).train()
    for steps in (1, 9):
        with pytest.raises(Stopped):
            loop.Trainer(lanes_from(tmp_path), 1e9, StopAt(steps)).train()
        again = lanes_from(tmp_path)
        loop.Trainer(again, 1e9, lambda: False).train()
        for before, after in zip(map(everything, whole), map(everything, again), strict=True):
            assert all(torch.equal(before[part], after[part]) for part in before)
        for one in configs:
            results.checkpoint_path(one, tmp_path).unlink()


def test_a_run_that_goes_on_alone_remembers_the_stack_it_was_begun_with(tmp_path, monkeypatch):
    pair = stopped_pair(tmp_path, monkeypatch)
    (alone,) = runs.carry_out(pair[:1], runs.Options(tmp_path, device="cpu", resume=True, lanes=1), Console(quiet=True))
    assert alone.environment["stack"] == [one.name for one in pair] and alone.environment["lanes"] == 1


def test_what_a_run_draws_does_not_depend_on_what_is_trained_before_it(tmp_path, monkeypatch):
    """One goes on from a checkpoint, the other is new, so they are trained one after the other."""
    pair = [config("sgd-dropout", seed) for seed in (0, 1)]
    alone = [train.run(one, device="cpu").accuracy for one in pair]
    with monkeypatch.context() as patched:
        stop_after(1, patched)
        with pytest.raises(Stopped):
            train.run(pair[0], device="cpu", out=tmp_path)
    together = train.run_together(pair, device="cpu", out=tmp_path, resume=True)
    assert [result.accuracy for result in together] == alone


def test_a_stack_that_another_process_trains_again_is_left_alone(tmp_path):
    aside = tmp_path / ".again-0123"
    with taken(aside, ["x"]):
        carrying.tidy(tmp_path)
        assert aside.exists()
    carrying.tidy(tmp_path)
    assert not aside.exists()
