"""The report from made-up results: what is read, its order, what is drawn, and what a hostile file can do."""

import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import asdict
from html import unescape

import numpy as np
import pytest

from alasso.bench import metrics, results
from alasso.bench.cli import report as commands
from alasso.bench.config import RunConfig
from alasso.bench.probe.findings import Measured, Plan
from alasso.bench.probe.findings import read as read_probe
from alasso.bench.registry import METHODS
from alasso.bench.report import aggregate as groups
from alasso.bench.report import live, page
from alasso.bench.report.load import Collected, collect
from alasso.bench.report.sections import sections
from alasso.bench.report.style import VARIANT_LOOKS
from alasso.bench.results import Result
from alasso.bench.training import diverged as divergence
from alasso.errors import AlassoError

pytest.importorskip("matplotlib", reason="the report extra is not installed")
pytest.importorskip("bokeh", reason="the report extra is not installed")

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def made_up(method="alasso", seed=0, tasks=6, benchmark="permuted-digits", fading=0.05, environment=None, **changes):
    """A result whose accuracies fade with the age of a task."""
    if method == "alasso":
        changes.setdefault("c", 1.0)  # whatever a search may have chosen for the benchmark
    config = RunConfig.for_benchmark(benchmark, method, tasks=tasks, seed=seed, **changes)
    noise = np.random.default_rng([seed, tasks]).uniform(-0.02, 0.0, (tasks, tasks))
    rows = [[round(0.97 - fading * (t - j) + float(noise[t, j]), 4) for j in range(t + 1)] for t in range(tasks)]
    ahead, untrained = [0.1] * (tasks - 1), [0.1] * tasks
    return Result(
        config=config,
        environment={"cpu": "abacus", "finished": f"2025-01-0{seed + 1}", **(environment or {})},
        data={"digits": "1"},
        accuracy=rows,
        ahead=ahead,
        untrained=untrained,
        metrics=metrics.summary(rows, ahead=ahead, untrained=untrained),
        seconds=12.5 + seed,
        peak_memory=10**6,
    )


def several(**changes):
    """Three methods, two seeds, and every variant of ALASSO the paper shows."""
    found = []
    for seed in (0, 1):
        found += [made_up(m, seed, fading=f, **changes) for m, f in (("sgd", 0.1), ("si", 0.06), ("alasso", 0.01))]
        found.append(made_up("alasso", seed, fading=0.04, omega_rule="si", **changes))
        found.append(made_up("alasso", seed, fading=0.03, a=1.0, epsilon=0.0, **changes))
        found.append(made_up("alasso", seed, fading=0.02, a_prime=1.8, c_prime=1.0, **changes))
        found += [made_up("alasso", seed, fading=0.02 + 0.001 * a, a=a, **changes) for a in (0.8, 1.0, 5.0)]
    return found


@pytest.fixture
def folder(tmp_path):
    for result in several():
        results.write(result, tmp_path / "results")
    return tmp_path / "results"


# -- reading ------------------------------------------------------------------------------------------------------


def test_what_is_no_result_is_named_and_left_out(folder):
    (folder / "corrupt.json").write_bytes(b"\xff\xfe\x00garbage")
    (folder / "foreign.json").write_text('{"name": "package", "version": "1.0"}')
    whole = next(folder.glob("*sgd*.json")).read_text()
    (folder / "half.json").write_text(whole[: len(whole) // 2])
    found = collect([folder])
    assert len(found.results) == len(several())
    assert [re.search(r"(\w+)\.json", line)[1] for line in found.left_out] == ["corrupt", "foreign", "half"]


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": "abc"},
        {"accuracy": [["x"]]},
        {"accuracy": []},
        {"accuracy": [[2.0]]},
        {"config": []},
        {"config": {"settings": 3}},
        {"environment": "here"},
        {"metrics": None},
        {"seconds": "long"},
        {"schema": 99},
    ],
)
def test_a_result_with_a_wrong_part_is_left_out(tmp_path, change):
    raw = made_up().to_json()
    raw["config"] = raw["config"] | change.pop("config") if isinstance(change.get("config"), dict) else raw["config"]
    (tmp_path / "wrong.json").write_text(json.dumps(raw | change))
    found = collect([tmp_path])
    assert (len(found.results), len(found.left_out)) == (0, 1)
    assert "wrong.json" in found.left_out[0]


