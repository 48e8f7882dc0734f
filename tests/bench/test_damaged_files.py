"""Files that are damaged or hostile: one line each, and exit code 2 where a file is all that a command is about."""

import json
import lzma
import time
import tracemalloc

import pytest
import torch

from alasso.bench import results, schema
from alasso.bench.config import RunConfig
from alasso.errors import AlassoError

from made_up import EXPERIMENT, small_paper
from report_helpers import made_up
from run_helpers import SMALL_FLAGS, in_process, small

HUGE = "1" + "0" * 400
DEEP = "[" * 100_000


@pytest.fixture
def alasso(monkeypatch, capsys, tmp_path):
    """``alasso …``: exit code, output and errors, which are one line at most."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code, output, errors = in_process(words, monkeypatch, capsys)
        assert len(errors.splitlines()) == (code == 2), errors
        return code, output, errors

    return call


def damaged(result=None, **changes):
    """The text of a result with some parts replaced, by Python values or, as ``"=text"``, by text as it is."""
    raw = {**(result or made_up("single-task", tasks=3)).to_json(), **changes}
    text = json.dumps(raw)
    for value in changes.values():
        if isinstance(value, str) and value.startswith("="):
            text = text.replace(json.dumps(value), value[1:])
    return text


RESULTS = {
    "an accuracy of 10^400": (damaged(accuracy=f"=[[{HUGE}], [0.5, 0.5], [0.5, 0.5, 0.5]]"), "a number beyond 2⁶³"),
    "seconds of 10^400": (damaged(seconds=f"={HUGE}"), "a number beyond 2⁶³"),
    "seconds of 1e400": (damaged(seconds="=1e400"), "a number that is not finite"),
    "seconds that are no number": (damaged(seconds="=NaN"), "NaN for a number"),
    "a number of 6,000 digits": (damaged(peak_memory="=1" + "0" * 6000), "a number of thousands of digits"),
    "settings: 5": (damaged(config={**made_up("sgd").config.to_json(), "settings": 5}), "settings of config must be"),
    "100,000 brackets": (DEEP, "more than 24 levels inside each other"),
    "brackets inside": (damaged(environment=f"={DEEP}"), "more than 24 levels inside each other"),
    "measures of other accuracies": (
        damaged(metrics={**made_up("single-task", tasks=3).metrics, "A": 0.999}),
        "metrics say A = 0.999, but the accuracies give 0.9",
    ),
    "a name twice": (damaged(seconds='=1, "seconds": 2'), "says 'seconds' twice"),
    "half a letter": (damaged(environment={"cpu": "\ud800"}), "too long or no Unicode"),
    "a text of 10 million letters": (damaged(environment={"cpu": "x" * 10_000_000}), "too long or no Unicode"),
    "accuracies of other tasks": (damaged(untrained=[0.1]), "forward transfer needs one accuracy ahead"),
}


@pytest.mark.parametrize("what", RESULTS)
def test_a_damaged_result_is_one_line_and_stands_in_nobodys_way(what, alasso, tmp_path):
    text, why = RESULTS[what]
    bad = tmp_path / "in" / "bad.json"
    bad.parent.mkdir()
    bad.write_text(text)
    code, _, errors = alasso("run", "permuted-digits", "--method", "sgd", "--reference", bad, *SMALL_FLAGS)
    assert code == 2 and "in/bad.json" in errors and why in errors and not (tmp_path / "runs").exists()
    code, _, errors = alasso("report", bad, "-o", "page.html")
    assert code == 2 and why in errors and not (tmp_path / "page.html").exists()
    results.write(made_up("sgd", tasks=3), bad.parent)
    results.write(made_up("si", tasks=3), bad.parent)
    for words in (("report", bad.parent, "-o", "page.html"), ("compare", bad.parent)):
        code, output, _ = alasso(*words)
        left_out = [line for line in output.splitlines() if line.startswith("left out: ")]
        assert code == 0 and len(left_out) == 1 and why in left_out[0] and "bad.json" in left_out[0]
    assert bad.read_text() == text


def test_a_file_that_unpacks_without_end_is_refused_within_its_bound(tmp_path):
    path = tmp_path / "x.json.xz"
    path.write_bytes(lzma.compress(bytes(40 << 20), preset=0))
    tracemalloc.start()
    with pytest.raises(AlassoError, match=r"x\.json\.xz has more than 1 MB; no file of alasso is so large"):
        schema.read_text(path, 1 << 20)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 << 20
    path.write_bytes(lzma.compress(b"x" * 1000)[:-20])
    with pytest.raises(AlassoError, match="is damaged or not a result file"):
        results.read(path)


@pytest.mark.parametrize("content", ["settings: 5", DEEP])
def test_a_damaged_note_is_left_out(content, alasso, tmp_path):
    results.write(made_up("sgd", tasks=3), tmp_path)
    note = {"config": {**made_up("si").config.to_json(), "settings": 5}, "task": 1, "why": "x"}
    (tmp_path / "x.diverged").write_text(DEEP if content == DEEP else json.dumps(note))
    code, output, _ = alasso("report", ".", "-o", "page.html")
    assert code == 0 and "left out: x.diverged is not a note of a diverged run; delete it" in output


def test_a_damaged_outcome_of_a_search_is_one_line_and_stays_as_it_is(alasso, tmp_path):
    for text in (DEEP, '{"schema": 1, "benchmark": "permuted-digits", "chosen": {}, "methods": []}', "{}"):
        (tmp_path / "found.json").write_text(text)
        for words in (
            ("search", "permuted-digits", "--file", "found.json"),
            ("run", "permuted-digits", "--settings", "found.json"),
        ):
            code, _, errors = alasso(*words)
            assert code == 2 and "found.json is not the outcome of a search on permuted-digits" in errors
        assert (tmp_path / "found.json").read_text() == text


TOML = {
    "arrays inside each other": ("a = " + "[" * 3000 + "]" * 3000, "more than 24 levels inside each other"),
    "a whole number of 6,000 digits": (f"a = 1{'0' * 6000}", "not valid TOML"),
    "a whole number of 400 digits": (f"a = {HUGE}", "a number beyond 2⁶³"),
    "a number without end": ("a = inf", "a number that is not finite"),
    "a key of 20,000 parts": ("a" + ".a" * 20_000 + " = 1", "line 1 has more than 100 dots"),
    "a date": ("a = 1979-05-27", "a date or time where no date belongs"),
    "two megabytes": ("#" * (2 << 20), "has more than 1 MB"),
    "bytes that are no text": (b"\xff\xfe", "damaged or not a result file"),
}


@pytest.mark.parametrize("what", TOML)
def test_damaged_toml_is_one_line_at_once(what, alasso, tmp_path):
    content, why = TOML[what]
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "run.toml").write_bytes(content)
    paper = small_paper(tmp_path / "paper")
    started = time.monotonic()
    code, _, errors = alasso("run", "permuted-digits", "--config", "run.toml")
    assert code == 2 and "run.toml" in errors and why in errors
    (paper / "claims.toml").write_bytes(content)
    code, _, errors = alasso("reproduce", "--plan")
    assert code == 2 and "claims.toml" in errors and why in errors
    (paper / "experiments" / "small.toml").write_bytes(content)
    code, _, errors = alasso("reproduce", "--plan")
    assert code == 2 and "small.toml" in errors and why in errors
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("seeds", [HUGE, "9000000000000000000", "10001"])
def test_an_experiment_of_endless_seeds_is_refused(seeds, alasso, tmp_path):
    paper = small_paper(tmp_path / "paper")
    (paper / "experiments" / "small.toml").write_text(EXPERIMENT.replace("seeds = 1", f"seeds = {seeds}"))
    code, _, errors = alasso("reproduce", "--plan")
    assert code == 2 and "small.toml" in errors


def test_settings_that_ask_for_more_runs_than_a_life_has_hours_are_refused(alasso, tmp_path):
    lists = "\n".join(f"{name} = {[0.5 + step / 100 for step in range(50)]}" for name in ("a", "c", "xi", "a_prime"))
    (tmp_path / "run.toml").write_text(f"[settings]\n{lists}\n")
    code, _, errors = alasso("run", "permuted-digits", "--config", "run.toml")
    assert code == 2 and "this asks for 6.25e+06 runs; ask for 10,000 or fewer at a time" in errors


@pytest.mark.parametrize(
    "content", [{"version": 3, "config": {"settings": 5}}, {"version": 3}, [], {"version": 3, "config": []}]
)
def test_a_damaged_checkpoint_of_another_run_stands_in_nobodys_way(content, alasso, tmp_path):
    config = small("si", seed=7)
    if isinstance(content, dict) and content.get("config") == {"settings": 5}:
        content["config"] = {**config.to_json(), "settings": 5}
    (tmp_path / "runs").mkdir()
    torch.save(content, tmp_path / "runs" / f"{config.name}.checkpoint")
    code, output, _ = alasso("run", "permuted-digits", "--method", "si", "--resume", *SMALL_FLAGS)
    assert code == 0 and "1 result file in runs" in output


def test_configs_of_any_shape_are_refused_in_one_line():
    good = small("si").to_json()
    for changes in (
        {"settings": 5},
        {"settings": {1: 2}},
        {"epochs": 10**5000},
        {"model": []},
        {"method": []},
        {"seed": 10**30},
    ):
        with pytest.raises(AlassoError) as refused:
            RunConfig.from_json({**good, **changes})
        assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


def test_every_text_in_a_message_is_short_and_on_one_line():
    for value in ("x\n" * 999, b"\xff" * 999, 10**5000, -(10**5000), [[[]]] * 999, object(), float("nan"), None):
        assert len(schema.shown(value)) <= 64 and "\n" not in schema.shown(value)
