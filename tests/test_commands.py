"""The command line of runs: what it prints, what it refuses, how it goes on."""

import errno
import json
import os
import random
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from alasso import AlassoError
from alasso.bench import io as atomic
from alasso.bench import models, results
from alasso.bench.cli import arguments
from alasso.bench.cli import console as saying
from alasso.bench.cli import main as cli
from alasso.bench.config import RunConfig
from alasso.bench.learners import base as learners
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.bench.training import checkpoint, search
from alasso.bench.training import run as train
from alasso.bench.training import sweep as runs
from alasso.errors import DivergedError

from run_helpers import SMALL_FLAGS, break_off, command, finished, in_process, small


def test_a_run_from_a_toml_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.toml"
    file.write_text('tasks = 2\nepochs = 1\nhidden = 8\nmethod = ["sgd", "si"]\n[settings]\nc = 0.5\n')
    words = ["run", "permuted-digits", "--config", file, "--out", tmp_path / "out", "-q", "--tasks", 3]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    found = [results.read(path) for path in (tmp_path / "out").glob("*.json")]
    assert {(r.config.method, r.config.tasks, r.config.settings.get("c")) for r in found} == {
        ("sgd", 3, None), ("si", 3, 0.5),
    }  # fmt: skip
    file.write_text('benchmark = "permuted-mnist"')
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "is for another benchmark" in errors


