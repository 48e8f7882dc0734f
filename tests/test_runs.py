"""Runs: repeatable, resumable, refusing mistakes in one line, on data small enough to train in a second."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from alasso import AlassoError
from alasso.bench import io as atomic
from alasso.bench import io as taking
from alasso.bench import labels as naming
from alasso.bench import models, results
from alasso.bench import registry as catalog
from alasso.bench._make_streams import left_over, make_stream
from alasso.bench.cli import main as cli
from alasso.bench.config import RunConfig, from_toml
from alasso.bench.learners import base as learners
from alasso.bench.learners import losses
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.bench.streams import Stream, fingerprint, with_edition
from alasso.bench.training import checkpoint, progress, search
from alasso.bench.training import diverged as divergence
from alasso.bench.training import run as train
from alasso.bench.training import sweep as runs
from alasso.bench.training import trainer as loop
from alasso.bench.training.progress import CsvLog, Quiet
from alasso.bench.training.waypoints import on_the_way
from alasso.errors import DivergedError
from alasso.methods._classes import ALASSO, EWC, MAS, SI, OnlineEWC

from helpers import StopAt
from run_helpers import SMALL, SMALL_FLAGS, finished, in_process, small

# -- results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_repeats_bit_for_bit(method):
    one, two = finished(small(method)), finished(small(method))
    assert one.accuracy == two.accuracy and one.ahead == two.ahead
    assert [len(row) for row in one.accuracy] == [1, 2, 3]
    assert len(one.ahead) == 2 and len(one.untrained) == 3
    assert one.accuracy[0][0] > one.untrained[0]


def test_another_seed_is_another_run():
    assert finished(small(seed=1)).accuracy != finished(small(seed=2)).accuracy


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
        ({"accuracy": [["0.9"], [0.8, 0.9]]}, "accuracy must be a list of lists of numbers"),
        ({"accuracy": None}, "accuracy must be a list of lists of numbers"),
        ({"ahead": "x"}, "ahead must be a list of numbers"),
        ({"untrained": [True]}, "untrained must be a list of numbers"),
        ({"peak_memory": None}, "peak_memory must be a number"),
        ({"metrics": {"A": "0.9"}}, "metrics must be numbers, or null"),
        ({"data": {"digits": 3}}, "data must name editions, which are texts"),
        ({"environment": []}, "environment, data and metrics must be objects"),
    ],
)
def test_a_result_with_texts_for_numbers_is_refused(changes, why, tmp_path):
    path = results.write(finished(small("sgd")), tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AlassoError, match=f"{path.name} is not a result of alasso: {why}"):
        results.read(path)


def test_the_commit_that_stands_in_for_a_copys_own_is_one(monkeypatch):
    monkeypatch.setenv("ALASSO_COMMIT", "0123abc+")
    assert results.commit() == "0123abc+"
    monkeypatch.setenv("ALASSO_COMMIT", "HEAD")
    with pytest.raises(AlassoError, match="ALASSO_COMMIT must be a commit, as git rev-parse HEAD gives it, not 'HEAD'"):
        results.commit()


class AtEachStep(Quiet):
    def __init__(self, do):
        self.do = do

    def step_done(self, task, epoch, done):
        self.do()


def test_the_commit_is_that_of_when_training_began(monkeypatch):
    heads = ["1" * 40]
    monkeypatch.delenv("ALASSO_COMMIT", raising=False)
    monkeypatch.setattr(results, "_git", lambda _, verb, *__: heads[-1] if verb == "rev-parse" else "")
    results.source_commit.cache_clear()
    try:  # someone commits meanwhile
        result = train.run(small("sgd"), device="cpu", observer=AtEachStep(lambda: heads.append("2" * 40)))
        assert len(heads) > 1 and result.environment["commit"] == results.commit() == "1" * 40
    finally:
        results.source_commit.cache_clear()


def test_a_run_that_was_resumed_names_the_commits_before(monkeypatch, tmp_path):
    monkeypatch.setenv("ALASSO_COMMIT", "1111111")
    stop = StopAt(5)
    interrupting = AtEachStep(lambda: stop() and os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(train.Stopped):
        train.run(small("sgd"), device="cpu", out=tmp_path, observer=interrupting)
    monkeypatch.setenv("ALASSO_COMMIT", "2222222")
    result = train.run(small("sgd"), device="cpu", out=tmp_path, resume=True)
    assert (result.environment["commit"], result.environment["earlier_commits"]) == ("2222222", ["1111111"])


def test_a_commit_that_is_none_is_refused_before_training(monkeypatch, tmp_path):
    monkeypatch.setenv("ALASSO_COMMIT", "HEAD")
    steps = []
    with pytest.raises(AlassoError, match="ALASSO_COMMIT must be a commit"):
        train.run(small("sgd"), device="cpu", out=tmp_path, observer=AtEachStep(lambda: steps.append(1)))
    assert not steps and not list(tmp_path.glob("*.json")) and not list(tmp_path.glob("*.checkpoint"))


def test_a_result_that_lost_rows_is_refused(tmp_path):
    result = finished(small("sgd"))
    path = results.write(replace(result, accuracy=result.accuracy[:2]), tmp_path)
    with pytest.raises(AlassoError, match=rf"{path.name} .*it has 2 rows of accuracy for 3 tasks"):
        results.read(path)


def test_a_stream_of_another_length_than_was_asked_for_is_refused():
    x, y = torch.randn(12, 6), torch.arange(12) % 2
    with pytest.raises(AlassoError, match="stream must be a Stream, not a list"):
        train.run(small("sgd"), device="cpu", stream=[1, 2])
    with pytest.raises(AlassoError, match="tasks=5, but the stream has 1"):
        train.run(RunConfig.own("sgd", tasks=5), stream=Stream.of([((x, y), (x, y))]), device="cpu")


def test_accuracy_rows_stay_on_one_line(tmp_path):
    finished(small(), out=tmp_path)
    text = next(tmp_path.glob("*.json")).read_text()
    assert max(line.count("0.") for line in text.splitlines()) >= 3 and len(text.splitlines()) < 80


# -- configs ----------------------------------------------------------------------------------------------------


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


def test_catalog_defaults_are_those_of_the_library():
    """The catalog is plain data so that the command line starts fast; here it is held against the real thing."""
    model = nn.Linear(2, 2)
    for name, kind in (("alasso", ALASSO), ("si", SI), ("ewc", EWC), ("online-ewc", OnlineEWC), ("mas", MAS)):
        settings = {k: v for k, v in METHODS[name].settings.items() if k not in ("labels",)}
        library = kind(model).surrogate
        differing = {k for k, v in settings.items() if getattr(library, k) != v}
        assert differing == ({"unmoved"} if name == "alasso" else set())  # the harness runs as the authors did


def test_hash_ignores_the_seed_and_nothing_else():
    assert small(seed=0).hash == small(seed=1).hash != small(a=2.0).hash
    assert small(seed=0).name != small(seed=1).name


def test_config_survives_json():
    config = small(a=3.0)
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


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


def test_the_fields_that_a_benchmark_takes_change_its_stream(monkeypatch):
    """The catalog's declaration against what the streams are made of."""
    from alasso.bench import data

    def images(name, data_dir=None):
        few = {"cifar10": 10, "cifar100": 100, "tiny-imagenet": 200}.get(name, 10)
        pixels = np.zeros((2 * few, *((3, 8, 8) if few > 10 or name == "cifar10" else (8, 8))), dtype=np.uint8)
        labels = np.arange(2 * few) % few
        names = tuple(map(str, range(few)))
        return data.ImageSet(name, "toy", pixels, labels, pixels, labels, names)

    asked = []
    monkeypatch.setattr(data, "load", images)
    monkeypatch.setattr(data, "load_folder", lambda *of: asked.append(of) or images("folder"))
    tried = {"permute_first": True, "image_size": 6, "classes_per_task": 4, "path": "other"}
    for name in BENCHMARKS:
        plain = RunConfig.for_benchmark(name, "si", tasks=2, path="images" if name == "split-folder" else None)
        for field, value in tried.items():
            asked.clear()
            streams = [make_stream(c, None, torch.device("cpu")) for c in (plain, replace(plain, **{field: value}))]
            before, after = (
                (s.input_shape, s.classes, [t.train.pixels is None or t.train.pixels.tolist() for t in s.tasks])
                for s in streams
            )
            used = before != after or len(set(asked)) > 1
            assert used == (field in BENCHMARKS[name].takes), (name, field)


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


