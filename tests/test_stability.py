"""SGD under springs that are too stiff for it: bounded, followed through schedules, and told once."""

import copy

import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, MAS, SI
from alasso._stability import SHARE

from helpers import mlp, run, same, toy_tasks, weights

KINDS = [lambda m: ALASSO(m, c=1e4), lambda m: SI(m, c=1e4), lambda m: EWC(m, lam=1e6), lambda m: MAS(m, lam=1e4)]
SGDS = [{"lr": 0.5}, {"lr": 0.2, "momentum": 0.9}, {"lr": 0.05, "momentum": 0.9, "nesterov": True}]


def after_one_task(make, kind=torch.optim.SGD, **settings):
    first, second = toy_tasks(2, dtype=torch.float64)
    torch.manual_seed(0)
    model = mlp(6, 8, 4, dtype=torch.float64)
    optimizer = kind(model.parameters(), **settings)
    reg = make(model).attach(optimizer)
    run(model, optimizer, first)
    reg.consolidate(first)
    return model, optimizer, reg, second


def slow_steps(model, reg, optimizer, batches, lrs):
    """What the steps should give, from the springs themselves and a plain optimizer."""
    model, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.load_state_dict(state)
    group = plain.param_groups[0]
    beta = group["momentum"]
    for (x, y), lr in zip(batches, lrs, strict=True):
        group["lr"] = lr
        most = SHARE * 2 * (1 + beta) / lr / (1 + 2 * beta if group["nesterov"] else 1)
        plain.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            s = reg.protected.states[name]
            d = p.detach() - s.anchor
            k_minus, k_plus = reg.surrogate.stiffness(s)
            k = torch.where(d < 0, k_minus, k_plus)
            p.grad += 2 * torch.minimum(k, torch.full_like(k, most / 2)) * d
        plain.step()
    return weights(model)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("settings", SGDS)
@pytest.mark.parametrize("make", KINDS)
def test_springs_are_bounded_as_the_learning_rate_moves(make, settings, compile):
    model, optimizer, reg, task = after_one_task(make, **settings)
    reg.attach(optimizer, compile=compile)
    lrs = [settings["lr"] * factor for factor in (1.0, 0.3, 1e-6, 2.0)]
    expected = slow_steps(model, reg, optimizer, task[:4], lrs)
    for batch, lr in zip(task, lrs, strict=False):
        optimizer.param_groups[0]["lr"] = lr
        run(model, optimizer, [batch])
    for ours, slow in zip(weights(model), expected, strict=True):
        torch.testing.assert_close(ours, slow, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", SGDS)
@pytest.mark.parametrize("make", KINDS)
def test_too_stiff_springs_do_not_diverge(make, settings):
    model, optimizer, _, task = after_one_task(make, **settings)
    before = max(float(w.abs().max()) for w in weights(model))
    run(model, optimizer, 40 * task)
    assert max(float(w.abs().max()) for w in weights(model)) < 10 * max(before, 1.0)


def test_a_scaled_or_tensor_learning_rate_is_bounded_likewise():
    results = []
    for lr in (0.5, torch.tensor(0.5, dtype=torch.float64)):
        model, optimizer, _, task = after_one_task(KINDS[0], lr=lr)
        run(model, optimizer, task)
        results.append(weights(model))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_it_is_said_once_and_only_of_sgd(caplog):
    model, optimizer, _, task = after_one_task(KINDS[0], lr=0.5)
    run(model, optimizer, 3 * task)
    assert [one for one in caplog.messages if "SGD would not be stable" in one] == caplog.messages[-1:] != []
    caplog.clear()
    model, optimizer, _, task = after_one_task(KINDS[0], torch.optim.Adam, lr=0.5)
    run(model, optimizer, task)
    assert not caplog.messages


def test_where_the_limit_is_not_met_nothing_changes(monkeypatch):
    results = []
    for share in (SHARE, 1e9):
        monkeypatch.setattr("alasso._stability.SHARE", share)
        model, optimizer, _, task = after_one_task(lambda m: ALASSO(m, c=0.1, xi=0.1), lr=0.1)
        run(model, optimizer, task)
        results.append(weights(model))
    assert same(*results)