@pytest.mark.parametrize(
    "words, go_on",
    [
        (["search", "permuted-digits", "--method", "si", "--file", "f.json"], "--file f.json"),
        (["demo", "--out", "x", "--restart"], "--out x"),
    ],
)
def test_what_else_is_stopped_says_how_to_go_on_too(words, go_on, tmp_path, monkeypatch):
    """And what it says is taken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["alasso", *words])
    asked = []

    def stopped(configs, options, console, *reference):
        asked.append((options.resume, options.restart))
        raise runs.Stopped("task 1, epoch 1, step 1")

    monkeypatch.setattr(runs, "carry_out", stopped)
    first = CliRunner().invoke(cli.app, words)
    assert first.exit_code == 130
    assert f"Stopped; saved up to task 1, epoch 1, step 1. Go on with:\n  alasso {words[0]}" in first.output
    assert first.output.rstrip().endswith(go_on)
    again = first.output.rstrip().splitlines()[-1].split()[1:]
    assert CliRunner().invoke(cli.app, again).exit_code == 130
    assert asked[1] == (True, False)


def test_a_disk_that_fills_up_during_a_run_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.os, "fsync", lambda descriptor: None)
    config = small(tasks=4)
    real, begun = atomic.whole_file, []

    class FullAfterSome:
        """Takes the first pieces of a file, and then no more."""

        def __init__(self, stream):
            self.stream, self.pieces = stream, 0

        def write(self, content):
            self.pieces += 1
            if self.pieces > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.stream.write(content)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    @contextmanager
    def later_full(path):
        begun.append(path)
        with real(path) as stream:
            yield stream if len(begun) == 1 else FullAfterSome(stream)

    monkeypatch.setattr(checkpoint, "whole_file", later_full)
    with pytest.raises(AlassoError, match="the disk is full; free some space"):
        finished(config, out=tmp_path, checkpoint_every=0.0)
    assert len(begun) == 2
    monkeypatch.setattr(checkpoint, "whole_file", real)
    assert finished(config, out=tmp_path, resume=True).accuracy == finished(config).accuracy


def test_several_runs_end_in_a_table_and_finished_ones_are_not_run_again(tmp_path, monkeypatch, capsys):
    words = ("run", "permuted-digits", "--method", "sgd", "alasso", "--seed", 0, 1, *SMALL_FLAGS, "--out", tmp_path)
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert "±" in output and "4 result files in" in output
    code, output, _ = in_process(words, monkeypatch, capsys)
    assert code == 0 and output.count("already done") == 4


def test_sweeps_show_what_varies(tmp_path, monkeypatch, capsys):
    words = ("run", "permuted-digits", *SMALL_FLAGS[:4], "--set", "a=1,3", "hidden=16", "--out", tmp_path, "-q")
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    assert {results.read(p).config.settings["a"] for p in tmp_path.glob("*.json")} == {1.0, 3.0}
    assert output.splitlines()[2].split()[:2] == ["method", "a"]


def test_a_damaged_result_is_named_with_a_remedy(tmp_path, monkeypatch, capsys):
    path = tmp_path / f"{small('sgd').name}.json"
    path.write_text("{")
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", tmp_path)
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and f"{path} is not a whole JSON file; delete it, or run it again with --restart" in errors
    code, output, errors = in_process([*words, "--restart"], monkeypatch, capsys)
    assert code == 0 and "1 result file in" in output, errors
    assert results.read(path).accuracy


def test_an_unfinished_run_is_not_thrown_away_unasked(tmp_path, monkeypatch, capsys):
    config = small("sgd")
    (tmp_path / f"{config.name}.checkpoint").write_bytes(b"begun")
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", tmp_path)
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "go on with --resume, or start over with --restart" in errors
    assert in_process([*words, "--restart"], monkeypatch, capsys)[0] == 0


@pytest.fixture
def begun(tmp_path):
    """A folder with a real checkpoint of a run that was broken off, and the words that go on with it."""
    break_off(small("si", c=0.5), tmp_path)
    return tmp_path, [
        "run",
        "permuted-digits",
        "--method",
        "si",
        "--set",
        "c=0.5",
        *SMALL_FLAGS,
        "--out",
        tmp_path,
        "--resume",
    ]


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(words, flag, value):
    words = list(words)
    words[words.index(flag) + 1] = value
    return words


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--epochs", 3), "si one was begun there with epochs=2, not 3: give its settings to go on with it"),
        (("--tasks", 4), "si one was begun there with tasks=3, not 4: give its settings"),
        (("--set", "c=0.7"), "si one was begun there with c=0.5, not 0.7: give its settings"),
    ],
)
def test_resuming_with_other_settings_is_refused_and_loses_nothing(begun, change, said, monkeypatch, capsys):
    folder, words = begun
    before = files_in(folder)
    code, output, errors = in_process(changed(words, *change), monkeypatch, capsys)
    assert code == 2 and said in errors and "leave out --resume to start anew" in errors
    assert errors.startswith("alasso: ") and len(errors.splitlines()) == 1 and not output
    assert files_in(folder) == before
    code, output, _ = in_process(words, monkeypatch, capsys)  # as advised
    assert code == 0 and "task 3/3" in output and "task 1/3" not in output and not list(folder.glob("*.checkpoint"))


def test_resuming_and_restarting_at_once_is_refused_and_loses_nothing(begun, monkeypatch, capsys):
    folder, words = begun
    before = files_in(folder)
    code, output, errors = in_process([*words, "--restart"], monkeypatch, capsys)
    assert code == 2 and "give one of the two" in errors and len(errors.splitlines()) == 1 and not output
    assert files_in(folder) == before


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (("--device", "gpu"), "there is no device 'gpu'"),
        (("--device", "cuda:99"), "device cuda:99"),
        (("--set", "batch_size=0"), "batch_size must be 1 or more"),
    ],
)
def test_a_restart_that_cannot_start_loses_nothing(begun, mistake, said, monkeypatch, capsys):
    folder, words = begun
    before = files_in(folder)
    anew = [word for word in words if word != "--resume"] + ["--restart", *mistake]
    code, _, errors = in_process(anew, monkeypatch, capsys)
    assert code == 2 and said in errors and len(errors.splitlines()) == 1
    assert files_in(folder) == before


def test_a_restart_without_its_data_loses_nothing(tmp_path, monkeypatch, capsys):
    config = RunConfig.for_benchmark("permuted-mnist", "sgd", tasks=1, epochs=1)
    (tmp_path / f"{config.name}.checkpoint").write_bytes(b"begun")
    words = ["run", "permuted-mnist", "--method", "sgd", "--tasks", 1, "--epochs", 1, "--out", tmp_path, "--restart"]
    code, _, errors = in_process([*words, "--data-dir", tmp_path / "none"], monkeypatch, capsys)
    assert code == 2 and "none" in errors
    assert files_in(tmp_path) == {f"{config.name}.checkpoint": b"begun"}


def test_a_restart_that_was_stopped_is_gone_on_with_and_the_old_result_kept_until_then(begun, monkeypatch, capsys):
    folder, words = begun
    config = small("si", c=0.5)
    result = folder / f"{config.name}.json"
    undisturbed = train.run(config, device="cpu")
    results.write(replace(undisturbed, accuracy=[[0.5], [0.5, 0.5], [0.5] * 3]), folder)
    older = result.stat().st_mtime_ns - 10**9
    os.utime(result, ns=(older, older))
    begun_later = folder / f"{config.name}.checkpoint"
    os.utime(begun_later)
    code, output, _ = in_process([word for word in words if word != "--resume"], monkeypatch, capsys)
    assert code == 0 and "already done" in output and results.read(result).accuracy[0] == [0.5]
    code, output, _ = in_process(words, monkeypatch, capsys)
    assert code == 0 and "task 3/3" in output and "task 1/3" not in output
    assert results.read(result).accuracy == undisturbed.accuracy and not begun_later.exists()


def test_a_checkpoint_older_than_the_result_is_of_no_use_any_more(begun, monkeypatch, capsys):
    """The run was killed between the two."""
    folder, words = begun
    config = small("si", c=0.5)
    results.write(train.run(config, device="cpu"), folder)
    past = (folder / f"{config.name}.json").stat().st_mtime_ns - 10**9
    os.utime(folder / f"{config.name}.checkpoint", ns=(past, past))
    code, output, _ = in_process(words, monkeypatch, capsys)
    assert code == 0 and "already done" in output and "task 3/3" not in output


def test_resuming_several_settings_none_of_which_was_begun_is_refused_in_one_line(begun, monkeypatch, capsys):
    words = changed(begun[1], "--set", "c=0.1,0.2")
    code, _, errors = in_process([*words, "--seed", 0, 1], monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1
    assert "for any of these 4 runs; of si one was begun there with c=0.5, not 0.1: give its settings" in errors


def test_what_starts_anew_beside_what_is_resumed_is_said_and_run(begun, monkeypatch, capsys):
    folder, words = begun
    other = small("si", c=0.5, epochs=1)
    break_off(other, folder)
    code, output, errors = in_process([*words, "--seed", 0, 1], monkeypatch, capsys)
    assert code == 0, errors
    first = output.splitlines()[0]
    assert (
        first.startswith("si, seed 1 has nothing to resume in")
        and "begun there with epochs=1, not 2; seed=0, not 1" in first
    )
    assert (folder / f"{other.name}.checkpoint").exists()


def test_resuming_is_quiet_where_nothing_is_amiss(begun, monkeypatch, capsys):
    _, words = begun
    code, output, _ = in_process([*words, "--seed", 0, 1], monkeypatch, capsys)  # the second was not begun yet
    assert code == 0 and "nothing to resume" not in output


def test_resuming_a_method_that_was_never_run_starts_and_says_so(begun, monkeypatch, capsys):
    folder, words = begun
    words = [word for word in changed(words, "--method", "sgd") if word not in ("--set", "c=0.5", "hidden=16")]
    words += ["--set", "hidden=16"]
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    assert output.splitlines()[0] == f"nothing to resume in {folder}; starting"
    code, output, _ = in_process(words, monkeypatch, capsys)  # now it is finished
    assert code == 0 and "nothing to resume" not in output


def test_another_seed_of_settings_that_were_run_here_starts_and_says_so(begun, monkeypatch, capsys):
    """As the jobs of a cluster do, which are all started with --resume."""
    _, words = begun
    code, output, errors = in_process([*words, "--seed", 1], monkeypatch, capsys)
    assert code == 0, errors
    assert "si, seed 1 has nothing to resume in" in output and "begun there with seed=0, not 1" in output


def test_a_broken_checkpoint_is_no_hindrance(tmp_path, monkeypatch, capsys):
    (tmp_path / "permuted-digits_sgd_0123456789_s0.checkpoint").write_bytes(b"begun")
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", tmp_path, "--resume")
    assert in_process(words, monkeypatch, capsys)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "permuted-digits", "--method", "alaso"], "did you mean 'alasso'?"),
        (["run", "permuted-digts"], "did you mean 'permuted-digits'?"),
        (["run", "permuted-digits", "--set", "epsilom=1"], "did you mean 'epsilon'?"),
        (["run", "permuted-digits", "--set", "epsilon"], "--set takes name=value"),
        (["run", "permuted-digits", "--epochs", "-3"], "epochs must be 1 or more, not -3"),
        (["run", "permuted-digits", "--device", "tpu9"], "no device 'tpu9'"),
        (["run", "permuted-digits", "--device", "mps"], "use auto, cpu, cuda or cuda:N"),
        (["run", "permuted-digits", "--set", "method=si"], "no setting 'method'"),
        (["run", "permuted-digits", "--set", "settings=1"], "no setting 'settings'"),
        (["run", "permuted-digits", "--seed", str(2**70)], "seed must be 0 or more, and below"),
        (["run", "permuted-digits", "--method", "vcl", "--set", "memory=10"], "vcl cannot rehearse a memory"),
        (["run", "permuted-digits", "--method", "alasso-memory", "--set", "memory=0"], "without examples of the past"),
        (["run", "split-cifar", "--method", "sgd-dropout"], "sgd-dropout adds dropout to the mlp"),
        (["run", "permuted-digits", "--tasks", "3", "--set", "tasks=2,4"], "tasks is given by --tasks and by --set"),
        (["run", "permuted-digits", "--permute-first", "--set", "permute_first=no"], "by --permute-first and by --set"),
        (["run", "split-folder", "a", "--set", "path=b"], "path is given by PATH and by --set"),
        (["run", "permuted-digits", "--seed", "0", "--set", "seed=1"], "seed is given by --seed and by --set"),
        (["run", "permuted-digits", "--set", "seed=1,2"], "name the seeds by --seed"),
        (["run", "permuted-digits", "--set", "a=1", "a=2"], "--set has a twice; several values go in one: a=1,2"),
        (["run", "permuted-digits", "--checkpoint-every", "-1"], "a number of seconds above 0, not -1"),
        (["run", "permuted-digits", "--checkpoint-every", "0"], "a number of seconds above 0, not 0"),
        (["run", "permuted-digits", "--method", "si,alasso"], "values with spaces between them: --method si alasso"),
        (["run", "permuted-digits", "--seed", "0,", "1"], "--seed takes its values with spaces between them: --seed 0"),
        (["run", "permuted-digits", "--seed=0,1"], "--seed takes its values with spaces between them: --seed 0 1"),
        (["run", "permuted-digits", "--permute-first", "maybe"], "--permute-first takes no value: leave out 'maybe'"),
        (["run", "permuted-digits", "-q", "--resume", "yes"], "--resume takes no value: leave out 'yes'"),
        (["run", "permuted-digits", "../imgs"], "path is for split-folder; it changes nothing in permuted-digits"),
        (["run", "permuted-digits", "--log", "wandb"], "--log takes csv or tensorboard"),
        (["run", "permuted-mnist", "--data-dir", "no-such-folder"], "alasso data fetch mnist"),
        (["run", "split-folder"], "split-folder needs the folder of images"),
        (["run", "split-folder", "no-such-folder"], "no-such-folder"),
        (["run", "permuted-digits", "--config", "absent.toml"], "absent.toml cannot be read"),
        (["run", "permuted-digits", "--reference", "absent.json"], "absent.json cannot be read"),
        (["data", "check", "mnits"], "mnits"),
        (["search", "permuted-digits", "--file", "x.json", "--method", "sgd"], "sgd has no settings to search"),
        (["search", "permuted-digits", "--file", "x.json", "--set", "lam=1"], "--set needs --method: whose lam"),
        (
            ["search", "split-folder", "--file", "x.json"],
            "there is no search on split-folder; alasso run split-folder PATH",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2
    assert message in errors and errors.startswith("alasso: ") and len(errors.splitlines()) == 1 and not output
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "permuted-digits", "--epoch", "3"], "no such option: --epoch; did you mean --epochs? See alasso run"),
        (["run", "permuted-digits", "--sed", "3"], "no such option: --sed; did you mean --seed? See alasso run --help"),
        (["run", "permuted-digits", "--tasks", "abc"], "invalid value for '--tasks': "),
        (["run", "permuted-digits", "--tasks"], "option '--tasks' requires an argument"),
        (["run", "permuted-digits", "--method"], "option '--method' requires an argument"),
        (["run", "permuted-digits", "--seed", "-q"], "invalid value for '--seed': "),
        (["run", "permuted-digits", "x", "y"], "got unexpected extra argument"),
        (["run"], "missing argument 'benchmark', which comes before the options; see alasso run --help"),
        (["run", "--method", "sgd", "permuted-digits"], "missing argument 'benchmark', which comes before the options"),
        (["run", "permuted-digits", "--method", "SGD"], "there is no method 'SGD'; did you mean 'sgd'?"),
        (["rn"], "no such command 'rn'"),
        (["search", "permuted-digits"], "missing option '--file'; see alasso search --help"),
        (["demo", "--seed", "0", "1"], "got unexpected extra argument"),
        (["demo", "--seed", "0,1"], "invalid value for '--seed': "),
        (["demo", "--seed", "one"], "invalid value for '--seed': "),
        (["data", "chek"], "no such command 'chek'"),
        (["data", "check", "--data-dri", "x"], "did you mean --data-dir?"),
        (["report"], "missing argument 'results"),
        (["report", "x", "--port", "99999"], "invalid value for '--port': "),
        (["compare"], "missing argument 'results"),
        (["probe", "x", "--weights", "0"], "invalid value for '--weights': "),
        (["reproduce", "--seeds", "0"], "invalid value for '--seeds': "),
        (["reproduce", "--only"], "option '--only' requires an argument"),
        (["list", "everything"], "got unexpected extra argument"),
        (["--wrong\nline"], "no such option: --wrong"),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and not output
    # Older parsers write arguments in capitals.
    assert message.lower() in errors.lower() and errors.startswith("alasso: ") and len(errors.splitlines()) == 1


def test_flags_and_options_of_several_values_may_be_repeated(monkeypatch, capsys):
    words = ["run", "permuted-digits", "-q", "-q", "--seed", "0", "--seed", "1", "--tasks", "0"]
    _, _, errors = in_process(words, monkeypatch, capsys)
    assert errors == "alasso: tasks must be 1 or more, not 0\n"


def test_settings_as_one_dictionary_are_refused_with_a_hint():
    with pytest.raises(AlassoError, match=r"settings of alasso are given directly, by their own names, as in a=1.8"):
        RunConfig.own("alasso", settings={"a": 2})


def test_missing_data_sets_are_wrong_only_where_they_are_named(tmp_path, monkeypatch, capsys):
    nowhere = ["--data-dir", tmp_path]
    code, output, _ = in_process(["data", "check", *nowhere], monkeypatch, capsys)
    assert code == 0 and "missing" in output and "What is there is as published" in output
    code, output, _ = in_process(["data", "check", "mnist", *nowhere], monkeypatch, capsys)
    assert code == 2 and output.splitlines()[-1].endswith(f"alasso data fetch mnist --data-dir {tmp_path}")
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"wrong")
    code, output, _ = in_process(["data", "check", *nowhere], monkeypatch, capsys)
    assert code == 2 and output.splitlines()[-1].endswith(f"alasso data fetch mnist --data-dir {tmp_path}")


@pytest.mark.parametrize("words", [["--help"], ["run", "-h"], ["data", "--help"], ["--version"], [], ["data"]])
def test_help_is_no_mistake(words, monkeypatch, capsys):
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert output.strip() and not errors
    assert code == 0 or (code == 2 and words in ([], ["data"]))  # what parsers make of a missing command differs


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("method = 3", "no method '3'"),
        ("[settings]\nc = []", "c is an empty list"),
        ("a = 2", "a is a setting of a method: put it below a line [settings]"),
        ("epochs = 0", "epochs must be 1 or more, not 0"),
        ("[settings]\na = -1.0", "a must be a finite number, zero or more, not -1.0"),
        ("batch_size = 2147483648", "batch_size must be below 2³¹, not 2147483648"),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line(toml, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.toml").write_text(toml)
    code, _, errors = in_process(
        ["run", "permuted-digits", "--config", tmp_path / "x.toml", "--out", tmp_path], monkeypatch, capsys
    )
    assert code == 2 and message in errors and len(errors.splitlines()) == 1
    assert f"{tmp_path / 'x.toml'}: " in errors


def test_a_mistake_on_the_command_line_is_not_said_to_be_the_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.toml").write_text("epochs = 1\n[settings]\nc = 0.5\n")
    words = ["run", "permuted-digits", "--config", tmp_path / "x.toml", "--out", tmp_path]
    for mistake, said in (
        (["--tasks", -1], "tasks must be"),
        (["--set", "xi=-1"], "xi must"),
        (["--seed", -1], "seed"),
    ):
        code, _, errors = in_process([*words, *mistake], monkeypatch, capsys)
        assert code == 2 and errors.startswith(f"alasso: {said}")


def test_a_reference_that_does_not_fit_is_refused_before_anything_is_run(tmp_path, monkeypatch, capsys):
    for method, changes, message in (
        ("si", {}, "measured against a single-task run, not one of si"),
        ("single-task", {"tasks": 2}, "the reference run has tasks=2"),
        ("single-task", {"hidden": 9}, "the reference run has hidden=9"),
        ("single-task", {"adam_eps": 1e-7}, "the reference run has adam_eps=1e-07"),
    ):
        reference = results.write(finished(small(method, **changes)), tmp_path)
        words = ["run", "permuted-digits", *SMALL_FLAGS, "--reference", reference, "--out", tmp_path / "out"]
        code, output, errors = in_process(words, monkeypatch, capsys)
        assert code == 2 and message in errors and not output


def test_a_mistake_shows_no_traceback_in_a_real_terminal_either():
    done = command("run", "permuted-digits", "--method", "alaso")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    words = ("run", "permuted-digits", *SMALL_FLAGS, "--out", tmp_path / "file" / "below")
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "cannot write to" in errors and not output


def test_a_truncated_and_a_changed_data_file_are_named(tmp_path, monkeypatch, capsys):
    import gzip

    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte.gz").write_bytes(gzip.compress(b"changed" * 100)[:-20])
    words = ("run", "permuted-mnist", "--data-dir", tmp_path, "--out", tmp_path / "out")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "train-images-idx3-ubyte" in errors


def test_help_and_list_answer():
    runner = CliRunner()
    shown = runner.invoke(cli.app, ["list"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in [*BENCHMARKS, *METHODS])
    assert runner.invoke(cli.app, ["--version"]).stdout.startswith("alasso 0.")


COLOURS = {"red": (200, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 200), "grey": (90, 90, 90)}


def lay_out_images(folder, colours=COLOURS, count=12):
    from PIL import Image

    rng = random.Random(0)
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            noisy = tuple(min(255, max(0, c + rng.randint(-20, 20))) for c in colour)
            Image.new("RGB", (20 + i, 24), noisy).save(folder / name / f"{i}.png")


@pytest.fixture
def on_images(tmp_path):
    """A finished run on images of one's own: their folder, and the command."""
    lay_out_images(tmp_path / "images", count=4)
    words = [
        "run",
        "split-folder",
        tmp_path / "images",
        "--epochs",
        1,
        "--image-size",
        8,
        "--method",
        "sgd",
        "--set",
        "batch_size=1",
    ]
    return tmp_path / "images", [*words, "--out", tmp_path / "out", "--device", "cpu", "-q"]


