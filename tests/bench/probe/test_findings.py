"""What a probe found: its file, its words, its surrogates."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from alasso.bench.probe import Plan, read
from alasso.errors import AlassoError

from report_helpers import made_up, measured


def test_lines_are_turned_steep_side_right_and_flat_ones_left_out():
    found = measured([[1.3, 1.0, 1.1], [1.0, 1.0, 1.0], [0.9, 1.0, 1.2]])
    assert np.allclose(found.steep_right(), [[0.1, 0, 0.3], [-0.1, 0, 0.2]])
    assert found.shallow_over_steep() == pytest.approx([1 / 3, -0.5])
    said = "\n".join(found.statement())
    assert "without any effect on the loss: 1," in said and "3.00 times as much" in said


def test_surrogates_are_quadratics_with_the_springs_of_their_sides():
    found = replace(measured([[1.3, 1.0, 1.1], [1.0, 1.0, 1.0]]), offsets=[-0.5, 0.0, 2.0])
    assert found.surrogate("SI").tolist() == [[0.125, 0.0, 2.0]] * 2
    assert found.surrogate("ALASSO").tolist() == [[0.125, 0.0, 3.6]] * 2
    with pytest.raises(AlassoError, match="surrogate must be one of SI, ALASSO, not 'EWC'"):
        found.surrogate("EWC")


def test_wrong_plans_are_refused():
    with pytest.raises(AlassoError, match="odd"):
        Plan(offsets=40)
    with pytest.raises(AlassoError, match="span"):
        Plan(span=0.0)


@pytest.mark.parametrize("part", ["offsets", "weights", "losses", "importance", "came_from", "springs", "config"])
def test_a_damaged_probe_is_one_clear_line(tmp_path, part):
    whole = asdict(measured([[1.5, 1.0, 3.0], [1.0, 1.0, 1.0]], config=made_up().config.to_json()))
    path = tmp_path / "z.probe.json"
    path.write_text(json.dumps({**whole, part: type(whole[part])()}))
    with pytest.raises(AlassoError, match="is not a measurement of alasso probe; delete it to measure again"):
        read(path)


def test_a_probe_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "z.probe.json"
    found = measured([[1.5, 1.0, 3.0], [1.0, 1.0, 1.0]], config=made_up().config.to_json())
    path.write_bytes(found.as_file())
    assert read(path) == found
    config = {name: value for name, value in found.config.items() if name != "seed"}
    path.write_bytes(replace(found, config=config).as_file())
    assert read(path).seed == 0  # which a config need not name
