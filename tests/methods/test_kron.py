"""KronALASSO next to its reference, in all kinds of layers and loops."""

import copy
import io
import pickle
import warnings
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from alasso import AlassoError, DivergedError, KronALASSO
from alasso.importance import _taps, fisher
from alasso.importance.kronecker import signs
from alasso.methods.kron import KronSurrogate

from helpers import mlp, run, same, step, toy_tasks, weights
from kron_reference import KronReference, recovered
from side_by_side import train

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say when they are imported
    import peft
    from transformers.pytorch_utils import Conv1D

DOUBLE = torch.float64
close = {"rtol": 1e-9, "atol": 1e-14}
adam = partial(torch.optim.Adam, lr=0.02, eps=1e-4)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def tasks_of(*shape, count=2, batches=4, size=5, tokens=0, classes=3):
    """Tasks of batches; inputs are numbers, or tokens below ``tokens``."""
    found = []
    for task in range(count):
        inputs = [random(size, *shape, seed=10 * task + i) for i in range(batches)]
        if tokens:
            inputs = [(x.abs() * 3).long() % tokens for x in inputs]
        found.append([(x, (7 * task + 3 * i + torch.arange(size)) % classes) for i, x in enumerate(inputs)])
    return found


# -- side by side ----------------------------------------------------------------------------------------------


def both(model, **settings):
    """A network under the library, its twin under the reference, and what trains both on a task."""
    reference = KronReference(copy.deepcopy(model), **settings)
    reg = KronALASSO(model, **settings)
    return reg, reference, trainer_of(reg, reference)


def trainer_of(reg, reference):
    """With new optimizers."""
    optimizer, its_optimizer = adam(reg.model.parameters()), adam(reference.model.parameters())
    reg.attach(optimizer)

    def train_both(task, style=""):
        train(reg.model, optimizer, task, style, optimizer.step)
        train(reference.model, its_optimizer, task, style, lambda closure: reference.step(its_optimizer, closure))

    return train_both


def assert_equal(reg, reference):
    """Weights, penalty, its gradient, κ and factors."""
    ours, theirs = dict(reg.model.named_parameters()), dict(reference.model.named_parameters())
    total, expected = reg.penalty(), reference.penalty()
    torch.testing.assert_close(total, expected, **close)
    states = reg.protected.states
    assert states.keys() == reference.known.keys()
    for (name, state), known in zip(states.items(), map(reference.known.get, states), strict=True):
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )
        (pull,) = torch.autograd.grad(expected, theirs[name], retain_graph=True)
        own = reg.surrogate.penalty_grad(ours[name].detach(), state)
        found = {
            "gradient": (own, pull),
            "path": (state.path, known.path),
            "unit": (state.unit, known.unit),
            "above": (state.above, known.above),
            "below": (state.below, known.below),
            "tasks": (state.tasks, known.tasks),
            "steps": (state.steps, known.steps),
            "anchor": (state.anchor.reshape(known.anchor.shape), known.anchor),
            "rows": (state.rows, packed(known.L, state.rows)),
            "columns": (state.columns, packed(known.R, state.columns)),
            "past rows": (state.past_rows, packed(known.past_L, state.past_rows)),
            "past columns": (state.past_columns, packed(known.past_R, state.past_columns)),
            "row form": (dense(state.row_form), known.pull_L),
            "column form": (dense(state.column_form), known.pull_R),
        }
        for what, (one, other) in found.items():
            other = torch.as_tensor(other, dtype=DOUBLE)
            scale = max(float(other.abs().max()), 1e-6)
            torch.testing.assert_close(
                one / scale, other / scale, rtol=1e-9, atol=1e-9, msg=lambda m, at=(name, what): f"{at}: {m}"
            )


def packed(M, like):
    """[M S | diag M], with as many columns as another."""
    rank = like.shape[1] - 1
    S = signs(len(M), rank, DOUBLE, M.device) if rank else M[:, :0]
    return torch.cat([M @ S, M.diagonal()[:, None]], 1)


def dense(form):
    return form[:, :-1] @ form[:, :-1].T + torch.diag(form[:, -1])


def through(reg, reference, train_both, tasks, style=""):
    """Compare within tasks, at their ends, and away from the anchor."""
    for task in tasks:
        train_both(task, style)
        assert_equal(reg, reference)
        reg.consolidate()
        reference.consolidate()
        assert_equal(reg, reference)
    train_both(tasks[0], style)
    assert_equal(reg, reference)
    assert float(reference.penalty()) > 0


# -- every kind of layer ---------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cells, self.head = kind(3, 4, batch_first=True, **options), nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.norm, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.mix(x, x, x, need_weights=False)[0]).mean(1))


class CalledOften(nn.Module):
    """One layer at several places, where its inputs differ in scale."""

    def __init__(self):
        super().__init__()
        self.begin, self.often, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = self.begin(x)
        for factor in (1.0, 0.1, 3.0):
            x = torch.tanh(self.often(factor * x))
        return self.head(x)


class Tied(nn.Module):
    """Words go in and come out by the same weight, which has inputs as rows at one end and outputs at the other."""

    def __init__(self):
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mix(self.words(x))).mean(1))


