"""The search by Optuna's TPE: what it tries, what it stops, and how processes share it."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from alasso.bench import results
from alasso.bench.learners import base as learners
from alasso.bench.training import search, sweep, trials
from alasso.bench.training.progress import Pruned, Stopped
from alasso.errors import AlassoError, DivergedError

from run_helpers import in_process, small

optuna = pytest.importorskip("optuna", reason="pip install '.[tune]'")

FIELDS = {"tasks": 3, "epochs": 1, "hidden": 8}


@pytest.fixture
def searched(tmp_path):
    file = tmp_path / "found.json"

    def call(count, method="mas", values=(("lam", ("0.01", "1000")),), seeds=(0,), quiet=True, **changes):
        options = sweep.Options(tmp_path / "runs", device="cpu", quiet=quiet, resume=True)
        arguments = ["permuted-digits", [method], list(seeds), {**FIELDS, **changes}, options, file, Console()]
        outcome = search.search(*arguments, dict(values), tpe=count)
        assert search.chosen_settings(file, "permuted-digits")[method] == outcome["chosen"][method]
        return outcome["methods"][method], outcome["chosen"][method]

    return call


@pytest.fixture
def best():
    """A study whose best trial had 0.9, 0.8 and 0.7 after its tasks."""
    study = optuna.create_study(direction="maximize")
    for values in ((0.2, 0.2, 0.2), (0.9, 0.8, 0.7)):
        trial = study.ask()
        for step, value in enumerate(values):
            trial.report(value, step)
        study.tell(trial, values[-1])
    return study


@pytest.mark.parametrize(
    ("rows", "stops"),
    [
        ([0.1], 0),  # below both 0.9 and 0.7
        ([0.75], None),  # below 0.9, but not below the end: it may forget less
        ([0.75, 0.69], 1),
        ([0.95, 0.85, 0.1], None),  # the end: nothing is left to stop
    ],
)
def test_what_is_below_the_best_at_the_same_task_and_at_the_end_stops(best, rows, stops):
    config = small("mas")
    tried = trials.Tried(best.ask(), {}, [config])
    watch = trials.ByTask(best, tried, config)
    watch.begin(config, range(3), 0, 1)
    accuracy, stopped = [], None
    for task, mean in enumerate(rows):
        accuracy.append([mean] * (task + 1))
        try:
            watch.task_done(task, accuracy, 0.0)
        except Pruned:
            stopped = task
    assert stopped == stops and tried.pruned == (stops is not None)
    assert tried.trial.study.get_trials()[-1].intermediate_values == pytest.approx(dict(enumerate(rows)))


def test_tpe_tries_what_it_is_told_and_a_larger_number_goes_on(searched, tmp_path):
    found, chosen = searched(5, seeds=(0, 1))
    assert len(found["tried"]) + found["stopped_early"] == 5 and found["stopped_early"] > 0
    assert all(0.01 <= row["lam"] <= 1000 and len(row["A_of_seeds"]) == 2 for row in found["tried"])
    assert chosen == {"lam": max(found["tried"], key=lambda row: row["A"])["lam"]}
    assert {row["lam"] for row in found["tried"]} >= {small("mas").settings["lam"]}  # the benchmark's own, first
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*.json")}
    assert len(files) >= 2 * len(found["tried"]) and not list((tmp_path / "runs").glob("*.checkpoint"))
    again, _ = searched(5, seeds=(0, 1))
    assert again["tried"] == found["tried"]
    more, _ = searched(6, seeds=(0, 1))
    assert len(more["tried"]) + more["stopped_early"] == 6
    assert all((tmp_path / "runs" / name).stat().st_mtime_ns == when for name, when in files.items())
    assert all(result.config.validation for result in results.read_all([tmp_path / "runs"]))


def test_a_trial_that_diverges_is_not_called_stopped_early_by_whoever_chooses(searched, monkeypatch, capsys):
    end_task = learners.Learner.end_task

    def diverges(learner, t):
        if learner.config.settings["lam"] == 50:
            raise DivergedError("the training diverged")
        end_task(learner, t)

    monkeypatch.setattr(learners.Learner, "end_task", diverges)
    values = (("lam", ("50",)),)
    for _ in range(2):  # the second finds it in the journal
        with pytest.raises(AlassoError, match=r"mas diverged with all of its settings: lam=50\.0: .*training diverged"):
            searched(1, values=values, quiet=False)
    assert capsys.readouterr().out.count("trial 1: lam=50.0: diverged") == 1


def test_words_and_a_single_value_are_searched_too(searched):
    found, chosen = searched(3, "alasso", (("c", ("1",)), ("xi", ("0.1",)), ("monotone", ("true", "false"))), tasks=2)
    assert {row["monotone"] for row in found["tried"]} <= {True, False} and {row["c"] for row in found["tried"]} == {1}
    assert chosen.keys() >= {"c", "xi", "monotone"}


def test_a_stopped_search_goes_on_with_the_settings_it_was_at(searched, monkeypatch):
    asked = []

    def stopped(configs, *rest, **options):
        asked.append([config.settings["lam"] for config in configs])
        raise error

    for error in (Stopped("task 1, epoch 1, step 1"), AlassoError("the disk is full")):
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(sweep, "carry_out", stopped)
            searched(1, values=(("lam", ("50", "1000")),))
    found, _ = searched(1, values=(("lam", ("50", "1000")),))
    assert [[row["lam"]] for row in found["tried"]] == asked[:1] == asked[1:]


def test_two_processes_share_a_search(tmp_path):
    """Of two words, so that both are given the same settings at the same time."""
    words = ["search", "permuted-digits", "--method", "alasso", "--tasks", "2", "--epochs", "1", "--device", "cpu"]
    words += ["--set", "monotone=true,false", "c=1", "xi=0.1", "--tpe", "4", "--out", str(tmp_path / "runs")]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "alasso", *words, "--file", str(tmp_path / f"{i}.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in (1, 2)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    study = optuna.load_study(
        study_name=None,
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "runs" / trials.JOURNAL))
        ),
    )
    assert 4 <= len(study.trials) <= 5 and all("trial " in output for output in said)
    chosen = [json.loads((tmp_path / f"{i}.json").read_text())["chosen"] for i in (1, 2)]
    assert chosen[0] == chosen[1]


def test_what_does_not_go_together_is_refused_in_a_line(tmp_path, monkeypatch, capsys):
    words = ["search", "permuted-digits", "--method", "mas", "--file", tmp_path / "f.json", "--out", tmp_path / "runs"]
    for more, said in (
        (["--tpe", 3, "--climb", 3], "--climb and --tpe are two ways to search: give one of them"),
        (["--tpe", 3, "--shard", "1/2"], "--shard is for a grid"),
        (["--tpe", 0], "invalid value for '--tpe'"),
    ):
        code, _, errors = in_process([*words, *more], monkeypatch, capsys)
        assert code == 2 and said in errors and len(errors.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(AlassoError, match=r"Optuna is not installed: pip install 'alasso\[tune\]'"):
        trials.library()
    assert not list(tmp_path.iterdir())
