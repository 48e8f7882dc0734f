"""``alasso reproduce``: plans, computations and verdicts on made-up results, and one small run from end to end."""

import json
import math
import re
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from alasso import AlassoError
from alasso.bench import metrics, results
from alasso.bench.cli import main as cli
from alasso.bench.cli import reproduce as commands
from alasso.bench.config import RunConfig
from alasso.bench.learners import base as learners
from alasso.bench.registry import METHODS
from alasso.bench.reproduce import claims, counting, show, stopwatch, timing
from alasso.bench.reproduce import execute as carrying
from alasso.bench.reproduce.claims import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_COMPUTABLE,
    NOT_RUN,
    WITHIN_NOISE,
    Claim,
    judge,
    read_claims,
)
from alasso.bench.reproduce.document import QUICK_TEMPLATE, Document, template_of
from alasso.bench.reproduce.evidence import Evidence, NotRun
from alasso.bench.reproduce.experiments import PAPER, Experiment, chosen, read_experiment, read_experiments
from alasso.bench.reproduce.parts import PARTS_FILE, note_part, read_parts
from alasso.bench.reproduce.plan import make_plan, probe_path, whole_parts
from alasso.bench.reproduce.statistics import COMPUTATIONS, Finding
from alasso.bench.reproduce.study import Places, Study
from alasso.bench.results import Result, result_path

SMALL = {"tasks": 3, "epochs": 1, "hidden": 8}


def experiment(name="x", **changes):
    runs = {"alasso": {}, "si": {}, "ewc": {}, "single-task": {}}
    given = {"title": "X", "paper": "Fig. 1", "benchmark": "permuted-digits", "seeds": 2, "cost": "", "runs": runs}
    return Experiment(id=name, **{**given, "fields": SMALL, **changes})


def result(config, final, *, learned=0.9, halfway=None, data=None):
    """Accuracies that end in ``final``: a number for all tasks, or one for each."""
    tasks = config.tasks
    last = final if isinstance(final, list) else [final] * tasks
    rows = [[learned] * (t + 1) for t in range(tasks - 1)] + [last]
    if halfway is not None:
        rows[tasks // 2 - 1] = [halfway] * (tasks // 2)
    ahead, untrained = [0.1] * (tasks - 1), [0.1] * tasks
    return Result(
        config=config,
        environment={"cpu": "abacus", "torch": "2", "commit": "0123456789", "finished": "2025"},
        data=data or {"digits": "scikit-learn"},
        accuracy=rows,
        ahead=ahead,
        untrained=untrained,
        metrics=metrics.summary(rows, ahead=ahead, untrained=untrained),
        seconds=10.0,
        peak_memory=1,
    )


def evidence(finals, one=None, out=None, **changes):
    """``finals``: run → final accuracy of each seed."""
    one = one or experiment()
    found = [result(one.config(run, s), f, **changes) for run, seeds in finals.items() for s, f in enumerate(seeds)]
    return Evidence({one.id: one}, found, out)


def computed(how, known, **arguments):
    return COMPUTATIONS[how](known, **arguments)


# -- computations -------------------------------------------------------------------------------------------------


def test_mean_over_seeds():
    found = computed("mean", evidence({"si": [0.5, 0.7]}), of="x/si")
    assert (found.value, found.seeds) == (pytest.approx(0.6), 2)
    assert found.deviation == pytest.approx(math.sqrt(0.02)) and found.error == pytest.approx(0.1)
    assert computed("mean", evidence({"si": [0.5]}), of="x/si").deviation is None
    assert computed("mean", evidence({"si": [0.5]}), of="x/si", measure="F").value == pytest.approx(0.4)


def test_intransigence_needs_the_single_task_run():
    alone = evidence({"si": [0.5]})
    with pytest.raises(NotRun) as caught:
        computed("mean", alone, of="x/si", measure="I")
    assert caught.value.missing == ["x/single-task"]
    known = evidence({"si": [[0.9, 0.9, 0.6]], "single-task": [0.9]})
    assert computed("mean", known, of="x/si", measure="I").value == pytest.approx(0.1)


def test_intransigence_may_wait_for_the_single_task_run_of_another_experiment():
    one, two = experiment(runs={"si": {}}), experiment("y", runs={"bound": {"method": "single-task"}})
    known = Evidence({"x": one, "y": two}, [result(one.config("si"), 0.5)])
    judged = judge(claim(arguments={"of": "x/si", "measure": "I"}, at_most=1.0), known)
    assert (judged.verdict, judged.missing) == (NOT_RUN, ["y/bound"])
    alone = Evidence({"x": one}, known.results_of(["x"]))  # as in a quick version, which may leave it out
    judged = judge(claim(arguments={"of": "x/si", "measure": "I"}, at_most=1.0), alone)
    assert show.missing_lines([judged]) == ["not run in x: single-task"]


def test_differences_are_seed_by_seed_over_shared_seeds():
    known = evidence({"alasso": [0.8, 0.9, 0.1], "si": [0.5, 0.6]})
    found = computed("difference", known, of="x/alasso", less="x/si")
    assert (found.value, found.deviation, found.seeds) == (pytest.approx(0.3), pytest.approx(0.0), 2)


def test_what_is_missing_is_named_all_of_it():
    with pytest.raises(NotRun) as caught:
        computed("gap_to_best_other", evidence({"alasso": [0.8]}), of="x/alasso", others=["x/si", "x/ewc"])
    assert caught.value.missing == ["x/si", "x/ewc"]


def test_gap_to_the_best_of_others_by_their_means():
    known = evidence({"alasso": [0.8, 0.8], "si": [0.5, 0.7], "ewc": [0.65, 0.5]})
    found = computed("gap_to_best_other", known, of="x/alasso", others=["x/si", "x/ewc"])
    assert found.value == pytest.approx(0.2) and found.note == "best other: si"


def of_seeds(finals):
    """``finals``: run, of one of two experiments, x and y → {seed: final accuracies}."""
    both = {"x": experiment(), "y": experiment("y", fields={**SMALL, "hidden": 16})}
    parted = {tuple(reference.split("/")): seeds for reference, seeds in finals.items()}
    found = [result(both[e].config(run, s), f) for (e, run), seeds in parted.items() for s, f in seeds.items()]
    return Evidence(both, found)


def test_runs_of_one_name_in_two_experiments_are_two():
    known = of_seeds({"x/alasso": {0: 0.8}, "x/si": {0: 0.79}, "y/si": {0: 0.2}})
    others = ["x/si", "y/si"]
    assert computed("gap_to_best_other", known, of="x/alasso", others=others).value == pytest.approx(0.01)
    assert computed("order", known, rising=[others, ["x/alasso"]]).value == pytest.approx(0.01)
    assert computed("spread", known, over=others).value == pytest.approx(0.59)
    assert computed("spread", known, over=others[::-1]).value == pytest.approx(0.59)


def test_each_comparison_needs_only_a_seed_of_its_own():
    known = of_seeds({"x/alasso": {0: 0.8, 1: 0.9}, "x/si": {0: 0.5}, "x/ewc": {1: 0.7}})
    assert computed("gap_to_best_other", known, of="x/alasso", others=["x/si", "x/ewc"]).value == pytest.approx(0.2)
    table = {"x/si": 0.5, "x/ewc": 0.6}
    assert computed("largest_deviation", known, table=table).value == pytest.approx(0.1)
    for how, arguments in (
        ("order", {"rising": [["x/si"], ["x/ewc"]]}),
        ("growth_of_gap", {"of": "x/ewc", "less": "x/si"}),
        ("tasks_near", {"of": "x/ewc", "bound": "x/si"}),
    ):
        with pytest.raises(NotRun, match=r"^x/ewc and x/si have no seed in common$"):
            computed(how, known, **arguments)


def test_gap_to_the_least_of_others():
    known = evidence({"alasso": [0.8], "si": [0.5], "ewc": [0.7]})  # F: 0.1, 0.4, 0.2
    found = computed("gap_to_least_other", known, of="x/alasso", others=["x/si", "x/ewc"], measure="F")
    assert found.value == pytest.approx(0.1) and found.note == "least other: ewc"


def test_order_is_the_smallest_step_between_levels():
    known = evidence({"si": [0.5], "ewc": [0.6], "alasso": [0.9], "single-task": [0.8]})
    rising = [["x/si"], ["x/ewc"], ["x/alasso", "x/single-task"]]
    found = computed("order", known, rising=rising)
    assert found.value == pytest.approx(0.1) and found.note == "smallest step: si → ewc"
    found = computed("order", known, rising=[["x/si", "x/alasso"], ["x/single-task"]])
    assert found.value == pytest.approx(-0.1) and found.note == "smallest step: alasso → single-task"


def test_best_spread_and_gain():
    known = evidence({"si": [0.5], "ewc": [0.6], "alasso": [0.9]})
    three = ["x/si", "x/ewc", "x/alasso"]
    assert computed("best", known, among=three).value == pytest.approx(0.9)
    found = computed("spread", known, over=three)
    assert found.value == pytest.approx(0.4) and found.note == "from si to alasso"
    assert computed("gain_of_best", known, among=["x/ewc", "x/alasso"], less="x/si").value == pytest.approx(0.4)


def test_the_best_is_picked_over_the_seeds_that_all_have_and_judged_by_all_of_its_own():
    known = evidence({"si": [0.5, 0.3], "ewc": [0.8], "alasso": [0.9, 0.6]})  # over both of its seeds, 0.75
    found = computed("best", known, among=["x/si", "x/ewc", "x/alasso"])
    assert (found.note, found.value, found.seeds) == ("best: alasso", pytest.approx(0.75), 2)
    found = computed("gain_of_best", known, among=["x/ewc", "x/alasso"], less="x/si")
    assert (found.note, found.value, found.seeds) == ("best: alasso", pytest.approx(0.35), 2)


def test_of_several_comparisons_the_least_or_largest_counts_each_over_the_seeds_of_its_own_runs():
    known = evidence({"si": [0.5, 0.9], "ewc": [0.6, 0.2], "alasso": [0.65]})
    three = ["x/si", "x/ewc", "x/alasso"]
    found = computed("order", known, rising=[[one] for one in three])
    assert (found.note, found.value, found.seeds) == ("smallest step: si → ewc", pytest.approx(-0.3), 2)
    found = computed("gap_to_best_other", known, of="x/ewc", others=["x/si", "x/alasso"])
    assert (found.note, found.value, found.seeds) == ("best other: si", pytest.approx(-0.3), 2)
    found = computed("gap_to_least_other", known, of="x/si", others=["x/ewc", "x/alasso"], measure="A")
    assert (found.note, found.value, found.seeds) == ("least other: ewc", pytest.approx(-0.3), 2)
    found = computed("spread", known, over=three)
    assert (found.note, found.value, found.seeds) == ("from ewc to si", pytest.approx(0.3), 2)
    found = computed("largest_deviation", known, table={"x/si": 0.5, "x/alasso": 0.6})
    assert (found.note, found.value, found.seeds) == ("si: 0.700, alasso: 0.650", pytest.approx(0.2), 2)
    found = computed("smaller_loss", known, of=["x/si", "x/ewc"], others=[["x/si", "x/si"], ["x/alasso", "x/si"]])
    assert (found.note, found.value, found.seeds) == ("loses 0.300; si loses 0.000", pytest.approx(-0.3), 2)


def test_largest_deviation_from_a_table():
    found = computed("largest_deviation", evidence({"si": [0.5], "ewc": [0.6]}), table={"x/si": 0.52, "x/ewc": 0.55})
    assert found.value == pytest.approx(0.05) and found.note == "si: 0.500, ewc: 0.600"


def test_smaller_loss_from_one_setting_to_another():
    short, long = experiment("x"), experiment("y", fields={**SMALL, "tasks": 4})
    finals = {"alasso": (0.9, 0.8), "si": (0.8, 0.5), "ewc": (0.8, 0.6)}
    found = [result(e.config(run), f[n]) for run, f in finals.items() for n, e in enumerate((short, long))]
    known = Evidence({"x": short, "y": long}, found)
    others = [["x/si", "y/si"], ["x/ewc", "y/ewc"]]
    loss = computed("smaller_loss", known, of=["x/alasso", "y/alasso"], others=others)
    assert loss.value == pytest.approx(0.1) and loss.note == "loses 0.100; ewc loses 0.200"


def test_recovered_share():
    known = evidence({"si": [0.5], "alasso": [0.6], "single-task": [0.75]})
    arguments = {"of": "x/alasso", "floor": "x/si", "ceiling": "x/single-task"}
    assert computed("recovered", known, **arguments).value == pytest.approx(0.4)
    assert math.isnan(
        computed("recovered", evidence({r: [0.5] for r in ("si", "alasso", "single-task")}), **arguments).value
    )


def test_growth_of_a_gap_from_half_way_to_the_end():
    one = experiment(fields={**SMALL, "tasks": 4})
    found = [
        result(one.config("alasso"), 0.8, halfway=0.9),  # falls by 0.1
        result(one.config("si"), 0.5, halfway=0.85),  # falls by 0.35
    ]
    growth = computed("growth_of_gap", Evidence({"x": one}, found), of="x/alasso", less="x/si")
    assert growth.value == pytest.approx(0.25)


def test_tasks_that_come_near_a_bound():
    known = evidence({"alasso": [[0.5, 0.895, 0.5]], "single-task": [0.9]})
    arguments = {"of": "x/alasso", "bound": "x/single-task", "every": 2}  # of three tasks the second
    assert computed("tasks_near", known, **arguments).value == 1.0
    assert computed("tasks_near", known, **arguments, within=0.001).value == 0.0
    assert computed("tasks_near", known, of="x/alasso", bound="x/single-task", every=1).note == "1 of 3 tasks"
    by_seed = {"x/alasso": {0: [0.9, 0.9, 0.1], 1: [0.9, 0.1, 0.1]}, "x/single-task": {0: 0.8, 1: 0.8}}
    found = computed("tasks_near", of_seeds(by_seed), of="x/alasso", bound="x/single-task", every=1)
    assert (found.value, found.seeds, found.note) == (pytest.approx(0.5), 2, "3 of 6 tasks")
    assert found.deviation == pytest.approx(statistics.stdev([2 / 3, 1 / 3]))
    equal = evidence({"alasso": [0.5], "single-task": [0.5]})
    assert computed("tasks_near", equal, of="x/alasso", bound="x/single-task", every=1, within=0.0).value == 1.0
    known = of_seeds({"x/alasso": {0: 0.9, 1: 0.1}, "x/single-task": {0: 0.8}})  # over the seed that both have
    found = computed("tasks_near", known, of="x/alasso", bound="x/single-task", every=1)
    assert (found.note, found.seeds) == ("3 of 3 tasks", 1)


PROBED = {"weights": 3, "offsets": 3, "examples": 5}


def probe_file(one, out, seed=0, came_from=(-0.5, -0.5, 0.5)):
    """Two weights from the left, one from the right: losses over offsets −1, 0, 1; as the experiment plans it."""
    content = {
        "config": one.config("alasso", seed).to_json(),
        "plan": {"span": 1.0, **PROBED},
        "seconds": 1.0,
        "accuracy": 0.9,
        "offsets": [-1.0, 0.0, 1.0],
        "weights": ["a[0]", "a[1]", "a[2]"],
        "losses": [[1.2, 1.0, 2.0], [1.4, 1.0, 2.0], [3.0, 1.0, 1.2]],
        "importance": [0.5, 1.5, 1.0],
        "came_from": list(came_from),
        "springs": [[2.0, 2.0]] * 3,
        "environment": {},
        "examples": 100,
    }
    probe_path(one.config("alasso", seed), out).write_text(json.dumps(content))


def test_probe_computations(tmp_path):
    one = experiment(runs={"alasso": {}}, probe=PROBED)
    known = Evidence({"x": one}, [], tmp_path)
    for how in ("probe_evenness", "probe_underestimated", "probe_unseen_is_steeper"):
        with pytest.raises(NotRun):
            computed(how, known, of="x/alasso")
    probe_file(one, tmp_path)
    assert computed("probe_evenness", known, of="x/alasso").value == pytest.approx(0.2)  # of 0.2, 0.4, 0.1
    # Unseen sides: right, right, left; true rises 1, 1, 2; SI says 0.5, 1.5, 1.
    assert computed("probe_underestimated", known, of="x/alasso").value == pytest.approx(2 / 3)
    assert computed("probe_underestimated", known, of="x/alasso", surrogate="ALASSO").value == 0.0
    with pytest.raises(AlassoError, match="surrogate must be one of SI, ALASSO, not 'MAS'"):
        computed("probe_underestimated", known, of="x/alasso", surrogate="MAS")
    assert computed("probe_unseen_is_steeper", known, of="x/alasso").value == 1.0
    probe_file(one, tmp_path, came_from=(0.5, 0.0, 0.5))
    assert computed("probe_unseen_is_steeper", known, of="x/alasso").value == 0.5  # the second one did not move


def test_a_surrogate_is_judged_near_the_end_of_training_and_of_weights_that_matter(tmp_path):
    plan = {**PROBED, "offsets": 5}
    one = experiment(runs={"alasso": {}}, probe=plan)
    probe_file(one, tmp_path)
    path = probe_path(one.config("alasso", 0), tmp_path)
    lines = {  # the unseen sides are right, right and left
        "offsets": [-1.0, -0.5, 0.0, 0.5, 1.0],
        "losses": [[2.0, 2.0, 2.0, 2.2, 2.3], [2.0, 2.0, 2.0, 2.6, 2.6], [3.0, 2.1, 2.0, 2.0, 2.0]],
        "importance": [1.0, 1.0, 0.3],
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **lines, "plan": {"span": 1.0, **plan}}))
    known = Evidence({"x": one}, [], tmp_path)

    def share(**near):
        return computed("probe_underestimated", known, of="x/alasso", **near).value

    assert share() == pytest.approx(1 / 3)  # true 0.3, 0.6, 1; SI 1, 1, 0.3
    assert share(at=0.5) == pytest.approx(2 / 3)  # true 0.2, 0.6, 0.1; SI 0.25, 0.25, 0.075
    assert share(at=0.4) == share(at=0.5)  # the nearest place
    assert share(at=0.5, rise=0.09) == 0.5  # a rise by more than 0.18: not the last one
    assert share(at=0.01) == share(at=0.5)  # nothing is measured nearer
    for far in (1.5, 0.0, -0.5):
        with pytest.raises(AlassoError, match=f"at must be above 0 and at most 1, where the .* end, not {far}"):
            share(at=far)