class Positions(nn.Module):
    """As in transformers, whose position embeddings see one sample, however many there are."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(6, 4), nn.Embedding(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x) + self.places(torch.arange(3)[None])).mean(1))


def lora():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False))


def net(layers):
    return lambda: nn.Sequential(*layers(), nn.Flatten(), nn.LazyLinear(3))


#: A network, its inputs' shape, and how many tokens there are if these are tokens.
NETS = {
    "linear": (net(lambda: [nn.Linear(4, 5), nn.Tanh()]), (4,), 0),
    "linear over positions": (net(lambda: [nn.Linear(4, 5, bias=False), nn.Tanh()]), (2, 3, 4), 0),
    "linear of transformers": (net(lambda: [Conv1D(5, 4), nn.Tanh()]), (2, 4), 0),
    "conv1d": (net(lambda: [nn.Conv1d(2, 3, 3, padding=1, stride=2), nn.Tanh()]), (2, 5), 0),
    "conv2d": (
        net(lambda: [nn.Conv2d(2, 4, (3, 2), padding=1, groups=2, padding_mode="reflect"), nn.Tanh()]),
        (2, 3, 3),
        0,
    ),
    "conv3d": (net(lambda: [nn.Conv3d(1, 2, 2, dilation=(1, 2, 1)), nn.Tanh()]), (1, 2, 3, 3), 0),
    "transposed 1d": (net(lambda: [nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), nn.Tanh()]), (2, 3), 0),
    "transposed 2d": (net(lambda: [nn.ConvTranspose2d(2, 4, 2, groups=2, padding=1), nn.Tanh()]), (2, 3, 3), 0),
    "transposed 3d": (net(lambda: [nn.ConvTranspose3d(1, 2, 2), nn.Tanh()]), (1, 1, 2, 2), 0),
    "embedding": (net(lambda: [nn.Embedding(6, 3), nn.Tanh()]), (4,), 6),
    "embedding with padding": (net(lambda: [nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 3)]), (4,), 6),
    "norms": (net(lambda: [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.GroupNorm(2, 6)]), (4,), 0),
    "layer norm": (net(lambda: [nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh()]), (2, 4), 0),
    "LSTM": (lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), (3, 3), 0),
    "GRU": (lambda: Recurrent(nn.GRU), (3, 3), 0),
    "RNN": (lambda: Recurrent(nn.RNN), (3, 3), 0),
    "attention": (Attention, (3, 4), 0),
    "called often": (CalledOften, (4,), 0),
    "tied": (Tied, (3,), 6),
    "positions": (Positions, (3,), 6),
    "lora": (lora, (4,), 0),
}


def made(name, **options):
    """A network that has seen its first batch, and its tasks."""
    make, shape, tokens = NETS[name]
    torch.manual_seed(0)
    tasks = tasks_of(*shape, tokens=tokens, **options)
    model = make().double()
    with torch.no_grad():
        model(tasks[0][0][0])
    return model, tasks


in_both_scales = pytest.mark.parametrize("scale", ["fisher", "path"])


@in_both_scales
@pytest.mark.parametrize("name", NETS)
def test_every_kind_of_layer(name, scale):
    model, tasks = made(name)
    through(*both(model, scale=scale), tasks)


SETTINGS = {
    "another c": {"c": 0.3},
    "two directions": {"rank": 2},
    "one direction": {"rank": 1},
    "path, another c": {"scale": "path", "c": 0.3},
    "forgets": {"gamma": 0.7, "rank": 3},
    "forgets all": {"gamma": 0.0},
    "path, forgets": {"scale": "path", "gamma": 0.7},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_every_setting(name, settings):
    model, tasks = made(name, count=3)
    through(*both(model, **settings), tasks)


@pytest.mark.parametrize("every, looked_at", [(1, 106), (3, 100 + 3 * 2), (4, 100 + 4 * 2), (7, 100 + 7)])
def test_factors_are_looked_at_in_the_first_hundred_steps_and_then_in_every_few(every, looked_at):
    model, tasks = made("linear", count=1, batches=106)
    reg, reference, train_both = both(model, every=every)
    through(reg, reference, train_both, tasks)
    assert float(reg.protected.states["0.weight"].steps) == looked_at


@in_both_scales
@pytest.mark.parametrize("style", ["accumulation", "clipping", "closure"])
@pytest.mark.parametrize("name", ["linear", "tied", "LSTM"])
def test_every_kind_of_step(name, style, scale):
    model, tasks = made(name)
    through(*both(model, scale=scale), tasks, style)


@in_both_scales
@pytest.mark.parametrize("name", ["linear", "conv2d", "embedding", "called often"])
def test_labels_that_the_loss_ignores(name, scale):
    model, tasks = made(name, size=6)
    for task in tasks:
        for _, y in task:
            y[::2] = -100
    through(*both(model, scale=scale), tasks)


def test_ignored_samples_leave_no_trace():
    """Padding is no term of the loss's mean, and tells no factor."""
    tasks = tasks_of(4)
    filled = [[(torch.cat([x, 100 + x]), torch.cat([y, torch.full_like(y, -100)])) for x, y in task] for task in tasks]
    assert_alike(trained(tasks=filled), trained(tasks=tasks))


