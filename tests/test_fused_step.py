"""The step in one pass: equal to hooks around torch's optimizers, drop-in for them, and never a wrong result."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

import alasso
from alasso import ALASSO, EWC, MAS, SI, AlassoError, _compile, _fused_step
from alasso._step_hooks import StepHooks
from alasso._update_rules import AdamRule

from helpers import mlp, run, same, toy_tasks, weights
from side_by_side import METHODS, importance_of, side_by_side, tasks

TASKS = toy_tasks(3)
LOSS = nn.functional.cross_entropy


@pytest.fixture
def uncompiled(monkeypatch):
    """Steps in one pass, but with the pass run as it is: the same functions, no compiler to wait for."""
    monkeypatch.setattr(_compile, "_compiled", {})
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *arguments: function(*arguments))
    monkeypatch.setattr(_fused_step, "no_compiler", lambda device: None)


def kernels():
    """Names of what was compiled."""
    return [one.name for one in _compile._compiled.values() if one._run not in (None, one.plain)]


def trained(model, optimizer, reg, tasks=TASKS):
    for task in tasks:
        run(model, optimizer, task)
        if reg is not None:
            reg.consolidate(task)
    return model, optimizer, reg


def in_two_halves(kind, model, make, **settings):
    """The regularizer attached by hooks, which small networks are given."""
    optimizer = make(model.parameters())
    return optimizer, kind(model, **settings).attach(optimizer)


def assert_same_run(ours, theirs, rtol=1e-5, atol=1e-7):
    """Weights, moments, importance and path of two (model, optimizer, regularizer)."""
    for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
    for mine, other in zip(ours[1].state.values(), theirs[1].state.values(), strict=True):
        assert set(mine) == set(other)
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=10 * rtol, atol=atol)
    if ours[2] is not None:
        assert (ours[2].tasks, ours[2].steps) == (theirs[2].tasks, theirs[2].steps)
        mine, other = ours[2].state_dict()["parameters"], theirs[2].state_dict()["parameters"]
        for name in mine:
            for field in mine[name]:
                torch.testing.assert_close(mine[name][field], other[name][field], rtol=10 * rtol, atol=atol)


# -- compiled ------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(_compile.no_compiler("cpu") is not None, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "dtype"), [(ALASSO, torch.float64), (ALASSO, torch.float32), (SI, torch.float32), (EWC, torch.float32)]
)
def test_compiled_adam_equals_hooks_around_torchs_adam(kind, dtype):
    data = toy_tasks(3, dtype=dtype)
    theirs = mlp(6, 12, 4, dtype=dtype)
    ours = copy.deepcopy(theirs)
    their_optimizer, their_reg = in_two_halves(kind, theirs, lambda ps: torch.optim.Adam(ps, lr=5e-3))
    reg = kind(ours)
    optimizer = alasso.optim.Adam(ours.parameters(), lr=5e-3, regularizer=reg)
    for model, of_model, own in ((ours, optimizer, reg), (theirs, their_optimizer, their_reg)):
        trained(model, of_model, own, data[:1])
        run(model, of_model, data[1])
    # Other tasks, steps and settings need no other kernel.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for task in data[1:]:
            reg.consolidate(task)
            run(ours, optimizer, task)
        other = mlp(6, 9, 4, dtype=dtype)
        other_reg = kind(other)
        changed = alasso.optim.Adam(other.parameters(), lr=0.1, betas=(0.8, 0.99), eps=1e-3, regularizer=other_reg)
        trained(other, changed, other_reg, data)
    for task in data[1:]:
        their_reg.consolidate(task)
        run(theirs, their_optimizer, task)
    assert f"step_of_Adam_{type(reg.surrogate).__name__.removesuffix('Surrogate')}" in kernels()
    rtol, atol = (1e-9, 1e-12) if dtype == torch.float64 else (1e-5, 1e-7)
    assert_same_run((ours, optimizer, reg), (theirs, their_optimizer, their_reg), rtol, atol)


@needs_compiler
def test_compiled_hooks_equal_plain_ones(caplog):
    """An optimizer that torch does not have: its step stays its own, the two halves around it are compiled."""

    class Other(torch.optim.Adam):
        pass

    plain = mlp(6, 12, 4)
    compiled = copy.deepcopy(plain)
    theirs = trained(plain, *in_two_halves(ALASSO, plain, lambda ps: Other(ps, lr=5e-3), c=5.0))
    optimizer = Other(compiled.parameters(), lr=5e-3)
    ours = trained(compiled, optimizer, ALASSO(compiled, c=5.0).attach(optimizer, compile=True))
    assert_same_run(ours, theirs)
    assert {"open_step_AlassoSurrogate", "close_step"} <= set(kernels())


# -- against the slow reference --------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.05}),
    "sgd-momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
    "adam": ("Adam", {"lr": 0.02}),
    "adamw": ("Adam", {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
}


@pytest.mark.parametrize(
    ("optimizer_name", "style"), [*((name, "plain") for name in OPTIMIZERS), ("adam", "closure"), ("sgd", "clipping")]
)
@pytest.mark.parametrize("method_name", METHODS)
def test_one_pass_equals_the_two_backward_reference(uncompiled, method_name, optimizer_name, style):
    kind, _ = METHODS[method_name]
    name, options = OPTIMIZERS[optimizer_name]
    makers = [lambda ps, module=module: getattr(module, name)(ps, **options) for module in (alasso.optim, torch.optim)]
    ours, theirs, reg, reference, train_both = side_by_side(method_name, makers[0], style, makers[1])
    for task in tasks():
        train_both(task)
        reference.consolidate(importance_of(kind, theirs, task))
        reg.consolidate(task)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    for mine, expected in zip(reg.importance().values(), reference.memories[-1]["Omega"], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-12)
    assert any(kernel.startswith(f"step_of_{name}") for kernel in kernels())


ADAMS = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "weight decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "no memory": {"betas": (0.0, 0.0)},
    "fused": {"fused": True},
    "tensor rate": {"lr": torch.tensor(5e-3), "fused": True},
}
SGDS = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "maximize": {"maximize": True, "momentum": 0.5},
}
CASES = [("Adam", options) for options in ADAMS.values()] + [("SGD", options) for options in SGDS.values()]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_attach_with_compile_makes_whole_steps_of_torchs_own_optimizers(uncompiled, kind):
    """Gradients after a step are the task's own; a closure, another hook and detach() do what they do without."""
    theirs = mlp(6, 12, 4, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    data = toy_tasks(3, dtype=torch.float64)
    runs = []
    for model, compile in ((theirs, False), (ours, True)):
        optimizer = kind(model.parameters(), lr=5e-3)
        reg = ALASSO(model, c=5.0).attach(optimizer, compile=compile)
        trained(model, optimizer, reg, data[:2])
        closure = closure_of(model, optimizer, *data[2][0])
        assert float(optimizer.step(closure)) > 0
        kept = [p.grad.clone() for p in model.parameters()]
        assert all(torch.equal(p.grad, g) and g.any() for p, g in zip(model.parameters(), kept, strict=True))
        seen = []
        handle = optimizer.register_step_pre_hook(
            lambda o, *_, seen=seen: seen.append(o.param_groups[0]["params"][0].grad)
        )
        run(model, optimizer, data[2][:2])
        assert len(seen) == 2 and all(grad is not None for grad in seen)
        handle.remove()
        run(model, optimizer, data[2][2:])
        reg.detach()
        run(model, optimizer, data[0][:2])
        runs.append((model, optimizer, reg))
    assert_same_run(*runs, rtol=1e-7, atol=1e-12)
    assert any(kernel.startswith("step_of_") for kernel in kernels())


def closure_of(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        return loss

    return closure


def test_a_step_in_one_pass_that_raised_gives_the_gradients_back(uncompiled):
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = ALASSO(model).attach(optimizer, compile=True)
    run(model, optimizer, TASKS[0][:2])
    LOSS(model(TASKS[0][2][0]), TASKS[0][2][1]).backward()
    grads = [p.grad for p in model.parameters()]
    StepHooks.of(optimizer).open(optimizer)
    assert all(p.grad is None for p in model.parameters())
    reg.detach()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("protected", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"adam {k}" for k in ADAMS] + [f"sgd {k}" for k in SGDS])
def test_every_option_does_what_it_does_in_torch(uncompiled, name, options, protected):
    options = {"lr": 5e-3, **options}
    data = toy_tasks(3, dtype=torch.float64)
    theirs = mlp(6, 12, 4, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    their_reg, reg = (ALASSO(theirs, c=5.0), ALASSO(ours, c=5.0)) if protected else (None, None)
    their_optimizer = getattr(torch.optim, name)(theirs.parameters(), **options)
    if their_reg is not None:
        their_reg.attach(their_optimizer)
    optimizer = getattr(alasso.optim, name)(ours.parameters(), regularizer=reg, **options)
    ours_run, theirs_run = trained(ours, optimizer, reg, data), trained(theirs, their_optimizer, their_reg, data)
    assert_same_run(ours_run, theirs_run, rtol=1e-7, atol=1e-12)
    assert optimizer.state_dict()["param_groups"] == their_optimizer.state_dict()["param_groups"]
    assert any(kernel.startswith("step_of_") for kernel in kernels())


def test_a_setting_changed_in_the_middle_of_a_task_holds_from_the_next_step_on(uncompiled):
    def weights_after(module):
        model = mlp(6, 12, 4, dtype=torch.float64)
        model.load_state_dict(start)
        optimizer = module.Adam(model.parameters(), lr=1e-2)
        reg = ALASSO(model, xi=1e-3).attach(optimizer)
        run(model, optimizer, tasks[0])
        reg.consolidate()
        run(model, optimizer, tasks[1][:4])
        before = reg.penalty().item()
        reg.c = 50.0
        run(model, optimizer, tasks[1][4:])
        assert reg.penalty().item() / 50 < before  # the stiffer springs have pulled
        return weights(model)

    tasks, start = toy_tasks(2, dtype=torch.float64), mlp(6, 12, 4, dtype=torch.float64).state_dict()
    for ours, theirs in zip(weights_after(alasso.optim), weights_after(torch.optim), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_groups_schedulers_frozen_and_excluded_parameters(uncompiled):
    results = []
    for module in (torch.optim, alasso.optim):
        torch.manual_seed(0)
        model = mlp(6, 12, 12, 4)
        model[2].bias.requires_grad_(False)
        groups = [
            {"params": model[0].parameters(), "lr": 1e-2, "betas": (0.8, 0.9)},
            {"params": model[2].parameters(), "weight_decay": 0.1},
            {"params": model[4].parameters()},
        ]
        optimizer = module.Adam(groups, lr=5e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        reg = SI(model, c=3.0, xi=1e-3, exclude="4.*").attach(optimizer)
        for task in TASKS:
            run(model, optimizer, task)
            scheduler.step()
            reg.consolidate()
        results.append((model, optimizer, reg))
    assert_same_run(*results)
    assert set(results[0][2].importance()) == {"0.weight", "0.bias", "2.weight"}


# -- drop-in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin_anew", [lambda o: o.load_state_dict(START), lambda o: o.state.clear()])
def test_an_optimizer_whose_state_begins_anew_uses_its_new_state(uncompiled, begin_anew):
    ended = []
    for module in (torch.optim, alasso.optim):
        torch.manual_seed(0)
        model = mlp(6, 12, 4)
        optimizer = module.Adam(model.parameters(), lr=5e-3)
        run(model, optimizer, TASKS[0][:1])  # a warm-up
        begin_anew(optimizer)
        run(model, optimizer, TASKS[0])
        ended.append((model, optimizer, None))
    assert_same_run(*ended)
    assert all(float(own["step"]) == len(TASKS[0]) for own in ended[1][1].state.values())


START = torch.optim.Adam(mlp(6, 12, 4).parameters(), lr=5e-3).state_dict()


@pytest.mark.parametrize(("option", "value"), [("nesterov", True), ("weight_decay", 0.1)])
def test_an_option_changed_between_steps_holds_from_the_next_one_on(uncompiled, option, value):
    ended = []
    for module in (torch.optim, alasso.optim):
        torch.manual_seed(0)
        model = mlp(6, 12, 4)
        optimizer = module.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run(model, optimizer, TASKS[0][:3])
        optimizer.param_groups[0][option] = value
        run(model, optimizer, TASKS[0][3:])
        ended.append((model, optimizer, None))
    assert_same_run(*ended)


def test_one_regularizer_after_another_takes_over_with_its_own_past(uncompiled):
    model = mlp(6, 12, 4)
    optimizer = alasso.optim.Adam(model.parameters())
    first, second = SI(model, c=0.0), SI(model, c=1000.0)
    for reg in (first, second):
        reg.attach(optimizer)
        run(model, optimizer, TASKS[0])
        reg.consolidate()
        reg.detach()
    first.attach(optimizer)
    run(model, optimizer, TASKS[1][:2])
    first.detach()
    second.attach(optimizer)
    run(model, optimizer, TASKS[1][2:4])
    assert (first.steps, second.steps) == (2, 2)
    gone = weakref.ref(first)
    del first, reg
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("first", ["torch", "alasso"])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_state_goes_to_torchs_optimizer_and_back_in_the_middle_of_a_task(uncompiled, name, first):
    options = {"lr": 5e-3, **({"momentum": 0.9} if name == "SGD" else {"amsgrad": True})}
    modules = {"torch": torch.optim, "alasso": alasso.optim}
    second = {"torch": "alasso", "alasso": "torch"}[first]
    straight = mlp(6, 12, 4)
    changed = copy.deepcopy(straight)
    whole = ALASSO(straight, c=0.5)
    straight_optimizer = getattr(alasso.optim, name)(straight.parameters(), regularizer=whole, **options)

    before = getattr(modules[first], name)(changed.parameters(), **options)
    reg = ALASSO(changed, c=0.5).attach(before)
    for optimizer, model, r in ((straight_optimizer, straight, whole), (before, changed, reg)):
        run(model, optimizer, TASKS[0])
        r.consolidate()
        run(model, optimizer, TASKS[1][:3])

    resumed = copy.deepcopy(changed)
    after = getattr(modules[second], name)(resumed.parameters(), **options)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    resumed_reg = ALASSO(resumed)
    resumed_reg.load_state_dict(reg.state_dict())
    resumed_reg.attach(after)
    for optimizer, model, r in ((straight_optimizer, straight, whole), (after, resumed, resumed_reg)):
        run(model, optimizer, TASKS[1][3:])
        r.consolidate()
        run(model, optimizer, TASKS[2])
    assert_same_run((straight, straight_optimizer, whole), (resumed, after, resumed_reg))


def test_attaching_as_well_changes_nothing_and_detaching_ends_it(uncompiled):
    once, twice, plain = mlp(6, 12, 4), None, None
    twice, plain = copy.deepcopy(once), copy.deepcopy(once)
    regs = [ALASSO(once, c=5.0), ALASSO(twice, c=5.0)]
    optimizers = [alasso.optim.Adam(m.parameters(), regularizer=r) for m, r in zip((once, twice), regs, strict=True)]
    regs[1].attach(optimizers[1]).attach(optimizers[1])
    for model, optimizer, reg in zip((once, twice), optimizers, regs, strict=True):
        run(model, optimizer, TASKS[0])
        assert reg.steps == len(TASKS[0])
        reg.consolidate()
        run(model, optimizer, TASKS[1])
    assert same(weights(once), weights(twice))
    assert not optimizers[1]._optimizer_step_pre_hooks and list(StepHooks.of(optimizers[1]).plans.compile) == [regs[1]]

    regs[0].detach()
    assert not StepHooks.of(optimizers[0]).plans.compile
    plain.load_state_dict(once.state_dict())
    plain_optimizer = torch.optim.Adam(plain.parameters())
    plain_optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    run(once, optimizers[0], TASKS[2])
    run(plain, plain_optimizer, TASKS[2])
    assert regs[0].steps == len(TASKS[1])
    for p, q in zip(weights(once), weights(plain), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_mistakes_are_refused_in_one_sentence():
    model = mlp(6, 4)
    with pytest.raises(AlassoError, match="none of the model's protected parameters"):
        alasso.optim.Adam(mlp(6, 4).parameters(), regularizer=ALASSO(model))
    for optimizer in (alasso.optim.Adam, alasso.optim.SGD):
        with pytest.raises(AlassoError, match=r"as alasso.ALASSO\(model\), not the class ALASSO"):
            optimizer(model.parameters(), regularizer=ALASSO)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        alasso.optim.Adam(model.parameters(), lr=-1.0)


def test_a_copied_optimizer_is_plain_and_consolidate_says_so():
    model = mlp(6, 4)
    reg = ALASSO(model)
    copied = copy.deepcopy(alasso.optim.Adam(model.parameters(), regularizer=reg))
    assert not StepHooks.of(copied).plans.compile
    copied.param_groups[0]["params"] = list(model.parameters())
    run(model, copied, TASKS[0])
    with pytest.raises(AlassoError, match="seen no optimizer step"):
        reg.consolidate()


def test_gradients_and_other_peoples_hooks_are_left_alone(uncompiled):
    model = mlp(6, 12, 4)
    reg = ALASSO(model, c=10.0)
    optimizer = alasso.optim.Adam(model.parameters(), regularizer=reg)
    run(model, optimizer, TASKS[0])
    reg.consolidate()
    seen = []
    for _ in range(2):
        model.zero_grad()
        LOSS(model(TASKS[1][0][0]), TASKS[1][0][1]).backward()
        before = {name: p.grad for name, p in model.named_parameters()}
        kept = {name: g.clone() for name, g in before.items()}
        version = model[0].weight._version
        optimizer.step()
        assert model[0].weight._version > version
        for name, p in model.named_parameters():
            assert p.grad is before[name] and torch.equal(p.grad, kept[name])
        # From now on, somebody else looks at the gradients, and must find some.
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0].grad is not None))
    assert seen == [True]
    assert reg.steps == 2


def test_memory_beside_the_optimizers_own_is_13_bytes_a_weight(uncompiled):
    model = mlp(6, 50, 4)
    reg = ALASSO(model)
    optimizer = alasso.optim.Adam(model.parameters(), regularizer=reg)
    trained(model, optimizer, reg, TASKS[:2])
    run(model, optimizer, TASKS[2])
    count = sum(p.numel() for p in model.parameters())
    held = sum(t.numel() * t.element_size() for s in reg.protected.states.values() for t in s)
    hooks = StepHooks.of(optimizer)
    single = 4 * len(reg.protected.states)  # one number a tensor
    assert held == 13 * count + single and not hooks.plans._buffers and not hooks.plans._plans


# -- what does not fit -----------------------------------------------------------------------------------------


def saying(caplog):
    return [record.message for record in caplog.records if record.name == "alasso"]


@pytest.mark.parametrize("obstacle", ["no compiler", "broken compiler", "half precision", "layout", "scaler", "sparse"])
def test_what_does_not_fit_is_made_otherwise_and_right(uncompiled, monkeypatch, caplog, obstacle):
    caplog.set_level(logging.INFO, "alasso")
    theirs = mlp(6, 12, 4)
    ours = copy.deepcopy(theirs)
    data, scaler, reason = TASKS, torch.amp.GradScaler("cpu", enabled=obstacle == "scaler", init_scale=64.0), None
    if obstacle == "no compiler":
        monkeypatch.setattr(_fused_step, "no_compiler", lambda device: "there is no C++ compiler")
        reason = "there is no C++ compiler"
    elif obstacle == "broken compiler":

        def no_kernel(*_):
            raise RuntimeError("g++ said no\nat length")

        monkeypatch.setattr(torch, "compile", lambda function, **_: no_kernel)
        reason = "step_of_Adam_Alasso cannot be compiled and runs as it is: g++ said no"
    elif obstacle == "half precision":
        theirs, ours = theirs.bfloat16(), ours.bfloat16()
        data = [[(x.bfloat16(), y) for x, y in task] for task in TASKS]
        reason = "not of one full precision"
    elif obstacle == "layout":
        for model in (theirs, ours):
            model[0].weight.data = model[0].weight.data.t().contiguous().t()
        reason = "layout"
    elif obstacle == "scaler":
        reason = "the gradients are scaled"
    elif obstacle == "sparse":
        table = nn.Embedding(5, 3, sparse=True)
        optimizer = alasso.optim.SGD(table.parameters(), lr=0.1, regularizer=ALASSO(table))
        table(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(AlassoError, match="weight has a sparse gradient"):
            optimizer.step()
        return

    runs = []
    for model, module in ((ours, alasso.optim), (theirs, torch.optim)):
        optimizer = module.Adam(model.parameters(), lr=5e-3, fused=True)
        reg = ALASSO(model, c=5.0).attach(optimizer)
        for task in data:
            for x, y in task:
                optimizer.zero_grad()
                scaler.scale(LOSS(model(x).float(), y)).backward()
                scaler.step(optimizer)
                scaler.update()
            reg.consolidate()
        runs.append((model, optimizer, reg))
    assert_same_run(*runs)
    assert any(reason in sentence for sentence in saying(caplog)), saying(caplog)


def test_a_step_that_raised_is_as_if_it_had_not_been_begun(monkeypatch):
    monkeypatch.setattr(_fused_step, "no_compiler", lambda device: "there is no compiler")
    plain = mlp(6, 12, 4)
    disturbed = copy.deepcopy(plain)
    importance = []
    for model in (plain, disturbed):
        reg = ALASSO(model, c=5.0)
        optimizer = alasso.optim.Adam(model.parameters(), lr=5e-3, regularizer=reg)
        run(model, optimizer, TASKS[0])
        reg.consolidate()
        for x, y in TASKS[1]:
            if model is disturbed:
                with monkeypatch.context() as patch:
                    patch.setattr(torch.optim.Adam, "step", lambda optimizer: 1 / 0)
                    LOSS(model(TASKS[2][0][0]), TASKS[2][0][1]).backward()
                    with pytest.raises(ZeroDivisionError):
                        optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            LOSS(model(x), y).backward()
            optimizer.step()
        assert reg.steps == len(TASKS[1])
        reg.consolidate()
        importance.append(reg.importance())
    assert same(weights(plain), weights(disturbed))
    assert same(*(one.values() for one in importance))


def test_more_variants_than_torch_keeps_run_as_they_are(monkeypatch, caplog):
    class FailOnRecompileLimitHit(Exception):
        pass

    def add(total, other):
        total.add_(other)

    calls = []

    def compiled(total, other):
        calls.append(1)
        if len(calls) > 1:
            raise FailOnRecompileLimitHit
        total.add_(other)

    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled)
    function, total = _compile.Compiled(add, "add"), torch.zeros(3)
    for _ in range(4):
        function(total, torch.ones(3))
    assert total.tolist() == [4, 4, 4] and len(calls) == 2
    assert [s for s in saying(caplog) if "more variants" in s]


def test_channels_last_weights_are_passed_over_as_they_lie(uncompiled):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4))
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    x, y = torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,))
    results = []
    for model, images in ((plain, x), (last, x.contiguous(memory_format=torch.channels_last))):
        reg = ALASSO(model)
        optimizer = alasso.optim.Adam(model.parameters(), regularizer=reg)
        trained(model, optimizer, reg, [[(images, y)] * 5] * 2)
        results.append((model, optimizer, reg))
    assert_same_run(*results, rtol=1e-4, atol=1e-6)
    assert not results[1][0][0].weight.is_contiguous()


