"""attach(optimizer, every=N): consolidation after every N steps, equal to a loop that calls consolidate()."""

import copy

import pytest
import torch
from torch import nn

import alasso
from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError, KronALASSO, OnlineEWC

from helpers import mlp, run, same, step, toy_tasks, weights

BATCHES = toy_tasks(1, batches=14)[0]


def by_hand(make, train, every):
    """Weights and importance of a loop that consolidates itself; ``train`` yields after each step."""
    torch.manual_seed(0)
    model = mlp(6, 12, 4)
    reg = make(model)
    for number, _ in enumerate(train(model, reg, None), start=1):
        if number % every == 0:
            reg.consolidate()
    return model, reg


def by_itself(make, train, every):
    torch.manual_seed(0)
    model = mlp(6, 12, 4)
    reg = make(model)
    for _ in train(model, reg, every):
        pass
    return model, reg


def plainly(model, reg, every):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    reg.attach(optimizer, every=every)
    for batch in BATCHES:
        yield step(model, optimizer, batch)


def compiled(model, reg, every):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    reg.attach(optimizer, compile=True, every=every)
    for batch in BATCHES:
        yield step(model, optimizer, batch)


def fused(model, reg, every):
    optimizer = alasso.optim.Adam(model.parameters(), lr=1e-2, regularizer=reg)
    reg.attach(optimizer, every=every)
    for batch in BATCHES:
        yield step(model, optimizer, batch)


def with_closures(model, reg, every):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer, every=every)
    for x, y in BATCHES:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        yield optimizer.step(closure)


def accumulating(model, reg, every):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer, every=every)
    for i, (x, y) in enumerate(BATCHES):
        nn.functional.cross_entropy(model(x), y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            yield


def scaled(model, reg, every):
    """The scaler finds infinity in one step, which is none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    reg.attach(optimizer, every=every)
    for i, (x, y) in enumerate(BATCHES):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if i == 4 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if i != 4:
            yield


def with_two_optimizers(model, reg, every):
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    for optimizer in optimizers:
        reg.attach(optimizer, every=every)
    for x, y in BATCHES:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield


@pytest.mark.parametrize(
    "train",
    [plainly, compiled, fused, with_closures, accumulating, scaled, with_two_optimizers],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("make", [KronALASSO, ALASSO, SI, lambda m: KronALASSO(m, gamma=0.5)])
def test_it_is_bitwise_a_loop_that_consolidates(make, train):
    model, reg = by_itself(make, train, 3)
    other, own = by_hand(make, train, 3)
    assert reg.tasks == own.tasks >= 2 and reg.steps == own.steps > 0
    assert same(weights(model), weights(other))
    assert same(reg.importance().values(), own.importance().values())


@pytest.mark.parametrize("make", [EWC, OnlineEWC, MAS, IMM])
def test_a_method_that_needs_data_refuses_and_is_not_attached(make):
    model = mlp(6, 12, 4)
    reg = make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AlassoError, match=f"{reg.method} does not learn from steps alone"):
        reg.attach(optimizer, every=3)
    assert not reg.is_attached and reg.consolidates_every is None


@pytest.mark.parametrize("every", [0, -1, 2.5, "3", True])
def test_every_is_a_number_of_steps(every):
    model = mlp(6, 12, 4)
    with pytest.raises(AlassoError, match="every must be a whole number of steps"):
        SI(model).attach(torch.optim.SGD(model.parameters(), lr=0.1), every=every)


def test_attaching_again_keeps_it_and_detaching_ends_it():
    model = mlp(6, 12, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = SI(model).attach(optimizer, every=2)
    reg.attach(optimizer)
    run(model, optimizer, BATCHES[:4])
    assert reg.tasks == 2
    reg.detach()
    reg.attach(optimizer)
    run(model, optimizer, BATCHES[:4])
    assert (reg.tasks, reg.steps) == (2, 4)


def test_a_training_that_resumes_goes_on_bit_for_bit():
    def resumed(at):
        torch.manual_seed(0)
        model = mlp(6, 12, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reg = KronALASSO(model).attach(optimizer, every=3)
        run(model, optimizer, BATCHES[:at])
        saved = copy.deepcopy((model.state_dict(), reg.state_dict()))
        model = mlp(6, 12, 4)
        model.load_state_dict(saved[0])
        reg = KronALASSO(model)
        reg.load_state_dict(saved[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reg.attach(optimizer)
        run(model, optimizer, BATCHES[at:])
        return model, reg

    model, reg = resumed(7)
    other, own = by_itself(KronALASSO, plainly_sgd, 3)
    assert reg.tasks == own.tasks == 4
    assert same(weights(model), weights(other))


def plainly_sgd(model, reg, every):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer, every=every)
    for batch in BATCHES:
        yield step(model, optimizer, batch)


@pytest.mark.parametrize("every", [0, True, 1.5, "3"])
def test_a_damaged_number_is_refused(every):
    reg = SI(mlp(6, 12, 4))
    with pytest.raises(AlassoError, match="it consolidates every"):
        reg.load_state_dict({**reg.state_dict(), "every": every})


def test_a_state_of_an_earlier_version_loads():
    model = mlp(6, 12, 4)
    reg = SI(model).attach(torch.optim.SGD(model.parameters(), lr=0.1), every=5)
    saved = reg.state_dict()
    del saved["every"]
    reg.load_state_dict(saved)
    assert reg.consolidates_every == 5
