"""The page as text: what it holds, and what a hostile file can do."""

import json
import re

import numpy as np
import pytest

from alasso.bench import metrics
from alasso.bench.report import page
from alasso.bench.report.sections import Collected, sections
from alasso.bench.report.style import tick_places

from report_helpers import HOSTILE, made_up, measured, several, several_settings


def data_of(html, section=0):
    """What the script draws from."""
    (found,) = re.findall(rf'<script type="application/json" id="section-{section}-data">(.*?)</script>', html)
    return json.loads(found)


def test_a_sweep_is_shown_whole_at_first_and_in_colours_of_its_own():
    sweep = [made_up(a=a) for a in (0.8, 1.0, 1.8, 2.0, 3.0, 4.0, 5.0)]
    (section,) = sections(sweep)
    assert section.headline == list(section.groups)
    by_a = {group.config.settings["a"]: section.look(group).light for group in section.groups}
    assert len(set(by_a.values())) == 7
    assert (by_a[0.8], by_a[5.0]) == ("#00334F", "#D55E00")
    html = page.build(Collected(sweep, []))
    assert re.findall(r'data-group="\w+" aria-pressed="(\w+)"', html) == ["true"] * 7
    assert html.count("Press a name to show or hide it") == 1


def test_charts_hold_the_means_over_seeds_and_their_deviations():
    found = [made_up("si", 0), made_up("si", 1), made_up("sgd", 0)]
    data = data_of(page.build(Collected(found)))
    lines, final = data["charts"]["mean-accuracy"]["lines"], data["charts"]["bars"]["bars"]
    curves = [metrics.accuracy_curve(result.accuracy) for result in found[:2]]
    si, sgd = (made_up(method).config.hash for method in ("si", "sgd"))
    assert lines[si]["mean"] == pytest.approx(np.mean(curves, axis=0), abs=1e-4)
    assert lines[si]["deviation"] == pytest.approx(np.std(curves, axis=0, ddof=1), abs=1e-4)
    assert lines[sgd]["deviation"] is None  # one seed
    assert final[si] == [pytest.approx(np.mean([result.accuracy[-1][4] for result in found[:2]]), abs=1e-4)]
    assert [value / 1e4 for row in data["matrices"][sgd] for value in row] == pytest.approx(
        [value for row in found[2].accuracy for value in row]
    )


def test_further_settings_are_told_apart_on_the_page():
    html = page.build(Collected(several_settings(), []))
    swatches = re.findall(r'class="key".*?<svg[^>]*style="([^"]*)"[^>]*><line[^>]*stroke-dasharray="([^"]*)"', html)
    assert len(swatches) == len(set(swatches)) == 12
    assert len({dashes for style, dashes in swatches if "--width:2" in style}) >= 6


def test_the_page_names_the_machine_and_not_the_runs_beside():
    html = page.build(
        Collected([made_up(environment={"gpu": "the-gpu", "stack": ["a-companion"], "diverged": []})], [])
    )
    assert "the-gpu" in html and "a-companion" not in html


def test_the_chart_of_decoupling_has_a_key_of_its_own_with_the_looks_of_the_legend():
    coupled = {"a_prime": 1.8, "c_prime": 1.0, "epsilon_prime": 1e-6}
    html = page.build(Collected([made_up(c=3.0), *(made_up(seed=seed) for seed in (0, 1)), made_up(**coupled)], []))
    (key,) = re.findall(r'<ul class="chart-key">(.*?)</ul>', html)
    lines = re.findall(r"<li>(.*?)</li>", key)
    assert [line.rpartition(">")[2] for line in lines] == ["ALASSO c=1", "ALASSO, no decoupling c=1"]
    assert all(f">{line}</button>" in html for line in lines)


def test_probes_are_on_the_page_with_their_figures_and_findings(tmp_path):
    config = {"benchmark": "permuted-<b>digits</b>", "model": "mlp", "seed": 2}
    probe = measured([[1.5, 1.0, 3.0], [1.0, 1.0, 1.0]], config=config)
    html = page.build(Collected([made_up()], [], [probe]))
    title = "The shape of the loss: permuted-&lt;b&gt;digits&lt;/b&gt;, first task, seed 2"
    assert title in html and "<b>digits" not in html
    assert html.count('src="data:image/svg+xml;base64,') == 2 and "1 result · 1 probe" in html
    assert "without any effect on the loss: 1" in html
    alone = page.build(Collected(probes=[probe]))
    assert "<title>alasso: the shape of the loss</title>" in alone and "0 results" not in alone


