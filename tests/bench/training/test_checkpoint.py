"""Checkpoints: a run in pieces is the run; nothing else is taken for one."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from alasso import AlassoError
from alasso.bench import results
from alasso.bench.registry import METHODS
from alasso.bench.training import checkpoint
from alasso.bench.training import run as training
from alasso.bench.training.progress import Observer
from alasso.bench.training.run import Stopped, Trainer, run

from helpers import StopAt, same
from run_helpers import CPU, begun, finished, small


class StopsAfter(Observer):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps):
        self.stop = StopAt(steps)

    def step_done(self, task, epoch, done):
        if self.stop():
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def learners(monkeypatch):
    """Every learner that runs make, in this order."""
    made, make = [], training.make_learner
    monkeypatch.setattr(training, "make_learner", lambda *given: made.append(make(*given)) or made[-1])
    return made


def same_weights(one, other):
    return same(one.model.state_dict().values(), other.model.state_dict().values())


def stopped_and_resumed(config, out, steps):
    """Run in pieces of ``steps`` optimizer steps, each piece a new learner from the checkpoint."""
    for _ in range(1000):
        try:
            return finished(config, out=out, resume=True, observer=StopsAfter(steps))
        except Stopped:
            torch.rand(17)  # whatever else a process may do with the random state
    raise AssertionError("never finished")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_many_pieces_equals_the_undisturbed_one(method, tmp_path, learners):
    config = small(method)
    undisturbed = finished(config)
    pieces = stopped_and_resumed(config, tmp_path, steps=13)
    assert len(learners) > 3 and same_weights(learners[0], learners[-1])
    assert pieces.accuracy == undisturbed.accuracy
    assert pieces.ahead == undisturbed.ahead and pieces.untrained == undisturbed.untrained
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "changes", [{"optimizer": "sgd"}, {"memory": 20, "loss_clip": 1e-6}, {"reset_optimizer": True}]
)
def test_so_does_one_with_other_fields(changes, tmp_path, learners):
    config = small("alasso", **changes)
    undisturbed = finished(config)
    assert stopped_and_resumed(config, tmp_path, steps=29).accuracy == undisturbed.accuracy
    assert same_weights(learners[0], learners[-1])


def test_so_does_one_that_drops_nodes(tmp_path, learners):
    config = small("imm-mode", transfer="drop")
    undisturbed = finished(config)
    assert stopped_and_resumed(config, tmp_path, steps=29).accuracy == undisturbed.accuracy
    assert same_weights(learners[0], learners[-1])


def test_state_of_a_gpu_s_optimizer_is_taken_on_a_cpu(tmp_path):
    """How steps are made belongs to the device, not to the run."""
    learner = begun(small())
    learner.begin_task(0)
    learner.prepare(0)
    learner.step(0, learner.epoch_plan(0, 0)[0])
    state = learner.state_dict()
    state["optimizer"]["param_groups"][0].update(capturable=True, fused=None)
    other = begun(small())
    other.load_state_dict(state)
    assert other.optimizer.param_groups[0]["capturable"] is False and other.optimizer.param_groups[0]["fused"] is True


def test_checkpoints_come_by_the_clock_and_not_with_every_task(tmp_path, monkeypatch):
    """A large network writes gigabytes each time, and its tasks may take seconds."""
    tasks_saved = []
    monkeypatch.setattr(checkpoint.Writer, "save", lambda writer, path, at, learner: tasks_saved.append(at.task))
    run(small("sgd"), device="cpu", out=tmp_path / "never", checkpoint_every=1e9)
    assert tasks_saved == []
    run(small("sgd"), device="cpu", out=tmp_path / "always", checkpoint_every=0.0)
    assert set(tasks_saved) == {0, 1, 2}


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from alasso.bench.config import RunConfig
from alasso.bench.training import run as training
from alasso.bench.training.run import run

config = RunConfig.for_benchmark("permuted-digits", "alasso", tasks=4, epochs=25, hidden=16)
out, kills = Path(sys.argv[1]), 0
random.seed(4)
while kills < 10:
    child = os.fork()  # one process that has already imported torch: ten starts of an interpreter take a minute
    if child == 0:
        run(config, out=out, device="cpu", resume=True, checkpoint_every=0.05)
        os._exit(0)
    time.sleep(random.uniform(0.15, 0.45))
    if os.waitpid(child, os.WNOHANG) != (0, 0):
        break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills += 1
print(kills)
learners, make = [], training.make_learner
training.make_learner = lambda *given: learners.append(make(*given)) or learners[-1]
run(config, out=out, device="cpu", resume=True)
training.torch.save(learners[0].model.state_dict(), sys.argv[2])
"""


