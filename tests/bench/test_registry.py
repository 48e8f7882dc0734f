"""The registry: entries refer to what exists, and defaults come from the classes' own signatures."""

import inspect
import subprocess
import sys

import pytest

import alasso
from alasso.bench.learners.base import Learner
from alasso.bench.registry import BENCHMARKS, METHODS, label_of, loaded


@pytest.mark.parametrize("name", METHODS)
def test_an_entry_refers_to_what_exists(name):
    method = METHODS[name]
    assert issubclass(loaded(method.learner), Learner)
    assert set(method.search) <= set(method.settings)
    assert set(method.choices) == {setting for setting, value in method.settings.items() if isinstance(value, str)}
    assert all(method.settings[setting] in words for setting, words in method.choices.items())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("alasso", "ALASSO"), ("si", "SI"), ("ewc", "EWC"), ("online-ewc", "OnlineEWC"), ("mas", "MAS")],
)
def test_defaults_are_those_of_the_class(name, kind):
    arguments = inspect.signature(getattr(alasso, kind)).parameters
    assert METHODS[name].settings and not METHODS[name].own
    assert all(arguments[setting].default == value for setting, value in METHODS[name].settings.items())


def test_fixed_arguments_and_those_that_are_no_numbers_are_no_settings():
    assert set(METHODS["imm-mode"].settings) == {"transfer", "lam", "last_weight", "start", "labels", "drop"}
    assert METHODS["imm-mode"].settings["last_weight"] == 0.0  # as in result files; None in the library
    assert METHODS["ewc"].choices == {"labels": ("true", "sampled", "expected", "uniform", "reversed")}
    assert not METHODS["sgd"].settings


def test_methods_have_labels_and_looks_of_their_own():
    assert len({method.label for method in METHODS.values()}) == len(METHODS)
    assert len({method.look for method in METHODS.values()}) == len(METHODS)
    assert label_of("imm-mean") == "IMM (mean)" and label_of("mine") == "mine"


def test_settings_of_benchmarks_are_settings_of_their_methods():
    for benchmark in BENCHMARKS.values():
        for method, settings in benchmark.settings.items():
            assert set(settings) <= set(METHODS[method].settings)


def test_the_registry_is_light():
    script = "import sys, alasso.bench.registry; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