def test_a_missing_folder_is_one_clear_sentence(tmp_path):
    with pytest.raises(AlassoError, match="there is no file or folder"):
        collect([tmp_path / "nowhere"])


def test_several_files_and_folders_are_read_together_and_a_run_reached_twice_counts_once(tmp_path, capsys):
    one = results.write(made_up("si"), tmp_path / "one")
    results.write(made_up("alasso"), tmp_path / "two")
    results.write(made_up("si"), tmp_path / "copy")
    (tmp_path / "link.json").symlink_to(one)
    again = results.write(made_up("si", environment={"finished": "2026"}), tmp_path / "again")
    roundabout = tmp_path / "two" / ".." / "one"
    twice = [one, tmp_path / "one", roundabout, tmp_path / "copy", tmp_path / "link.json"]
    found = collect([*twice, tmp_path / "two"])
    assert sorted(result.config.method for result in found.results) == ["alasso", "si"]
    commands.report([*twice, tmp_path / "two"], output=tmp_path / "page.html")
    assert "page.html: 2 results" in capsys.readouterr().out
    html = (tmp_path / "page.html").read_text()
    assert "repeated" not in html.partition("<script>")[0]
    assert len(collect([one, again]).results) == 2  # run again: another run


# -- order --------------------------------------------------------------------------------------------------------


def test_variants_are_recognised_from_their_settings():
    found = {groups.variant(result.config) for result in several()}
    assert found == {None, "asymmetric only", "accurate only", "no decoupling"}
    assert groups.variant(made_up(a=1.0).config) is None  # a = a' = 1 is where the defaults stand
    assert groups.has_memory(made_up("alasso", memory=200).config)


def test_labels_say_what_sets_a_group_apart():
    (section,) = sections(several())
    assert [section.label(group) for group in section.groups] == [
        "ALASSO a=1.8",
        "ALASSO a=0.8",
        "ALASSO a=1",
        "ALASSO a=5",
        "ALASSO, accurate only",
        "ALASSO, asymmetric only",
        "ALASSO, no decoupling",
        "SI",
        "SGD",
    ]
    assert [section.figure_label(group) for group in section.headline] == [
        "ALASSO",
        "ALASSO, accurate only",
        "ALASSO, asymmetric only",
        "SI",
        "SGD",
    ]


def test_a_method_is_shown_as_the_benchmark_has_it_even_where_another_run_is_better():
    (section,) = sections([made_up(), made_up(precision="float32", fading=0.0), made_up(epochs=3, fading=0.0)])
    assert section.standard["alasso"].config == made_up().config
    assert {section.label(group) for group in section.groups} == {
        "ALASSO epochs=6 precision=tf32",
        "ALASSO epochs=3",
        "ALASSO precision=float32",
    }


def labels_of(*found):
    (section,) = sections(found)
    return [section.label(group) for group in section.groups]


def test_a_method_by_itself_needs_no_settings_in_its_name():
    assert labels_of(made_up(a=3.0), made_up(a=3.0, seed=1), made_up("si")) == ["ALASSO", "SI"]


def test_a_field_that_came_later_tells_apart_as_any_other():
    assert sorted(labels_of(made_up(), made_up(adam_eps=1e-7))) == ["ALASSO adam_eps=1e-07", "ALASSO adam_eps=1e-08"]
    (section,) = sections([made_up("single-task"), made_up("si", adam_eps=1e-7)])
    assert section.standard["si"].mean("I") is None  # another stream


def test_in_a_grid_no_label_fits_two_groups():
    grid = [made_up(a=a, xi=xi) for a in (1.8, 3.0) for xi in (0.1, 0.3)]
    assert sorted(labels_of(*grid)) == [
        "ALASSO a=1.8 xi=0.1",
        "ALASSO a=1.8 xi=0.3",
        "ALASSO a=3 xi=0.1",
        "ALASSO a=3 xi=0.3",
    ]


def test_settings_that_a_named_variant_varies_are_in_its_label():
    two = [made_up(omega_rule="si"), made_up(omega_rule="si", a=3.0), made_up()]
    assert labels_of(*two) == ["ALASSO", "ALASSO, asymmetric only a=1.8", "ALASSO, asymmetric only a=3"]


