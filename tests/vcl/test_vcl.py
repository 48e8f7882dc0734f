"""Variational continual learning and coresets: closed forms, statistics against sampled weights, two tasks in a row."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Normal, kl_divergence

from alasso import AlassoError
from alasso.vcl import convert, kl, kl_gaussians, negative_elbo, objective, predict, update_prior
from alasso.vcl.coresets import k_center_coreset, random_coreset
from alasso.vcl.layers import BayesConv1d, BayesConv2d, BayesLayer, BayesLinear, at_the_means, bayes_layers

from helpers import mlp, toy_tasks

double = torch.float64


# -- the equations -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.floats(-3, 3), st.floats(-20, 4), st.floats(-3, 3), st.floats(1e-6, 30))
def test_kl_and_its_gradient_are_those_of_torch_distributions(mean, logvar, prior_mean, prior_var):
    mean, logvar = (torch.tensor([v, 0.5 * v], dtype=double, requires_grad=True) for v in (mean, logvar))
    prior_mean, prior_var = torch.tensor(prior_mean, dtype=double), torch.tensor(prior_var, dtype=double)
    ours = kl_gaussians(mean, logvar, prior_mean, prior_var)
    theirs = kl_divergence(Normal(mean, (0.5 * logvar).exp()), Normal(prior_mean, prior_var.sqrt())).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    for left, right in zip(*(torch.autograd.grad(value, (mean, logvar)) for value in (ours, theirs)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_kl_is_never_negative_in_single_precision():
    logvar = torch.linspace(-12, 3, 200_001)
    mean = torch.zeros(())
    for chunk in logvar.split(1000):
        assert float(kl_gaussians(mean, chunk, mean, chunk.exp())) >= 0


LAYERS = {
    "linear": (lambda: BayesLinear(nn.Linear(4, 3)), (2, 4)),
    "linear without bias": (lambda: BayesLinear(nn.Linear(4, 3, bias=False)), (2, 4)),
    "conv2d": (lambda: BayesConv2d(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)), (2, 2, 5, 4)),
    "conv2d same": (lambda: BayesConv2d(nn.Conv2d(2, 2, 2, padding="same", dilation=2)), (2, 2, 4, 3)),
    "conv2d reflect": (lambda: BayesConv2d(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")), (2, 1, 3, 4)),
    "conv1d": (lambda: BayesConv1d(nn.Conv1d(2, 3, 2)), (2, 2, 5)),
}


def made(kind):
    """A layer in double precision whose weights are uncertain to different degrees, and an input."""
    make, shape = LAYERS[kind]
    layer = make().to(double)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("logvar"):
                parameter.uniform_(-3, 0)
    return layer, torch.randn(shape, dtype=double)


@pytest.mark.parametrize("kind", LAYERS)
def test_mean_and_variance_of_the_pre_activation_are_the_closed_form(kind):
    """The layer is linear in its weights: h = J·w, so E[h] = J·μ and Var[h] = J²·σ², with J by automatic derivative."""
    layer, x = made(kind)
    bias = layer.bias_mean is not None
    mean, variance = layer.pre_activation(x)
    names = ["weight", "bias"] if bias else ["weight"]

    def h(*weights):
        return layer.linear_map(x, *weights, *(() if bias else (None,)))

    means = tuple(getattr(layer, f"{name}_mean").detach() for name in names)
    jacobians = torch.autograd.functional.jacobian(h, means)
    expected_mean = expected_variance = 0.0
    for name, mu, J in zip(names, means, jacobians, strict=True):
        var = getattr(layer, f"{name}_logvar").detach().exp().flatten()
        J = J.reshape(*mean.shape, mu.numel())
        expected_mean, expected_variance = expected_mean + J @ mu.flatten(), expected_variance + J**2 @ var
    torch.testing.assert_close(mean.detach(), expected_mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(variance.detach(), expected_variance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["linear", "conv2d", "conv1d"])
def test_sampled_outputs_have_the_statistics_of_explicitly_sampled_weights(kind):
    """n = 20 000 draws each: a mean strays by σ/√n, a variance by σ²√(2/n); the difference of two by √2 more."""
    layer, x = made(kind)
    n = 20_000

    def drawn(name):
        mean, logvar = (getattr(layer, f"{name}_{part}").detach() for part in ("mean", "logvar"))
        return mean + (0.5 * logvar).exp() * torch.randn(n, *mean.shape, dtype=double)

    x = x[:1]
    with torch.no_grad():
        ours = layer(x.expand(n, *x.shape[1:]))
        theirs = torch.func.vmap(lambda W, b: layer.linear_map(x, W, b)[0], chunk_size=2000)(
            drawn("weight"), drawn("bias")
        )
    var = theirs.var(0)
    # Five standard deviations: with some 50 numbers compared and a fixed seed, a correct layer does not fail.
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 5 * (2 * var / n).sqrt()).all()
    assert ((ours.var(0) - var).abs() < 5 * var * math.sqrt(2 * 2 / n)).all()


def test_an_input_of_zeros_has_finite_gradients():
    layer = BayesLinear(nn.Linear(3, 2, bias=False))
    x = torch.zeros(4, 3, requires_grad=True)
    layer(x).square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (x, *layer.parameters()))


# -- models --------------------------------------------------------------------------------------------------


def convnet():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5))


def test_conversion_keeps_the_function_and_leaves_the_original_alone():
    net, x = convnet(), torch.randn(4, 1, 6, 6)
    model = convert(net, initial_logvar=-30.0)
    # σ = e⁻¹⁵ = 3·10⁻⁷ on every weight.
    torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)
    with at_the_means(model):
        assert torch.equal(model(x), net(x))
    assert type(net[0]) is nn.Conv2d
    assert all(a.data_ptr() != b.data_ptr() for a in model.parameters() for b in net.parameters())
    assert not torch.equal(convert(net)(x), convert(net)(x))


def test_conversion_without_a_point_estimate_starts_small_and_random():
    model = convert(nn.Linear(300, 100), from_point_estimate=False, prior_mean=0.5, prior_var=2.0)
    assert isinstance(model, BayesLinear)
    assert 0.08 < float(model.weight_mean.std()) < 0.1  # N(0, 0.1²) cut at ±0.2 has standard deviation 0.088
    assert float(model.weight_mean.abs().max()) <= 0.2
    assert (model.weight_logvar == -6).all()
    assert (model.prior_bias_mean == 0.5).all()
    assert (model.prior_bias_var == 2.0).all()


def test_a_layer_used_twice_stays_one_layer():
    layer = nn.Linear(3, 3)
    model = convert(nn.Sequential(layer, nn.ReLU(), layer))
    assert model[0] is model[2]
    assert len(list(model.parameters())) == 4


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "^1 is a BatchNorm1d"),
        (lambda: nn.ModuleDict({"words": nn.Embedding(3, 2)}), "^words is a Embedding"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "ParametrizedLinear|ParametrizationList"),
        (lambda: nn.Sequential(nn.Flatten()), "no linear or convolutional layer"),
    ],
)
def test_what_cannot_be_converted_is_named(make, word):
    with pytest.raises(AlassoError, match=word):
        convert(make())


def test_shared_parameters_are_refused():
    net = mlp(3, 3, 3)
    net[2].weight = net[0].weight
    with pytest.raises(AlassoError, match="2 and 0 share"):
        convert(net)


def test_update_prior_makes_the_kl_zero_and_it_was_not_before():
    model = convert(convnet())
    before = float(kl(model))
    weights = sum(p.numel() for p in convnet().parameters())
    means = sum(float(p.detach().square().sum()) for n, p in model.named_parameters() if n.endswith("mean"))
    # Against N(0, 1): ½ Σ (σ² − 1 − log σ² + μ²) with log σ² = −6.
    assert before == pytest.approx(0.5 * (weights * (math.exp(-6) - 1 + 6) + means), rel=1e-5)
    update_prior(model)
    assert 0 <= float(kl(model)) < 1e-9
    with torch.no_grad():
        model[0].weight_mean += 1
    assert float(kl(model)) == pytest.approx(0.5 * 27 * math.exp(6), rel=1e-4)


def test_state_dict_carries_posterior_and_prior():
    model, twin = convert(convnet()), convert(convnet())
    update_prior(model)
    with torch.no_grad():
        model[4].bias_logvar += 1
    twin.load_state_dict(model.state_dict())
    assert torch.equal(kl(model), kl(twin))
    x, answers = torch.randn(2, 1, 6, 6), []
    for each in (model, twin):
        torch.manual_seed(3)
        answers.append(each(x))
    assert torch.equal(*answers)


def test_negative_elbo_is_the_mean_loss_of_samples_plus_the_kl_over_n():
    model = convert(mlp(6, 8, 4))
    x, y = toy_tasks(1)[0][0]
    torch.manual_seed(5)
    ours = negative_elbo(model, x, y, data_size=50, samples=3)
    torch.manual_seed(5)
    outputs = model(x.repeat(3, 1)).split(len(x))
    theirs = sum(F.cross_entropy(output, y) for output in outputs) / 3 + kl(model) / 50
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    assert all(bool(p.grad.any()) for p in model.parameters())


def test_predict_averages_probabilities(monkeypatch):
    model, x = convert(mlp(6, 8, 4), initial_logvar=-1.0), torch.randn(7, 6)
    # As the definition has it, one sample at a time. Probabilities stray by ½/√samples at most.
    with torch.no_grad():
        slow = sum(model(x).softmax(1) for _ in range(4000)) / 4000
    fast = predict(model, x, samples=4000)
    torch.testing.assert_close(fast, slow, rtol=0, atol=5 * 0.5 * math.sqrt(2 / 4000))
    torch.testing.assert_close(fast.sum(1), torch.ones(7))
    assert not torch.allclose(fast, predict(model, x, deterministic=True), atol=0.01)
    monkeypatch.setattr(objective, "ROWS_AT_ONCE", 20)  # two samples of seven rows at once, the last one alone
    torch.testing.assert_close(predict(model, x, samples=5).sum(1), torch.ones(7))


class Noisy(nn.Module):
    """Random before the first weights are asked: each sample has to have its own."""

    def forward(self, x):
        return x + torch.randn_like(x)


def heard(model):
    """The model with a forward hook on it, which changes what it says."""
    model.register_forward_hook(lambda module, inputs, output: output + 1)
    return model


SEQUENCES = {
    "plain": (lambda: mlp(6, 8, 4), (6,), True),
    "one in another": (lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Tanh(), mlp(6, 8, 4))), (2, 3), True),
    "a layer alone": (lambda: nn.Linear(6, 4), (6,), True),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)),
        (2, 3, 3),
        True,
    ),
    "noise first": (lambda: nn.Sequential(Noisy(), mlp(6, 8, 4)), (6,), False),
    "torch's noise first": (
        lambda: nn.Sequential(nn.FractionalMaxPool2d(2, 3), nn.Flatten(), nn.Linear(9, 4)),
        (1, 5, 5),
        False,
    ),
    "a hook within": (lambda: nn.Sequential(heard(mlp(6, 8, 5)), nn.Linear(5, 4)), (6,), False),
}


def first_layer(model):
    return next(layer for layer in model.modules() if isinstance(layer, BayesLayer))


def with_a_hook_on_the_first_layer(model):
    heard(first_layer(model))


def with_a_hook_before_it(model):
    heard(model[0])


def with_another_forward_in_its_place(model):
    layer = first_layer(model)
    layer.forward = lambda x: type(layer).forward(layer, x) + 1  # as accelerate wraps them


class Shifted(BayesLayer):
    def forward(self, x):
        return super().forward(x) + 1

    def linear_map(self, x, W, b):
        return nn.functional.linear(x, W, b)


def of_another_class(model):
    first_layer(model).__class__ = Shifted


@pytest.mark.parametrize(
    "change",
    [with_a_hook_on_the_first_layer, with_a_hook_before_it, with_another_forward_in_its_place, of_another_class],
)
def test_what_is_done_to_single_layers_is_done_to_samples(change):
    model = convert(nn.Sequential(nn.Tanh(), mlp(6, 8, 4)), initial_logvar=-30.0).eval()
    x = torch.randn(7, 6)
    plain = predict(model, x, samples=3)
    change(model)
    assert objective.SharedFirstLayer.of(model) is None
    torch.testing.assert_close(predict(model, x, samples=3), model(x).softmax(1))
    assert not torch.allclose(predict(model, x, samples=3), plain)


def test_a_hook_on_all_modules_is_called():
    model, x = convert(mlp(6, 8, 4), initial_logvar=-30.0).eval(), torch.randn(7, 6)
    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: called.append(module))
    try:
        predict(model, x, samples=3)
    finally:
        handle.remove()
    assert first_layer(model) in called


@pytest.mark.parametrize("kind", SEQUENCES)
def test_samples_that_share_their_first_products_are_those_of_copies_of_the_batch(kind):
    make, shape, shared = SEQUENCES[kind]
    model, x = convert(make(), initial_logvar=-1.0).double().eval(), torch.randn(7, *shape, dtype=double)
    assert (objective.SharedFirstLayer.of(model) is not None) == shared
    torch.manual_seed(1)
    ours = [output for output, _ in objective.sampled_outputs(model, x, [3, 2])]
    torch.manual_seed(1)
    copied = [model(x.repeat(count, *[1] * len(shape))) for count in (3, 2)]
    torch.testing.assert_close(ours, copied, rtol=1e-12, atol=1e-12)


def test_a_first_layer_that_does_not_sample_is_left_at_its_means():
    model, x = convert(nn.Linear(6, 4), initial_logvar=-1.0), torch.randn(7, 6)
    model.sampling = False
    torch.testing.assert_close(predict(model, x, samples=3), model(x).softmax(1))


def test_predict_equals_the_deterministic_answer_when_there_is_no_doubt():
    net = nn.Sequential(mlp(6, 8, 4), nn.Dropout(0.5))
    model, x = convert(net, initial_logvar=-30.0), torch.randn(5, 6)
    net.eval()
    torch.testing.assert_close(predict(model, x, samples=3), net(x).softmax(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(predict(model, x, deterministic=True), net(x).softmax(1))
    two = predict(model, x, samples=3, head=lambda output: output[:, 1:3])
    torch.testing.assert_close(two, net(x)[:, 1:3].softmax(1), rtol=1e-4, atol=1e-5)
    assert model.training  # left as it was
    assert all(layer.sampling for layer in bayes_layers(model))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: kl(mlp(2, 2)), "convert"),
        (lambda: predict(mlp(2, 2), torch.zeros(1, 2)), "convert"),
        (lambda: predict(convert(mlp(2, 2)), torch.zeros(1, 2), samples=0), "samples"),
        (lambda: negative_elbo(convert(mlp(2, 2)), torch.zeros(1, 2), torch.zeros(1), data_size=0), "data_size"),
        (lambda: convert(mlp(2, 2), prior_var=0.0), "prior_var"),
    ],
)
def test_bad_settings_are_named(call, word):
    with pytest.raises(AlassoError, match=word):
        call()


# -- a life of two tasks -------------------------------------------------------------------------------------


def rotated_tasks(examples=200):
    """Two rules on different inputs of one net; the inputs of the other rule are noise that carries no label."""
    generator = torch.Generator().manual_seed(11)
    tasks = []
    for own in (0, 1):
        x = torch.randn(examples, 2, generator=generator)
        y = (x[:, own] > 0).long()
        x[:, 1 - own] *= 0.3
        tasks.append((x, y))
    return tasks


def test_vcl_remembers_the_first_task_better_than_plain_training():
    (x1, y1), (x2, y2) = rotated_tasks()
    net = nn.Linear(2, 2)

    def train(model, loss, steps=150):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

    def accuracy(p, y):
        return float((p.argmax(1) == y).float().mean())

    train(net, lambda m: F.cross_entropy(m(x1), y1))
    model = convert(net)
    train(model, lambda m: negative_elbo(m, x1, y1, data_size=len(x1)))
    update_prior(model)
    train(net, lambda m: F.cross_entropy(m(x2), y2), steps=400)
    train(model, lambda m: negative_elbo(m, x2, y2, data_size=len(x2)), steps=400)
    plain, ours = accuracy(net(x1), y1), accuracy(predict(model, x1), y1)
    assert ours > plain + 0.1
    assert accuracy(predict(model, x2), y2) > 0.85


# -- coresets ------------------------------------------------------------------------------------------------


def greedy_k_center(points, size, first):
    """Word for word: again and again the point whose nearest centre is farthest away."""
    chosen = [first]
    while len(chosen) < size:
        gaps = {i: min(math.dist(points[i], points[c]) for c in chosen) for i in range(len(points)) if i not in chosen}
        chosen.append(max(gaps, key=lambda i: (gaps[i], -i)))
    return chosen


def radius(points, centres):
    return max(min(math.dist(p, points[c]) for c in centres) for p in points)


@pytest.mark.parametrize("first", [0, 6])
def test_k_center_is_the_greedy_choice(first):
    x = torch.randn(40, 3, 2, dtype=double)
    got = k_center_coreset(x, 12, first=first)
    assert got.tolist() == greedy_k_center(x.flatten(1).tolist(), 12, first)


@pytest.mark.parametrize("seed", range(5))
def test_k_center_covers_within_twice_the_best_radius(seed):
    x = torch.randn(11, 2, generator=torch.Generator().manual_seed(seed), dtype=double)
    points = x.tolist()
    best = min(radius(points, centres) for centres in itertools.combinations(range(11), 3))
    assert radius(points, k_center_coreset(x, 3).tolist()) <= 2 * best


def test_k_center_takes_copies_and_integers_without_repeats():
    x = torch.tensor([[0], [0], [200], [0], [255]], dtype=torch.uint8)
    assert k_center_coreset(x, 3).tolist() == [0, 4, 2]
    assert sorted(k_center_coreset(x, 5).tolist()) == [0, 1, 2, 3, 4]
    index = k_center_coreset(x, 1, first=None, generator=torch.Generator().manual_seed(1))
    assert index.tolist() == k_center_coreset(x, 1, first=None, generator=torch.Generator().manual_seed(1)).tolist()


def test_random_coreset_has_no_repeats_and_follows_its_generator():
    index = random_coreset(50, 20, torch.Generator().manual_seed(2))
    assert len(set(index.tolist())) == 20
    assert 0 <= int(index.min()) <= int(index.max()) < 50
    assert torch.equal(index, random_coreset(50, 20, torch.Generator().manual_seed(2)))
    # 400 draws of 1 out of 4: each is expected 100 times, with standard deviation √(400·¼·¾) = 8.7.
    counts = torch.stack([random_coreset(4, 1) for _ in range(400)]).flatten().bincount()
    assert ((counts - 100).abs() < 45).all()


@pytest.mark.parametrize("size", [0, 6])
def test_a_coreset_is_neither_empty_nor_larger_than_the_task(size):
    for choose in (lambda: random_coreset(5, size), lambda: k_center_coreset(torch.zeros(5, 2), size)):
        with pytest.raises(AlassoError, match="between 1 and the 5 examples"):
            choose()
    with pytest.raises(AlassoError, match="first"):
        k_center_coreset(torch.zeros(5, 2), 2, first=5)