def test_a_tied_weight_that_the_loss_takes_without_its_layer_is_told_by_its_gradient():
    """As by TRL's and Liger's fused heads: the layer at the other end knows half of it."""

    def fused(model, batch):
        logits = nn.functional.linear(torch.tanh(model.mix(model.words(batch[0]))).mean(1), model.out.weight)
        return cross_entropy(logits, batch[1])

    _, reg = trained(name="tied", forward=fused, scale="path")
    assert reg.notes.factors == {
        "words.weight": "of its gradient",
        "mix.weight": "of the layer",
        "mix.bias": "diagonal",
    }


def test_a_batch_of_ignored_samples_alone_is_no_step():
    model, (batches, _) = made("linear")
    optimizer = adam(model.parameters())
    reg = KronALASSO(model).attach(optimizer)
    run(model, optimizer, batches)
    before = copy.deepcopy(reg.protected.states)
    x, y = batches[0]
    optimizer.zero_grad()
    cross_entropy(model(x), torch.full_like(y, -100), reduction="sum").backward()
    optimizer.step()
    for name, state in reg.protected.states.items():
        assert all(map(torch.equal, state, before[name]))


# -- models that change ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 4, 32])
@pytest.mark.parametrize("outputs, inputs", [(2, 0), (0, 3), (4, 3)])
def test_layers_that_grow(outputs, inputs, rank):
    model, tasks = made("linear", count=3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    reg, reference, train_both = both(model, rank=rank)
    through(reg, reference, train_both, tasks[:1])
    reg.consolidate()
    reference.consolidate()
    for m in (reg.model, reference.model):
        grow(m[0], 0, inputs)
        grow(m[2], inputs, outputs)
    train_both = trainer_of(reg, reference)
    assert_equal(reg, reference)
    through(reg, reference, train_both, tasks[1:])


def grow(layer, inputs, outputs):
    """New inputs and outputs, with small weights that are the same in both networks."""
    with torch.no_grad():
        weight, bias = layer.weight, layer.bias
        layer.weight = nn.Parameter(nn.functional.pad(weight, (0, inputs, 0, outputs), value=0.1))
        layer.bias = nn.Parameter(nn.functional.pad(bias, (0, outputs)))


def test_a_layer_that_thaws_and_one_that_freezes():
    model, tasks = made("linear", count=3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[0].requires_grad_(False)
    reg, reference, train_both = both(model)
    for task, trains in zip(tasks, [(False, True), (True, True), (True, False)], strict=True):
        for m in (reg.model, reference.model):
            m[0].requires_grad_(trains[0])
            m[2].requires_grad_(trains[1])
            m.zero_grad()
        train_both(task)
        reg.consolidate()
        reference.consolidate()
        for m in (reg.model, reference.model):
            m.requires_grad_(trains[0])
        if trains[0]:
            assert_equal(reg, reference)


def test_rank_may_change_between_tasks():
    """Sketches of several ranks cannot be added up: parameters that have one keep theirs."""
    model, tasks = made("linear")
    reg, reference, train_both = both(model, rank=3)
    train_both(tasks[0])
    reg.consolidate()
    reference.consolidate()
    reg.rank = 2
    through(reg, reference, train_both, tasks)


def test_what_is_excluded_is_left_alone():
    model, tasks = made("linear")
    optimizer = adam(model.parameters())
    reg = KronALASSO(model, exclude="0.*").attach(optimizer)
    run(model, optimizer, tasks[0])
    reg.consolidate()
    assert not model[0]._forward_hooks
    assert list(reg.importance()) == ["3.weight", "3.bias"]


# -- forwards that are no part of a step, or are made twice ----------------------------------------------------


def batch_loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def trained(change=None, forward=None, name="linear", tasks=None, make=adam, **settings):
    """(weights, regularizer) after two tasks. ``forward(model, batch)`` returns a batch's loss."""
    model, own_tasks = made(name)
    optimizer = make(model.parameters())
    reg = KronALASSO(model, **settings).attach(optimizer)
    if change is not None:
        change(model)
    for task in tasks or own_tasks:
        for batch in task:
            optimizer.zero_grad()
            (forward or batch_loss)(model, batch).backward()
            optimizer.step()
        reg.consolidate()
    return weights(model), reg


def assert_alike(one, other, rtol=1e-9):
    for found, expected in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-11)
    for name, expected in other[1].importance().items():
        torch.testing.assert_close(one[1].importance()[name], expected, rtol=10 * rtol, atol=1e-14)


def looked_at(model, batch):
    """Evaluation, sampling and the like before each step."""
    model.eval()
    with torch.no_grad():
        model(batch[0][:2])
    with torch.inference_mode():
        model(batch[0][:3])
    model.train()
    model(batch[0][:2] * 100)  # and its loss is not used
    return batch_loss(model, batch)


def in_two_calls(model, batch):
    x, y = batch
    logits = torch.cat([model(x[:2]), model(x[2:])])
    return cross_entropy(logits, y)


def in_checkpoints(model, batch, use_reentrant):
    x = batch[0]
    for layer in model:
        x = checkpoint(layer, x.requires_grad_(x.is_floating_point()), use_reentrant=use_reentrant)
    return cross_entropy(x, batch[1])


FORWARDS = {
    "looked at": looked_at,
    "in two calls": in_two_calls,
    "checkpoints": partial(in_checkpoints, use_reentrant=False),
    "reentrant checkpoints": partial(in_checkpoints, use_reentrant=True),
    "input by name": lambda model, batch: cross_entropy(model[1:](model[0](input=batch[0])), batch[1]),
    "a sum": lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="sum") / len(batch[1]),
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_forwards_that_mean_the_same(forward, name):
    assert_alike(trained(forward=forward, name=name), trained(name=name))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_keep_no_activations(use_reentrant):
    model, (((x, _), *_), _) = made("linear")
    _ = KronALASSO(model).attach(adam(model.parameters()))
    inputs = []
    model[3].register_forward_pre_hook(lambda layer, args: inputs.append(weakref.ref(args[0])))
    output = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
    assert [held() for held in inputs] == [None]
    output.sum().backward()
    assert len(inputs) == 2


def test_functional_calls_are_left_alone():
    """Transforms of torch.func run as without the hooks, and what other weights tell is no factor of the model's."""
    model, (((x, y), *_), _) = made("linear")
    plain, own = fisher(model, [(x, y)]), dict(model.named_parameters())
    reg = KronALASSO(model).attach(adam(model.parameters()))

    def loss(weights, x, y):
        return cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    weights = {name: p.detach() for name, p in own.items()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    torch.testing.assert_close({name: g.square().mean(0) for name, g in found.items()}, plain)
    assert torch.func.jacrev(model)(x).shape[2:] == x.shape
    fast = {name: 2 * p for name, p in own.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's on gradients of tensors that are no leaves
        cross_entropy(functional_call(model, fast, (x,)), y).backward()
    assert not reg.taps.seen and reg.taps.output is None


def test_a_gradient_in_half_precision_is_converted_once():
    layer = nn.Linear(4, 300).bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    _ = KronALASSO(layer).attach(optimizer)
    converted = []

    class Conversions(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default and found.shape == (2, 3, 300):
                converted.append(found.dtype)
            return found

    output = layer(torch.randn(2, 3, 4).bfloat16())
    with Conversions():
        output.backward(torch.ones_like(output))
    assert converted == [torch.float32]


def test_ranks_wait_for_the_device_once_whatever_the_number_of_layers(monkeypatch):
    model, (((x, y), *_), _) = made("linear")
    reg = KronALASSO(model).attach(adam(model.parameters()))
    batch_loss(model, (x, y)).backward()
    alone, reads = dict(reg.taps.seen), []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                reads.append(function)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(_taps, "is_distributed", lambda: True)  # of one rank
    with Reads():
        found = reg.taps.take({name: p for name, p in model.named_parameters() if p.dim() > 1}, reg.protected.states)
    assert len(alone) > 1 and not reads
    for name, of_layers in alone.items():
        torch.testing.assert_close(found[name], list(of_layers.values()))


def test_an_activation_that_writes_into_the_layers_output():
    def writing(model):
        model[1] = nn.ReLU(inplace=True)

    def not_writing(model):
        model[1] = nn.ReLU()

    assert_alike(trained(writing), trained(not_writing))


def test_an_input_that_is_written_to_under_autocast():
    """The layer has a copy in bfloat16, as autocast made it."""

    def writing(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            x = 1.0 * batch[0]
            z = model[0](x)
            x.zero_()
            return cross_entropy(model[1:](z), batch[1])

    def not_writing(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model[1:](model[0](batch[0])), batch[1])

    def single(model):
        model.float()

    tasks = [[(x.float(), y) for x, y in task] for task in made("linear")[1]]
    one, other = (trained(single, forward=forward, tasks=tasks) for forward in (writing, not_writing))
    assert same(one[0], other[0])
    assert same(one[1].importance().values(), other[1].importance().values())


def test_channels_last():
    def channels_last(model):
        model.to(memory_format=torch.channels_last)

    assert_alike(trained(channels_last, name="conv2d", c=10.0), trained(name="conv2d", c=10.0))


def test_what_was_seen_goes_with_a_gradient_that_is_dropped():
    """As of a loss that is only looked at, or of another network's part in a game of two."""

    def looked_at_first(model, batch):
        (1000 * batch_loss(model, (batch[0] ** 2, batch[1]))).backward()
        model.zero_grad()
        return batch_loss(model, batch)

    assert_alike(trained(forward=looked_at_first), trained())


@in_both_scales
def test_a_loss_over_micro_batches(scale):
    """Accumulated gradients and factors are those of the whole batch."""

    def halves(model, batch):
        for part in (slice(0, 2), slice(2, 4)):
            (batch_loss(model, (batch[0][part], batch[1][part])) / 3).backward()
        return batch_loss(model, (batch[0][4:], batch[1][4:])) / 3

    tasks = [[(torch.cat([x, x[:1]]), torch.cat([y, y[:1]])) for x, y in task] for task in made("conv2d")[1]]
    settings = {"name": "conv2d", "tasks": tasks, "scale": scale}
    assert_alike(trained(forward=halves, **settings), trained(**settings))


def times(factor):
    return lambda model, batch: factor * batch_loss(model, batch)


def assert_scaled(found, plain, factor):
    """The same training, and a penalty that is so many times as large, as the loss is."""
    assert_alike((found[0], plain[1]), plain)
    for name, expected in plain[1].importance().items():
        torch.testing.assert_close(found[1].importance()[name], factor * expected, rtol=1e-8, atol=0)
    for name, state in plain[1].protected.states.items():
        total = found[1].protected.states[name].below
        if plain[1].scale == "fisher":
            torch.testing.assert_close(total, factor * state.below, rtol=1e-9, atol=0)


@in_both_scales
@pytest.mark.parametrize("name", ["linear", "LSTM", "tied"])
def test_the_same_training_for_a_loss_times_64(name, scale):
    found = trained(forward=times(64), make=partial(adam, eps=64e-8), name=name, scale=scale)
    assert_scaled(found, trained(make=partial(adam, eps=1e-8), name=name, scale=scale), 64)


@in_both_scales
def test_a_sum_is_the_mean_times_the_size_of_the_batch(scale):
    def summed(model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="sum")

    found = trained(forward=summed, make=partial(adam, eps=5e-8), scale=scale)
    assert_scaled(found, trained(make=partial(adam, eps=1e-8), scale=scale), 5)


class Shrinking(torch.optim.Adam):
    """Torch's, whose gradients have been made smaller by something between backward and step."""

    factor = 2.0**-5

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_step_pre_hook(self.shrink)

    def shrink(self, *_):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.factor)


@in_both_scales
@pytest.mark.parametrize("name", ["linear", "LSTM", "tied", "called often"])
def test_gradients_that_are_clipped_by_a_factor_are_those_of_a_smaller_loss(name, scale):
    settings = {"name": name, "scale": scale}
    found = trained(make=partial(Shrinking, lr=0.02, eps=1e-8), **settings)
    assert_scaled(found, trained(make=partial(adam, eps=32e-8), **settings), Shrinking.factor)


def test_the_unit_is_that_of_wrong_answers_and_the_smaller_last_batch_of_an_epoch_leaves_it():
    """With cross-entropy, ∂loss/∂output is that of a mean over the batch: shorter by as many as there are."""
    model, tasks = made("linear", count=1, batches=1)
    (x, y), *_ = tasks[0]
    units = []
    for batches in ([(x, y)], [(x, y), (x[:1], y[:1])], [(x.repeat(3, 1), y.repeat(3))]):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
        reg = KronALASSO(twin).attach(optimizer)
        run(twin, optimizer, batches)
        units.append([float(state.unit) for state in reg.protected.states.values()])
    wrong = torch.softmax(model(x), 1) - nn.functional.one_hot(y, 3)
    each = wrong.square().sum(1)
    expected = [each.mean().sqrt(), max(each.mean(), each[0]).sqrt(), each.mean().sqrt()]
    for unit, theirs in zip(units, expected, strict=True):
        assert unit == pytest.approx([float(theirs)] * 4, rel=1e-9)
    assert 0.3 < float(expected[0]) < 1.2


def test_two_optimizers_equal_one():
    found = []
    for split in (False, True):
        model, tasks = made("linear")
        parts = [model[0].parameters(), model[3].parameters()] if split else [model.parameters()]
        optimizers = [adam(part) for part in parts]
        reg = KronALASSO(model)
        for optimizer in optimizers:
            reg.attach(optimizer)
        for task in tasks:
            for batch in task:
                model.zero_grad()
                batch_loss(model, batch).backward()
                for optimizer in optimizers:
                    optimizer.step()
            reg.consolidate()
        found.append((weights(model), reg))
    assert_alike(*found)


@in_both_scales
@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "tied"])
def test_a_compiled_model_tells_as_much(name, how, scale):
    model, tasks = made(name)
    reg, reference, train_both = both(model, scale=scale)
    if how == "in place":
        model.compile(backend="aot_eager")
        through(reg, reference, train_both, tasks)
    else:
        compiled = torch.compile(model, backend="aot_eager")
        assert_alike(trained_as(model, compiled, tasks, scale), trained(name=name, scale=scale))
    assert set(reg.notes.factors.values()) <= {"of the layer", "diagonal"}


def trained_as(model, called, tasks, scale):
    optimizer = adam(model.parameters())
    reg = KronALASSO(called, scale=scale).attach(optimizer)
    for task in tasks:
        run(called, optimizer, task)
        reg.consolidate()
    return weights(model), reg


class Own(nn.Linear):
    """Whose forward may be anything, so that nothing is known of it."""


class NeverCalled(nn.Sequential):
    """Holds a layer that takes no part."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self[2](self[1](self[0](x)))


@pytest.mark.parametrize("has_a_layer", [False, True])
def test_without_a_layer_that_tells_the_losss_scale_the_path_does(has_a_layer):
    def make():
        torch.manual_seed(0)
        return (NeverCalled if has_a_layer else nn.Sequential)(Own(4, 5), nn.Tanh(), Own(5, 3)).double()

    model, tasks = make(), made("linear")[1]
    optimizer = adam(model.parameters())
    reg = KronALASSO(model)
    if has_a_layer:
        reg.attach(optimizer)
        run(model, optimizer, tasks[0])
        with pytest.raises(AlassoError, match=r'no layer .* for 0.weight.*scale="path"'):
            reg.consolidate()
        assert reg.tasks == 0
    else:
        with pytest.raises(AlassoError, match=r'no linear layer.*scale="path"'):
            reg.attach(optimizer)
        assert not reg.is_attached and not hooks_of(model) and not optimizer._optimizer_step_pre_hooks
    reg, reference, train_both = both(make(), scale="path")
    through(reg, reference, train_both, tasks)
    assert reg.notes.factors["0.weight"] == "of its gradient"


@in_both_scales
def test_a_task_without_a_step_is_refused(scale):
    model, _ = made("linear")
    reg = KronALASSO(model, scale=scale).attach(adam(model.parameters()))
    with pytest.raises(AlassoError, match="has seen no optimizer step"):
        reg.consolidate()


def test_a_head_whose_gradient_was_dropped_does_not_tell():
    """Each task has its own, and the loss of the other one is only looked at."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Linear(4, 5), nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

        def forward(self, x, head):
            return self.heads[head](torch.tanh(self.body(x)))

    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        model, tasks = Heads().double(), made("linear")[1]
        optimizer = adam(model.parameters())
        reg = KronALASSO(model).attach(optimizer)
        for head, task in enumerate(tasks):
            for i, (x, y) in enumerate(task):
                if looks and i == 1:
                    (1000 * cross_entropy(model(x, 1 - head), y)).backward()
                optimizer.zero_grad()
                cross_entropy(model(x, head), y).backward()
                optimizer.step()
            reg.consolidate()
        found.append((weights(model), reg))
    one, other = (reg.protected.states["body.weight"].below for _, reg in found)
    torch.testing.assert_close(one, other, rtol=1e-2, atol=0)


@in_both_scales
@pytest.mark.parametrize("labels", ["true", "uniform", "mas"])
def test_a_warm_start_measures_the_factors_and_is_no_training(labels, scale):
    """Of a linear layer by hand, and of its bias, whose squares one sample in a batch tells exactly."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,))
    z = model(x).detach()
    slopes = {  # of each term by the outputs, (N, terms, 3)
        "true": (one_hot(y, 3) - torch.softmax(z, 1))[:, None],
        "uniform": (torch.eye(3) - torch.softmax(z, 1)[:, None]) / 3**0.5,
        "mas": 2 * z[:, None],
    }[labels]
    factor = 2 / slopes.square().sum((1, 2)).mean()
    L = factor * torch.einsum("ija,ijb->ab", slopes, slopes) / 12 * x.square().sum(1).mean()
    R = x.T @ x / x.square().sum()
    bias = factor * slopes.square().sum((0, 1)) / 12
    options = {"importance": "mas"} if labels == "mas" else {"labels": labels}
    for size in (1, 12):
        reg = KronALASSO(model, scale=scale).attach(adam(model.parameters()))
        reg.warm_start(zip(x.split(size), y.split(size), strict=True), **options)
        assert not reg.taps.seen and reg.taps.output is None and hooks_of(model) and model.weight.grad is None
        state = reg.protected.states["weight"]
        form = torch.kron(dense(state.row_form), dense(state.column_form))
        if size == 1 and labels != "uniform":
            found, by_hand = 2 * reg.importance()["bias"], recovered(torch.diag(bias), 0).diagonal()
            torch.testing.assert_close(found, by_hand, rtol=1e-7, atol=0)
        elif size > 1 and labels != "uniform":
            torch.testing.assert_close(form, torch.kron(recovered(L, 32), recovered(R, 32)), rtol=1e-7, atol=1e-9)
        elif size > 1:  # the random signs of a sample's terms are right in the mean
            torch.testing.assert_close(form.trace(), L.trace(), rtol=0.3, atol=0)


def test_a_measured_past_keeps_its_strength_when_the_path_sets_one():
    """The first κ is the new task's own; without it, where the loss rose along the path, the past stays."""
    for sign in (1, -1):
        model, tasks = made("linear")
        optimizer = adam(model.parameters())
        reg = KronALASSO(model, scale="path").attach(optimizer)
        reg.warm_start(tasks[0])
        before = {name: state.row_form[:, 0] for name, state in reg.protected.states.items() if state.anchor.dim() < 2}
        run(model, optimizer, tasks[1])
        states = {n: s._replace(path=sign * s.path.abs()) for n, s in reg.protected.states.items()}
        reg.protected.put_all(states)
        reg.consolidate()
        for name, was in before.items():
            kappa = states[name].path / reg.protected.states[name].below if sign > 0 else 1
            L = recovered(torch.diag(states[name].rows[:, 0] / states[name].steps), 0).diagonal()
            torch.testing.assert_close(reg.protected.states[name].row_form[:, 0], was + kappa * L, **close)


# -- precision -------------------------------------------------------------------------------------------------


@in_both_scales
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("infinite", [False, True], ids=["finite", "one step is skipped"])
def test_a_grad_scaler(fused, infinite, scale):
    """Which changes nothing, and whose skipped steps leave no mark."""
    outcomes = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = mlp(6, 8, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=fused)
        reg = KronALASSO(model, scale=scale).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for task in toy_tasks(2):
            for i, (x, y) in enumerate(task):
                if infinite and i == 3:
                    if not scaled:
                        continue
                    x = x * float("inf")
                optimizer.zero_grad()
                scaler.scale(cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update(1024.0)
            reg.consolidate()
        outcomes.append((weights(model), reg))
    for one, other in zip(outcomes[1][0], outcomes[0][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name, omega in outcomes[0][1].importance().items():
        torch.testing.assert_close(outcomes[1][1].importance()[name], omega, rtol=2e-3, atol=1e-8)
    for one, other in zip(*(reg.protected.states.values() for _, reg in outcomes), strict=True):
        torch.testing.assert_close(one.below, other.below, rtol=1e-4, atol=0)


def test_autocast_in_bfloat16():
    def autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[0])
        return cross_entropy(logits.float(), batch[1])

    _, reg = trained(forward=autocast, change=lambda model: model.float(), tasks=float_tasks())
    _, plain = trained(change=lambda model: model.float(), tasks=float_tasks())
    for name, state in reg.protected.states.items():
        assert {t.dtype for t in state} == {torch.float32}
        assert 0.9 < float(state.past_rows[:, -1].sum() / plain.protected.states[name].past_rows[:, -1].sum()) < 1.1


def float_tasks():
    return [[(x.float(), y) for x, y in task] for task in made("linear")[1]]


# -- weights in half precision ---------------------------------------------------------------------------------


def half_loss(model, batch):
    return cross_entropy(model(batch[0].bfloat16()).float(), batch[1])


def in_half(**settings):
    return trained(forward=half_loss, change=lambda model: model.bfloat16(), **settings)


def test_weights_in_half_precision_have_anchors_as_they_are_and_all_else_in_float32():
    _, reg = in_half()
    for state in reg.protected.states.values():
        assert {field for field, t in state._asdict().items() if t.dtype != torch.float32} == {"anchor"}
    assert same(reg.anchor().values(), weights(reg.model))
    assert all(torch.isfinite(omega).all() for omega in reg.importance().values())


@in_both_scales
def test_nothing_is_lost_with_anchors_in_the_weights_own_precision(scale, monkeypatch):
    found, reg = in_half(scale=scale)
    monkeypatch.setattr(KronSurrogate, "anchors_as_weights", False)
    expected, expected_reg = in_half(scale=scale)
    assert expected_reg.anchor()["0.weight"].dtype == torch.float32
    assert same(found, expected)
    assert same(reg.importance().values(), expected_reg.importance().values())
    assert str(reg.summary()) == str(expected_reg.summary())
    for one in (reg, expected_reg):
        with torch.no_grad():
            one.model[0].weight.mul_(1.01)
    assert reg.penalty() == expected_reg.penalty() > 0


def test_weights_that_change_their_precision_take_their_anchors_along():
    _, reg = in_half()
    anchor = reg.anchor()["0.weight"]
    reg.model.float()
    assert reg.penalty() == 0
    assert reg.anchor()["0.weight"].dtype == torch.float32 and torch.equal(reg.anchor()["0.weight"], anchor.float())


def test_bytes_a_weight():
    with torch.device("meta"):
        layer = nn.Linear(4096, 4096, bias=False)
    for dtype, most in ((torch.float32, 4.2), (torch.bfloat16, 2.2)):
        (state,) = KronALASSO(layer.to(dtype)).protected.states.values()
        assert most - 0.1 < sum(t.nbytes for t in state) / layer.weight.numel() < most


# -- saving, copying, leaving ----------------------------------------------------------------------------------


@in_both_scales
@pytest.mark.parametrize(
    ("name", "dtype"), [("conv2d", DOUBLE), ("tied", DOUBLE), ("GRU", DOUBLE), ("linear", torch.bfloat16)]
)
def test_a_run_saved_within_a_task_goes_on_bit_for_bit(name, dtype, scale):
    def start():
        model, tasks = made(name, count=3)
        if dtype != DOUBLE:
            model, tasks = model.to(dtype), [[(x.to(dtype), y) for x, y in task] for task in tasks]
        optimizer = adam(model.parameters())
        return model, optimizer, KronALASSO(model, rank=3, scale=scale).attach(optimizer), tasks

    model, optimizer, reg, tasks = start()
    for task in tasks[:2]:
        run(model, optimizer, task)
        reg.consolidate()
    run(model, optimizer, tasks[2][:2])
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (model, optimizer, reg)], file)
    file.seek(0)
    other, its_optimizer, its_reg, _ = start()
    for one, saved in zip((other, its_optimizer, its_reg), torch.load(file, weights_only=True), strict=True):
        one.load_state_dict(saved)
    for m, o, r in ((model, optimizer, reg), (other, its_optimizer, its_reg)):
        run(m, o, tasks[2][2:])
        r.consolidate()
        run(m, o, tasks[0])
    assert same(weights(model), weights(other))
    for name, state in reg.protected.states.items():
        assert same(state, its_reg.protected.states[name]), name


def hooks_of(model):
    return [hook for module in model.modules() for hook in module._forward_hooks.values()]


def test_nothing_is_left_on_the_model_or_the_optimizer_after_detach():
    model, tasks = made("tied")
    optimizer = adam(model.parameters())
    with KronALASSO(model) as reg:
        reg.attach(optimizer)
        reg.attach(optimizer)
        assert len(hooks_of(model)) == 3
        run(model, optimizer, tasks[0])
    assert not hooks_of(model) and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not reg.is_attached


def test_a_forward_from_before_detach_may_end_after_it():
    model, tasks = made("linear")
    reg = KronALASSO(model).attach(adam(model.parameters()))
    loss = batch_loss(model, tasks[0][0])
    reg.detach()
    loss.backward()
    reg.attach(optimizer := adam(model.parameters()))
    optimizer.step()
    reg.consolidate()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda all_three: pickle.loads(pickle.dumps(all_three))])
