"""Groups of seeds, their means and differences."""

import pytest

from alasso.bench.report.aggregate import groups, variant
from alasso.bench.report.sections import sections

from report_helpers import made_up, several


def test_variants_are_recognised_from_their_settings():
    found = {variant(result.config) for result in several()}
    assert found == {None, "asymmetric only", "accurate only", "no decoupling"}
    assert variant(made_up(a=1.0).config) is None  # a = a' = 1 is where the defaults stand


def test_seeds_go_together_and_the_newest_of_repeated_runs_counts():
    old = made_up(seed=1, environment={"finished": "2024"})
    (group,) = groups([made_up(seed=1, fading=0.1), old, made_up(seed=0)])
    assert (group.seeds, group.repeats) == ((0, 1), 1)
    assert group.results[1].environment["finished"] == "2025-01-02"


def test_intransigence_is_filled_in_from_a_single_task_run():
    (section,) = sections([made_up("si", fading=0.1), made_up("single-task", fading=0.0)])
    assert section.standard["si"].mean("I") == pytest.approx(0.0)
    (alone,) = sections([made_up("si")])
    assert alone.standard["si"].mean("I") is None