def test_a_result_does_not_stand_for_a_run_on_other_images(on_images, tmp_path, monkeypatch, capsys):
    images, words = on_images
    for _ in range(2):
        code, _, errors = in_process(words, monkeypatch, capsys)
        assert code == 0, errors  # the second time by the first one's result
    (file,) = (tmp_path / "out").glob("*.json")
    before, edition = file.read_bytes(), results.read(file).data["images"]
    assert edition.startswith("folder, 16 images of 4 classes, ")
    lay_out_images(images, {"red": (0, 0, 0)}, count=6)
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and file.read_bytes() == before and not output
    assert errors == (
        f"alasso: the images in {images} have changed since {file.name} was written; "
        "run again with --restart, or into another --out\n"
    )
    code, _, errors = in_process([*words, "--restart"], monkeypatch, capsys)
    assert code == 0, errors
    assert results.read(file).data["images"].startswith("folder, 18 images of 4 classes, ")
    images.rename(tmp_path / "elsewhere")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1
    assert errors.startswith(f"alasso: there is no folder {images}; {file.name} was made on images that were there: ")


def test_a_checkpoint_is_not_gone_on_from_with_other_images(on_images, tmp_path, monkeypatch, capsys):
    images, words = on_images
    config = RunConfig.for_benchmark("split-folder", "sgd", path=str(images), epochs=1, image_size=8, batch_size=1)
    break_off(config, tmp_path / "out", examples=6)
    saved = tmp_path / "out" / f"{config.name}.checkpoint"
    before = saved.read_bytes()
    lay_out_images(images, {"red": (0, 0, 0)}, count=6)
    code, _, errors = in_process([*words, "--resume"], monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1 and saved.read_bytes() == before
    assert f"the images in {images} have changed since {saved.name} was written; run again with --restart" in errors
    with pytest.raises(
        AlassoError, match=r"was begun on other data \(images: folder, 16 images .*; now images: folder"
    ):
        train.run(config, out=tmp_path / "out", resume=True, device="cpu")
    lay_out_images(tmp_path / "as-before" / "images", count=4)
    images.rename(tmp_path / "changed")
    (tmp_path / "as-before" / "images").rename(images)
    code, _, errors = in_process([*words, "--resume"], monkeypatch, capsys)
    assert code == 0 and not saved.exists(), errors


def test_results_from_before_fingerprints_stand_for_whatever_images_there_are(on_images, tmp_path, monkeypatch, capsys):
    _, words = on_images
    in_process(words, monkeypatch, capsys)
    (file,) = (tmp_path / "out").glob("*.json")
    old = replace(results.read(file), data={"images": "folder"})
    results.write(old, tmp_path / "out")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 0 and results.read(file) == old, errors


def test_own_images_through_split_folder(tmp_path, monkeypatch, capsys):
    lay_out_images(tmp_path / "images", {**COLOURS, "white": (240, 240, 240)})
    words = ["run", "split-folder", tmp_path / "images", "--epochs", 2, "--image-size", 16]
    code, output, errors = in_process([*words, "--out", tmp_path / "out", "--device", "cpu"], monkeypatch, capsys)
    assert code == 0, errors
    assert output.splitlines()[0] == "1 of 5 classes left over, at 2 a task: added to the tasks there are"
    (file,) = (tmp_path / "out").glob("*.json")
    assert len(results.read(file).accuracy) == 2  # five classes: a task of three and one of two


def test_multi_value_options():
    assert arguments.spread_values(["run", "b", "--method", "sgd", "si", "--epochs", "3"]) == [
        "run", "b", "--method", "sgd", "--method", "si", "--epochs", "3",
    ]  # fmt: skip
    own_images = ["run", "split-folder", "--seed", "0", "-q", "my,images", "--set", "a=1,2"]
    assert arguments.spread_values(own_images) == own_images
    assert arguments.parsed_settings(["a=1,2", "c=x"]) == {"a": ["1", "2"], "c": ["x"]}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("initial_logvar=nan", "initial_logvar must lie between -50 and 50, not be nan"),
        ("initial_logvar=-1000", "initial_logvar must lie between -50 and 50, not be -1000.0"),
        ("prior_var=inf", "prior_var must be a finite number, 1e-30 or more, not inf"),
        ("train_samples=0", "train_samples must be 1 or more, not 0"),
        ("test_samples=-1", "test_samples must be 1 or more, not -1"),
        ("point_epochs=-1", "point_epochs must be 0 or more, not -1"),
        ("coreset=0", "coreset must be 1 or more, not 0"),
        ("coreset_epochs=-3", "coreset_epochs must be 0 or more, not -3"),
        ("tasks=99999999", "tasks must be 10000 or fewer, not 99999999: each is tested after each"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting, said, tmp_path, monkeypatch, capsys):
    words = ["run", "permuted-digits", "--method", "vcl-coreset", "--set", setting, "--out", str(tmp_path / "runs")]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2
    assert errors == f"alasso: {said}\n"
    assert not (tmp_path / "runs").exists()


def test_a_seed_is_taken_digit_by_digit(tmp_path, monkeypatch, capsys):
    seed = 2**53 + 1  # a float would make it 2⁵³
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--seed", seed, "-q", "--out", tmp_path)
    code, _, errors = in_process(words, monkeypatch, capsys)
    (file,) = tmp_path.glob("*.json")
    assert code == 0 and results.read(file).config.seed == seed, errors


def test_when_one_run_diverges_the_others_are_shown(tmp_path, monkeypatch, capsys):
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS)
    words = (*words, "--set", "learning_rate=0.001,1e30", "--out", tmp_path)
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "1 result file in" in output and errors.count("\n") == 1
    assert "sgd learning_rate=1e+30, seed 0: 1.weight is no longer finite" in errors
    (header,) = (line for line in output.splitlines() if line.split()[:2] == ["method", "learning_rate"])
    (row,) = (line for line in output.splitlines() if line.split()[:2] == ["sgd", "0.001"])  # though it is the only one
    assert header.index("learning_rate") < row.index("0.001")
    assert [results.read(file).config.learning_rate for file in tmp_path.glob("*.json")] == [0.001]
    assert not list(tmp_path.glob("*.checkpoint"))


