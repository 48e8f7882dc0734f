"""Steps of optimizers that are not attached: counted, and said at the end of the task where they are most of it."""

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
from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError

from helpers import mlp, run, step, toy_tasks

BATCHES = toy_tasks(1, batches=8)[0]


def trained(make=SI, seen=2, unseen=0):
    """A model whose regularizer saw some of its steps; the others were another optimizer's."""
    torch.manual_seed(0)
    model = mlp(6, 5, 4)
    reg = make(model)
    optimizer, other = (torch.optim.Adam(model.parameters(), lr=0.01) for _ in range(2))
    reg.attach(optimizer)
    run(model, optimizer, BATCHES[:seen])
    run(model, other, BATCHES[:unseen])
    return model, optimizer, other, reg


@pytest.mark.parametrize("make", [ALASSO, SI])
def test_a_task_mostly_trained_by_another_optimizer_is_one_clear_sentence(make):
    _, _, _, reg = trained(make, seen=2, unseen=8)
    with pytest.warns(UserWarning, match=r"seen only 2 of 10 optimizer steps .* attach\(\) every") as caught:
        reg.consolidate()
    assert [warning.filename for warning in caught] == [__file__]  # said of the user's own line
    assert (reg.tasks, reg.steps, reg.unseen_steps) == (1, 0, 0)


def test_the_count_begins_anew_with_every_task():
    model, optimizer, other, reg = trained(seen=4, unseen=3)
    reg.consolidate()
    run(model, other, BATCHES[:3])
    run(model, optimizer, BATCHES[:2])
    with pytest.warns(UserWarning, match="only 2 of 5"):
        reg.consolidate()


# The tests' settings make a warning an error: what follows must give none.


@pytest.mark.parametrize(("seen", "unseen"), [(2, 0), (8, 3)])
def test_nothing_is_said_where_most_steps_were_seen(seen, unseen):
    _, _, _, reg = trained(seen=seen, unseen=unseen)
    assert reg.unseen_steps == unseen
    reg.consolidate()


