"""Files hold data: reading one never runs code that it holds or names."""

import ast
import json

import pytest

from alasso.bench import results

import measure_code
from made_up import small_paper
from report_helpers import made_up
from run_helpers import SMALL_FLAGS, in_process

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
#: Named for the exception that torch raises, never to read anything.
ONLY_AN_EXCEPTION = {"pickle.UnpicklingError"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def dotted(node):
    """``np.load`` of an expression that names it so."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return getattr(node, "id", "?")


def flags(call):
    return {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}


def unsafe(tree):
    """What of a module could run code from a file."""
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name and name.partition(".")[0] in UNSAFE_MODULES and name not in ONLY_AN_EXCEPTION:
            yield name
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNSAFE_MODULES:
            yield node.module
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        if called in UNSAFE_CALLS:
            yield called
        if called == "torch.load" and flags(node).get("weights_only") is not True:
            yield "torch.load without weights_only=True"
        if called in ("np.load", "numpy.load") and flags(node).get("allow_pickle") not in (None, False):
            yield "np.load with allow_pickle"


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(f)",
        "from pickle import load",
        "eval(text)",
        "exec(text)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f)",
    ],
)
def test_the_check_sees_what_would_run_code(line):
    assert list(unsafe(ast.parse(line)))


def test_no_module_reads_a_file_in_a_way_that_can_run_code():
    files = sorted(measure_code.SOURCE.rglob("*.py"))
    found = {path.name: list(unsafe(ast.parse(path.read_text(encoding="utf-8")))) for path in files}
    assert len(files) > 80 and not {name: what for name, what in found.items() if what}


EVIL = """
from pathlib import Path
(Path(__file__).parent / "PWNED").touch()
from torch import nn
def f(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A folder from somebody else: a result that names a module, and the module. One stands in it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "evilmod.py").write_text(EVIL)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    monkeypatch.delitem(__import__("sys").modules, "evilmod", raising=False)
    path = results.write(made_up("sgd", tasks=2, epochs=1, hidden=20), folder)
    raw = json.loads(path.read_text())
    raw["config"] = {**raw["config"], "model": "evilmod:f", "hidden": None}
    path.write_text(json.dumps(raw))
    return folder, path


PROBE = ("--weights", 3, "--offsets", 3, "--examples", 20, "--device", "cpu")


def test_probe_imports_the_network_of_a_result_only_if_the_command_line_names_it(shared, monkeypatch, capsys):
    folder, path = shared
    words = ["probe", path, *PROBE, "--out", folder / "out"]
    for more in ([], ["--allow-model", "another:f"]):
        code, _, errors = in_process([*words, *more], monkeypatch, capsys)
        assert code == 2 and not (folder / "PWNED").exists() and len(errors.splitlines()) == 1
        assert "importing it runs its code: add --allow-model evilmod:f if you trust it" in errors
    code, _, errors = in_process([*words, "--allow-model", "evilmod:f"], monkeypatch, capsys)
    assert code == 0 and (folder / "PWNED").exists(), errors


def test_the_folder_of_a_file_is_not_where_its_network_is_looked_for(shared, tmp_path, monkeypatch, capsys):
    folder, path = shared
    monkeypatch.chdir(tmp_path)
    words = ["probe", path, *PROBE, "--out", tmp_path / "out", "--allow-model", "evilmod:f"]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "module evilmod cannot be imported" in errors and not (folder / "PWNED").exists()


def test_nor_does_a_run_import_what_a_file_of_its_fields_names(shared, monkeypatch, capsys):
    folder, _ = shared
    (folder / "run.toml").write_text('model = "evilmod:f"\n')
    words = ["run", "permuted-digits", "--method", "sgd", *SMALL_FLAGS, "--out", folder / "out"]
    words = [word for word in words if word not in ("--set", "hidden=16")] + ["--config", "run.toml"]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and "add --model evilmod:f if you trust it" in errors and not (folder / "PWNED").exists()
    code, _, errors = in_process([*words, "--model", "evilmod:f"], monkeypatch, capsys)
    assert code == 0 and (folder / "PWNED").exists(), errors


def test_nor_does_a_reproduction_import_what_an_experiment_names(shared, monkeypatch, capsys):
    folder, _ = shared
    small_paper(folder / "paper")
    for file in (folder / "paper" / "experiments").glob("*.toml"):
        text = file.read_text()
        file.write_text(text.replace("hidden = ", 'model = "evilmod:f"\n# hidden = '))
    code, _, errors = in_process(["reproduce", "--quiet"], monkeypatch, capsys)
    assert code == 2 and len(errors.splitlines()) == 1, errors
    assert "add --allow-model evilmod:f if you trust it" in errors and not (folder / "PWNED").exists()