def test_a_device_that_is_none_is_refused_even_where_nothing_is_left_to_run(tmp_path, monkeypatch, capsys):
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "-q", "--out", tmp_path)
    assert in_process(words, monkeypatch, capsys)[0] == 0
    code, output, errors = in_process((*words, "--device", "gpu"), monkeypatch, capsys)
    assert (code, output) == (2, "")
    assert errors == "alasso: there is no device 'gpu'; use auto, cpu, cuda or cuda:N\n"


def test_a_reference_of_another_seed_is_said(tmp_path, monkeypatch, capsys):
    reference = results.write(finished(small("single-task")), tmp_path / "reference")
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--reference", reference, "--out", tmp_path)
    code, output, errors = in_process((*words, "--seed", 0, 1), monkeypatch, capsys)
    assert code == 0, errors
    said = "I of seed 1 is against a reference of seed 0: other tasks of the same kind"
    assert output.splitlines()[0] == said
    assert said not in in_process((*words, "--seed", 0), monkeypatch, capsys)[1]


def test_a_network_too_large_for_the_memory_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "build", lambda *shape, **how: torch.empty(2**62))
    words = ("run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", tmp_path)
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and not output
    less = "a smaller image_size, batch_size or hidden"
    assert errors == f"alasso: out of memory; a run takes less with {less}\n"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
    ],
)
def test_which_errors_are_for_want_of_memory(error, is_one):
    assert saying.is_out_of_memory(error) == is_one


