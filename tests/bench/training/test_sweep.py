"""Several runs: combinations, what is done already, what diverges, what is resumed."""

import json
import math
import signal

import numpy as np
import pytest
from rich.console import Console

from alasso.bench import io as disk
from alasso.bench import metrics, results
from alasso.bench.training import checkpoint, sweep
from alasso.bench.training.run import Trainer, run
from alasso.errors import AlassoError, DivergedError

from run_helpers import SMALL, SMALL_FLAGS, begun, finished, in_process, numbers, small


def test_combinations_are_all_of_them_and_none_twice():
    configs = sweep.combinations("permuted-digits", ["sgd", "alasso"], [0, 1], SMALL, {"a": ["1", "2"]})
    assert [(c.method, c.settings.get("a"), c.seed) for c in configs] == [
        ("sgd", None, 0), ("sgd", None, 1),
        ("alasso", 1.0, 0), ("alasso", 1.0, 1), ("alasso", 2.0, 0), ("alasso", 2.0, 1),
    ]  # fmt: skip
    with pytest.raises(AlassoError, match="none of sgd, alasso has a setting 'zeta'"):
        sweep.combinations("permuted-digits", ["sgd", "alasso"], [0], SMALL, {"zeta": ["1"]})


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_shards_share_the_runs_whatever_their_order(count):
    configs = sweep.combinations("permuted-digits", ["sgd", "alasso"], [0, 1], SMALL, {"a": ["1", "2"]})
    names = [config.name for config in configs]
    shares = [[c.name for c in sweep.shard_of(configs, f"{i + 1}/{count}")] for i in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for i, share in enumerate(shares):
        assert share == [name for name in names if name in share]
        assert {c.name for c in sweep.shard_of(configs[::-1], f"{i + 1}/{count}")} == set(share)


@pytest.mark.parametrize("shard", ["0/3", "4/3", "1", "1/0", "-1/3", "1/3/5", "a/b", "1.0/3", "", "1/3 ", "9" * 50])
def test_what_is_no_shard_is_refused_in_a_line(shard, tmp_path, monkeypatch, capsys):
    out = tmp_path / "runs"
    commands = (["run", "permuted-digits", *SMALL_FLAGS], ["search", "permuted-digits", "--file", tmp_path / "f.json"])
    for words in commands:
        code, output, errors = in_process([*words, "--out", out, f"--shard={shard}"], monkeypatch, capsys)
        assert code == 2 and "--shard takes I/N, from 1/N to N/N" in errors and len(errors.splitlines()) == 1
        assert not output and not out.exists()


def test_the_results_of_all_shards_are_those_of_the_run_without(tmp_path, monkeypatch, capsys):
    words = ["run", "permuted-digits", "--method", "sgd", "si", "--seed", 0, 1, *SMALL_FLAGS, "-q", "--out"]
    assert in_process([*words, tmp_path / "whole"], monkeypatch, capsys)[0] == 0
    for i in (1, 2, 3):
        code, output, errors = in_process([*words, tmp_path / str(i), "--shard", f"{i}/3"], monkeypatch, capsys)
        assert code == 0 and f"{2 if i == 1 else 1} result file" in output, errors
    shares = [numbers(tmp_path / str(i)) for i in (1, 2, 3)]
    assert sum(map(len, shares)) == 4
    assert {name: found for share in shares for name, found in share.items()} == numbers(tmp_path / "whole")
    code, output, _ = in_process([*words, tmp_path / "none", "--shard", "5/5"], monkeypatch, capsys)
    assert code == 0 and output == "shard 5/5 has none of the 4 runs\n" and not (tmp_path / "none").exists()


def test_a_run_is_one_process_s_at_a_time(tmp_path, monkeypatch):
    configs = [small("sgd"), small("sgd", seed=1)]
    options = sweep.Options(out=tmp_path, device="cpu", quiet=True)
    said = f"{configs[1].name} is being trained by another process"
    with disk.taken(tmp_path, configs[1].name):
        with pytest.raises(AlassoError, match=said):
            run(configs[1], device="cpu", out=tmp_path)
        with monkeypatch.context() as patched, pytest.raises(AlassoError, match=said):
            patched.setattr(sweep, "run", lambda *_, **__: pytest.fail("one was trained before the refusal"))
            sweep.carry_out(configs, options, Console(quiet=True))
        sweep.carry_out(configs[:1], options, Console(quiet=True))  # is nobody's
    sweep.carry_out(configs, options, Console(quiet=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{config.name}.json" for config in configs)


def test_what_is_asked_for_in_the_last_moments_of_a_run_stops_the_runs_after_it(tmp_path, monkeypatch, capsys):
    end_task = Trainer.end_task

    def interrupted(trainer, t):
        if t + 1 == len(trainer.tasks):
            signal.raise_signal(signal.SIGTERM)
        end_task(trainer, t)

    monkeypatch.setattr(Trainer, "end_task", interrupted)
    words = ["run", "permuted-digits", "--method", "sgd", "--seed", 0, 1, *SMALL_FLAGS, "--out", tmp_path]
    code, output, _ = in_process(words, monkeypatch, capsys)
    assert code == 130 and "Stopped; saved up to the end of a run. Go on with:" in output
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    code, _, _ = in_process([*words, "--resume"], monkeypatch, capsys)  # its last run: nothing is left to stop
    assert code == 0 and len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("method", ["sgd", "sgd-dropout", "single-task", "multi-task", "alasso", "imm-mode"])
def test_a_run_that_diverges_costs_the_others_of_a_sweep_nothing(tmp_path, method):
    configs = sweep.combinations(
        "permuted-digits", [method], [0], {"tasks": 2, "epochs": 1, "hidden": 8}, {"learning_rate": [1e38, 1e-3]}
    )
    options = sweep.Options(out=tmp_path, device="cpu", quiet=True)
    said = method + r" learning_rate=1e\+38, seed 0: .*diverged.* smaller learning rate.*; the other runs are finished"
    with pytest.raises(DivergedError, match=said):
        sweep.carry_out(configs, options, Console())
    assert {path.name for path in tmp_path.iterdir()} == {f"{configs[0].name}.diverged", f"{configs[1].name}.json"}
    note = results.read_note(results.note_path(configs[0], tmp_path))
    assert (note.config, note.task) == (configs[0], 1) and "diverged" in note.why
    environment = json.loads(results.note_path(configs[0], tmp_path).read_text())["environment"]
    assert environment["torch"] and "lanes" not in environment


def test_a_note_goes_when_a_result_comes(tmp_path):
    config, options = small("sgd"), sweep.Options(tmp_path, device="cpu", quiet=True)
    results.write_note(results.Divergence(config, 1, "why"), {}, tmp_path)
    sweep.carry_out([config], options, Console())
    assert [path.name for path in tmp_path.iterdir()] == [f"{config.name}.json"]


def test_what_a_search_chose_is_below_what_is_asked_for():
    chosen = {"alasso": {"a": 2.5, "xi": 0.5}, "mas": {"lam": 7.0}}
    asked = sweep.combinations("permuted-digits", ["sgd", "alasso"], [0], SMALL, {"xi": ["0.25"]}, chosen)
    assert [(c.settings.get("a"), c.settings.get("xi")) for c in asked] == [(None, None), (2.5, 0.25)]


def test_a_restart_never_goes_on_from_before(tmp_path):
    config = small()
    writer, position = checkpoint.Writer(), checkpoint.Position(1, accuracy=[[0.12345]], ahead=[0.1], untrained=[0, 0])
    writer.save(results.checkpoint_path(config, tmp_path), position, begun(config))
    writer.finish()
    options = sweep.Options(tmp_path, device="cpu", quiet=True, restart=True)
    (result,) = sweep.carry_out([config], options, Console())
    assert result.accuracy == finished(config).accuracy


def test_a_checkpoint_beside_a_result_does_not_stand_in_the_way(tmp_path, monkeypatch, capsys):
    config = small("sgd")
    results.write(finished(config), tmp_path)
    (tmp_path / f"{config.name}.checkpoint").write_bytes(b"killed between writing the one and removing the other")
    sweep.check_folder([config], sweep.Options(out=tmp_path))


def test_intransigence_appears_in_the_table_beside_a_single_task_run(tmp_path):
    configs = sweep.combinations("permuted-digits", ["single-task", "sgd"], [0], {"tasks": 2, "epochs": 1}, {})
    found = sweep.carry_out(configs, sweep.Options(out=tmp_path, device="cpu", quiet=True), Console(quiet=True))
    single, plain = found
    assert plain.metrics["I"] is None
    measured = metrics.with_intransigence(plain, found).metrics["I"]
    assert math.isclose(measured, np.mean(np.array(single.accuracy[-1]) - [row[-1] for row in plain.accuracy]))


def test_a_finished_run_is_measured_against_the_reference_too(tmp_path):
    single, plain = sweep.combinations("permuted-digits", ["single-task", "sgd"], [0], {"tasks": 2, "epochs": 1}, {})
    options = sweep.Options(out=tmp_path, device="cpu", quiet=True)
    against, before = sweep.carry_out([single, plain], options, Console(quiet=True))
    (again,) = sweep.carry_out([plain], options, Console(quiet=True), lambda config: against)
    assert before.metrics["I"] is None
    assert again.metrics["I"] == metrics.intransigence(before.accuracy, against.accuracy)


def test_the_result_of_another_run_is_not_taken_for_this_one(tmp_path, monkeypatch, capsys):
    one, other = small("sgd"), small("sgd", seed=1)
    results.write(finished(one), tmp_path).rename(path := results.result_path(other, tmp_path))
    words = ["run", "permuted-digits", "--method", "sgd", "--seed", 1, *SMALL_FLAGS, "--out", tmp_path]
    code, _, errors = in_process(words, monkeypatch, capsys)
    assert code == 2 and f"{path} holds the result of {one.name}; delete it, or run it again" in errors
