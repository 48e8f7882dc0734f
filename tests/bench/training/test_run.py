"""One run: repeatable, on streams and networks of any kind, on data small enough to train in a second."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import alasso.bench
from alasso import AlassoError
from alasso.bench import results
from alasso.bench.config import RunConfig
from alasso.bench.registry import METHODS
from alasso.bench.streams import Stream, with_edition
from alasso.bench.training import checkpoint
from alasso.bench.training import run as training
from alasso.bench.training.progress import Observer
from alasso.bench.training.run import Stopped, run

from helpers import StopAt
from run_helpers import begun, finished, in_process, small


class AtEachStep(Observer):
    def __init__(self, do):
        self.do = do

    def step_done(self, task, epoch, done):
        self.do()


def customer(seed, name="own data", tasks=2):
    """Tasks that are like those of any other customer in all but what they hold."""
    x = torch.rand(40, 6, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(40) % 2
    return Stream.of([((x, y), (x[:10], y[:10]))] * tasks, name=name)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_repeats_bit_for_bit(method):
    one, two = finished(small(method)), finished(small(method))
    assert one.accuracy == two.accuracy and one.ahead == two.ahead
    assert [len(row) for row in one.accuracy] == [1, 2, 3]
    assert len(one.ahead) == 2 and len(one.untrained) == 3
    assert one.accuracy[0][0] > one.untrained[0]


def test_another_seed_is_another_run():
    assert finished(small(seed=1)).accuracy != finished(small(seed=2)).accuracy


def test_the_commit_is_that_of_when_training_began(monkeypatch):
    heads = ["1" * 40]
    monkeypatch.delenv("ALASSO_COMMIT", raising=False)
    monkeypatch.setattr(results, "_git", lambda _, verb, *__: heads[-1] if verb == "rev-parse" else "")
    results.source_commit.cache_clear()
    try:  # someone commits meanwhile
        result = run(small("sgd"), device="cpu", observer=AtEachStep(lambda: heads.append("2" * 40)))
        assert len(heads) > 1 and result.environment["commit"] == results.commit() == "1" * 40
    finally:
        results.source_commit.cache_clear()


def test_a_run_that_was_resumed_names_the_commits_before(monkeypatch, tmp_path):
    monkeypatch.setenv("ALASSO_COMMIT", "1111111")
    stop = StopAt(5)
    interrupting = AtEachStep(lambda: stop() and os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Stopped):
        run(small("sgd"), device="cpu", out=tmp_path, observer=interrupting)
    monkeypatch.setenv("ALASSO_COMMIT", "2222222")
    result = run(small("sgd"), device="cpu", out=tmp_path, resume=True)
    assert (result.environment["commit"], result.environment["earlier_commits"]) == ("2222222", ["1111111"])


def test_a_commit_that_is_none_is_refused_before_training(monkeypatch, tmp_path):
    monkeypatch.setenv("ALASSO_COMMIT", "HEAD")
    steps = []
    with pytest.raises(AlassoError, match="ALASSO_COMMIT must be a commit"):
        run(small("sgd"), device="cpu", out=tmp_path, observer=AtEachStep(lambda: steps.append(1)))
    assert not steps and not list(tmp_path.glob("*.json")) and not list(tmp_path.glob("*.checkpoint"))


def test_a_stream_of_another_length_than_was_asked_for_is_refused():
    x, y = torch.randn(12, 6), torch.arange(12) % 2
    with pytest.raises(AlassoError, match="stream must be a Stream, not a list"):
        run(small("sgd"), device="cpu", stream=[1, 2])
    with pytest.raises(AlassoError, match="tasks=5, but the stream has 1"):
        run(RunConfig.own("sgd", tasks=5), stream=Stream.of([((x, y), (x, y))]), device="cpu")


def test_validation_never_measures_the_test_examples_of_your_own_stream():
    x = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    stream = Stream.of([((x, y), (x, 1 - y))])  # who answers right is wrong in every test example
    config = RunConfig.own("sgd", epochs=30, learning_rate=1e-2, hidden=32, validation=True)
    assert run(config, stream=stream, device="cpu").metrics["A"] > 0.8


def test_two_tensor_datasets_from_python():
    x = torch.randn(60, 6)
    first = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    second = torch.utils.data.TensorDataset(x, (x[:, 1] > 0).long())
    result = run(
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
        run(RunConfig.own("si", epochs=1), stream=customer(0), model=model, out=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_be_made_does_not_cost_what_was_begun(tmp_path):
    config = RunConfig.own("sgd", epochs=1, hidden=8)
    begun = results.checkpoint_path(config, tmp_path)
    begun.write_bytes(b"begun")
    with pytest.raises(AlassoError, match="must return an"):
        run(config, stream=customer(0), model=lambda: None, out=tmp_path, device="cpu")
    assert begun.read_bytes() == b"begun"


def test_images_with_their_channels_last_are_told_to_have_them_first():
    x, y = torch.rand(8, 8, 8, 3), torch.arange(8) % 2
    stream = Stream.of([((x, y), (x, y))])
    last = r"inputs of shape \(8, 8, 3\).*; channels come first: \(3, 8, 8\), as x.permute\(0, 3, 1, 2\) makes them"
    config = RunConfig.own("sgd", epochs=1, model="cifar-cnn")
    for model in (None, lambda: nn.Sequential(nn.Conv2d(3, 1, 8), nn.Flatten(), nn.Linear(1, 2))):
        with pytest.raises(AlassoError, match=last):
            run(config, stream=stream, model=model, device="cpu")
    first = x.permute(0, 3, 1, 2)
    run(config, stream=Stream.of([((first, y), (first, y))]), device="cpu")


def test_folders_may_be_given_as_text(tmp_path):
    run(RunConfig.own("sgd", epochs=1, hidden=8), stream=customer(0), out=str(tmp_path / "out"), device="cpu")
    assert len(list((tmp_path / "out").glob("*.json"))) == 1


def test_a_result_is_not_written_over_by_one_on_another_stream(tmp_path):
    config = RunConfig.own("sgd", epochs=1, hidden=8)
    first = run(config, stream=customer(1, "A"), out=tmp_path, device="cpu")
    assert list(first.data) == ["A"] and re.fullmatch(
        r"own data, 100 examples in 2 tasks, [0-9a-f]{8}", first.data["A"]
    )
    before = (tmp_path / f"{config.name}.json").read_bytes()
    for other in (customer(2, "A"), customer(1, "B"), customer(1, "A", tasks=3)):
        with pytest.raises(
            AlassoError, match=r"\.json holds another stream \(A: own data, .*choose another folder as out"
        ):
            run(config, stream=other, out=tmp_path, device="cpu")
    assert (tmp_path / f"{config.name}.json").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    run(config, stream=customer(2, "B"), out=tmp_path / "B", device="cpu")
    again = run(config, stream=customer(1, "A"), out=tmp_path, device="cpu")
    assert (again.data, again.accuracy) == (first.data, first.accuracy)
    results.write(replace(first, data={}), tmp_path)  # as before streams were told apart
    run(config, stream=customer(2, "A"), out=tmp_path, device="cpu")


@pytest.mark.parametrize("resume", [True, False])
def test_an_unfinished_run_on_another_stream_is_neither_gone_on_with_nor_thrown_away(resume, tmp_path):
    config = RunConfig.own("sgd", epochs=1, hidden=8)
    stream, path, writer = with_edition(customer(1)), results.checkpoint_path(config, tmp_path), checkpoint.Writer()
    writer.save(path, checkpoint.Position(), begun(config, stream))
    writer.finish()
    with pytest.raises(
        AlassoError, match=r"\.checkpoint holds another stream \(own data: own data, .*out, or delete it"
    ):
        run(config, stream=customer(2), out=tmp_path, resume=resume, device="cpu")
    assert path.exists()
    assert run(config, stream=customer(1), out=tmp_path, resume=resume, device="cpu").data == stream.editions


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
        with training.few_threads_for(learner):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_learning_rate_and_batch_size_are_options_of_the_command(tmp_path, monkeypatch, capsys):
    words = ["run", "permuted-digits", "--method", "sgd", "--tasks", 1, "--epochs", 1, "--set", "hidden=8"]
    words += ["--device", "cpu", "--out", tmp_path, "--lr", 0.01, "--batch-size", 200]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    (result,) = results.read_all([tmp_path])
    assert (result.config.learning_rate, result.config.batch_size) == (0.01, 200)
    code, _, errors = in_process([*words, "--set", "learning_rate=0.1"], monkeypatch, capsys)
    assert code == 2 and "--lr and --set both give learning_rate: give it once" in errors


def test_the_laboratory_s_door_offers_what_a_script_needs():
    script = "import sys, alasso.bench; assert 'torch' not in sys.modules\n"
    script += "from alasso.bench import Result, RunConfig, Stream, chosen_settings, run\nprint(run.__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "alasso.bench.training.run\n", done.stderr
    with pytest.raises(AttributeError, match=r"module 'alasso\.bench' has no attribute 'x'"):
        _ = alasso.bench.x


def test_a_result_does_not_depend_on_what_was_trained_before():
    config = small()
    alone = finished(config)
    for other in (small("vcl"), small("si", seed=5, precision="float32"), small(seed=1)):
        finished(other)
    assert finished(config).accuracy == alone.accuracy


def test_tied_weights_are_trained():
    def tied():
        network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        network[2].weight = network[0].weight
        return network

    result = run(small("si", tasks=2), model=tied, device="cpu")
    assert result.accuracy[0][0] > result.untrained[0]


def test_without_the_module_resource_nobody_knows_the_peak_of_memory():
    """As on Windows."""
    script = "import importlib, sys, torch, alasso.bench.training.run as run\n"
    script += "sys.platform, sys.modules['resource'] = 'win32', None\n"
    script += "print(importlib.reload(run).peak_memory(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr


ALIKE = """
import torch
from alasso._digest import digest_of
from alasso.bench.config import RunConfig
from alasso.bench.training import run as training

learners, make = [], training.make_learner
training.make_learner = lambda *given: learners.append(make(*given)) or learners[-1]
for method in ("alasso", "kron-alasso", "vcl"):
    config = RunConfig.for_benchmark("permuted-digits", method, tasks=2, epochs=1, hidden=64)
    found = training.run(config, device="cpu")
    print(found.accuracy, found.ahead, digest_of(learners[-1].model.state_dict()))
"""


def test_a_run_is_the_same_to_the_last_bit_in_other_processes_and_with_other_threads():
    with ThreadPoolExecutor() as pool:
        environments = [{**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads} for threads in "134"]
        words = [sys.executable, "-c", ALIKE]
        jobs = [
            pool.submit(subprocess.run, words, env=one, capture_output=True, text=True, check=True)
            for one in environments
        ]
        said = {job.result().stdout for job in jobs}
    assert len(said) == 1 and len(said.pop().splitlines()) == 3
