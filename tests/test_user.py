"""A user's program, `user.py`, names all that is public, keeps its types and runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import alasso
from alasso import bench, importance, vcl

import user

FILE = Path(user.__file__)


@pytest.mark.parametrize("module", [alasso, bench, importance, vcl], ids=lambda module: module.__name__)
def test_it_names_all_that_is_public(module):
    text = FILE.read_text(encoding="utf-8")
    assert [name for name in module.__all__ if name not in text] == ["__version__"] * (module is alasso)


@pytest.mark.parametrize("number", range(len(user.all_methods(user.network()))))
def test_every_method_goes_through_the_loop(number, tmp_path):
    user.a_loop(lambda model: user.all_methods(model)[number], tmp_path / "state.pt")


def test_the_rest_runs_too(tmp_path):
    assert user.settings_are_attributes() == 3.0
    assert "2.weight" in user.a_summary(user.a_pretrained_model())
    assert user.a_gauge()["forgetting/first"] == 0
    assert user.fused_optimizers() > 0
    assert user.a_search().c > 0
    assert torch.allclose(user.variational().sum(1), torch.ones(4))
    assert user.drop_transfer().shape == (1, 3)
    assert len(user.the_laboratory(tmp_path).accuracy) == 2
    assert user.what_a_search_chose(Path(bench.__file__).parent / "searched" / "permuted-digits.json")
    assert len(user.mistakes()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker", [["mypy", "--strict", "--config-file", os.devnull], ["pyright"]], ids=lambda c: c[0]
)
def test_type_checkers_that_know_nothing_of_this_project_find_no_fault(checker, tmp_path):
    pytest.importorskip(checker[0])
    (tmp_path / "user.py").write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    search = {"MYPYPATH": str(FILE.parent.parent / "src"), "PYTHONPATH": str(FILE.parent.parent / "src")}
    done = subprocess.run(
        [sys.executable, "-m", *checker, "user.py"], cwd=tmp_path, env={**os.environ, **search}, capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()