def headings(*found):
    return re.findall(r"<h2[^>]*>([^<]*)</h2>", page.build(Collected(list(found), [])))


def test_the_page_opens_with_the_section_of_most_runs_and_keeps_benchmarks_together():
    few = [made_up(tasks=3), made_up(tasks=5), made_up(benchmark="permuted-mnist", tasks=2)]
    many = [made_up(benchmark="permuted-mnist", tasks=4, seed=seed) for seed in range(3)]
    other = [made_up(benchmark="permuted-fashion-mnist", tasks=2)]
    assert headings(*other, *few, *many) == [
        "permuted-mnist, 4 tasks",
        "permuted-mnist, 2 tasks",
        "permuted-digits, 3 tasks",
        "permuted-digits, 5 tasks",
        "permuted-fashion-mnist, 2 tasks",
    ]


def test_of_as_many_runs_the_benchmarks_own_number_of_tasks_opens_the_page():
    assert headings(made_up(tasks=4), made_up(tasks=10), made_up(tasks=12))[0] == "permuted-digits, 10 tasks"


def test_the_page_holds_everything_and_asks_for_nothing():
    html = page.build(Collected(several(), []))
    assert len(html.encode()) < 3_000_000
    assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?!data:)', html)
    assert "default-src 'none'" in html
    assert "abacus" in html and "moved_right" in html  # machine and settings behind the lines


def test_a_hundred_tasks_and_many_settings_stay_below_three_megabytes():
    many = [made_up("alasso", tasks=100, fading=0.002, a=1.0 + 0.1 * step) for step in range(60)]
    assert len(page.build(Collected(many, [])).encode()) < 3_000_000


def test_hostile_strings_are_text_and_nothing_else():
    bad = made_up(model=HOSTILE, environment={"cpu": HOSTILE, HOSTILE: "x"})
    html = page.build(Collected([bad, made_up("si"), made_up()], [HOSTILE]))
    assert "<img src=x" not in html
    assert "<script>document.title" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


def test_sections_without_results_still_make_a_page():
    assert "no results yet" in page.build(Collected([], ["x.json is not a whole JSON file"]), live=[])


def test_claims_stand_before_the_results_and_are_escaped():
    row = page.ClaimRow("SI <i>forgets</i>", "Table 1", ("0.9", "0.8 ± 0.1 (3)", "≥ 0.8"), "holds", "holds")
    claims = page.Claims("Claims", "A note.", ("claim", "paper", "ours", "bar", "verdict"), {"Main": [row]})
    html = page.build(Collected([made_up()]), claims=claims)
    assert "SI &lt;i&gt;forgets&lt;/i&gt;" in html and '<td data-name="ours">0.8 ± 0.1 (3)</td>' in html
    assert '<td data-name="verdict" data-verdict="holds">holds</td>' in html
    assert html.index('id="claims"') < html.index('id="section-0"')
    assert 'id="claims"' not in page.build(Collected([made_up()]))


def test_the_best_of_the_methods_is_bold_and_upper_bounds_do_not_compete():
    found = [made_up("single-task", fading=0.0), made_up("si", fading=0.02), made_up("sgd", fading=0.1)]
    html = page.build(Collected(found))
    rows = dict(re.findall(r'<a href="#run-\w+">([^<]*)</a></th><td data-value="[^"]*">(<b>)?', html))
    assert rows == {"single-task": "", "SI": "<b>", "SGD": ""}


@pytest.mark.parametrize("tasks", [2, 3, 10, 30, 100])
def test_axes_of_the_pages_charts_have_whole_numbers(tasks):
    html = page.build(Collected([made_up(tasks=tasks, fading=0.5 / tasks)]))
    assert data_of(html)["ticks"] == tick_places(tasks)