def test_a_preset_that_many_settings_depart_from_is_called_so():
    changes = [{}, {"a": 3.0}, {"c": 3.0}, {"monotone": False}, {"xi": 0.5}]
    found = labels_of(*(made_up(benchmark="permuted-mnist", **change) for change in changes))
    assert found[0] == "ALASSO, preset"
    assert sorted(found[1:]) == ["ALASSO a=3", "ALASSO c=3", "ALASSO monotone=False", "ALASSO xi=0.5"]


def test_labels_cut_to_the_same_text_are_told_apart_by_their_hash():
    long = "my_module_of_networks:factory_"
    one, other = labels_of(made_up(model=long + "one"), made_up(model=long + "other"))
    assert one != other and one.endswith("]") and other.endswith("]")


def test_a_sweep_is_shown_whole_at_first_and_in_colours_of_its_own():
    from alasso.bench.report.drawing import group_look

    sweep = [made_up(a=a) for a in (0.8, 1.0, 1.8, 2.0, 3.0, 4.0, 5.0)]
    (section,) = sections(sweep)
    assert section.headline == list(section.groups)
    by_a = {group.config.settings["a"]: group_look(section, group).light for group in section.groups}
    assert len(set(by_a.values())) == 7
    assert (by_a[0.8], by_a[5.0]) == ("#00334F", "#D55E00")
    html = page.build(Collected(sweep, []))
    assert re.findall(r'data-group="\w+" aria-pressed="(\w+)"', html) == ["true"] * 7
    assert html.count("Press a name to show or hide it") == 1


def lightness(colour):
    return sum(share * int(colour[at : at + 2], 16) / 255 for share, at in ((0.299, 1), (0.587, 3), (0.114, 5)))


def several_settings():
    """Further settings of one method, and of a named variant of it, beside other methods."""
    results = [made_up(a=a) for a in (0.8, 1.8, 2.0, 3.0, 4.0, 5.0)] + [made_up(adam_eps=1e-7)]
    results += [made_up(a=1.0, epsilon=0.0, c=c) for c in (0.5, 1.0)]
    return [*results, *map(made_up, ("si", "ewc", "single-task"))]


def test_further_settings_of_a_method_have_looks_of_their_own_and_the_main_one_is_strongest():
    from alasso.bench.report.drawing import group_look, pen

    (section,) = sections(several_settings())
    looks = {section.label(group): group_look(section, group) for group in section.groups}
    own = [look for label, look in looks.items() if label.startswith("ALASSO") and "accurate" not in label]
    accurate = [look for label, look in looks.items() if "accurate" in label]
    assert (len(own), len(accurate)) == (7, 2)
    for family in (own, accurate):
        (main,) = [look for look in family if not look.further]
        further = [look for look in family if look.further]
        for colours in ([look.light for look in family], [look.dark for look in family]):
            assert len(set(colours)) == len(family)
        assert len({look.dashes for look in family}) == len(family)  # told apart in grey, too
        assert len({look.hatch for look in family}) == len(family)
        assert all(abs(lightness(look.light) - lightness(main.light)) > 0.03 for look in further)
        assert all(pen(look)["linewidth"] < pen(main)["linewidth"] for look in further)
    main = next(look for look in own if not look.further)
    assert main == METHODS["alasso"].look
    assert group_look(section, section.standard["alasso"]) == main and looks["SI"] == METHODS["si"].look


def test_each_name_in_a_figure_stands_behind_a_piece_of_its_line():
    from alasso.bench.report import figures

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


def test_further_settings_are_told_apart_on_the_page():
    html = page.build(Collected(several_settings(), []))
    swatches = re.findall(r'class="key".*?<svg[^>]*style="([^"]*)"[^>]*><line[^>]*stroke-dasharray="([^"]*)"', html)
    assert len(swatches) == len(set(swatches)) == 12
    assert len({dashes for style, dashes in swatches if "--width:2" in style}) >= 6


def test_the_legend_of_bars_is_within_the_figure():
    from alasso.bench.report import figures

    figure = figures.task_bars(several_settings())
    figure.canvas.draw()
    box, (legend,) = figure.bbox, figure.legends
    frame = legend.get_window_extent()
    assert box.x0 <= frame.x0 and frame.x1 <= box.x1 and box.y0 <= frame.y0


