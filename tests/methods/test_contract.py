"""What every method must satisfy. A method with a file in ``alasso.methods`` is covered from then on.

The method of docs/add_a_method.md is run from the page itself and held to the same.
"""

import copy
import dataclasses
import io
import pkgutil
import re
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import alasso.methods
from alasso import ALASSO, EWC, IMM, KronALASSO, OnlineEWC, Regularizer
from alasso.importance._taps import LossScale
from alasso.methods.base import Springs, Surrogate, add_to_path_

from helpers import mlp, run, same, step, toy_tasks, weights

GUIDE = Path(__file__).parents[2] / "docs" / "add_a_method.md"


def method_of_the_guide():
    """Its code as a module, which is how a reader will have it."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    module = sys.modules["l2_of_the_guide"] = types.ModuleType("l2_of_the_guide")
    exec(compile("\n".join(blocks), GUIDE.name, "exec"), vars(module))
    return module.L2


modules = [import_module(f"alasso.methods.{one.name}") for one in pkgutil.iter_modules(alasso.methods.__path__)]
METHODS = {
    kind.__name__: kind
    for module in modules
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Regularizer) and not kind.__subclasses__()
}

#: Each is called with a model. All methods with their defaults, and settings that take other branches.
CASES = {
    **METHODS,
    "guide": method_of_the_guide(),
    "ALASSO, authors": ALASSO.as_the_authors_ran_it,
    "ALASSO, paper": ALASSO.as_the_paper_states_it,
    "ALASSO, asymmetric only": ALASSO.asymmetric_only,
    "ALASSO, accurate only": ALASSO.accurate_only,
    "ALASSO, sign of Ω": lambda model: ALASSO(model, unmoved="sign_of_omega"),
    "EWC, expected labels": lambda model: EWC(model, labels="expected"),
    "online EWC, uniform labels": lambda model: OnlineEWC(model, labels="uniform"),
    "KronALASSO, path": lambda model: KronALASSO(model, scale="path"),
    "IMM, mode, l2": lambda model: IMM(model, "mode", transfer="l2", lam=0.5),
    "IMM, last": lambda model: IMM(model, transfer="l2", lam=0.5, start="last", last_weight=0.3, count_unmoved=True),
}

every_method = pytest.mark.parametrize("make", CASES.values(), ids=CASES)
SPRINGS = {name: make for name, make in CASES.items() if isinstance(make(nn.Linear(2, 2)).surrogate, Springs)}
every_method_of_springs = pytest.mark.parametrize("make", SPRINGS.values(), ids=SPRINGS)
in_precision = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


# -- the pure functions --------------------------------------------------------------------------------------


def surrogate_of(make):
    return make(nn.Linear(2, 2)).surrogate


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def needs_steps(surrogate):
    return surrogate.observes_path or surrogate.learns_from_steps


def note_step(surrogate, state, g, before, after):
    """Show a step to a surrogate that learns from steps."""
    if isinstance(surrogate, Springs):
        add_to_path_(state.path, g, before, after)
    else:
        surrogate.add_factors_(state, g, LossScale(*(g.new_tensor(number) for number in (1.0, 2.0, 0.9))))
        surrogate.before_step_(state, g, before, torch.zeros_like(g), 0.0)
        surrogate.after_step_(state, g, after)


def through_tasks(surrogate, shape, count=3, dtype=torch.float64, seed=0, row=...):
    """(state, θ) after some tasks; some weights stand still, some have no importance. ``row``: that part alone."""

    def draw(which):
        return random(*shape, seed=1000 * seed + which, dtype=dtype)[row]

    theta = draw(0)
    state = surrogate.init(theta)
    for task in range(10, 10 * count + 10, 10):
        still = draw(task) > 1.0
        for i in (1, 2):
            before, g = theta, draw(task + i)
            # Mostly downhill, so that there is a path integral to speak of.
            theta = torch.where(still, before, before - 0.5 * g + 0.1 * draw(task + 2 + i))
            if needs_steps(surrogate):
                note_step(surrogate, state, g, before, theta)
        state = surrogate.consolidate(state, theta, draw(task + 5).clamp(min=0))
    return state, theta


def places(state, theta):
    """Weights to look at: on both sides of the anchor, near and far, and on it."""
    away = random(*theta.shape, seed=9, dtype=theta.dtype)
    on_some = torch.where(random(*theta.shape, seed=8) > 0.5, state.anchor, theta + away)
    return [theta, state.anchor.clone(), theta + away, theta - 3 * away, on_some]


def stiffness(surrogate, state):
    """Factors of d², one for each side; there are none where weights do not have springs of their own."""
    return surrogate.stiffness(state) if isinstance(surrogate, Springs) else ()


@every_method
def test_the_parts_are_there(make):
    surrogate = surrogate_of(make)
    assert isinstance(surrogate, Surrogate)
    assert dataclasses.is_dataclass(surrogate) and type(surrogate).__dataclass_params__.frozen
    fields = surrogate.State._fields
    assert {"anchor", "omega"} <= set(fields) or not isinstance(surrogate, Springs)
    assert {"anchor", *surrogate.partial} <= set(fields)
    assert ("path" in fields) == needs_steps(surrogate)
    assert isinstance(surrogate.init(random(3)), surrogate.State)


@every_method
@in_precision
def test_without_a_past_there_is_no_penalty_anywhere(make, dtype):
    surrogate, theta = surrogate_of(make), random(3, 4, dtype=dtype)
    state = surrogate.init(theta)
    for place in places(state, theta):
        assert float(surrogate.penalty(place, state)) == 0
        assert not surrogate.penalty_grad(place, state).any()


@every_method
def test_the_gradient_is_the_derivative_of_the_penalty(make):
    surrogate = surrogate_of(make)
    for count in (1, 3):
        state, theta = through_tasks(surrogate, (3, 4), count)
        for place in places(state, theta):
            place = place.clone().requires_grad_()
            (expected,) = torch.autograd.grad(surrogate.penalty(place, state), place)
            actual = surrogate.penalty_grad(place.detach(), state)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@every_method_of_springs
def test_a_part_of_a_tensor_is_treated_as_it_is_within_the_whole(make):
    surrogate = surrogate_of(make)
    whole, theta = through_tasks(surrogate, (3, 4))
    pull = surrogate.penalty_grad(theta + 1, whole)
    for row in range(3):
        part, place = through_tasks(surrogate, (3, 4), row=row)
        for field in whole._fields:
            if getattr(whole, field).shape == theta.shape:
                assert torch.equal(getattr(part, field), getattr(whole, field)[row])
        assert torch.equal(surrogate.penalty_grad(place + 1, part), pull[row])


@every_method
@pytest.mark.parametrize("seed", range(3))
def test_stiffness_and_importance_are_finite_and_not_negative(make, seed):
    surrogate = surrogate_of(make)
    for count in range(1, 5):
        state, theta = through_tasks(surrogate, (5, 7), count, seed=seed)
        for values in (surrogate.importance(state), *stiffness(surrogate, state)):
            assert values.shape == theta.shape
            assert torch.isfinite(values).all() and (values >= 0).all()
        assert surrogate.importance(state).any(), "a test in which nothing is important proves nothing"
        least = surrogate.penalty(state.anchor, state)
        assert all(surrogate.penalty(place, state) >= least >= 0 for place in places(state, theta))


@every_method
def test_consolidation_is_pure(make):
    surrogate = surrogate_of(make)
    state, theta = through_tasks(surrogate, (3, 4))
    theta = theta + random(3, 4, seed=5)
    importance = random(3, 4, seed=6).abs()
    kept = copy.deepcopy((state, theta, importance))
    new = surrogate.consolidate(state, theta, importance)
    assert same([*state, theta, importance], [*kept[0], *kept[1:]])
    if surrogate.observes_path:
        assert not new.path.any()
    # Training goes on in θ's own memory, and adds to the path in place: neither may reach another tensor.
    seen = copy.deepcopy(new)
    for tensor in (*state, theta, importance):
        tensor.fill_(7)
    assert same(new, seen)
    memory = [tensor.data_ptr() for tensor in new if tensor.numel() > 1]
    assert len(set(memory)) == len(memory)


@every_method
@in_precision
def test_the_precision_of_the_weights_is_kept(make, dtype):
    surrogate = surrogate_of(make)
    state, theta = through_tasks(surrogate, (3, 4), dtype=dtype)
    warm = surrogate.warm_start(theta, theta.abs())
    made = [*surrogate.init(theta), *state, *warm, *stiffness(surrogate, state), surrogate.penalty_grad(theta, state)]
    assert {tensor.dtype for tensor in made if tensor.is_floating_point()} == {dtype}


def assert_stacked(stacked, singles, shape):
    """Fields as large as the weights are stacked; a summary is the sum of the single ones."""
    for field, tensor in stacked._asdict().items():
        ones = [getattr(single, field) for single in singles]
        expected = torch.stack(ones) if ones[0].shape == shape else torch.stack(ones).sum(0)
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


@every_method_of_springs
def test_a_leading_axis_of_runs_is_the_runs_one_by_one(make):
    surrogate, shape = surrogate_of(make), (3, 4)
    state, theta = through_tasks(surrogate, (5, *shape), count=2)
    g, importance = random(5, *shape, seed=3), random(5, *shape, seed=4).abs()

    def alone(i):
        # A summary of the whole stack cannot be taken apart: fields of single weights begin as they are, others at 0.
        parts = {name: t[i] if t.shape == theta.shape else torch.zeros_like(t) for name, t in state._asdict().items()}
        return copy.deepcopy(type(state)(**parts))

    blank = {name: t if t.shape == theta.shape else torch.zeros_like(t) for name, t in state._asdict().items()}
    state, singles = type(state)(**blank), [alone(i) for i in range(5)]
    after = theta - 0.3 * g
    for s, before, gradient, end in [(state, theta, g, after), *zip(singles, theta, g, after, strict=True)]:
        if surrogate.observes_path:
            add_to_path_(s.path, gradient, before, end)
    new = surrogate.consolidate(state, after, importance)
    news = [surrogate.consolidate(*row) for row in zip(singles, after, importance, strict=True)]
    assert_stacked(new, news, shape)
    place = after + random(5, *shape, seed=7)
    grads = [surrogate.penalty_grad(p, s) for p, s in zip(place, news, strict=True)]
    torch.testing.assert_close(surrogate.penalty_grad(place, new), torch.stack(grads), rtol=1e-12, atol=1e-12)
    sums = sum(surrogate.penalty(p, s) for p, s in zip(place, news, strict=True))
    torch.testing.assert_close(surrogate.penalty(place, new), sums, rtol=1e-12, atol=1e-12)


@every_method
def test_measured_importance_protects_weights_whose_training_was_not_seen(make):
    surrogate, theta = surrogate_of(make), random(3, 4)
    state = surrogate.warm_start(theta, random(3, 4, seed=1).abs() + 0.1)
    torch.testing.assert_close(state.anchor, theta, rtol=1e-15, atol=1e-15)
    assert float(surrogate.penalty(theta, state)) == 0
    assert (surrogate.importance(state) > 0).all()
    for k in stiffness(surrogate, state):
        assert (k > 0).all() or not adds_a_penalty(surrogate)


def adds_a_penalty(surrogate):
    """Plain IMM merges weights and pays for nothing while it trains."""
    return getattr(surrogate, "transfer", "l2") not in ("weight", "drop")


# -- in a training loop --------------------------------------------------------------------------------------


def batches(dtype=torch.float64):
    return toy_tasks(count=3, batches=4, dtype=dtype)


def trained(make, tasks, dtype=torch.float64):
    """(model, optimizer, regularizer) after some tasks."""
    torch.manual_seed(0)
    model = mlp(6, 8, 4, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = make(model).attach(optimizer)
    strength = "c" if "c" in reg.settings() else "lam"  # a whole one would be too stiff for this SGD, and bounded
    setattr(reg, strength, 1e-4 * getattr(reg, strength))
    for task in tasks:
        run(model, optimizer, task)
        reg.consolidate(task)
    return model, optimizer, reg


@every_method
def test_the_first_task_is_plain_training_bit_for_bit(make):
    task = batches(torch.float32)[0]
    model, optimizer, reg = trained(make, [], torch.float32)
    plain = copy.deepcopy(model)
    run(model, optimizer, task)
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.1), task)
    assert same(weights(model), weights(plain))
    assert float(reg.penalty()) == 0


@every_method
def test_channels_last_weights_train_alike(make):
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(80, 4)).double().to(memory_format=layout)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        reg = make(model).attach(optimizer)
        for shift in range(2):
            x = torch.linspace(-1, 1, 8 * 3 * 36, dtype=torch.float64).sin().view(8, 3, 6, 6).roll(shift, 0)
            task = [(x.contiguous(memory_format=layout), torch.arange(8) % 4)] * 4
            run(model, optimizer, task)
            reg.consolidate(task)
        results.append(weights(model))
    for plain, last in zip(*results, strict=True):
        torch.testing.assert_close(plain, last, rtol=1e-9, atol=1e-12)


@every_method
@pytest.mark.filterwarnings("ignore:penalty.. is part of the loss")  # the test only looks at its gradient
def test_a_step_goes_down_the_tasks_loss_plus_the_penalty(make):
    first, second, third = batches()
    model, optimizer, reg = trained(make, [first, second])
    run(model, optimizer, third[:2])  # away from the anchor
    parameters, before = list(model.parameters()), weights(model)
    own = torch.autograd.grad(loss_of(model, third[2]), parameters)
    total = torch.autograd.grad(loss_of(model, third[2]) + reg.penalty(), parameters)
    paths = paths_of(reg)
    step(model, optimizer, third[2])
    for old, gradient, new in zip(before, total, parameters, strict=True):
        torch.testing.assert_close(new, old - 0.1 * gradient, rtol=1e-11, atol=1e-13)
    assert adds_a_penalty(reg.surrogate) != same(own, total)
    if reg.surrogate.observes_path:  # with the gradient of the task alone
        for path, new_path, g, old, new in zip(paths, paths_of(reg), own, before, parameters, strict=True):
            fall = -g * (new.detach() - old)
            torch.testing.assert_close(new_path, path + fall.sum_to_size(path.shape), rtol=1e-10, atol=1e-14)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def paths_of(reg):
    states = [reg.protected.state_of(name, parameter) for name, parameter in reg.protected]
    return [state.path.clone() for state in states if reg.surrogate.observes_path]


@every_method
def test_consolidation_leaves_the_weights_alone_unless_its_docstring_says_otherwise(make):
    first, second, _ = batches()
    model, optimizer, reg = trained(make, [first])
    run(model, optimizer, second)
    before = weights(model)
    reg.consolidate(second)
    stated = "consolidation changes the weights" in " ".join((type(reg).__doc__ or "").lower().split())
    assert same(weights(model), before) != stated
    assert (reg.tasks, reg.steps) == (2, 0)


@every_method
def test_a_run_saved_within_a_task_goes_on_elsewhere_bit_for_bit(make):
    first, second, third = batches(torch.float32)
    model, optimizer, reg = trained(make, [first, second], torch.float32)
    run(model, optimizer, third[:2])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "past": reg.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    other, other_optimizer, other_reg = trained(make, [], torch.float32)
    other.load_state_dict(saved["model"])
    other_reg.load_state_dict(saved["past"])
    assert (other_reg.tasks, other_reg.steps) == (2, 2)
    for m, o, r in ((model, optimizer, reg), (other, other_optimizer, other_reg)):
        run(m, o, third[2:])
        r.consolidate(third)
        run(m, o, first[:2])
    assert same(weights(model), weights(other))
    assert same(reg.importance().values(), other_reg.importance().values())
    assert same(reg.anchor().values(), other_reg.anchor().values())


@pytest.mark.parametrize("make", [*METHODS.values(), CASES["guide"]])
def test_parameters_can_be_excluded_and_included(make):
    assert list(make(mlp(6, 8, 4), exclude=["0.*"]).importance()) == ["2.weight", "2.bias"]
    assert list(make(mlp(6, 8, 4), include=["2.*"]).importance()) == ["2.weight", "2.bias"]
    assert list(make(mlp(6, 8, 4), include="2.*", exclude="*.bias").importance()) == ["2.weight"]


# -- that nothing is left out --------------------------------------------------------------------------------


def all_subclasses(kind):
    found = set(kind.__subclasses__())
    return found.union(*(all_subclasses(child) for child in found)) if found else found


def test_every_public_method_is_among_them():
    public = {name for name in alasso.__all__ if name in METHODS}
    assert public >= {"ALASSO", "SI", "EWC", "OnlineEWC", "MAS", "IMM"}
    assert all(getattr(alasso, name) is METHODS[name] for name in public)
    surrogates = {kind for kind in all_subclasses(Surrogate) if kind.__module__.startswith("alasso.methods")}
    surrogates.discard(Springs)
    assert surrogates and surrogates <= {type(surrogate_of(make)) for make in METHODS.values()}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_known_by_its_name_and_says_what_it_is(name):
    assert getattr(METHODS[name], "method", None) == name
    assert METHODS[name].__doc__


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_every_setting_can_be_changed_and_has_one_default(make):
    reg = make(nn.Linear(2, 2))
    for field in dataclasses.fields(reg.surrogate):
        setattr(reg, field.name, getattr(reg, field.name))  # declared as a Setting
        value = getattr(reg.surrogate, field.name)
        assert field.default in (dataclasses.MISSING, value), f"{field.name} has two defaults"
