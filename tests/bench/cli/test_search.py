"""The command search."""

import json

import pytest

from alasso.bench.learners import base as learners
from alasso.bench.registry import METHODS
from alasso.bench.training import search, sweep
from alasso.errors import DivergedError

from run_helpers import in_process

SEARCH = ("search", "permuted-digits", "--method", "mas", "--tasks", 2, "--epochs", 1, "--device", "cpu", "-q")


@pytest.fixture
def diverging_mas(monkeypatch):
    """``lams``: with which of them MAS diverges, with seed 1 alone."""
    lams, end_task = set(), learners.Learner.end_task

    def diverges(learner, t):
        if learner.config.seed == 1 and learner.config.settings["lam"] in lams:
            raise DivergedError("the training diverged")
        end_task(learner, t)

    monkeypatch.setattr(learners.Learner, "end_task", diverges)
    return lams


def test_a_search_goes_on_without_settings_that_diverge(tmp_path, monkeypatch, capsys, diverging_mas):
    """Even if they do with one seed alone: what the others gave is not the whole of it."""
    monkeypatch.setitem(METHODS["mas"].search, "lam", (0.03, 0.1, 0.3))
    diverging_mas |= {0.1, 0.3}
    file = tmp_path / "outcome.json"
    words = (*SEARCH, "--seed", 0, 1, "--file", file, "--out", tmp_path / "runs")
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    outcome = json.loads(file.read_text())["methods"]["mas"]
    assert sorted(row["lam"] for row in outcome["tried"]) == [0.03]
    assert outcome["diverged"] == "mas lam=0.1, seed 1; mas lam=0.3, seed 1: the training diverged"
    assert output.splitlines()[-1].endswith(f"; left out: {outcome['diverged']}")
    assert "largest tried" not in output  # larger ones were


def test_a_search_all_of_whose_settings_diverge_chooses_none(tmp_path, monkeypatch, capsys, diverging_mas):
    monkeypatch.setitem(METHODS["mas"].search, "lam", (0.003, 0.01))
    diverging_mas |= {0.003, 0.01}
    file = tmp_path / "outcome.json"
    words = (*SEARCH, "--seed", 1, "--file", file, "--out", tmp_path / "runs")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "mas diverged with all of its settings: mas lam=0.003, seed 1; " in errors
    assert not file.exists()


def test_a_search_says_of_a_tie_that_nothing_was_found():
    tried = [{"c": c, "A": 0.8} for c in (0.1, 1.0, 10.0)] + [{"c": 100.0, "A": 0.7}]
    searched = {"tried": tried, "space": {"c": [0.1, 1.0, 10.0, 100.0]}}
    outcome = {"chosen": {"si": {"c": 0.1}}, "methods": {"si": searched}}
    said = "si: c=0.1, A = 0.800 on held-out examples (as good as 2 others of 4 tried, c: the smallest tried)"
    assert search.chosen_line(outcome, "si") == said


def test_a_search_ends_with_what_it_chose_and_how_good_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(METHODS["mas"].search, "lam", (0.1, 1.0))
    file = tmp_path / "outcome.json"
    code, output, errors = in_process((*SEARCH, "--file", file, "--out", tmp_path / "runs"), monkeypatch, capsys)
    assert code == 0, errors
    best = json.loads(file.read_text())["methods"]["mas"]["tried"][0]
    assert output.splitlines()[-1].startswith(f"mas: lam={best['lam']}, A = {best['A']:.3f} on held-out examples")


def test_a_search_tries_what_the_command_line_says_and_says_whom_it_does_not_concern(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(METHODS["si"].search, "c", (0.1,))
    monkeypatch.setitem(METHODS["si"].search, "xi", (0.1,))
    file = tmp_path / "outcome.json"
    words = ["search", "permuted-digits", "--method", "mas", "si", "--set", "lam=0.5,2", *SEARCH[4:-1]]
    code, output, errors = in_process((*words, "--file", file, "--out", tmp_path / "runs"), monkeypatch, capsys)
    assert code == 0 and "lam is not a setting of si: searched without it" in output, errors
    tried = json.loads(file.read_text())["methods"]
    assert [sorted(row["lam"] for row in tried["mas"]["tried"]), tried["si"]["space"]] == [
        [0.5, 2.0],
        {"c": [0.1], "xi": [0.1]},
    ]


def test_shards_train_the_grid_and_the_command_without_chooses(tmp_path, monkeypatch, capsys, diverging_mas):
    monkeypatch.setitem(METHODS["mas"].search, "lam", (0.03, 0.1, 0.3))
    diverging_mas |= {0.1}
    words = (*SEARCH, "--seed", 1, "--out", tmp_path / "runs")
    for i in (1, 2):
        call = (*words, "--file", tmp_path / "sharded.json", "--shard", f"{i}/2")
        code, output, errors = in_process(call, monkeypatch, capsys)
        assert code == 0 and "the same command without --shard chooses" in output, errors
        assert not (tmp_path / "sharded.json").exists()
    assert len(list((tmp_path / "runs").glob("*.json"))) == 2
    whole = (*words[:-1], tmp_path / "others", "--file", tmp_path / "whole.json")
    assert in_process(whole, monkeypatch, capsys)[0] == 0
    trained, train = [], sweep.run
    monkeypatch.setattr(sweep, "run", lambda config, **rest: trained.append(config) or train(config, **rest))
    assert in_process((*words, "--file", tmp_path / "sharded.json"), monkeypatch, capsys)[0] == 0
    assert [(config.settings["lam"], config.seed) for config in trained] == [(0.1, 1)]  # the one that diverged
    found = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("sharded", "whole")]
    assert found[0]["chosen"] == found[1]["chosen"]
    assert found[0]["methods"]["mas"]["tried"] == found[1]["methods"]["mas"]["tried"]
    call = (*words, "--file", tmp_path / "f.json", "--shard", "1/2", "--climb", 3)
    assert "--shard is for a grid" in in_process(call, monkeypatch, capsys)[2]
