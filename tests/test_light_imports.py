"""Optional libraries stay optional."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONAL = ("lightning", "pytorch_lightning", "transformers", "accelerate", "peft", "avalanche", "datasets")


def test_importing_alasso_and_all_methods_imports_none_of_the_trainers():
    script = "import sys, alasso; alasso.ALASSO, alasso.EWC; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded and not loaded.intersection(OPTIONAL)


def test_torch_loads_its_compiler_only_where_a_method_is_attached():
    """It takes as long as all of torch, in every command that reads settings, too."""
    script = "import sys; from alasso import *; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


def test_the_command_line_is_light_too():
    script = "import sys, alasso.bench.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()}.intersection(OPTIONAL)


@pytest.mark.parametrize(
    ("module", "library"),
    [("lightning", "lightning"), ("huggingface", "transformers"), ("lora", "peft"), ("avalanche", "avalanche")],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(module, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"alasso.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'alasso\[{module}\]'"):
        importlib.import_module(f"alasso.integrations.{module}")


def test_a_plain_install_asks_for_none_of_them():
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    required = {requirement.split(">")[0].split(";")[0].strip() for requirement in project["dependencies"]}
    assert not required.intersection({*OPTIONAL, "avalanche-lib"})
    assert {"lightning", "huggingface", "lora", "avalanche"} <= set(project["optional-dependencies"])
