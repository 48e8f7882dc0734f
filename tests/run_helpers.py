"""Small runs, and the command line without a new interpreter for each word."""

import os
import subprocess
import sys

import pytest

from alasso.bench.cli import main as cli
from alasso.bench.config import RunConfig
from alasso.bench.training import run as train

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
