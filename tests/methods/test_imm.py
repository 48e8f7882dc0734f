"""Incremental moment matching: merges worked by hand, against the closed formulas, and the transfer techniques."""

import copy

import pytest
import torch
from torch import nn

from alasso import IMM, AlassoError
from alasso.importance import fisher
from alasso.methods.imm import DropTransfer, IMMState, IMMSurrogate, drop_transfer

from helpers import mlp, run, same, toy_tasks, weights


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def states(surrogate, thetas, fishers):
    """The state after each task, and the merged weights."""
    state = surrogate.init(torch.full_like(thetas[0], 99.0))
    for theta, F in zip(thetas, fishers, strict=True):
        state = surrogate.consolidate(state, theta, F)
        yield state, surrogate.merged(state, theta)


def assert_close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


# -- merging -------------------------------------------------------------------------------------------------


def test_two_and_three_gaussians_worked_by_hand():
    """Means 1, 3, 8 with precisions 1, 3, 1 and means 0, 4, −1 with precisions 2, 2, 4."""
    thetas = [tensor(1, 0), tensor(3, 4), tensor(8, -1)]
    fishers = [tensor(1, 2), tensor(3, 2), tensor(1, 4)]
    # Mean of two: ((1 + 3)/2, (0 + 4)/2); of three: (12/3, 3/3).
    mean = [merged.tolist() for _, merged in states(IMMSurrogate("mean"), thetas, [None] * 3)]
    assert mean == [[1, 0], [2, 2], [4, 1]]
    # Mode of two: ((1·1 + 3·3)/4, (2·0 + 2·4)/4) = (2.5, 2); of three: ((1 + 9 + 8)/5, (0 + 8 − 4)/8) = (3.6, 0.5).
    mode = [merged for _, merged in states(IMMSurrogate("mode"), thetas, fishers)]
    assert_close(torch.stack(mode), torch.stack([tensor(1, 0), tensor(2.5, 2), tensor(3.6, 0.5)]))