def test_a_failure_that_is_not_the_users_is_not_hidden(monkeypatch):
    def fails(configs, options, console, reference):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(runs, "carry_out", fails)
    monkeypatch.setattr(sys, "argv", ["alasso", "demo"])
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.main()


SEARCH = ("search", "permuted-digits", "--method", "mas", "--tasks", 2, "--epochs", 1, "--device", "cpu", "-q")


@pytest.fixture
def diverging_mas(monkeypatch):
    """``lams``: with which of them MAS diverges, with seed 1 alone."""
    lams, end_task = set(), learners.Learner.end_task

    def diverges(learner, t):
        if learner.config.seed == 1 and learner.config.settings["lam"] in lams:
            raise DivergedError("the training diverged")
        end_task(learner, t)

    monkeypatch.setattr(learners.Learner, "end_task", diverges)
    return lams


def test_a_search_goes_on_without_settings_that_diverge(tmp_path, monkeypatch, capsys, diverging_mas):
    """Even if they do with one seed alone: what the others gave is not the whole of it."""
    monkeypatch.setitem(METHODS["mas"].search, "lam", (0.003, 0.01, 0.03, 0.1, 0.3))
    diverging_mas |= {0.1, 0.3}
    file = tmp_path / "outcome.json"
    words = (*SEARCH, "--seed", 0, 1, "--file", file, "--out", tmp_path / "runs")
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    outcome = json.loads(file.read_text())["methods"]["mas"]
    assert sorted(row["lam"] for row in outcome["tried"]) == [0.003, 0.01, 0.03]
    assert outcome["diverged"] == "mas lam=0.1, seed 1; mas lam=0.3, seed 1: the training diverged"
    assert output.splitlines()[-1].endswith(f"; left out: {outcome['diverged']}")
    assert "largest tried" not in output  # larger ones were


