"""A network under the library and its twin under the reference, trained side by side."""

import copy

import torch
from torch import nn

from alasso import ALASSO, EWC, MAS, SI, OnlineEWC

from reference import Reference, per_sample_output_norm, per_sample_squares

ALASSO_DEFAULTS = {
    "a": 1.8, "c": 1.0, "a_prime": 1.0, "c_prime": 1.0, "epsilon": 1e-6, "epsilon_prime": 0.0,
    "xi": 0.1, "monotone": True, "unmoved": "moved_right",
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
    "alasso-not-monotone": (ALASSO, {**ALASSO_DEFAULTS, "monotone": False, "xi": 0.03}),
    "alasso-asymmetric-only": (ALASSO, {**ALASSO_DEFAULTS, "omega_rule": "si"}),
    "alasso-unobserved": (ALASSO, {**ALASSO_DEFAULTS, "unmoved": "unobserved"}),
    "alasso-sign": (ALASSO, {**ALASSO_DEFAULTS, "unmoved": "sign_of_omega"}),
    "alasso-auto": (ALASSO, {**ALASSO_DEFAULTS, "c": 0.01, "xi": "auto"}),
    "si": (SI, {"c": 2.0, "xi": 0.01}),
    "si-auto": (SI, {"c": 0.01, "xi": "auto"}),
    "ewc": (EWC, {"lam": 20.0}),
    "online-ewc": (OnlineEWC, {"lam": 20.0, "gamma": 0.8}),
    "mas": (MAS, {"lam": 3.0}),
}


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


def side_by_side(method_name, make_optimizer, style, make_theirs=None):
    """The two networks, regularizer and reference, and what trains both on a task.

    ``make_theirs``: makes the reference's optimizer, where it is to be another.
    """
    kind, settings = METHODS[method_name]
    ours = small_net()
    theirs = copy.deepcopy(ours)
    our_optimizer, their_optimizer = (
        make_optimizer(ours.parameters()),
        (make_theirs or make_optimizer)(theirs.parameters()),
    )
    reg = kind(ours, **settings).attach(our_optimizer)
    reference = Reference(theirs, kind.method, **settings)

    def train_both(task):
        train(ours, our_optimizer, task, style, lambda closure: our_optimizer.step(closure))
        train(theirs, their_optimizer, task, style, lambda closure: reference.step(their_optimizer, closure))

    return ours, theirs, reg, reference, train_both
