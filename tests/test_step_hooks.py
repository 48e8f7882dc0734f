"""Attaching: everything a real training loop does around optimizer.step()."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, MAS, SI, AlassoError
from alasso._step_hooks import StepHooks

from helpers import mlp, run, same, step, toy_tasks, weights

TASKS = toy_tasks(3)


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=5e-3, **options)


def state(reg, name):
    return reg.state_dict()["parameters"][name]


# -- leaving no trace ----------------------------------------------------------------------------------------


def test_detached_training_is_bitwise_that_without_the_library():
    plain = mlp(6, 12, 4)
    visited = copy.deepcopy(plain)
    plain_optimizer, optimizer = adam(plain), adam(visited)
    reg = ALASSO(visited).attach(optimizer)
    reg.detach()
    run(plain, plain_optimizer, TASKS[0])
    run(visited, optimizer, TASKS[0])
    assert same(weights(plain), weights(visited))
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_first_task_is_bitwise_plain_training_even_attached():
    plain = mlp(6, 12, 4)
    visited = copy.deepcopy(plain)
    ALASSO(visited).attach(optimizer := adam(visited))
    run(plain, adam(plain), TASKS[0])
    run(visited, optimizer, TASKS[0])
    assert same(weights(plain), weights(visited))


def test_gradients_after_a_step_are_the_tasks_own():
    model = mlp(6, 12, 4)
    optimizer = adam(model)
    reg = ALASSO(model, c=10.0).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    run(model, optimizer, TASKS[1][:-1])
    x, y = TASKS[1][-1]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: g.clone() for name, g in before.items()}
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad is before[name] and torch.equal(p.grad, kept[name])


def test_gradients_are_given_back_after_a_step_that_raised():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory, say")

    model = mlp(6, 4)
    good, bad = adam(model), Broken(model.parameters(), lr=0.1)
    reg = ALASSO(model).attach(good)
    run(model, good, TASKS[0])
    reg.consolidate()
    reg.attach(bad)
    nn.functional.cross_entropy(model(TASKS[1][0][0]), TASKS[1][0][1]).backward()
    run(model, good, TASKS[1])  # away from the anchor, where there is a penalty
    nn.functional.cross_entropy(model(TASKS[1][0][0]), TASKS[1][0][1]).backward()
    grad, value = model[0].weight.grad, model[0].weight.grad.clone()
    with pytest.raises(RuntimeError, match="say"):
        bad.step()
    assert not torch.equal(model[0].weight.grad, value)
    reg.detach()
    assert model[0].weight.grad is grad and torch.equal(grad, value)


def test_context_manager_detaches_and_cycles_work():
    model = mlp(6, 12, 4)
    optimizer = adam(model)
    reg = ALASSO(model)
    for task in TASKS:
        with reg.attach(optimizer) as entered:
            assert entered is reg
            run(model, optimizer, task)
        assert not optimizer._optimizer_step_pre_hooks
        reg.consolidate()
    assert reg.tasks == 3


def test_attaching_twice_adds_the_penalty_once():
    once = mlp(6, 12, 4)
    twice = copy.deepcopy(once)
    results = []
    for model, times in ((once, 1), (twice, 2)):
        optimizer = adam(model)
        reg = ALASSO(model)
        for _ in range(times):
            reg.attach(optimizer)
        for task in TASKS:
            run(model, optimizer, task)
            reg.consolidate()
        results.append(weights(model))
    assert same(*results)


# -- optimizers and parameters -------------------------------------------------------------------------------


def test_lbfgs_is_refused_with_a_reason():
    model = mlp(6, 4)
    with pytest.raises(AlassoError, match="LBFGS evaluates the loss several times"):
        ALASSO(model).attach(torch.optim.LBFGS(model.parameters()))


def train(model, optimizer, task, with_closure):
    for batch in task:
        if with_closure:
            optimizer.step(closure_for(model, optimizer, batch))
        else:
            step(model, optimizer, batch)


def closure_for(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def test_an_optimizer_that_calls_its_closure_twice_is_refused():
    class Twice(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            closure()
            return closure()

    model = mlp(6, 4)
    optimizer = Twice(model.parameters())
    ALASSO(model).attach(optimizer)
    with pytest.raises(AlassoError, match="twice in one step"):
        optimizer.step(closure_for(model, optimizer, TASKS[0][0]))


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_subclass_that_calls_its_parents_step_is_observed_once(with_closure):
    """torch runs the hooks for both step() methods."""

    class Child(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    plain = mlp(6, 12, 4)
    child = copy.deepcopy(plain)
    regs = []
    for model, kind in ((plain, torch.optim.SGD), (child, Child)):
        optimizer = kind(model.parameters(), lr=0.1)
        reg = ALASSO(model, c=0.05, xi=1e-3).attach(optimizer)
        for task in TASKS:
            train(model, optimizer, task, with_closure)
            assert reg.steps == len(task)
            reg.consolidate()
        regs.append(reg)
    assert same(weights(plain), weights(child))
    assert same(regs[0].importance().values(), regs[1].importance().values())


def test_a_second_regularizer_in_the_place_of_the_first_is_noticed():
    model = mlp(6, 4)
    optimizer = adam(model)
    ALASSO(model).attach(optimizer)  # as when a cell of a notebook is run twice
    with pytest.warns(UserWarning, match=r"another regularizer of this model \(ALASSO\) .* detach\(\) the old one"):
        ALASSO(model).attach(optimizer)


def test_foreign_optimizer_and_non_optimizer_are_refused():
    model = mlp(6, 4)
    with pytest.raises(AlassoError, match="none of the model's protected parameters"):
        ALASSO(model).attach(adam(mlp(6, 4)))
    with pytest.raises(AlassoError, match="needs a torch optimizer, not str"):
        ALASSO(model).attach("adam")

    class NoInit(torch.optim.Optimizer):
        def __init__(self):
            self.param_groups = [{"params": list(model.parameters())}]

    with pytest.raises(AlassoError, match="never called Optimizer"):
        ALASSO(model).attach(NoInit())


def test_wrapped_optimizer_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    plain = mlp(6, 12, 4)
    wrapped = copy.deepcopy(plain)
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped, wrapped_optimizer = accelerator.prepare(wrapped, adam(wrapped))
    pairs = ((plain, adam(plain)), (wrapped, wrapped_optimizer))
    for model, optimizer in pairs:
        reg = ALASSO(model).attach(optimizer)
        for task in TASKS:
            run(model, optimizer, task)
            reg.consolidate()
    assert same(weights(plain), weights(wrapped))


def test_several_parameter_groups_and_two_optimizers():
    one = mlp(6, 12, 4)
    two = copy.deepcopy(one)
    reg = ALASSO(one)
    grouped = torch.optim.SGD([{"params": one[0].parameters(), "lr": 0.1}, {"params": one[2].parameters()}], lr=0.05)
    reg.attach(grouped)
    first = torch.optim.SGD(two[0].parameters(), lr=0.1)
    second = torch.optim.SGD(two[2].parameters(), lr=0.05)
    other = ALASSO(two).attach(first).attach(second)
    for task in TASKS:
        run(one, grouped, task)
        reg.consolidate()
        for x, y in task:
            two.zero_grad()
            nn.functional.cross_entropy(two(x), y).backward()
            first.step()
            second.step()
        other.consolidate()
    assert same(weights(one), weights(two))


def test_maximize_is_minimizing_the_negative():
    down = mlp(6, 12, 4, dtype=torch.float64)
    up = copy.deepcopy(down)
    regs = []
    for model, sign in ((down, 1.0), (up, -1.0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=sign < 0)
        reg = ALASSO(model, c=0.05, xi=1e-3).attach(optimizer)
        for task in toy_tasks(3, dtype=torch.float64):
            for x, y in task:
                optimizer.zero_grad()
                (sign * nn.functional.cross_entropy(model(x), y)).backward()
                optimizer.step()
            reg.consolidate()
        regs.append(reg)
    torch.testing.assert_close(weights(down), weights(up), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(regs[0].importance(), regs[1].importance(), rtol=1e-8, atol=1e-14)


def test_frozen_parameters_cost_nothing_and_may_thaw():
    model = mlp(6, 12, 4)
    model[0].requires_grad_(False)
    optimizer = adam(model)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    assert set(reg.importance()) == {"2.weight", "2.bias"}
    model[0].requires_grad_(True)
    start = model[0].weight.detach().clone()
    step(model, optimizer, TASKS[1][0])
    assert torch.equal(state(reg, "0.weight")["anchor"], start)
    assert state(reg, "0.weight")["path"].any()


def test_a_parameter_without_gradient_does_not_disturb_the_step():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.used, self.idle = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.used(self.body(x).relu())

    model = TwoHeads()
    optimizer = adam(model)
    reg = ALASSO(model).attach(optimizer)
    idle = model.idle.weight.detach().clone()
    for task in TASKS:
        run(model, optimizer, task)
        reg.consolidate()
    assert torch.equal(model.idle.weight, idle)
    assert not reg.importance()["idle.weight"].any() and reg.importance()["used.weight"].any()


def test_tied_weights_are_protected_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model, c=5.0).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    assert set(reg.importance()) == {"first.weight", "first.bias", "second.bias"}
    assert set(ALASSO(model, exclude="second.*").importance()) == {"first.bias"}  # the weight is one of them
    assert set(ALASSO(model, exclude="second.weight").importance()) == {"first.bias", "second.bias"}
    run(model, optimizer, TASKS[1])
    by_hand = sum(
        float(reg.surrogate.penalty(p.detach(), reg.protected.state_of(name, p)))
        for name, p in model.named_parameters()
    )
    assert float(reg.penalty()) == pytest.approx(by_hand)


def test_excluded_by_pattern():
    model = mlp(6, 12, 4)
    reg = ALASSO(model, exclude=["2.*"])
    assert set(reg.importance()) == {"0.weight", "0.bias"}
    optimizer = adam(model)
    reg.attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    assert set(ALASSO(model, exclude="*.bias").anchor()) == {"0.weight", "2.weight"}
    with pytest.raises(AlassoError, match="matches no parameter; the model has"):
        ALASSO(model, exclude=["head.*"])


def test_sparse_gradients_are_refused_by_name():
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ALASSO(model).attach(optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(AlassoError, match="weight has a sparse gradient"):
        optimizer.step()


def test_a_head_that_grows_keeps_its_memory_and_new_rows_start_free():
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model, c=2.0, epsilon=0.5).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    old = {field: t.clone() for field, t in state(reg, "2.weight").items()}

    wider = nn.Linear(12, 6)
    with torch.no_grad():
        wider.weight[:4], wider.bias[:4] = model[2].weight, model[2].bias
    model[2] = wider
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer)
    grown = state(reg, "2.weight")
    for field, tensor in old.items():
        assert not tensor.dim() or torch.equal(grown[field][:4], tensor), field
    assert torch.equal(grown["anchor"][4:], wider.weight[4:]) and not grown["omega"][4:].any()

    with torch.no_grad():
        wider.weight[4:] += 1.0
    assert float(reg.penalty()) == 0.0  # new rows are free, without even ε
    with torch.no_grad():
        wider.weight[:4] += 1.0
    assert float(reg.penalty()) > 0.0
    run(model, optimizer, TASKS[1])
    reg.consolidate()
    assert reg.importance()["2.weight"].shape == (6, 12)

    model[2] = nn.Linear(12, 3)
    with pytest.raises(AlassoError, match="may grow, not shrink"):
        reg.look()


def test_ewc_survives_a_growing_head():
    model = mlp(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = EWC(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate(TASKS[0])
    old, model[0] = model[0], nn.Linear(6, 5)
    with torch.no_grad():
        model[0].weight[:4], model[0].bias[:4] = old.weight, old.bias
    reg.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    reg.consolidate(TASKS[1])
    assert reg.importance()["0.weight"].shape == (5, 6) and torch.isfinite(reg.penalty())


def test_half_precision_parameters_keep_float32_state():
    model = mlp(6, 12, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model).attach(optimizer)
    for task in TASKS:
        run(model, optimizer, [(x.bfloat16(), y) for x, y in task])
        reg.consolidate()
    saved = state(reg, "0.weight")
    assert saved["anchor"].dtype == saved["omega"].dtype == saved["path"].dtype == torch.float32
    assert model[0].weight.dtype == torch.bfloat16 and saved["omega"].any()
    assert reg.penalty().dtype == torch.float32


def test_state_follows_a_model_that_changes_its_precision():
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    model.double()
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), [(x.double(), y) for x, y in TASKS[1]])
    assert reg.penalty().dtype == torch.float64
    assert reg.importance()["0.weight"].dtype == torch.float64


@pytest.mark.gpu
def test_state_follows_a_model_to_another_device():
    model = mlp(6, 12, 4)
    reg = ALASSO(model)
    model.cuda()
    optimizer = adam(model)
    reg.attach(optimizer)
    run(model, optimizer, [(x.cuda(), y.cuda()) for x, y in TASKS[0]])
    reg.consolidate()
    assert reg.importance()["0.weight"].is_cuda and reg.importance()["0.weight"].any()


def test_weights_loaded_between_construction_and_training_are_the_start_of_the_path():
    model = mlp(6, 12, 4)
    reg = ALASSO(model)
    with torch.no_grad():
        model[0].weight.add_(100.0)  # as loading a pretrained model would
    optimizer = adam(model)
    reg.attach(optimizer)
    start = model[0].weight.detach().clone()
    step(model, optimizer, TASKS[0][0])
    assert torch.equal(reg.anchor()["0.weight"], start)


def test_compiled_model_shares_names_with_the_plain_one():
    model = mlp(6, 4)
    compiled = torch.compile(model, backend="eager")
    assert set(ALASSO(compiled).anchor()) == set(ALASSO(model).anchor())


class HalvesGradients(torch.optim.SGD):
    """As optimizers do that clip or centre gradients themselves: in place."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.halve()
        super().step()
        return loss

    def halve(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)