def test_bars_say_which_runs_they_leave_out():
    from alasso.bench.report import figures

    few = [made_up(method) for method in ("alasso", "si", "ewc")]
    more = [*few, made_up("mas"), made_up("sgd")]
    many = [*more, made_up("vcl"), made_up("imm-mode")]
    why = "the paper's four methods alone"
    for shown, said in ((few, ""), (more, f"{why}, not drawn: MAS, SGD"), (many, f"{why}: 4 other runs are not drawn")):
        (axes,) = figures.task_bars(shown).axes
        html = page.build(Collected(shown, []))
        words = [text.get_text() for text in axes.texts]
        assert any("not drawn" in word for word in words) == bool(said)
        assert any(word.endswith(said) for word in words)
        assert f"accuracy after learning all tasks{said and '; '}{said}<" in unescape(html)
        assert "pixels permuted<" in html and "nothing to download" not in html


def test_what_is_compared_is_drawn_over_the_seeds_that_both_have():
    from alasso.bench.report import figures
    from alasso.bench.report.sections import one_section

    coupled = {"a_prime": 1.8, "epsilon_prime": 1e-6}
    both = [*(made_up("alasso", seed=seed) for seed in range(5)), made_up("alasso", seed=1, **coupled)]
    section = one_section(both)
    assert [group.seeds for group in figures.decoupling_groups(section)] == [(1,), (1,)]
    apart = [made_up("alasso", seed=0), made_up("alasso", seed=1, **coupled)]
    assert [group.seeds for group in figures.decoupling_groups(one_section(apart))] == [(0,), (1,)]


def test_the_page_names_the_machine_and_not_the_runs_beside():
    html = page.build(
        Collected([made_up(environment={"gpu": "the-gpu", "stack": ["a-companion"], "diverged": []})], [])
    )
    assert "the-gpu" in html and "a-companion" not in html


def test_of_a_long_sweep_lines_from_end_to_end_are_shown_at_first():
    (section,) = sections([made_up(a=1.0 + 0.1 * step) for step in range(60)])
    shown = [group.config.settings["a"] for group in section.headline]
    assert len(shown) == 12 and shown == sorted(shown)
    assert (shown[0], shown[-1]) == (1.0, pytest.approx(6.9))


def test_decoupling_is_shown_between_runs_that_equal_each_other_in_all_else():
    from alasso.bench.report.figures import decoupling_groups

    coupled = {"a_prime": 1.8, "c_prime": 1.0, "epsilon_prime": 1e-6}
    runs = [made_up(c=3.0), made_up(c=1.0), made_up(c=1.0, **coupled)]
    (section,) = sections(runs)
    assert section.standard["alasso"].config.settings["c"] == 3.0  # as searched on this benchmark
    assert [(g.config.settings["c"], g.variant) for g in decoupling_groups(section)] == [
        (1.0, None),
        (1.0, "no decoupling"),
    ]
    assert decoupling_groups(*sections([runs[0], runs[2]])) == []


def test_no_variant_has_a_colour_of_another_or_of_a_method():
    methods = {colour for look in (method.look for method in METHODS.values()) for colour in (look.light, look.dark)}
    variants = [colour for look in VARIANT_LOOKS.values() for colour in (look.light, look.dark)]
    assert len(set(variants)) == len(variants) and not methods & set(variants)


def test_the_chart_of_decoupling_has_a_key_of_its_own_with_the_looks_of_the_legend():
    coupled = {"a_prime": 1.8, "c_prime": 1.0, "epsilon_prime": 1e-6}
    html = page.build(Collected([made_up(c=3.0), *(made_up(seed=seed) for seed in (0, 1)), made_up(**coupled)], []))
    (key,) = re.findall(r'<ul class="chart-key">(.*?)</ul>', html)
    lines = re.findall(r"<li>(.*?)</li>", key)
    assert [line.rpartition(">")[2] for line in lines] == ["ALASSO c=1", "ALASSO, no decoupling c=1"]
    assert all(f">{line}</button>" in html for line in lines)


