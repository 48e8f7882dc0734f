"""What is read, and what is left out with a reason; the order of groups, what stands for a method, labels and looks."""

import json
import re

import pytest

from alasso.bench import results
from alasso.bench.cli import report as commands
from alasso.bench.registry import METHODS
from alasso.bench.report import page
from alasso.bench.report.sections import collect, sections
from alasso.bench.report.style import VARIANT_LOOKS, pen
from alasso.errors import AlassoError

from report_helpers import made_up, measured, several, several_settings


@pytest.fixture
def folder(tmp_path):
    for result in several():
        results.write(result, tmp_path / "results")
    return tmp_path / "results"


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


def test_runs_that_diverged_are_named_where_they_have_no_result(tmp_path):
    ended, lost = made_up(a=2.0), made_up(a=3.0)
    results.write(ended, tmp_path)
    for one in (ended, lost):
        results.write_note(results.Divergence(one.config, 2, "0.weight is no longer finite"), {}, tmp_path)
    (tmp_path / "odd.diverged").write_text("")
    found = collect([tmp_path, *(path for path in tmp_path.iterdir() if path.is_file())])
    assert [result.name for result in found.results] == [ended.name]
    assert sorted(found.left_out) == sorted(
        [
            f"{lost.name} diverged in task 2: 0.weight is no longer finite",
            f"{tmp_path / 'odd.diverged'} is not a note of a diverged run; delete it to train the run again",
        ]
    )
    assert f"{lost.name} diverged in task 2" in page.build(found)


def test_runs_of_a_search_are_shown_alone_and_not_beside_others(tmp_path):
    """They were measured on held-out examples."""
    for seed in (0, 1):
        results.write(made_up(seed=seed, validation=True), tmp_path / "search")
    assert len(collect([tmp_path]).results) == 2 and not collect([tmp_path]).left_out
    results.write(made_up(), tmp_path)
    found = collect([tmp_path])
    assert [result.config.validation for result in found.results] == [False]
    assert found.left_out == ["2 runs of a search, measured on held-out examples; to see them, name their folder alone"]


def test_probes_are_found_beside_results(tmp_path):
    results.write(made_up(), tmp_path)
    probe = measured([[1.5, 1.0, 3.0], [1.0, 1.0, 1.0]], config=made_up().config.to_json())
    (tmp_path / "x.probe.json").write_bytes(probe.as_file())
    (tmp_path / "y.probe.json").write_text("{}")
    found = collect([tmp_path])
    assert found.probes == [probe] and len(found.results) == 1
    (line,) = found.left_out
    assert line == f"{tmp_path / 'y.probe.json'} is not a measurement of alasso probe; delete it to measure again"


def labels_of(*found):
    (section,) = sections(found)
    return [section.label(group) for group in section.groups]


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


def test_further_settings_of_a_method_have_looks_of_their_own_and_the_main_one_is_strongest():
    (section,) = sections(several_settings())
    looks = {section.label(group): section.look(group) for group in section.groups}
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
    assert section.look(section.standard["alasso"]) == main and looks["SI"] == METHODS["si"].look


def test_of_a_long_sweep_lines_from_end_to_end_are_shown_at_first():
    (section,) = sections([made_up(a=1.0 + 0.1 * step) for step in range(60)])
    shown = [group.config.settings["a"] for group in section.headline]
    assert len(shown) == 12 and shown == sorted(shown)
    assert (shown[0], shown[-1]) == (1.0, pytest.approx(6.9))


def test_no_variant_has_a_colour_of_another_or_of_a_method():
    methods = {colour for look in (method.look for method in METHODS.values()) for colour in (look.light, look.dark)}
    variants = [colour for look in VARIANT_LOOKS.values() for colour in (look.light, look.dark)]
    assert len(set(variants)) == len(variants) and not methods & set(variants)


def test_where_methods_and_ablations_fill_a_figure_no_odd_settings_of_a_sweep_are_added():
    methods = ("sgd", "sgd-dropout", "si", "ewc", "online-ewc", "mas", "imm-mean", "imm-mode", "single-task")
    ablations = [made_up(omega_rule="si"), made_up(a=1.0, epsilon=0.0)]
    sweep = [made_up(a=1.0 + 0.1 * step) for step in range(20)]
    (section,) = sections([*map(made_up, methods), *ablations, *sweep])
    shown = [group.variant for group in section.headline if group.method == "alasso"]
    assert len(section.headline) == 12 and shown == [None, "accurate only", "asymmetric only"]


def test_in_a_sweep_the_benchmarks_own_settings_come_first():
    sweep = [made_up(benchmark="permuted-mnist", a=a) for a in (1.0, 1.8, 3.0)]
    assert labels_of(*sweep) == ["ALASSO a=1.8", "ALASSO a=1", "ALASSO a=3"]


def test_further_settings_of_one_method_among_many_wait_for_the_legend():
    methods = ("sgd", "si", "ewc", "mas", "alasso", "single-task")
    (section,) = sections([made_up(a=3.0, fading=0.01), *map(made_up, methods)])
    assert len(section.headline) == 6
    assert [section.label(group) for group in section.groups][:2] == ["ALASSO a=3", "ALASSO a=1.8"]
    assert [section.figure_label(group) for group in section.headline][:2] == ["ALASSO", "SI"]


def test_numbers_of_tasks_and_benchmarks_are_sections_of_their_own():
    found = sections([made_up(), made_up(tasks=4), made_up(benchmark="permuted-mnist")])
    assert [section.title for section in found] == [
        "permuted-digits, 4 tasks",
        "permuted-digits, 6 tasks",
        "permuted-mnist, 6 tasks",
    ]


def lightness(colour):
    return sum(share * int(colour[at : at + 2], 16) / 255 for share, at in ((0.299, 1), (0.587, 3), (0.114, 5)))