def test_a_copy_goes_on_as_the_first_one_and_neither_sees_the_other(copied):
    model, tasks = made("conv2d", count=3)
    optimizer = adam(model.parameters())
    reg = KronALASSO(model).attach(optimizer)
    run(model, optimizer, tasks[0])
    reg.consolidate()
    run(model, optimizer, tasks[1][:1])
    other, its_optimizer, its_reg = copied((model, optimizer, reg))
    batch_loss(other, tasks[2][0]).backward()  # the copy's hooks do nothing until it is attached
    its_optimizer.zero_grad()
    its_reg.attach(its_optimizer)
    for m, o, r in ((model, optimizer, reg), (other, its_optimizer, its_reg)):
        run(m, o, tasks[1][1:])
        r.consolidate()
    assert same(weights(model), weights(other))
    assert same(reg.importance().values(), its_reg.importance().values())


def test_a_copy_of_the_model_alone_is_free():
    model, tasks = made("linear")
    optimizer = adam(model.parameters())
    reg = KronALASSO(model).attach(optimizer)
    run(model, optimizer, tasks[0])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        batch_loss(other, tasks[0][0]).backward()
    assert not reg.taps.seen


# -- stability and mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_under_far_too_stiff_a_surrogate_stays_finite_and_says_so_once(momentum, caplog):
    model, (first, *others) = made("linear", count=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    reg = KronALASSO(model, c=1e6).attach(optimizer)
    run(model, optimizer, first)
    reg.consolidate()
    free, its_optimizer = copy.deepcopy((model, optimizer))
    begin = weights(model)
    for task in 5 * others:
        run(model, optimizer, task)
        run(free, its_optimizer, task)
    moved, freely = (sum((p - b).square().sum() for p, b in zip(weights(m), begin, strict=True)) for m in (model, free))
    assert 0 < moved < freely
    assert len([one for one in caplog.messages if "SGD would not be stable" in one]) == 1


@pytest.mark.parametrize("as_tensor", [False, True])
def test_sgds_bound_follows_the_learning_rate_and_takes_stiff_rows_alone(as_tensor):
    model, tasks = made("linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reg = KronALASSO(model, c=10.0).attach(optimizer)
    run(model, optimizer, tasks[0])
    reg.consolidate()
    state = reg.protected.states["0.weight"]
    L, R = dense(state.row_form), dense(state.column_form)
    top = float(torch.linalg.eigvalsh(R)[-1])
    values, V = torch.linalg.eigh(L)
    run(model, optimizer, tasks[1])
    for share in (0.5, 0.05, 2.0):  # of the stiffest row that goes with the limit, 1 / lr
        lr = 1 / (share * 10 * top * float(values[-1]))
        optimizer.param_groups[0]["lr"] = torch.tensor(lr, dtype=DOUBLE) if as_tensor else lr
        batch_loss(model, tasks[1][0]).backward()
        W, g = model[0].weight, model[0].weight.grad
        D, before = W.detach() - state.anchor, W.detach().clone()
        pull = 10 * (V * values.clamp(max=share * values[-1])) @ V.T @ D @ R
        g = g.clone()
        optimizer.step()
        torch.testing.assert_close(W.detach(), before - lr * (g + pull), **close)
        optimizer.zero_grad()


@pytest.mark.parametrize("since", [0, 2])
def test_training_that_diverged_is_named(since):
    model, tasks = made("linear")
    optimizer = adam(model.parameters())
    reg = KronALASSO(model).attach(optimizer)
    run(model, optimizer, tasks[0])
    reg.consolidate()
    kept = copy.deepcopy(reg.state_dict())
    with pytest.raises(DivergedError, match="NaN or infinite before step"):
        for i, (x, y) in enumerate(tasks[1]):
            step(model, optimizer, (x * float("nan") if i >= since else x, y))
    with pytest.raises(DivergedError, match="NaN"):
        reg.consolidate()
    assert reg.tasks == kept["tasks"]


@pytest.mark.parametrize("bad", [{"rank": 0}, {"rank": 2.0}, {"every": 0}, {"gamma": 1.1}, {"c": -1.0}, {"scale": "x"}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(AlassoError, match=next(iter(bad))):
        KronALASSO(nn.Linear(2, 2), **bad)


def test_a_rank_without_any_part_of_a_small_tensor_sets_no_limit():
    surrogate = KronALASSO(mlp(2, 2, 2)).surrogate
    for shape in ((0, 3), (0,)):
        assert surrogate.stiffest(surrogate.init(torch.zeros(shape))) == 0
