"""The hook path equals the two-backward reference: every method, every optimizer, every style of loop."""

import copy

import pytest
import torch

from alasso import ALASSO

from side_by_side import METHODS, importance_of, side_by_side, small_net, tasks, train

OPTIMIZERS = {
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.1),
    "adam-foreach": lambda ps: torch.optim.Adam(ps, lr=0.02, foreach=True),
    "adam-fused": lambda ps: torch.optim.Adam(ps, lr=0.02, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
}

STYLES = ("plain", "closure", "accumulation", "clipping")


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
