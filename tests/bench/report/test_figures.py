"""What matplotlib draws."""

import itertools
import statistics
from html import unescape

import numpy as np
import pytest

from alasso.bench import metrics
from alasso.bench.report import figures, page
from alasso.bench.report.figures import (
    accuracy_matrix,
    bar_groups,
    by_a,
    by_one_setting,
    decoupling_groups,
    mean_accuracy,
    save,
    write_figures,
)
from alasso.bench.report.sections import Collected, one_section, sections
from alasso.bench.report.style import style, tick_places
from alasso.errors import AlassoError

from report_helpers import made_up, several, several_settings


def test_each_name_in_a_figure_stands_behind_a_piece_of_its_line():
    figure = figures.mean_accuracy(several_settings())
    lines = figure.axes[0].lines
    drawn = [line for line in lines if line.get_label() != "_sample"]
    samples = [line for line in lines if line.get_label() == "_sample"]
    named = [text.get_text() for text in figure.axes[0].texts][: len(drawn)]
    assert len(samples) == len(drawn) > 6 and named == [line.get_label() for line in drawn]
    for line, sample in zip(drawn, samples, strict=True):
        assert sample.get_color() == line.get_color() and sample.get_linewidth() == line.get_linewidth()
        assert sample._unscaled_dash_pattern == line._unscaled_dash_pattern
    assert len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in drawn}) == len(drawn)


def test_the_legend_of_bars_is_within_the_figure():
    figure = figures.task_bars(several_settings())
    figure.canvas.draw()
    box, (legend,) = figure.bbox, figure.legends
    frame = legend.get_window_extent()
    assert box.x0 <= frame.x0 and frame.x1 <= box.x1 and box.y0 <= frame.y0


def test_bars_say_which_runs_they_leave_out():
    few = [made_up(method) for method in ("alasso", "si", "ewc")]
    more = [*few, made_up("mas"), made_up("sgd")]
    many = [*more, made_up("vcl"), made_up("imm-mode")]
    why = "the paper's methods and KronALASSO alone"
    for shown, said in ((few, ""), (more, f"{why}, not drawn: MAS, SGD"), (many, f"{why}: 4 other runs are not drawn")):
        (axes,) = figures.task_bars(shown).axes
        html = page.build(Collected(shown, []))
        words = [text.get_text() for text in axes.texts]
        assert any("not drawn" in word for word in words) == bool(said)
        assert any(word.endswith(said) for word in words)
        assert f"accuracy after learning all tasks{said and '; '}{said}<" in unescape(html)
        assert "pixels permuted<" in html and "nothing to download" not in html


def test_what_is_compared_is_drawn_over_the_seeds_that_both_have():
    coupled = {"a_prime": 1.8, "epsilon_prime": 1e-6}
    both = [*(made_up("alasso", seed=seed) for seed in range(5)), made_up("alasso", seed=1, **coupled)]
    section = one_section(both)
    assert [group.seeds for group in figures.decoupling_groups(section)] == [(1,), (1,)]
    apart = [made_up("alasso", seed=0), made_up("alasso", seed=1, **coupled)]
    assert [group.seeds for group in figures.decoupling_groups(one_section(apart))] == [(0,), (1,)]


def test_decoupling_is_shown_between_runs_that_equal_each_other_in_all_else():
    coupled = {"a_prime": 1.8, "c_prime": 1.0, "epsilon_prime": 1e-6}
    runs = [made_up(c=3.0), made_up(c=1.0), made_up(c=1.0, **coupled)]
    (section,) = sections(runs)
    assert section.standard["alasso"].config.settings["c"] == 3.0  # as searched on this benchmark
    assert [(g.config.settings["c"], g.variant) for g in decoupling_groups(section)] == [
        (1.0, None),
        (1.0, "no decoupling"),
    ]
    assert decoupling_groups(*sections([runs[0], runs[2]])) == []


def test_a_sweep_among_methods_leaves_none_of_them_out_and_says_how_much_it_shows():
    methods = ("sgd", "si", "ewc", "mas", "single-task")
    found = [*map(made_up, methods), *(made_up(a=1.0 + 0.1 * step) for step in range(20))]
    (section,) = sections(found)
    assert {group.method for group in section.headline} == {*methods, "alasso"} and len(section.headline) == 12
    shown = figures.mean_accuracy(found).axes[0]
    assert any("12 of 25 settings" in text.get_text() for text in [*shown.texts, *shown.figure.texts])


def test_every_figure_in_three_formats_and_a_line_for_those_left_out(tmp_path):
    written, absent = write_figures(several(), tmp_path)
    names = {path.name for path in written}
    for figure in ("mean-accuracy", "spread-over-tasks", "single-tasks", "every-fifth-task", "decoupling", "matrix-si"):
        assert {f"permuted-digits-6-{figure}.{kind}" for kind in ("png", "svg", "pdf")} <= names
    assert "sensitivity.svg" in names
    assert all(path.stat().st_size > 1000 for path in written)
    assert absent == [
        "permuted-digits-6-memory is left out: no run of alasso-memory or vcl-coreset",
        "permuted-digits-6-strength is left out: no method with three strengths (c, lam) or dampings (xi)",
    ]


