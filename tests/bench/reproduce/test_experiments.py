"""Experiments are read from files, and what a folder holds of their runs; a mistake is one line that names the file."""

import lzma
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from alasso import ALASSO, AlassoError
from alasso.bench import results
from alasso.bench.config import RunConfig
from alasso.bench.registry import METHODS
from alasso.bench.reproduce.experiments import Evidence, NotRun, chosen, config_of, find_paper, read_experiments
from alasso.bench.results import Divergence, write_note

from made_up import EXPERIMENT, PROBED, as_lines, evidence, experiment, probe, result, small_paper

PAPER = Path(__file__).parents[3] / "paper"


@pytest.fixture
def folder(tmp_path):
    return small_paper(tmp_path / "paper")


def test_a_run_is_its_preset_with_the_changes_of_experiment_and_run(folder):
    small = read_experiments(folder)["small"]
    expected = RunConfig.for_benchmark("permuted-digits", "alasso", tasks=3, epochs=1, hidden=8, a=3.0, seed=5)
    assert small.config("a=3", 5) == expected
    assert [config.method for config in small.configs(2)] == ["alasso", "alasso", "si", "si", "alasso", "alasso"]
    assert [config.seed for config in small.configs(2)] == [0, 1] * 3 and len(small.configs()) == 3
    assert config_of({"small": small}, "small/si") == small.config("si")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[runs]", "[ruins]"), "'ruins'"),
        (("seeds", "sedes"), "'sedes'"),
        (('title = "Small"', ""), "it lacks title"),
        (("a = 3.0", "aa = 3.0"), "alasso has no setting 'aa'"),
        (("si = {}", "sii = {}"), "there is no method 'sii'"),
        (("permuted-digits", "permuted-digit"), "did you mean 'permuted-digits'?"),
        (("tasks = 3", "tasks = "), "not valid TOML"),
        (("seeds = 1", 'seeds = "1"'), "seeds must be a whole number from 1 to 10000, not '1'"),
        (("seeds = 1", "seeds = 0"), "seeds must be a whole number from 1 to 10000, not 0"),
        (('title = "Small"', 'title = "Small"\nprobe = { weights = 0 }'), "weights must be a whole number"),
        (('title = "Small"', 'title = "Small"\nprobe = { wieghts = 3 }'), "'wieghts'"),
    ],
)
def test_a_mistake_names_the_file(folder, change, message):
    (folder / "experiments" / "small.toml").write_text(EXPERIMENT.replace(*change))
    with pytest.raises(AlassoError) as caught:
        read_experiments(folder)
    said = str(caught.value)
    assert message in said and said.count("small.toml") == 1 and "\n" not in said and "__init__" not in said


def test_names_that_there_are_not():
    both = {"x": experiment(), "y": experiment("y")}
    for reference in ("x", "z/si", "x/is"):
        with pytest.raises(AlassoError, match=r"no run|names no run"):
            config_of(both, reference)
    with pytest.raises(AlassoError, match=r"there is no folder nowhere/experiments: .* --paper$"):
        find_paper(Path("nowhere"))


def test_only_and_skip():
    found = read_experiments(PAPER)
    assert [one.id for one in chosen(found, ["cifar", "mnist-30"], [])] == ["mnist-30", "cifar"]
    assert "cifar" not in {one.id for one in chosen(found, [], ["cifar"])}
    with pytest.raises(AlassoError, match="no experiment 'cifr'; did you mean 'cifar'"):
        chosen(found, [], ["cifr"])
    with pytest.raises(AlassoError, match="no experiment is left"):
        chosen(found, ["cifar"], ["cifar"])


# -- the paper's ----------------------------------------------------------------------------------------------------


def test_the_papers_experiments_are_all_there():
    found = read_experiments(PAPER)
    ten = {"sgd", "sgd-dropout", "ewc", "si", "mas", "imm-mode", "vcl", "alasso", "single-task", "multi-task"}
    for name, tasks in (("mnist-30", 30), ("mnist-100", 100)):
        configs = found[name].configs()
        assert {c.method for c in configs} >= ten and {c.tasks for c in configs} == {tasks}
        assert found[name].config("asymmetric-only").settings["omega_rule"] == "si"
        accurate = found[name].config("accurate-only").settings
        assert (accurate["a"], accurate["epsilon"], accurate["omega_rule"]) == (1.0, 0.0, "accurate")
    for name in ("a-30", "a-100"):
        assert [c.settings["a"] for c in found[name].configs(1)] == [0.8, 1.0, 2.0, 3.0, 4.0, 5.0]
    coupled = found["decoupling"].config("coupled").settings
    assert all(coupled[f"{key}_prime"] == coupled[key] for key in ("a", "c", "epsilon"))
    assert found["memory"].config("alasso-memory").memory == 200
    assert found["memory"].config("vcl-coreset").settings["coreset"] == 200
    assert {"alasso", "si", "single-task"} < set(found["cifar"].runs) == set(found["tiny-imagenet"].runs)
    assert found["tiny-imagenet"].config("alasso").image_size == 224
    assert all(found[name].seeds >= 3 for name in found if "tiny" not in name and name != "digits-strength")


def test_runs_by_default_have_the_defaults_of_the_method():
    """What a benchmark's preset or a search sets otherwise is taken back, one by one."""
    found, by_default = read_experiments(PAPER), ("kron-alasso", "alasso-auto", "si-auto")
    full = [(name, run) for name in ("mnist-30", "mnist-100", "cifar", "tiny-imagenet") for run in by_default]
    in_small = [("digits-20", run) for run in found["digits-20"].runs if not run.endswith("-searched")]
    for name, run in (*full, *in_small):
        config = found[name].config(run)
        assert dict(config.settings) == METHODS[config.method].settings, (name, run)


def test_the_ablations_are_those_of_the_library():
    found, model = read_experiments(PAPER)["mnist-30"], nn.Linear(2, 2)
    for run, preset in (("asymmetric-only", ALASSO.asymmetric_only), ("accurate-only", ALASSO.accurate_only)):
        settings, library = found.config(run).settings, preset(model, xi=0.1).surrogate
        assert all(getattr(library, name) == settings[name] for name in METHODS["alasso"].settings)


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
    (tmp_path / "y.diverged").write_text("[" * 100_000)
    (tmp_path / "z.probe.json").write_text('{"losses": [[1e400]]}')
    found = Evidence.of_folder({"x": experiment()}, tmp_path)
    assert len(found.names) == 1
    assert found.left_out == {
        "x": f"{path}, line 2, is not a whole JSON file; delete it, and `alasso reproduce` trains it again",
        "y": f"{tmp_path / 'y.diverged'} is not a note of a diverged run; delete it to train the run again",
        "z.probe": f"{tmp_path / 'z.probe.json'} is not a measurement of alasso probe; delete it to measure again",
    }


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
