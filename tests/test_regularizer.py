"""Importance for weights whose training was not seen."""

import copy

import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError, KronALASSO, OnlineEWC
from alasso.importance import fisher, squared_output_norm

from helpers import mlp, run, same, toy_tasks, weights

TASKS = toy_tasks(2)
KINDS = [ALASSO, SI, EWC, OnlineEWC, MAS]


def pretrained():
    model = mlp(6, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(20):
        run(model, optimizer, TASKS[0])
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("importance", ["fisher", "mas"])
def test_importance_is_what_was_measured_and_the_anchor_where_the_weights_are(kind, importance):
    model = pretrained()
    reg = kind(model)
    reg.warm_start(TASKS[0], importance=importance, scale=0.5)
    measured = fisher(model, TASKS[0]) if importance == "fisher" else squared_output_norm(model, TASKS[0])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(reg.importance()[name], 0.5 * measured[name], rtol=1e-6, atol=0)
        assert torch.equal(reg.anchor()[name], parameter)
    assert reg.tasks == 1 and reg.steps == 0 and float(reg.penalty()) == 0.0


@pytest.mark.parametrize(("kind", "importance"), [(EWC, "fisher"), (OnlineEWC, "fisher"), (MAS, "mas")])
def test_for_a_method_with_data_it_is_a_first_consolidation(kind, importance):
    model = pretrained()
    warm, consolidated = kind(model), kind(model)
    warm.warm_start(TASKS[0], importance=importance)
    consolidated.consolidate(TASKS[0])
    assert same(warm.importance().values(), consolidated.importance().values())


def test_both_sides_are_unobserved():
    """Eq. 5 by hand: c(aΩ + ε)d² to the left and to the right, also where the authors would say 'moved right'."""
    model = nn.Linear(3, 2, bias=False).double()
    reg = ALASSO.as_the_authors_ran_it(model, a=2.0, c=3.0, epsilon=0.5)
    data = [(torch.randn(16, 3, dtype=torch.float64), torch.randint(2, (16,)))]
    reg.warm_start(data)
    omega = reg.importance()["weight"]
    for d in (0.1, -0.1):
        with torch.no_grad():
            model.weight.copy_(reg.anchor()["weight"] + d)
        torch.testing.assert_close(reg.penalty().detach(), (3.0 * (2.0 * omega + 0.5) * d**2).sum())
    assert not reg.state_dict()["parameters"]["weight"]["side"].any()


@pytest.mark.parametrize("merge", ["mean", "mode"])
def test_imm_counts_the_pretrained_weights_as_a_task(merge):
    model = pretrained()
    before = copy.deepcopy(model)
    reg = IMM(model, merge)
    reg.warm_start(TASKS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach(optimizer)
    run(model, optimizer, TASKS[1])
    after = copy.deepcopy(model)
    reg.consolidate(TASKS[1])
    F0 = fisher(before, TASKS[0]) if merge == "mode" else None
    F1 = fisher(after, TASKS[1]) if merge == "mode" else None
    for (name, p), old, new in zip(model.named_parameters(), before.parameters(), after.parameters(), strict=True):
        f0, f1 = (F0[name], F1[name]) if F0 else (torch.ones_like(p), torch.ones_like(p))
        known = f0 + f1 > 1e-30
        merged = torch.where(known, (f0 * old + f1 * new) / torch.where(known, f0 + f1, 1.0), new)
        torch.testing.assert_close(p.detach(), merged.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("importance", "scale"), [("fisher", 10.0), ("mas", 1.0)])
def test_it_protects_a_pretrained_model_from_its_first_task(importance, scale):
    losses = {}
    start = pretrained()
    for protect in (False, True):
        model = copy.deepcopy(start)
        reg = ALASSO(model, c=3.0, xi=1e-3)
        if protect:
            reg.warm_start(TASKS[0], importance=importance, scale=scale)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        reg.attach(optimizer)
        for _ in range(10):
            run(model, optimizer, TASKS[1])
        losses[protect] = sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in TASKS[0])
    assert losses[True] < 0.7 * losses[False]


# -- the scale that sets itself ----------------------------------------------------------------------------------


def two_domains():
    """Batches of two tasks that one network can solve: two inputs tell which it is."""
    generator, tasks = torch.Generator().manual_seed(7), []
    for t in range(2):
        rule, code = torch.randn(16, 4, generator=generator), 2.0 * torch.eye(2)[t].expand(24, 2)
        xs = torch.randn(8, 24, 16, generator=generator)
        tasks.append([(torch.cat([x, code], 1), (x @ rule).argmax(1)) for x in xs])
    return tasks


def learn(model, task, reg=None):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if reg is not None:
        reg.attach(optimizer)
    for _ in range(30):
        run(model, optimizer, task)


def right(model, task):
    return float(torch.cat([model(x).argmax(1) == y for x, y in task]).float().mean())


def test_by_default_a_warm_start_keeps_half_at_least_and_costs_little_whatever_measured_it():
    """As it was measured, the Fisher keeps nothing, and MAS lets nothing be learned."""
    old, new = two_domains()
    torch.manual_seed(0)
    start = mlp(18, 64, 64, 4)
    learn(start, old)
    plain = copy.deepcopy(start)
    learn(plain, new)
    assert right(plain, old) < 0.6
    for kind in (ALASSO, SI, KronALASSO):
        for importance in ("fisher", "mas"):
            model = copy.deepcopy(start)
            reg = kind(model)
            reg.warm_start(old, importance)
            learn(model, new, reg)
            kept = (right(model, old) - right(plain, old)) / (right(start, old) - right(plain, old))
            assert kept > 0.5, (kind, importance)
            assert right(plain, new) - right(model, new) < 0.15, (kind, importance)


@pytest.mark.parametrize("kind", [ALASSO, SI])
def test_the_scale_by_hand(kind):
    """Three times the outputs' squared change: the Fisher by its terms' slope, and MAS with its squares' total."""
    model = nn.Linear(3, 2, bias=False).double()
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randint(2, (16,))
    output = model(x).detach()
    slope = torch.softmax(output, 1) - nn.functional.one_hot(y, 2)
    fisher_by_hand = (slope[:, :, None] * x[:, None]).square().mean(0) / slope.square().sum(1).mean()
    entries = (2 * output[:, :, None] * x[:, None]).abs().mean(0)
    mas_by_hand = entries * entries.square().sum() / entries.sum() / (4 * output.square().sum(1).mean())
    for importance, by_hand in (("fisher", fisher_by_hand), ("mas", mas_by_hand)):
        reg = kind(model)
        reg.warm_start([(x[:9], y[:9]), (x[9:], y[9:])], importance)
        torch.testing.assert_close(reg.importance()["weight"], 3 * by_hand)


@pytest.mark.parametrize("kind", [ALASSO, KronALASSO])
def test_outputs_in_half_precision_have_the_same_scale(kind):
    found = []
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(0)
        model = nn.Linear(8, 50)
        with torch.no_grad():
            model.weight.mul_(60)
        reg = kind(model.to(dtype))
        reg.warm_start([torch.randn(64, 8).to(dtype)], "mas")
        found.append(float(reg.importance()["weight"].sum()))
    assert found[0] == pytest.approx(found[1], rel=0.01)


@pytest.mark.parametrize("kind", [ALASSO, KronALASSO])
def test_the_scale_knows_neither_the_unit_of_the_loss_nor_how_well_the_data_is_learned(kind):
    model = pretrained()

    def measured(**options):
        reg = kind(model)
        reg.warm_start(TASKS[0], **options)
        return torch.cat([omega.flatten() for omega in reg.importance().values()])

    def loss(output, y):
        return nn.functional.cross_entropy(output, y, reduction="none")

    torch.testing.assert_close(measured(loss=lambda output, y: 64 * loss(output, y)), measured(), rtol=1e-4, atol=0)
    for options in ({"labels": "uniform"}, {"labels": "expected"}, {"importance": "mas"}):
        assert 1 / 4 < float(measured(**options).sum() / measured().sum()) < 4
    as_it_is = {"scale": 1.0}
    assert float(measured(importance="mas", **as_it_is).sum() / measured(**as_it_is).sum()) > 100


def test_a_run_after_a_warm_start_is_saved_and_goes_on_bit_for_bit():
    model = pretrained()
    reg = ALASSO(model)
    reg.warm_start(TASKS[0])
    other = copy.deepcopy(model)
    other_reg = ALASSO(other)
    other_reg.load_state_dict(reg.state_dict())
    for m, r in ((model, reg), (other, other_reg)):
        optimizer = torch.optim.Adam(m.parameters(), lr=5e-3)
        r.attach(optimizer)
        run(m, optimizer, TASKS[1])
        r.consolidate()
    assert same(weights(model), weights(other))
    assert same(reg.importance().values(), other_reg.importance().values())


def test_mistakes_are_named():
    model = mlp(6, 4)
    reg = ALASSO(model)
    with pytest.raises(AlassoError, match="importance must be one of fisher, mas, not 'path'"):
        reg.warm_start(TASKS[0], importance="path")
    with pytest.raises(AlassoError, match="scale must be a positive number"):
        reg.warm_start(TASKS[0], scale=0.0)
    with pytest.raises(AlassoError, match="no samples"):
        reg.warm_start([])
    assert reg.tasks == 0
    reg.warm_start(TASKS[0])
    with pytest.raises(AlassoError, match="before training"):
        reg.warm_start(TASKS[0])


# -- batches and layers of pretrained models --------------------------------------------------------------------


class Tagger(nn.Module):
    """Two inputs by keyword, logits in an object: as models from the Hugging Face hub have them."""

    class Output:
        def __init__(self, logits):
            self.logits = logits

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5, padding_idx=0)
        self.place = nn.Embedding(7, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1])[None])
        x = self.mix(x).tanh() * attention_mask[..., None]
        return self.Output(self.head(x.sum(1) / attention_mask.sum(1, keepdim=True)))


