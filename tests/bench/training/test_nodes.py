"""Runs on a Ray cluster of several local nodes: equal to those without, whatever is lost."""

import signal
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from alasso.bench import results
from alasso.bench.io import Taken, taken
from alasso.bench.training import nodes, sweep
from alasso.bench.training.progress import Observer, Pruned, Stopped
from alasso.errors import AlassoError, DivergedError

from made_up import small_paper
from run_helpers import in_process, numbers, small

#: Long enough for a node to be lost in the middle of one.
RUNS = [small(method, seed=seed, tasks=3, epochs=5) for method in ("sgd", "alasso", "kron-alasso") for seed in range(4)]

slow = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's remarks are not the point here


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        made.add_node(num_cpus=1)
    yield made
    import ray

    ray.shutdown()
    made.shutdown()


@pytest.fixture
def options(cluster, tmp_path):
    return lambda **changes: sweep.Options(tmp_path / "nodes", device="cpu", ray=cluster.address, **changes)


class Watching(Observer):
    """Does something at the end of a task."""

    def __init__(self, act, task=1):
        self.act, self.task = act, task

    def task_done(self, task, accuracy, seconds_left):
        if task == self.task:
            self.act()


class TestCluster:
    pytestmark = slow

    def test_twelve_runs_of_which_a_node_is_lost_equal_those_without(self, cluster, options, tmp_path, capsys):
        out = tmp_path / "nodes"
        lost = [next(iter(cluster.worker_nodes))]

        def lose_a_node():  # when each of them is in its first run
            if lost:
                threading.Thread(target=cluster.remove_node, args=[lost.pop(), False]).start()

        watch = Watching(lose_a_node)
        found = sweep.carry_out(RUNS, options(checkpoint_every=0.0), Console(width=200), watch=lambda config: watch)
        output = capsys.readouterr().out
        assert [result.config for result in found] == RUNS and "12 runs on Ray, 3 at a time" in output
        assert all(output.count(f", seed {seed}: task 3/3") == 3 for seed in range(4))
        assert output.count("starts again") == 1 and "resuming at" in output, output
        assert sorted(path.name for path in out.iterdir()) == sorted(f"{config.name}.json" for config in RUNS)
        sweep.carry_out(RUNS, sweep.Options(tmp_path / "here", device="cpu", quiet=True), Console(quiet=True))
        assert numbers(out) == numbers(tmp_path / "here")
        cluster.add_node(num_cpus=1)

    def test_ctrl_c_stops_all_nodes_and_they_resume_where_they_were(self, options, tmp_path):
        configs, out = [small("sgd", seed=seed, epochs=15) for seed in (0, 1)], tmp_path / "nodes"
        watch = Watching(lambda: signal.raise_signal(signal.SIGINT), task=0)
        with pytest.raises(Stopped, match=r"\d finished runs? and \d checkpoints?"):
            sweep.carry_out(configs, options(quiet=True), Console(), watch=lambda config: watch)
        assert len(list(out.glob("*.checkpoint"))) + len(list(out.glob("*.json"))) == 2
        assert list(out.glob("*.checkpoint")) and not list(out.glob(".*"))
        sweep.carry_out(configs, options(quiet=True, resume=True), Console())
        sweep.carry_out(configs, sweep.Options(tmp_path / "here", device="cpu", quiet=True), Console())
        assert numbers(out) == numbers(tmp_path / "here")
        assert not list(out.glob("*.checkpoint*"))

    def test_one_that_diverges_and_one_that_is_pruned_cost_the_others_nothing(self, options, tmp_path):
        configs = [small("sgd", learning_rate=1e38), small("sgd", epochs=200), small("sgd", seed=1)]

        def prune():
            raise Pruned

        with pytest.raises(DivergedError, match=r"seed 0: .*diverged.*; the other runs are finished"):
            sweep.carry_out(
                configs,
                options(quiet=True),
                Console(),
                watch=lambda config: Watching(prune if config == configs[1] else lambda: None),
            )
        names = {path.name for path in (tmp_path / "nodes").iterdir()}
        assert names == {f"{configs[0].name}.diverged", f"{configs[2].name}.json"}

    def test_a_node_refuses_what_it_cannot_train_in_one_line(self, options, cluster, tmp_path, monkeypatch, capsys):
        words = ["run", "permuted-mnist", "--tasks", 1, "--ray", cluster.address, "--out", tmp_path / "nodes"]
        code, _, errors = in_process([*words, "--data-dir", tmp_path], monkeypatch, capsys)
        assert code == 2 and "alasso data fetch" in errors and "(on " in errors and len(errors.splitlines()) == 1
        monkeypatch.setenv("ALASSO_COMMIT", "c0ffee0")
        code, _, errors = in_process(words, monkeypatch, capsys)
        assert code == 2 and "at commit c0ffee0: install the same on every node" in errors
        assert len(errors.splitlines()) == 1 and not list((tmp_path / "nodes").glob("*"))
        code, _, errors = in_process([*words, "--device", "cuda:1"], monkeypatch, capsys)
        assert code == 2 and "Ray gives each run a GPU; use auto, cpu or cuda" in errors


