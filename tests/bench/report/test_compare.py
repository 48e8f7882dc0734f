"""``alasso compare``: what is compared with what, and how it is shown."""

import pytest

from alasso.bench import results
from alasso.bench.cli import report as commands
from alasso.bench.report.compare import columns_of, comparisons
from alasso.errors import AlassoError

from report_helpers import made_up


def test_files_of_one_config_are_one_column(tmp_path):
    files = [results.write(made_up(m, seed), tmp_path) for m in ("si", "alasso") for seed in (0, 1)]
    columns, left_out = columns_of(files)
    assert {name: len(inside[0].results) for name, inside in columns.items()} == {"ALASSO": 2, "SI": 2}
    assert left_out == []


def test_folders_are_matched_by_config_and_else_by_method(tmp_path):
    for seed in (0, 1):
        for folder, a in (("one", 1.8), ("two", 3.0)):
            results.write(made_up("si", seed), tmp_path / folder)
            results.write(made_up("alasso", seed, a=a), tmp_path / folder)
        results.write(made_up("ewc", seed), tmp_path / "two")
    found = comparisons(columns_of([tmp_path / "one", tmp_path / "two"])[0])
    assert [(c.title.split(" on ")[0], [g is not None for g in c.columns]) for c in found] == [
        ("SI", [True, True]),
        ("ALASSO", [True, True]),
        ("EWC", [False, True]),
    ]


def test_the_command_prints_the_difference(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for seed in (0, 1, 2):
        for method, fading in (("si", 0.05), ("alasso", 0.01)):
            results.write(made_up(method, seed, fading=fading), tmp_path)
    (tmp_path / "bad.json").write_text("[]")
    commands.compare([tmp_path])
    said = capsys.readouterr().out
    assert "bad.json is not a result of alasso" in said
    assert "−0.1000 ± 0.0000" in said  # SI after ALASSO: 0.04 a task of age, five ages, 2.5 on average
    assert "over the seeds that both have" in said


def test_many_configs_are_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for a in (1.8, 2.0, 3.0, 4.0, 5.0):
        for seed in (0, 1):
            results.write(made_up("alasso", seed, a=a, fading=0.01 * a), tmp_path)
    commands.compare([tmp_path])
    said = capsys.readouterr().out
    assert "ALASSO a=5" in said and "I intransigence" not in said
    assert "−0.080 ± 0.000" in said


def test_four_methods_have_room_in_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for seed in (0, 1):
        for method, fading in (("alasso", 0.01), ("vcl-coreset", 0.08), ("sgd-dropout", 0.1), ("single-task", 0.0)):
            results.write(made_up(method, seed, fading=fading), tmp_path)
    commands.compare([tmp_path])
    printed = capsys.readouterr().out
    assert "A mean accuracy, F forgetting, I intransigence, std over tasks" in printed
    said = [line.split() for line in printed.splitlines()]
    assert ["A", "F", "I", "std"] in said
    assert [line[:2] for line in said if line[:2] == ["2", "seeds"]] == 4 * [["2", "seeds"]]
    assert all(line.count("±") in (0, 1, 4) and line[-1:] != ["±"] for line in said)  # no number is broken
    assert not any("…" in word for line in said for word in line)


def test_every_config_of_a_sweep_is_named_by_its_setting(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    files = [results.write(made_up("alasso", a=a), tmp_path) for a in (1.8, 2.0, 3.0)]
    assert list(columns_of(files)[0]) == ["ALASSO a=1.8", "ALASSO a=2", "ALASSO a=3"]
    assert list(columns_of([tmp_path])[0]) == ["ALASSO a=1.8", "ALASSO a=2", "ALASSO a=3"]


def test_a_folder_of_several_benchmarks_gives_a_table_for_each(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for tasks in (4, 6):
        for method in ("si", "alasso"):
            results.write(made_up(method, tasks=tasks), tmp_path)
    found = comparisons(columns_of([tmp_path])[0])
    assert [(c.title, c.names) for c in found] == [
        ("permuted-digits, 4 tasks", ["ALASSO", "SI"]),
        ("permuted-digits, 6 tasks", ["ALASSO", "SI"]),
    ]
    commands.compare([tmp_path])
    assert "′" not in capsys.readouterr().out


def test_files_of_different_benchmarks_are_still_compared(tmp_path):
    files = [results.write(made_up("si", tasks=tasks), tmp_path) for tasks in (4, 6)]
    (found,) = comparisons(columns_of(files)[0])
    assert found.names == ["SI on permuted-digits, 4 tasks", "SI on permuted-digits, 6 tasks"]


def test_long_names_keep_what_tells_them_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for unmoved in ("moved_right", "unobserved"):
        for precision in ("tf32", "float32"):
            results.write(made_up(unmoved=unmoved, precision=precision), tmp_path)
    commands.compare([tmp_path])
    said = capsys.readouterr().out
    assert "unmoved=unobserved precision=float32" in said and "…" not in said


def test_one_thing_cannot_be_compared(tmp_path):
    path = results.write(made_up(), tmp_path)
    with pytest.raises(AlassoError, match="two or more"):
        commands.compare([path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(AlassoError, match="there are no results in"):
        commands.compare([tmp_path / "empty", path])
    with pytest.raises(AlassoError, match=r"there are no results in .*empty$"):
        commands.compare([tmp_path / "empty"])
