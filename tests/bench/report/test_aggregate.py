"""Groups of seeds, their means and differences."""

import math

import numpy as np
import pytest

from alasso.bench.report.aggregate import Mean, difference, groups, mean_of, over_shared_seeds, paired, variant
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


def group(method, seeds, **changes):
    (found,) = groups([made_up(method, seed, **changes) for seed in seeds])
    return found


def test_seeds_in_common_are_paired():
    one, other = group("si", (0, 1, 2)), group("alasso", (1, 2, 3), fading=0.01)
    found = difference(one, other, "A")
    apart = np.array(other.measures["A"][:2]) - np.array(one.measures["A"][1:])
    assert found.pairs == 2
    assert found.mean == pytest.approx(apart.mean())
    assert found.error == pytest.approx(apart.std(ddof=1) / math.sqrt(2))


def test_other_seeds_are_independent_samples():
    one, other = group("si", (0, 1, 2)), group("alasso", (3, 4))
    found = difference(one, other, "A")
    a, b = (np.array(g.measures["A"]) for g in (one, other))
    assert found.pairs == 0
    assert found.error == pytest.approx(math.sqrt(a.var(ddof=1) / 3 + b.var(ddof=1) / 2))


def test_a_single_seed_in_common_is_a_pair_too():
    one, other = group("si", (0, 1, 2)), group("alasso", (1,), fading=0.01)
    found = difference(one, other, "A")
    assert (found.pairs, found.error) == (1, None)
    assert found.mean == pytest.approx(other.measures["A"][0] - one.measures["A"][1])


def test_a_single_seed_has_no_standard_error():
    assert difference(group("si", (0,)), group("alasso", (0,)), "A").error is None
    assert difference(group("si", (0,)), group("alasso", (0,)), "I") is None


def test_means_are_of_known_values_and_need_two_for_a_deviation():
    assert mean_of([None, 1.0, 3.0]) == Mean(2.0, pytest.approx(math.sqrt(2)), 2)
    assert mean_of([None, 1.0, 3.0]).error == pytest.approx(1.0)
    assert mean_of([5.0]) == Mean(5.0, None, 1) and mean_of([5.0]).error is None
    assert mean_of([None]) is None and mean_of([]) is None


def test_values_are_paired_by_seed():
    assert paired({0: 1.0, 1: 2.0, 3: 9.0}, {1: 5.0, 2: 7.0, 0: 1.5}) == {0: 0.5, 1: 3.0}


def test_groups_to_be_compared_keep_the_seeds_that_all_have():
    one, other = over_shared_seeds([group("si", (0, 1, 2)), group("alasso", (1, 2, 3))])
    assert one.seeds == other.seeds == (1, 2)
    assert one.measures["A"] == group("si", (1, 2)).measures["A"]
    apart = [group("si", (0,)), group("alasso", (1,))]
    assert over_shared_seeds(apart) == apart
    assert over_shared_seeds([]) == []
