"""What ties ALASSO, SI and the loss they approximate together, in whole training runs."""

import copy

import pytest
import torch
from torch import nn

from alasso import ALASSO, SI

from helpers import mlp, run, same, toy_tasks, weights


def trained(make, model, tasks):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = make(model).attach(optimizer)
    for task in tasks:
        run(model, optimizer, task)
        reg.consolidate()
    return reg


def test_after_the_first_task_both_have_the_same_importance():
    model = mlp(6, 20, 4)
    task = toy_tasks(1)
    alasso = trained(lambda m: ALASSO(m, xi=0.03), copy.deepcopy(model), task)
    si = trained(lambda m: SI(m, xi=0.03), model, task)
    for name, omega in si.importance().items():
        assert torch.equal(omega, alasso.importance()[name])
        assert omega.min() >= 0 and omega.max() > 0


def test_with_a_1_epsilon_0_and_si_omega_the_training_is_that_of_si_bit_for_bit():
    model = mlp(6, 20, 4)
    tasks = toy_tasks(4)
    other = copy.deepcopy(model)
    trained(lambda m: ALASSO.asymmetric_only(m, a=1.0, epsilon=0.0, c=0.5, xi=0.01), model, tasks)
    trained(lambda m: SI(m, c=0.5, xi=0.01), other, tasks)
    assert same(weights(model), weights(other))


def test_alasso_differs_from_si_once_there_is_a_past():
    model = mlp(6, 20, 4)
    other = copy.deepcopy(model)
    trained(lambda m: ALASSO(m, c=0.5, xi=0.01), model, toy_tasks(3))
    trained(lambda m: SI(m, c=0.5, xi=0.01), other, toy_tasks(3))
    assert not same(weights(model), weights(other))


def test_path_integral_sums_to_the_drop_of_the_task_loss():
    """Small steps of plain gradient descent on the whole task: Σω is the loss lost, within 1 %, with a past too."""
    model = mlp(6, 20, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    reg = ALASSO(model, c=0.5, xi=0.01).attach(optimizer)
    for task in toy_tasks(2, dtype=torch.float64):
        x, y = torch.cat([b[0] for b in task]), torch.cat([b[1] for b in task])

        def loss(x=x, y=y):
            return nn.functional.cross_entropy(model(x), y)

        before = loss().item()
        for _ in range(400):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        drop = before - loss().item()
        path = sum(float(state["path"].sum()) for state in reg.state_dict()["parameters"].values())
        assert drop > 0.1
        assert path == pytest.approx(drop, rel=0.01)
        reg.consolidate()


def test_presets_are_what_their_names_say():
    model = mlp(2, 2)
    authors = ALASSO.as_the_authors_ran_it(model).surrogate
    assert (authors.a, authors.c, authors.a_prime, authors.c_prime) == (1.8, 1.0, 1.0, 1.0)
    assert (authors.epsilon, authors.epsilon_prime, authors.xi, authors.monotone) == (1e-6, 0.0, 0.1, True)
    assert authors.unmoved == "moved_right"
    paper = ALASSO.as_the_paper_states_it(model, a=3.0).surrogate
    assert (paper.a, paper.xi, paper.monotone, paper.unmoved) == (3.0, 0.0, False, "unobserved")
    assert ALASSO.asymmetric_only(model).surrogate.omega_rule == "si"
    accurate = ALASSO.accurate_only(model).surrogate
    assert (accurate.a, accurate.epsilon, accurate.omega_rule) == (1.0, 0.0, "accurate")


def test_the_paper_as_stated_trains_and_stays_finite():
    model = mlp(6, 20, 4)
    reg = trained(ALASSO.as_the_paper_states_it, model, toy_tasks(3))
    assert all(torch.isfinite(omega).all() and omega.min() >= 0 for omega in reg.importance().values())


def test_importance_never_falls_when_monotone():
    model = mlp(6, 20, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    reg = ALASSO(model).attach(optimizer)
    before = reg.importance()
    for task in toy_tasks(4):
        run(model, optimizer, task)
        reg.consolidate()
        after = reg.importance()
        assert all((after[name] >= before[name]).all() for name in after)
        before = after
