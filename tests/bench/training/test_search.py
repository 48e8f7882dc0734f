"""The search on held-out examples."""

import json

import pytest
from rich.console import Console

from alasso import AlassoError
from alasso.bench import registry, results
from alasso.bench.training import search, sweep

from run_helpers import in_process


def test_a_search_finds_out_first_whether_its_outcome_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sweep, "carry_out", lambda *_: pytest.fail("was run"))
    options = sweep.Options(out=tmp_path / "out", device="cpu")
    with pytest.raises(AlassoError, match="cannot"):
        search.search("permuted-digits", ["si"], [0], {}, options, tmp_path / "file" / "f.json", Console())


def test_search_writes_what_was_tried_and_chosen_and_never_looks_at_test_examples(tmp_path, monkeypatch):
    method = registry.METHODS["si"]
    monkeypatch.setitem(method.search, "c", (0.1, 1.0))
    monkeypatch.setitem(method.search, "xi", (0.01,))
    used, carry_out = [], sweep.carry_out

    def watched(configs, *rest):
        used.extend(configs)
        return carry_out(configs, *rest)

    monkeypatch.setattr(sweep, "carry_out", watched)
    file = tmp_path / "outcome.json"
    options = sweep.Options(out=tmp_path / "runs", device="cpu", quiet=True, resume=True)
    fields = {"tasks": 2, "epochs": 1, "hidden": 8}
    outcome = search.search("permuted-digits", ["si"], [0, 1], fields, options, file, Console(quiet=True))
    assert len(used) == 4 and all(config.validation for config in used)
    assert json.loads(file.read_text()) == outcome
    tried = outcome["methods"]["si"]["tried"]
    assert [row["A"] for row in tried] == sorted((row["A"] for row in tried), reverse=True)
    assert outcome["chosen"]["si"] == {name: tried[0][name] for name in ("c", "xi")}
    with pytest.raises(AlassoError, match="not the outcome of a search on permuted-mnist"):
        search.search("permuted-mnist", ["si"], [0], fields, options, file, Console(quiet=True))


def test_a_climb_tries_strengths_next_to_the_best(tmp_path):
    file, options = tmp_path / "found.json", sweep.Options(out=tmp_path / "runs", device="cpu", quiet=True, resume=True)
    fields = {"tasks": 3, "epochs": 2, "hidden": 16}
    arguments = ["permuted-digits", ["kron-alasso"], [0], fields, options, file, Console(quiet=True)]
    outcome = search.search(*arguments, climb=4)
    tried = {row["c"]: row["A"] for row in outcome["methods"]["kron-alasso"]["tried"]}
    assert len(tried) == 4 and {1.0, 10.0} < tried.keys()
    assert tried[outcome["chosen"]["kron-alasso"]["c"]] == max(tried.values())
    assert search.chosen_settings(file, "permuted-digits") == outcome["chosen"]
    assert search.search(*arguments, climb=5)["methods"]["kron-alasso"]["tried"][0]["A"] >= max(tried.values())
    with pytest.raises(AlassoError, match="vcl has no strength to search"):
        search.search("permuted-digits", ["vcl"], *arguments[2:], climb=4)


def test_search_knows_its_methods_before_anything_is_run(tmp_path):
    options = sweep.Options(out=tmp_path / "runs", device="cpu", quiet=True)
    for wrong, said in (("alsso", "did you mean 'alasso'"), ("single-task", "no settings to search for")):
        with pytest.raises(AlassoError, match=said):
            search.search(
                "permuted-digits", ["si", wrong], [0], {"tasks": 2}, options, tmp_path / "found.json", Console()
            )
    assert not list(tmp_path.rglob("*.json"))


def test_a_search_tries_the_values_it_is_told_to_and_the_methods_own_of_all_else(tmp_path, monkeypatch):
    method = registry.METHODS["si"]
    monkeypatch.setitem(method.search, "c", (0.1, 1.0))
    monkeypatch.setitem(method.search, "xi", (0.01, 0.1))
    options = sweep.Options(out=tmp_path / "runs", device="cpu", quiet=True)
    fields = {"tasks": 2, "epochs": 1, "hidden": 8}
    file, values = tmp_path / "found.json", {"c": ["0.5", "2", "2"], "gamma": ["0.5"]}
    methods = ["si", "online-ewc"]
    outcome = search.search("permuted-digits", methods, [0], fields, options, file, Console(quiet=True), values)
    assert outcome["methods"]["si"]["space"] == {"c": [0.5, 2.0], "xi": [0.01, 0.1]}
    assert {(row["c"], row["xi"]) for row in outcome["methods"]["si"]["tried"]} == {
        (c, xi) for c in (0.5, 2.0) for xi in (0.01, 0.1)
    }
    online = outcome["methods"]["online-ewc"]["space"]
    assert online == {"lam": list(registry.METHODS["online-ewc"].search["lam"]), "gamma": [0.5]}
    assert set(outcome["chosen"]["online-ewc"]) == {"lam", "gamma"}