def test_what_was_probed_by_another_plan_is_probed_anew(tmp_path):
    one = experiment(runs={"alasso": {}}, probe=PROBED, seeds=1)
    probe_file(one, tmp_path)
    planned = make_plan([one], None, tmp_path)
    assert (len(planned.probes), planned.probes_present) == (0, 1)
    for change in ({"weights": 4}, {"offsets": 5}, {"span": 2.0}, {"examples": 4}, {"examples": 6}):
        other = replace(one, probe={**PROBED, **change})
        planned = make_plan([other], None, tmp_path)
        assert (len(planned.probes), planned.probes_present) == (1, 0), change
        with pytest.raises(NotRun):
            Evidence({"x": other}, [], tmp_path).probes("x/alasso")


def test_probes_of_several_seeds_are_taken_together(tmp_path):
    one = experiment(runs={"alasso": {}}, probe=PROBED, seeds=3)
    known = Evidence({"x": one}, [], tmp_path)
    for seed, came_from in {10: (0.5, 0.5, 0.5), 0: (-0.5, -0.5, 0.5), 1: (0.5, 0.0, 0.5)}.items():
        probe_file(one, tmp_path, seed, came_from)
    assert list(known.probes("x/alasso")) == [0, 1, 10]
    found = computed("probe_unseen_is_steeper", known, of="x/alasso")
    assert found.value == pytest.approx((1 + 1 / 2 + 1 / 3) / 3) and found.seeds == 3  # each seed counts alike
    assert found.deviation == pytest.approx(statistics.stdev([1, 1 / 2, 1 / 3])) and found.note == "8 weights"
    probe_file(one, tmp_path, 0, (0.5, 0.5, 0.5))
    probe_file(one, tmp_path, 1, (0.5, 0.5, 0.5))
    found = computed("probe_unseen_is_steeper", known, of="x/alasso")
    assert found.value == pytest.approx(1 / 3)  # of each seed, which is luck with three weights
    assert found.deviation == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 3))
    assert [len(make_plan([one], seeds, tmp_path).probes) for seeds in (None, 1, 2)] == [1, 0, 0]  # seed 2 is missing


def test_every_computation_is_used_by_a_claim_of_the_paper():
    used = {claim.how for claim in read_claims(PAPER, read_experiments()).tested}
    assert used == set(COMPUTATIONS)


# -- verdicts -----------------------------------------------------------------------------------------------------


def claim(**changes):
    given = {"id": "c", "topic": "T", "where": "Table 1", "says": "it is", "why": "so", "how": "mean"}
    return Claim(**{**given, "arguments": {"of": "x/si"}, "paper": 0.6, **changes})


@pytest.mark.parametrize(
    ("finals", "bar", "verdict"),
    [
        ([0.6], {"at_least": 0.55}, HOLDS),
        ([0.6], {"at_least": 0.65}, DOES_NOT_HOLD),
        ([0.6], {"at_least": 0.5, "at_most": 0.55}, DOES_NOT_HOLD),
        ([0.59, 0.61], {"at_least": 0.55}, HOLDS),  # standard error 0.01
        ([0.59, 0.61], {"at_least": 0.595}, WITHIN_NOISE),  # met, by less than the error
        ([0.59, 0.61], {"at_least": 0.605}, WITHIN_NOISE),  # missed, by less than the error
        ([0.59, 0.61], {"at_most": 0.58}, DOES_NOT_HOLD),
        ([], {"at_least": 0.5}, NOT_RUN),
    ],
)
def test_verdicts(finals, bar, verdict):
    judged = judge(claim(**bar), evidence({"si": finals}))
    assert judged.verdict == verdict
    assert judged.missing == (["x/si"] if verdict == NOT_RUN else [])


def test_a_standard_error_from_the_bar_is_not_within_noise():
    found = Finding(0.75, 0.5, 4)  # standard error 0.25
    assert claims.verdict_on(claim(at_least=0.5), found) == HOLDS
    assert claims.verdict_on(claim(at_least=1.0), found) == DOES_NOT_HOLD
    assert claims.verdict_on(claim(at_least=0.51), found) == WITHIN_NOISE


@pytest.mark.parametrize(
    ("bar", "said"),
    [
        ({"at_most": 1e-5}, "≤ 0.00001"),
        ({"at_least": -5e-5, "at_most": 5e-5}, "−0.00005 to 0.00005"),
        ({"at_least": 0.938, "at_most": 0.95}, "0.938 to 0.950"),
        ({"at_least": 2.5e-7}, "≥ 0.00000025"),
        ({"at_least": 0.12345678}, "≥ 0.12345678"),
        ({"at_least": 100.0}, "≥ 100"),
        ({"at_least": 1}, "≥ 1"),
        ({"at_least": 0.0}, "above 0"),
        ({"at_most": math.inf}, "≤ inf"),
    ],
)
def test_a_bar_is_said_with_all_its_digits(bar, said):
    assert claim(**bar).bar() == said


def test_a_claim_on_runs_without_a_seed_in_common_is_not_run():
    known = of_seeds({"x/alasso": {0: 0.8}, "x/si": {1: 0.5}})
    gap = claim(how="difference", arguments={"of": "x/alasso", "less": "x/si"}, at_least=0.0)
    judged = judge(gap, known)
    assert judged.verdict == NOT_RUN
    other_way = judge(replace(gap, arguments={"of": "x/si", "less": "x/alasso"}), known)
    assert show.missing_lines([judged, other_way]) == ["x/alasso and x/si have no seed in common"]
    assert "- x/alasso and x/si have no seed in common" in Document(known, [judged]).not_holding()

    hashes = [known.config_hash(reference) for reference in ("x/alasso", "x/si")]
    known.ended_early = {hashes[0]: {1: 2}}
    assert judge(gap, known).verdict == NOT_RUN  # with seed 0 they may still be compared
    known.ended_early = {hashes[0]: {1: 2}, hashes[1]: {0: 3}}
    judged = judge(gap, known)
    said = "x/alasso diverged: seed 1 in task 2; x/si diverged: seed 0 in task 3"
    assert (judged.verdict, judged.diverged) == (NOT_COMPUTABLE, said)


def test_an_order_is_not_met_by_equals_but_a_number_is():
    known = evidence({"si": [0.5], "ewc": [0.5]})
    order = claim(how="difference", arguments={"of": "x/si", "less": "x/ewc"}, at_least=0.0)
    assert judge(order, known).verdict == DOES_NOT_HOLD and order.bar() == "above 0"
    assert judge(claim(at_least=0.5), known).verdict == HOLDS
    assert judge(claim(at_least=0.0, at_most=0.9), evidence({"si": [0.0]})).verdict == HOLDS


