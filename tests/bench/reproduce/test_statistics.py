"""Every computation against plain formulas on made-up accuracies, and what it says of seeds that are missing."""

import itertools
import math
import random
import statistics
from pathlib import Path

import pytest

from alasso import AlassoError
from alasso.bench.reproduce.claims import read_claims
from alasso.bench.reproduce.experiments import Evidence, NotRun, read_experiments
from alasso.bench.reproduce.statistics import COMPUTATIONS

from made_up import PROBED, SMALL, computed, evidence, experiment, of_rows, probe, result

PAPER = Path(__file__).parents[3] / "paper"
RUNS = ("alasso", "si", "ewc", "single-task")
TASKS, SEEDS = 6, 4


def approx(finding):
    return (pytest.approx(finding[0]), pytest.approx(finding[1]), finding[2])


def comes_to(finding):
    return finding.value, finding.deviation, finding.count


def reference(values):
    """Mean, standard deviation over seeds and their number."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)), len(values)


class Drawn:
    """Random accuracies of four runs and four seeds, with the measures worked out anew from the matrix alone."""

    def __init__(self, seed):
        draw = random.Random(seed)
        one = experiment(fields={**SMALL, "tasks": TASKS}, seeds=SEEDS)
        self.rows = {
            (run, s): [[round(draw.uniform(0.2, 0.95), 4) for _ in range(t + 1)] for t in range(TASKS)]
            for run in RUNS
            for s in range(SEEDS)
        }
        self.known = Evidence({"x": one}, [of_rows(one.config(run, s), rows) for (run, s), rows in self.rows.items()])

    def measure(self, run, name):
        """One number a seed."""
        return [getattr(self, name)(run, s) for s in range(SEEDS)]

    def A(self, run, s):
        return sum(self.rows[run, s][-1]) / TASKS

    def F(self, run, s):
        rows = self.rows[run, s]
        lost = [max(rows[t][j] for t in range(j, TASKS - 1)) - rows[-1][j] for j in range(TASKS - 1)]
        return sum(lost) / len(lost)

    def I(self, run, s):  # noqa: E743
        bound, own = self.rows["single-task", s], self.rows[run, s]
        return sum(bound[j][j] - own[j][j] for j in range(TASKS)) / TASKS

    def std(self, run, s):
        return statistics.pstdev(self.rows[run, s][-1])

    def gaps(self, high, low, name="A"):
        return [a - b for a, b in zip(self.measure(high, name), self.measure(low, name), strict=True)]


@pytest.fixture(params=range(3))
def drawn(request):
    return Drawn(request.param)


def means(found):
    return sum(found) / len(found)


@pytest.mark.parametrize("name", ["A", "F", "I", "std"])
def test_mean_and_difference_of_every_measure(drawn, name):
    found = computed("mean", drawn.known, of="x/si", measure=name)
    assert comes_to(found) == approx(reference(drawn.measure("si", name)))
    assert found.error == pytest.approx(found.deviation / 2)
    found = computed("difference", drawn.known, of="x/alasso", less="x/ewc", measure=name)
    assert comes_to(found) == approx(reference(drawn.gaps("alasso", "ewc", name)))


def test_gaps_to_others_count_by_the_closest(drawn):
    for how, gaps in (
        ("gap_to_best_other", [drawn.gaps("alasso", other) for other in ("si", "ewc")]),
        ("gap_to_least_other", [drawn.gaps(other, "alasso") for other in ("si", "ewc")]),
    ):
        found = computed(how, drawn.known, of="x/alasso", others=["x/si", "x/ewc"], measure="A")
        assert comes_to(found) == approx(reference(min(gaps, key=means)))
        assert found.note.endswith(("si", "ewc")[min((0, 1), key=lambda i: means(gaps[i]))])


def test_order_is_the_smallest_step_and_spread_the_largest(drawn):
    levels = [["si"], ["ewc", "alasso"], ["single-task"]]
    steps = [drawn.gaps(high, low) for below, above in itertools.pairwise(levels) for low in below for high in above]
    found = computed("order", drawn.known, rising=[[f"x/{run}" for run in level] for level in levels])
    assert comes_to(found) == approx(reference(min(steps, key=means)))
    ranges = [drawn.gaps(a, b) for a, b in itertools.permutations(RUNS, 2)]
    found = computed("spread", drawn.known, over=[f"x/{run}" for run in RUNS])
    assert comes_to(found) == approx(reference(max(ranges, key=means)))


def test_the_best_and_what_it_gains(drawn):
    top = max(("si", "ewc", "alasso"), key=lambda run: means(drawn.measure(run, "A")))
    found = computed("best", drawn.known, among=["x/si", "x/ewc", "x/alasso"])
    assert comes_to(found) == approx(reference(drawn.measure(top, "A"))) and found.note == f"best: {top}"
    found = computed("gain_of_best", drawn.known, among=["x/si", "x/ewc", "x/alasso"], less="x/single-task")
    assert comes_to(found) == approx(reference(drawn.gaps(top, "single-task")))


def test_distance_from_a_table_and_smaller_loss(drawn):
    table = {"si": 0.5, "ewc": 0.7}
    found = computed("largest_deviation", drawn.known, table={f"x/{run}": value for run, value in table.items()})
    far = max(table, key=lambda run: abs(means(drawn.measure(run, "A")) - table[run]))
    mean, deviation, seeds = reference(drawn.measure(far, "A"))
    assert comes_to(found) == approx((abs(mean - table[far]), deviation, seeds))

    own = drawn.gaps("alasso", "si")
    losses = [[other - a for other, a in zip(drawn.gaps(*pair), own, strict=True)] for pair in (RUNS[2:], RUNS[1:3])]
    others = [["x/ewc", "x/single-task"], ["x/si", "x/ewc"]]
    found = computed("smaller_loss", drawn.known, of=["x/alasso", "x/si"], others=others)
    assert comes_to(found) == approx(reference(min(losses, key=means)))


def test_shares_and_growth(drawn):
    gone, whole = drawn.gaps("alasso", "si"), drawn.gaps("single-task", "si")
    found = computed("recovered", drawn.known, of="x/alasso", floor="x/si", ceiling="x/single-task")
    assert comes_to(found) == approx(reference([a / b for a, b in zip(gone, whole, strict=True)]))

    def rise(run, s):
        rows = drawn.rows[run, s]
        return means(rows[TASKS - 1]) - means(rows[TASKS // 2 - 1])

    found = computed("growth_of_gap", drawn.known, of="x/alasso", less="x/si")
    assert comes_to(found) == approx(reference([rise("alasso", s) - rise("si", s) for s in range(SEEDS)]))

    def near(s):
        last, bound = drawn.rows["alasso", s][-1], drawn.rows["ewc", s][-1]
        return means([last[j] >= bound[j] - 0.1 for j in (1, 3, 5)])

    found = computed("tasks_near", drawn.known, of="x/alasso", bound="x/ewc", every=2, within=0.1)
    assert comes_to(found) == approx(reference([near(s) for s in range(SEEDS)]))
    assert found.note == f"{round(3 * sum(map(near, range(SEEDS))))} of 12 tasks"


def test_a_share_of_nothing_is_no_number():
    equal = evidence({run: [0.5, 0.5] for run in ("si", "alasso", "single-task")})
    found = computed("recovered", equal, of="x/alasso", floor="x/si", ceiling="x/single-task")
    assert math.isnan(found.value) and found.note == "floor and ceiling are equal"
    assert math.isnan(computed("tasks_near", equal, of="x/alasso", bound="x/single-task", every=9).value)
    one = computed("mean", evidence({"si": [0.5]}), of="x/si")
    assert (one.deviation, one.error, one.count) == (None, None, 1)


# -- seeds that are missing -----------------------------------------------------------------------------------------


def test_comparisons_are_over_the_seeds_that_both_have():
    known = evidence({"alasso": [0.8, 0.9, 0.1], "si": [0.5, 0.6]})
    found = computed("difference", known, of="x/alasso", less="x/si")
    assert comes_to(found) == (pytest.approx(0.3), pytest.approx(0.0), 2)
    known = evidence({"alasso": {0: 0.8, 1: 0.9}, "si": {0: 0.5}, "ewc": {1: 0.7}})
    assert computed("gap_to_best_other", known, of="x/alasso", others=["x/si", "x/ewc"]).value == pytest.approx(0.2)
    assert computed("largest_deviation", known, table={"x/si": 0.5, "x/ewc": 0.6}).value == pytest.approx(0.1)
    for how, arguments in (
        ("order", {"rising": [["x/si"], ["x/ewc"]]}),
        ("growth_of_gap", {"of": "x/ewc", "less": "x/si"}),
        ("tasks_near", {"of": "x/ewc", "bound": "x/si"}),
    ):
        with pytest.raises(NotRun, match=r"^x/ewc and x/si have no seed in common$"):
            computed(how, known, **arguments)


def test_the_best_is_picked_over_the_seeds_that_all_have_and_judged_by_all_of_its_own():
    known = evidence({"si": [0.5, 0.3], "ewc": [0.8], "alasso": [0.9, 0.6]})  # over both of its seeds, 0.75
    found = computed("best", known, among=["x/si", "x/ewc", "x/alasso"])
    assert (found.note, found.value, found.count) == ("best: alasso", pytest.approx(0.75), 2)
    found = computed("gain_of_best", known, among=["x/ewc", "x/alasso"], less="x/si")
    assert (found.note, found.value, found.count) == ("best: alasso", pytest.approx(0.35), 2)


def test_all_that_is_missing_is_named():
    with pytest.raises(NotRun) as caught:
        computed("gap_to_best_other", evidence({"alasso": [0.8]}), of="x/alasso", others=["x/si", "x/ewc"])
    assert caught.value.missing == ["x/si", "x/ewc"]
    with pytest.raises(NotRun) as caught:
        computed("mean", evidence({"si": [0.5]}), of="x/si", measure="I")
    assert caught.value.missing == ["x/single-task"]
    with pytest.raises(AlassoError, match="there is no measure 'Q'; there are A, F"):
        computed("mean", evidence({"si": [0.5]}), of="x/si", measure="Q")


def test_single_task_may_be_a_run_of_another_experiment():
    one, two = experiment(runs={"si": {}}), experiment("y", runs={"bound": {"method": "single-task"}})
    known = Evidence({"x": one, "y": two}, [result(one.config("si"), 0.5)])
    with pytest.raises(NotRun) as caught:
        computed("mean", known, of="x/si", measure="I")
    assert caught.value.missing == ["y/bound"]


# -- probes ---------------------------------------------------------------------------------------------------------


def test_probe_computations():
    one = experiment(runs={"alasso": {}}, probe=PROBED)
    none, known = Evidence({"x": one}, []), Evidence({"x": one}, [], [probe(one)])
    for how in ("probe_evenness", "probe_underestimated", "probe_unseen_is_steeper"):
        with pytest.raises(NotRun):
            computed(how, none, of="x/alasso")
    assert computed("probe_evenness", known, of="x/alasso").value == pytest.approx(0.2)  # of 0.2, 0.4, 0.1
    # Unseen sides: right, right, left; true rises 1, 1, 2; SI says 0.5, 1.5, 1.
    assert computed("probe_underestimated", known, of="x/alasso").value == pytest.approx(2 / 3)
    assert computed("probe_underestimated", known, of="x/alasso", surrogate="ALASSO").value == 0.0
    with pytest.raises(AlassoError, match="surrogate must be one of SI, ALASSO, not 'MAS'"):
        computed("probe_underestimated", known, of="x/alasso", surrogate="MAS")
    assert computed("probe_unseen_is_steeper", known, of="x/alasso").value == 1.0
    one_stood_still = Evidence({"x": one}, [], [probe(one, came_from=(0.5, 0.0, 0.5))])
    assert computed("probe_unseen_is_steeper", one_stood_still, of="x/alasso").value == 0.5


def test_a_surrogate_is_judged_near_the_end_of_training_and_of_weights_that_matter():
    one = experiment(runs={"alasso": {}}, probe={**PROBED, "offsets": 5})
    lines = {  # the unseen sides are right, right and left
        "offsets": [-1.0, -0.5, 0.0, 0.5, 1.0],
        "losses": [[2.0, 2.0, 2.0, 2.2, 2.3], [2.0, 2.0, 2.0, 2.6, 2.6], [3.0, 2.1, 2.0, 2.0, 2.0]],
        "importance": [1.0, 1.0, 0.3],
    }
    known = Evidence({"x": one}, [], [probe(one, **lines)])

    def share(**near):
        return computed("probe_underestimated", known, of="x/alasso", **near).value

    assert share() == pytest.approx(1 / 3)  # true 0.3, 0.6, 1; SI 1, 1, 0.3
    assert share(at=0.5) == pytest.approx(2 / 3)  # true 0.2, 0.6, 0.1; SI 0.25, 0.25, 0.075
    assert share(at=0.4) == share(at=0.5)  # the nearest place
    assert share(at=0.5, rise=0.09) == 0.5  # a rise by more than 0.18: not the last one
    for far in (1.5, 0.0):
        with pytest.raises(AlassoError, match=f"at must lie above 0 and not above 1, where the lines end, not {far}"):
            share(at=far)


def test_seeds_of_probes_count_alike_and_differ_at_least_by_chance():
    one = experiment(runs={"alasso": {}}, probe=PROBED, seeds=3)
    ways = {10: (0.5, 0.5, 0.5), 0: (-0.5, -0.5, 0.5), 1: (0.5, 0.0, 0.5)}
    known = Evidence({"x": one}, [], [probe(one, seed, way) for seed, way in ways.items()])
    assert list(known.probes("x/alasso")) == [0, 1, 10]
    found = computed("probe_unseen_is_steeper", known, of="x/alasso")
    assert found.value == pytest.approx((1 + 1 / 2 + 1 / 3) / 3) and (found.count, found.note) == (3, "8 weights")
    assert found.deviation == pytest.approx(statistics.stdev([1, 1 / 2, 1 / 3]))
    lucky = Evidence({"x": one}, [], [probe(one, seed, (0.5, 0.5, 0.5)) for seed in range(3)])
    found = computed("probe_unseen_is_steeper", lucky, of="x/alasso")  # 1/3 of each seed, which is luck
    assert found.deviation == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 3))
    flat = Evidence({"x": one}, [], [probe(one, losses=[[1.0, 1.0, 1.0]] * 3)])
    assert math.isnan(computed("probe_evenness", flat, of="x/alasso").value)


def test_every_computation_is_used_by_a_claim_of_the_paper():
    claims, _ = read_claims(PAPER, read_experiments(PAPER))
    assert {claim.how for claim in claims} == set(COMPUTATIONS)
