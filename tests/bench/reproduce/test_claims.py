"""Claims are read, judged and put in words; the paper's verdicts on the committed results are those of the table.

After a wanted change write the table anew: python tests/bench/reproduce/test_claims.py.
"""

import json
import math
from pathlib import Path

import pytest

from alasso import AlassoError
from alasso.bench.reproduce import claims
from alasso.bench.reproduce.claims import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_COMPUTABLE,
    NOT_RUN,
    UNDECIDED,
    VERDICTS,
    Judged,
    judge,
    judge_all,
    read_claims,
    tally,
)
from alasso.bench.reproduce.experiments import Evidence, read_experiments
from alasso.bench.reproduce.statistics import Finding
from alasso.bench.results import Divergence

from made_up import CLAIMS, claim, evidence, experiment, result, small_paper

PAPER = Path(__file__).parents[3] / "paper"
TABLE = Path(__file__).with_name("verdicts.txt")


@pytest.mark.parametrize(
    ("finals", "bar", "verdict"),
    [
        ([0.6], {"at_least": 0.1}, UNDECIDED),  # one seed decides nothing
        ([0.599, 0.6, 0.601], {"at_least": 0.59}, HOLDS),  # 0.5975 to 0.6025
        ([0.599, 0.6, 0.601], {"at_least": 0.598}, UNDECIDED),  # met by the mean alone
        ([0.599, 0.6, 0.601], {"at_least": 0.602}, UNDECIDED),  # missed by the mean alone
        ([0.599, 0.6, 0.601], {"at_least": 0.603}, DOES_NOT_HOLD),
        ([0.599, 0.6, 0.601], {"at_most": 0.597}, DOES_NOT_HOLD),
        ([0.599, 0.6, 0.601], {"at_least": 0.597, "at_most": 0.603}, HOLDS),
        ([0.599, 0.6, 0.601], {"at_least": 0.597, "at_most": 0.601}, UNDECIDED),
        ([0.5, 0.5], {"at_least": 0.5}, HOLDS),  # a number is met by equals
        ([0.0, 0.0], {"at_least": 0.0}, DOES_NOT_HOLD),  # an order is not
        ([0.0, 0.0], {"at_least": 0.0, "at_most": 0.9}, HOLDS),
        ([], {"at_least": 0.5}, NOT_RUN),
    ],
)
def test_verdicts(finals, bar, verdict):
    judged = judge(claim(**bar), evidence({"si": finals}))
    assert judged.verdict == verdict
    assert judged.missing == (["x/si"] if verdict == NOT_RUN else ())


def test_a_verdict_takes_the_level_at_which_it_is_to_be_right():
    found = Finding(0.75, 0.5, 4)  # standard error 0.25; t = 3.18 and 5.84
    assert claims.verdict_on(claim(at_least=-0.04), found) == UNDECIDED
    assert claims.verdict_on(claim(at_least=-0.05), found) == HOLDS
    assert claims.verdict_on(claim(at_least=-0.72), found, alpha=0.01) == HOLDS
    assert claims.verdict_on(claim(at_least=-0.70), found, alpha=0.01) == UNDECIDED


def test_an_interval_that_a_comparison_of_one_seed_leaves_open_has_no_infinite_end_in_words():
    known = evidence({"si": [0.5, 0.51, 0.53], "ewc": [0.4, 0.41, 0.42], "alasso": [0.3]})
    others = {"of": "x/si", "others": ["x/ewc", "x/alasso"]}
    judged = judge(claim(how="gap_to_best_other", arguments=others, at_least=0.1), known)
    assert judged.finding.count == 3 and judged.finding.interval().low == -math.inf
    assert claims.interval_shown(judged) == "≤ 0.124"


def test_many_claims_share_one_probability_of_an_error():
    """A claim that its own interval decides may stay open beside others, and be decided once others are."""
    known = evidence({"si": [0.599, 0.6, 0.601]})  # standard error 0.00058; two claims need t = 6.2, one 4.3
    near, far = claim(id="near", at_least=0.597), claim(id="far", at_least=0.5)
    idle = [claim(id=str(i), arguments={"of": "x/ewc"}, at_least=0.5) for i in range(9)]

    def verdicts(*some):
        return [(one.verdict, one.alone) for one in judge_all(some, known) if one.finding]

    assert verdicts(near) == [(HOLDS, HOLDS)]
    assert verdicts(near, claim(id="too", at_least=0.597)) == [(UNDECIDED, HOLDS)] * 2
    assert verdicts(near, far) == [(HOLDS, HOLDS)] * 2  # the far one is decided first
    assert verdicts(near, far, *idle) == [(UNDECIDED, HOLDS), (HOLDS, HOLDS)]  # those without results count, too
    uncounted = claim(id="not counted", at_least=0.597, counted=False)
    assert verdicts(uncounted, *idle) == [(HOLDS, HOLDS)]
    open_one = judge_all([near, *idle], known)[0]
    assert claims.verdict_in_words(open_one) == "undecided ‡" and claims.interval_shown(open_one) == "0.598 to 0.602"
    said = "Of 10 claims: 1 undecided, 9 planned. Each judged by itself, 1 more holds."
    assert claims.tally_sentence(judge_all([near, *idle], known)) == said