class PutsHalvesInTheirPlace(HalvesGradients):
    def halve(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = 0.5 * p.grad


class HalvesInItsClosure(HalvesGradients):
    """Its parent's step() is given a closure of its own."""

    def step(self, closure=None):
        if closure is None:
            return super().step()

        def closure_then_halve():
            loss = closure()
            self.halve()
            return loss

        return torch.optim.SGD.step(self, closure_then_halve)


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("kind", [HalvesGradients, PutsHalvesInTheirPlace, HalvesInItsClosure])
def test_what_an_optimizer_does_to_gradients_within_its_step_counts_and_does_not_reach_the_path(kind, with_closure):
    """Half the gradient at twice the rate: all the same, the penalty's share included."""
    plain = mlp(6, 12, 4)
    halved = copy.deepcopy(plain)
    trained = []
    for model, optimizer in (
        (plain, torch.optim.SGD(plain.parameters(), lr=0.05)),
        (halved, kind(halved.parameters(), lr=0.1)),
    ):
        reg = ALASSO(model, c=0.05, xi=1e-3).attach(optimizer)
        paths = []
        for task in TASKS:
            train(model, optimizer, task, with_closure)
            assert reg.steps == len(task)
            paths += [tensors["path"] for tensors in reg.state_dict()["parameters"].values()]
            reg.consolidate()
        trained.append([*weights(model), *paths])
    for expected, found in zip(*trained, strict=True):
        torch.testing.assert_close(found, expected)


class LeavesOutLastBias(HalvesGradients):
    def halve(self):
        super().halve()
        self.param_groups[0]["params"][-1].grad = None


def test_an_optimizer_may_drop_a_gradient_within_its_step():
    plain = mlp(6, 12, 4)
    dropping = copy.deepcopy(plain)
    for model, optimizer in (
        (plain, torch.optim.SGD(list(plain.parameters())[:-1], lr=0.05)),
        (dropping, LeavesOutLastBias(dropping.parameters(), lr=0.1)),
    ):
        reg = ALASSO(model, c=0.05, xi=1e-3).attach(optimizer)
        for task in TASKS:
            for batch in task:
                model.zero_grad()
                step(model, optimizer, batch)
            assert reg.steps == len(task)
            reg.consolidate()
    torch.testing.assert_close(weights(dropping), weights(plain))


def test_after_a_subclass_step_that_was_interrupted_one_step_is_lost_and_it_is_said():
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from now on, torch runs hooks around its step(), too
    model = mlp(6, 12, 4)
    optimizer = HalvesGradients(model.parameters(), lr=0.01)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0][:2])
    optimizer.halve = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(model, optimizer, TASKS[0][2])
    del optimizer.halve
    step(model, optimizer, TASKS[0][3])
    with pytest.warns(UserWarning, match="a step was interrupted"):
        step(model, optimizer, TASKS[0][4])
    run(model, optimizer, TASKS[0][5:])
    assert reg.steps == len(TASKS[0]) - 2


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_after_a_step_that_was_interrupted_training_goes_on_as_if_it_had_not_been_begun(kind, set_to_none):
    """Adam, AdamW's parent, is in use, too, so that torch has put hooks around the step() of both."""
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    interrupt = [False]

    def interrupted(*_):
        if interrupt[0]:
            interrupt[0] = False
            raise KeyboardInterrupt

    torch.manual_seed(0)
    plain = mlp(6, 12, 4)
    disturbed = copy.deepcopy(plain)
    for model in (plain, disturbed):
        optimizer = kind(model.parameters(), lr=0.01)
        reg = ALASSO(model, c=0.05, xi=1e-3).attach(optimizer)
        optimizer.register_step_pre_hook(interrupted)
        run(model, optimizer, TASKS[0])
        reg.consolidate()
        for i, (x, y) in enumerate(TASKS[1]):
            if model is disturbed and i == 3:
                interrupt[0] = True
                with pytest.raises(KeyboardInterrupt):
                    step(model, optimizer, TASKS[2][0])
            optimizer.zero_grad(set_to_none=set_to_none)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert reg.steps == len(TASKS[1])
    assert same(weights(plain), weights(disturbed))


