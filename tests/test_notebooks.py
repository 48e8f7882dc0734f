"""The notebooks' cells run one after the other, and what they show is what they say; none is stored with outputs."""

import json
import re
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' remarks are not the point here


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def names_after(tmp_path, monkeypatch):
    """Runs a notebook as a kernel would, without a display, in a folder of its own; returns its names."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(name, *needed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for library in needed:
                pytest.importorskip(library, reason=f"{name} needs {library}")
        names = {"__name__": "__main__"}
        for cell in read(FOLDER / name)["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}, {cell['id']}", "exec"), names)
        assert pyplot.get_fignums() == [1]
        return names

    yield run
    pyplot.close("all")


def test_first_steps(names_after, capsys):
    names = names_after("first_steps.ipynb")
    assert names["plain"]["accuracy/task 1"] < 0.6 < 0.75 < names["protected"]["accuracy/task 1"]
    assert "KronALASSO after 4 tasks" in capsys.readouterr().out


def test_domains(names_after):
    names = names_after("domains.ipynb", "transformers", "accelerate")
    assert names["protected"]["accuracy/films"] > names["plain"]["accuracy/films"] + 0.1
    assert names["protected"]["accuracy/travel"] > 0.9


def test_own_images(names_after):
    results = names_after("own_images.ipynb")["results"]
    forgetting = [result.metrics["F"] for result in results]
    assert min(forgetting[:2]) > 0.03 > max(forgetting[2:]) and len(results[0].accuracy) == 3
    assert Path("figures", "mean-accuracy.png").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_outputs(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("code", "markdown") and cell["metadata"] == {}
        for target in re.findall(r"\]\(([^)#]+)", "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""):
            assert (FOLDER / target).exists(), f"{path.name} links to {target}"
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