def test_mode_is_the_highest_point_of_the_product_of_gaussians():
    """At Σ F_k θ_k / Σ F_k the summed log-densities Σ −½ F_k (θ − θ_k)² have no slope."""
    thetas, fishers = torch.randn(4, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64)
    *_, (_, merged) = states(IMMSurrogate("mode"), thetas, fishers)
    assert_close((fishers * (merged - thetas)).sum(0), torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("start", ["merged", "last"])
def test_one_task_after_another_equals_all_at_once(start):
    thetas, fishers = torch.randn(7, 3, 4, dtype=torch.float64), torch.rand(7, 3, 4, dtype=torch.float64)
    for k, (_, merged) in enumerate(states(IMMSurrogate("mean", start=start), thetas, fishers), 1):
        assert_close(merged, thetas[:k].mean(0))
    for k, (state, merged) in enumerate(states(IMMSurrogate("mode", start=start), thetas, fishers), 1):
        assert_close(merged, (fishers[:k] * thetas[:k]).sum(0) / fishers[:k].sum(0))
        assert torch.equal(state.anchor, merged if start == "merged" else thetas[k - 1])


def test_mode_with_equal_precisions_is_the_mean():
    thetas, F = torch.randn(5, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.1
    for last_weight in (None, 0.3):
        mean = states(IMMSurrogate("mean", last_weight=last_weight), thetas, [None] * 5)
        mode = states(IMMSurrogate("mode", last_weight=last_weight), thetas, [F] * 5)
        for (_, left), (_, right) in zip(mean, mode, strict=True):
            assert_close(left, right)


def test_last_weight_mixes_the_newest_task_with_the_merged_past():
    thetas, fishers = [tensor(0), tensor(4), tensor(8)], [tensor(1), tensor(3), tensor(2)]
    # w = ¼. Mean: 0; ¾·0 + ¼·4 = 1; ¾·1 + ¼·8 = 2.75.
    mean = [merged.item() for _, merged in states(IMMSurrogate("mean", last_weight=0.25), thetas, [None] * 3)]
    assert mean == [0, 1, 2.75]
    # Mode: precision 1; ¾·1 + ¼·3 = 1.5; ¾·1.5 + ¼·2 = 1.625.  Fθ: 0; ¼·12 = 3; ¾·3 + ¼·16 = 6.25.
    got = list(states(IMMSurrogate("mode", last_weight=0.25), thetas, fishers))
    assert [state.precision.item() for state, _ in got] == [1, 1.5, 1.625]
    assert_close(torch.cat([merged for _, merged in got]), tensor(0, 2, 6.25 / 1.625))


@pytest.mark.parametrize("last_weight", [None, 0.4])
def test_where_no_task_has_any_precision_the_latest_weights_are_kept(last_weight):
    thetas = [tensor(1, 1, 1), tensor(5, 5, 5)]
    fishers = [tensor(0, 0, 2), tensor(0, 3, 0)]
    *_, (state, merged) = states(IMMSurrogate("mode", last_weight=last_weight), thetas, fishers)
    assert merged.tolist() == [5, 5, 1]  # no one, only the second, only the first
    assert IMMSurrogate("mode").importance(state).tolist() == [0, 1, 1]


def test_a_precision_too_small_to_divide_by_counts_as_none():
    tiny = torch.tensor([1e-42, 1e-30])  # the first is no normal number in float32
    surrogate = IMMSurrogate("mode")
    state = surrogate.consolidate(surrogate.init(torch.zeros(2)), torch.tensor([0.3, 0.3]), tiny)
    torch.testing.assert_close(surrogate.merged(state, torch.tensor([0.3, 0.3])), torch.tensor([0.3, 0.3]))


def test_a_weight_that_stood_still_has_no_say_in_the_mean_unless_asked_for():
    first, second = tensor(0, 2), tensor(6, 2)  # started from zeros: one moves in task 2 only, the other in task 1 only
    surrogate = IMMSurrogate("mean")
    state = surrogate.consolidate(surrogate.init(tensor(0, 0)), first)
    assert surrogate.importance(state).tolist() == [0, 1]
    assert surrogate.consolidate(state, second).anchor.tolist() == [6, 2]
    surrogate = IMMSurrogate("mean", count_unmoved=True)
    state = surrogate.consolidate(surrogate.init(tensor(0, 0)), first)
    assert surrogate.consolidate(state, second).anchor.tolist() == [3, 2]


# -- transfer ------------------------------------------------------------------------------------------------


def test_penalty_grad_is_the_derivative_of_penalty_and_only_l2_has_one():
    anchor, zero = torch.randn(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    omega = tensor(1, 0, 1).expand(2, 3)
    state = IMMState(anchor, omega, zero, zero)
    theta = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for transfer in ("weight", "l2", "drop", "l2-drop"):
        surrogate = IMMSurrogate(transfer=transfer, lam=0.7)
        penalty = surrogate.penalty(theta, state)
        (expected,) = torch.autograd.grad(penalty, theta)
        assert_close(surrogate.penalty_grad(theta.detach(), state), expected)
        factor = 0.7 if "l2" in transfer else 0.0
        assert_close(penalty, factor * (omega * (theta - anchor) ** 2).sum())


@pytest.mark.parametrize("merge", ["mean", "mode"])
def test_l2_transfer_pulls_every_weight_as_published(merge):
    """Lee et al. pay λ‖θ − θ₁‖² for all weights: also for those of an input that was always 0 in the first task."""
    torch.manual_seed(0)
    lam, model, (first, second) = 0.5, mlp(6, 8, 4, dtype=torch.float64), toy_tasks(2, dtype=torch.float64)
    first = [(x * (torch.arange(6) > 0), y) for x, y in first]
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg = IMM(model, merge, transfer="l2", lam=lam).attach(optimizer)
    run(model, optimizer, first)
    reg.consolidate(first)
    assert (reg.importance()["0.weight"][:, 0] == 0).all()  # they have no say in merging
    run(model, optimizer, second)

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    run(reference, optimizer, first)
    start = weights(reference)
    for x, y in second:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(reference(x), y)
        for p, old in zip(reference.parameters(), start, strict=True):
            loss = loss + lam * (p - old).square().sum()
        loss.backward()
        optimizer.step()
    for got, expected in zip(weights(model), weights(reference), strict=True):
        assert_close(got, expected)


def test_drop_transfer_worked_by_hand():
    """p = ¼: kept 8/0.75 − (¼/0.75)·2 = 10, dropped 2; on average ¾·10 + ¼·2 = 8."""
    assert_close(drop_transfer(tensor(8, 8), tensor(2, 2), torch.tensor([True, False]), 0.25), tensor(10, 2))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(5, 4), (3, 5)),
        (nn.Linear(5, 4, bias=False), (3, 2, 5)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (3, 2, 4, 4)),
        (nn.Conv1d(4, 6, 2, stride=2, groups=2), (3, 4, 7)),
    ],
)
def test_each_node_is_computed_with_its_own_transferred_weights(layer, shape):
    """A dropped node must equal the old layer's; a kept one the layer's with θ/(1−p) − p/(1−p)·θ_{k−1}."""
    layer, p = layer.double(), 0.3
    x = torch.randn(shape, dtype=torch.float64)
    old = layer(x)
    theta_prev = weights(layer)
    with DropTransfer(nn.ModuleDict({"layer": layer}), p, exclude=()):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += torch.randn_like(parameter)
        dropped = layer(x)
        layer.eval()
        evaluated = layer(x)
    assert torch.equal(evaluated, layer(x))
    with torch.no_grad():
        for parameter, prev in zip(layer.parameters(), theta_prev, strict=True):
            parameter.copy_((parameter - p * prev) / (1 - p))
    kept = layer(x)
    off = (dropped - old).abs() < 1e-12
    assert_close(dropped, torch.where(off, old, kept))
    assert 0.05 < off.double().mean() < 0.65