def test_a_sweep_among_methods_leaves_none_of_them_out_and_says_how_much_it_shows():
    from alasso.bench.report import figures

    methods = ("sgd", "si", "ewc", "mas", "single-task")
    found = [*map(made_up, methods), *(made_up(a=1.0 + 0.1 * step) for step in range(20))]
    (section,) = sections(found)
    assert {group.method for group in section.headline} == {*methods, "alasso"} and len(section.headline) == 12
    shown = figures.mean_accuracy(found).axes[0]
    assert any("12 of 25 settings" in text.get_text() for text in [*shown.texts, *shown.figure.texts])


def test_where_methods_and_ablations_fill_a_figure_no_odd_settings_of_a_sweep_are_added():
    methods = ("sgd", "sgd-dropout", "si", "ewc", "online-ewc", "mas", "imm-mean", "imm-mode", "single-task")
    ablations = [made_up(omega_rule="si"), made_up(a=1.0, epsilon=0.0)]
    sweep = [made_up(a=1.0 + 0.1 * step) for step in range(20)]
    (section,) = sections([*map(made_up, methods), *ablations, *sweep])
    shown = [group.variant for group in section.headline if group.method == "alasso"]
    assert len(section.headline) == 12 and shown == [None, "accurate only", "asymmetric only"]


def test_runs_that_diverged_are_named_where_they_have_no_result(tmp_path):
    ended, lost = made_up(a=2.0), made_up(a=3.0)
    results.write(ended, tmp_path)
    for one in (ended, lost):
        divergence.write(divergence.Divergence(one.config, 2, "0.weight is no longer finite"), {}, tmp_path)
    (tmp_path / "odd.diverged").write_text("")
    found = collect([tmp_path, *(path for path in tmp_path.iterdir() if path.is_file())])
    assert [result.name for result in found.results] == [ended.name]
    assert sorted(found.left_out) == sorted(
        [
            f"{lost.name} diverged in task 2: 0.weight is no longer finite",
            f"{tmp_path / 'odd.diverged'} is no note of a run that diverged; delete it, and the run is made again",
        ]
    )
    assert f"{lost.name} diverged in task 2" in page.build(found)


def test_probes_are_on_the_page_with_their_figures_and_findings(tmp_path):
    results.write(made_up(), tmp_path)
    offsets = [-1.0, 0.0, 1.0]
    measured = Measured(
        config={"benchmark": "permuted-<b>digits</b>", "model": "mlp", "seed": 2},
        plan=Plan(weights=2, offsets=3),
        seconds=1.5,
        accuracy=0.9,
        offsets=offsets,
        weights=["0.weight[0, 0]", "0.weight[0, 1]"],
        losses=[[1.5, 1.0, 3.0], [1.0, 1.0, 1.0]],
        importance=[0.5, 0.0],
        came_from=[-0.1, 0.0],
        springs=[[0.5, 0.9], [0.0, 0.0]],
        environment={},
        examples=100,
    )
    (tmp_path / "x.probe.json").write_text(json.dumps(asdict(measured)))
    (tmp_path / "y.probe.json").write_text("{}")
    for part in ("offsets", "weights", "losses", "importance", "came_from", "springs"):
        with pytest.raises(AlassoError, match="is not a measurement of alasso probe"):
            damaged = tmp_path / "damaged" / "z.probe.json"
            damaged.parent.mkdir(exist_ok=True)
            damaged.write_text(json.dumps({**asdict(measured), part: type(getattr(measured, part))()}))
            read_probe(damaged)
    damaged.write_text(json.dumps({**asdict(measured), "surrogates": {}}))
    with pytest.raises(AlassoError, match="was measured by an older version, in another form; delete it to measure"):
        read_probe(damaged)
    damaged.unlink()
    found = collect([tmp_path])
    assert found.probes == [measured] and len(found.results) == 1
    assert found.left_out == [
        f"{tmp_path / 'y.probe.json'} is not a measurement of alasso probe; delete it to measure again"
    ]
    html = page.build(found)
    assert (
        "The shape of the loss: permuted-&lt;b&gt;digits&lt;/b&gt;, first task, seed 2" in html
        and "<b>digits" not in html
    )
    assert html.count('src="data:image/svg+xml;base64,') == 2 and "1 result · 1 probe" in html
    assert "without any effect on the loss: 1" in html
    alone = page.build(collect([tmp_path / "x.probe.json"]))
    assert "<title>alasso: the shape of the loss</title>" in alone and "0 results" not in alone