def test_a_search_all_of_whose_settings_diverge_chooses_none(tmp_path, monkeypatch, capsys, diverging_mas):
    monkeypatch.setitem(METHODS["mas"].search, "lam", (0.003, 0.01))
    diverging_mas |= {0.003, 0.01}
    file = tmp_path / "outcome.json"
    words = (*SEARCH, "--seed", 1, "--file", file, "--out", tmp_path / "runs")
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "mas diverged with all of its settings: mas lam=0.003, seed 1; " in errors
    assert not file.exists()


def test_a_search_says_of_a_tie_that_nothing_was_found():
    tried = [{"c": c, "A": 0.8} for c in (0.1, 1.0, 10.0)] + [{"c": 100.0, "A": 0.7}]
    searched = {"tried": tried, "space": {"c": [0.1, 1.0, 10.0, 100.0]}}
    outcome = {"chosen": {"si": {"c": 0.1}}, "methods": {"si": searched}}
    said = "si: c=0.1, A = 0.800 on held-out examples (as good as 2 others of 4 tried, c: the smallest tried)"
    assert search.chosen_line(outcome, "si") == said


def test_a_search_ends_with_what_it_chose_and_how_good_it_was(tmp_path, monkeypatch, capsys):
    file = tmp_path / "outcome.json"
    code, output, errors = in_process((*SEARCH, "--file", file, "--out", tmp_path / "runs"), monkeypatch, capsys)
    assert code == 0, errors
    best = json.loads(file.read_text())["methods"]["mas"]["tried"][0]
    assert output.splitlines()[-1].startswith(f"mas: lam={best['lam']}, A = {best['A']:.3f} on held-out examples")


