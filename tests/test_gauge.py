"""alasso.Gauge: what it reports, and that it leaves a training as it is."""

import json
import math

import pytest
import torch
from torch import nn

import alasso
from alasso import AlassoError, Gauge, KronALASSO

from helpers import mlp, run, same, step, toy_tasks, weights

TASKS = toy_tasks(3)


class Values(nn.Module):
    """A model whose loss is set by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


def values_of(*losses, larger_is_better=False):
    """Reports of a domain whose values are these: the first when its task ends, then one a step; None is a switch."""
    model, found = Values(), []
    gauge = Gauge(model, lambda m, _: m.weight, larger_is_better=larger_is_better, every=1, report=None)
    for loss in losses:
        if loss is None:
            gauge.add("second", [0])
            continue
        model.weight.data.fill_(loss)
        if not gauge._batches:
            gauge.add("first", [0, 1])
        else:
            found.append(gauge.step())
    return [[round(one[f"{what}/first"], 4) for what in ("loss", "forgetting", "gap")] for one in found]


def test_a_loss_is_forgotten_where_it_rises():
    assert values_of(1.0, 1.5, 3.0, 2.0) == [[1.5, 0.5, 0.5], [3.0, 2.0, 2.0], [2.0, 1.0, 2.0]]


def test_an_accuracy_is_forgotten_where_it_falls():
    found = values_of(0.9, 0.5, 0.95, larger_is_better=True)
    assert found == [[0.5, 0.4, 0.4], [0.95, -0.05, 0.4]]


def test_the_gap_is_of_the_last_switch_and_forgetting_of_the_tasks_own_end():
    assert values_of(1.0, 4.0, 2.0, None, 2.5, 2.0)[2:] == [[2.5, 1.5, 0.5], [2.0, 1.0, 0.5]]


def test_a_domain_that_was_trained_again_is_compared_with_its_new_end():
    model = Values()
    gauge = Gauge(model, lambda m, _: m.weight, report=None)
    gauge.add("first", [0])
    model.weight.data.fill_(2.0)
    gauge.add("first", [0])
    assert gauge.read() == {"loss/first": 2.0, "forgetting/first": 0.0, "gap/first": 0.0}


def odd_net():
    """Batch norm, dropout and a part in evaluation mode for good."""
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4), nn.Identity())
    net[4].eval()
    return net


@pytest.mark.parametrize("kind", [None, KronALASSO, alasso.ALASSO])
def test_a_training_that_is_gauged_is_bitwise_one_that_is_not(kind):
    def trained(gauged):
        torch.manual_seed(0)
        model = odd_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        reg = None if kind is None else kind(model).attach(optimizer)
        loader = torch.utils.data.DataLoader(TASKS[0], batch_size=None, shuffle=True)
        gauge = Gauge(model, every=1, report=None)
        for i, task in enumerate(TASKS):
            for x, y in task:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                if gauged:  # between backward and the step, too
                    gauge.read()
                optimizer.step()
                if gauged:
                    gauge.step()
            if reg is not None:
                reg.consolidate()
            if gauged:
                gauge.add(f"task {i}", loader)
        assert [module.training for module in model] == [True, True, True, True, False]
        return weights(model), list(model.buffers()), [] if reg is None else reg.importance().values(), torch.rand(3)

    plain, gauged = trained(False), trained(True)
    assert all(same(one, other) for one, other in zip(plain, gauged, strict=True))


def test_modes_come_back_though_the_measure_raises():
    model = odd_net()
    gauge = Gauge(model, lambda m, batch: 1 / batch, report=None)
    gauge.add("first", [1])
    gauge._batches["first"] = [0]
    with pytest.raises(ZeroDivisionError):
        gauge.read()
    assert [module.training for module in model] == [True, True, True, True, False]


def test_it_measures_in_evaluation_mode_without_gradients():
    seen = []
    gauge = Gauge(odd_net(), lambda m, _: float(seen.append((m.training, torch.is_grad_enabled())) is None))
    gauge.add("first", [0])
    assert seen == [(False, False)]


def test_reports_come_every_so_many_steps_and_the_first_ones_shape_is_a_trackers():
    model, calls = mlp(6, 8, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gauge = Gauge(model, every=3, report=lambda values, step: calls.append((step, values)))
    for batch in TASKS[0][:3]:
        step(model, optimizer, batch)
        assert gauge.step() == {}  # nothing to watch yet
    gauge.add("first", TASKS[0][:2])
    for batch in TASKS[1][:7]:
        step(model, optimizer, batch)
        gauge.step()
    assert [number for number, _ in calls] == [6, 9]
    assert list(calls[0][1]) == ["loss/first", "forgetting/first", "gap/first"]
    assert all(type(value) is float for _, values in calls for value in values.values())
    with torch.no_grad():
        expected = sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in TASKS[0][:2]) / 2
    assert gauge.read()["loss/first"] == pytest.approx(expected)


def test_the_line_in_the_terminal(capsys):
    gauge = Gauge(Values(), lambda m, _: m.weight + 1, label="error", every=1)
    gauge.add("news", [0])
    gauge.add("web/en", [0])
    gauge.step()
    line = "step 1 | news: error 1, forgetting 0, gap 0 | web/en: error 1, forgetting 0, gap 0\n"
    assert capsys.readouterr().out == line


class WithLoss(nn.Module):
    """Called as the models of transformers are."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)

    def forward(self, x, labels=None):
        logits = self.net(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def test_a_mappings_loss_is_the_models_own():
    model = WithLoss()
    batch = {"x": torch.randn(5, 2), "labels": torch.zeros(5, dtype=torch.long)}
    gauge = Gauge(model, report=None)
    gauge.add("first", [batch])
    assert gauge.read()["loss/first"] == pytest.approx(float(model(**batch)["loss"]))


@pytest.mark.parametrize("loaded_first", [True, False])
def test_after_a_restart_the_reference_is_that_from_before(loaded_first):
    def new_model():
        torch.manual_seed(1)
        return mlp(6, 8, 4)

    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gauge = Gauge(model, every=1, report=None)
    run(model, optimizer, TASKS[0])
    gauge.add("first", TASKS[0])
    for batch in TASKS[1]:
        step(model, optimizer, batch)
        before = gauge.step()
    saved = json.loads(json.dumps(gauge.state_dict()))

    other = new_model()
    resumed = Gauge(other, every=1, report=None)
    if loaded_first:
        resumed.load_state_dict(saved)
        resumed.add("first", TASKS[0])
    else:
        resumed.add("first", TASKS[0])
        resumed.load_state_dict(saved)
    other.load_state_dict(model.state_dict())
    assert resumed.steps == len(TASKS[1])
    assert resumed.read() == before
    assert before["forgetting/first"] > 0.01


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Gauge([1]), "takes the model itself"),
        (lambda: Gauge(nn.Linear(1, 1), "loss"), "measure and report are functions"),
        (lambda: Gauge(nn.Linear(1, 1), report=3), "measure and report are functions"),
        (lambda: Gauge(nn.Linear(1, 1), every=0), "every must be a whole number"),
        (lambda: Gauge(nn.Linear(1, 1)).add("first", []), "no batches of first"),
        (lambda: Gauge(nn.Linear(1, 1)).add("first", [torch.ones(1)]), "not of Tensor: give measure="),
        (lambda: Gauge(nn.Linear(1, 1)).load_state_dict({"steps": 1}), "not a saved gauge"),
        (lambda: Gauge(nn.Linear(1, 1)).load_state_dict({"steps": 1, "domains": {"a": [1]}}), "not a saved gauge"),
        (lambda: Gauge(WithLoss()).add("first", [{"x": torch.ones(1, 2)}]), "returns no loss"),
    ],
)
def test_what_it_refuses(make, says):
    with pytest.raises(AlassoError, match=says):
        make()


def test_a_value_that_is_not_a_number_is_told():
    model = Values()
    gauge = Gauge(model, lambda m, _: m.weight, report=None)
    gauge.add("first", [0])
    model.weight.data.fill_(math.nan)
    assert math.isnan(gauge.read()["loss/first"])