def test_killed_at_random_moments_and_resumed_gives_the_same_result(tmp_path, learners):
    """SIGKILL, ten times, wherever it happens to hit."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out, weights = tmp_path / "out", tmp_path / "weights.pt"
    words = [sys.executable, "-c", KILLER, str(out), str(weights)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 10, "the run ended before it had been killed ten times; make it longer"
    (file,) = out.iterdir()
    killed = results.read(file)
    assert killed.accuracy == finished(killed.config).accuracy
    assert same(torch.load(weights).values(), learners[0].model.state_dict().values())


def test_checkpoints_of_other_runs_and_other_files_are_refused(tmp_path):
    config, other = small(adam_eps=1e-7), small(a=5.0, adam_eps=1e-7)
    path, data = tmp_path / "x.checkpoint", {"digits": "scikit-learn"}
    writer = checkpoint.Writer()
    writer.save(path, checkpoint.Position(), begun(config))
    writer.finish()
    checkpoint.load(path, config, CPU, data)
    with pytest.raises(AlassoError, match="checkpoint of another run: settings differ"):
        checkpoint.load(path, other, CPU, data)
    with pytest.raises(AlassoError, match="checkpoint of another run: adam_eps differ"):
        checkpoint.load(path, small(), CPU, data)
    with pytest.raises(AlassoError, match="was trained on other data"):
        checkpoint.load(path, config, CPU, {"digits": "another edition"})
    assert checkpoint.config_in(path) == config
    older = torch.load(path)
    torch.save({**older, "version": 2}, tmp_path / "older.checkpoint")
    with pytest.raises(AlassoError, match=r"has version 2, this library reads 3; delete it to start over"):
        checkpoint.load(tmp_path / "older.checkpoint", config, CPU, data)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(AlassoError, match="not a checkpoint"):
        checkpoint.load(path, config, CPU, data)


def test_a_checkpoint_never_runs_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "pwned").touch, ())

    torch.save({"version": 1, "config": Evil()}, tmp_path / "x.checkpoint")
    with pytest.raises(AlassoError, match="not a checkpoint"):
        checkpoint.load(tmp_path / "x.checkpoint", small(), CPU, {})
    assert not (tmp_path / "pwned").exists()


def test_a_last_checkpoint_that_does_not_fit_costs_no_result(tmp_path, monkeypatch):
    config = small()

    @contextmanager
    def full(path):
        raise AlassoError("the disk is full")
        yield

    def end_task(self, t):
        real(self, t)
        if t == len(self.tasks) - 1:  # a checkpoint that is still being written when the run ends
            monkeypatch.setattr(checkpoint, "whole_file", full)
            self.save()

    real = Trainer.end_task
    monkeypatch.setattr(Trainer, "end_task", end_task)
    finished(config, out=tmp_path)
    assert results.read(tmp_path / f"{config.name}.json").accuracy


def test_a_result_that_cannot_be_written_costs_no_training(tmp_path, monkeypatch):
    config, steps = small("alasso"), []

    def full(path, content):
        raise AlassoError("the disk is full")

    with monkeypatch.context() as patched, pytest.raises(AlassoError, match="the disk is full"):
        patched.setattr(results, "write_whole", full)
        finished(config, out=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".checkpoint"]
    monkeypatch.setattr(Observer, "step_done", lambda *told: steps.append(told))
    assert finished(config, out=tmp_path, resume=True).accuracy and not steps
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert results.read(next(tmp_path.iterdir())).accuracy == finished(config).accuracy