def test_combinations_are_all_of_them_and_none_twice():
    configs = runs.combinations("permuted-digits", ["sgd", "alasso"], [0, 1], SMALL, {"a": ["1", "2"]})
    assert [(c.method, c.settings.get("a"), c.seed) for c in configs] == [
        ("sgd", None, 0), ("sgd", None, 1),
        ("alasso", 1.0, 0), ("alasso", 1.0, 1), ("alasso", 2.0, 0), ("alasso", 2.0, 1),
    ]  # fmt: skip
    with pytest.raises(AlassoError, match="none of sgd, alasso has a setting 'zeta'"):
        runs.combinations("permuted-digits", ["sgd", "alasso"], [0], SMALL, {"zeta": ["1"]})


# -- resuming ---------------------------------------------------------------------------------------------------


def stopped_and_resumed(config, out, steps):
    """Run in pieces of ``steps`` optimizer steps, each piece a new learner from the checkpoint."""
    device = torch.device("cpu")
    stream = make_stream(config, None, device)
    saved = out / f"{config.name}.checkpoint"
    for _ in range(1000):
        lane = train.begun(config, stream, None, device, saved, saved, train.Quiet())
        try:
            loop.Trainer([lane], 1e9, StopAt(steps)).train()
        except train.Stopped:
            torch.rand(17)  # whatever else a process may do with the random state
            continue
        return lane.position
    raise AssertionError("never finished")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_many_pieces_equals_the_undisturbed_one(method, tmp_path):
    config = small(method)
    undisturbed = finished(config)
    pieces = stopped_and_resumed(config, tmp_path, steps=13)
    assert pieces.accuracy == undisturbed.accuracy
    assert pieces.ahead == undisturbed.ahead and pieces.untrained == undisturbed.untrained


def test_checkpoints_come_by_the_clock_and_not_with_every_task(tmp_path, monkeypatch):
    """A stack of runs writes gigabytes each time, and its tasks may take seconds."""
    tasks_saved = []
    monkeypatch.setattr(checkpoint.Writer, "save", lambda writer, path, config, at, *rest: tasks_saved.append(at.task))
    train.run(small("sgd"), device="cpu", out=tmp_path / "never", checkpoint_every=1e9)
    assert tasks_saved == []
    train.run(small("sgd"), device="cpu", out=tmp_path / "always", checkpoint_every=0.0)
    assert set(tasks_saved) == {0, 1, 2}


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from alasso.bench.config import RunConfig
from alasso.bench.training import run as train