@pytest.mark.parametrize("command", ["run", "search", "reproduce"])
def test_every_command_that_sweeps_takes_the_address(command, tmp_path, monkeypatch, capsys):
    asked = []

    def stopped(configs, options, *rest, **more):
        asked.append(options.ray)
        raise Stopped("here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "carry_out", stopped)
    small_paper(tmp_path / "paper")
    words = {"run": ["permuted-digits"], "search": ["permuted-digits", "--file", "f.json"], "reproduce": []}[command]
    code, output, _ = in_process([command, *words, "--ray", "head:6379"], monkeypatch, capsys)
    assert code == 130 and asked == ["head:6379"] and "--ray head:6379" in output


def test_without_ray_a_line_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["run", "permuted-digits", "--tasks", 1, "--ray", "auto", "--out", tmp_path]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert (code, errors) == (2, "alasso: Ray is not installed: pip install 'alasso[ray]'\n")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_where_nobody_answers_is_refused_in_a_line(address, tmp_path, monkeypatch, capsys):
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: pytest.fail("would wait for minutes"))
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ray)
    words = ["run", "permuted-digits", "--tasks", 1, "--ray", address, "--out", tmp_path]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and errors.startswith(f"alasso: cannot join Ray at {address}: ") and len(errors.splitlines()) == 1


def test_a_worker_trains_as_the_process_that_asked_would(tmp_path, monkeypatch):
    """A node's part of the work, without a cluster."""
    letters, waited = [], []
    monkeypatch.setitem(
        sys.modules, "ray", SimpleNamespace(get=waited.append, exceptions=SimpleNamespace(RayError=OSError))
    )

    class Post:
        class put:
            @staticmethod
            def remote(letter):
                letters.append(letter)
                return len(letters)

    config = small("si")
    mark = tmp_path / "mark"
    mark.touch()
    how = {"device": "cpu", "data_dir": None, "resume": False, "checkpoint_every": 0.0}
    found = nodes.work(config, 7, Post, mark, 1, nodes.versions(), how)
    (there,) = sweep.carry_out([config], sweep.Options(tmp_path / "here", device="cpu", quiet=True), Console())
    assert (found.accuracy, found.metrics) == (there.accuracy, there.metrics)
    assert {number for number, *_ in letters} == {7} and waited == [len(letters)]
    assert [event for _, event, _ in letters if event.endswith(("n", "task_done"))] == ["begin"] + 3 * ["task_done"]
    assert results.checkpoint_path(config, tmp_path).exists()  # until who asked has written the result
    with pytest.raises(AlassoError, match=r"has alasso .*, this machine alasso 0.0: install the same on every node"):
        nodes.work(config, 8, Post, mark, 1, "alasso 0.0", how)
    monkeypatch.setattr(nodes, "LEASE", 0.0)
    with taken(tmp_path, config.name), pytest.raises(Taken, match=r"by another process.* \(on "):  # a search waits
        nodes.work(config, 9, Post, mark, 1, nodes.versions(), how)
