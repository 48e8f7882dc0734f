"""The command line itself: its help, its parser, one line for every mistake."""

import errno
import os
import pkgutil
import re
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from alasso.bench import data, models
from alasso.bench.cli import main as cli
from alasso.bench.registry import BENCHMARKS, METHODS
from alasso.bench.training import sweep as runs

from run_helpers import SMALL_FLAGS, command, in_process


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "permuted-digits", "--epoch", "3"], "no such option: --epoch; did you mean --epochs? See alasso run"),
        (["run", "permuted-digits", "--sed", "3"], "no such option: --sed; did you mean --seed? See alasso run --help"),
        (["run", "permuted-digits", "--tasks", "abc"], "invalid value for '--tasks': "),
        (["run", "permuted-digits", "--tasks"], "option '--tasks' requires an argument"),
        (["run", "permuted-digits", "--method"], "option '--method' requires an argument"),
        (["run", "permuted-digits", "--seed", "-q"], "invalid value for '--seed': "),
        (["run", "permuted-digits", "--checkpoint-every", "-1"], "invalid value for '--checkpoint-every': "),
        (["run", "permuted-digits", "--log", "paper"], "invalid value for '--log': "),
        (["run", "permuted-digits", "--seed=0,1"], "invalid value for '--seed': "),
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
        (["run", "permuted-digits", "--tasks", "3", "--set", "tasks=2,4"], "--tasks and --set both give tasks"),
        (
            ["run", "permuted-digits", "--permute-first", "--set", "permute_first=no"],
            "--permute-first and --set both give",
        ),
        (["run", "split-folder", "a", "--set", "path=b"], "PATH and --set both give path"),
        (["run", "permuted-digits", "--seed", "0", "--set", "seed=1"], "--seed and --set both give seed"),
        (["run", "permuted-digits", "--set", "seed=1,2"], "give seeds with --seed"),
        (["run", "permuted-digits", "--set", "a=1", "a=2"], "--set has a twice; several values go in one: a=1,2"),
        (["run", "permuted-digits", "../imgs"], "path is for split-folder; it changes nothing in permuted-digits"),
        (["run", "permuted-mnist", "--data-dir", "no-such-folder"], "alasso data fetch mnist"),
        (["run", "split-folder"], "split-folder needs the folder of images"),
        (["run", "split-folder", "no-such-folder"], "no-such-folder"),
        (["run", "permuted-digits", "--config", "absent.toml"], "absent.toml cannot be read"),
        (["run", "permuted-digits", "--reference", "absent.json"], "absent.json cannot be read"),
        (["data", "check", "mnits"], "mnits"),
        (["search", "permuted-digits", "--file", "x.json", "--method", "sgd"], "sgd has no settings to search"),
        (["search", "permuted-digits", "--file", "x.json", "--set", "lam=1"], "--set needs --method, to say which"),
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


def test_flags_and_options_of_several_values_may_be_repeated(monkeypatch, capsys):
    words = ["run", "permuted-digits", "-q", "-q", "--seed", "0", "--seed", "1", "--tasks", "0"]
    _, _, errors = in_process(words, monkeypatch, capsys)
    assert errors == "alasso: tasks must be 1 or more, not 0\n"


@pytest.mark.parametrize("words", [["--help"], ["run", "-h"], ["data", "--help"], ["--version"], [], ["data"]])
def test_help_is_no_mistake(words, monkeypatch, capsys):
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert output.strip() and not errors
    assert code == 0 or (code == 2 and words in ([], ["data"]))  # what parsers make of a missing command differs


