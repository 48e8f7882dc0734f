"""NaN and infinity: noticed while a task trains, never saved, and refused where settings would make them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import alasso._parameters
from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError, DivergedError, KronALASSO, OnlineEWC, Regularizer
from alasso.regularizer import CHECK_EVERY

from helpers import mlp, run, same, step, toy_tasks, weights

METHODS = [ALASSO, SI, EWC, OnlineEWC, MAS, IMM, KronALASSO]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
every_method = pytest.mark.parametrize("make", METHODS)
every_optimizer = pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS)
Make = Callable[[nn.Module], Regularizer]


def after_one_task(make: Make, optimizer_of: Callable) -> tuple[nn.Module, torch.optim.Optimizer, Regularizer, list]:
    torch.manual_seed(0)
    model, (first, second) = mlp(6, 8, 4), toy_tasks(2, 8)
    optimizer = optimizer_of(model.parameters())
    reg = make(model).attach(optimizer)
    run(model, optimizer, first)
    reg.consolidate(first)
    return model, optimizer, reg, second


def poison(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    """One step whose gradient has one number that is not finite."""
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    model[0].weight.grad[0, 0] = value
    optimizer.step()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@every_optimizer
@every_method
def test_the_step_and_the_tensor_are_named(make, optimizer_of, value):
    model, optimizer, _, batches = after_one_task(make, optimizer_of)
    run(model, optimizer, batches[:4])
    poison(model, optimizer, value)
    with pytest.raises(DivergedError, match=r"0\.weight is NaN or infinite before step 8 of the task"):
        run(model, optimizer, batches)


@every_method
def test_it_is_noticed_late_in_a_task_and_the_schedule_is_sparse(make, monkeypatch):
    model, optimizer, reg, batches = after_one_task(make, OPTIMIZERS["adam"])
    looked, check = [], reg.protected.check_finite
    monkeypatch.setattr(reg.protected, "check_finite", lambda at: (looked.append(at), check(at)))
    for i in range(3 * CHECK_EVERY):
        step(model, optimizer, batches[i % len(batches)])
    assert looked == [1, 2, 4, 8, 16, 32, CHECK_EVERY, 2 * CHECK_EVERY, 3 * CHECK_EVERY]
    poison(model, optimizer, float("nan"))
    with pytest.raises(DivergedError, match=f"before step {4 * CHECK_EVERY} "):
        run(model, optimizer, batches * CHECK_EVERY)


@every_optimizer
@every_method
def test_rolled_back_to_the_last_good_state_training_goes_on_as_if_nothing_had_been(make, optimizer_of):
    model, optimizer, reg, batches = after_one_task(make, optimizer_of)
    run(model, optimizer, batches[:4])
    good = copy.deepcopy([one.state_dict() for one in (model, optimizer, reg)])
    poison(model, optimizer, float("nan"))
    with pytest.raises(DivergedError):
        run(model, optimizer, batches)
    for one, state in zip((model, optimizer, reg), good, strict=True):
        one.load_state_dict(state)
    run(model, optimizer, batches[4:])
    reg.consolidate(batches)

    other, others_optimizer, others_reg, _ = after_one_task(make, optimizer_of)
    run(other, others_optimizer, batches)
    others_reg.consolidate(batches)
    assert same(weights(model), weights(other))
    assert same(reg.importance().values(), others_reg.importance().values())


@pytest.mark.parametrize("make", [ALASSO, SI])
def test_a_poisoned_path_is_noticed_and_not_saved_where_model_and_optimizer_alone_were_rolled_back(make):
    model, optimizer, reg, batches = after_one_task(make, OPTIMIZERS["sgd"])
    run(model, optimizer, batches[:4])
    good = copy.deepcopy([one.state_dict() for one in (model, optimizer, reg)])
    poison(model, optimizer, float("nan"))
    for one, state in zip((model, optimizer), good, strict=False):
        one.load_state_dict(state)
    with pytest.raises(DivergedError, match=r"path of 0\.weight is NaN or infinite in the state to save"):
        reg.state_dict()
    with pytest.raises(DivergedError, match=r"path of 0\.weight is NaN or infinite before step 8"):
        run(model, optimizer, batches)
    reg.load_state_dict(good[2])
    assert torch.isfinite(reg.state_dict()["parameters"]["0.weight"]["path"]).all()


def test_large_numbers_whose_norm_overflows_are_no_divergence():
    model, optimizer, reg, batches = after_one_task(SI, OPTIMIZERS["sgd"])
    reg.protected.states["0.weight"].path.fill_(1e30)
    step(model, optimizer, batches[0])
    assert reg.state_dict()["parameters"]["0.weight"]["path"].max() > 1e29


def test_nothing_is_asked_of_a_device_that_records_a_graph(monkeypatch):
    model, optimizer, _, batches = after_one_task(SI, OPTIMIZERS["adam"])
    monkeypatch.setattr(alasso._parameters, "is_recording", lambda device: True)
    poison(model, optimizer, float("nan"))
    run(model, optimizer, batches)


# -- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e38, 3e38, 1e300, 1.1e15, 10**400, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("make", "name"),
    [(ALASSO, name) for name in ("a", "c", "a_prime", "c_prime", "epsilon", "epsilon_prime", "xi")]
    + [(SI, "c"), (SI, "xi"), (EWC, "lam"), (OnlineEWC, "lam"), (MAS, "lam"), (IMM, "lam"), (KronALASSO, "c")],
)
def test_settings_that_overflow_are_refused_in_one_line(make, name, value):
    with pytest.raises(AlassoError, match=f"^{name} must be ") as said:
        make(nn.Linear(2, 2), **{name: value})
    assert "\n" not in str(said.value)
    reg = make(nn.Linear(2, 2))
    before = getattr(reg, name)
    with pytest.raises(AlassoError, match=f"^{name} must be "):
        setattr(reg, name, value)
    assert getattr(reg, name) == before


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 1e300, 3e38])
def test_a_scale_that_overflows_is_refused(scale):
    model, (task,) = mlp(6, 8, 4), toy_tasks(1)
    reg = ALASSO(model)
    with pytest.raises(AlassoError, match=r"^scale must be "):
        reg.warm_start(task, scale=scale)
    assert reg.tasks == 0 and not any(omega.any() for omega in reg.importance().values())


def test_a_warm_start_whose_penalty_overflows_is_refused_and_changes_nothing():
    model, (task,) = mlp(6, 8, 4), toy_tasks(1)
    reg = ALASSO(model, a=1e15, c=1e15)
    before = copy.deepcopy(reg.state_dict())
    with pytest.raises(DivergedError, match="a setting lets it overflow"):
        reg.warm_start(task, scale=1e15)
    assert reg.tasks == 0
    for name, state in reg.state_dict()["parameters"].items():
        assert same(state.values(), before["parameters"][name].values())


def test_importance_that_overflows_with_the_settings_is_refused_and_the_past_kept():
    model, optimizer, reg, batches = after_one_task(EWC, OPTIMIZERS["sgd"])
    past = copy.deepcopy(reg.importance())
    run(model, optimizer, batches)
    reg.lam, reg.loss = 1e15, lambda output, y: 1e15 * nn.functional.cross_entropy(output, y, reduction="none")
    with pytest.raises(DivergedError, match="a setting lets it overflow"):
        reg.consolidate(batches)
    assert reg.tasks == 1 and same(reg.importance().values(), past.values())