config = RunConfig.for_benchmark("permuted-digits", "alasso", tasks=4, epochs=25, hidden=16)
out, kills = Path(sys.argv[1]), 0
random.seed(4)
while kills < 10:
    child = os.fork()  # one process that has already imported torch: ten starts of an interpreter take a minute
    if child == 0:
        train.run(config, out=out, device="cpu", resume=True, checkpoint_every=0.05)
        os._exit(0)
    time.sleep(random.uniform(0.15, 0.45))
    if os.waitpid(child, os.WNOHANG) != (0, 0):
        break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills += 1
print(kills)
train.run(config, out=out, device="cpu", resume=True)
"""


FACTORIES = """
import torch
from torch import nn
def good(input_shape, classes): return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, classes))
def takes_nothing(): return nn.Linear(64, 10)
def no_module(input_shape, classes): return 3
def no_weights(input_shape, classes): return nn.Flatten()
def narrow(input_shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes - 1))
def other_inputs(input_shape, classes): return nn.Linear(63, classes)
class Pair(nn.Linear):
    def forward(self, x): return x, x
def pair(input_shape, classes): return Pair(64, classes)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module of that name, beside which the command is run."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "factories", raising=False)


@pytest.mark.parametrize(
    "factory, said",
    [
        ("takes_nothing", r"'factories:takes_nothing' fails when it is called with \(\(64,\), 10\): TypeError: "),
        ("no_module", "'factories:no_module' must return an nn.Module with weights to train, not this int"),
        ("no_weights", "'factories:no_weights' must return an nn.Module with weights to train, not this Flatten"),
        ("narrow", r"must answer two inputs with a tensor of shape \(2, 10\), not \(2, 9\)"),
        ("other_inputs", r"'factories:other_inputs' cannot take inputs of shape \(64,\): RuntimeError: "),
        ("pair", r"must answer two inputs with a tensor of shape \(2, 10\), not tuple"),
    ],
)
def test_a_network_of_ones_own_that_cannot_answer_is_refused_before_training(factory, said, factories):
    with pytest.raises(AlassoError, match=said) as refusal:
        models.build(f"factories:{factory}", (64,), 10)
    assert "\n" not in str(refusal.value)


def test_asking_a_network_of_ones_own_leaves_no_trace(factories):
    torch.manual_seed(0)
    model, after = models.build("factories:good", (64,), 10), torch.rand(1)
    torch.manual_seed(0)
    expected = nn.Linear(64, 10)
    assert torch.equal(model[2].weight, expected.weight) and torch.equal(after, torch.rand(1))
    assert all(layer.training for layer in model.modules())


