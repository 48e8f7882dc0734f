"""Runs in words."""

from alasso.bench import labels

from run_helpers import small


def test_runs_of_a_sweep_over_many_settings_are_named_by_those_that_are_not_as_usual():
    usual, other = small(), small(xi=0.5)
    few = [usual, other, small("si")]
    many = [*few, small(a=3.0, hidden=9), small(epochs=7)]
    named = [[labels.label(config, labels.varying_settings(configs)) for config in configs] for configs in (few, many)]
    assert named[0] == ["alasso xi=0.01, seed 0", "alasso xi=0.5, seed 0", "si xi=0.01, seed 0"]
    assert named[1][:2] == ["alasso epochs=2 hidden=16, seed 0", "alasso xi=0.5 epochs=2 hidden=16, seed 0"]
    assert len(set(named[1])) == len(many)
