"""Result files: written one a run, read one or many to a file, compressed or not; and all that are committed."""

import json
import lzma
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alasso import AlassoError
from alasso.bench import metrics, results
from alasso.bench.config import RunConfig
from alasso.bench.probe import read as read_probe
from alasso.bench.report.sections import collect
from alasso.bench.results import Result

from run_helpers import finished, small

PAPER = Path(__file__).parents[2] / "paper"


def made_up(seed=0, final=0.5):
    config = RunConfig.for_benchmark("permuted-digits", "si", tasks=3, epochs=1, hidden=8, seed=seed)
    accuracy = [[0.9], [0.8, 0.9], [final, final, final]]
    return Result(
        config=config,
        environment={"cpu": "abacus", "stack": ["one", "two"], "lanes": 2},
        data={"digits": "scikit-learn"},
        accuracy=accuracy,
        ahead=[0.1, 0.1],
        untrained=[0.1, 0.1, 0.1],
        metrics=metrics.summary(accuracy, ahead=[0.1, 0.1], untrained=[0.1] * 3),
        seconds=10.0,
        peak_memory=1,
    )


def packed(found, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(result.to_json()) + "\n" for result in found).encode()
    path.write_bytes(lzma.compress(content) if path.suffix == ".xz" else content)
    return path


def test_every_row_of_the_matrix_has_one_line(tmp_path):
    text = results.write(made_up(), tmp_path).read_text()
    assert ' "accuracy": [\n  [0.9],\n  [0.8, 0.9],\n  [0.5, 0.5, 0.5]\n ],\n' in text
    assert '  "stack": ["one", "two"],\n' in text and json.loads(text) == made_up().to_json()


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.xz"])
def test_several_results_in_one_file_are_read_as_if_each_had_its_own(name, tmp_path):
    both = [made_up(0), made_up(1, final=0.7)]
    path = packed(both, tmp_path / "deep" / name)
    assert list(results.read_all([path])) == list(results.read_all([tmp_path])) == both
    assert collect([tmp_path]).results == both
    with pytest.raises(AlassoError, match=r"x\.jsonl.* holds 2 results; name a file with one"):
        results.read(path)


def test_one_result_may_be_compressed(tmp_path):
    path = results.write(made_up(), tmp_path)
    squeezed = path.with_name(path.name + ".xz")
    squeezed.write_bytes(lzma.compress(path.read_bytes()))
    assert results.read(squeezed) == made_up()
    path.unlink()
    assert list(results.read_all([tmp_path])) == [made_up()]


def test_a_bad_line_is_named_and_the_others_are_read(tmp_path):
    path = packed([made_up()], tmp_path / "x.jsonl")
    path.write_text(path.read_text() + "{}\n\n{\n")
    good, *bad = results.read_all([tmp_path])
    assert good == made_up()
    assert [str(error) for error in bad] == [
        f"{path}, line 2, is not a result of alasso",
        f"{path}, line 4, is not a whole JSON file",
    ]


def test_a_damaged_archive_is_one_clear_line(tmp_path):
    path = tmp_path / "x.jsonl.xz"
    path.write_bytes(b"no archive")
    (error,) = results.read_all([path])
    assert str(error) == f"{path} is damaged or not a result file"


def test_a_path_that_does_not_exist_is_said(tmp_path):
    with pytest.raises(AlassoError, match=f"there is no file or folder {tmp_path / 'no'}"):
        list(results.read_all([tmp_path / "no"]))


