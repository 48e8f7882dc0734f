"""``alasso reproduce`` as a user calls it: a small paper from end to end, and mistakes in one line."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from alasso.bench import results
from alasso.bench.cli import reproduce as commands
from alasso.bench.reproduce import plan as plans
from alasso.bench.reproduce.claims import judge
from alasso.bench.reproduce.experiments import read_experiments
from alasso.bench.training.sweep import Stopped

from made_up import as_lines, claim, evidence, result, small_paper
from run_helpers import in_process

PAPER = Path(__file__).parents[3] / "paper"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a small paper in it."""
    monkeypatch.chdir(tmp_path)
    small_paper(tmp_path / "paper")
    return tmp_path


@pytest.fixture
def reproduce(monkeypatch, capsys):
    def call(*words, width=300):
        monkeypatch.setenv("COLUMNS", str(width))
        code, output, errors = in_process(["reproduce", *words], monkeypatch, capsys)
        return code or 0, output, errors

    return call


def test_a_small_paper_from_end_to_end(here, reproduce):
    out = here / "paper" / "results"
    code, output, errors = reproduce("--plan")
    assert code == 0 and "To do: 7 runs and 1 probe; 0 results in paper/results." in output, errors
    assert "sharing, small" in output and not out.exists()

    code, output, errors = reproduce("--device", "cpu", "--quiet")
    assert code == 0, errors
    assert len(list(out.glob("*_s?.json"))) == 7 and len(list(out.glob("*.probe.json"))) == 1
    assert "Of 2 claims: 1 holds, 1 undecided." in output
    document = (here / "paper" / "REPRODUCTION.md").read_text()
    trained = [results.read(path) for path in out.glob("*_s0.json")]
    (strong,) = [one for one in trained if one.config.settings.get("a") == 3.0]
    numbers = [f"{strong.metrics[name]:.3f}".replace("-", "−") for name in ("A", "F")]
    assert f"| a=3 | {' | '.join(numbers)} | – |" in document
    assert "| ALASSO is above SI |" in document and (here / "paper" / "figures" / "small-mean-accuracy.svg").exists()
    html = (here / "runs" / "report.html").read_text()
    assert re.search(r'<th scope="row">ALASSO is above SI .*data-verdict="holds">holds</td>', html)

    # A result that is deleted comes back; results may be packed into one file in the meantime.
    gone = out / f"{strong.name}.json"
    kept = [path for path in out.glob("*_s?.json") if path != gone]
    as_lines([results.read(path) for path in kept], out / "small.jsonl")
    for path in (gone, *kept):
        path.unlink()
    code, output, errors = reproduce("--plan")
    assert code == 0 and re.search(r"To do: 1 run, about \S+ s as on .*; 7 results in paper/results\.", output), errors
    code, output, errors = reproduce("--device", "cpu")
    assert code == 0 and results.read(gone).accuracy == strong.accuracy, errors
    code, output, _ = reproduce()
    assert code == 0 and "Nothing to run: 8 results in paper/results; to make them yourself" in output


def test_a_run_that_diverged_is_not_tried_again_until_its_note_is_deleted(here, reproduce):
    file = here / "paper" / "experiments" / "small.toml"
    text = file.read_text()
    file.write_text(text + "[runs.wild]\nmethod = 'sgd'\nlearning_rate = 1e38\n")
    words = ("--only", "small", "--device", "cpu")
    code, output, errors = reproduce(*words)
    assert code == 0 and "small/wild diverged: seed 0 in task 1" in output.splitlines(), errors
    assert "| wild | diverged: seed 0 in task 1 |" in (here / "paper" / "REPRODUCTION.md").read_text()
    code, output, _ = reproduce(*words, "--plan")
    assert code == 0 and "Nothing to run: 3 results in paper/results" in output
    assert "; 1 run diverged and will not be tried again: delete NAME.diverged to try." in output
    (note,) = (here / "paper" / "results").glob("*.diverged")
    note.unlink()
    code, output, _ = reproduce(*words, "--plan")
    assert code == 0 and "To do: 1 run" in output