def test_in_a_sweep_the_benchmarks_own_settings_come_first():
    sweep = [made_up(benchmark="permuted-mnist", a=a) for a in (1.0, 1.8, 3.0)]
    assert labels_of(*sweep) == ["ALASSO a=1.8", "ALASSO a=1", "ALASSO a=3"]


def test_further_settings_of_one_method_among_many_wait_for_the_legend():
    methods = ("sgd", "si", "ewc", "mas", "alasso", "single-task")
    (section,) = sections([made_up(a=3.0, fading=0.01), *map(made_up, methods)])
    assert len(section.headline) == 6
    assert [section.label(group) for group in section.groups][:2] == ["ALASSO a=3", "ALASSO a=1.8"]
    assert [section.figure_label(group) for group in section.headline][:2] == ["ALASSO", "SI"]


def test_seeds_go_together_and_the_newest_of_repeated_runs_counts():
    old = made_up(seed=1, environment={"finished": "2024"})
    (group,) = groups.groups([made_up(seed=1, fading=0.1), old, made_up(seed=0)])
    assert (group.seeds, group.repeats) == ((0, 1), 1)
    assert group.results[1].environment["finished"] == "2025-01-02"


def test_numbers_of_tasks_and_benchmarks_are_sections_of_their_own():
    found = sections([made_up(), made_up(tasks=4), made_up(benchmark="permuted-mnist")])
    assert [section.title for section in found] == [
        "permuted-digits, 4 tasks",
        "permuted-digits, 6 tasks",
        "permuted-mnist, 6 tasks",
    ]


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


def test_intransigence_is_filled_in_from_a_single_task_run():
    (section,) = sections([made_up("si", fading=0.1), made_up("single-task", fading=0.0)])
    assert section.standard["si"].mean("I") == pytest.approx(0.0)
    (alone,) = sections([made_up("si")])
    assert alone.standard["si"].mean("I") is None


# -- figures ------------------------------------------------------------------------------------------------------


def test_every_figure_in_three_formats_and_a_line_for_those_left_out(tmp_path):
    from alasso.bench.report.figure_files import write_figures

    written, absent = write_figures(several(), tmp_path)
    names = {path.name for path in written}
    for figure in ("mean-accuracy", "spread-over-tasks", "single-tasks", "every-fifth-task", "decoupling", "matrix-si"):
        assert {f"permuted-digits-6-{figure}.{kind}" for kind in ("png", "svg", "pdf")} <= names
    assert {"sensitivity.svg", "measures.pdf"} <= names
    assert all(path.stat().st_size > 1000 for path in written)
    assert absent == ["permuted-digits-6-memory is left out: no run of alasso-memory or vcl-coreset"]


def test_a_figure_drawn_again_is_the_same_file(tmp_path):
    from alasso.bench.report.figure_files import save
    from alasso.bench.report.figures import mean_accuracy

    first = [path.read_bytes() for path in save(mean_accuracy(several()), tmp_path / "1", "x")]
    second = [path.read_bytes() for path in save(mean_accuracy(several()), tmp_path / "2", "x")]
    assert first == second


def test_the_symmetric_surrogate_stands_for_a_equal_to_one():
    from alasso.bench.report.figure_tables import sensitivity_rows

    accurate = made_up(a=1.0, epsilon=0.0)
    (row,) = sensitivity_rows([made_up(), accurate, made_up(epsilon=0.0, fading=0.15)]).values()
    assert {a: group.config for a, group in row.items()} == {1.0: accurate.config, 1.8: made_up().config}
    (row,) = sensitivity_rows([made_up(), accurate, made_up(a=1.0, fading=0.15)]).values()
    assert row[1.0].config == made_up(a=1.0).config  # differs in a alone


@pytest.mark.parametrize("tasks", range(2, 101))
def test_tasks_are_marked_by_whole_numbers_the_first_and_the_last_among_them(tasks):
    from alasso.bench.report.drawing import tick_places

    places = tick_places(tasks)
    assert all(isinstance(place, int) for place in places)
    assert (places[0], places[-1]) == (1, tasks) and places == sorted(set(places))
    assert min(len(places), tasks) >= min(5, tasks) and len(places) <= 11