def a_share_of_nothing():
    """A claim on how far a run comes from one that is as good as the one it goes to."""
    known = evidence({run: [0.5, 0.5] for run in ("si", "alasso", "single-task")})
    arguments = {"of": "x/alasso", "floor": "x/si", "ceiling": "x/single-task"}
    return claim(id="share", how="recovered", arguments=arguments, at_least=0.2), known


def test_a_claim_without_a_number_has_no_verdict(capsys):
    from rich.console import Console

    no_number, known = a_share_of_nothing()
    judged = [judge(no_number, known), judge(claim(at_least=0.6), known)]
    assert [one.verdict for one in judged] == [NOT_COMPUTABLE, DOES_NOT_HOLD]
    assert show.tally_sentence(judged) == "Of 2 claims: 1 does not hold, 1 not computable."
    assert show.tally_sentence(judged[:1] * 2) == "Of 2 claims: 2 not computable."
    assert show.not_computable_lines(judged) == ["not computable: it is (floor and ceiling are equal)"]
    for quick in (False, True):
        Console(width=120).print(show.verdict_table(judged, quick=quick, width=120))
        shown = capsys.readouterr().out
        assert re.search(r"0\.600 +– +≥ 0\.2 +not computable", shown) and "nan" not in shown
    document = Document(known, judged)
    assert "| – | ≥ 0.2 | not computable |" in document.verdicts() and "nan" not in document.verdicts()
    assert document.not_holding().endswith(
        "Claims for which the results give no number:\n\n- not computable: it is (floor and ceiling are equal)"
    )
    assert document.not_holding().count("\n- **") == 1  # the other one


def test_a_claim_that_does_not_hold_is_said_under_its_topic_with_the_paragraphs_of_its_note():
    _, known = a_share_of_nothing()
    missed = {"at_least": 0.7, "note": "Why it may be.\nWhat was tried."}
    claims = [claim(**missed), claim(topic="U", at_least=0.7), claim(topic="U", at_most=0.9)]
    document = Document(known, [judge(one, known) for one in claims])
    far = "(Table 1) does not hold: 0.500 ± 0.000 (2), 0.200 outside the bar (≥ 0.7); the paper: 0.600."
    assert document.not_holding().splitlines() == [
        "**T**",
        "",
        f"- **it is** {far}",
        "    - Why it may be.",
        "    - What was tried.",
        "",
        "**U**",
        "",
        f"- **it is** {far}",
    ]


def test_shares_of_no_tasks_and_of_no_weights_are_no_numbers(tmp_path):
    one = experiment(runs={"alasso": {}, "single-task": {}}, probe=PROBED)
    known = evidence({"alasso": [0.5], "single-task": [0.9]}, one, tmp_path)
    assert math.isnan(computed("tasks_near", known, of="x/alasso", bound="x/single-task", every=9).value)
    probe_file(one, tmp_path)
    path = probe_path(one.config("alasso"), tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"losses": [[1.0, 1.0, 1.0]] * 3}))  # flat everywhere
    found = computed("probe_evenness", known, of="x/alasso")
    assert math.isnan(found.value) and found.note == "0 weights"
    probe_file(one, tmp_path, seed=1)
    found = computed("probe_evenness", known, of="x/alasso")
    assert math.isnan(found.value) and found.note == "3 weights"  # of one seed; what the other has is no number


def test_the_table_says_claim_paper_ours_and_verdict(capsys):
    from rich.console import Console

    known = evidence({"si": [0.59, 0.61]}, data={"cifar100": "re-split"})
    judged = [judge(claim(at_least=0.5), known), judge(claim(id="d", arguments={"of": "x/ewc"}, at_least=0.5), known)]
    for width in (80, 120):
        Console(width=width).print(show.verdict_table(judged, width=width))
        shown = capsys.readouterr().out
        assert max(len(line) for line in shown.splitlines()) <= width
        assert re.search(r"it is .*0\.600 +0\.600 ± 0\.014 \(2\) .*holds", shown)
        assert "not run" in shown and "T (cifar100 re-split)" in shown
        assert ("≥ 0.5" in shown) == (width == 120)
    assert show.tally_sentence(judged) == "Of 2 claims: 1 holds, 1 not run."
    assert show.missing_lines(judged) == ["not run in x: ewc"]


def test_the_quick_table_gives_no_verdict(capsys):
    from rich.console import Console

    Console(width=80).print(show.verdict_table([judge(claim(at_least=0.5), evidence({"si": [0.6]}))], quick=True))
    shown = capsys.readouterr().out
    assert "T (small version)" in shown and "seen?" in shown and "verdict" not in shown and "holds" not in shown
    assert shown.count("Too small to judge the paper: this shows that everything runs.") == 1


# -- the paper's files --------------------------------------------------------------------------------------------


def test_the_papers_experiments_are_all_there():
    found = read_experiments()
    ten = {"sgd", "sgd-dropout", "ewc", "si", "mas", "imm-mode", "vcl", "alasso", "single-task", "multi-task"}
    for name, tasks in (("mnist-30", 30), ("mnist-100", 100)):
        configs = found[name].configs()
        assert {c.method for c in configs} >= ten and {c.tasks for c in configs} == {tasks}
        assert found[name].config("asymmetric-only").settings["omega_rule"] == "si"
        accurate = found[name].config("accurate-only").settings
        assert (accurate["a"], accurate["epsilon"], accurate["omega_rule"]) == (1.0, 0.0, "accurate")
    for name in ("a-30", "a-100"):
        assert [c.settings["a"] for c in found[name].configs(1)] == [0.8, 1.0, 2.0, 3.0, 4.0, 5.0]
    coupled = found["decoupling"].config("coupled").settings
    assert all(coupled[f"{key}_prime"] == coupled[key] for key in ("a", "c", "epsilon"))
    assert found["memory"].config("alasso-memory").memory == 200
    assert found["memory"].config("vcl-coreset").settings["coreset"] == 200
    assert {"alasso", "si", "single-task"} == set(found["cifar"].runs) == set(found["tiny-imagenet"].runs)
    assert found["tiny-imagenet"].config("alasso").image_size == 224
    assert all(found[name].seeds >= 3 for name in found if "tiny" not in name)
    details = [found["details-mnist"].config(run) for run in found["details-mnist"].runs]
    assert max(config.tasks for config in details) <= 30


def test_the_ablations_are_those_of_the_library():
    from torch import nn

    from alasso import ALASSO

    found, model = read_experiments()["mnist-30"], nn.Linear(2, 2)
    for run, preset in (("asymmetric-only", ALASSO.asymmetric_only), ("accurate-only", ALASSO.accurate_only)):
        settings, library = found.config(run).settings, preset(model, unmoved="moved_right").surrogate
        assert all(getattr(library, name) == settings[name] for name in METHODS["alasso"].settings)


def test_the_issues_bars_are_in_the_claims():
    bars = {c.id: (c.at_least, c.at_most) for c in read_claims(PAPER, read_experiments()).tested}
    assert bars["mnist-30-alasso-A"] == (0.938, 0.950) and bars["mnist-30-alasso-F"] == (None, 0.032)
    assert bars["mnist-30-alasso-I"] == (0.009, 0.021) and bars["mnist-30-si-A"] == (0.70, 0.80)
    assert bars["mnist-30-ewc-A"] == (0.68, 0.85) and bars["mnist-30-gap"] == (0.12, None)
    assert bars["a-100-best"] == (0.77, None) and bars["a-100-gain"] == (0.1, None)
    assert bars["cifar-alasso-A"] == (0.697, None) and bars["cifar-alasso-F"] == (None, 0.04)
    assert bars["tiny-above-single-task"] == (-0.01, None) and bars["tiny-above-si"] == (0.05, None)


def test_every_claim_says_why_its_bar_and_is_judged_on_full_results():
    """With every result there, no claim is left without a number, and none fails for want of an argument."""
    experiments = read_experiments()
    claims = read_claims(PAPER, experiments)
    configs = {c.name: c for e in experiments.values() if e.probe is None for c in e.configs(2)}
    known = Evidence(experiments, [result(c, 0.5 + 0.01 * c.seed) for c in configs.values()])
    for one in claims.tested:
        assert one.why and one.where and one.says and one.topic
        if not one.how.startswith("probe"):
            assert judge(one, known).verdict != NOT_RUN, one.id
            assert isinstance(judge(one, known).finding, Finding)
    assert all(one.why for one in claims.untested)


# -- reading studies ----------------------------------------------------------------------------------------------

EXPERIMENT = """
title = "Small"
paper = "Fig. 1"
benchmark = "permuted-digits"
seeds = 1
[fields]
tasks = 3
epochs = 1
hidden = 8
[runs]
alasso = {}
si = {}
"a=3" = { method = "alasso", a = 3.0 }
[quick]
tasks = 2
"""
SHARING = """
title = "Shares two runs with the other one"
benchmark = "permuted-digits"
seeds = 2
[fields]
tasks = 3
epochs = 1
hidden = 8
[runs]
plain = { method = "alasso" }
si = {}
sgd = {}
"""
CLAIMS = """
[[claim]]
id = "gap"
topic = "Small"
where = "Fig. 1"
says = "ALASSO is above SI"
paper = 0.1
at_least = -1.0
why = "anything is"
how = "difference"
of = "small/alasso"
less = "small/si"
quick = true

[[claim]]
id = "loss"
topic = "Small"
where = "Fig. 2"
says = "losses are uneven"
at_most = 2.0
why = "anything is"
how = "probe_evenness"
of = "probe/alasso"
quick = true
"""
PROBE = """
title = "Probe"
benchmark = "permuted-digits"
[fields]
tasks = 3
epochs = 1
hidden = 8
[runs]
alasso = {}
[probe]
weights = 3
offsets = 3
examples = 5
[quick]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A study of one's own, small enough to run."""
    monkeypatch.setattr(stopwatch, "ON_CPU", stopwatch.Watching(1, 1, 0.02))
    (tmp_path / "study" / "experiments").mkdir(parents=True)
    for name, text in (("small", EXPERIMENT), ("sharing", SHARING), ("probe", PROBE)):
        (tmp_path / "study" / "experiments" / f"{name}.toml").write_text(text)
    (tmp_path / "study" / "claims.toml").write_text(CLAIMS)
    return tmp_path / "study"


