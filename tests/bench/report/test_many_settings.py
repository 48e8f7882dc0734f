"""Pages of very many settings: the work grows with them and no faster, and the page stays one that can be read."""

import re
import sys

import pytest

from alasso.bench.report import page
from alasso.bench.report.figures import sensitivity
from alasso.bench.report.sections import MOST_DRAWN, Collected, sections

from report_helpers import made_up

SWEEPS = {
    "of one setting": lambda step: made_up(tasks=2, c=1.0 + step),
    "of a": lambda step: made_up(tasks=2, a=1.0 + step),
    "of five settings": lambda step: made_up(
        tasks=2,
        a=1.0 + step % 3,
        c=1.0 + step % 5,
        xi=0.1 + step % 7,
        epsilon=0.1 * (step % 2),
        learning_rate=0.001 + step,
    ),
    "without decoupling": lambda step: made_up(tasks=2, a=1.0 + step, a_prime=1.0 + step, c=3.0, c_prime=3.0),
    "with a memory": lambda step: made_up("alasso-memory", tasks=2, memory=1 + step),
    "of the bound": lambda step: made_up(("single-task", "si")[step % 2], tasks=2, learning_rate=0.001 + step // 2),
    "in memory_share": lambda step: made_up("alasso-memory", tasks=2, memory=9, memory_share=0.1 + 0.0001 * step),
}


def calls(work, *arguments):
    """How many functions are called: the same on every machine, however busy."""
    count = 0

    def counted(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("sweep", SWEEPS)
def test_twice_as_many_settings_are_twice_the_work_at_most(sweep):
    def built(count):
        found = Collected([SWEEPS[sweep](step) for step in range(count)])
        page.build(found)  # caches are filled
        return calls(page.build, found)

    few, twice = built(100), built(200)
    assert twice < 2.2 * few


def test_of_very_many_settings_the_page_draws_some_and_its_table_has_all():
    found = [made_up(tasks=3, c=1.0 + step, fading=0.2 - 0.0005 * step) for step in range(300)]
    html = page.build(Collected(found))
    assert html.count('class="key"') == html.count('<details class="run"') == MOST_DRAWN
    assert f"{MOST_DRAWN} of 300 settings are drawn" in html
    assert len(re.findall(r'<th scope="row">(?:(?!</th>).)*ALASSO c=\d+', html)) == 300
    (section,) = sections(found)
    best = max(section.groups, key=lambda group: group.mean("A"))
    assert best in section.drawn and set(map(id, section.headline)) <= set(map(id, section.drawn))
    assert len(html) < 1_800_000
    targets = set(re.findall(r'href="#(run-\w+)"', html))
    assert targets == set(re.findall(r'<details class="run" id="(run-\w+)"', html))  # no link leads nowhere


def test_a_table_of_very_many_values_of_a_shows_some_from_the_least_to_the_largest():
    found = [made_up(tasks=2, a=1.0 + step) for step in range(400)]
    assert [label.get_text() for label in sensitivity(found).axes[0].get_xticklabels()][::24] == ["1", "400"]
    (row,) = re.findall(r'<th scope="col">a</th>(.*?)</tr>', page.build(Collected(found)))
    assert row.count("<th") == 25