@pytest.mark.parametrize("tasks", [2, 3, 10, 11, 15, 23, 30, 55, 95, 96, 100])
def test_the_numbers_along_a_matrix_do_not_touch(tasks):
    from alasso.bench.report.drawing import style
    from alasso.bench.report.figures import accuracy_matrix

    figure = accuracy_matrix(made_up(tasks=tasks, fading=0.5 / tasks))
    with style():
        figure.draw_without_rendering()
    (axes, _) = figure.axes
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent().padded(1) for label in labels]
        assert [int(label.get_text()) for label in labels][-1] == tasks
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))


@pytest.mark.parametrize("tasks", [2, 3, 10, 30, 100])
def test_both_axes_of_the_pages_matrix_have_whole_numbers(tasks):
    from alasso.bench.report.charts import matrix_chart
    from alasso.bench.report.drawing import tick_places

    (section,) = sections([made_up(tasks=tasks, fading=0.5 / tasks)])
    chart = matrix_chart(section, section.groups[0])
    assert chart.xaxis[0].ticker.ticks == chart.yaxis[0].ticker.ticks == tick_places(tasks)


def test_bars_of_a_sweep_are_of_all_its_settings():
    from alasso.bench.report.figures import bar_groups

    (section,) = sections([made_up(a=a) for a in (1.0, 2.0, 3.0)])
    assert bar_groups(section) == list(section.groups)


def test_the_main_figure_shows_the_mean_over_seeds():
    from alasso.bench.report.figures import mean_accuracy

    figure = mean_accuracy([made_up("si", 0), made_up("si", 1)])
    (line,) = [line for line in figure.axes[0].lines if line.get_label() != "_sample"]
    curves = [metrics.accuracy_curve(made_up("si", seed).accuracy) for seed in (0, 1)]
    assert np.allclose(line.get_ydata(), np.mean(curves, axis=0))


def test_figures_refuse_results_that_do_not_go_together():
    from alasso.bench.report.figures import mean_accuracy

    with pytest.raises(AlassoError, match="one benchmark with one number of tasks"):
        mean_accuracy([made_up(), made_up(tasks=4)])


def test_one_task_one_seed_and_a_dollar_sign_can_be_drawn(tmp_path):
    from alasso.bench.report.figure_files import write_figures

    found = [made_up(tasks=1), made_up("si", tasks=1), made_up("si", tasks=1, model="$x_{")]
    written, _ = write_figures(found, tmp_path)
    assert len(written) > 6


# -- the page -----------------------------------------------------------------------------------------------------


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


# -- runs still going on ------------------------------------------------------------------------------------------

LOG = """seconds,task,epoch,loss,penalty,learned,mean_accuracy
1,1,1,0.9,0,,
2,1,2,0.5,0,,
2.1,1,,,,0.9,0.9
3,2,1,0.8,0.1,,
0.5,1,2,0.4,0,,
0.6,1,,,,0.95,0.95
0.9,2,1,0.7,0.2,,
1.1,2,2,0.6"""


def test_running_logs_of_one_method_are_told_apart():
    from alasso.bench.report.live import Progress, told_apart

    found = told_apart([Progress(f"SI, seed {seed}", METHODS["si"].look, "si") for seed in range(4)])
    assert len({(one.look.light, one.look.dashes) for one in found}) == 4 and found[0].look == METHODS["si"].look


def test_logs_are_read_as_far_as_they_are_written_and_repeats_replaced(tmp_path):
    (tmp_path / "permuted-digits_si_0123456789_s2.csv").write_text(LOG)
    (tmp_path / "done.csv").write_text(LOG)
    (tmp_path / "done.json").write_text("{}")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (progress,) = live.running(tmp_path)
    assert progress.label == "SI, seed 2, permuted-digits 0123"
    assert progress.loss == [0.9, 0.4, 0.7]
    assert progress.penalty == [0.0, 0.0, 0.2]
    assert (progress.tasks, progress.mean_accuracy) == ([1], [0.95])


