"""What lies in a folder: single files and JSON lines alike, notes of runs that diverged, probes, editions."""

import lzma
from dataclasses import replace

import pytest

from alasso import AlassoError
from alasso.bench import results
from alasso.bench.reproduce.evidence import Evidence, NotRun
from alasso.bench.results import Divergence, write_note

from made_up import PROBED, as_lines, evidence, experiment, probe, result


def test_single_files_and_lines_are_read_alike_and_the_newer_result_of_a_run_counts(tmp_path):
    one = experiment()
    old, kept, new = (result(one.config("si", seed), final) for seed, final in ((0, 0.5), (1, 0.6), (0, 0.7)))
    as_lines([old, kept], tmp_path / "x.jsonl")
    results.write(replace(new, environment={**new.environment, "finished": "2026"}), tmp_path)
    results.write(result(experiment(fields={"tasks": 2}).config("si"), 0.9), tmp_path)  # of no experiment
    (tmp_path / "parts.csv").write_text("left aside")
    found = Evidence.of_folder({"x": one}, tmp_path)
    assert found.values(["x/si"])["x/si"] == pytest.approx({0: 0.7, 1: 0.6})
    assert found.names == {old.name, kept.name} and len(found.results) == 2
    assert Evidence.of_folder({"x": one}, tmp_path / "nowhere").names == set()


def test_a_damaged_result_is_not_left_out_in_silence(tmp_path):
    path = as_lines([result(experiment().config("si"), 0.5)], tmp_path / "x.jsonl")
    path.write_text(path.read_text() + '{"config":\n')
    with pytest.raises(AlassoError, match=r"line 2, is not a whole JSON file; delete it, and `alasso reproduce` makes"):
        Evidence.of_folder({"x": experiment()}, tmp_path)


def test_notes_of_runs_that_diverged_count_until_there_is_a_result(tmp_path):
    one = experiment(seeds=1)
    for seed in (0, 1):
        write_note(Divergence(one.config("si", seed), 2 + seed, "it grew"), {}, tmp_path)
    found = Evidence.of_folder({"x": one}, tmp_path)
    assert found.how_it_diverged("x/si") == "diverged: seed 0 in task 2, seed 1 in task 3"
    assert found.divergences("x/alasso", "x/si").startswith("x/si diverged: seed 0") and found.all_diverged("x/si")
    results.write(result(one.config("si", 0), 0.5), tmp_path)
    found = Evidence.of_folder({"x": one}, tmp_path)
    assert found.how_it_diverged("x/si") == "diverged: seed 1 in task 3" and not found.all_diverged("x/si")


def test_probes_are_those_of_the_run_and_of_the_plan(tmp_path):
    one = experiment(runs={"alasso": {}, "other": {"method": "alasso", "a": 3.0}}, probe=PROBED)
    for seed in (0, 1):
        (tmp_path / f"{one.config('alasso', seed).name}.probe.json").write_bytes(probe(one, seed).as_file())
    packed = lzma.compress(probe(one, 2).as_file())
    (tmp_path / f"{one.config('alasso', 2).name}.probe.json.xz").write_bytes(packed)
    assert list(Evidence.of_folder({"x": one}, tmp_path).probes("x/alasso")) == [0, 1, 2]
    with pytest.raises(NotRun):
        Evidence.of_folder({"x": one}, tmp_path).probes("x/other")
    for change in ({"weights": 4}, {"offsets": 5}, {"span": 2.0}, {"examples": 6}):
        other = replace(one, probe={**PROBED, **change})
        with pytest.raises(NotRun):
            Evidence.of_folder({"x": other}, tmp_path).probes("x/alasso")


def test_editions_are_shown_in_full_where_there_are_several():
    one = evidence({"si": [0.5], "ewc": [0.5]}, data={"pets": "folder, 8 images of 2 classes, 1a2b3c4d"})
    assert one.edition(["x/si", "x/ewc"]) == "pets folder"
    other = replace(one.results[0], data={"pets": "folder, 9 images of 2 classes, 5e6f7a8b"})
    several = Evidence(one.experiments, [other, *one.results[1:]])
    said = "pets folder, 8 images of 2 classes, 1a2b3c4d and folder, 9 images of 2 classes, 5e6f7a8b"
    assert several.edition(["x/si", "x/ewc"]) == said
    assert evidence({"si": [0.5]}, data={"mnist": "official"}).edition(["x/si"]) == ""