def test_closures_return_the_loss_and_are_called_once(uncompiled):
    model = mlp(6, 4)
    optimizer = alasso.optim.SGD(model.parameters(), lr=0.1, regularizer=ALASSO(model))
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = LOSS(model(TASKS[0][0][0]), TASKS[0][0][1])
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) > 0 and calls == [True]


@needs_compiler
def test_a_parameter_without_dimensions_is_part_of_the_one_pass():
    """EWC's constant is as small as such a parameter: it must not pass for one of its weights."""

    class WithScale(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.layer = nn.Linear(20, 30)

        def forward(self, x):
            return self.scale * self.layer(x)

    x, y = torch.randn(16, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(16)
    ended = []
    for module in (alasso.optim, torch.optim):
        model = WithScale().double()
        reg = alasso.EWC(model)
        optimizer = module.Adam(model.parameters(), lr=0.01)
        reg.attach(optimizer)
        for _ in range(2):
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            reg.consolidate([(x, y)])
        ended.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*ended, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# -- the pure functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0)])
def test_adams_move_is_torchs(betas, on_device):
    """With numbers from the host, and with those that a CUDA graph works out by itself."""
    generator = torch.Generator().manual_seed(3)
    theta = nn.Parameter(torch.randn(50, generator=generator, dtype=torch.float64))
    mine, m, v = theta.detach().clone(), torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    optimizer = torch.optim.Adam([theta], lr=0.01, betas=betas)
    rule = AdamRule(amsgrad=False, maximize=False, decay="none", on_device=on_device)
    group = {"lr": 0.01, "betas": betas, "weight_decay": 0.0, "eps": 1e-8}
    for t in range(1, 20):
        theta.grad = torch.randn(50, generator=generator, dtype=torch.float64)
        step, lr = torch.tensor([float(t), 0.01], dtype=torch.float64)
        if on_device:
            numbers = (step, lr, torch.tensor(AdamRule.device_numbers(group), dtype=torch.float64))
        else:
            numbers = (torch.tensor(AdamRule.numbers(group, float(t)), dtype=torch.float64),)
        mine, (m, v) = rule.move(mine, theta.grad, (m, v), numbers)
        optimizer.step()
        torch.testing.assert_close(mine, theta.detach(), rtol=1e-12, atol=1e-14)


# -- GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("kind", [ALASSO, MAS])
def test_a_recorded_step_is_the_step(kind, attach):
    """Steps replayed from a CUDA graph, its learning rate a tensor that changes, against steps made one by one."""
    models = [mlp(6, 12, 4).cuda()]
    models.append(copy.deepcopy(models[0]))
    x, y = (torch.stack(parts).cuda() for parts in zip(*(pair for task in TASKS for pair in task), strict=True))
    rates = [torch.tensor(5e-3, device="cuda") for _ in models]
    regs, optimizers = [kind(model, 5.0) for model in models], []
    for model, reg, rate in zip(models, regs, rates, strict=True):
        options = {"lr": rate, "capturable": True}
        if attach:
            reg.attach(optimizer := torch.optim.Adam(model.parameters(), **options))
        else:
            optimizer = alasso.optim.Adam(model.parameters(), regularizer=reg, **options)
        optimizers.append(optimizer)
        for i in range(4):
            one_step(model, optimizer, x[i], y[i])
        reg.consolidate([(x[0], y[0])])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(4, 7):
                one_step(model, optimizer, x[i], y[i])
        torch.cuda.current_stream().wait_stream(stream)

    batch = (x[7].clone(), y[7].clone())
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        one_step(models[0], optimizers[0], *batch)
    regs[0].steps -= 1  # recording makes no step
    for i in range(7, 16):
        for rate in rates:
            rate.mul_(0.9)
        batch[0].copy_(x[i])
        batch[1].copy_(y[i])
        graph.replay()
        regs[0].steps += 1
        one_step(models[1], optimizers[1], x[i], y[i])
    assert_same_run(*zip(models, optimizers, regs, strict=True), rtol=1e-4, atol=1e-6)
    assert float(optimizers[0].state[models[0][0].weight]["step"]) == 16


def one_step(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=True)
    LOSS(model(x), y).backward()
    optimizer.step()


@pytest.mark.gpu
def test_one_pass_on_a_gpu_equals_torchs_steps():
    model = mlp(6, 12, 4).cuda()
    plain = copy.deepcopy(model)
    data = [[(x.cuda(), y.cuda()) for x, y in task] for task in TASKS]
    reg = ALASSO(model, c=5.0)
    optimizer = alasso.optim.Adam(model.parameters(), lr=5e-3, regularizer=reg)
    ours = trained(model, optimizer, reg, data)
    their_optimizer, their_reg = in_two_halves(ALASSO, plain, lambda ps: torch.optim.Adam(ps, lr=5e-3), c=5.0)
    assert_same_run(ours, trained(plain, their_optimizer, their_reg, data), rtol=1e-4, atol=1e-6)
    assert "step_of_Adam_Alasso" in kernels()