def test_result_file_round_trip(tmp_path):
    result = finished(small(), out=tmp_path)
    path = tmp_path / f"{result.config.name}.json"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no checkpoint left, nothing half-written
    assert results.read(path) == result
    raw = json.loads(path.read_text())
    assert {"schema", "config", "environment", "accuracy", "metrics", "seconds", "peak_memory"} <= set(raw)
    assert {"A", "F", "I", "std"} <= set(raw["metrics"])
    assert raw["environment"]["torch"] == torch.__version__ and raw["environment"]["cpu"]
    assert raw["data"] == {"digits": "scikit-learn"}
    assert result.config.hash in path.name and f"_s{result.config.seed}" in path.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a whole JSON file"),
        ("[1]", "not a result"),
        ('{"schema": 99}', "schema this version does not know"),
        ('{"schema": 1, "config": {"benchmark": "permuted-digits"}}', "not a result"),
    ],
)
def test_reader_refuses_what_it_does_not_know(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(AlassoError, match=message):
        results.read(tmp_path / "x.json")
    with pytest.raises(AlassoError, match="cannot be read"):
        results.read(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"accuracy": [["0.9"], [0.8, 0.9]]}, r"accuracy\[1\] must be a list of numbers, not \['0.9'\]"),
        ({"accuracy": None}, "accuracy must be a list, not None"),
        ({"ahead": "x"}, "ahead must be a list of numbers"),
        ({"untrained": [True]}, "untrained must be a list of numbers"),
        ({"peak_memory": "1"}, "peak_memory must be a number"),
        ({"metrics": {"A": "0.9"}}, "metrics lacks F, I, std"),
        ({"metrics": dict.fromkeys(("A", "F", "I", "std"), "1")}, "metrics.A must be a number from -1 to 1, not '1'"),
        (
            {"metrics": {"A": 0.999, "F": None, "I": None, "std": None}},
            "metrics say A = 0.999, but the accuracies give",
        ),
        ({"data": {"digits": 3}}, "data.digits must be text, not 3"),
        ({"environment": []}, r"environment must be a table, not \[\]"),
    ],
)
def test_a_result_with_texts_for_numbers_is_refused(changes, why, tmp_path):
    path = results.write(finished(small("sgd")), tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AlassoError, match=f"{path.name} is not a result of alasso: {why}"):
        results.read(path)


def test_where_nobody_knows_the_peak_of_memory_the_result_says_so(tmp_path):
    unknown = replace(made_up(), peak_memory=None)  # as on Windows
    assert results.read(results.write(unknown, tmp_path)) == unknown


def test_a_result_that_lost_rows_is_refused(tmp_path):
    result = finished(small("sgd"))
    path = results.write(replace(result, accuracy=result.accuracy[:2]), tmp_path)
    with pytest.raises(AlassoError, match=rf"{path.name} .*it has 2 rows of accuracy for 3 tasks"):
        results.read(path)


def test_the_commit_that_stands_in_for_a_copys_own_is_one(monkeypatch):
    monkeypatch.setenv("ALASSO_COMMIT", "0123abc+")
    assert results.commit() == "0123abc+"
    monkeypatch.setenv("ALASSO_COMMIT", "HEAD")
    with pytest.raises(AlassoError, match="ALASSO_COMMIT must be a commit, as git rev-parse HEAD gives it, not 'HEAD'"):
        results.commit()


@pytest.mark.parametrize("content", ["", "{}", '{"config": {}, "task": 1, "why": "x"}'])
def test_what_is_no_note_of_a_run_that_diverged_is_said_to_be_none(content, tmp_path):
    path = tmp_path / "x.diverged"
    path.write_text(content)
    with pytest.raises(AlassoError, match=r"x.diverged is not a note of a diverged run; delete it"):
        results.read_note(path)


def test_every_committed_result_loads_under_its_own_name():
    """A field that came later must not rename runs from before it: the digest is part of the name."""
    found = list(results.read_all([PAPER]))
    assert len(found) >= 276 + 161 and all(isinstance(one, Result) for one in found)
    names = {one.name for one in results.read_all([PAPER / "results"])}
    assert len(names) >= 276
    for known in (
        "permuted-mnist_alasso_f2e84c3b00_s7",
        "permuted-mnist_alasso_2d9537b417_s0",
        "split-cifar_si_0172742d18_s7",
        "split-tiny-imagenet_alasso_81442905ff_s0",
    ):
        assert known in names


def test_the_measures_in_committed_results_are_those_of_their_accuracies():
    for one in results.read_all([PAPER / "results"]):
        again = metrics.summary(one.accuracy, ahead=one.ahead, untrained=one.untrained)
        for name, value in again.items():
            if value is not None:
                assert math.isclose(value, one.metrics[name], abs_tol=1e-9), (one.name, name)


def test_what_old_files_say_about_their_stack_is_kept():
    stacks = [one.environment.get("stack") for one in results.read_all([PAPER / "results"])]
    assert any(stack and len(stack) > 1 for stack in stacks)


def test_every_committed_probe_loads():
    files = sorted((PAPER / "results").glob("*.probe.json.xz"))
    assert [read_probe(path).seed for path in files] == [0, 1, 2]