@pytest.mark.parametrize("make", [EWC, MAS])
def test_methods_that_need_no_path_say_nothing(make):
    _, _, _, reg = trained(make, seen=1, unseen=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reg.consolidate(BATCHES)
    assert not said and reg.tasks == 1


def test_training_before_the_first_attached_step_has_no_path_to_miss():
    torch.manual_seed(0)
    model = mlp(6, 5, 4)
    reg = SI(model)
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    run(model, other, BATCHES)
    reg.attach(optimizer)
    run(model, other, BATCHES)
    run(model, optimizer, BATCHES[:2])
    assert reg.unseen_steps == 0
    reg.consolidate()


def test_steps_after_detach_count():
    model, optimizer, _, reg = trained(seen=2)
    reg.detach()
    run(model, optimizer, BATCHES)
    assert (reg.steps, reg.unseen_steps) == (2, 8)


def test_weights_that_are_clipped_or_restored_are_not_steps():
    model, optimizer, _, reg = trained(seen=1)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for batch in BATCHES:
        step(model, optimizer, batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
    model.load_state_dict(kept)
    assert reg.unseen_steps == 0
    reg.consolidate()


def test_other_models_and_parameters_without_a_gradient_do_not_count():
    _, _, other, reg = trained(seen=1)
    stranger = mlp(6, 5, 4)
    run(stranger, torch.optim.SGD(stranger.parameters(), lr=0.1), BATCHES)
    other.zero_grad()
    other.step()
    assert reg.unseen_steps == 0


def test_excluded_parameters_may_be_trained_by_whom_one_likes():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    reg = SI(model, exclude=["1.*"]).attach(torch.optim.SGD(model[0].parameters(), lr=0.1))
    head = torch.optim.SGD(model[1].parameters(), lr=0.1)
    run(model, head, BATCHES)
    assert reg.unseen_steps == 0


class CallsItsParent(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_that_calls_its_parents_step_counts_once():
    model, _, _, reg = trained(seen=1)
    run(model, CallsItsParent(model.parameters(), lr=0.1), BATCHES)
    assert reg.unseen_steps == 8


def test_a_closure_that_passes_the_regularizer_by_counts():
    model, _, other, reg = trained(seen=1)
    x, y = BATCHES[0]

    def closure():
        other.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    other.step(closure)
    assert reg.unseen_steps == 1


class Wraps(torch.optim.Optimizer):
    """An optimizer around another one, as lookahead is."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("attach_to", ["wrapper", "inner"])
def test_an_optimizer_within_another_makes_one_step_that_is_seen(attach_to):
    torch.manual_seed(0)
    model = mlp(6, 5, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper = Wraps(inner)
    reg = SI(model).attach(wrapper if attach_to == "wrapper" else inner)
    run(model, wrapper, BATCHES)
    assert (reg.steps, reg.unseen_steps) == (8, 0)
    reg.consolidate()


def test_a_step_that_raised_is_no_step():
    model, _, other, reg = trained(seen=1)

    def broken():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        other.step(broken)
    step(model, other, BATCHES[0])
    assert reg.unseen_steps == 1


def test_counting_keeps_no_regularizer_alive():
    model, optimizer, other, reg = trained(seen=1, unseen=1)
    gone = weakref.ref(reg)
    reg.detach()
    del reg
    gc.collect()
    assert gone() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, optimizer, BATCHES)
        run(model, other, BATCHES)


def test_a_wrapper_around_an_optimizer_makes_one_step_that_is_not_seen():
    model, _, _, reg = trained(seen=1)
    run(model, Wraps(torch.optim.SGD(model.parameters(), lr=0.1)), BATCHES)
    assert (reg.steps, reg.unseen_steps) == (1, 8)


def test_an_optimizer_of_another_model_that_takes_over_this_ones_parameters_counts():
    model, _, _, reg = trained(seen=1)
    stranger = mlp(6, 5, 4)
    foreign = torch.optim.SGD(stranger.parameters(), lr=0.1)
    run(stranger, foreign, BATCHES)
    foreign.add_param_group({"params": list(model.parameters())})
    run(model, foreign, BATCHES[:3])
    assert reg.unseen_steps == 3


def test_the_count_is_part_of_the_state():
    model, _, _, reg = trained(seen=2, unseen=8)
    resumed = SI(model)
    resumed.load_state_dict(reg.state_dict())
    assert (resumed.steps, resumed.unseen_steps) == (2, 8)


@pytest.mark.parametrize("make", [EWC, MAS])
def test_a_method_from_data_that_was_never_attached_says_that_nothing_was_protected(make):
    model = mlp(6, 5, 4)
    reg = make(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, optimizer, BATCHES)
    reg.consolidate(BATCHES)  # before the first task there is nothing to protect
    run(model, optimizer, BATCHES)
    with pytest.warns(UserWarning, match=r"none of 8 optimizer steps .* attach\(\) the optimizer, or add penalty\(\)"):
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
    _, _, _, reg = trained(EWC, seen=2)
    for batch in BATCHES[:3]:
        reg.consolidate([batch])
    assert reg.tasks == 3


# -- parameters that nobody trains ----------------------------------------------------------------------------------


def after_a_task(make=SI, optimizer=torch.optim.SGD):
    torch.manual_seed(0)
    model = mlp(6, 5, 4)
    optimizer = optimizer(model.parameters(), lr=0.1)
    reg = make(model).attach(optimizer)
    run(model, optimizer, BATCHES)
    reg.consolidate(BATCHES)
    return model, optimizer, reg


PULLED = r"2\.bias, 2\.weight: replaced since the last task by parameters with weights of their own, .* forget\(\)"


def said_by(act):
    """The warnings of a call, which elsewhere in these tests would be errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught]


NOBODY_TRAINS = (
    r"new in the model since attach\(\), and held by no optimizer that was seen to step: 2\.weight, 2\.bias; "
)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, alasso.optim.SGD])
@pytest.mark.parametrize("make", [SI, ALASSO, EWC, MAS])
def test_a_head_that_was_replaced_and_is_in_no_optimizer_is_said_once(make, optimizer):
    model, optimizer, reg = after_a_task(make, optimizer)
    model[2] = nn.Linear(5, 4)
    attach_though_begun_anew(reg, optimizer)  # the same again: changes nothing
    run(model, optimizer, BATCHES)
    with pytest.warns(UserWarning, match=NOBODY_TRAINS) as caught:
        reg.consolidate(BATCHES)
    assert [warning.filename for warning in caught] == [__file__]
    run(model, optimizer, BATCHES)
    reg.consolidate(BATCHES)  # a second warning would be an error


