"""perf/everywhere.py runs from the command line to its figures, and computes them as it says."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alasso import EWC, SI

PERF = Path(__file__).parents[1] / "perf"


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return runpy.run_path(str(PERF / "everywhere.py"))


def test_one_set_up_with_one_method(tmp_path):
    out = tmp_path / "rows.json"
    choice = ["--only", "^graph network", "--methods", "EWC", "--jobs", "1", "--out", str(out)]
    done = subprocess.run([sys.executable, str(PERF / "everywhere.py"), *choice], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, ewc = json.loads(out.read_text())
    assert (plain["method"], ewc["method"]) == ("plain", "EWC")
    assert plain["before"] == ewc["before"] > 0.9
    assert plain["second"] > 0.9
    assert plain["after"] < ewc["after"] < plain["before"]
    assert plain["added"] == 0 < plain["milliseconds"]
    assert not ewc["nan"]
    assert (plain["verdict"], ewc["verdict"]) == ("", "balanced")
    assert "graph network, Adam" in done.stdout


def a_run(method, before, after, second, nan=False, verdict=""):
    accuracies = {"before": before, "after": after, "second": second, "nan": nan}
    times = {"milliseconds": 1.0, "added": 0.0, "ratio": 1.0}
    return {"setup": "one", "method": method, "verdict": verdict, **accuracies, **times}


def test_figures_against_plain_training(everywhere):
    rows = [
        a_run("plain", 1.0, 0.4, 0.9),
        a_run("plain", 0.9, 0.5, 0.9),
        a_run("good", 1.0, 0.8, 0.9),
        a_run("good", 0.9, 0.8, 0.8),
        a_run("bad", 0.9, 0.1, 0.1, nan=True),
        a_run("better", 1.0, 1.0, 0.95),
    ]
    found = everywhere["figures"](rows)
    methods = found["one"]
    assert methods["plain"]["lost"] == pytest.approx(0.5)
    assert methods["good"]["share"] == pytest.approx(0.7)  # from 0.45 to 0.80
    assert methods["good"]["price"] == pytest.approx(0.05)
    assert methods["bad"]["share"] == pytest.approx(-0.7)
    assert methods["better"]["share"] == 1.0
    assert everywhere["summary"](found, "bad")["nan"] == 1
    assert everywhere["summary"](found, "good")["half"] == 1
    assert everywhere["summary"](found, "bad")["half"] == 0


def test_verdicts_against_what_happened(everywhere, capsys):
    rows = [
        a_run("plain", 1.0, 0.4, 0.9),
        a_run("right", 1.0, 0.8, 0.85, verdict="balanced"),
        a_run("frozen", 1.0, 1.0, 0.7, verdict="balanced"),
        a_run("nothing", 1.0, 0.5, 0.9, verdict="too weak to matter"),
        a_run("unsaid", 1.0, 0.5, 0.9, verdict="unknown"),
    ]
    counts = everywhere["confusion"](rows, everywhere["figures"](rows))
    assert counts["balanced"] == {"too weak to matter": 0, "balanced": 1, "nearly frozen": 1}
    assert counts["too weak to matter"] == {"too weak to matter": 1, "balanced": 0, "nearly frozen": 0}
    assert counts["unknown"]["too weak to matter"] == 1
    everywhere["show_verdicts"](counts)
    assert "right: 2 of 4, 0.500" in capsys.readouterr().out


def test_a_case_has_a_factor_of_its_strength(everywhere):
    make = everywhere["regularizer"]
    model = torch.nn.Linear(2, 2)
    assert make("SI", model).c == SI(model).c
    assert make("SI x 100", model).c == pytest.approx(100 * SI(model).c)
    assert make("EWC x 0.01", model).lam == pytest.approx(0.01 * EWC(model).lam)


def test_bars_are_met_or_missed(everywhere, capsys):
    of = {"share": 0.8, "half": 8, "setups": 10, "price": 0.02, "worst price": 0.2, "nan": 0}
    everywhere["show_bars"](of)
    verdicts = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[3:]]
    assert verdicts == ["met", "missed", "met", "missed", "met"]


def test_a_package_that_is_missing_or_too_old(everywhere):
    assert not everywhere["is_missing"]("torch")
    assert not everywhere["is_missing"]("torch>=2.1")
    assert everywhere["is_missing"]("torch>=99.0")
    assert everywhere["is_missing"]("no-such-package-anywhere")