@pytest.mark.parametrize(
    ("bar", "said"),
    [
        ({"at_most": 1e-5}, "≤ 0.00001"),
        ({"at_least": -5e-5, "at_most": 5e-5}, "−0.00005 to 0.00005"),
        ({"at_least": 0.938, "at_most": 0.95}, "0.938 to 0.950"),
        ({"at_least": 1}, "≥ 1"),
        ({"at_least": 0.0}, "above 0"),
    ],
)
def test_a_bar_is_written_with_all_its_digits(bar, said):
    assert claim(**bar).bar() == said


def test_runs_that_diverged():
    """A claim waits for the seeds that are left; where none is left, no run will ever give a number."""
    one = experiment()
    gap = claim(how="difference", arguments={"of": "x/alasso", "less": "x/si"}, at_least=0.0)

    def judged(finals, early):
        found = [result(one.config(run, seed), final) for (run, seed), final in finals.items()]
        notes = [Divergence(one.config(run, seed), task, "it grew") for (run, seed), task in early.items()]
        return judge(gap, Evidence({"x": one}, found, notes=notes))

    of_one_seed = judged({("alasso", 0): 0.8, ("si", 0): 0.5}, {("si", 1): 2})
    assert of_one_seed.verdict == UNDECIDED and of_one_seed.diverged == "x/si diverged: seed 1 in task 2"
    assert claims.shown_of(of_one_seed) == "0.300 (1) †"
    assert judged({("alasso", 0): 0.8}, {("si", 1): 2}).verdict == NOT_RUN
    hopeless = judged({("alasso", 0): 0.8}, {("si", 0): 3, ("si", 1): 2})
    said = "x/si diverged: seed 0 in task 3, seed 1 in task 2"
    assert (hopeless.verdict, hopeless.missing, hopeless.diverged) == (NOT_COMPUTABLE, (), said)
    apart = {("alasso", 0): 0.8, ("si", 1): 0.5}
    assert judged(apart, {("alasso", 1): 2}).verdict == NOT_RUN  # with seed 0 they may still be compared
    assert judged(apart, {("alasso", 1): 2, ("si", 0): 3}).verdict == NOT_COMPUTABLE


def test_in_words():
    equal = evidence({run: [0.5, 0.5] for run in ("si", "alasso", "single-task")})
    arguments = {"of": "x/alasso", "floor": "x/si", "ceiling": "x/single-task"}
    share = judge(claim(how="recovered", arguments=arguments, at_least=0.2), equal)
    assert (share.verdict, claims.shown_of(share)) == (NOT_COMPUTABLE, "–")
    assert claims.not_computable_lines([share]) == ["not computable: it is (floor and ceiling are equal)"]

    def one(verdict, counted=True):
        return Judged(claim(counted=counted), verdict)

    many = [one(HOLDS), one(HOLDS), one(DOES_NOT_HOLD), one(UNDECIDED), one(DOES_NOT_HOLD, counted=False)]
    said = "Of 4 claims: 2 hold, 1 does not hold, 1 undecided. In brackets, not counted: 1."
    assert claims.tally_sentence(many) == said
    assert claims.tally_sentence(many[-1:]) == "No claim here is counted: 1 in brackets."
    assert claims.verdict_in_words(many[-1]) == "(does not hold)"
    missing = ["x/si", "x/ewc", "y/si"]
    waiting = [Judged(claim(), NOT_RUN, missing=missing), Judged(claim(), NOT_RUN, apart=["x/alasso", "x/si"])]
    assert claims.missing_lines(waiting, most=1) == [
        "x/alasso and x/si have no seed in common",
        "not run in x: si, …",
        "not run in y: si",
    ]
    other_edition = judge(claim(at_least=0.5), evidence({"si": [0.6]}, data={"cifar100": "re-split"}))
    assert list(claims.by_topic([other_edition])) == ["T (cifar100 re-split)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"difference"', '"diffrence"'), "gap: there is no computation 'diffrence'; did you mean 'difference'?"),
        (("less =", "minus ="), "gap: difference: missing a required argument: 'less'"),
        (('less = "small/si"', 'less = "small/si"\nmaesure = "F"'), "'maesure'"),
        (("small/si", "small/sii"), "gap: experiment small has no run 'sii'; did you mean 'si'?"),
        (("small/si", "smal/si"), "did you mean 'small'?"),
        (("at_least = -1.0", ""), "gap: a bar is missing"),
        (('why = "anything is"', ""), "gap: it lacks why"),
        (('id = "loss"', 'id = "gap"'), "two claims are called 'gap'"),
        (("at_least = -1.0", 'at_least = "0.5"'), "gap: at_least must be a number, not '0.5'"),
        (("at_least = -1.0", "at_least = 2\nat_most = 1"), "no number is at least 2 and at most 1"),
        (("paper = 0.1", "paper = "), "not valid TOML"),
        ((CLAIMS, "[claim]\nid = 'x'"), "write [[claim]]"),
    ],
)
def test_a_mistake_in_a_claim_is_found_before_anything_runs(tmp_path, change, message):
    folder = small_paper(tmp_path)
    (folder / "claims.toml").write_text(CLAIMS.replace(*change, 1))
    with pytest.raises(AlassoError) as caught:
        read_claims(folder, read_experiments(folder))
    assert message in str(caught.value) and "claims.toml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_computation_that_cannot_be_made_names_the_claim():
    for arguments in ({"of": "x/si", "others": []}, {"of": ["x/si"], "others": ["x/ewc"]}):
        with pytest.raises(AlassoError, match=r"^c cannot be computed from "):
            judge(claim(how="gap_to_best_other", arguments=arguments), evidence({"si": [0.5], "ewc": [0.5]}))


