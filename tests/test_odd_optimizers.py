"""Optimizers and hooks that do more with weights and gradients than one step needs: ω is still the task's own.

The reference is the definition: ω = −Σ (gradient of the task's loss) · (the move that was made), step by step.
"""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import alasso
from alasso import ALASSO, EWC, SI

from helpers import mlp


def batches(count=6):
    torch.manual_seed(1)
    return [(torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 4, (8,))) for _ in range(count)]


def network():
    torch.manual_seed(0)
    return mlp(6, 12, 4).double()


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def backward(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def path_by_definition(model, step, tasks_batches):
    """ω of one task: gradients just before ``step(batch)`` is called, times the moves that it makes."""
    path = [torch.zeros_like(p) for p in model.parameters()]
    for batch in tasks_batches:
        grads = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        before = [p.detach().clone() for p in model.parameters()]
        step(batch)
        for own, g, p, old in zip(path, grads, model.parameters(), before, strict=True):
            own -= g * (p.detach() - old)
    return path


def plain_steps(model, optimizer):
    def step(batch):
        backward(model, optimizer, batch)
        optimizer.step()

    return step


def check_path(model, optimizer, reg, tasks_before):
    """Some tasks, then one whose path is compared."""
    step = plain_steps(model, optimizer)
    for _ in range(tasks_before):
        path_by_definition(model, step, batches())
        reg.consolidate()
    expected = path_by_definition(model, step, batches())
    torch.testing.assert_close(paths(reg), expected)


def paths(reg):
    return [state["path"] for state in reg.state_dict()["parameters"].values()]


@pytest.mark.parametrize("tasks_before", [0, 1])
@pytest.mark.parametrize("foreach", [False, True])
def test_nesterov_with_foreach_changes_gradients_in_place(foreach, tasks_before):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=foreach)
    reg = SI(model).attach(optimizer)
    check_path(model, optimizer, reg, tasks_before)


@pytest.mark.parametrize("tasks_before", [0, 1])
def test_a_hook_that_clips_after_attach_leaves_the_path_alone_in_every_task(tasks_before):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = SI(model).attach(optimizer)
    optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(model.parameters(), 0.05) and None)
    check_path(model, optimizer, reg, tasks_before)


class PutsOtherMemory(torch.optim.Optimizer):
    """``p.data = …`` in place of a change in place."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class ZeroesGradients(torch.optim.SGD):
    """``zero_grad(set_to_none=False)`` at the end of its own step."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.zero_()


def test_weights_that_get_other_memory_are_seen_to_move():
    ended = []
    for kind in (torch.optim.SGD, PutsOtherMemory):
        model = network()
        optimizer = kind(model.parameters(), lr=0.1)
        reg = SI(model).attach(optimizer)
        for batch in batches():
            backward(model, optimizer, batch)
            optimizer.step()
        ended.append(paths(reg))
        assert reg.steps == len(list(batches()))
    torch.testing.assert_close(*ended)


def test_gradients_that_a_step_zeroes_stay_zero():
    ended = []
    for protect in (False, True):
        model = network()
        optimizer = ZeroesGradients(model.parameters(), lr=0.1)
        if protect:
            SI(model).attach(optimizer)
        for batch in batches():
            loss_of(model, batch).backward()  # nobody else zeroes them
            optimizer.step()
        ended.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*ended, rtol=0, atol=0)


class SharpnessAware(torch.optim.SGD):
    """Goes uphill first, takes the gradient there by its closure, comes back, and descends by it."""

    @torch.no_grad()
    def step(self, closure):
        held = [p for group in self.param_groups for p in group["params"]]
        old = [p.detach().clone() for p in held]
        for p in held:
            p.add_(0.05 * p.grad.sign())
        with torch.enable_grad():
            loss = closure()
        for p, weights in zip(held, old, strict=True):
            p.copy_(weights)
            p.sub_(0.1 * p.grad)
        return loss


def test_weights_that_move_before_the_closure_count_from_where_they_were():
    model = network()
    optimizer = SharpnessAware(model.parameters(), lr=0.1)
    reg = SI(model).attach(optimizer)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for batch in batches():
        backward(model, optimizer, batch)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step(lambda batch=batch: backward(model, optimizer, batch))
        for own, p, old in zip(expected, model.parameters(), before, strict=True):
            own -= p.grad * (p.detach() - old)  # the gradient that the closure left, and the move of the whole step
    torch.testing.assert_close(paths(reg), expected)