def test_killed_at_random_moments_and_resumed_gives_the_same_result(tmp_path):
    """SIGKILL, ten times, wherever it happens to hit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 10, "the run ended before it had been killed ten times; make it longer"
    (file,) = tmp_path.iterdir()
    killed = results.read(file)
    assert killed.accuracy == finished(killed.config).accuracy


def test_a_run_is_one_process_s_at_a_time(tmp_path, monkeypatch):
    configs = [small("sgd"), small("sgd", seed=1)]
    options = runs.Options(out=tmp_path, device="cpu", quiet=True)
    said = f"{configs[1].name} is being trained by another process"
    with taking.taken(tmp_path, [configs[1].name]):
        with pytest.raises(AlassoError, match=said):
            train.run(configs[1], device="cpu", out=tmp_path)
        with monkeypatch.context() as patched, pytest.raises(AlassoError, match=said):
            patched.setattr(train, "run_together", lambda *_, **__: pytest.fail("one was trained before the refusal"))
            runs.carry_out(configs, options, Console(quiet=True))
        runs.carry_out(configs[:1], options, Console(quiet=True))  # is nobody's
    runs.carry_out(configs, options, Console(quiet=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{config.name}.json" for config in configs)


def test_what_was_killed_stands_in_nobody_s_way(tmp_path):
    held = "import sys, time; from pathlib import Path; from alasso.bench.io import taken\n"
    held += "with taken(Path(sys.argv[1]), ['x']): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(AlassoError, match="another process"), taking.taken(tmp_path, ["x"]):
            pass
        process.kill()
    assert (tmp_path / ".x.lock").exists()
    with taking.taken(tmp_path, ["x"]):
        pass
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(taking.FileLock, "acquire", refuse)
    with taking.taken(tmp_path, ["x"]):
        assert not taking.is_anothers(tmp_path)  # which cannot be known, and is not assumed
        with taking.taken(tmp_path, ["x"]):
            assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]
    assert not list(tmp_path.iterdir())


def test_a_search_finds_out_first_whether_its_outcome_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(runs, "carry_out", lambda *_: pytest.fail("was run"))
    options = runs.Options(out=tmp_path / "out", device="cpu")
    with pytest.raises(AlassoError, match="cannot"):
        search.search("permuted-digits", ["si"], [0], {}, options, tmp_path / "file" / "f.json", Console())


@pytest.mark.parametrize(
    ("sent", "on_ctrl_c"),
    [
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_IGN),
        (signal.SIGHUP, signal.default_int_handler),  # the terminal was closed
    ],
)
def test_ctrl_c_and_a_polite_kill_stop_cleanly_and_say_how_to_go_on(sent, on_ctrl_c, tmp_path):
    """Also where a shell has Ctrl-C ignored, for what it puts in the background."""
    words = ["run", "permuted-digits", "--tasks", "50", "--epochs", "50", "--device", "cpu", "--out", str(tmp_path)]
    before = signal.signal(signal.SIGINT, on_ctrl_c)  # children inherit what is ignored
    process = subprocess.Popen(
        [sys.executable, "-m", "alasso", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    try:
        process.stdout.readline()  # the first task is done
        process.send_signal(sent)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
    assert process.returncode == 130 and "Traceback" not in errors
    assert f"alasso run permuted-digits --tasks 50 --epochs 50 --device cpu --out {tmp_path} --resume" in output
    assert list(tmp_path.glob("*.checkpoint"))


@pytest.mark.parametrize(("kind", "code"), [(BrokenPipeError, 141), (OSError, 2)])
def test_where_lines_cannot_be_written_training_stops_and_is_saved(kind, code, tmp_path, monkeypatch, capsys):
    """Nobody reads on, as in ``alasso run … | head -2``; or the disk is full that they go to."""
    spoken = []

    class Deaf(io.StringIO):
        def write(self, text):
            spoken.append(text)
            if sum("\n" in line for line in spoken) > 2:
                raise kind(errno.ENOSPC, "No space left on device")
            return len(text)

    words = ["run", "permuted-digits", "--tasks", 50, "--device", "cpu", "--out", tmp_path]
    monkeypatch.setattr(sys, "stdout", Deaf())
    monkeypatch.setattr(sys, "argv", ["alasso", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert [path.suffix for path in tmp_path.iterdir()] == [".checkpoint"]
    if code == 2:
        said = "alasso: cannot write the output: No space left on device\n"
        assert capsys.readouterr().err == said


def test_ctrl_c_pressed_twice_in_a_moment_is_one_request(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.stop_on_request() as asked:
        assert not asked()
        for moment in (100.0, 100.9):
            now[0] = moment
            signal.raise_signal(signal.SIGINT)
            assert asked()
        now[0] = 101.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_is_asked_for_in_the_last_moments_of_a_run_stops_the_runs_after_it(tmp_path, monkeypatch, capsys):
    finish_task = loop.Trainer.finish_task

    def interrupted(trainer, t):
        if t + 1 == len(trainer.lanes[0].stream):
            signal.raise_signal(signal.SIGTERM)
        finish_task(trainer, t)

    monkeypatch.setattr(loop.Trainer, "finish_task", interrupted)
    words = ["run", "permuted-digits", "--method", "sgd", "--seed", 0, 1, *SMALL_FLAGS, "--out", tmp_path]
    code, output, _ = in_process(words, monkeypatch, capsys)
    assert code == 130 and "Stopped; saved up to the end of a run. Go on with:" in output
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    code, _, _ = in_process([*words, "--resume"], monkeypatch, capsys)  # its last run: nothing is left to stop
    assert code == 0 and len(list(tmp_path.glob("*.json"))) == 2


def test_checkpoints_of_other_runs_and_other_files_are_refused(tmp_path):
    config, other = small(adam_eps=1e-7), small(a=5.0, adam_eps=1e-7)
    learner = train.make_learner(config, make_stream(config, None, torch.device("cpu")), None, torch.device("cpu"))
    path = tmp_path / "x.checkpoint"
    writer = checkpoint.Writer()
    writer.save(path, config, checkpoint.Position(), learner.state_dict(), torch.device("cpu"))
    writer.finish()
    with pytest.raises(AlassoError, match="checkpoint of another run: settings differ"):
        checkpoint.load(path, other, torch.device("cpu"))
    with pytest.raises(AlassoError, match="checkpoint of another run: adam_eps differ"):
        checkpoint.load(path, small(), torch.device("cpu"))
    with pytest.raises(AlassoError, match="was begun on other data"):
        checkpoint.load(path, config, torch.device("cpu"), {"digits": "another edition"})
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(AlassoError, match="not a checkpoint"):
        checkpoint.load(path, config, torch.device("cpu"))


def test_a_checkpoint_never_runs_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "pwned").touch, ())

    torch.save({"version": 1, "config": Evil()}, tmp_path / "x.checkpoint")
    with pytest.raises(AlassoError, match="not a checkpoint"):
        checkpoint.load(tmp_path / "x.checkpoint", small(), torch.device("cpu"))
    assert not (tmp_path / "pwned").exists()


# -- writing ----------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("before")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(AlassoError, match="the disk is full; free some space"):
        atomic.write_whole(tmp_path / "x.json", b"after")
    assert (tmp_path / "x.json").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_a_last_checkpoint_that_does_not_fit_costs_no_result(tmp_path, monkeypatch):
    config = small()

    @contextmanager
    def full(path):
        raise AlassoError("the disk is full")
        yield

    def end_task(self, lane, t):
        real(self, lane, t)
        if t == len(lane.stream) - 1:  # a checkpoint that is still being written when the run ends
            monkeypatch.setattr(checkpoint, "whole_file", full)
            self.save()

    real = loop.Trainer.end_task
    monkeypatch.setattr(loop.Trainer, "end_task", end_task)
    finished(config, out=tmp_path)
    assert results.read(tmp_path / f"{config.name}.json").accuracy


def test_the_names_of_committed_results_are_those_of_their_configs():
    """A field that came later must not rename runs from before it."""
    root = Path(__file__).parent.parent
    files = [path for folder in ("results", "records") for path in (root / folder).rglob("*_s*.json")]
    files = [path for path in files if not path.name.endswith(".probe.json")]
    assert files
    for path in files:
        assert f"{results.read(path).config.name}.json" == path.name


@pytest.mark.parametrize("eps", ["0", "-1", "1e-300", "inf"])
def test_adams_epsilon_must_be_a_positive_number(eps):
    with pytest.raises(AlassoError, match="adam_eps must be a positive number"):
        small(adam_eps=eps)
    with pytest.raises(AlassoError, match="adam_eps is for optimizer=adam"):
        small(adam_eps=1e-7, optimizer="sgd")


def test_adams_epsilon_reaches_the_optimizer():
    config = small(adam_eps=1e-3)
    learner = train.make_learner(config, make_stream(config, None, torch.device("cpu")), None, torch.device("cpu"))
    assert learner.optimizer.param_groups[0]["eps"] == 1e-3


@pytest.mark.parametrize("clip", ["-1e-7", "0.5", "inf", "nan"])
def test_a_clip_of_the_loss_must_leave_something(clip):
    with pytest.raises(AlassoError, match="loss_clip must be 0 or more, and below"):
        small(loss_clip=clip)


def test_a_clipped_loss_is_that_of_clipped_probabilities():
    """As Keras has it: −log clip(p), whose gradient is zero for an example beyond the clip, on either side."""
    outputs = torch.tensor([[9.0, 0, 0], [0, 2, 1], [-9, 0, 0]], dtype=torch.float64, requires_grad=True)
    y, clip = torch.tensor([0, 1, 0]), 1e-3
    each = losses.cross_entropies(outputs, y, clip)
    p = outputs.softmax(1)[range(3), y].clamp(clip, 1 - clip)
    torch.testing.assert_close(each, -p.log(), rtol=1e-12, atol=0)
    (got,) = torch.autograd.grad(losses.mean_cross_entropy(outputs, y, clip), outputs)
    (plain,) = torch.autograd.grad(losses.mean_cross_entropy(outputs, y, 0.0), outputs)
    assert got[0].tolist() == got[2].tolist() == [0, 0, 0]
    torch.testing.assert_close(got[1], plain[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "method", ["sgd", "sgd-dropout", "single-task", "multi-task", "alasso", "imm-mean", "imm-mode"]
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_run_that_diverges_costs_the_others_of_a_sweep_nothing(tmp_path, lanes, method):
    configs = runs.combinations(
        "permuted-digits", [method], [0], {"tasks": 2, "epochs": 1, "hidden": 8}, {"learning_rate": [1e38, 1e-3]}
    )
    options = runs.Options(out=tmp_path, device="cpu", quiet=True, lanes=lanes)
    said = method + r" learning_rate=1e\+38, seed 0: .*diverged.* smaller learning rate.*; the other runs are finished"
    with pytest.raises(DivergedError, match=said):
        runs.carry_out(configs, options, Console())
    assert {path.name for path in tmp_path.iterdir()} == {f"{configs[0].name}.diverged", f"{configs[1].name}.json"}
    note = divergence.read(divergence.note_path(configs[0], tmp_path))
    assert (note.config, note.task) == (configs[0], 1) and "diverged" in note.why


def test_a_run_finished_before_another_of_its_stack_diverged_is_not_run_again(tmp_path, monkeypatch):
    """Where the memory holds one at a time. A result from before does not stand for a run that is to be run again."""
    first, diverging, last = (small(seed=seed, learning_rate=rate) for seed, rate in ((0, 1e-3), (1, 1e38), (2, 1e-3)))
    results.write(replace(finished(last), seconds=12345.0), tmp_path)
    seeds = []
    train_whole = loop.Trainer.train
    monkeypatch.setattr(train, "that_fit", lambda learner: 1)
    monkeypatch.setattr(
        loop.Trainer, "train", lambda trainer: seeds.append(trainer.lanes[0].config.seed) or train_whole(trainer)
    )
    options = runs.Options(tmp_path, device="cpu", quiet=True, restart=True, lanes=3)
    with pytest.raises(DivergedError, match="the other runs are finished"):
        runs.carry_out([first, diverging, last], options, Console())
    assert seeds == [0, 1, 2]
    assert results.read(results.result_path(last, tmp_path)).seconds != 12345.0


@pytest.fixture
def trainings(monkeypatch):
    """Of every stack that is trained: which seeds, from which task on. Checkpoints take their time."""
    seen, train_whole, write = [], loop.Trainer.train, checkpoint._write

    def noted(trainer):
        seen.append(([lane.config.seed for lane in trainer.lanes], trainer.task))
        train_whole(trainer)

    def slowly(path, content):
        time.sleep(0.2)
        assert all(torch.isfinite(weight).all() for weight in content["learner"]["model"].values()), path
        write(path, content)

    monkeypatch.setattr(loop.Trainer, "train", noted)
    monkeypatch.setattr(checkpoint, "_write", slowly)
    return seen


def diverging(monkeypatch, when):
    """``when``: of seeds, the task in which they diverge."""
    ended = learners.Learner.end_task

    def end_task(learner, t):
        if when.get(learner.config.seed) == t:
            next(learner.model.parameters()).data.fill_(torch.nan)
        ended(learner, t)

    monkeypatch.setattr(learners.Learner, "end_task", end_task)


@pytest.mark.parametrize(
    ("when", "stacks"),
    [
        ({1: 1}, [([0, 1, 2, 3], 0), ([0, 2, 3], 2)]),
        ({1: 0, 3: 0}, [([0, 1, 2, 3], 0), ([0, 2], 1)]),
        ({1: 0, 3: 1}, [([0, 1, 2, 3], 0), ([0, 2, 3], 1), ([0, 2], 2)]),
        ({0: 2, 2: 2}, [([0, 1, 2, 3], 0), ([1, 3], 3)]),  # in the last task: nothing is left to be trained
    ],
)
def test_the_others_of_a_stack_go_on_as_a_stack_from_where_they_stand(when, stacks, tmp_path, monkeypatch, trainings):
    """No task is trained twice, of a run that diverged a note is left, and the others end where they would have."""
    configs = [small(seed=seed) for seed in range(4)]
    diverging(monkeypatch, when)
    lost = "; ".join(f"alasso, seed {seed}" for seed in when)
    with pytest.raises(DivergedError, match=rf"{lost}: .*diverged.*; the other runs are finished") as raised:
        runs.carry_out(configs, runs.Options(tmp_path, device="cpu", quiet=True, lanes=4), Console())
    assert [result.config.seed for result in raised.value.finished] == [s for s in range(4) if s not in when]
    assert trainings == stacks
    kinds = [f"{configs[s].name}{divergence.SUFFIX if s in when else '.json'}" for s in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kinds)
    for seed, t in when.items():
        assert divergence.read(divergence.note_path(configs[seed], tmp_path)).task == t + 1
    for result in raised.value.finished:
        undisturbed = finished(result.config)
        np.testing.assert_allclose(result.accuracy[-1], undisturbed.accuracy[-1], atol=0.02)
        assert [len(row) for row in result.accuracy] == [1, 2, 3]


def test_runs_of_a_sweep_over_many_settings_are_named_by_those_that_are_not_as_usual():
    usual, other = small(), small(xi=0.5)
    few = [usual, other, small("si")]
    many = [*few, small(a=3.0, hidden=9), small(epochs=7)]
    named = [[naming.label(config, naming.varying_settings(configs)) for config in configs] for configs in (few, many)]
    assert named[0] == ["alasso xi=0.01, seed 0", "alasso xi=0.5, seed 0", "si xi=0.01, seed 0"]
    assert named[1][:2] == ["alasso epochs=2 hidden=16, seed 0", "alasso xi=0.5 epochs=2 hidden=16, seed 0"]
    assert len(set(named[1])) == len(many)


def test_a_shorter_run_that_was_not_reached_diverged_too_and_notes_go_when_results_come(tmp_path, monkeypatch):
    shortest, shorter, longer = (small(seed=1, tasks=tasks) for tasks in (1, 2, 3))
    options = runs.Options(tmp_path, device="cpu", quiet=True)
    with monkeypatch.context() as patched:
        diverging(patched, {1: 1})
        with pytest.raises(DivergedError):
            runs.carry_out([shortest, shorter, longer], options, Console())
    notes = [divergence.read(path) for path in sorted(tmp_path.glob("*.diverged"))]
    assert {(note.config.name, note.task) for note in notes} == {(shorter.name, 2), (longer.name, 2)}
    said = [json.loads(path.read_text())["environment"] for path in tmp_path.glob("*.diverged")]
    assert all(one["stack"] == [longer.name] and one["lanes"] == 1 and one["torch"] for one in said)
    assert results.result_path(shortest, tmp_path).exists()
    runs.carry_out([shorter, longer], options, Console())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"{c.name}.json" for c in (shortest, shorter, longer))


@pytest.mark.parametrize("content", ["", "{}", '{"config": {}, "task": 1, "why": "x"}'])
def test_what_is_no_note_of_a_run_that_diverged_is_said_to_be_none(content, tmp_path):
    path = tmp_path / "x.diverged"
    path.write_text(content)
    with pytest.raises(AlassoError, match=r"x.diverged is no note of a run that diverged; delete it"):
        divergence.read(path)


def test_a_restart_never_goes_on_from_before(tmp_path):
    """Not even where a run of the same stack diverges, and the others are gone on with."""
    configs = runs.combinations(
        "permuted-digits", ["alasso"], [0], {"tasks": 2, "epochs": 1, "hidden": 8}, {"learning_rate": [1e30, 1e-3]}
    )
    kept = configs[1]
    undisturbed = train.run(kept, device="cpu")
    writer, position = checkpoint.Writer(), checkpoint.Position(1, accuracy=[[0.12345]], ahead=[0.1], untrained=[0, 0])
    stream = make_stream(kept, None, torch.device("cpu"))
    state = train.make_learner(kept, stream, None, torch.device("cpu")).state_dict()
    path = results.checkpoint_path(kept, tmp_path)
    writer.save(path, kept, position, state, torch.device("cpu"), stream.editions)
    writer.finish()
    with pytest.raises(DivergedError):
        runs.carry_out(configs, runs.Options(tmp_path, device="cpu", quiet=True, restart=True, lanes=2), Console())
    assert results.read(tmp_path / f"{kept.name}.json").accuracy == undisturbed.accuracy


class Heard(train.Quiet):
    """Keeps what it is told of epochs and tasks."""

    wants_epochs = True

    def __init__(self):
        self.epochs, self.tasks = [], []

    def epoch_done(self, t, epoch, loss, penalty, accuracy, seconds_left):
        self.epochs.append((t, epoch, loss, penalty, len(accuracy)))

    def task_done(self, t, accuracy, seconds_left):
        self.tasks.append((t, len(self.epochs)))


def test_what_is_told_later_as_on_a_gpu_is_the_same():
    heard = []
    for later in (False, True):
        config = small()
        stream = make_stream(config, None, torch.device("cpu"))
        lane = train.begun(config, stream, None, torch.device("cpu"), None, None, observer := Heard())
        trainer = loop.Trainer([lane], 1e9, lambda: False)
        trainer.tells_later = later
        trainer.train()
        heard.append(observer)
    assert heard[0].epochs == heard[1].epochs and len(heard[0].epochs) == 3 * 2
    assert heard[0].tasks == heard[1].tasks == [(t, 2 * (t + 1)) for t in range(3)]
    assert all(loss > 0 for _, _, loss, _, _ in heard[0].epochs)
    assert [penalty > 0 for _, _, _, penalty, _ in heard[0].epochs] == [False] * 2 + [True] * 4


def test_csv_log(tmp_path):
    log = CsvLog(tmp_path / "deep" / "x.csv")
    finished(small(), observer=log)
    log.close()
    lines = (tmp_path / "deep" / "x.csv").read_text().splitlines()
    assert lines[0] == "seconds,task,epoch,loss,penalty,learned,mean_accuracy"
    assert len(lines) == 1 + 3 * (2 + 1)  # epochs and the task's end, for each of three tasks


def test_a_single_shorter_run_is_named():
    short, long = small("si", tasks=2), small("si", tasks=4)
    said = naming.shorter_runs(on_the_way([long, short]), [long, short])
    assert said == "si tasks=2, seed 0 is saved along the way of the run with tasks=4"


def test_memory_beside_alasso_leaves_its_settings_as_they_are():
    for benchmark in catalog.BENCHMARKS:
        if benchmark == "split-folder":
            continue
        alone, beside = (RunConfig.for_benchmark(benchmark, m).settings for m in ("alasso", "alasso-memory"))
        assert alone == beside, benchmark


def test_resetting_the_optimizer_leaves_no_old_one_attached():
    config = small("alasso", reset_optimizer=True)
    stream = make_stream(config, None, torch.device("cpu"))
    learner = train.make_learner(config, stream, None, torch.device("cpu"))
    for t in range(3):
        learner.begin_task(t)
    assert len(learner.regularizer._attachments) == 1


def test_a_checkpoint_beside_a_result_does_not_stand_in_the_way(tmp_path, monkeypatch, capsys):
    config = small("sgd")
    results.write(finished(config), tmp_path)
    (tmp_path / f"{config.name}.checkpoint").write_bytes(b"killed between writing the one and removing the other")
    runs.check_folder([config], runs.Options(out=tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes_per_task": 4}, "2 of 6 classes left over, at 4 a task: added to the tasks there are"),
        ({"classes_per_task": 4, "tasks": 1}, "2 of 6 classes left over, at 4 a task: not used in 1 task"),
        ({"classes_per_task": 3}, None),
        ({"classes_per_task": 3, "tasks": 3}, None),  # too many: refused when the tasks are laid out
    ],
)
def test_left_over_classes_of_own_images_are_said_before_they_are_read(changes, said, tmp_path):
    for name in "abcdef":
        (tmp_path / name).mkdir()
        for i in range(2):
            (tmp_path / name / f"{i}.png").touch()  # no picture, only a name
    assert left_over(RunConfig.for_benchmark("split-folder", "si", path=str(tmp_path), **changes)) == said


def test_two_tensor_datasets_from_python():
    x = torch.randn(60, 6)
    first = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    second = torch.utils.data.TensorDataset(x, (x[:, 1] > 0).long())
    result = train.run(
        RunConfig.own("alasso", epochs=30, learning_rate=1e-2, hidden=32),
        stream=Stream.of([(first, first), (second, second)]),
    )
    assert result.accuracy[0][0] > 0.9 and len(result.accuracy) == 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(6, 2), r"model must be a function that makes a network, not this Linear: model=lambda: Linear\(…\)"),
        ("mlp", "model must be a function that makes a network, not 'mlp'; RunConfig takes names"),
        (lambda: None, "must return an nn.Module with weights to train, not this NoneType"),
        (lambda: nn.Linear(6, 1), r"must answer two inputs with a tensor of shape \(2, 2\), not \(2, 1\)"),
        (lambda: nn.Linear(5, 2), r"cannot take inputs of shape \(6,\): RuntimeError: "),
        (lambda shape, classes: nn.Linear(6, 2), "fails when it is called with nothing: TypeError: "),
    ],
)
def test_a_network_from_python_that_does_not_fit_is_refused_in_one_sentence(model, said, tmp_path):
    with pytest.raises(AlassoError, match=said):
        train.run(RunConfig.own("si", epochs=1), stream=customer(0), model=model, out=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_made_does_not_cost_what_was_begun(tmp_path):
    config = RunConfig.own("sgd", epochs=1, hidden=8)
    begun = results.checkpoint_path(config, tmp_path)
    begun.write_bytes(b"begun")
    with pytest.raises(AlassoError, match="must return an"):
        train.run(config, stream=customer(0), model=lambda: None, out=tmp_path, device="cpu")
    assert begun.read_bytes() == b"begun"


def test_images_with_their_channels_last_are_told_to_have_them_first():
    x, y = torch.rand(8, 8, 8, 3), torch.arange(8) % 2
    stream = Stream.of([((x, y), (x, y))])
    last = r"inputs of shape \(8, 8, 3\).*; channels come first: \(3, 8, 8\), as x.permute\(0, 3, 1, 2\) makes them"
    config = RunConfig.own("sgd", epochs=1, model="cifar-cnn")
    for model in (None, lambda: nn.Sequential(nn.Conv2d(3, 1, 8), nn.Flatten(), nn.Linear(1, 2))):
        with pytest.raises(AlassoError, match=last):
            train.run(config, stream=stream, model=model, device="cpu")
    first = x.permute(0, 3, 1, 2)
    train.run(config, stream=Stream.of([((first, y), (first, y))]), device="cpu")


def test_a_network_from_python_draws_what_it_drew_before_it_was_tried(tmp_path):
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.rand_like(x))

    def unchecked():
        torch.manual_seed(0)
        return [Noisy(6, 2).weight, torch.rand(1)]

    torch.manual_seed(0)
    drawn = [models.built_by(lambda: Noisy(6, 2), (6,), 2).weight, torch.rand(1)]
    assert all(torch.equal(*pair) for pair in zip(drawn, unchecked(), strict=True))


def test_folders_may_be_given_as_text(tmp_path):
    train.run(RunConfig.own("sgd", epochs=1, hidden=8), stream=customer(0), out=str(tmp_path / "out"), device="cpu")
    assert len(list((tmp_path / "out").glob("*.json"))) == 1


def customer(seed, name="own data", tasks=2):
    """Tasks that are like those of any other customer in all but what they hold."""
    x = torch.rand(40, 6, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(40) % 2
    return Stream.of([((x, y), (x[:10], y[:10]))] * tasks, name=name)


def test_a_result_is_not_written_over_by_one_on_another_stream(tmp_path):
    config = RunConfig.own("sgd", epochs=1, hidden=8)
    first = train.run(config, stream=customer(1, "A"), out=tmp_path, device="cpu")
    assert list(first.data) == ["A"] and re.fullmatch(
        r"own data, 100 examples in 2 tasks, [0-9a-f]{8}", first.data["A"]
    )
    before = (tmp_path / f"{config.name}.json").read_bytes()
    for other in (customer(2, "A"), customer(1, "B"), customer(1, "A", tasks=3)):
        with pytest.raises(
            AlassoError, match=r"\.json is of another stream \(A: own data, .*give another folder as out"
        ):
            train.run(config, stream=other, out=tmp_path, device="cpu")
    assert (tmp_path / f"{config.name}.json").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    train.run(config, stream=customer(2, "B"), out=tmp_path / "B", device="cpu")
    again = train.run(config, stream=customer(1, "A"), out=tmp_path, device="cpu")
    assert (again.data, again.accuracy) == (first.data, first.accuracy)
    results.write(replace(first, data={}), tmp_path)  # as before streams were told apart
    train.run(config, stream=customer(2, "A"), out=tmp_path, device="cpu")


@pytest.mark.parametrize("resume", [True, False])
def test_an_unfinished_run_on_another_stream_is_neither_gone_on_with_nor_thrown_away(resume, tmp_path):
    config = RunConfig.own("sgd", epochs=1, hidden=8)
    stream, device, path = with_edition(customer(1)), torch.device("cpu"), results.checkpoint_path(config, tmp_path)
    writer, state = checkpoint.Writer(), train.make_learner(config, stream, None, device).state_dict()
    writer.save(path, config, checkpoint.Position(), state, device, stream.editions)
    writer.finish()
    with pytest.raises(
        AlassoError, match=r"\.checkpoint is of another stream \(own data: own data, .*out, or delete it"
    ):
        train.run(config, stream=customer(2), out=tmp_path, resume=resume, device="cpu")
    assert path.exists()
    assert train.run(config, stream=customer(1), out=tmp_path, resume=resume, device="cpu").data == stream.editions


def test_a_streams_fingerprint_is_of_its_examples_and_their_places():
    x, y = torch.rand(50, 3, 40, 40), torch.arange(50) % 4
    swapped, brighter = y.clone(), x.clone()
    swapped[7], brighter[-1] = 3 - y[7], 1.0
    streams = [
        Stream.of([((x, y), (x, y))] * 2),
        Stream.of([((x, y), (x, y))] * 2, heads="own"),
        Stream.of([((x, y), (x, y))]),
        Stream.of([((x, swapped), (x, y))] * 2),
        Stream.of([((x, y), (brighter, y))] * 2),
        Stream.of([((x.view(50, 40, 3, 40), y),) * 2] * 2),
    ]
    assert len({fingerprint(stream) for stream in streams}) == len(streams)
    assert fingerprint(Stream.of([((x.double().numpy(), y), (x.clone(), y))] * 2)) == fingerprint(streams[0])


@pytest.mark.parametrize(
    ("device", "hidden", "resident", "threads"),
    [("cpu", 100, True, 1), ("cpu", 2000, True, 4), ("cuda", 2000, True, 1), ("cuda", 100, False, 4)],
)
def test_threads_are_left_alone_where_they_gain_something(device, hidden, resident, threads):
    model = torch.nn.Sequential(torch.nn.Linear(784, hidden), torch.nn.Linear(hidden, hidden))
    learner = SimpleNamespace(device=torch.device(device), model=model, resident=resident)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with train.few_threads_for(learner):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "shape", "size"),
    [("cpu", (784,), 256), ("cuda", (784,), 2674), ("cuda", (2,), 8192), ("cuda", (3, 224, 224), 256)],
)
def test_passes_over_a_task_go_in_pieces_that_a_gpu_is_kept_busy_by(device, shape, size):
    config = RunConfig.for_benchmark("permuted-mnist", "ewc")
    learner = SimpleNamespace(device=torch.device(device), config=config, stream=SimpleNamespace(input_shape=shape))
    assert learners.Regularized.assessed_at_once.fget(learner) == size


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_importance_does_not_depend_on_the_pieces_of_the_pass(method, monkeypatch):
    config = RunConfig.for_benchmark("permuted-digits", method, tasks=1, epochs=1, hidden=16)
    stream = make_stream(config, None, torch.device("cpu"))

    def importance(size):
        monkeypatch.setattr(learners.Regularized, "assessed_at_once", size)
        learner = train.begun(config, stream, None, torch.device("cpu"), None, None, train.Quiet()).learner
        learner.end_task(0)
        return learner.regularizer.importance()

    whole, pieces = importance(10**6), importance(100)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-4, atol=1e-9)