def test_a_template_is_checked_without_the_probes_there_are(folder, tmp_path):
    """A damaged one is said by its own name, not by the template's."""
    (folder / "document.md").write_text("{{figure probe-sides probe}}\n")
    work = Study.read(folder, [], [], None, False, Places.chosen(False, tmp_path, None, None, folder))
    damaged = probe_path(work.experiments["probe"].config("alasso", 0), tmp_path)
    damaged.write_text("{}")
    work.check_template()
    with pytest.raises(AlassoError, match=f"^{re.escape(str(damaged))} is not a measurement"):
        work.document([], drawing=True, evidence=work.evidence())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[runs]", "[ruins]"), "runs is missing"),
        (("seeds", "sedes"), "no such field: 'sedes'; did you mean 'seeds'?"),
        (("a = 3.0", "aa = 3.0"), "alasso has no setting 'aa'"),
        (("si = {}", "sii = {}"), "run 'sii' names no method"),
        (("permuted-digits", "permuted-digit"), "did you mean 'permuted-digits'?"),
        (("tasks = 3", "tasks = "), "not valid TOML"),
        (("seeds = 1", 'seeds = "1"'), "seeds must be a whole number, not '1'"),
        (("seeds = 1", "seeds = [0, 1]"), "seeds must be a whole number, not [0, 1]"),
        (("seeds = 1", "seeds = 0"), "seeds must be 1 or more"),
        (("seeds = 1", "order = true"), "order must be a whole number, not True"),
        (('title = "Small"', "title = 3"), "title must be a text, not 3"),
        (('"permuted-digits"', '["permuted-digits"]'), "benchmark must be a text"),
        (("[quick]\ntasks = 2", "[more]"), "no such field: 'more'"),
        (('title = "Small"', 'title = "Small"\nprobe = 1'), "probe must be a table, not 1"),
        (
            ('title = "Small"', 'title = "Small"\nprobe = { wieghts = 3 }'),
            "[probe] has no 'wieghts'; did you mean 'weights'?",
        ),
        (('title = "Small"', 'title = "Small"\nprobe = { weights = 0 }'), "[probe]: weights must be a whole number"),
        (('title = "Small"', 'title = "Small"\nprobe = { weights = 2.5 }'), "from 1 on, not 2.5"),
        (('title = "Small"', 'title = "Small"\nprobe = { examples = 0 }'), "[probe]: examples must be a whole number"),
        (('title = "Small"', 'title = "Small"\nprobe = { offsets = 4 }'), "[probe]: offsets must be odd"),
        (('title = "Small"', 'title = "Small"\nprobe = { span = "wide" }'), "[probe]: span must be a positive number"),
        (("si = {}", 'si = { method = ["si"] }'), "run 'si' must be a table with one method"),
        (("tasks = 3", "tasks = 3\nseed = 4"), "seed is no field of a run"),
    ],
)
def test_a_mistake_in_an_experiment_names_the_file(folder, change, message):
    path = folder / "experiments" / "small.toml"
    path.write_text(EXPERIMENT.replace(*change))
    with pytest.raises(AlassoError) as caught:
        read_experiment(path)
    assert message in str(caught.value) and "small.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"difference"', '"diffrence"'), "no computation 'diffrence'; did you mean 'difference'?"),
        (("less =", "minus ="), "difference takes no 'minus'"),
        (('less = "small/si"', ""), "difference needs 'less'"),
        (("small/si", "small/sii"), "experiment small has no run 'sii'; did you mean 'si'?"),
        (("small/si", "smal/si"), "no experiment 'smal'; did you mean 'small'?"),
        (("at_least = -1.0", ""), "a bar is missing"),
        (('why = "anything is"', ""), "why is missing"),
        (('id = "loss"', 'id = "gap"'), "two claims are called 'gap'"),
        (("[[claim]]", "[[cliam]]"), "no such table: 'cliam'; did you mean 'claim'?"),
        (("paper = 0.1", "paper = true"), "gap: paper must be its number or its words, not True"),
        (('says = "ALASSO is above SI"', "says = 3"), "gap: says must be a text, not 3"),
        (("at_least = -1.0", 'at_least = "0.5"'), "gap: at_least must be a number, not '0.5'"),
        (("at_least = -1.0", "at_least = nan"), "gap: at_least must be a number, not nan"),
        (("at_least = -1.0", "at_least = 2\nat_most = 1"), "no number is at least 2 and at most 1"),
        (('of = "small/alasso"', "of = 3"), "gap: difference: 3 names no run: write experiment/run"),
        (
            ('of = "small/alasso"', 'of = ["small/alasso"]'),
            "difference: ['small/alasso'] names no run: write experiment/run",
        ),
        (("at_least = -1.0", "at_leest = -1.0"), "takes no 'at_leest'; did you mean 'at_least'?"),
        (('of = "small/alasso"', 'of = "small"'), "'small' names no run: write experiment/run"),
        (('less = "small/si"', 'less = "small/si"\nmeasure = "Z"'), "there is no measure 'Z'; there are A, F"),
    ],
)
def test_a_mistake_in_a_claim_is_found_before_anything_runs(folder, change, message):
    (folder / "claims.toml").write_text(CLAIMS.replace(*change, 1))
    with pytest.raises(AlassoError) as caught:
        read_claims(folder, read_experiments(folder))
    assert message in str(caught.value) and "claims.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "gap_to_best_other", "of": "x/si", "others": []}, "cannot be computed from"),
        ({"how": "order", "rising": [["x/si"]]}, "cannot be computed from"),
        ({"how": "order", "rising": ["x/si", "x/ewc"]}, "a list of runs belongs where a text stands"),
        ({"how": "best", "among": "x/si"}, "a list of runs belongs where a text stands"),
        ({"how": "largest_deviation", "table": {"x/si": "0.7"}}, "cannot be computed from"),
        ({"how": "smaller_loss", "of": ["x/si"], "others": [["x/si", "x/ewc"]]}, "cannot be computed from"),
        ({"how": "probe_evenness", "of": "x/si"}, "experiment x has no [probe]"),
        ({"how": "mean", "of": "z/si"}, "z/si is probed and not trained to its end"),
        ({"how": "mean", "of": "y/si", "measure": "I"}, "single-task, of which there is no run beside y/si"),
        ({"how": "mean", "of": "x/wider", "measure": "I"}, "single-task, of which there is no run beside x/wider"),
    ],
)
def test_a_computation_that_cannot_be_made_is_found_before_anything_runs(arguments, message):
    texts = dict.fromkeys(("id", "topic", "where", "says", "why"), "c")
    with pytest.raises(AlassoError) as caught:
        runs = {**experiment().runs, "wider": {"method": "si", "hidden": 9}}
        known = {"x": experiment(runs=runs), "y": experiment("y", runs={"si": {}}, fields={**SMALL, "tasks": 4})}
        known["z"] = experiment("z", runs={"si": {}}, fields={**SMALL, "tasks": 5}, probe=PROBED)
        claims._claim({**texts, **arguments, "at_least": 0.5}, known)
    assert message in str(caught.value)


def test_one_claim_in_single_brackets_is_told_how_to_be_written(folder):
    (folder / "claims.toml").write_text('[claim]\nid = "x"\n')
    with pytest.raises(AlassoError, match=r"write \[\[claim\]\], with two brackets"):
        read_claims(folder, read_experiments(folder))


def test_a_whole_number_is_a_number_of_the_paper(folder):
    (folder / "claims.toml").write_text(CLAIMS.replace("paper = 0.1", "paper = 1"))
    assert show.shown_paper(read_claims(folder, read_experiments(folder)).tested[0]) == "1.000"


# -- planning -----------------------------------------------------------------------------------------------------


def test_shared_runs_are_planned_once_and_finished_ones_not_at_all(folder, tmp_path):
    experiments = list(read_experiments(folder).values())
    planned = make_plan(experiments, None, tmp_path)
    (part,) = planned.parts
    # small: alasso, si, a=3; sharing: the same alasso and si with a second seed, and sgd with two.
    assert (planned.runs, planned.present, len(planned.probes)) == (7, 0, 1)
    assert len({config.name for config in part.configs}) == 7 and part.title == "permuted-digits, 3 tasks"
    for config in part.configs:
        results.write(result(config, 0.5), tmp_path)
    probe_file(next(e for e in experiments if e.probe), tmp_path)
    done = make_plan(experiments, None, tmp_path)
    assert done.empty and done.present == 7
    result_path(part.configs[2], tmp_path).unlink()
    again = make_plan(experiments, None, tmp_path)
    assert [config.name for p in again.parts for config in p.configs] == [part.configs[2].name]
    assert make_plan(experiments, 3, tmp_path).runs == 4 * 3 - 6


LONGER = EXPERIMENT.replace("tasks = 3", "tasks = 5")


@pytest.fixture
def two_lengths(folder):
    """The experiment ``small`` once more with more tasks, and one run more of its own."""
    (folder / "experiments" / "longer.toml").write_text(LONGER.replace("si = {}", "si = {}\nmas = {}"))
    return folder


def test_runs_on_the_way_of_longer_ones_go_with_them_and_take_no_steps(two_lengths, tmp_path):
    experiments = [one for one in read_experiments(two_lengths).values() if one.probe is None]
    planned = make_plan(experiments, None, tmp_path)
    # Of three tasks: alasso, si and a=3 with one seed lie on the way; seed 1 of alasso and si, and sgd twice, do not.
    parts = {part.title: part for part in planned.parts}
    short, long = parts["permuted-digits, 3 tasks"], parts["permuted-digits, 5 tasks"]
    assert (len(short.trained), len(short.on_the_way)) == (4, 0)
    assert (len(long.trained), len(long.on_the_way)) == (4, 3)
    assert {config.tasks for config in long.trained} == {5} and {config.tasks for config in long.on_the_way} == {3}
    assert (planned.runs, planned.on_the_way) == (8, 3)
    assert counting.steps_in(long.trained) == 4 * counting.steps_of(long.trained[0])
    estimate = timing.estimate(planned, [], tmp_path, "abacus", lambda config: stopwatch.Pace(0.5, 0.0))
    assert estimate.seconds == pytest.approx(0.5 * (counting.steps_in(short.trained) + counting.steps_in(long.trained)))
    assert estimate.sources[timing.MEASURED] == 8

    for config in long.trained:
        results.write(result(config, 0.5), tmp_path)
    without = make_plan(experiments, None, tmp_path)  # the longer ones are there: the shorter ones go by themselves
    assert (without.runs, without.on_the_way, without.present) == (7, 0, 4)


def test_the_papers_runs_of_30_tasks_go_with_those_of_100(tmp_path):
    found = read_experiments()
    both = make_plan([found[name] for name in ("mnist-30", "mnist-100", "a-30", "a-100")], None, tmp_path)
    parts = {part.title.removeprefix("permuted-mnist, "): part for part in both.parts}
    assert sorted(parts) == ["100 tasks", "100 tasks, VCL", "30 tasks"]
    assert {config.method for config in parts["30 tasks"].configs} == {"imm-mean"}  # not among the runs of 100
    assert len(parts["100 tasks"].trained) == len(parts["100 tasks"].on_the_way) == 3 * (13 + 5)
    assert {config.method for config in parts["100 tasks, VCL"].configs} == {"vcl"}


def test_only_and_skip():
    found = read_experiments()
    assert [one.id for one in chosen(found, ["cifar", "mnist-30"], [])] == ["mnist-30", "cifar"]
    assert "cifar" not in {one.id for one in chosen(found, [], ["cifar"])}
    with pytest.raises(AlassoError, match="no experiment 'cifr'; did you mean 'cifar'"):
        chosen(found, [], ["cifr"])


# -- times --------------------------------------------------------------------------------------------------------


def test_steps_are_those_that_a_run_makes():
    from alasso.bench.config import RunConfig

    mnist = RunConfig.for_benchmark("permuted-mnist", "alasso")
    assert counting.steps_of(mnist) == 30 * 20 * 235
    cifar = RunConfig.for_benchmark("split-cifar", "si")
    assert counting.steps_of(cifar) == 60 * (3 * 59 + 27 * 6)
    assert counting.steps_of(RunConfig.for_benchmark("split-tiny-imagenet", "si")) == 60 * 30 * 24


def test_the_estimate_takes_the_best_source_there_is(folder, tmp_path):
    experiments = read_experiments(folder)
    planned = make_plan([experiments["small"]], None, tmp_path)
    known = [result(experiments["small"].config("si", 5), 0.5)]  # 10 seconds on the abacus
    measured = []

    def measure(config):
        measured.append(config.method)
        return stopwatch.Pace(0.001, 0.0)

    steps = counting.steps_of(known[0].config)
    here = timing.estimate(planned, known, tmp_path, "abacus", measure)
    assert here.seconds == pytest.approx(30.0) and not measured
    assert here.sentence() == "about 30 s on abacus (from results of this device)"
    other = timing.estimate(planned, known, tmp_path, "slide rule", measure)
    assert other.seconds == pytest.approx(3 * steps * 0.001) and "short measurement" in other.sentence()
    note_part(tmp_path, "permuted-digits, 3 tasks", "slide rule", [], 3.0)  # stopped before any run ended
    note_part(tmp_path, "permuted-digits, 3 tasks", "slide rule", [known[0].config], 4.0)
    noted = timing.estimate(planned, known, tmp_path, "slide rule", measure)
    assert noted.seconds == pytest.approx(21.0) and "before" in noted.sentence()


def test_a_damaged_line_of_times_is_left_aside(tmp_path):
    note_part(tmp_path, "p", "d", [], 1.0)
    with (tmp_path / PARTS_FILE).open("a") as stream:
        stream.write("half a li")
    assert [row.part for row in read_parts(tmp_path)] == ["p"]


def test_times_are_added_up_as_carried_out_and_for_the_whole_at_that_rate(tmp_path):
    known = evidence({"si": [0.6]}, out=tmp_path)
    (part,) = whole_parts(known.experiments.values())  # eight runs alike: four, two seeds each
    note_part(tmp_path, part.title, "d", part.trained[:2], 120.0)
    note_part(tmp_path, part.title, "d", part.trained[2:3], 60.0)
    *_, row, last = Document(known, [], out=tmp_path).times().splitlines()
    assert row == f"| {part.title} | d | 3 | 3 min | 60.0 | 8 | 8 min | 4 min |"
    assert last == "| of these, all | d |  | 3 min |  |  | 8 min | 4 min |"
    note_part(tmp_path, "split-tiny-imagenet, 30 tasks", "d", [], 600.0)
    assert (
        Document(known, [], out=tmp_path)
        .times()
        .endswith("| of these, all but Tiny ImageNet | d |  | 3 min |  |  | 8 min | 4 min |")
    )


