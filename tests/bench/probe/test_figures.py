"""What matplotlib draws of a probe."""

from pathlib import Path

from alasso.bench.probe import read
from alasso.bench.probe.figures import MOST_LINES, sides, surrogates
from alasso.bench.registry import METHODS

from report_helpers import measured


def test_committed_probes_are_drawn_with_a_line_for_each_surrogate():
    paths = sorted((Path(__file__).parents[3] / "paper" / "results").glob("*.probe.json.xz"))
    assert len(paths) == 3
    for path in paths:
        found = read(path)
        left, _ = sides(found).axes
        assert len(left.lines) <= MOST_LINES + 2
        (axes,) = surrogates(found).axes
        assert [line.get_color() for line in axes.lines][:3] == [
            METHODS[m].look.light for m in ("single-task", "si", "alasso")
        ]


def test_a_sample_without_any_effect_has_no_figure(tmp_path):
    assert sides(measured([[1.0, 1.0, 1.0]])) is None
