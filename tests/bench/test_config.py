"""Configs: the paper's presets, mistakes named, fields that change nothing refused."""

import json

import pytest

from alasso import AlassoError
from alasso.bench import registry
from alasso.bench.config import RunConfig, from_toml, label, varying_settings

from run_helpers import small


def test_what_a_search_found_beside_one_word_is_not_taken_beside_another():
    found = RunConfig.for_benchmark("permuted-mnist", "online-ewc").settings
    assert (found["labels"], found["lam"]) == ("uniform", 0.3)
    assert RunConfig.for_benchmark("permuted-mnist", "online-ewc", labels="true").settings["lam"] == 100.0
    for same in ({"labels": "uniform"}, {"labels": None}, {"gamma": 0.9}):
        assert RunConfig.for_benchmark("permuted-mnist", "online-ewc", **same).settings["lam"] == 0.3
    assert RunConfig.for_benchmark("permuted-mnist", "online-ewc", labels="true", lam=2.0).settings["lam"] == 2.0
    assert RunConfig.for_benchmark("split-cifar", "alasso", omega_rule="si").settings["xi"] == 1e-3


def test_presets_hold_the_papers_settings():
    mnist = RunConfig.for_benchmark("permuted-mnist", "alasso")
    assert (mnist.tasks, mnist.epochs, mnist.batch_size, mnist.learning_rate, mnist.hidden) == (30, 20, 256, 1e-3, 2000)
    assert mnist.settings == {
        "a": 1.8, "c": 1.0, "a_prime": 1.0, "c_prime": 1.0, "epsilon": 1e-6, "epsilon_prime": 0.0, "xi": 0.1,
        "monotone": True, "omega_rule": "accurate", "unmoved": "moved_right",
    }  # fmt: skip
    cifar = RunConfig.for_benchmark("split-cifar", "alasso")
    assert (cifar.tasks, cifar.epochs, cifar.classes_per_task, cifar.settings["xi"]) == (30, 60, 3, 1e-3)
    tiny = RunConfig.for_benchmark("split-tiny-imagenet", "si")
    assert (tiny.tasks, tiny.batch_size, tiny.classes_per_task, tiny.image_size) == (30, 128, 6, 224)


def test_hash_ignores_the_seed_and_nothing_else():
    assert small(seed=0).hash == small(seed=1).hash != small(a=2.0).hash
    assert small(seed=0).name != small(seed=1).name


def test_config_survives_json():
    config = small(a=3.0)
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    older = {**config.to_json(), "seed": 2**32}  # no new run takes it
    assert RunConfig.from_json(older).seed == 2**32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "alaso"}, "no method 'alaso'; did you mean 'alasso'?"),
        ({"benchmark": "permuted-mist"}, "no benchmark 'permuted-mist'; did you mean 'permuted-mnist'?"),
        ({"epsilom": 1}, "no setting 'epsilom'; did you mean 'epsilon'?"),
        ({"lam": 1}, "alasso has no setting 'lam'"),
        ({"epochs": -1}, "epochs must be 1 or more, not -1"),
        ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
        ({"tasks": "many"}, "tasks must be a whole number, not 'many'"),
        ({"a": "big"}, "a must be a number, not 'big'"),
        ({"monotone": "perhaps"}, "monotone must be true or false"),
        ({"omega_rule": "exact"}, "omega_rule must be one of accurate, si"),
        ({"learning_rate": 0}, "learning_rate must be a positive number"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of adam, sgd"),
        ({"seed": -2}, "seed must be 0 or more"),
        ({"seed": 2**32}, "seed must be below 2³², not 4294967296"),
        ({"method": "online-ewc", "gamma": 3}, "gamma must lie between 0 and 1, not be 3.0"),
        ({"method": "ewc", "lam": 1e40}, "lam must be at most 3.4e+38, not 1e+40"),
        ({"method": "imm-mode", "last_weight": 1}, "last_weight must lie between 0 and 1, and below 1, not be 1.0"),
        ({"method": "vcl", "prior_var": 0}, "prior_var must be a finite number, 1e-30 or more, not 0.0"),
    ],
)
def test_mistakes_in_configs_name_the_field(changes, message):
    words = {"benchmark": "permuted-digits", "method": "alasso", **changes}
    with pytest.raises(AlassoError) as caught:
        RunConfig.for_benchmark(**words)
    assert message in str(caught.value)


