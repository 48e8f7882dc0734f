"""``alasso probe``: from a result to its figures."""

import pytest
import typer

from alasso.bench import results
from alasso.bench.cli import run as commands
from alasso.bench.probe import read
from alasso.errors import AlassoError

from report_helpers import made_up


@pytest.mark.parametrize("method", ["alasso", "sgd"])
def test_from_a_result_to_its_figures(tmp_path, capsys, method):
    path = results.write(made_up(method, tasks=2, epochs=2, hidden=20), tmp_path)
    commands.probe(path, out=tmp_path / "probe", weights=30, offsets=5, span=0.5, examples=100, device="cpu")
    assert "30 random weights of mlp" in capsys.readouterr().out
    names = {file.name for file in (tmp_path / "probe").iterdir()}
    assert {f"probe-{which}.{kind}" for which in ("sides", "surrogates") for kind in ("png", "svg", "pdf")} <= names
    found = read(tmp_path / "probe" / "probe.json")
    assert {"commit", "torch", "cpu", "gpu", "finished"} <= set(found.environment) and found.examples == 100
    for si, ours, came_from in zip(found.surrogate("SI"), found.surrogate("ALASSO"), found.came_from, strict=True):
        seen, unseen = (0, -1) if came_from <= 0 else (-1, 0)
        assert ours[seen] == pytest.approx(si[seen])
        assert ours[unseen] == pytest.approx(1.8 * si[unseen] + 1e-6 * 0.25, rel=1e-4)


def test_a_probe_does_not_write_over_that_of_another_run(tmp_path):
    one, other = (results.write(made_up("sgd", tasks=2, epochs=1, hidden=20, seed=seed), tmp_path) for seed in (0, 1))
    quick = {"weights": 3, "offsets": 3, "span": 0.5, "examples": 20, "device": "cpu"}
    for _ in range(2):  # its own it may
        commands.probe(one, out=tmp_path / "probe", **quick)
    before = (tmp_path / "probe" / "probe.json").read_text()
    with pytest.raises(AlassoError, match="holds the probe of another run"):
        commands.probe(other, out=tmp_path / "probe", **quick)
    assert (tmp_path / "probe" / "probe.json").read_text() == before


def test_a_distribution_has_no_lines(tmp_path):
    path = results.write(made_up("vcl", tasks=2), tmp_path)
    with pytest.raises(AlassoError, match="vcl learns a distribution"):
        commands.probe(path, out=tmp_path)


def test_more_weights_than_there_are_is_said(tmp_path, capsys):
    path = results.write(made_up("sgd", tasks=2, epochs=1, hidden=2), tmp_path)
    commands.probe(path, out=tmp_path / "probe", weights=10**8, offsets=3, span=0.5, examples=20, device="cpu")
    assert "weights that there are, not 100000000" in capsys.readouterr().out


def test_ctrl_c_says_that_nothing_was_saved(tmp_path, monkeypatch, capsys):

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "probe_first_task", interrupted)
    path = results.write(made_up("sgd", tasks=2), tmp_path)
    with pytest.raises(typer.Exit) as ended:
        commands.probe(path, out=tmp_path / "probe", device="cpu")
    assert ended.value.exit_code == 130 and capsys.readouterr().out == "\nStopped; nothing was saved.\n"


def test_a_folder_is_no_result(tmp_path):
    with pytest.raises(AlassoError, match="is a folder; name one result file"):
        commands.probe(tmp_path, out=tmp_path / "probe")
