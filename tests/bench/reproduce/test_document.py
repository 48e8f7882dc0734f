"""The document: prose from a template, every number from a result."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from alasso import AlassoError
from alasso.bench.reproduce import document as documents
from alasso.bench.reproduce.claims import DOES_NOT_HOLD, Judged, judge, judge_all, read_claims
from alasso.bench.reproduce.document import Document
from alasso.bench.reproduce.experiments import Evidence, read_experiments
from alasso.bench.results import Divergence

from made_up import claim, evidence, experiment, result

PAPER = Path(__file__).parents[3] / "paper"
TEMPLATE = (PAPER / "template.md").read_text(encoding="utf-8")


def filled(known, template, judged=(), figures=Path("figures")):
    return Document(known, judged, [], figures).fill(template)


def test_the_papers_document_from_nothing_says_not_run_everywhere(tmp_path):
    experiments = read_experiments(PAPER)
    claims, untested = read_claims(PAPER, experiments)
    nothing = Evidence(experiments, [])
    text = Document(nothing, judge_all(claims, nothing), untested, tmp_path / "figures").fill(TEMPLATE)
    counted = sum(claim.counted for claim in claims)
    assert "{{" not in text and f"Of {counted} claims: {counted} planned." in text
    for point in ("may Ω fall?", "damping ξ", "a weight that did not move", "Adam between tasks", "epochs"):
        row = next(line for line in text.splitlines() if line.startswith(f"| {point}"))
        assert row.count("planned") == 2, row
    assert "re-split" not in text and not (tmp_path / "figures").exists()


def test_the_papers_document_has_its_numbers_from_results(tmp_path):
    experiments = read_experiments(PAPER)
    details, cifar = experiments["details-mnist"], experiments["cifar"]
    found = [result(details.config("as-run", seed), 0.9) for seed in (0, 1)]
    found += [result(details.config("omega-may-fall", seed), 0.5 + 0.1 * seed) for seed in (0, 1)]
    data = {"cifar10": "official", "cifar100": "re-split"}
    for run, final in (("alasso", 0.7), ("si", 0.6), ("single-task", 0.8)):
        found.append(result(cifar.config(run), final, data=data))
    known = Evidence(experiments, found)
    text = filled(known, TEMPLATE, judge_all(read_claims(PAPER, experiments)[0], known), tmp_path / "figures")
    row = next(line for line in text.splitlines() if line.startswith("| may Ω fall?"))
    assert row.endswith("| 0.550 ± 0.071 (2) | −0.350 ± 0.071 (2) |")
    assert "30 tasks is 0.900 ± 0.000 (2);" in text
    assert "**CIFAR-100 is the re-split edition**" in text and "Data: cifar100 re-split." in text
    assert "**Split CIFAR-10/100, 30 tasks (cifar100 re-split)**" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| ALASSO beats SI (in the paper by 5.7")]
    assert row.endswith("| Sect. 5.4, Fig. 8 | 0.057 | 0.100 (1) | – | above 0 | undecided |")
    links = re.findall(r"\]\((figures/.*?)\)", text)
    assert links and all((tmp_path / link).exists() for link in links)


def test_the_committed_document_is_what_the_committed_results_give(monkeypatch):
    """Figures, too, say that they were drawn from these results: nothing is drawn anew."""
    monkeypatch.setattr(documents.figures, "save", lambda *_, **__: pytest.fail("a figure is not of these results"))
    experiments = read_experiments(PAPER)
    claims, untested = read_claims(PAPER, experiments)
    known = Evidence.of_folder(experiments, PAPER / "results")
    text = Document(known, judge_all(claims, known), untested, PAPER / "figures").fill(TEMPLATE)
    assert text == (PAPER / "REPRODUCTION.md").read_text(encoding="utf-8")
    drawn = {f"figures/{path.name}" for path in (PAPER / "figures").iterdir()}
    assert set(re.findall(r"\]\((figures/.*?)\)", text)) == drawn


def test_a_figure_is_drawn_anew_when_results_change(tmp_path):
    known, path = evidence({"alasso": [0.5], "si": [0.6]}), tmp_path / "x-mean-accuracy.svg"
    directive = "{{figure mean-accuracy x}}"
    assert filled(known, directive, figures=tmp_path) == f"![mean accuracy: x]({tmp_path.name}/x-mean-accuracy.svg)"
    first = path.read_text()
    path.write_text(first.replace("<svg", "<svg kept='yes'"))
    filled(known, directive, figures=tmp_path)
    assert "kept='yes'" in path.read_text()
    filled(evidence({"alasso": [0.5, 0.7], "si": [0.6]}), directive, figures=tmp_path)
    assert "kept='yes'" not in path.read_text() and path.read_text() != first
    said = "*No figure of sensitivity: x: the results do not give it.*"
    assert filled(evidence({"si": [0.5]}), "{{figure sensitivity x}}", figures=tmp_path) == said


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{verdict}}", "did you mean 'verdicts'"),
        ("{{mean}}", "the template's 'mean': missing a required argument"),
        ("{{fill x}}", "asks for 'fill'"),
        ("and {{tally}", "write {{name argument …}}"),
        ("tally}} and", "write {{name argument …}}"),
        ("{{mean x/is}}", "no run 'is'; did you mean 'si'"),
        ("{{mean x/si Q}}", "there is no measure 'Q'; there are A, F"),
        ("{{table x y}}", "no experiment with 'y'"),
        ("{{figure mean-acuracy x}}", "there is no figure 'mean-acuracy'; did you mean 'mean-accuracy'"),
    ],
)
def test_a_slip_in_a_template(template, message):
    with pytest.raises(AlassoError, match=message):
        filled(evidence({"si": [0.5]}), template)


def test_a_claim_that_does_not_hold_is_shown_under_its_topic_with_the_paragraphs_of_its_note():
    known = evidence({"si": [0.5, 0.5]})
    missed = {"at_least": 0.7, "note": "Why it may be.\nWhat was tried."}
    judged = [judge(one, known) for one in (claim(**missed), claim(topic="U", at_most=0.9))]
    assert judged[0].verdict == DOES_NOT_HOLD
    assert filled(known, "{{not-holding}}", judged).splitlines() == [
        "**T**",
        "",
        "- **it is** (Table 1) does not hold: 0.500 ± 0.000 (2), 0.200 outside the bar (≥ 0.7); the paper: 0.600.",
        "    - Why it may be.",
        "    - What was tried.",
    ]
    waiting = filled(known, "{{not-holding}}", [judge(claim(arguments={"of": "x/ewc"}, at_least=0.5), known)])
    assert waiting == "Claims that wait for results:\n\n- not run in x: ewc"
    noted = {"at_least": 0.5, "at_most": 0.7, "note": "Two runs more were tried."}
    open_ones = [judge(one, evidence({"si": [0.6]})) for one in (claim(**noted), claim(id="d", at_least=0.5))]
    assert filled(known, "{{not-holding}}", open_ones).splitlines()[2:] == [
        "- **it is** (Table 1) undecided: 0.600 (1), 0.100 inside the bar (0.5 to 0.7); the paper: 0.600.",
        "    - Two runs more were tried.",
    ]
    assert filled(known, "{{not-holding}} {{untested}}") == "None. None."


def test_decided_and_open_claims_apart_and_counted_by_topic():
    known = evidence({"si": [0.5, 0.5], "alasso": [0.5]})
    of_alasso = {"arguments": {"of": "x/alasso"}, "at_least": 0.4}
    judged = judge_all([claim(at_least=0.4), claim(id="b", topic="U", **of_alasso)], known)
    decided, still_open = (filled(known, f"{{{{verdicts {which}}}}}", judged) for which in ("decided", "open"))
    assert "**T**" in decided and "**U**" not in decided and "| 0.500 to 0.500 | ≥ 0.4 | holds |" in decided
    assert "**U**" in still_open and "**T**" not in still_open and "| – | ≥ 0.4 | undecided |" in still_open
    assert filled(known, "{{topics}}", judged).splitlines()[2:] == ["| T | 1 | – |", "| U | – | 1 |"]


def test_runs_without_results_stand_below_the_table():
    text = filled(evidence({"si": [0.5]}), "{{table x}}")
    assert text.endswith("\n\nPlanned, without results yet: alasso, ewc, single-task.") and "| planned" not in text


def test_seeds_that_diverged_are_named_beside_the_others():
    one = experiment()
    known = Evidence({"x": one}, [result(one.config("si"), 0.8)], notes=[Divergence(one.config("si", 1), 2, "it grew")])
    assert filled(known, "{{mean x/si}}") == "0.800 (1); diverged: seed 1 in task 2"
    assert filled(known, "{{table x}}").splitlines()[2].endswith("| 1; diverged: seed 1 in task 2 |")
    assert filled(known, "{{difference x/alasso x/si}}") == "x/si diverged: seed 1 in task 2"
    assert filled(known, "{{difference x/si x/ewc}}") == "x/si diverged: seed 1 in task 2"
    verdicts = filled(known, "{{verdicts}}", [judge(claim(at_least=0.5), known)])
    assert "| 0.800 (1) † | – |" in verdicts
    assert verdicts.endswith("† x/si diverged: seed 1 in task 2. What is found is of the other seeds.")


def test_tables_of_how_it_was_run():
    one = experiment()
    first, second, third = (result(one.config(run, seed), 0.8) for run, seed in (("si", 0), ("si", 1), ("ewc", 0)))
    third = replace(third, environment={"gpu": "loom", "torch": "3"})
    known = Evidence({"x": one}, [first, second, third])
    abacus, loom = (
        "abacus, torch 2: 2 results, by commit: 01234567 (2)",
        "loom, torch 3: 1 result, by commit: unknown (1)",
    )
    assert set(filled(known, "{{machines}}").split("; ")) == {abacus, loom}
    assert filled(known, "{{experiments}}").splitlines()[2] == "| `x` | X | Fig. 1 | 3 | 8 | 30 |"
    assert filled(known, "{{difference x/si x/ewc}}") == "0.000 (1)"
    judged = [Judged(claim(arguments={"of": "x/si", "measure": "F"}, at_least=0.5), DOES_NOT_HOLD)]
    assert filled(known, "{{bars}}", judged).splitlines()[2] == "| `c` | mean of F | `x/si` | ≥ 0.5 | so |"