def words(count, generator):
    ids = torch.randint(0, 11, (count, 7), generator=generator)
    mask = (torch.rand(count, 7, generator=generator) < 0.8).double()
    mask[:, 0] = 1.0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (count,), generator=generator)}


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("importance", ["fisher", "mas"])
def test_batches_that_are_mappings_and_embeddings_against_single_samples(size, importance):
    model = Tagger().double()
    generator = torch.Generator().manual_seed(3)
    loader = [words(size, generator) for _ in range(10 // size)]
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in loader:
        for i in range(size):
            row = {name: value[i : i + 1] for name, value in batch.items()}
            y = row.pop("labels")
            logits = model(**row).logits
            value = -nn.functional.cross_entropy(logits, y) if importance == "fisher" else logits.square().sum()
            for (name, _), g in zip(
                model.named_parameters(), torch.autograd.grad(value, list(model.parameters())), strict=True
            ):
                expected[name] += (g.square() if importance == "fisher" else g.abs()) / 10
    found = fisher(model, loader) if importance == "fisher" else squared_output_norm(model, loader)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_measured_like_the_plain_one(in_place):
    model = mlp(6, 12, 4)
    plain = copy.deepcopy(model)
    if in_place:
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, backend="eager")
    compiled(TASKS[0][0][0])
    reg, plain_reg = ALASSO(compiled), ALASSO(plain)
    reg.warm_start(TASKS[0])
    plain_reg.warm_start(TASKS[0])
    assert same(reg.importance().values(), plain_reg.importance().values())
