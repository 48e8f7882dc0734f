"""The commands run and demo: what they print and what they refuse."""

import sys

import pytest
from typer.testing import CliRunner

from alasso import AlassoError
from alasso.bench import results
from alasso.bench.cli import main as cli
from alasso.bench.cli import run as commands
from alasso.bench.config import RunConfig
from alasso.bench.training import sweep as runs

from run_helpers import SMALL_FLAGS, finished, in_process, small


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


def test_a_sweep_over_tasks_has_a_column_for_them(tmp_path, monkeypatch, capsys):
    words = ("run", "permuted-digits", "--method", "si", "--epochs", 1, "--set", "hidden=8", "tasks=2,4,3")
    code, output, errors = in_process([*words, "--device", "cpu", "--out", tmp_path, "-q"], monkeypatch, capsys)
    assert code == 0, errors
    assert output.splitlines()[0].strip() == "permuted-digits, 1 epoch" and "3 result files in" in output
    found = [results.read(path) for path in tmp_path.glob("*.json")]
    assert sorted((r.config.tasks, len(r.accuracy)) for r in found) == [(2, 2), (3, 3), (4, 4)]


def test_settings_as_one_dictionary_are_refused_with_a_hint():
    with pytest.raises(AlassoError, match=r"settings of alasso are given directly, by their own names, as in a=1.8"):
        RunConfig.own("alasso", settings={"a": 2})


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


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    words = ("run", "permuted-digits", *SMALL_FLAGS, "--out", tmp_path / "file" / "below")
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "cannot write to" in errors and not output


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
        ("tasks=99999999", "tasks must be 5000 or fewer, not 99999999: each is tested after each"),
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
    assert code == 2 and errors == f"alasso: seed must be below 2³², not {seed}\n"


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


def test_settings_that_only_some_methods_have_are_said():
    settings = {"c": ["1", "2"], "epochs": ["1"], "lam": ["3"]}
    configs = runs.combinations("permuted-digits", ["sgd", "si", "ewc"], [0], {}, settings)
    assert commands.not_for_all(configs, settings) == [
        "c is not a setting of sgd, ewc: run without it",
        "lam is not a setting of sgd, si: run without it",
    ]
    assert commands.not_for_all([config for config in configs if config.method == "si"], {"c": ["1"]}) == []


@pytest.mark.parametrize(("words", "said"), [([], True), (["--quiet"], False)])
def test_they_are_said_before_anything_is_run(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "carry_out", lambda *rest: [])
    options = ["--method", "sgd", "si", "--set", "c=1", "--out", tmp_path, *words]
    code, output, errors = in_process(["run", "permuted-digits", *options], monkeypatch, capsys)
    assert not code and ("c is not a setting of sgd: run without it" in output + errors) == said


def test_the_demo_ends_with_a_page_and_the_next_command(tmp_path, monkeypatch, capsys):
    combinations = runs.combinations
    monkeypatch.setattr(
        runs,
        "combinations",
        lambda b, m, s, fields, v, *rest: combinations(b, m, s, {"tasks": 2, "epochs": 1, "hidden": 8}, v, *rest),
    )
    code, output, errors = in_process(["demo", "--out", tmp_path, "-q"], monkeypatch, capsys)
    assert code == 0, errors
    assert "5 result files in" in output and f"{tmp_path / 'report.html'}: 5 results" in output
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "After 2 tasks plain training has " in output
    following = output.splitlines()[-1].split()
    assert following[0] == "alasso"
    with pytest.raises(SystemExit) as ended:  # what it names is a command
        monkeypatch.setattr(runs, "carry_out", lambda *rest: [])
        monkeypatch.setattr(sys, "argv", following)
        cli.main()
    assert not ended.value.code