def test_a_shard_runs_its_share_and_leaves_the_verdicts_to_the_end(here, reproduce):
    out, document = here / "paper" / "results", here / "paper" / "REPRODUCTION.md"
    for i, there in ((1, 5), (2, 8)):
        code, output, errors = reproduce("--device", "cpu", "--quiet", "--shard", f"{i}/2")
        assert code == 0 and "the same command with --judge and without --shard judges" in output, errors
        assert len(list(out.iterdir())) == there and not document.exists()
    code, output, _ = reproduce("--judge")
    assert code == 0 and "Of 2 claims:" in output and document.exists()
    code, _, errors = reproduce("--judge", "--shard", "1/2")
    assert code == 2 and errors == "alasso: --judge and --unpack take all results there are: leave out --shard\n"


def test_stopped_prints_the_command_that_resumes(here, reproduce, monkeypatch):
    def stop(*_):
        raise Stopped("task 2, epoch 1, step 3")

    monkeypatch.setattr(plans.sweep, "carry_out", stop)
    code, output, _ = reproduce("--device", "cpu", "--only", "small")
    assert code == 130 and "Stopped; saved up to task 2, epoch 1, step 3." in output
    assert "alasso reproduce --device cpu --only small" in output


# -- judging --------------------------------------------------------------------------------------------------------


def test_judging_needs_no_data_and_runs_nothing(tmp_path, reproduce):
    cifar = read_experiments(PAPER)["cifar"]
    for run, final in (("alasso", 0.7), ("si", 0.6)):
        results.write(result(cifar.config(run), final), tmp_path / "out")
    code, output, errors = reproduce("--paper", PAPER, "--out", tmp_path / "out", "--judge", "--only", "cifar")
    assert code == 0, errors
    assert "ALASSO beats SI (in the paper by 5.7 points)" in output and "not run in cifar: single-task" in output
    assert len(list((tmp_path / "out").glob("*.json"))) == 2 and (tmp_path / "out" / "REPRODUCTION.md").exists()
    assert not list(tmp_path.rglob("*.html"))  # the page is for who names it


def test_results_are_unpacked_as_the_runs_wrote_them(here, reproduce):
    small = read_experiments(here / "paper")["small"]
    found = [result(small.config("si"), 0.5), result(small.config("alasso"), 0.7)]
    as_lines(found, here / "paper" / "results" / "small.jsonl")
    code, output, errors = reproduce("--unpack", "single", "--only", "small")
    assert code == 0 and "wrote 2 results to single" in output, errors
    written = {path.stem: json.loads(path.read_text()) for path in (here / "single").iterdir()}
    assert written == {one.name: one.to_json() for one in found}


def test_results_of_single_files_are_packed_and_a_run_made_again_replaces_its_line(here, reproduce):
    found, out = read_experiments(here / "paper"), here / "paper" / "results"
    config = found["small"].config("si")
    old = as_lines([result(config, 0.5), result(found["small"].config("a=3"), 0.7)], out / "small.jsonl")
    kept = old.read_text().splitlines()[1]
    anew, sgd = result(config, 0.6), result(found["sharing"].config("sgd"), 0.4)
    anew = replace(anew, environment={**anew.environment, "finished": "2026"})
    for one in (anew, sgd):
        results.write(one, out)
    code, output, errors = reproduce("--pack", "--only", "small")
    assert code == 0 and "moved 1 result in paper/results" in output, errors
    lines = old.read_text().splitlines()
    assert lines[0] == kept and json.loads(lines[1]) == anew.to_json() and len(lines) == 2
    assert [path.stem for path in out.glob("*.json")] == [sgd.name]  # of another experiment
    code, output, errors = reproduce("--pack")
    assert code == 0 and not list(out.glob("*.json")) and (out / "sharing.jsonl").exists(), errors
    old.write_text("{\n")
    results.write(anew, out)
    code, output, errors = reproduce("--pack", "--only", "small")
    assert code == 2 and "line 1, is not a whole JSON file" in errors and list(out.glob("*.json"))


