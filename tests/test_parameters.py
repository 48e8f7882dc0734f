"""Parameters that come and go, and those that no attached optimizer trains."""

import copy
import gc
import pickle
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import alasso.optim
from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError, KronALASSO, OnlineEWC

from helpers import mlp, run, same, toy_tasks, weights

BATCHES = toy_tasks(1, batches=8)[0]


@pytest.mark.parametrize("make", [EWC, MAS])
def test_a_method_from_data_that_was_never_attached_says_that_nothing_was_protected(make):
    model = mlp(6, 5, 4)
    reg = make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, optimizer, BATCHES)
    reg.consolidate(BATCHES)  # before the first task there is nothing to protect
    run(model, optimizer, BATCHES)
    with pytest.warns(UserWarning, match=r"nothing protected the past during this task; call attach\(optimizer\)"):
        reg.consolidate(BATCHES)


def test_a_penalty_added_by_hand_is_protection_enough():
    model = mlp(6, 5, 4)
    reg = EWC(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in BATCHES:
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) + reg.penalty()).backward()
            optimizer.step()
        reg.consolidate(BATCHES)
    assert reg.tasks == 2


def test_importance_measured_on_several_data_sets_in_a_row_is_no_mistake():
    _, optimizer, reg = after_a_task(EWC)
    for batch in BATCHES[:3]:
        reg.consolidate([batch])
    assert reg.tasks == 4 and optimizer.param_groups


# -- parameters that nobody trains ----------------------------------------------------------------------------------