# -- the paper's ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def papers():
    """Every claim of the paper with its verdict on the committed results."""
    experiments = read_experiments(PAPER)
    found, untested = read_claims(PAPER, experiments)
    assert untested and all(one.why for one in untested)
    return judge_all(found, Evidence.of_folder(experiments, PAPER / "results"))


def as_row(one):
    """Claim, bar, verdict, mean, deviation, interval, seeds."""
    words = f"{one.claim.id:30} {one.claim.bar():14} {claims.verdict_in_words(one):15}"
    if one.finding is None:
        return words.rstrip()
    deviation = math.nan if one.finding.deviation is None else one.finding.deviation
    numbers = (one.finding.value, deviation, *one.finding.interval())
    return " ".join([words, *(f"{number:12.9f}" for number in numbers), str(one.finding.count)])


def test_the_verdicts_are_those_of_the_table(papers):
    assert [as_row(one) for one in papers] == TABLE.read_text(encoding="utf-8").splitlines()
    assert tally(papers) == dict(zip(VERDICTS, (4, 5, 48, 0, 0), strict=True))
    assert sum(not one.claim.counted for one in papers) == 12


def test_the_papers_verdicts_are_those_of_holm_on_p_values(papers):
    """The same by another way, for claims of one comparison: two-sided p of the bar's nearest end, stepped down."""
    scipy_stats = pytest.importorskip("scipy.stats")
    counted, p_values = [one for one in papers if one.claim.counted], []
    for one in counted:
        found, p = one.finding, 1.0
        if found.error is not None and not found.least_of and not found.most_of:
            p = 2 * float(scipy_stats.t.sf(abs(one.claim.margin(found.value)) / found.error, found.count - 1))
        elif one.verdict != UNDECIDED:
            p = 0.0  # of several comparisons, decided below whatever the level
        p_values.append(p)
    decided, order = set(), sorted(range(len(counted)), key=p_values.__getitem__)
    for rank, place in enumerate(order):
        if p_values[place] > 0.05 / (len(counted) - rank):
            break
        decided.add(counted[place].claim.id)
    assert decided == {one.claim.id for one in counted if one.verdict != UNDECIDED}
    assert len(decided) >= 9


def test_verdicts_follow_from_the_lines_of_the_files_alone(papers):
    """Means and differences of A and F with their intervals, worked out from the files with plain arithmetic."""
    scipy_stats = pytest.importorskip("scipy.stats")
    experiments = read_experiments(PAPER)
    texts = [path.read_text(encoding="utf-8") for path in (PAPER / "results").glob("*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]

    def of(reference, measure):
        name, _, run = reference.partition("/")
        wanted = experiments[name].config(run).to_json() | {"seed": None}
        own = {line["config"]["seed"]: line for line in lines if line["config"] | {"seed": None} == wanted}
        return {seed: MEASURES[measure](line["accuracy"]) for seed, line in own.items()}

    checked = 0
    for one in papers:
        arguments, measure = one.claim.arguments, one.claim.arguments.get("measure", "A")
        if one.claim.how not in ("mean", "difference") or measure not in MEASURES or one.finding is None:
            continue
        numbers = of(arguments["of"], measure)
        if one.claim.how == "difference":
            less = of(arguments["less"], measure)
            numbers = {seed: numbers[seed] - less[seed] for seed in numbers.keys() & less.keys()}
        value, seeds = sum(numbers.values()) / len(numbers), len(numbers)
        assert (one.finding.value, one.finding.count) == (pytest.approx(value, abs=1e-12), seeds), one.claim.id
        if seeds > 1:
            interval = scipy_stats.ttest_1samp(list(numbers.values()), 0.0).confidence_interval(0.95)
            assert one.finding.interval() == pytest.approx(tuple(interval), abs=1e-9), one.claim.id
        checked += 1
    assert checked >= 20


def forgotten(rows):
    lost = [max(rows[t][j] for t in range(j, len(rows) - 1)) - rows[-1][j] for j in range(len(rows) - 1)]
    return sum(lost) / len(lost)


MEASURES = {"A": lambda rows: sum(rows[-1]) / len(rows), "F": forgotten}


if __name__ == "__main__":
    experiments = read_experiments(PAPER)
    found = judge_all(read_claims(PAPER, experiments)[0], Evidence.of_folder(experiments, PAPER / "results"))
    TABLE.write_text("".join(f"{as_row(one)}\n" for one in found), encoding="utf-8")
