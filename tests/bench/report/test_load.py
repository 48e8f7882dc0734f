"""What is read, and what is left out with a reason."""

import json
import re

import pytest

from alasso.bench import results
from alasso.bench.cli import report as commands
from alasso.bench.report import page
from alasso.bench.report.load import collect
from alasso.errors import AlassoError

from report_helpers import made_up, measured, several


@pytest.fixture
def folder(tmp_path):
    for result in several():
        results.write(result, tmp_path / "results")
    return tmp_path / "results"


def test_what_is_no_result_is_named_and_left_out(folder):
    (folder / "corrupt.json").write_bytes(b"\xff\xfe\x00garbage")
    (folder / "foreign.json").write_text('{"name": "package", "version": "1.0"}')
    whole = next(folder.glob("*sgd*.json")).read_text()
    (folder / "half.json").write_text(whole[: len(whole) // 2])
    found = collect([folder])
    assert len(found.results) == len(several())
    assert [re.search(r"(\w+)\.json", line)[1] for line in found.left_out] == ["corrupt", "foreign", "half"]


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": "abc"},
        {"accuracy": [["x"]]},
        {"accuracy": []},
        {"accuracy": [[2.0]]},
        {"config": []},
        {"config": {"settings": 3}},
        {"environment": "here"},
        {"metrics": None},
        {"seconds": "long"},
        {"schema": 99},
    ],
)
def test_a_result_with_a_wrong_part_is_left_out(tmp_path, change):
    raw = made_up().to_json()
    raw["config"] = raw["config"] | change.pop("config") if isinstance(change.get("config"), dict) else raw["config"]
    (tmp_path / "wrong.json").write_text(json.dumps(raw | change))
    found = collect([tmp_path])
    assert (len(found.results), len(found.left_out)) == (0, 1)
    assert "wrong.json" in found.left_out[0]


def test_a_missing_folder_is_one_clear_sentence(tmp_path):
    with pytest.raises(AlassoError, match="there is no file or folder"):
        collect([tmp_path / "nowhere"])


def test_several_files_and_folders_are_read_together_and_a_run_reached_twice_counts_once(tmp_path, capsys):
    one = results.write(made_up("si"), tmp_path / "one")
    results.write(made_up("alasso"), tmp_path / "two")
    results.write(made_up("si"), tmp_path / "copy")
    (tmp_path / "link.json").symlink_to(one)
    again = results.write(made_up("si", environment={"finished": "2026"}), tmp_path / "again")
    roundabout = tmp_path / "two" / ".." / "one"
    twice = [one, tmp_path / "one", roundabout, tmp_path / "copy", tmp_path / "link.json"]
    found = collect([*twice, tmp_path / "two"])
    assert sorted(result.config.method for result in found.results) == ["alasso", "si"]
    commands.report([*twice, tmp_path / "two"], output=tmp_path / "page.html")
    assert "page.html: 2 results" in capsys.readouterr().out
    html = (tmp_path / "page.html").read_text()
    assert "repeated" not in html.partition("<script>")[0]
    assert len(collect([one, again]).results) == 2  # run again: another run


def test_runs_that_diverged_are_named_where_they_have_no_result(tmp_path):
    ended, lost = made_up(a=2.0), made_up(a=3.0)
    results.write(ended, tmp_path)
    for one in (ended, lost):
        results.write_note(results.Divergence(one.config, 2, "0.weight is no longer finite"), {}, tmp_path)
    (tmp_path / "odd.diverged").write_text("")
    found = collect([tmp_path, *(path for path in tmp_path.iterdir() if path.is_file())])
    assert [result.name for result in found.results] == [ended.name]
    assert sorted(found.left_out) == sorted(
        [
            f"{lost.name} diverged in task 2: 0.weight is no longer finite",
            f"{tmp_path / 'odd.diverged'} is no note of a run that diverged; delete it, and the run is made again",
        ]
    )
    assert f"{lost.name} diverged in task 2" in page.build(found)


def test_runs_of_a_search_are_shown_alone_and_not_beside_others(tmp_path):
    """They were measured on held-out examples."""
    for seed in (0, 1):
        results.write(made_up(seed=seed, validation=True), tmp_path / "search")
    assert len(collect([tmp_path]).results) == 2 and not collect([tmp_path]).left_out
    results.write(made_up(), tmp_path)
    found = collect([tmp_path])
    assert [result.config.validation for result in found.results] == [False]
    assert found.left_out == ["2 runs of a search, measured on held-out examples; to see them, name their folder alone"]


def test_probes_are_found_beside_results(tmp_path):
    results.write(made_up(), tmp_path)
    probe = measured([[1.5, 1.0, 3.0], [1.0, 1.0, 1.0]])
    (tmp_path / "x.probe.json").write_bytes(probe.as_file())
    (tmp_path / "y.probe.json").write_text("{}")
    found = collect([tmp_path])
    assert found.probes == [probe] and len(found.results) == 1
    (line,) = found.left_out
    assert line == f"{tmp_path / 'y.probe.json'} is not a measurement of alasso probe; delete it to measure again"
