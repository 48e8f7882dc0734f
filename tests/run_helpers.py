"""Small runs, and the command line without a new interpreter for each word."""

import os
import subprocess
import sys

import pytest
import torch

from alasso.bench import results
from alasso.bench.cli import main as cli
from alasso.bench.config import RunConfig
from alasso.bench.results import checkpoint_path
from alasso.bench.streams import make_stream
from alasso.bench.training import run as train
from alasso.bench.training.checkpoint import Position
from alasso.bench.training.progress import Observer

from helpers import StopAt

CPU = torch.device("cpu")

SMALL = {"tasks": 3, "epochs": 2, "hidden": 16}


def small(method="alasso", **changes):
    return RunConfig.for_benchmark("permuted-digits", method, **{**SMALL, **changes})


def finished(config, **options):
    return train.run(config, device="cpu", **options)


def command(*words, **options):
    """``alasso …`` in a process of its own: what a user sees."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    return subprocess.run(
        [sys.executable, "-m", "alasso", *map(str, words)], capture_output=True, text=True, env=environment, **options
    )


SMALL_FLAGS = ("--tasks", 3, "--epochs", 2, "--set", "hidden=16", "--device", "cpu")


def in_process(words, monkeypatch, capsys):
    """Exit code, output and errors of ``alasso …`` without the seconds that a new interpreter takes."""
    monkeypatch.setattr(sys, "argv", ["alasso", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return (ended.value.code, *capsys.readouterr())


def numbers(folder):
    """What the results in a folder found, by run: all but where and how long."""
    return {r.name: (r.accuracy, r.ahead, r.untrained, r.metrics, r.data) for r in results.read_all([folder])}


def begun(config, stream=None, model=None):
    """A learner on a CPU before its first step."""
    torch.manual_seed(config.seed)
    return train.make_learner(config, stream or make_stream(config, None, CPU), model, CPU)


def break_off(config, out, examples=1437):
    """Stopped as Ctrl-C stops it, in the second task; nothing is being written any more."""
    saved = checkpoint_path(config, out)
    steps_of_a_task = config.epochs * -(-examples // config.batch_size)
    stop = StopAt(steps_of_a_task + 3)
    with pytest.raises(train.Stopped, match="task 2"):
        train.Trainer(begun(config), Position(), Observer(), saved, 1e9, stop).train()
    assert [path.name for path in out.glob(f"*{config.name}*")] == [saved.name]
