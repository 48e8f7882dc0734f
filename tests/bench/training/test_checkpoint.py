"""Checkpoints: a run in pieces is the run; nothing else is taken for one."""

import hashlib
import io
import os
import random
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from alasso import AlassoError
from alasso.bench import results, sealed
from alasso.bench.registry import METHODS
from alasso.bench.training import checkpoint
from alasso.bench.training import run as training
from alasso.bench.training.progress import Observer
from alasso.bench.training.run import Stopped, Trainer, run

from helpers import StopAt, same
from run_helpers import CPU, SMALL_FLAGS, begun, break_off, command, finished, in_process, small


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
    path.write_bytes(path.read_bytes().replace(b"checkpoint 4 ", b"checkpoint 5 ", 1))
    with pytest.raises(AlassoError, match=r"has version 5, this library reads 4; delete it to start over"):
        checkpoint.load(path, config, CPU, data)
    torch.save({"version": 3, "config": config.to_json()}, path)
    with pytest.raises(AlassoError, match="is of an earlier version of alasso; delete it to start over"):
        checkpoint.load(path, config, CPU, data)
    assert checkpoint.config_in(path) is None


def written(path, config, content):
    """A checkpoint with this in place of what a learner wrote, and good digests."""
    head = {"config": config.to_json(), "data": {"digits": "scikit-learn"}, "position": asdict(checkpoint.Position())}
    checkpoint._write(path, head, content)


def test_a_checkpoint_never_runs_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "pwned").touch, ())

    written(tmp_path / "x.checkpoint", small(), Evil())
    with pytest.raises(AlassoError, match="not a checkpoint"):
        checkpoint.load(tmp_path / "x.checkpoint", small(), CPU, {"digits": "scikit-learn"})
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("body", [b"", b"no zip", bytes(1000)])
def test_nor_is_a_body_that_torch_cannot_read_taken_for_one(body, tmp_path):
    path, config = tmp_path / "x.checkpoint", small()
    written(path, config, {})
    _, head, _ = path.read_bytes().split(b"\n", 2)
    head += b"\n"
    path.write_bytes(sealed.first_line(head, hashlib.sha256(head + body).hexdigest()) + head + body)
    with pytest.raises(AlassoError, match=r"is not a checkpoint of alasso; delete it to start over"):
        checkpoint.load(path, config, CPU, {"digits": "scikit-learn"})


@pytest.fixture
def two(tmp_path):
    """A run broken off with two checkpoints, and the newest one's file."""
    config, out = small("alasso"), tmp_path / "out"
    for steps in (29, 29):
        with pytest.raises(Stopped):
            finished(config, out=out, resume=True, observer=StopsAfter(steps))
    path = results.checkpoint_path(config, out)
    assert len(checkpoint.kept(path)) == 2
    return config, path


def damages(content):
    """The same file with each of its regions damaged in several ways."""
    size, rng = len(content), random.Random(0)
    for place in [*range(0, 700, 7), *(rng.randrange(size) for _ in range(100))]:
        yield content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
        yield content[:place] + bytes(min(512, size - place)) + content[place + 512 :]
        yield content[:place]
    yield rng.randbytes(size)
    yield content + b"x"


def test_no_damage_to_any_part_of_a_checkpoint_gets_through(two):
    path = two[1]
    content = path.read_bytes()
    sealed.read(path)
    for damaged in damages(content):
        path.write_bytes(damaged)
        if damaged != content:
            with pytest.raises(sealed.Damaged):
                sealed.read(path)


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_gone_back_to(two):
    config, path = two
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    undisturbed = finished(config)
    with pytest.warns(UserWarning, match=r"is damaged: resuming from the checkpoint before it"):
        again = finished(config, out=path.parent, resume=True)
    assert again.accuracy == undisturbed.accuracy and [file.suffix for file in path.parent.iterdir()] == [".json"]


def test_so_is_one_that_is_gone(two):
    config, path = two
    path.unlink()
    with pytest.warns(UserWarning, match=r"is gone: resuming from the checkpoint before it"):
        assert finished(config, out=path.parent, resume=True).accuracy == finished(config).accuracy


def test_the_damaged_one_does_not_take_the_place_of_the_good_one_before(two):
    config, path = two
    path.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(Stopped):
        finished(config, out=path.parent, resume=True, observer=StopsAfter(3))
    for file in checkpoint.kept(path):
        sealed.read(file)
    assert len(checkpoint.kept(path)) == 2