def test_the_table_fits_the_terminal(capsys):
    known = evidence({"si": [0.59, 0.61]})
    judged = [judge(claim(at_least=0.5), known), judge(claim(id="d", arguments={"of": "x/ewc"}, at_least=0.5), known)]
    for width in (60, 80, 120):
        Console(width=width).print(commands.verdict_table(judged, width=width))
        shown = capsys.readouterr().out
        assert max(len(line) for line in shown.splitlines()) <= width
        assert "0.600 ± 0.014 (2)" in shown and "undecided" in shown and "planned" in shown
        assert ("≥ 0.5" in shown) == (width == 120)


# -- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "smal"], "no experiment 'smal'; did you mean 'small'?"),
        (["--only", "small", "--skip", "small"], "no experiment is left"),
        (["--judge", "--plan"], "give one of them"),
        (["--judge", "--seeds", "2"], "--judge takes all seeds there are"),
        (["--judge"], "paper/results holds no result of these experiments; name their folder with --out"),
        (["--judge", "--document", "x.txt"], "name a file that ends in .md"),
        (["--paper", "nowhere"], "there is no folder nowhere/experiments"),
        (["--device", "tpu9", "--plan"], "no device 'tpu9'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, here, reproduce):
    before = sorted(here.rglob("*"))
    code, output, errors = reproduce(*words)
    assert code == 2 and message in errors and len(errors.splitlines()) == 1 and not output
    assert sorted(here.rglob("*")) == before


def test_without_the_papers_folder_one_line_says_where_it_is(tmp_path, monkeypatch, reproduce):
    monkeypatch.chdir(tmp_path)
    code, output, errors = reproduce("--judge")
    assert code == 2 and not output and len(errors.splitlines()) == 1
    assert "come with alasso's source, in its folder paper; go there, or name the folder with --paper" in errors


def test_mistakes_in_files_are_one_line(here, reproduce):
    config = read_experiments(here / "paper")["small"].config("si")
    (here / "out").mkdir()
    damaged = here / "out" / f"{config.name}.json"
    damaged.write_text('{"config":')
    said = f"left out: out/{damaged.name} is not a whole JSON file; delete it, and `alasso reproduce` trains it again"
    for words in ([], ["--plan"], ["--judge"]):  # the first trains the others
        code, output, errors = reproduce("--out", "out", "--device", "cpu", "--only", "small", *words)
        assert code == 0 and output.splitlines()[0] == said and not errors
    assert len(list((here / "out").glob("*.json"))) == 3 and damaged.read_text() == '{"config":'
    for other in (here / "out").glob("*alasso*.json"):
        other.unlink()
    code, output, errors = reproduce("--out", "out", "--judge")
    assert (code, output) == (2, said + "\n") and "out holds no result of these experiments" in errors
    shutil.rmtree(here / "out")
    results.write(result(config, 0.5), here / "paper" / "results")
    template = here / "paper" / "template.md"
    template.write_text("{{taly}}")
    code, _, errors = reproduce("--judge")
    assert code == 2 and "did you mean 'tally'" in errors and len(errors.splitlines()) == 1
    template.unlink()
    code, _, errors = reproduce("--judge")
    assert code == 2 and "template.md cannot be read" in errors and len(errors.splitlines()) == 1


def test_estimates_come_from_the_papers_results_where_there_are_none_yet(here, reproduce):
    one = read_experiments(here / "paper")["sharing"]
    as_lines([result(one.config(run), 0.5) for run in one.runs], here / "paper" / "results" / "sharing.jsonl")
    code, output, errors = reproduce("--plan", "--out", "mine", "--only", "sharing")
    assert code == 0 and "To do: 6 runs, about 60 s as on abacus; 0 results in mine." in output, errors