def test_searches_that_differ_in_the_values_alone_are_taken_together(tmp_path, capsys):
    options = sweep.Options(out=tmp_path / "runs", device="cpu", quiet=True, resume=True)
    fields, file = {"tasks": 2, "epochs": 1, "hidden": 8}, tmp_path / "found.json"

    def searched(values, seeds=(0,), **changes):
        given = {"c": values, "xi": ["0.1"]}
        asked = {**fields, **changes}
        outcome = search.search("permuted-digits", ["si"], seeds, asked, options, file, Console(), given)
        return outcome["methods"]["si"], outcome["chosen"]["si"]

    first, _ = searched(["1", "3"])
    both, chosen = searched(["0.5", "3"])
    assert both["space"]["c"] == [0.5, 1.0, 3.0] and len(both["tried"]) == 3
    assert [row["A"] for row in both["tried"]] == sorted((row["A"] for row in both["tried"]), reverse=True)
    assert chosen["c"] == both["tried"][0]["c"] and both["earlier"] == [first["environment"]]
    assert "is replaced" not in capsys.readouterr().out
    for changes in ({"seeds": (0, 1)}, {"epochs": 2}):
        alone, _ = searched(["2", "2"], **changes)
        assert [row["c"] for row in alone["tried"]] == [2.0] and "earlier" not in alone
        assert "from a search on other tasks, seeds or settings, is replaced" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lamb": ["1"]}, "si has no setting 'lamb'"),
        ({"batch_size": ["64"]}, "a search tries settings of methods"),
        ({"c": ["much"]}, "much"),
    ],
)
def test_a_search_refuses_values_of_what_is_no_setting_before_anything_is_run(tmp_path, values, said):
    options = sweep.Options(out=tmp_path / "runs", device="cpu", quiet=True)
    with pytest.raises(AlassoError, match=said):
        search.search("permuted-digits", ["si"], [0], {}, options, tmp_path / "f.json", Console(), values)
    assert not list(tmp_path.rglob("*.json"))


def test_what_a_search_chose_is_given_to_runs(tmp_path, monkeypatch, capsys):
    file, runs = tmp_path / "found.json", tmp_path / "runs"
    file.write_text(json.dumps({"schema": 1, "benchmark": "permuted-digits", "chosen": {"si": {"c": 0.7, "xi": 0.3}}}))
    assert search.chosen_settings(file, "permuted-digits") == {"si": {"c": 0.7, "xi": 0.3}}
    words = ["run", "permuted-digits", "--method", "si", "--tasks", 1, "--epochs", 1, "--set", "hidden=8", "xi=0.2"]
    words += ["--device", "cpu", "--settings", file, "--out", runs]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    (result,) = results.read_all([runs])
    assert result.config.settings == {"c": 0.7, "xi": 0.2}


@pytest.mark.parametrize(
    ("benchmark", "file", "said"),
    [
        (
            "permuted-digits",
            "no.json",
            "there is no file .*no.json; alasso search permuted-digits --file .* writes one",
        ),
        ("permuted-mnist", "found.json", "is not the outcome of a search on permuted-mnist"),
        ("permuted-digits", ".", "cannot be read: Is a directory"),
    ],
)
def test_settings_that_no_search_chose_are_refused(benchmark, file, said, tmp_path):
    (tmp_path / "found.json").write_text(json.dumps({"schema": 1, "benchmark": "permuted-digits", "chosen": {}}))
    with pytest.raises(AlassoError, match=said):
        search.chosen_settings(tmp_path / file, benchmark)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({}, "is not the outcome of a search on permuted-digits"),
        ({"chosen": [["si", {"c": 1.0}]]}, "is not the outcome of a search on permuted-digits"),
        ({"chosen": {"si": ["c"]}}, "is not the outcome of a search on permuted-digits"),
        ({"chosen": {"si": {"seed": 5}}}, "found.json: si has no setting 'seed'; there are: "),
        ({"chosen": {"sii": {"c": 1.0}}}, "found.json: 'sii'; did you mean 'si'?"),
        ({"chosen": {}, "methods": []}, "is not the outcome of a search on permuted-digits"),
    ],
)
def test_a_damaged_outcome_is_refused_in_one_line(chosen, said, tmp_path, monkeypatch, capsys):
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"schema": 1, "benchmark": "permuted-digits", **chosen}))
    for words in (["run", "permuted-digits", "--settings", file], ["search", "permuted-digits", "--file", file]):
        code, _, errors = in_process([*words, "--method", "si", "--out", tmp_path / "runs"], monkeypatch, capsys)
        assert code == 2 and said in errors and len(errors.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_memory_takes_what_a_search_chose_for_alasso_and_what_was_not_chosen_is_said(tmp_path, monkeypatch, capsys):
    file, runs = tmp_path / "found.json", tmp_path / "runs"
    file.write_text(json.dumps({"schema": 1, "benchmark": "permuted-digits", "chosen": {"alasso": {"a": 4.5}}}))
    assert search.chosen_settings(file, "permuted-digits")["alasso-memory"] == {"a": 4.5}
    words = ["run", "permuted-digits", "--method", "sgd", "si", "alasso-memory", "--tasks", 1, "--epochs", 1]
    words += ["--set", "hidden=8", "--device", "cpu", "--settings", file, "--out", runs]
    code, output, errors = in_process(words, monkeypatch, capsys)
    assert code == 0, errors
    assert [line for line in output.splitlines() if "has no settings of" in line] == [
        f"{file} has no settings of si: runs it with its preset"
    ]
    found = {result.config.method: result.config for result in results.read_all([runs])}
    assert found["alasso-memory"].settings["a"] == 4.5