def test_drop_transfer_keeps_the_expectation_and_the_share_p():
    model = mlp(1, 20000, 1)
    x, before = torch.ones(1, 1), model[0](torch.ones(1, 1)).detach()
    drop = DropTransfer(model, p=0.2)
    with torch.no_grad():
        model[0].bias += 1.0
    h = model[0](x).detach() - before  # 0 where dropped, 1/(1−p) where not
    # A share has standard deviation √(0.2·0.8/20000) = 0.003, the mean 0.003/0.8; allowed are five of them.
    assert abs(float((h.abs() < 1e-5).float().mean()) - 0.2) < 0.015
    assert abs(float(h.mean()) - 1) < 0.018
    drop.remove()
    torch.testing.assert_close(model[0](x), before + 1)


def test_drop_transfer_leaves_out_the_output_layer_or_what_it_is_told_to():
    model = mlp(3, 4, 5, 2)
    for exclude, expected in ((None, [0, 2]), ("0", [2, 4]), (["0", "4"], [2]), ((), [0, 2, 4])):
        with DropTransfer(model, exclude=exclude):
            assert [i for i, layer in enumerate(model) if layer._forward_hooks] == expected
        assert not any(layer._forward_hooks for layer in model)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: IMMSurrogate("median"), "merge must be one of mean, mode"),
        (lambda: IMMSurrogate(transfer="dropout"), "transfer must be one of"),
        (lambda: IMMSurrogate(start="zero"), "start must be one of"),
        (lambda: IMMSurrogate(last_weight=1.0), "last_weight must lie between 0 and 1"),
        (lambda: IMMSurrogate(lam=-1.0), "lam must be"),
        (lambda: IMMSurrogate("mode").consolidate(IMMSurrogate().init(tensor(1)), tensor(2)), "loader"),
        (lambda: DropTransfer(mlp(2, 2, 2), p=1.0), "p, the probability"),
        (lambda: DropTransfer(mlp(2, 2, 2), exclude="head"), "matches no"),
        (lambda: DropTransfer(mlp(2, 2)), "no hidden"),
    ],
)
def test_bad_settings_are_named(make, word):
    with pytest.raises(AlassoError, match=word):
        make()