def test_a_mistake_shows_no_traceback_in_a_real_terminal_either():
    done = command("run", "permuted-digits", "--method", "alaso")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_list_shows_everything_there_is():
    shown = CliRunner().invoke(cli.app, ["list"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and all(name in shown.stdout for name in [*BENCHMARKS, *METHODS])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_table_of_commands_says_what_each_command_says_of_itself(name, monkeypatch, capsys):
    where, line = cli.COMMANDS[name]
    found = pkgutil.resolve_name(f"alasso.bench.cli.{where}")
    own = found.info.help if isinstance(found, typer.Typer) else found.__doc__
    assert own.splitlines()[0] == line
    code, output, errors = in_process([name, "--help"], monkeypatch, capsys)
    assert not code and f"Usage: alasso {name}" in output and not errors
    assert all(len(row) <= 80 for row in output.splitlines())


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_an_encoding_without_some_letters_is_no_obstacle():
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "150"}
    done = subprocess.run([sys.executable, "-m", "alasso", "list"], env=ascii_only, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and "scikit-learn's 8 ? 8 digits" in done.stdout


def test_help_waits_for_nothing_heavy_and_a_command_only_for_its_own():
    ask = "import sys; sys.argv = ['alasso', *{words}]\nimport alasso.bench.cli.main as cli\n"
    ask += "try: cli.main()\nexcept SystemExit: print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = set(python(ask.format(words=["--help"])).stdout.splitlines()[-1].split())
    assert "typer" in loaded and not loaded & {"torch", "sklearn", "numpy", "matplotlib", "bokeh", "PIL"}
    loaded = set(python(ask.format(words=["report", "--help"])).stdout.splitlines()[-1].split())
    assert "numpy" in loaded and not loaded & {"torch", "sklearn", "matplotlib", "bokeh"}


@pytest.mark.parametrize(("missing", "words"), [("typer", ["--help"]), ("numpy", ["compare", "x"])])
def test_without_the_extra_one_line_says_what_to_install(missing, words):
    done = python(
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['alasso', *{words!r}]\n"
        "from alasso.__main__ import main; main()"
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("alasso: ") and len(done.stderr.splitlines()) == 1
    assert f"needs {missing}: pip install 'alasso[bench]'" in done.stderr


def test_ctrl_c_while_modules_are_loaded_shows_no_traceback():
    script = "import os, signal, sys\n"
    script += "class Presses:\n def find_spec(self, name, *_):\n"
    script += "  if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
    script += "sys.meta_path.insert(0, Presses())\nfrom alasso.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", script, "list"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_file_that_the_system_refuses_is_one_line(monkeypatch, capsys):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "data/train.bin")

    monkeypatch.setattr(data, "check", refused)
    code, _, errors = in_process(["data", "check"], monkeypatch, capsys)
    assert (code, errors) == (2, "alasso: data/train.bin: Permission denied\n")


def test_an_option_takes_several_values():
    assert cli.spread_values(["run", "b", "--method", "sgd", "si", "--epochs", "3"]) == [
        "run", "b", "--method", "sgd", "--method", "si", "--epochs", "3",
    ]  # fmt: skip
    assert cli.spread_values(["run", "b", "--seed", "0,", "1,2"]) == [
        "run",
        "b",
        *(["--seed", "0", "--seed", "1", "--seed", "2"]),
    ]
    own_images = ["run", "split-folder", "--seed", "0", "-q", "my,images", "--set", "a=1,2"]
    assert cli.spread_values(own_images) == own_images


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
    assert cli.is_out_of_memory(error) == is_one


def test_a_failure_that_is_not_the_users_is_not_hidden(monkeypatch):
    def fails(configs, options, console, reference):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(runs, "carry_out", fails)
    monkeypatch.setattr(sys, "argv", ["alasso", "demo"])
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.main()


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("command", [[], ["run"], ["data", "fetch"]], ids=" ".join)
def test_help_is_as_wide_as_the_terminal_and_cuts_no_name(command, columns):
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    words = [sys.executable, "-m", "alasso", *command, "--help"]
    shown = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    assert max(map(len, shown.splitlines())) <= columns + 4  # a long word may stand out
    assert re.search(r"--\w+…", shown) is None and "\x1b" not in shown