@pytest.fixture
def server(folder):
    from alasso.bench.report.watch import Server

    with Server(folder, 0) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetched(address, host=None):
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def test_the_served_page_follows_results_and_logs(server, folder):
    def state():
        return json.loads(fetched(server.address + "state.json"))

    before = state()
    assert before["live"] == []
    assert "Running" in fetched(server.address)
    log = folder / "permuted-digits_si_0123456789_s2.csv"
    log.write_text(LOG)
    begun = state()
    assert begun["version"] != before["version"]
    with log.open("a") as more:
        more.write(",0.3,,\n")
    assert state()["version"] == begun["version"]
    assert state()["live"][0]["loss"][-1] == 0.6
    results.write(made_up("ewc"), folder)
    assert state()["version"] != begun["version"]
    assert "EWC" in fetched(server.address)


def test_only_this_machine_is_answered(server):
    for path, host, status in (("nothing", None, 404), ("", "evil.example:80", 403)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(server.address + path, host)
        assert refused.value.code == status
        refused.value.close()


def test_ctrl_c_ends_the_server_cleanly(folder):
    code = (
        "import sys; from pathlib import Path; from alasso.bench.report.watch import serve\n"
        "serve(Path(sys.argv[1]), 0, lambda line: print(line, flush=True))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "http://127.0.0.1:" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            said, complaints = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, said, complaints) == (0, "stopped\n", "")


def test_a_port_in_use_is_one_clear_sentence(server, folder):
    from alasso.bench.report.watch import Server

    with pytest.raises(AlassoError, match="choose another with --port"):
        Server(folder, server.server_port)


def test_runs_of_a_search_are_shown_alone_and_not_beside_others(tmp_path):
    """They were measured on held-out examples."""
    for seed in (0, 1):
        results.write(made_up(seed=seed, validation=True), tmp_path / "search")
    assert len(collect([tmp_path]).results) == 2 and not collect([tmp_path]).left_out
    results.write(made_up(), tmp_path)
    found = collect([tmp_path])
    assert [result.config.validation for result in found.results] == [False]
    assert found.left_out == ["2 runs of a search, measured on held-out examples; to see them, name their folder alone"]


# -- commands -----------------------------------------------------------------------------------------------------


def test_the_command_writes_page_and_figures(folder, tmp_path, capsys):
    (folder / "bad.json").write_text("{")
    commands.report([folder], output=tmp_path / "page.html", figures=tmp_path / "figures")
    said = capsys.readouterr().out
    assert "left out:" in said and "bad.json is not a whole JSON file" in said
    assert "18 results" in said and "memory is left out" in said
    assert "bad.json is not a whole JSON file" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "figures" / "sensitivity.png").exists()


def test_places_that_cannot_be_written_are_found_out_before_anything_is_written(folder, tmp_path):
    with pytest.raises(AlassoError, match="is a folder; name a file to write"):
        commands.report([folder], output=tmp_path)
    result = next(folder.glob("*.json"))
    before = result.read_bytes()
    with pytest.raises(AlassoError, match=r"is no name for what is to be written there; end it in \.html"):
        commands.report([folder], output=result)
    assert result.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(AlassoError, match="cannot write to"):
        commands.report([folder], output=tmp_path / "page.html", figures=tmp_path / "file" / "figures")
    assert not (tmp_path / "page.html").exists()


def test_a_folder_without_results_is_one_clear_sentence(tmp_path):
    with pytest.raises(AlassoError, match="there are no results in"):
        commands.report([tmp_path], output=tmp_path / "page.html")
    with pytest.raises(AlassoError, match="--watch follows one folder"):
        commands.report([tmp_path / "nowhere"], output=tmp_path / "page.html", watch=True)
    with pytest.raises(AlassoError, match="--port is for --watch"):
        commands.report([tmp_path], output=tmp_path / "page.html", port=8000)
    with pytest.raises(AlassoError, match="follows one folder"):
        commands.report([tmp_path, tmp_path], output=tmp_path / "page.html", watch=True)


def test_without_the_extra_the_advice_is_one_sentence():
    code = (
        "import sys; sys.modules['bokeh'] = sys.modules['matplotlib'] = None\n"
        "from alasso.bench.report import charts, drawing; from alasso.bench.cli import report\n"
        "from alasso.errors import AlassoError\n"
        "for ask in (charts.bokeh, drawing.matplotlib):\n"
        "    try: ask()\n"
        "    except AlassoError as error: print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'alasso[bench]'") == 2
    assert done.stdout.endswith("False\n")  # a report needs no torch