# -- the shell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("merge", "dtype"), [("mean", torch.float32), ("mode", torch.float32), ("mean", torch.bfloat16)]
)
def test_consolidation_puts_the_merged_weights_into_the_model(merge, dtype):
    model, seen = mlp(6, 8, 4, dtype=dtype), []
    reg = IMM(model, merge)
    for task in toy_tasks(3, dtype=dtype):
        run(model, torch.optim.SGD(model.parameters(), lr=0.5), task)
        F = fisher(model, task) if merge == "mode" else {n: torch.ones_like(p) for n, p in model.named_parameters()}
        seen.append({name: (F[name].float(), p.detach().float().clone()) for name, p in model.named_parameters()})
        reg.consolidate(task)
        for name, parameter in model.named_parameters():
            precision = sum(task[name][0] for task in seen)
            weighted = sum(task[name][0] * task[name][1] for task in seen)
            expected = torch.where(precision > 0, weighted / precision, parameter.float())
            tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # 8 bits of mantissa, or 24
            torch.testing.assert_close(parameter.float(), expected, rtol=tolerance, atol=1e-6)
            assert torch.equal(reg.anchor()[name], parameter.float())
    assert float(reg.penalty()) == 0.0


def test_classes_yet_to_come_are_not_averaged_with_their_initial_values():
    """Two tasks share one output layer of four rows; the mean of a task's own rows is what that task learned."""
    model = mlp(6, 8, 4)
    reg = IMM(model)
    first, second = toy_tasks(2, classes=2)
    for rows, task in ((slice(0, 2), first), (slice(2, 4), second)):
        head = nn.Sequential(model, Columns(rows))
        run(head, torch.optim.SGD(model.parameters(), lr=0.5), task)
        learned = model[2].weight.detach().clone()
        reg.consolidate()
        torch.testing.assert_close(model[2].weight.detach(), learned)


class Columns(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, x):
        return x[:, self.columns]


def test_the_paper_goes_on_from_the_last_tasks_own_weights():
    model = mlp(6, 8, 4)
    reg = IMM(model, start="last", transfer="l2", lam=0.1)
    before = weights(model)
    reg.begin_task()
    assert same(before, weights(model))
    for task in toy_tasks(2):
        reg.begin_task()
        run(model, torch.optim.SGD(model.parameters(), lr=0.5), task)
        own = weights(model)
        reg.consolidate()
    assert not same(own, weights(model))
    reg.begin_task()
    assert same(own, weights(model))
    assert float(reg.penalty()) == 0.0


def test_l2_transfer_acts_through_an_attached_optimizer():
    moved = {}
    for lam in (0.0, 10.0):
        torch.manual_seed(1)
        model = mlp(6, 8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        reg = IMM(model, transfer="l2", lam=lam).attach(optimizer)
        first, second = toy_tasks(2)
        run(model, optimizer, first)
        reg.consolidate()
        run(model, optimizer, second)
        moved[lam] = sum(float((p - reg.anchor()[n]).square().sum()) for n, p in model.named_parameters())
    assert moved[10.0] < 0.5 * moved[0.0]


def test_state_round_trip_goes_on_as_if_nothing_had_happened():
    first, second = toy_tasks(2)
    model = mlp(6, 8, 4)
    reg = IMM(model, "mode", last_weight=0.4, labels="expected")
    run(model, torch.optim.SGD(model.parameters(), lr=0.5), first)
    reg.consolidate(first)
    twin = mlp(6, 8, 4)
    twin.load_state_dict(model.state_dict())
    other = IMM(twin, "mean", labels="expected")
    other.load_state_dict(reg.state_dict())
    for each, r in ((model, reg), (twin, other)):
        run(each, torch.optim.SGD(each.parameters(), lr=0.5), second)
        r.consolidate(second)
    assert same(weights(model), weights(twin))


def test_what_cannot_be_merged_is_refused_and_nothing_changes():
    task = toy_tasks(1)[0]
    model = mlp(6, 8, 4)
    with pytest.raises(AlassoError, match="loader"):
        IMM(model, "mode").consolidate()
    reg = IMM(model)
    with pytest.raises(AlassoError, match="zero for every weight"):
        reg.consolidate()  # nothing has moved
    run(model, torch.optim.SGD(model.parameters(), lr=0.5), task)
    with torch.no_grad():
        model[0].bias[0] = float("nan")
    with pytest.raises(AlassoError, match=r"0\.bias"):
        reg.consolidate()
    assert reg.tasks == 0
