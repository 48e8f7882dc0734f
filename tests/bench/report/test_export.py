"""``alasso export``: tables that come back as they were."""

import csv
import sys
import warnings

import pytest

from alasso.bench import metrics, results
from alasso.bench.cli import report as commands
from alasso.bench.report.export import write
from alasso.errors import AlassoError

from report_helpers import made_up

FOUND = [made_up(xi="auto"), made_up(xi=0.1, seed=1), made_up("ewc", tasks=3)]


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_row_is_a_run_with_settings_and_measures(tmp_path, capsys):
    for result in FOUND:
        results.write(result, tmp_path / "runs")
    (tmp_path / "runs" / "bad.json").write_text("{")
    commands.export([tmp_path / "runs"], output=tmp_path / "runs.csv")
    said = capsys.readouterr().out
    assert "3 results, 3 rows" in said and "left out:" in said and "bad.json" in said
    rows = {row["name"]: row for row in read(tmp_path / "runs.csv")}
    assert rows.keys() == {result.name for result in FOUND}
    for result in FOUND:
        row = rows[result.name]
        assert (row["method"], row["seed"]) == (result.config.method, str(result.config.seed))
        assert float(row["metrics.A"]) == result.metrics["A"] and float(row["seconds"]) == result.seconds
        assert row["environment.cpu"] == "abacus"
        assert row["xi"] == str(result.config.settings.get("xi", ""))
    assert rows[FOUND[2].name]["lam"] and not rows[FOUND[0].name]["lam"]


def test_a_row_has_the_edition_of_its_data_and_i_where_a_single_task_run_is_beside_it(tmp_path):
    found = [made_up("si"), made_up("si", tasks=3), single := made_up("single-task")]
    write(found, tmp_path / "runs.csv")
    rows = read(tmp_path / "runs.csv")
    assert [row["data.digits"] for row in rows] == ["1"] * 3
    assert float(rows[0]["metrics.I"]) == metrics.intransigence(found[0].accuracy, single.accuracy)
    assert rows[1]["metrics.I"] == ""


def test_pairs_are_the_accuracy_matrix(tmp_path):
    assert write(FOUND, tmp_path / "pairs.csv", pairs=True) == 21 + 21 + 6
    rows = [row for row in read(tmp_path / "pairs.csv") if row["name"] == FOUND[2].name]
    found = [(int(row["after_task"]), int(row["on_task"]), float(row["accuracy"])) for row in rows]
    assert found == [(t + 1, j + 1, FOUND[2].accuracy[t][j]) for t in range(3) for j in range(t + 1)]


@pytest.mark.parametrize("pairs", [False, True])
def test_parquet_holds_what_csv_holds(pairs, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'parquet'")
    for ending in ("csv", "parquet"):
        write(FOUND, tmp_path / f"table.{ending}", pairs)
    rows = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    plain = read(tmp_path / "table.csv")
    assert [{name: "" if value is None else str(value) for name, value in row.items()} for row in rows] == plain
    assert {type(row["lam"]) for row in rows} == {float, type(None)}  # numbers stay numbers


def test_parquet_takes_a_column_of_several_kinds_and_an_ending_in_capitals(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'parquet'")
    found = [made_up(environment={"gpu": kind, "cores": cores}) for kind, cores in ((True, 2), (0.5, 2.5))]
    write(found, tmp_path / "TABLE.PARQUET")
    columns = parquet.read_table(tmp_path / "TABLE.PARQUET").to_pydict()
    assert columns["environment.gpu"] == ["True", "0.5"] and columns["environment.cores"] == [2.0, 2.5]


def test_what_it_refuses(tmp_path, monkeypatch):
    with pytest.raises(AlassoError, match="there are no results"):
        commands.export([tmp_path], output=tmp_path / "runs.csv")
    with pytest.raises(AlassoError, match=r"wrong ending; name a file that ends in \.csv or \.parquet"):
        write(FOUND, tmp_path / "runs.xlsx")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(AlassoError, match=r"pip install 'alasso\[parquet\]', or write a \.csv"):
        write(FOUND, tmp_path / "runs.parquet")
