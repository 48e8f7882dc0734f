"""perf/everywhere.py runs from the command line to its figures, and computes them as it says."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "graph network, Adam" in done.stdout


def a_run(method, before, after, second, nan=False):
    times = {"milliseconds": 1.0, "added": 0.0, "ratio": 1.0}
    return {"setup": "one", "method": method, "before": before, "after": after, "second": second, "nan": nan, **times}


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