SPLIT_ONES = "split-cifar, split-tiny-imagenet, split-folder"


@pytest.mark.parametrize(
    ("benchmark", "change", "message"),
    [
        (
            "permuted-digits",
            {"classes_per_task": 2},
            f"classes_per_task is for {SPLIT_ONES}; it changes nothing in per",
        ),
        ("permuted-mnist", {"image_size": 8}, f"image_size is for {SPLIT_ONES}; it changes nothing in permuted-mnist"),
        ("split-cifar", {"path": "images"}, "path is for split-folder; it changes nothing in split-cifar"),
        ("own-stream", {"image_size": 8}, "it changes nothing in own-stream"),
        (
            "split-cifar",
            {"permute_first": "yes"},
            "permute_first is for permuted-digits, permuted-mnist, permuted-fashion-mnist; it changes nothing in split",
        ),
        ("split-cifar", {"hidden": 100}, "hidden is for model=mlp; it changes nothing in cifar-cnn"),
    ],
)
def test_a_field_without_effect_is_refused_but_read_back(benchmark, change, message):
    with pytest.raises(AlassoError) as caught:
        RunConfig.for_benchmark(benchmark, "si", **change)
    assert message in str(caught.value)
    raw = {**RunConfig.for_benchmark(benchmark, "si").to_json(), **change}
    assert RunConfig.from_json(raw).hash  # a result from before this was refused


def test_a_field_at_rest_is_taken_everywhere():
    assert RunConfig.for_benchmark("split-cifar", "si", permute_first=False, path=None).hash
    assert RunConfig.for_benchmark("split-cifar", "si", model="mlp", hidden=50, image_size=16).hidden == 50


def test_toml(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('tasks = 2\nmethod = ["si", "alasso"]\nseed = [0, 1]\n[settings]\na = 3.0\n')
    assert from_toml(file) == ({"tasks": 2, "method": ["si", "alasso"], "seed": [0, 1]}, {"a": 3.0})
    file.write_text("taks = 2")
    with pytest.raises(AlassoError, match="no such field: 'taks'; did you mean 'tasks'"):
        from_toml(file)
    file.write_text("tasks = ")
    with pytest.raises(AlassoError, match="not valid TOML"):
        from_toml(file)


@pytest.mark.parametrize("eps", ["0", "-1", "1e-300", "inf"])
def test_adams_epsilon_must_be_a_positive_number(eps):
    with pytest.raises(AlassoError, match="adam_eps must be a positive number"):
        small(adam_eps=eps)
    with pytest.raises(AlassoError, match="adam_eps is for optimizer=adam"):
        small(adam_eps=1e-7, optimizer="sgd")


@pytest.mark.parametrize("clip", ["-1e-7", "0.5", "inf", "nan"])
def test_a_clip_of_the_loss_must_leave_something(clip):
    with pytest.raises(AlassoError, match="loss_clip must be 0 or more, and below"):
        small(loss_clip=clip)


def test_memory_beside_alasso_leaves_its_settings_as_they_are():
    for benchmark in registry.BENCHMARKS:
        if benchmark == "split-folder":
            continue
        alone, beside = (RunConfig.for_benchmark(benchmark, m).settings for m in ("alasso", "alasso-memory"))
        assert alone == beside, benchmark


def test_committed_searches_are_what_the_presets_use():
    for name, benchmark in registry.BENCHMARKS.items():
        for method, chosen in registry.searched(name).items():
            settings = RunConfig.for_benchmark(name, method).settings
            assert all(settings[key] == value for key, value in chosen.items()), (name, method)
            assert benchmark.settings[method] == chosen


def test_runs_of_a_sweep_over_many_settings_are_named_by_those_that_are_not_as_usual():
    usual, other = small(), small(xi=0.5)
    few = [usual, other, small("si")]
    many = [*few, small(a=3.0, hidden=9), small(epochs=7)]
    named = [[label(one, varying_settings(runs)) for one in runs] for runs in (few, many)]
    assert named[0] == ["alasso xi=0.01, seed 0", "alasso xi=0.5, seed 0", "si xi=0.01, seed 0"]
    assert named[1][:2] == ["alasso epochs=2 hidden=16, seed 0", "alasso xi=0.5 epochs=2 hidden=16, seed 0"]
    assert len(set(named[1])) == len(many)