class Lookahead(torch.optim.Optimizer):
    """Every second step, the weights go half of the way back to where they were two steps ago."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


def test_a_wrapper_that_moves_weights_itself_is_observed_itself():
    model = network()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    reg = SI(model).attach(optimizer)
    check_path(model, optimizer, reg, tasks_before=0)


class TakesAScale(torch.optim.SGD):
    def step(self, lr_scale=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * lr_scale * p.grad)


def test_an_argument_that_is_no_closure_is_left_alone():
    model = network()
    optimizer = TakesAScale(model.parameters(), lr=0.1)
    reg = SI(model).attach(optimizer)

    def step(batch):
        backward(model, optimizer, batch)
        optimizer.step(0.5)

    expected = path_by_definition(model, step, batches())
    torch.testing.assert_close(paths(reg), expected)


def test_moments_that_are_given_other_memory_are_taken_up_in_one_pass():
    ended = []
    for make in (torch.optim.Adam, alasso.optim.Adam):
        model = network()
        optimizer = make(model.parameters(), lr=0.01)
        for place, batch in enumerate(batches()):
            backward(model, optimizer, batch)
            optimizer.step()
            if place == 2:
                for own in optimizer.state.values():
                    own["exp_avg"].data = torch.zeros_like(own["exp_avg"])
        ended.append([p.detach().clone() for p in model.parameters()])
        assert all(own["exp_avg"].any() for own in optimizer.state.values())
    torch.testing.assert_close(*ended)


def test_a_step_that_raised_keeps_nothing_of_its_caller_alive():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = SI(model).attach(optimizer)

    def fails():
        batch = torch.zeros(3)
        reference = weakref.ref(batch)

        def closure():
            raise MemoryError

        with pytest.raises(MemoryError):
            optimizer.step(closure)
        return reference

    reference = fails()
    gc.collect()
    assert reference() is None
    assert reg.steps == 0


def test_the_penalty_knows_a_head_that_grew_since():
    model = network()
    reg = EWC(model)
    reg.consolidate(batches())
    old = model[2]
    model[2] = nn.Linear(12, 6).double()
    with torch.no_grad():
        model[2].weight[:4] = old.weight
        model[2].bias[:4] = old.bias
    assert reg.penalty().item() == 0
    with torch.no_grad():
        model[2].weight[:4] += 1
    assert reg.penalty().item() > 0


def test_a_parameter_that_comes_to_lie_where_another_was_has_no_past_of_its():
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "a": nn.Linear(8, 4)}).double()
    optimizer = torch.optim.SGD(model["body"].parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(model["a"].parameters())})
    reg = SI(model).attach(optimizer)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model["a"](model["body"](x)), y).backward()
        optimizer.step()
    reg.consolidate()
    for trial in range(8):
        name = f"b{trial}"
        optimizer.param_groups.pop()
        del model[next(key for key in model if key != "body")]
        optimizer.state.clear()
        gc.collect()
        model[name] = nn.Linear(8, 4).double()
        optimizer.add_param_group({"params": list(model[name].parameters())})
        for x, y in batches(1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model[name](model["body"](x)), y).backward()
            optimizer.step()
        assert reg.protected.name_of(model[name].weight) == f"{name}.weight"


def test_a_state_without_a_layer_that_is_gone_can_be_loaded():
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "a": nn.Linear(8, 4)})
    reg = ALASSO(model)
    del model["a"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer)
    model["body"](torch.ones(1, 6)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(reg.state_dict())
    reg.steps = 0
    reg.load_state_dict(saved)
    assert reg.steps == 1 and set(saved["parameters"]) == {"body.weight", "body.bias"}


@pytest.mark.parametrize("xi", [0.0, 0.001, 0.1])
@pytest.mark.parametrize("monotone", [False, True])
def test_weights_that_stand_still_for_a_task_keep_their_importance(monotone, xi):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model, monotone=monotone, xi=xi).attach(optimizer)
    for batch in batches():
        backward(model, optimizer, batch)
        optimizer.step()
    reg.consolidate()
    before = reg.importance()["2.weight"]
    assert before.any()
    for batch in batches():
        backward(model, optimizer, batch)
        model[2].weight.grad = None  # a head that this task does not use
        optimizer.step()
    reg.consolidate()
    torch.testing.assert_close(reg.importance()["2.weight"], before, rtol=0, atol=0)


def test_numbers_of_numpy_are_numbers():
    reg = ALASSO(network(), c=np.float32(0.5), a=np.int64(2))
    assert (reg.c, reg.a) == (0.5, 2)