def test_where_both_are_damaged_nothing_is_resumed_and_nothing_lost(two, monkeypatch, capsys):
    path = two[1]
    for file in checkpoint.kept(path):
        file.write_bytes(file.read_bytes()[1:])
    words = ["run", "permuted-digits", "--method", "alasso", *SMALL_FLAGS, "--out", path.parent, "--resume"]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1
    assert f"{path} and the checkpoint before it are damaged; delete both to start over" in errors
    assert len(checkpoint.kept(path)) == 2
    code, _, errors = in_process([*words[:-1], "--restart"], monkeypatch, capsys)
    assert code == 0 and not checkpoint.kept(path), errors


def test_the_command_says_in_one_line_that_it_goes_back(two):
    path = two[1]
    path.write_bytes(path.read_bytes()[:-1])
    done = command("run", "permuted-digits", "--method", "alasso", *SMALL_FLAGS, "--out", path.parent, "--resume")
    assert done.returncode == 0
    assert done.stderr == f"alasso: {path} is damaged: resuming from the checkpoint before it\n"


def moment(name, value):
    def change(learner):
        learner["optimizer"]["state"][0][name] = value

    return change


def model(value):
    def change(learner):
        learner["model"]["1.weight"] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (moment("exp_avg", torch.zeros(3)), "exp_avg is not a tensor of shape"),
        (moment("exp_avg_sq", torch.zeros(0)), "exp_avg_sq is not a tensor of shape"),
        (moment("exp_avg", torch.zeros(16, 64, dtype=torch.float64)), "exp_avg is not a tensor of shape"),
        (moment("exp_avg", torch.zeros(16, 64).to_sparse()), "exp_avg is not a tensor of shape"),
        (moment("exp_avg_sq", -torch.ones(16, 64)), "squares below zero"),
        (moment("step", torch.tensor(-1.0)), "negative number of steps"),
        (moment("max_exp_avg_sq", torch.zeros(16, 64)), "of another optimizer"),
        (lambda learner: learner["optimizer"].update(state={9: {}}), "not of these parameters"),
        (lambda learner: learner["optimizer"].update(state=None), "not of these parameters"),
        (model(torch.zeros(3)), "1.weight is not a tensor of shape"),
        (model(torch.zeros(16, 64, dtype=torch.complex64)), "1.weight is not a tensor of shape"),
        (lambda learner: learner["model"].pop("1.weight"), "not those of this network"),
        (lambda learner: learner.pop("model"), "KeyError"),
        (lambda learner: learner["regularizer"].update(tasks=-1), "its number of tasks is -1"),
        (lambda learner: learner.update(memory=[torch.tensor([5000])]), "examples that are not there"),
        (lambda learner: learner.update(memory=[torch.tensor([0.5])]), "no indices"),
        (lambda learner: learner.update(memory=[]), "its memory is of 0 tasks, not 1"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_an_optimizer_gets_it(change, said, tmp_path):
    """Adam's fused kernel takes shapes on trust: other ones crashed the interpreter."""
    config = small("alasso", memory=20)
    break_off(config, tmp_path)
    path = results.checkpoint_path(config, tmp_path)
    head, body = sealed.read(path)
    content = torch.load(io.BytesIO(body), weights_only=True)
    change(content["learner"])
    checkpoint._write(path, head, content)
    with pytest.raises(AlassoError, match=f"does not fit its run: .*{said}.*; delete it to start over"):
        finished(config, out=tmp_path, resume=True)


@pytest.mark.parametrize(
    "change",
    [
        {"task": 3},
        {"task": -1},
        {"task": True},
        {"epoch": 2},
        {"step": 999},
        {"accuracy": []},
        {"accuracy": [[1.5]]},
        {"accuracy": [[10**400]]},
        {"ahead": None},
        {"untrained": []},
        {"seconds": "1"},
        {"commits": [5]},
    ],
)
def test_nor_is_a_place_where_the_run_cannot_stand(change, tmp_path):
    config = small("sgd")
    break_off(config, tmp_path)
    path = results.checkpoint_path(config, tmp_path)
    head, body = sealed.read(path)
    head["position"] |= change
    checkpoint._write(path, head, torch.load(io.BytesIO(body), weights_only=True))
    with pytest.raises(AlassoError, match=r"does not fit its run: .*delete it to start over"):
        finished(config, out=tmp_path, resume=True)


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
