"""The hook path equals the two-backward reference: every method, every optimizer, every style of loop."""

import copy

import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, MAS, SI, OnlineEWC

from reference import Reference, per_sample_output_norm, per_sample_squares

ALASSO_DEFAULTS = {
    "a": 1.8, "c": 1.0, "a_prime": 1.0, "c_prime": 1.0, "epsilon": 1e-6, "epsilon_prime": 0.0,
    "xi": 0.1, "monotone": True,
}  # fmt: skip

METHODS = {
    "alasso": (ALASSO, {**ALASSO_DEFAULTS, "c": 3.0}),
    "alasso-decoupled": (
        ALASSO,
        {
            **ALASSO_DEFAULTS,
            "a": 3.0,
            "a_prime": 2.0,
            "c_prime": 0.7,
            "epsilon": 0.01,
            "epsilon_prime": 0.02,
            "xi": 0.01,
        },
    ),
    "alasso-not-monotone": (ALASSO, {**ALASSO_DEFAULTS, "monotone": False, "xi": 1e-3}),
    "alasso-asymmetric-only": (ALASSO, {**ALASSO_DEFAULTS, "omega_rule": "si"}),
    "alasso-authors": (ALASSO, {**ALASSO_DEFAULTS, "unmoved": "moved_right"}),
    "alasso-sign": (ALASSO, {**ALASSO_DEFAULTS, "unmoved": "sign_of_omega"}),
    "si": (SI, {"c": 2.0, "xi": 0.01}),
    "ewc": (EWC, {"lam": 20.0}),
    "online-ewc": (OnlineEWC, {"lam": 20.0, "gamma": 0.8}),
    "mas": (MAS, {"lam": 3.0}),
}

OPTIMIZERS = {
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1),
    "adam-foreach": lambda ps: torch.optim.Adam(ps, lr=0.02, foreach=True),
    "adam-fused": lambda ps: torch.optim.Adam(ps, lr=0.02, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}

STYLES = ("plain", "closure", "accumulation", "clipping")


def small_net():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def tasks(count=3, batches=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        turn = torch.randn(5, 5, generator=generator, dtype=torch.float64)
        task = []
        for _ in range(batches):
            x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
            task.append((x, (x @ turn)[:, :3].argmax(1)))
        yield task


def train(model, optimizer, task, style, step):
    """One pass over the task; ``step(closure)`` makes the optimizer's step in whichever way is under test."""
    loss = nn.CrossEntropyLoss()

    def backward(x, y):
        value = loss(model(x), y)
        value.backward()
        return value

    def closure_for(x, y):
        def closure():
            optimizer.zero_grad()
            return backward(x, y)

        return closure

    for i, (x, y) in enumerate(task):
        if style == "closure":
            step(closure_for(x, y))
            continue
        backward(x, y)
        if style == "accumulation" and i % 2 == 0:
            continue
        if style == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        step(None)
        optimizer.zero_grad()


def importance_of(kind, model, task):
    if kind is MAS:
        return per_sample_output_norm(model, task)
    return per_sample_squares(model, task) if kind in (EWC, OnlineEWC) else None


def side_by_side(method_name, make_optimizer, style):
    """A network under the library and its twin under the reference, and what trains both on a task."""
    kind, settings = METHODS[method_name]
    ours = small_net()
    theirs = copy.deepcopy(ours)
    our_optimizer, their_optimizer = (make_optimizer(network.parameters()) for network in (ours, theirs))
    reg = kind(ours, **settings).attach(our_optimizer)
    reference = Reference(theirs, kind.method, **settings)

    def train_both(task):
        train(ours, our_optimizer, task, style, lambda closure: our_optimizer.step(closure))
        train(theirs, their_optimizer, task, style, lambda closure: reference.step(their_optimizer, closure))

    return ours, theirs, reg, reference, train_both


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("method_name", METHODS)
def test_hooks_equal_the_two_backward_reference(method_name, optimizer_name, style):
    kind, _ = METHODS[method_name]
    ours, theirs, reg, reference, train_both = side_by_side(method_name, OPTIMIZERS[optimizer_name], style)
    for task in tasks():
        train_both(task)
        torch.testing.assert_close(reg.penalty(), reference.penalty(), rtol=1e-9, atol=1e-12)
        importance = importance_of(kind, theirs, task)
        reg.consolidate(task) if importance is not None else reg.consolidate()
        reference.consolidate(importance)
        torch.testing.assert_close(reg.penalty(), reference.penalty(), rtol=1e-9, atol=1e-12)

    moved = 0.0
    for p, q, omega in zip(ours.parameters(), theirs.parameters(), reference.memories[-1]["Omega"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
        moved += float(omega.sum())
    for ours_omega, theirs_omega in zip(reg.importance().values(), reference.memories[-1]["Omega"], strict=True):
        torch.testing.assert_close(ours_omega, theirs_omega, rtol=1e-8, atol=1e-12)
    assert moved > 0, "a test in which nothing is protected proves nothing"


def test_the_penalty_changes_what_is_learned():
    """Guards the grid above: with and without the regularizer the weights must differ."""
    plain, protected = small_net(), None
    protected = copy.deepcopy(plain)
    for model, kind in ((plain, None), (protected, ALASSO)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        reg = kind(model).attach(optimizer) if kind else None
        for task in tasks():
            train(model, optimizer, task, "plain", lambda closure, o=optimizer: o.step())
            if reg:
                reg.consolidate()
    assert not torch.allclose(plain[0].weight, protected[0].weight)