@pytest.mark.parametrize("make", [SI, EWC, partial(IMM, merge="mode")])
def test_a_head_that_was_replaced_within_the_first_task_is_said(make):
    torch.manual_seed(0)
    model = mlp(6, 5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = make(model).attach(optimizer)
    model[2] = nn.Linear(5, 4)
    run(model, optimizer, BATCHES)
    with pytest.warns(UserWarning, match=NOBODY_TRAINS) as caught:
        reg.consolidate(BATCHES)
    assert [warning.filename for warning in caught] == [__file__]


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


def with_an_attached_optimizer_of_its_own(model, optimizer, reg):
    of_head = torch.optim.Adam(model[2].parameters())
    attach_though_begun_anew(reg, of_head)
    run(model, optimizer, BATCHES)
    run(model, of_head, BATCHES)


def with_an_optimizer_of_its_own_that_is_gone_again(model, optimizer, reg):
    run(model, torch.optim.Adam(model[2].parameters()), BATCHES[:2])
    gc.collect()
    run(model, optimizer, BATCHES)


def frozen(model, optimizer, reg):
    model[2].requires_grad_(False)
    run(model, optimizer, BATCHES)


def only_for_a_while(model, optimizer, reg):
    model[2] = reg.old_head
    run(model, optimizer, BATCHES)


def trained_before_by_another_that_was_attached(model, optimizer, reg):
    earlier = torch.optim.SGD(model[2].parameters(), lr=0.1)
    attach_though_begun_anew(reg, earlier)
    run(model, earlier, BATCHES)
    reg.detach()
    head = model[2]
    model[2] = reg.old_head
    attach_though_begun_anew(reg, optimizer)  # the other way round
    run(model, optimizer, BATCHES)
    model[2] = head


@pytest.mark.parametrize("make", [SI, EWC])
@pytest.mark.parametrize(
    "go_on",
    [
        with_a_new_optimizer,
        with_the_new_head_added,
        with_the_new_head_in_the_old_ones_place,
        with_an_attached_optimizer_of_its_own,
        with_an_optimizer_of_its_own_that_is_gone_again,
        frozen,
        only_for_a_while,
        trained_before_by_another_that_was_attached,
    ],
)
def test_a_head_that_was_replaced_with_a_purpose_is_not(go_on, make):
    model, optimizer, reg = after_a_task(make)
    reg.old_head = model[2]
    model[2] = nn.Linear(5, 4)
    go_on(model, optimizer, reg)
    reg.consolidate(BATCHES)
    assert reg.tasks == 2


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


def test_a_head_that_was_added_and_is_in_no_optimizer_is_said_if_it_is_used():
    model, optimizer, reg = after_a_task()
    used, unused = nn.Linear(4, 3), nn.Linear(4, 3)
    model.used, model.unused = used, unused  # a Sequential goes through them all
    model.unused.forward = lambda x: x
    run(model, optimizer, [(x, y % 3) for x, y in BATCHES])
    new = r"new in the model since attach\(\), .*: used\.weight, used\.bias; "
    with pytest.warns(UserWarning, match=new):
        reg.consolidate()


def test_a_parameter_that_was_in_no_optimizer_from_the_beginning_is_not():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    reg = SI(model).attach(optimizer)
    model[1] = nn.Linear(5, 4)
    run(model, optimizer, BATCHES)
    assert said_by(reg.consolidate) == []


def test_an_old_head_within_a_new_one_is_not():
    model, optimizer, reg = after_a_task()
    model[2] = nn.Sequential(model[2], nn.ReLU())  # by another name
    run(model, optimizer, BATCHES)
    assert said_by(reg.consolidate) == []
    nn.utils.parametrizations.orthogonal(model[0])
    run(model, optimizer, BATCHES)
    assert said_by(reg.consolidate) == []


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
    with pytest.warns(UserWarning, match=PULLED) as caught:
        reg.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    assert [warning.filename for warning in caught] == [__file__]
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
    assert other.past.name_of(other.layers[0].weight) == "layers.0.weight"


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


def test_steps_of_an_optimizer_that_was_not_attached_are_named_where_no_other_stepped():
    model, _, reg = after_a_task()
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), BATCHES)
    with pytest.raises(AlassoError, match=rf"; {len(BATCHES)} were made by an optimizer that is not attached: attach"):
        reg.consolidate()


@pytest.mark.parametrize("pattern", ["2", "2."])
def test_the_name_of_a_module_is_no_pattern_but_what_is_meant_is_said(pattern):
    with pytest.raises(
        AlassoError, match=r"matches no parameter; did you mean '2\.\*', or another of 0\.weight, 0\.bias"
    ):
        SI(mlp(6, 5, 4), exclude=pattern)