def test_accuracy_by_strength_is_drawn_in_multiples_of_the_default_and_by_damping():
    usual = {"c": 1.0, "xi": 0.1}
    by_c = [made_up("si", seed=s, fading=0.05 * c, **{**usual, "c": c}) for c in (0.1, 1.0, 3.0) for s in (0, 1)]
    by_xi = [made_up("si", seed=0, **{**usual, "xi": xi}) for xi in (0.01, 1.0)]
    by_lam = [made_up("ewc", seed=0, lam=lam) for lam in (1000.0, 10.0, 100.0)]
    found = by_one_setting(one_section([*by_c, *by_xi, *by_lam, made_up("si", xi="auto")]), "c")
    assert {key: [group.config.settings["c"] for group in of] for key, of in found.items()} == {
        ("si", "c"): [0.1, 1.0, 3.0]
    }
    left, right = figures.strength([*by_c, *by_xi, *by_lam]).axes
    drawn = {line.get_label(): line for line in left.lines if line.get_label() in ("SI", "EWC")}
    assert drawn["SI"].get_xdata() == pytest.approx([0.1, 1.0, 3.0])
    assert drawn["EWC"].get_xdata() == pytest.approx([0.1, 1.0, 10.0])  # times the default, 100
    means = [statistics.fmean(metrics.average_accuracy(one.accuracy) for one in by_c[i : i + 2]) for i in (0, 2, 4)]
    assert drawn["SI"].get_ydata() == pytest.approx(means) and left.get_xscale() == "log"
    (of_si,) = [line for line in right.lines if line.get_label() == "SI"]
    assert of_si.get_xdata() == pytest.approx([0.01, 0.1, 1.0])
    assert figures.strength([*by_c[:4], *by_xi[:1]]) is None


def test_a_figure_drawn_again_is_the_same_file(tmp_path):
    first = [path.read_bytes() for path in save(mean_accuracy(several()), tmp_path / "1", "x")]
    second = [path.read_bytes() for path in save(mean_accuracy(several()), tmp_path / "2", "x")]
    assert first == second


def test_the_symmetric_surrogate_stands_for_a_equal_to_one():
    accurate = made_up(a=1.0, epsilon=0.0)
    row = by_a(one_section([made_up(), accurate, made_up(epsilon=0.0, fading=0.15)]))
    assert {a: group.config for a, group in row.items()} == {1.0: accurate.config, 1.8: made_up().config}
    row = by_a(one_section([made_up(), accurate, made_up(a=1.0, fading=0.15)]))
    assert row[1.0].config == made_up(a=1.0).config  # differs in a alone


@pytest.mark.parametrize("tasks", range(2, 101))
def test_tasks_are_marked_by_whole_numbers_the_first_and_the_last_among_them(tasks):
    places = tick_places(tasks)
    assert all(isinstance(place, int) for place in places)
    assert (places[0], places[-1]) == (1, tasks) and places == sorted(set(places))
    assert min(len(places), tasks) >= min(5, tasks) and len(places) <= 11


@pytest.mark.parametrize("tasks", [2, 3, 10, 11, 15, 23, 30, 55, 95, 96, 100])
def test_the_numbers_along_a_matrix_do_not_touch(tasks):
    figure = accuracy_matrix(made_up(tasks=tasks, fading=0.5 / tasks))
    with style():
        figure.draw_without_rendering()
    (axes, _) = figure.axes
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent().padded(1) for label in labels]
        assert [int(label.get_text()) for label in labels][-1] == tasks
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))


def test_bars_of_a_sweep_are_of_all_its_settings():
    (section,) = sections([made_up(a=a) for a in (1.0, 2.0, 3.0)])
    assert bar_groups(section) == list(section.groups)


def test_the_main_figure_shows_the_mean_over_seeds():
    figure = mean_accuracy([made_up("si", 0), made_up("si", 1)])
    (line,) = [line for line in figure.axes[0].lines if line.get_label() != "_sample"]
    curves = [metrics.accuracy_curve(made_up("si", seed).accuracy) for seed in (0, 1)]
    assert np.allclose(line.get_ydata(), np.mean(curves, axis=0))


def test_figures_refuse_results_that_do_not_go_together():
    with pytest.raises(AlassoError, match="one benchmark with one number of tasks"):
        mean_accuracy([made_up(), made_up(tasks=4)])


def test_one_task_one_seed_and_a_dollar_sign_can_be_drawn(tmp_path):
    found = [made_up(tasks=1), made_up("si", tasks=1), made_up("si", tasks=1, model="$x_{")]
    written, _ = write_figures(found, tmp_path)
    assert len(written) > 6
