"""A run's name holds a digest of its config, and names its file: what is committed keeps its name."""

from pathlib import Path

import pytest

from alasso import AlassoError
from alasso.bench import results
from alasso.bench.config import RunConfig
from alasso.bench.registry import BENCHMARKS, METHODS

PAPER = Path(__file__).parents[2] / "paper"
TABLE = Path(__file__).with_name("config_names.txt")


def presets():
    """The config of every benchmark and method as they stand in the registry, where the two go together."""
    for benchmark in BENCHMARKS:
        for method in METHODS:
            try:
                yield RunConfig.for_benchmark(benchmark, method, path="pets" if benchmark == "split-folder" else None)
            except AlassoError:  # dropout is for the mlp
                continue


def committed():
    return [one.config for one in results.read_all([PAPER / "results"])]


def test_results_and_presets_keep_their_names():
    """New methods bring new names; a name that is gone means that files are no longer found by it.

    After a wanted change, write the table anew: python tests/bench/test_config_names.py
    """
    gone = set(TABLE.read_text(encoding="utf-8").split()) - set(without_seeds([*presets(), *committed()]))
    assert not gone


def test_a_config_read_back_has_the_same_name():
    for config in [*presets(), *committed()]:
        assert RunConfig.from_json(config.to_json()) == config
        assert RunConfig.from_json(config.to_json()).name == config.name


@pytest.mark.parametrize(("field", "value"), [("learning_rate", 1e-4), ("batch_size", 7), ("seed", 3)])
def test_every_field_and_the_seed_are_in_the_name(field, value):
    usual = RunConfig.for_benchmark("permuted-digits", "alasso")
    assert RunConfig.for_benchmark("permuted-digits", "alasso", **{field: value}).name != usual.name


def without_seeds(configs):
    return sorted({config.name.rsplit("_s", 1)[0] for config in configs})


if __name__ == "__main__":
    TABLE.write_text("\n".join(without_seeds([*presets(), *committed()])) + "\n", encoding="utf-8")