def after_a_task(make=SI, optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = mlp(6, 5, 4)
    optimizer = optimizer(model.parameters(), lr=0.1)
    reg = make(model).attach(optimizer)
    run(model, optimizer, BATCHES)
    reg.consolidate(BATCHES)
    return model, optimizer, reg


PULLED = r"2\.bias, 2\.weight were replaced by new parameters since the last task, .* reg.forget\(parameter\)"


def said_by(act):
    """The warnings of a call, which elsewhere in these tests would be errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught]


def attach_though_begun_anew(reg, optimizer):
    with pytest.warns(UserWarning, match=PULLED):
        reg.attach(optimizer)


def with_a_new_optimizer(model, optimizer, reg):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_though_begun_anew(reg, optimizer)  # the old one stays attached, too
    run(model, optimizer, BATCHES)


def with_the_new_head_added(model, optimizer, reg):
    optimizer.add_param_group({"params": model[2].parameters()})
    with pytest.warns(UserWarning, match=PULLED):
        run(model, optimizer, BATCHES)


def with_the_new_head_in_the_old_ones_place(model, optimizer, reg):
    optimizer.param_groups[0]["params"][2:] = model[2].parameters()
    with pytest.warns(UserWarning, match=PULLED):
        run(model, optimizer, BATCHES)


@pytest.mark.parametrize(
    "go_on", [with_a_new_optimizer, with_the_new_head_added, with_the_new_head_in_the_old_ones_place]
)
def test_a_new_head_that_is_pulled_to_the_old_one_is_noticed_wherever_it_is_trained(go_on):
    model, optimizer, reg = after_a_task()
    model[2] = nn.Linear(5, 4)
    go_on(model, optimizer, reg)
    anchor = reg.anchor()["2.weight"]
    assert not torch.equal(anchor, model[2].weight)  # still the old head's
    assert reg.importance()["2.weight"].any()
    reg.consolidate()  # a second warning would be an error
    assert torch.equal(reg.anchor()["2.weight"], model[2].weight)


def test_a_head_that_is_in_no_optimizer_any_more_is_not_kept_alive():
    torch.manual_seed(0)
    model = mlp(6, 5, 4)
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    reg = SI(model).attach(optimizer)
    run(model, optimizer, BATCHES)
    reg.consolidate()
    old = weakref.ref(model[2].weight)
    optimizer.param_groups.pop()
    model[2] = nn.Sequential(nn.Linear(5, 4))  # by other names
    optimizer.add_param_group({"params": model[2].parameters()})
    reg.attach(optimizer)
    run(model, optimizer, BATCHES)
    reg.consolidate()
    optimizer.state.clear()
    gc.collect()
    assert old() is None


# -- parameters that begin anew, and are pulled to where others were --------------------------------------------------


def wider(head, copied):
    new = nn.Linear(5, 7)
    if copied:
        with torch.no_grad():
            new.weight[:4], new.bias[:4] = head.weight, head.bias
    return new


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("new_head", [lambda head: nn.Linear(5, 4), partial(wider, copied=False)])
@pytest.mark.parametrize("make", [SI, ALASSO, EWC, MAS])
def test_a_new_head_in_the_place_of_a_protected_one_is_said_and_forget_frees_it(make, new_head, detached):
    if make is EWC and detached:
        pytest.skip("its anchor is the centre of all springs, which says nothing of the last weights")
    model, _, reg = after_a_task(make)
    if detached:  # then nothing is left of the old head but its anchor
        reg.detach()
    model[2] = new_head(model[2])
    with pytest.warns(UserWarning, match=PULLED):
        reg.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    pulled = float(reg.penalty())
    for parameter in model[2].parameters():
        reg.forget(parameter)
    assert abs(float(reg.penalty())) < 1e-9 < pulled
    reg.attach(torch.optim.SGD(model.parameters(), lr=0.1))  # said once


def in_another_precision(model, dtype):
    for layer in (model[0], model[2]):
        layer.weight, layer.bias = (nn.Parameter(p.detach().to(dtype)) for p in (layer.weight, layer.bias))
    return model


def made_wider(model):
    model[2] = wider(model[2], copied=True)
    return model


def another_object(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    return model


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        partial(in_another_precision, dtype=torch.float64),
        partial(in_another_precision, dtype=torch.bfloat16),
        made_wider,
        another_object,
        lambda model: model,
    ],
)
@pytest.mark.parametrize("make", [SI, EWC, MAS, partial(IMM, transfer="l2")])
def test_a_head_that_was_made_from_the_old_one_is_not(change, make, detached):
    model, optimizer, reg = after_a_task(make)
    run(model, optimizer, BATCHES)
    reg.consolidate(BATCHES)
    if detached:
        reg.detach()
        del optimizer
    optimizer = torch.optim.SGD(change(model).parameters(), lr=0.1)
    assert said_by(lambda: reg.attach(optimizer)) == []


def test_nor_is_what_has_no_past_to_pull_it():
    model, _, reg = after_a_task()
    for _ in range(2):  # made once more before it was trained
        model.added = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert said_by(lambda optimizer=optimizer: reg.attach(optimizer)) == []
    frozen_body = nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(frozen_body[1].parameters(), lr=0.1)
    reg = SI(frozen_body).attach(optimizer)
    run(frozen_body, optimizer, BATCHES)
    reg.consolidate()
    frozen_body[0] = nn.Linear(6, 5).requires_grad_(False)
    assert said_by(lambda: reg.attach(optimizer)) == []


def test_it_is_said_though_another_optimizer_was_refused_first():
    model, _, reg = after_a_task()
    model[2] = nn.Linear(5, 4)
    with pytest.raises(AlassoError, match="holds none"):
        reg.attach(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    attach_though_begun_anew(reg, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("outputs", [2, 4, 7])
@pytest.mark.parametrize("make", [SI, EWC])
def test_forget_before_attach_needs_no_warning_and_takes_any_shape(make, outputs):
    model, _, reg = after_a_task(make)
    model[2] = nn.Linear(5, outputs)
    for parameter in model[2].parameters():
        reg.forget(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer)
    assert abs(float(reg.penalty())) < 1e-9
    batches = [(x, y % outputs) for x, y in BATCHES]
    run(model, optimizer, batches)
    reg.consolidate(batches)
    assert reg.importance()["2.weight"].shape == (outputs, 5)


def test_a_smaller_head_is_told_of_forget():
    model, _, reg = after_a_task()
    model[2] = nn.Linear(5, 2)
    with pytest.raises(AlassoError, match=r"may grow, not shrink: if it is to begin anew, pass it to forget\(\) first"):
        reg.attach(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_know_their_own_model(copied):
    model, optimizer, reg = after_a_task()
    reg.detach()
    other, its_reg = copied((model, reg))
    run(model, optimizer, BATCHES)  # the first one goes on
    its_reg.attach(its_optimizer := torch.optim.SGD(other.parameters(), lr=0.1))
    assert float(its_reg.penalty()) == 0
    run(other, its_optimizer, BATCHES)
    its_reg.consolidate()
    assert (its_reg.tasks, reg.tasks) == (2, 1)


class HoldsItsRegularizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(6, 5, 4)
        self.past = ALASSO(self, xi=1e-3)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_holds_its_regularizer_can_be_copied(copied):
    model = HoldsItsRegularizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.past.attach(optimizer)
    run(model, optimizer, BATCHES)
    model.past.consolidate()
    other = copied(model)
    assert other.past.model is other and not other.past.is_attached
    with torch.no_grad():
        for m in (model, other):
            m.layers[0].weight += 0.1
    assert other.past.penalty() == model.past.penalty() > 0
    assert other.past.protected.name_of(other.layers[0].weight) == "layers.0.weight"


@pytest.mark.parametrize("make", [partial(ALASSO, c=100.0), partial(EWC, lam=1e4)])
@pytest.mark.parametrize("optimizer_kind", [torch.optim.SGD, alasso.optim.SGD])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda all_three: pickle.loads(pickle.dumps(all_three))])
def test_a_copy_made_while_attached_is_attached_again_and_trains_as_the_first_one(make, optimizer_kind, copied):
    model = mlp(6, 5, 4)
    optimizer = optimizer_kind(model.parameters(), lr=0.01)
    reg = make(model).attach(optimizer)
    run(model, optimizer, BATCHES)
    reg.consolidate(BATCHES)
    other, its_optimizer, its_reg = copied((model, optimizer, reg))
    assert reg.is_attached and not its_reg.is_attached
    its_reg.attach(its_optimizer)
    for m, o in ((model, optimizer), (other, its_optimizer)):
        run(m, o, BATCHES[:5])
    assert its_reg.steps == reg.steps == 5
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_an_excluded_head_may_be_replaced():
    model = mlp(6, 5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = SI(model, exclude="2.*").attach(optimizer)
    run(model, optimizer, BATCHES)
    reg.consolidate()
    model[2] = nn.Linear(5, 4)
    assert said_by(lambda: reg.attach(torch.optim.SGD(model.parameters(), lr=0.1))) == []


# -- patterns of names ------------------------------------------------------------------------------------------------


def learned(make, **names):
    torch.manual_seed(0)
    model = mlp(6, 5, 5, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reg = make(model, **names).attach(optimizer)
    for task in toy_tasks(2):
        run(model, optimizer, task)
        reg.consolidate(task)
    return weights(model), reg.state_dict()["parameters"]


@pytest.mark.parametrize("make", [ALASSO, KronALASSO, SI, EWC, OnlineEWC, MAS, partial(IMM, transfer="l2")])
@pytest.mark.parametrize(
    ("included", "complement"),
    [
        ({"include": "[24].*"}, "0.*"),
        ({"include": ["2.*", "4.*"]}, ["0.weight", "0.bias"]),
        ({"include": "*.weight", "exclude": "0.*"}, ["0.*", "*.bias"]),
        ({"include": None}, ()),
    ],
)
def test_to_include_is_to_exclude_all_else(make, included, complement):
    weights, states = learned(make, **included)
    expected_weights, expected_states = learned(make, exclude=complement)
    assert same(weights, expected_weights) and states.keys() == expected_states.keys()
    assert all(same(states[name].values(), expected_states[name].values()) for name in states)


def test_a_tied_parameter_is_included_by_any_of_its_names_unless_one_is_excluded():
    model = nn.ModuleDict({"embedding": nn.Linear(3, 3), "head": nn.Linear(3, 3)})
    model["head"].weight = model["embedding"].weight
    assert list(SI(model, include="head.*").anchor()) == ["embedding.weight", "head.bias"]
    assert list(SI(model, include="embedding.*").anchor()) == ["embedding.weight", "embedding.bias"]
    assert list(SI(model, include="head.*", exclude="embedding.*").anchor()) == ["head.bias"]


def test_what_comes_later_is_included_by_its_name():
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "a": nn.Linear(3, 2)})
    reg = SI(model, include=["body.*", "a.*"])
    model["b"], model["a"] = nn.Linear(3, 2), nn.ModuleList([nn.Linear(3, 2)])
    for each in (reg, copy.deepcopy(reg)):
        each.look()
        assert list(dict(each.protected)) == ["body.weight", "body.bias", "a.0.weight", "a.0.bias"]


def test_include_takes_names_that_are_there():
    model = mlp(6, 5, 4)
    with pytest.raises(AlassoError, match=r"^include='3\.\*' matches no parameter; the model has 0\.weight, 0\.bias"):
        SI(model, include=["0.*", "3.*"])
    with pytest.raises(AlassoError, match=r"^include takes patterns of names, as 'head\.\*', not Linear"):
        SI(model, include=model[0])
    with pytest.raises(AlassoError, match=r"^include names nothing to protect; leave it out to protect all"):
        SI(model, include=[])


def test_a_state_of_other_parameters_is_refused():
    reg = SI(mlp(6, 5, 4), include="0.*")
    with pytest.raises(AlassoError, match=r"lacks \(another model, or another exclude or include\?"):
        reg.load_state_dict(SI(mlp(6, 5, 4)).state_dict())


@pytest.mark.parametrize("argument", ["exclude", "include"])
@pytest.mark.parametrize("pattern", ["2", "2."])
def test_the_name_of_a_module_is_no_pattern_but_what_is_meant_is_said(argument, pattern):
    with pytest.raises(
        AlassoError, match=r"matches no parameter; did you mean '2\.\*', or another of 0\.weight, 0\.bias"
    ):
        SI(mlp(6, 5, 4), **{argument: pattern})


def test_patterns_that_leave_nothing_are_refused():
    with pytest.raises(AlassoError, match="exclude leaves nothing of the model to protect"):
        ALASSO(nn.Linear(3, 2), include="weight", exclude="*")