def test_times_are_added_up_for_each_device_by_itself(tmp_path):
    known = evidence({"si": [0.6]}, out=tmp_path)
    (part,) = whole_parts(known.experiments.values())
    for device, seconds in (("abacus", 120.0), ("slide rule", 240.0)):
        note_part(tmp_path, part.title, device, part.trained[:2], seconds)
    *_, first, second = Document(known, [], out=tmp_path).times().splitlines()
    assert first == "| of these, all | abacus |  | 2 min |  |  | 8 min | 4 min |"
    assert second == "| of these, all | slide rule |  | 4 min |  |  | 16 min | 8 min |"


def test_times_of_images_of_ones_own_have_no_rate(tmp_path):
    own = experiment(benchmark="split-folder", fields={"path": str(tmp_path)}, runs={"si": {}})  # two seeds
    known = Evidence({own.id: own}, [], tmp_path)
    (part,) = whole_parts([own])
    note_part(tmp_path, part.title, "d", part.trained, 120.0)
    *_, row, _ = Document(known, [], out=tmp_path).times().splitlines()
    assert row == f"| {part.title} | d | 2 | 2 min | 60.0 | 2 | – | – |"


@pytest.mark.parametrize("method", ["alasso", "vcl", "vcl-coreset"])
def test_steps_and_answers_can_be_measured(method):
    config = experiment(runs={method: {}}, fields={**SMALL, "batch_size": 16}).config(method)
    assert 0 < stopwatch.seconds_of_a_step(config, "cpu") < 1
    assert 0 < stopwatch.seconds_of_an_answer(config, "cpu") < 1


def test_an_answer_is_measured_after_the_first_one_and_for_one_example(monkeypatch):
    moments, asked = iter([0.0, 9.0, 9.0, 9.3, 9.3, 9.5, 9.5, 9.9]), []
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(learners.Learner, "accuracies_on", lambda learner, tasks: asked.append(len(tasks[0].test)))
    config = experiment(fields={**SMALL, "batch_size": 16}).config("si")
    assert stopwatch.seconds_of_an_answer(config, "cpu") == pytest.approx(0.3 / 16)
    assert asked == [16] * 4


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("si", {}),
        ("single-task", {}),
        ("vcl", {"point_epochs": 2, "test_samples": 2}),
        ("vcl-coreset", {"point_epochs": 2, "test_samples": 2, "coreset": 20, "coreset_epochs": 3}),
    ],
)
def test_steps_and_answers_are_counted_as_a_run_makes_them(method, settings, monkeypatch):
    from alasso.bench.learners.base import Learner
    from alasso.bench.training import run as train

    made = {"steps": 0, "answers": 0}
    descend, right_answers = Learner.descend, Learner.right_answers

    def counted_step(self, objective):
        made["steps"] += 1
        descend(self, objective)

    def counted_answers(self, task):
        made["answers"] += len(task.test)
        return right_answers(self, task)

    monkeypatch.setattr(Learner, "descend", counted_step)
    monkeypatch.setattr(Learner, "right_answers", counted_answers)
    config = RunConfig.for_benchmark("permuted-digits", method, **SMALL, **settings)
    train.run(config, device="cpu")
    beside = counting.coreset_steps(config), counting.plain_steps(config)
    assert made == {"steps": counting.steps_of(config) + sum(beside), "answers": counting.answers_of(config)}


def test_an_estimate_from_measured_steps_has_answers_and_what_vcl_trains_beside_its_tasks():
    paces = {"vcl-coreset": stopwatch.Pace(2.0, 0.5), "sgd": stopwatch.Pace(1.0, 0.0)}
    config = RunConfig.for_benchmark("permuted-digits", "vcl-coreset", **SMALL)  # 23 steps for each of three tasks
    plain = 10 * 23  # on the first task, before it
    on_coresets = 20 * (4 + 7 + 10)
    answers = 360 * (3 + 2 + 3 + 2 + 1)  # untrained, ahead, after each task
    seconds = timing.at_pace(config, lambda config: paces[config.method])
    assert seconds == 2.0 * (3 * 23 + on_coresets) + 1.0 * plain + 0.5 * answers


def test_a_probe_takes_its_task_and_all_its_answers(tmp_path):
    one = experiment(runs={"alasso": {}}, seeds=1, probe={"weights": 6, "offsets": 5, "examples": 128})
    planned = make_plan([one], None, tmp_path)
    (probe,) = planned.probes
    asked = []

    def moving(one):
        asked.append(one)
        return 100.0

    found = timing.estimate(planned, [], tmp_path, "abacus", lambda _: stopwatch.Pace(2.0, 0.0), moving)
    assert found.probes == pytest.approx(2.0 * 23 + 100.0)
    assert found.sentence().startswith("about 2.4 min on abacus (estimated from a short measurement; compiling")
    known = [result(one.config("alasso", 5), 0.5)]  # 10 seconds on the abacus, three tasks
    found = timing.estimate(planned, known, tmp_path, "abacus", lambda _: stopwatch.Pace(2.0, 0.0), moving)
    assert found.probes == pytest.approx(10 / 3 + 100.0) and asked == [probe, probe]


def test_an_estimate_says_what_of_it_is_measured():
    sources = {timing.EARLIER: 0, timing.RESULTS: 3, timing.MEASURED: 1}
    said = timing.Estimate("abacus", {"p": 60.0}, sources=sources, measured_probes=2).sentence()
    where = "(3 runs from results of this device; 1 run and 2 probes estimated from a short measurement; compiling"
    assert said.startswith(f"about 60 s on abacus {where}")


def test_the_weights_of_a_probe_are_timed_by_a_few_of_them_moved_to_few_places(monkeypatch):
    from alasso.bench.probe import measure as measurement
    from alasso.bench.probe import measure as sides

    assert measurement.losses is sides.losses  # imported before it is replaced
    clock, moved = [0.0], []

    def losses(model, x, loss, weights, offsets):
        moved.append((len(weights), len(offsets), len(x), x.dtype))
        assert loss(model(x)).shape == ()
        clock[0] += 7.0 + 0.5 * len(weights) * len(offsets)  # what is worked out once, and each weight at each place
        clock[0] += 100.0 * (len(moved) == 4)  # something else ran

    monkeypatch.setattr(sides, "losses", losses)
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: clock[0])
    one = experiment(runs={"alasso": {}}, seeds=1, probe={"weights": 90, "offsets": 41, "examples": 12})
    (probe,) = make_plan([one], None, Path("nowhere")).probes
    measure = stopwatch.Stopwatch("cpu", lambda line: None)
    assert measure.moving(probe) == pytest.approx(7.0 + 0.5 * 90 * 41)
    assert {(weights, examples) for weights, _, examples, _ in moved} == {(30, 12)}  # every third
    count = len(moved)
    assert measure.moving(probe) == pytest.approx(7.0 + 0.5 * 90 * 41) and len(moved) == count


def test_a_probe_that_is_small_is_timed():
    one = experiment(runs={"alasso": {}}, seeds=1, probe={"weights": 3, "offsets": 5, "examples": 4})
    (probe,) = make_plan([one], None, Path("nowhere")).probes
    assert 0 <= stopwatch.seconds_of_moving(probe, "cpu") < 5


def test_the_small_version_of_a_probe_may_have_fewer_weights():
    one = experiment(runs={"alasso": {}}, probe={"weights": 6, "offsets": 5}, quick={"weights": 2, "tasks": 2})
    small = one.in_small()
    assert (small.probe, small.config("alasso").tasks) == ({"weights": 2, "offsets": 5}, 2)
    assert one.probe == {"weights": 6, "offsets": 5}


def test_vcl_is_not_taken_to_be_as_fast_as_the_others(tmp_path):
    one = experiment(runs={"si": {}, "ewc": {}, "vcl": {}, "vcl-coreset": {}}, seeds=1)
    known = [result(one.config("si", 5), 0.5)]  # 10 seconds on the abacus
    found = timing.estimate(make_plan([one], None, tmp_path), known, tmp_path, "abacus", lambda _: stopwatch.Pace(1, 0))
    assert found.sources == {timing.EARLIER: 0, timing.RESULTS: 2, timing.MEASURED: 2}


def test_nor_by_what_a_part_of_the_others_took(tmp_path):
    one = experiment(runs={"si": {}, "ewc": {}, "vcl": {}, "vcl-coreset": {}}, seeds=1)
    planned = make_plan([one], None, tmp_path)
    assert [part.title.partition("tasks")[2] for part in planned.parts] == ["", ", VCL", ", VCL with coresets"]
    note_part(tmp_path, planned.parts[0].title, "abacus", planned.parts[0].trained, 7.0)
    found = timing.estimate(planned, [], tmp_path, "abacus", lambda _: stopwatch.Pace(1, 0))
    assert found.sources == {timing.EARLIER: 2, timing.RESULTS: 0, timing.MEASURED: 2}
    assert found.parts[planned.parts[0].title] == pytest.approx(7.0)


def test_times_of_parts_that_were_not_clocked_are_those_of_their_result_files(tmp_path):
    one = experiment(runs={"si": {}, "vcl": {}}, seeds=2)
    known = Evidence({"x": one}, [result(one.config(run, 0), 0.5) for run in one.runs], tmp_path)  # 10 seconds each
    clocked, beside = whole_parts([one])
    note_part(tmp_path, clocked.title, "abacus", clocked.trained, 60.0)
    *_, first, second, last = Document(known, [], out=tmp_path).times().splitlines()
    assert first == f"| {clocked.title} | abacus | 2 | 60 s | 30.0 | 2 | 60 s | 30 s |"
    assert second == f"| {beside.title} (by result files) | abacus | 1 | 10 s | 10.0 | 2 | 20 s | 10 s |"
    assert last == "| of these, all | abacus |  | 70 s |  |  | 80 s | 40 s |"


def test_parts_that_are_no_text_are_left_aside(tmp_path):
    note_part(tmp_path, "a part", "a device", [], 2.0)
    with (tmp_path / "parts.csv").open("ab") as stream:
        stream.write(b"\xfa\xfb,\xfc\n")
    assert [row.part for row in read_parts(tmp_path)] == ["a part"]
    (tmp_path / "parts.csv").write_text("junk,junk\n1,2\n")
    with pytest.raises(AlassoError, match="is no table of times: its first line is not part,device"):
        read_parts(tmp_path)


