"""Experiments are read from files; a mistake is one line that names the file; the paper's are all there."""

from pathlib import Path

import pytest
from torch import nn

from alasso import ALASSO, AlassoError
from alasso.bench.config import RunConfig
from alasso.bench.registry import METHODS
from alasso.bench.reproduce.experiments import chosen, config_of, find_paper, read_experiments

from made_up import EXPERIMENT, experiment, small_paper

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


def test_the_small_version_changes_what_its_table_says(folder):
    small = read_experiments(folder, quick=True)
    assert list(small) == ["probe", "small"]  # the other one has none
    assert {config.tasks for config in small["small"].configs()} == {2} and small["small"].seeds == 1
    one = experiment(probe={"weights": 9}, quick={"weights": 2, "tasks": 2}).in_small()
    assert one.probe == {"weights": 2} and one.config("si").tasks == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[runs]", "[ruins]"), "'ruins'"),
        (("seeds", "sedes"), "'sedes'"),
        (('title = "Small"', ""), "missing 1 required positional argument: 'title'"),
        (("a = 3.0", "aa = 3.0"), "alasso has no setting 'aa'"),
        (("si = {}", "sii = {}"), "there is no method 'sii'"),
        (("permuted-digits", "permuted-digit"), "did you mean 'permuted-digits'?"),
        (("tasks = 3", "tasks = "), "not valid TOML"),
        (("seeds = 1", 'seeds = "1"'), "seeds must be a whole number from 1 on, not '1'"),
        (("seeds = 1", "seeds = 0"), "seeds must be a whole number from 1 on, not 0"),
        (('title = "Small"', 'title = "Small"\nprobe = { weights = 0 }'), "weights must be a whole number"),
        (('title = "Small"', 'title = "Small"\nprobe = { wieghts = 3 }'), "'wieghts'"),
        (("[quick]\ntasks = 2", "[quick]\ntaks = 2"), "no setting 'taks'"),
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
    assert {"alasso", "si", "single-task"} == set(found["cifar"].runs) == set(found["tiny-imagenet"].runs)
    assert found["tiny-imagenet"].config("alasso").image_size == 224
    assert all(found[name].seeds >= 3 for name in found if "tiny" not in name)


def test_the_ablations_are_those_of_the_library():
    found, model = read_experiments(PAPER)["mnist-30"], nn.Linear(2, 2)
    for run, preset in (("asymmetric-only", ALASSO.asymmetric_only), ("accurate-only", ALASSO.accurate_only)):
        settings, library = found.config(run).settings, preset(model, unmoved="moved_right").surrogate
        assert all(getattr(library, name) == settings[name] for name in METHODS["alasso"].settings)