# -- mixed precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("attach", [False, True])
def test_a_fused_optimizer_leaves_gradients_unscaled_with_the_library_and_without(attach, infinite):
    torch.manual_seed(0)
    model = mlp(6, 12, 4)
    optimizer = adam(model, fused=True)
    if attach:
        ALASSO(model).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = TASKS[0][0]
    loss = nn.functional.cross_entropy(model(x), y)
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    scaler.scale(loss).backward()
    if infinite:  # one number is enough for the step to be skipped, and all others can be seen to stay scaled
        model[0].weight.grad[0, 0] = float("inf")
    scaled = [p.grad.clone() for p in model.parameters()]
    scaler.step(optimizer)
    for p, g in zip(model.parameters(), scaled if infinite else expected, strict=True):
        torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_gives_what_full_precision_gives(fused, unscale):
    """The scale is a power of two, so scaling is exact and the two runs must agree closely."""
    plain = mlp(6, 12, 4)
    scaled = copy.deepcopy(plain)
    plain_optimizer, optimizer = adam(plain, fused=fused), adam(scaled, fused=fused)
    plain_reg = ALASSO(plain, c=5.0).attach(plain_optimizer)
    reg = ALASSO(scaled, c=5.0).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for task in TASKS:
        run(plain, plain_optimizer, task)
        plain_reg.consolidate()
        for x, y in task:
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(scaled(x), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        reg.consolidate()
    for p, q in zip(weights(plain), weights(scaled), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    for name, omega in plain_reg.importance().items():
        torch.testing.assert_close(reg.importance()[name], omega, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_skipped_for_infinite_gradients_leaves_no_mark(fused, unscale):
    model = mlp(6, 12, 4)
    optimizer = adam(model, fused=fused)
    reg = ALASSO(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    run(model, optimizer, TASKS[1][:3])
    before, path = weights(model), {n: s["path"] for n, s in reg.state_dict()["parameters"].items()}

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(model(TASKS[1][3][0]).sum() * float("inf")).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert same(before, weights(model))
    for name, saved in reg.state_dict()["parameters"].items():
        assert torch.equal(saved["path"], path[name])
    run(model, optimizer, TASKS[1][4:])
    reg.consolidate()


@pytest.mark.parametrize("kind", [EWC, MAS])
def test_methods_without_a_path_keep_no_copy_of_the_weights(kind):
    model = mlp(6, 12, 4)
    optimizer = adam(model)
    reg = kind(model).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate(TASKS[0])
    run(model, optimizer, TASKS[1])
    assert float(reg.penalty()) > 0
    assert bytes_beside_the_state(optimizer, model) == 4 + 4  # the total gradient and one stiffness for both sides


def bytes_beside_the_state(optimizer, model):
    """Of the hooks' own tensors, for each weight."""
    hooks = StepHooks.of(optimizer)
    held = [t for _, *buffers in hooks.plans._buffers.values() for t in buffers if t is not None]
    for _, _, pieces in hooks.plans._works.values():
        held += [t for piece in pieces for spring in piece.springs for t in (spring.k_plus, spring.more_left)]
    count = sum(t.numel() * t.element_size() for t in held if t is not None)
    return count / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("heads", [1, 5])
def test_hooks_keep_16_bytes_a_weight_however_many_heads_take_turns(heads):
    model = nn.ModuleDict({"body": nn.Linear(6, 8), **{f"head{i}": nn.Linear(8, 4) for i in range(heads)}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reg = ALASSO(model).attach(optimizer)
    for _ in range(2):
        for x, y in TASKS[0]:
            for i in range(heads):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model[f"head{i}"](model["body"](x)), y).backward()
                optimizer.step()
        if reg.tasks == 0:
            reg.consolidate()
    assert len(StepHooks.of(optimizer).plans._plans) == heads
    assert bytes_beside_the_state(optimizer, model) == 16


def test_si_alone_in_a_loop_protects_the_first_task():
    """The point of it all, in small: after a second task the first is remembered better than without."""
    losses = {}
    for name in ("plain", "protected"):
        torch.manual_seed(0)
        model = mlp(6, 64, 4)
        optimizer = adam(model)
        reg = SI(model, c=1.0, xi=1e-3).attach(optimizer) if name == "protected" else None
        for task in TASKS[:2]:
            for _ in range(30):
                run(model, optimizer, task)
            if reg:
                reg.consolidate()
        losses[name] = sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in TASKS[0])
    assert losses["protected"] < 0.8 * losses["plain"]


def test_a_model_without_weights_to_protect_is_named():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(AlassoError, match="no weights to protect: all are frozen, excluded or not floating point"):
        ALASSO(model).attach(optimizer)


def test_an_optimizer_among_the_settings_is_told_where_to_go():
    model = mlp(6, 4)
    with pytest.raises(AlassoError, match=r"^a must be a number, not Adam; optimizers go to attach\(\)$"):
        ALASSO(model, torch.optim.Adam(model.parameters()))


@pytest.mark.parametrize("order", [["observer", "strong"], ["strong", "observer"]])
def test_of_two_regularizers_each_sees_the_gradient_of_the_task_alone(order):
    tasks = toy_tasks(2)
    torch.manual_seed(0)
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = {"strong": MAS(model, lam=20.0), "observer": SI(model, c=0.0)}
    made[order[0]].attach(optimizer)
    with pytest.warns(UserWarning, match="both will pull"):
        made[order[1]].attach(optimizer)
    run(model, optimizer, tasks[0])
    made["strong"].consolidate(tasks[0])
    made["observer"].consolidate()
    expected = torch.zeros(())
    for x, y in tasks[1]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        grads, before = [p.grad.clone() for p in model.parameters()], weights(model)
        optimizer.step()
        expected = expected - sum(
            (g * (p.detach() - b)).sum() for g, p, b in zip(grads, model.parameters(), before, strict=True)
        )
    path = sum(state["path"].sum() for state in made["observer"].state_dict()["parameters"].values())
    torch.testing.assert_close(path, expected, rtol=1e-4, atol=1e-7)
    assert made["strong"].penalty() > 0


def test_with_two_regularizers_gradients_after_a_step_are_the_tasks_own():
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path, strong = SI(model, c=1.0, xi=1e-3).attach(optimizer), MAS(model, lam=20.0)
    with pytest.warns(UserWarning, match="both will pull"):
        strong.attach(optimizer)
    run(model, optimizer, TASKS[0])
    path.consolidate()
    strong.consolidate(TASKS[0])
    run(model, optimizer, TASKS[1][:2])
    x, y = TASKS[1][2]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert same(before, [p.grad for p in model.parameters()])


# -- constants, and what users do beside the loop --------------------------------------------------------------


def after_two_tasks(kind, **settings):
    torch.manual_seed(0)
    model = mlp(6, 12, 4)
    optimizer = adam(model)
    reg = kind(model, **settings).attach(optimizer)
    run(model, optimizer, TASKS[0])
    reg.consolidate() if reg.surrogate.observes_path else reg.consolidate(TASKS[0])
    run(model, optimizer, TASKS[1])
    return model, optimizer, reg


@pytest.mark.parametrize(("kind", "name"), [(ALASSO, "c"), (SI, "c"), (EWC, "lam")])
def test_a_constant_is_an_attribute_that_can_be_changed_between_steps(kind, name):
    model, optimizer, reg = after_two_tasks(kind)
    value, before = getattr(reg, name), reg.penalty().item()
    setattr(reg, name, 3 * value)
    assert getattr(reg, name) == 3 * value == reg.settings()[name] and f"{name}={3 * value}" in repr(reg)
    assert reg.penalty().item() == pytest.approx(3 * before)
    other, other_optimizer, stiff = after_two_tasks(kind)
    stiff.load_state_dict({**reg.state_dict()})  # the settings in a state are the changed ones
    run(model, optimizer, TASKS[2])
    run(other, other_optimizer, TASKS[2])
    assert same(weights(model), weights(other))
    with pytest.raises(AlassoError, match=f"{name} must be"):
        setattr(reg, name, -1.0)
    assert getattr(reg, name) == 3 * value
    with pytest.raises(AttributeError, match="has no attribute 'strength'"):
        _ = reg.strength


@pytest.mark.parametrize(
    ("kind", "slip", "meant"), [(ALASSO, "Xi", "xi"), (ALASSO, "epsilon_prim", "epsilon_prime"), (MAS, "Lam", "lam")]
)
def test_a_misspelt_setting_is_noticed_and_any_other_attribute_may_be_set(kind, slip, meant):
    reg = kind(mlp(6, 4))
    with pytest.raises(AlassoError, match=f"{kind.__name__} has no setting '{slip}'; did you mean {meant}"):
        setattr(reg, slip, 0.01)
    reg.lr = 1
    reg.tag = "x"
    assert (reg.lr, reg.tag) == (1, "x")


@pytest.mark.parametrize("kind", [ALASSO, SI, EWC, MAS])
def test_a_task_may_end_within_inference_mode(kind):
    plain, optimizer, expected = after_two_tasks(kind)
    model, other_optimizer, reg = after_two_tasks(kind)
    end = () if reg.surrogate.observes_path else (TASKS[1],)
    expected.consolidate(*end)
    with torch.inference_mode():
        reg.consolidate(*end)
        reg.load_state_dict(copy.deepcopy(reg.state_dict()))
    run(plain, optimizer, TASKS[2])
    run(model, other_optimizer, TASKS[2])
    assert same(weights(plain), weights(model))


def test_a_penalty_in_the_loss_beside_an_attached_optimizer_is_warned_of():
    model, _, reg = after_two_tasks(ALASSO)
    with pytest.warns(UserWarning, match="the past counts twice"):
        (model(TASKS[1][0][0]).mean() + reg.penalty()).backward()
    float(reg.penalty())  # looked at only
    reg.detach()
    (model(TASKS[1][0][0]).mean() + reg.penalty()).backward()


def test_what_exclude_and_forget_take():
    model = mlp(6, 12, 4)
    assert len(ALASSO(model, exclude=None).importance()) == 4
    assert list(ALASSO(model, exclude="0.*").importance()) == ["2.weight", "2.bias"]
    for wrong in (model[0], [model[0].weight], 3):
        with pytest.raises(AlassoError, match="exclude takes patterns of names"):
            ALASSO(model, exclude=wrong)
    with pytest.raises(AlassoError, match="takes a parameter itself, as model"):
        ALASSO(model).forget("0.weight")


def test_weights_that_cannot_be_protected_are_said():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.real = nn.Linear(4, 2)
            self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    with pytest.warns(UserWarning, match="complex weights are not protected: phase"):
        ALASSO(Mixed())
    ALASSO(Mixed(), exclude="phase")
    with pytest.raises(AlassoError, match=r"0.weight has no shape yet: send a batch through the model first"):
        ALASSO(nn.Sequential(nn.LazyLinear(3)))


def test_a_script_ends_without_a_word():
    """Python lets go of a script's optimizer when torch may be gone already."""
    script = """
import torch
from alasso import ALASSO
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
reg = ALASSO(model).attach(optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