def test_a_search_tries_what_the_command_line_says_and_says_whom_it_does_not_concern(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(METHODS["si"].search, "c", (0.1,))
    monkeypatch.setitem(METHODS["si"].search, "xi", (0.1,))
    file = tmp_path / "outcome.json"
    words = ["search", "permuted-digits", "--method", "mas", "si", "--set", "lam=0.5,2", *SEARCH[4:-1]]
    code, output, errors = in_process((*words, "--file", file, "--out", tmp_path / "runs"), monkeypatch, capsys)
    assert code == 0 and "lam is no setting of si: searched without it" in output, errors
    tried = json.loads(file.read_text())["methods"]
    assert [sorted(row["lam"] for row in tried["mas"]["tried"]), tried["si"]["space"]] == [
        [0.5, 2.0],
        {"c": [0.1], "xi": [0.1]},
    ]


def test_settings_that_only_some_methods_have_are_said():
    settings = {"c": ["1", "2"], "epochs": ["1"], "lam": ["3"]}
    configs = runs.combinations("permuted-digits", ["sgd", "si", "ewc"], [0], {}, settings)
    assert arguments.not_for_all(configs, settings) == [
        "c is no setting of sgd, ewc: run without it",
        "lam is no setting of sgd, si: run without it",
    ]
    assert arguments.not_for_all([config for config in configs if config.method == "si"], {"c": ["1"]}) == []


@pytest.mark.parametrize(("words", "said"), [([], True), (["--quiet"], False)])
def test_they_are_said_before_anything_is_run(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "carry_out", lambda *rest: [])
    options = ["--method", "sgd", "si", "--set", "c=1", "--out", tmp_path, *words]
    code, output, errors = in_process(["run", "permuted-digits", *options], monkeypatch, capsys)
    assert not code and ("c is no setting of sgd: run without it" in output + errors) == said
