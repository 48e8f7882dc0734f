"""The probe: the batched measurement against the slow and obvious one, and the command from a result to its figures."""

import io
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from torch import nn

from alasso.bench import results
from alasso.bench.cli import run as commands
from alasso.bench.probe.findings import Measured, Plan, read
from alasso.bench.probe.measure import random_weights, task_loss
from alasso.bench.probe.progress import ShownProgress
from alasso.bench.probe.weight_lines import Weight, losses, losses_one_by_one
from alasso.errors import AlassoError
from test_report import made_up


def networks():
    torch.manual_seed(3)
    shapes = {
        "mlp": ((6,), [nn.Flatten(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4)]),
        "dropout and tanh": ((6,), [nn.Linear(6, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 4)]),
        "one layer": ((6,), [nn.Linear(6, 4)]),
        "normalised": ((6,), [nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 4)]),
        "conv": ((2, 4, 4), [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)]),
    }
    plain = {name: (shape, nn.Sequential(*layers)) for name, (shape, layers) in shapes.items()}
    return {**plain, "wrapped": ((6,), nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, 4)))}


@pytest.mark.parametrize("name", networks())
def test_batched_losses_equal_the_slow_and_obvious_loop(name, monkeypatch):
    monkeypatch.setattr("alasso.bench.probe.weight_lines.CHUNK", 300)  # several chunks, the last one smaller
    shape, model = networks()[name]
    model = model.double().eval()
    x, y = torch.randn(9, *shape, dtype=torch.float64), torch.randint(1, 4, (9,))
    weights = random_weights(model, 10**6, torch.Generator().manual_seed(0))
    assert len(weights) == sum(p.numel() for p in model.parameters())
    offsets = torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
    loss = task_loss(y, slice(1, 4))
    before = [p.clone() for p in model.parameters()]
    fast = losses(model, x, loss, weights, offsets)
    slow = losses_one_by_one(model, x, loss, weights, offsets)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_loss_is_cross_entropy_over_the_tasks_own_columns():
    outputs, y = torch.randn(8, 6), torch.randint(2, 5, (8,))
    expected = nn.functional.cross_entropy(outputs[:, 2:5], y - 2)
    torch.testing.assert_close(task_loss(y, slice(2, 5))(outputs), expected)


def test_weights_are_drawn_without_repeats_and_by_seed():
    model = networks()["mlp"][1]
    once, again = (random_weights(model, 20, torch.Generator().manual_seed(5)) for _ in range(2))
    assert once == again and len(set(once)) == 20
    assert isinstance(once[0], Weight)


def measured(lines):
    return Measured(
        config={"model": "mlp", "benchmark": "x", "seed": 0},
        plan=Plan(weights=len(lines), offsets=3),
        seconds=1.0,
        accuracy=0.9,
        offsets=[-1.0, 0.0, 1.0],
        weights=[f"w[{k}]" for k in range(len(lines))],
        losses=lines,
        importance=[0.5] * len(lines),
        came_from=[0.1] * len(lines),
        springs=[[0.5, 0.9]] * len(lines),
        environment={},
        examples=100,
    )


def test_lines_are_turned_steep_side_right_and_flat_ones_left_out():
    found = measured([[1.3, 1.0, 1.1], [1.0, 1.0, 1.0], [0.9, 1.0, 1.2]])
    assert np.allclose(found.steep_right(), [[0.1, 0, 0.3], [-0.1, 0, 0.2]])
    assert found.shallow_over_steep() == pytest.approx([1 / 3, -0.5])
    said = "\n".join(found.statement())
    assert "without any effect on the loss: 1," in said and "3.00 times as much" in said


def test_surrogates_are_quadratics_with_the_springs_of_their_sides():
    found = replace(measured([[1.3, 1.0, 1.1], [1.0, 1.0, 1.0]]), offsets=[-0.5, 0.0, 2.0])
    assert found.surrogate("SI").tolist() == [[0.125, 0.0, 2.0]] * 2
    assert found.surrogate("ALASSO").tolist() == [[0.125, 0.0, 3.6]] * 2
    with pytest.raises(AlassoError, match="surrogate must be one of SI, ALASSO, not 'EWC'"):
        found.surrogate("EWC")


def test_a_sample_without_any_effect_has_no_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    from alasso.bench.probe.figures import sides

    assert sides(measured([[1.0, 1.0, 1.0]])) is None


@pytest.mark.parametrize("method", ["alasso", "sgd"])
def test_from_a_result_to_its_figures(tmp_path, capsys, method):
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
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
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    one, other = (results.write(made_up("sgd", tasks=2, epochs=1, hidden=20, seed=seed), tmp_path) for seed in (0, 1))
    quick = {"weights": 3, "offsets": 3, "span": 0.5, "examples": 20, "device": "cpu"}
    for _ in range(2):  # its own it may
        commands.probe(one, out=tmp_path / "probe", **quick)
    before = (tmp_path / "probe" / "probe.json").read_text()
    with pytest.raises(AlassoError, match="is the probe of another run"):
        commands.probe(other, out=tmp_path / "probe", **quick)
    assert (tmp_path / "probe" / "probe.json").read_text() == before


def test_without_matplotlib_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("alasso.bench.probe.measure.probe_first_task", None)  # not called
    path = results.write(made_up("sgd", tasks=2, epochs=1, hidden=20), tmp_path)
    with pytest.raises(AlassoError, match="figures need matplotlib: pip install"):
        commands.probe(path, out=tmp_path / "probe", device="cpu")
    assert not (tmp_path / "probe").exists()


def test_wrong_plans_are_refused():
    with pytest.raises(AlassoError, match="odd"):
        Plan(offsets=40)
    with pytest.raises(AlassoError, match="span"):
        Plan(span=0.0)


def test_a_distribution_has_no_lines(tmp_path):
    path = results.write(made_up("vcl", tasks=2), tmp_path)
    with pytest.raises(AlassoError, match="vcl learns a distribution"):
        commands.probe(path, out=tmp_path)


def test_more_weights_than_there_are_is_said(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    path = results.write(made_up("sgd", tasks=2, epochs=1, hidden=2), tmp_path)
    commands.probe(path, out=tmp_path / "probe", weights=10**8, offsets=3, span=0.5, examples=20, device="cpu")
    assert "weights that there are, not 100000000" in capsys.readouterr().out


def test_ctrl_c_says_that_nothing_was_saved(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the report extra is not installed")

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


def test_progress_off_a_terminal_is_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr("alasso.bench.probe.progress.SECONDS_BETWEEN_LINES", -1.0)
    lines = []
    progress = ShownProgress(Console(file=io.StringIO()), lines.append)
    for done in (1, 2):
        progress("moving weights", done, 2)
    assert lines == ["moving weights: 50% done, 0:00 left"]