def test_the_time_of_runs_that_diverged_is_counted_with_the_steps_they_made(tmp_path):
    one = experiment(runs={"si": {}}, seeds=2)
    (part,) = whole_parts([one])
    ended, diverged = part.trained
    results.write(result(ended, 0.5), tmp_path)
    results.write_note(results.Divergence(diverged, 1, "it grew"), {}, tmp_path)
    with carrying.timed(part, "abacus", tmp_path):
        pass
    (row,) = read_parts(tmp_path)
    assert (row.runs, row.steps) == (1, counting.steps_of(ended) * 4 // 3)


def test_runs_are_gone_on_with_and_stacked_as_the_device_takes_them(tmp_path):
    options = carrying.options_for(tmp_path, None, "cpu", quiet=True)
    assert options.resume and not options.restart and options.lanes is None


# -- the document -------------------------------------------------------------------------------------------------


def test_the_papers_document_from_nothing_says_not_run_everywhere(tmp_path):
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    work = Study.read(None, [], [], None, False, Places(tmp_path, tmp_path / "d.md", tmp_path / "r.html"))
    text = work.document(work.judged(), drawing=True)
    counted = sum(claim.counted for claim in work.claims.tested)
    assert "{{" not in text and f"Of {counted} claims: {counted} not run." in text
    points = ("may Ω fall?", "damping ξ", "a weight that did not move", "Adam between tasks", "a of the main", "epochs")
    for point in points:
        row = next(line for line in text.splitlines() if line.startswith(f"| {point}"))
        assert row.count("not run") == 2, row
    assert "re-split" not in text and not (tmp_path / "figures").exists()


def test_the_papers_document_fills_in_numbers_and_draws(tmp_path):
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    experiments = read_experiments()
    for seed in (0, 1):
        for run, final in (("as-run", 0.9), ("omega-may-fall", 0.5 + 0.1 * seed)):
            results.write(result(experiments["details-mnist"].config(run, seed), final), tmp_path)
    for run, final in (("alasso", 0.7), ("si", 0.6), ("single-task", 0.8)):
        data = {"cifar10": "official", "cifar100": "re-split"}
        results.write(result(experiments["cifar"].config(run), final, data=data), tmp_path)
    note_part(tmp_path, "split-cifar, 30 tasks", "abacus", [experiments["cifar"].config("si")], 90.0)
    work = Study.read(None, [], [], None, False, Places(tmp_path, tmp_path / "docs" / "d.md", tmp_path / "r.html"))
    text = work.document(work.judged(), drawing=True)
    row = next(line for line in text.splitlines() if line.startswith("| may Ω fall?"))
    assert row.endswith("| 0.550 ± 0.071 (2) | −0.350 ± 0.071 (2) |") and "As chosen, A" in text
    assert "30 tasks is 0.900 ± 0.000 (2);" in text
    assert "**CIFAR-100 is the re-split edition**" in text
    assert "**Split CIFAR-10/100, 30 tasks (cifar100 re-split)**" in text and "Data: cifar100 re-split." in text
    assert (
        "| ALASSO beats SI (in the paper by 5.7 points) | Sect. 5.4, Fig. 8 | 0.057 | 0.100 (1) | above 0 | holds |"
        in text
    )
    assert "| split-cifar, 30 tasks | abacus | 1 | 1.5 min | 90.0 |" in text
    links = re.findall(r"\]\((figures/.*?)\)", text)
    assert links and all((tmp_path / "docs" / link).exists() for link in links)


def test_a_template_that_asks_for_what_there_is_not(tmp_path):
    document = Document(evidence({}), [])
    for template, message in (
        ("{{verdict}}", "did you mean 'verdicts'"),
        ("{{mean}}", "too few or too many"),
        ("{{mean x/is}}", "no run 'is'; did you mean 'si'"),
        ("{{mean x/si Q}}", "there is no measure 'Q'; there are A, F"),
        ("{{difference x/si x/ewc Q}}", "there is no measure 'Q'"),
        ("{{table}}", "names no experiment"),
        ("{{table x y}}", "there is no experiment 'y'"),
        ("{{edition y}}", "there is no experiment 'y'"),
        ("{{figure mean-accuracy}}", "names no experiment"),
        ("{{figure mean-accuracy y}}", "there is no experiment 'y'"),
        ("{{tally}", "not closed, or not opened"),
        ("and {{tally", "not closed, or not opened"),
        ("tally}} and", "not closed, or not opened"),
        ("{{figure probe-sides x}}", "of an experiment with \\[probe\\], which x has not"),
    ):
        with pytest.raises(AlassoError, match=message):
            document.fill(template)
    assert "{{verdicts}}" in template_of(tmp_path)  # a study without a template has a plain one


def test_a_template_that_is_no_text_is_said_so(tmp_path):
    (tmp_path / "document.md").write_bytes(b"\xff\xfe")
    with pytest.raises(AlassoError, match=r"document\.md is not a text in UTF-8"):
        template_of(tmp_path)
    (tmp_path / "document.md").unlink()
    (tmp_path / "document.md").mkdir()
    with pytest.raises(AlassoError, match=r"document\.md cannot be read: Is a directory"):
        template_of(tmp_path)


def test_a_figure_that_results_do_not_give_says_what_they_lack(tmp_path):
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    some, none = (Document(evidence(of), [], figures=tmp_path) for of in ({"si": [0.5]}, {}))
    assert some.figure("sensitivity", "x") == "*No figure of sensitivity: x: no alasso runs that differ in a alone.*"
    assert none.figure("sensitivity", "x") == "*No figure of sensitivity: x: not run.*"


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judging", ["--judge", "--quiet"])
def test_a_studys_own_template_is_not_written_over(judging, folder, tmp_path, monkeypatch, capsys):
    (folder / "document.md").write_text("{{tally}}")
    results.write(result(read_experiments(folder)["small"].config("si"), 0.5), tmp_path / "out")
    words = ["reproduce", "--study", folder, "--out", tmp_path / "out", judging, "--document"]
    code, _, errors = command([*words, folder / "document.md"], monkeypatch, capsys)
    assert code == 2 and "is the study's own template; name another file with --document" in errors
    assert (folder / "document.md").read_text() == "{{tally}}"


def test_a_slip_in_the_template_is_said_by_the_plan_too(folder, tmp_path, monkeypatch, capsys):
    (folder / "document.md").write_text("{{taly}}")
    code, output, errors = command(["reproduce", "--study", folder, "--plan"], monkeypatch, capsys)
    assert code == 2 and "did you mean 'tally'" in errors and not output


NETWORKS = """
from torch import nn
def good(input_shape, classes): return nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, classes))
def narrow(input_shape, classes): return nn.Linear(64, classes - 1)
def broken(input_shape, classes): raise KeyError("size")
"""


@pytest.mark.parametrize("words", [["--plan"], []])
@pytest.mark.parametrize(
    ("network", "method", "message"),
    [
        ("own_networks:narrow", "si", "must answer two inputs with a tensor of shape (2, 10), not (2, 9)"),
        ("own_networks:broken", "si", "fails when it is called with ((64,), 10): KeyError: 'size'"),
        ("own_networks:god", "si", "own_networks has no function god"),
        ("no_such_module:net", "si", "module no_such_module cannot be imported (No module named 'no_such_module')"),
        ("not_python:net", "si", "module not_python cannot be imported (SyntaxError: "),
        ("own_networks:good", "vcl", "1 is a LayerNorm with parameters, which has no Gaussian form here"),
        ("cifar-cnn", "si", "this network takes images of at least 4 × 4 pixels"),
    ],
)
def test_a_network_that_cannot_be_made_is_said_before_anything_is_run(
    network, method, message, words, folder, tmp_path, monkeypatch, capsys
):
    (tmp_path / "own_networks.py").write_text(NETWORKS)
    (tmp_path / "not_python.py").write_text("def net(")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    later = f'title = "L"\nbenchmark = "permuted-digits"\norder = 9\n[fields]\ntasks = 2\nmodel = "{network}"\n'
    (folder / "experiments" / "later.toml").write_text(f"{later}[runs]\n{method} = {{}}\n")
    for one in read_experiments(folder).values():  # what is known of this device, so that nothing is measured
        for part in whole_parts([one]):
            (tmp_path / "out").mkdir(exist_ok=True)
            note_part(tmp_path / "out", part.title, stopwatch.device_name("cpu"), part.trained, 1.0)
    of_study = ["reproduce", "--study", folder, "--out", tmp_path / "out", "--device", "cpu"]
    code, output, errors = command([*of_study, *words], monkeypatch, capsys, width=300)
    assert code == 2 and "experiment later: " in errors and message in errors and len(errors.splitlines()) == 1
    assert not output and not list((tmp_path / "out").glob("*.json"))


def test_a_network_of_ones_own_that_can_be_made_is_planned(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_networks.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    small = (folder / "experiments" / "small.toml").read_text()
    (folder / "experiments" / "small.toml").write_text(small.replace("hidden = 8", 'model = "own_networks:good"'))
    words = ["reproduce", "--study", folder, "--only", "small", "--device", "cpu", "--plan"]
    code, output, errors = command(words, monkeypatch, capsys)
    assert code == 0 and "To do: 3 runs" in output, errors


def command(words, monkeypatch, capsys, width=100):
    monkeypatch.setattr(sys, "argv", ["alasso", *map(str, words)])
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return (ended.value.code or 0, *capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "mnist-300"], "no experiment 'mnist-300'; did you mean 'mnist-30'?"),
        (["--skip", "cifra"], "did you mean 'cifar'?"),
        (["--quick", "--only", "cifar"], "cifar has no quick version"),
        (["--only", "cifar", "--skip", "cifar"], "no experiment is left"),
        (["--judge", "--plan"], "give one of the two"),
        (["--plan", "--report", "x.html"], "--plan writes nothing: leave out --report"),
        (["--judge", "--seeds", "2"], "--judge takes all seeds there are"),
        (["--study", "nowhere"], "there is no folder nowhere"),
        (["--study", "."], ". holds no experiments"),
        (["--only", "si-10", "--data-dir", "nowhere"], "data not found: mnist"),
        (["--device", "tpu9", "--only", "si-10", "--plan"], "no device 'tpu9'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, output, errors = command(["reproduce", *words], monkeypatch, capsys)
    assert code == 2 and message in errors and len(errors.splitlines()) == 1 and not output
    assert not list(tmp_path.rglob("*"))


def test_a_small_study_from_end_to_end(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("bokeh", reason="the report extra is not installed")
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "--study", folder, "--out", tmp_path / "out", "--device", "cpu"]
    code, output, errors = command([*words, "--plan"], monkeypatch, capsys)
    assert code == 0, errors
    assert (
        "To do: 7 runs and 1 probe; 0 already in" in output
        and "sharing, small" in output
        and not (tmp_path / "out").exists()
    )

    code, output, errors = command([*words, "--quiet"], monkeypatch, capsys)
    assert code == 0, errors
    assert len(list((tmp_path / "out").glob("*_s*.json"))) == 8  # seven runs and a probe
    assert "Of 2 claims: 2 hold." in output
    document = (tmp_path / "out" / "reproduction.md").read_text()
    assert "| ALASSO is above SI |" in document
    (row,) = [line.split("|")[3:-1] for line in document.splitlines() if line.startswith("| permuted-digits, 3 tasks")]
    count, took, _, whole, at_this_rate, _ = (cell.strip() for cell in row)
    assert count == whole == "7" and took == at_this_rate
    html = (tmp_path / "out" / "report.html").read_text()
    assert html.index('<section id="claims"><h2>Claims</h2>') < html.index('id="section-0"')
    assert re.search(r'<th scope="row">ALASSO is above SI .*<td data-verdict="holds">holds</td>', html)
    assert sum(row.runs for row in read_parts(tmp_path / "out")) == 7

    gone = next((tmp_path / "out").glob("*_si_*_s0.json"))
    before = results.read(gone)
    gone.unlink()
    code, output, errors = command(words, monkeypatch, capsys)
    assert code == 0, errors
    assert "To do: 1 run; 7 already there" in output and results.read(gone).accuracy == before.accuracy
    code, output, _ = command([*words, "--plan"], monkeypatch, capsys)
    assert code == 0 and "Nothing to run: all 7 results" in output


def test_a_plan_of_probes_alone_says_how_long_they_take(folder, tmp_path, monkeypatch, capsys):
    words = ["reproduce", "--study", folder, "--out", tmp_path / "out", "--device", "cpu", "--only", "probe", "--plan"]
    code, output, errors = command(words, monkeypatch, capsys, width=300)
    assert code == 0 and re.search(r"To do: 1 probe; 0 already in .*; about \S+ s on .*\(estimated", output), errors


def test_the_last_line_says_how_many_claims_are_not_counted(folder, tmp_path, monkeypatch, capsys):
    results.write(result(read_experiments(folder)["small"].config("si"), 0.5), tmp_path)
    words = ["reproduce", "--study", folder, "--out", tmp_path, "--judge"]
    _, output, _ = command(words, monkeypatch, capsys, width=300)
    assert output.splitlines()[-1] == f"wrote {tmp_path / 'reproduction.md'}: 2 claims"
    (folder / "claims.toml").write_text(CLAIMS.replace("quick = true", "counted = false", 1))
    _, output, _ = command(words, monkeypatch, capsys, width=300)
    assert output.splitlines()[-1] == f"wrote {tmp_path / 'reproduction.md'}: 2 claims, 1 of them not counted"


def test_any_result_that_is_deleted_comes_back(two_lengths, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    words = ["reproduce", "--study", two_lengths, "--only", "small", "longer", "--out", out, "--device", "cpu"]
    code, output, errors = command([*words, "--plan"], monkeypatch, capsys)
    assert code == 0, errors
    assert "To do: 4 runs (3 shorter runs are written when longer ones come past them); 0 already in" in output
    assert "permuted-digits, 5 tasks" in output and "longer, small" in output
    assert "permuted-digits, 3 tasks" not in output

    code, output, errors = command(words, monkeypatch, capsys)
    assert code == 0, errors
    experiments = read_experiments(two_lengths)
    short, long = (result_path(experiments[name].config("si"), out) for name in ("small", "longer"))
    (row,) = read_parts(out)
    assert (row.runs, row.steps) == (4, 4 * counting.steps_of(experiments["longer"].config("si")))
    before = [results.read(path).accuracy for path in (short, long)]
    for gone, said in (
        ([short], "To do: 1 run; 6 already there"),
        ([short, long], "To do: 1 run (1 shorter run is written when a longer one comes past it); 5 already there"),
        ([long], "To do: 1 run; 6 already there"),
    ):
        for path in gone:
            path.unlink()
        code, output, errors = command(words, monkeypatch, capsys)
        assert code == 0 and said in output, errors
        assert [results.read(path).accuracy for path in (short, long)] == before


def test_the_plan_has_a_row_for_all_that_it_counts_and_hints_at_less(two_lengths, tmp_path, monkeypatch, capsys):
    """A run of three tasks is there, the others of that length lie on the way of longer ones."""
    monkeypatch.chdir(tmp_path)
    experiments = read_experiments(two_lengths)
    path = result_path(experiments["small"].config("si"), tmp_path / "out")
    path.parent.mkdir()
    path.touch()
    plan = make_plan([experiments["small"], experiments["longer"]], 1, tmp_path / "out")
    assert plan.present == 1 and plan.nothing_to_train == {"permuted-digits, 3 tasks": 1}
    shown = show.plan_table(plan, timing.Estimate("cpu"), list(experiments.values()))
    cells = {column.header: list(column.cells) for column in shown.columns}
    assert sum(map(int, cells["done"])) == plan.present and sum(map(int, cells["runs"])) == plan.runs

    path.unlink()
    words = ["reproduce", "--study", two_lengths, "--out", tmp_path / "out", "--device", "cpu", "--plan"]
    for seconds, hinted in ((100.0, False), (100_000.0, True)):
        known = timing.Estimate("cpu", probes=seconds)
        monkeypatch.setattr(timing, "estimate", lambda *_, known=known: known)
        _, output, _ = command(words, monkeypatch, capsys)
        assert ("--quick takes minutes, --only runs some of it" in output.splitlines()[-1]) == hinted


def test_quick_runs_in_its_own_folder_and_never_among_real_results(folder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("bokeh", reason="the report extra is not installed")
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "--quick", "--study", folder, "--device", "cpu", "--quiet"]
    code, output, errors = command(words, monkeypatch, capsys)
    assert code == 0, errors
    found = [results.read(p) for p in (tmp_path / "runs" / "study-quick").glob("*_s0.json")]
    assert sorted(r.config.tasks for r in found) == [2, 2, 2]  # the small versions, of those that have one
    assert "Too small to judge by" in output and "seen?" in output and "holds" not in output
    document = (tmp_path / "runs" / "study-quick" / "reproduction.md").read_text()
    assert "Too small to judge by" in document and "| seen? |" in document and "| verdict |" not in document
    page = (tmp_path / "runs" / "study-quick" / "report.html").read_text()
    assert '<th scope="col">seen?</th>' in page and "Claims (small version)" in page
    assert "MNIST" not in document and "the paper" not in document + output
    assert "Too small to judge the paper: this shows" in Document(evidence({}), [], quick=True).fill(QUICK_TEMPLATE)
    assert not (tmp_path / "docs").exists()

    results.write(result(read_experiments(folder)["small"].config("si"), 0.5), tmp_path / "real")
    code, _, errors = command([*words, "--out", "real"], monkeypatch, capsys)
    assert code == 2 and "--quick takes a folder of its own" in errors


def test_judging_needs_no_data_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiments = read_experiments()
    for run, final in (("alasso", 0.7), ("si", 0.6)):
        results.write(result(experiments["cifar"].config(run), final), tmp_path / "results")
    code, output, errors = command(["reproduce", "--judge", "--only", "cifar"], monkeypatch, capsys, width=160)
    assert code == 0, errors
    assert "ALASSO beats SI (in the paper by 5.7 points)" in output and "not run in cifar: single-task" in output
    assert len(list((tmp_path / "results").iterdir())) == 2
    assert (tmp_path / "docs" / "reproduction.md").exists()
    assert not (tmp_path / "runs").exists()  # the page is for who asks for it: alasso report, or --report


def test_judging_makes_the_page_when_it_is_named(tmp_path, monkeypatch, capsys):
    pytest.importorskip("bokeh", reason="the report extra is not installed")
    monkeypatch.chdir(tmp_path)
    results.write(result(read_experiments()["cifar"].config("alasso"), 0.7), tmp_path / "results")
    code, output, errors = command(["reproduce", "--judge", "--report", "page.html"], monkeypatch, capsys)
    assert code == 0, errors
    assert "page.html: all results in" in output and (tmp_path / "page.html").exists()


def test_judging_reads_each_result_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for run in ("alasso", "si"):
        results.write(result(read_experiments()["cifar"].config(run), 0.7), tmp_path / "results")
    opened, read = [], results.read
    monkeypatch.setattr(results, "read", lambda path: opened.append(path.name) or read(path))
    code, _, errors = command(["reproduce", "--judge"], monkeypatch, capsys)
    assert code == 0, errors
    assert len(opened) == len(set(opened)) == 2


def test_judging_needs_neither_torch_nor_the_charts(tmp_path):
    experiments = read_experiments()
    results.write(result(experiments["cifar"].config("alasso"), 0.7), tmp_path / "results")
    probe_file(experiments["probe"], tmp_path / "results")
    script = (
        "import sys, alasso.bench.cli.main as cli; sys.argv = ['alasso', 'reproduce', '--judge', '--quiet']\n"
        "try: cli.main()\nexcept SystemExit as end: print('code', end.code)\n"
        "print('loaded', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "code 0" in done.stdout, done.stderr
    assert not {"torch", "bokeh"} & set(done.stdout.partition("loaded ")[2].split())


def test_a_plan_for_a_cpu_whose_speed_is_known_needs_no_torch(folder, tmp_path):
    config = read_experiments(folder)["small"].config("si")
    (tmp_path / "out").mkdir()
    note_part(tmp_path / "out", "permuted-digits, 3 tasks", results.cpu_name(), [config], 4.0)
    words = ["reproduce", "--plan", "--device", "cpu", "--study", str(folder), "--out", "out", "--only", "small"]
    script = (
        f"import sys, alasso.bench.cli.main as cli; sys.argv = ['alasso', *{words!r}]\n"
        "try: cli.main()\nexcept SystemExit as end: print('code', end.code)\n"
        "print('loaded', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "code 0" in done.stdout and "carried out on this device before" in done.stdout, done.stderr
    assert "torch" not in done.stdout.partition("loaded ")[2].split()


def test_on_a_cpu_a_few_plain_steps_are_measured_and_nothing_is_compiled(monkeypatch):
    from alasso.bench.training import run as train

    begun = []

    def run(config, *, observer, **_):
        begun.append(config)
        for step in range(1, 100):
            observer.step_done(0, 0, step)

    now = iter(range(1000))
    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: float(next(now)))
    measure = stopwatch.Stopwatch("cpu", lambda line: None)
    pace = measure(RunConfig.for_benchmark("permuted-digits", "alasso", memory=20))
    assert pace == (2.0, 1.0 / 64)  # between one look and the next; and on a batch
    measure(RunConfig.for_benchmark("permuted-digits", "vcl"))
    measure(RunConfig.for_benchmark("permuted-digits", "si"))
    assert [(config.method, config.memory) for config in begun] == [("sgd", 0), ("vcl", 0)]


def test_images_are_measured_at_the_size_they_are_brought_to(monkeypatch):
    sizes = []

    def seconds(config, device):
        sizes.append(tuple(stopwatch.random_stream(config, device).tasks[0].train.images.shape[1:]))
        return 1.0

    monkeypatch.setattr(stopwatch, "seconds_of_a_step", seconds)
    monkeypatch.setattr(stopwatch, "seconds_of_an_answer", lambda *_: 1.0)
    measure = stopwatch.Stopwatch("cpu", lambda line: None)
    for size in (64, 32, 64):
        measure(RunConfig.for_benchmark("split-tiny-imagenet", "si", image_size=size, batch_size=2))
    assert sizes == [(3, 64, 64), (3, 32, 32)]
    small = RunConfig.for_benchmark("split-tiny-imagenet", "si", image_size=64)
    assert stopwatch.to_measure(small, on_cpu=True)[1] == 1.0  # a whole batch, which takes no seconds


def watched(watching, steps, moments, monkeypatch):
    """What a meter makes of steps that are done at these moments."""
    clock = [0.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: clock[0])
    meter = stopwatch.Meter(watching, lambda: None)
    with pytest.raises(stopwatch.Enough):
        for done, clock[0] in zip(steps, moments, strict=True):
            meter.step_done(0, 0, done)
    return meter


def test_steps_that_come_several_at_once_are_counted_each(monkeypatch):
    """Warm with the 18th, the first to come at or after the 16th; then five steps in ten seconds, and enough."""
    steps, moments = (1, 2, 3, 8, 13, 18, 23), (1, 2, 3, 4, 5, 6, 16)
    assert watched(stopwatch.Watching(16, 1, 0.5), steps, moments, monkeypatch).seconds == 2.0


def test_a_step_takes_the_median_of_several_looks(monkeypatch):
    """Looks of two steps each, and a second, of which one was disturbed."""
    moments = (0, 0.6, 1.2, 1.8, 2.4, 3.0, 9.0)
    assert watched(stopwatch.Watching(1, 3, 1.0, 60), range(1, 8), moments, monkeypatch).seconds == pytest.approx(0.6)


def test_slow_steps_are_not_watched_for_long(monkeypatch):
    meter = watched(stopwatch.Watching(1, 5, 0.2, 3.0), range(1, 4), (0, 2, 4), monkeypatch)
    assert (len(meter.looks), meter.seconds) == (2, 2.0)


def test_stopped_says_how_to_go_on(folder, tmp_path, monkeypatch, capsys):
    def stop(*arguments):
        raise carrying.runs.Stopped("task 2, epoch 1, step 3")

    monkeypatch.setattr(carrying.runs, "carry_out", stop)
    words = ["reproduce", "--study", folder, "--out", tmp_path / "out", "--device", "cpu", "--only", "small"]
    code, output, _ = command(words, monkeypatch, capsys)
    assert code == 130 and "Stopped; saved up to task 2, epoch 1, step 3. Go on with:" in output
    assert f"alasso reproduce --study {folder} --out {tmp_path / 'out'} --device cpu --only small" in output


def test_a_run_that_diverges_is_said_at_once_and_the_other_parts_are_run(folder, tmp_path, monkeypatch, capsys):
    """Even if one of those is stopped."""
    other = EXPERIMENT.replace("tasks = 3", "tasks = 4").replace("hidden = 8", "hidden = 9")
    (folder / "experiments" / "other.toml").write_text(other)
    seen = []

    def carried_out(configs, options, console):
        seen.append(configs)
        if len(seen) == 1:
            raise carrying.runs.SomeDiverged("alasso, seed 0: the training diverged", [])
        raise carrying.runs.Stopped("task 2, epoch 1, step 3")

    monkeypatch.setattr(carrying.runs, "carry_out", carried_out)
    words = ["reproduce", "--study", folder, "--out", tmp_path / "out", "--device", "cpu"]
    code, output, errors = command(words, monkeypatch, capsys)
    assert code == 130, errors
    assert len(seen) == 2 and output.index("alasso, seed 0: the training diverged") < output.index("Stopped; saved")


def test_a_run_that_diverged_is_not_tried_again_until_its_note_is_deleted(folder, tmp_path, monkeypatch, capsys):
    one = EXPERIMENT.replace("seeds = 1", "seeds = 2") + "[runs.wild]\nmethod = 'sgd'\nlearning_rate = 1e38\n"
    (folder / "experiments" / "small.toml").write_text(one.replace("[quick]\ntasks = 2\n", ""))
    (folder / "document.md").write_text("A is {{mean small/wild}}, {{mean small/si}}\n\n{{table small}}\n")
    out = tmp_path / "out"
    words = ["reproduce", "--study", folder, "--out", out, "--device", "cpu", "--only", "small"]
    code, output, errors = command(words, monkeypatch, capsys, width=300)
    assert code == 0 and output.count("diverged: seed 0 in task 1, seed 1 in task 1") == 1, errors
    document = (out / "reproduction.md").read_text()
    assert "A is diverged: seed 0 in task 1, seed 1 in task 1, 0." in document
    assert "| wild | diverged: seed 0 in task 1, seed 1 in task 1 |" in document
    for again in (words, [*words, "--plan"]):
        code, output, _ = command(again, monkeypatch, capsys, width=300)
        assert code == 0 and "Nothing to run: all 6 results are in" in output
        said = (
            "not counting 2 runs that diverged, which are not tried again until their notes, NAME.diverged, are deleted"
        )
        assert said in output
    (note, _) = sorted(out.glob("*.diverged"))
    note.unlink()
    code, output, _ = command([*words, "--plan"], monkeypatch, capsys, width=300)
    (left,) = out.glob("*.diverged")
    assert "To do: 1 run; 6 already" in output
    assert (
        f"not counting 1 run that diverged, which is not tried again until its note, {left.name}, is deleted" in output
    )
    left.write_text("{}")
    code, _, errors = command(words, monkeypatch, capsys, width=300)
    assert code == 2 and "is no note of a run that diverged; delete it" in errors


def test_machines_are_named_once_with_their_commits():
    one, two = result(experiment().config("si", 0), 0.8), result(experiment().config("si", 1), 0.8)
    other = replace(result(experiment().config("ewc", 0), 0.8), environment={"gpu": "loom", "torch": "3"})
    newer = replace(result(experiment().config("ewc", 1), 0.8), environment={**one.environment, "commit": "f" * 40})
    known = Evidence({"x": experiment()}, [one, two, other, newer])
    assert Document(known, []).machines() == (
        "abacus, torch 2: 3 results, by commit: 01234567 (2), ffffffff (1); "
        "loom, torch 3: 1 result, by commit: unknown (1)"
    )


def test_of_a_run_some_of_whose_seeds_diverged_the_mean_says_so(folder, tmp_path):
    work = Study.read(folder, ["small"], [], None, False, Places.chosen(False, tmp_path, None, None, folder))
    first, second = (work.experiments["small"].config("si", seed) for seed in (0, 1))
    results.write(result(first, 0.8), tmp_path)
    results.write_note(results.Divergence(second, 2, "it grew"), {}, tmp_path)
    document = Document(work.evidence(), work.judged())
    assert document.fill("{{mean small/si}}").endswith(" (1); diverged: seed 1 in task 2")
    assert document.fill("{{table small}}").splitlines()[3].endswith("| 1; diverged: seed 1 in task 2 |")
    assert document.fill("{{difference small/alasso small/si}}") == "small/si diverged: seed 1 in task 2"

    results.write(result(work.experiments["small"].config("alasso", 0), 0.9), tmp_path)
    gap, _ = work.judged()
    assert gap.verdict == HOLDS and show.shown_of(gap) == "0.100 (1) †"
    text = Document(work.evidence(), [gap]).fill("{{verdicts}}")
    assert "| 0.100 (1) † |" in text
    assert text.endswith("† small/si diverged: seed 1 in task 2. What is found is of the other seeds.")


def test_a_claim_on_runs_that_all_diverged_waits_for_nothing(folder, tmp_path):
    work = Study.read(folder, ["small"], [], None, False, Places.chosen(False, tmp_path, None, None, folder))
    results.write_note(results.Divergence(work.experiments["small"].config("si", 0), 2, "it grew"), {}, tmp_path)
    gap, _ = work.judged()
    assert gap.verdict == NOT_COMPUTABLE and not gap.missing
    (line,) = show.not_computable_lines([gap])
    assert line == "not computable: ALASSO is above SI (small/si diverged: seed 0 in task 2)"
    text = Document(work.evidence(), [gap]).fill("{{verdicts}}")
    assert "†" not in text and "other seeds" not in text


def test_a_claim_waits_for_the_seeds_that_are_left(folder, tmp_path):
    path = folder / "experiments" / "small.toml"
    path.write_text(path.read_text().replace("seeds = 1", "seeds = 2"))
    work = Study.read(folder, ["small"], [], None, False, Places.chosen(False, tmp_path, None, None, folder))
    results.write_note(results.Divergence(work.experiments["small"].config("si", 0), 2, "it grew"), {}, tmp_path)
    gap, _ = work.judged()
    assert gap.verdict == NOT_RUN and "small/si" in gap.missing
    (line,) = show.diverged_lines(work.evidence(), work.chosen, [gap])
    assert line == "small/si diverged: seed 0 in task 2"


def test_notes_beside_results_and_of_other_studies_say_nothing(folder, tmp_path):
    """A run may have diverged at one time and come to an end at another; what else lies there is not even read."""
    work = Study.read(folder, ["small"], [], None, False, Places.chosen(False, tmp_path, None, None, folder))
    config = work.experiments["small"].config("si", 0)
    results.write(result(config, 0.8), tmp_path)
    results.write_note(results.Divergence(config, 2, "it grew"), {}, tmp_path)
    for name in ("permuted-digits_si_0123456789_s0", "notes"):
        (tmp_path / f"{name}.diverged").write_text("what a later version writes")
    assert not work.evidence().ended_early
    assert config.name not in {one.name for one in work.plan("cpu").diverged}


def test_a_polite_kill_stops_like_ctrl_c(folder, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    parts = []

    def carried_out(configs, *_):
        parts.append(configs)
        signal.raise_signal(signal.SIGTERM)  # in its last moments

    monkeypatch.setattr(carrying.runs, "carry_out", carried_out)
    words = ["reproduce", "--study", folder, "--out", tmp_path / "out", "--device", "cpu"]
    code, output, _ = command(words, monkeypatch, capsys)
    assert code == 130 and "Stopped; saved up to the end of a part. Go on with:" in output
    assert len(parts) == 1
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_study_of_ones_own_stays_away_from_the_papers_results():
    assert Places.chosen(False, None, None, None) == Places(
        Path("results"), Path("docs/reproduction.md"), Path("runs/report.html")
    )
    own = Places.chosen(False, None, None, None, Path("mine/"))
    assert own == Places(Path("runs/mine"), Path("runs/mine/reproduction.md"), Path("runs/mine/report.html"))
    assert Places.chosen(True, None, None, None, Path("mine")).out == Path("runs/mine-quick")
    assert Places.chosen(False, Path("x"), None, None, Path("mine")).out == Path("x")
    elsewhere = Places.chosen(False, Path("x"), None, None)
    assert elsewhere == Places(Path("x"), Path("x/reproduction.md"), Path("x/report.html"))
    assert Places.chosen(False, Path("results"), None, None) == Places.chosen(False, None, None, None)
    absolute = Places.chosen(False, Path("results").resolve(), None, None)
    assert (absolute.document, absolute.report) == (Path("docs/reproduction.md"), Path("runs/report.html"))


def test_a_folder_with_other_results_is_not_judged(tmp_path, monkeypatch, capsys):
    results.write(result(experiment(runs={"si": {}}).config("si"), 0.5), tmp_path)
    code, output, errors = command(["reproduce", "--judge", "--out", tmp_path], monkeypatch, capsys)
    assert code == 2 and "holds no result of these experiments; name their folder with --out" in errors and not output
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_plan_says_that_there_is_no_folder_of_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "--plan", "--quick", "--only", "mnist-30", "--device", "cpu"]
    code, output, errors = command(words, monkeypatch, capsys, width=200)
    assert code == 0 and "runs/quick does not exist yet. If you have results elsewhere, name their" in output, errors


@pytest.mark.parametrize(
    ("directive", "said"),
    [
        ("{{tabel small}}", "asks for 'tabel'; did you mean 'table'?"),
        ("{{figure mean-acuracy small}}", "'mean-acuracy'"),
    ],
)
def test_a_slip_in_the_template_is_said_before_anything_is_run(directive, said, folder, tmp_path, monkeypatch, capsys):
    (folder / "document.md").write_text(f"# Mine\n\n{directive}\n")
    monkeypatch.setattr(carrying.runs, "carry_out", lambda *_: pytest.fail("was run"))
    words = ["reproduce", "--study", folder, "--out", tmp_path / "out", "--device", "cpu"]
    code, _, errors = command(words, monkeypatch, capsys, width=300)
    assert code == 2 and said in errors and str(folder / "document.md") in errors
    assert not (tmp_path / "out").exists()


def test_a_damaged_result_is_said_with_what_to_do_about_it(folder, tmp_path, monkeypatch, capsys):
    config = next(iter(read_experiments(folder).values())).configs()[0]
    (tmp_path / f"{config.name}.json").write_text('{"config":')
    of_study = ["reproduce", "--study", folder, "--out", tmp_path, "--device", "cpu"]
    for words in (["--plan"], ["--judge"], []):
        code, output, errors = command([*of_study, *words], monkeypatch, capsys, width=300)
        assert code == 2 and errors.endswith("delete it, and `alasso reproduce` makes it again\n"), errors
        assert "Nothing to run" not in output


ON_IMAGES = """
title = "On images"
benchmark = "split-folder"
[fields]
path = "images"
epochs = 1
image_size = 8
[runs]
sgd = {}
si = {}
"""
ABOUT_IMAGES = """
[[claim]]
id = "gap"
topic = "Images"
where = "here"
says = "SI is above nothing"
at_least = -1.0
why = "anything is"
how = "difference"
of = "on-images/si"
less = "on-images/sgd"
"""


def test_a_study_on_images_of_ones_own_notices_that_they_changed(tmp_path, monkeypatch, capsys):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "study" / "experiments").mkdir(parents=True)
    (tmp_path / "study" / "experiments" / "on-images.toml").write_text(ON_IMAGES)
    (tmp_path / "study" / "claims.toml").write_text(ABOUT_IMAGES)
    (tmp_path / "study" / "document.md").write_text("{{editions}}\n")
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (9 + i, 9), (i, 0, 0)).save(tmp_path / "images" / name / f"{i}.png")
    words = ["reproduce", "--study", "study", "--out", "out", "--device", "cpu"]
    code, output, errors = command([*words, "--quiet"], monkeypatch, capsys, width=300)
    assert code == 0, errors
    assert "Images (images folder)" in output
    assert "images: folder, 8 images of 2 classes, " in (tmp_path / "out" / "reproduction.md").read_text()
    code, output, errors = command(words, monkeypatch, capsys, width=300)
    assert code == 0 and "Nothing to run" in output, errors

    first = next((tmp_path / "out").glob("*_si_*_s0.json"))
    first.unlink()
    (tmp_path / "images" / "a" / "0.png").unlink()
    for more in ([], ["--quiet"], ["--plan"]):
        code, output, errors = command([*words, *more], monkeypatch, capsys, width=300)
        assert code == 2 and len(errors.splitlines()) == 1
        assert "the images in images have changed since split-folder_sgd_" in errors and "--judge" in errors
    code, output, errors = command([*words, "--judge"], monkeypatch, capsys, width=300)
    assert code == 0 and "not run" in output, errors


def test_editions_are_shown_in_full_where_there_are_several():
    one = evidence({"si": [0.5], "ewc": [0.5]}, data={"pets": "folder, 8 images of 2 classes, 1a2b3c4d"})
    assert one.edition(["x/si", "x/ewc"]) == "pets folder"
    other = replace(*one.group("x/si").results, data={"pets": "folder, 9 images of 2 classes, 5e6f7a8b"})
    several = Evidence(one.experiments, [other, *one.group("x/ewc").results])
    assert (
        several.edition(["x/si", "x/ewc"])
        == "pets folder, 8 images of 2 classes, 1a2b3c4d and folder, 9 images of 2 classes, 5e6f7a8b"
    )


@pytest.mark.parametrize(
    ("runs", "probes", "said"),
    [
        (7, 0, "all 7 results are"),
        (1, 0, "the 1 result is"),
        (1, 1, "the 1 result and 1 probe are"),
        (7, 1, "all 7 results and 1 probe are"),
    ],
)
def test_what_is_there_is_counted_in_words(runs, probes, said):
    assert commands.there(SimpleNamespace(present=runs, probes_present=probes, diverged=[])) == said


def test_the_tally_counts_in_words():
    def one(verdict, counted=True):
        return SimpleNamespace(verdict=verdict, claim=claim(counted=counted))

    assert show.tally_sentence([one("holds")]) == "Of 1 claim: 1 holds."
    many = [one("holds"), one("holds"), one("does not hold"), one("within noise")]
    assert show.tally_sentence(many) == "Of 4 claims: 2 hold, 1 within noise, 1 does not hold."
    again = [*many, one("does not hold", counted=False)]
    assert show.tally_sentence(again) == f"{show.tally_sentence(many)} In brackets, not counted: 1."
    assert show.verdict_in_words(again[-1], quick=False) == "(does not hold)"
    assert show.verdict_in_words(again[0], quick=False) == "holds"


def test_experiments_are_listed(monkeypatch, capsys):
    code, output, _ = command(["list"], monkeypatch, capsys, width=200)
    assert code == 0 and all(name in output for name in read_experiments())


def test_a_folder_without_results_is_not_judged(tmp_path, monkeypatch, capsys):
    document = tmp_path / "document.md"
    document.write_text("before")
    words = ["reproduce", "--judge", "--out", tmp_path / "resluts", "--document", document]
    code, _, error = command(words, monkeypatch, capsys)
    assert code == 2 and "there are no results in" in error and "--out" in error
    assert document.read_text() == "before"
