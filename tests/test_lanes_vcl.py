"""Stacked runs of VCL against the same runs one by one, with a noise that does not depend on chance."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from alasso import vcl
from alasso.bench._make_streams import make_stream, make_streams
from alasso.bench.config import RunConfig
from alasso.bench.learners import vcl as variational
from alasso.bench.stacking import lane_gradients, lanes, slots, stack
from alasso.bench.streams import Stream
from alasso.bench.training import compiling
from alasso.bench.training import run as train
from alasso.bench.training import trainer as loop
from alasso.bench.training.progress import Observer
from alasso.errors import AlassoError, DivergedError
from alasso.vcl import layers as gaussian_layers

from lane_helpers import (
    CPU,
    Convolutions,
    InDouble,
    Nine,
    assert_alike,
    compared_step_by_step,
    difference_of_recorded_and_compiled_from_plain,
    everything,
    gone_on_with_alone_and_back,
    lane_of,
    largest_difference_from_alone,
    on_gpu,
    own_stream,
    trained,
    trained_in_pieces,
)

double = torch.float64


def small(method="vcl", **changes):
    quick = {"point_epochs": 1, "test_samples": 2}
    if method == "vcl-coreset":
        quick |= {"coreset": 40, "coreset_epochs": 1}
    fields = {"tasks": 3, "epochs": 2, "hidden": 16, "batch_size": 500, **quick, **changes}
    return RunConfig.for_benchmark("permuted-digits", method, **fields)


def own(method="vcl", **changes):
    return RunConfig.own(method, **{"epochs": 2, "batch_size": 32, "point_epochs": 1, "test_samples": 2, **changes})


def varied():
    """Seeds, settings and rates that differ, with coresets and without."""
    return [
        small(),
        small(seed=1, initial_logvar=-3.0),
        small(learning_rate=5e-3, prior_var=0.2, adam_eps=1e-4),
        small("vcl-coreset", seed=2),
        small("vcl-coreset", coreset=300, choose="k-center", initial_logvar=-8.0),
        small(point_epochs=0, initial_logvar=-1.0),
    ]


def by_place_and_value(like):
    """Within ±√2, of variance 1; of a row, the same however many rows stand below it, in a lane or alone.

    In float64 at first: of a large place, a sine in float32 depends on how the sum in it was rounded.
    """
    place = torch.arange(like.numel(), dtype=double, device=like.device).view(like.shape)
    return 2**0.5 * torch.sin(12.9898 * place + like.detach()).to(like.dtype)


@pytest.fixture
def same_noise(monkeypatch):
    """The same for a lane as for the run alone; another one for each input and step."""
    monkeypatch.setattr(gaussian_layers, "standard_noise", by_place_and_value)


# -- steps ------------------------------------------------------------------------------------------------------


def test_every_step_of_a_stack_is_the_step_each_run_would_make_alone(same_noise):
    found = compared_step_by_step(varied())
    assert found.steps == {3 * 2 * 3}
    assert found.difference <= 1, found.where
    for lane, alone in zip(found.together, found.alone, strict=True):
        assert_alike(lane, alone, lane.config, rtol=1e-7)


def test_a_stack_of_one_lane_is_the_run_alone(same_noise, monkeypatch):
    """As it is on a GPU."""
    config = small("vcl-coreset")
    (stream,) = make_streams([config], None, CPU)
    (alone,) = trained([config], [stream])
    monkeypatch.setattr(loop, "steps_for", lanes.StackedSteps)
    (stacked,) = trained([config], [stream])
    assert_alike(stacked, alone, "one lane")


def test_lanes_may_have_tasks_of_different_length_and_heads_of_their_own(same_noise):
    """So N, which the KL term is divided by, differs from lane to lane and from task to task."""
    configs = [own(), own("vcl-coreset", seed=1, coreset=20, coreset_epochs=1), own(seed=2)]
    streams = [own_stream(sizes, seed) for sizes, seed in (((100, 33, 70), 0), ((64, 90, 40), 1), ((70, 20, 70), 2))]
    together = trained(configs, streams, Nine)
    for config, stream, stacked in zip(configs, streams, together, strict=True):
        assert_alike(stacked, *trained([config], [stream], Nine), config.name)


def test_convolutions_are_stacked_too(same_noise):
    def images(seed):
        generator = torch.Generator().manual_seed(seed)
        pairs = [(torch.rand(size, 3, 8, 8, generator=generator), torch.arange(size) % 3) for size in (64, 40)]
        return Stream.of([(pair, pair) for pair in pairs], heads="own")

    configs, streams = [own(seed=seed) for seed in (0, 1)], [images(seed) for seed in (0, 1)]
    for config, stream, stacked in zip(configs, streams, trained(configs, streams, Convolutions), strict=True):
        assert_alike(stacked, *trained([config], [stream], Convolutions), config.name)


def test_a_batch_may_be_sampled_several_times(same_noise):
    """Batches are full: the noise goes by place, and copies stand below a batch's own rows."""
    configs = [own(train_samples=3), own(train_samples=3, seed=1)]
    streams = [own_stream((96, 64), seed) for seed in (0, 1)]
    together = trained(configs, streams, Nine)
    for config, stream, stacked in zip(configs, streams, together, strict=True):
        assert_alike(stacked, *trained([config], [stream], Nine), config.name)
    (once,) = trained([own()], streams[:1], Nine)
    assert not torch.equal(*(everything(lane)["model.net.1.weight_logvar"] for lane in (once, together[0])))


def test_a_clipped_loss_of_a_stack_is_that_of_its_lanes_alone(same_noise):
    configs = [small(tasks=2, loss_clip=0.09, seed=seed) for seed in (0, 1)]
    streams = make_streams(configs, None, CPU)
    for config, stream, stacked in zip(configs, streams, trained(configs, streams), strict=True):
        assert_alike(stacked, *trained([config], [stream]), config.name)


def test_bf16_stays_near_float32(same_noise):
    def weights(precision):
        configs = [small(tasks=2, precision=precision, seed=seed) for seed in (0, 1)]
        return [everything(lane) for lane in trained(configs, make_streams(configs, None, CPU), None)]

    for low, full in zip(weights("bf16"), weights("tf32"), strict=True):
        for name in (name for name in full if name.startswith("model")):
            assert low[name].dtype == torch.float32 and torch.isfinite(low[name]).all()
            assert (low[name] - full[name]).abs().mean() < 0.1 * full[name].abs().mean() + 1e-3, name
        assert not torch.equal(low["model.1.weight_mean"], full["model.1.weight_mean"])


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("tf32", torch.float32)])
def test_alone_products_are_in_the_precision_that_was_asked_for(precision, dtype, monkeypatch):
    """In steps, on coresets and in answers; as in a stack, which `test_bf16_stays_near_float32` is about."""
    config = small("vcl-coreset", tasks=2, precision=precision)
    (lane,) = trained([config], make_streams([config], None, CPU), None)
    learner, seen = lane.learner, []
    product = gaussian_layers.BayesLinear.linear_map

    def noting(layer, x, W, b):
        seen.append(product(layer, x, W, b).dtype)
        return product(layer, x, W, b)

    monkeypatch.setattr(gaussian_layers.BayesLinear, "linear_map", noting)
    for use in (
        lambda: learner.step(1, learner.epoch_plan(1, 0)[0]),
        lambda: learner.train_on_coresets(1),
        lambda: learner.accuracies_on(learner.stream.tasks),
    ):
        seen.clear()
        use()
        assert set(seen) == {dtype}


@pytest.mark.parametrize("method", ["vcl", "vcl-coreset"])
def test_a_run_that_diverges_is_no_result(method):
    config = small(method, tasks=2, epochs=1, learning_rate=1e30)
    with pytest.raises(DivergedError, match="no longer finite"):
        train.run(config, device="cpu")


def test_a_coreset_as_large_as_a_task_is_refused():
    with pytest.raises(AlassoError, match="smaller than a task, of which one has 1437 examples, not 1437"):
        train.run(small("vcl-coreset", coreset=1437), device="cpu")


def test_how_many_lanes_fit_is_asked_of_each_kind(monkeypatch):
    """Those of VCL have twice the parameters."""
    configs = [small(), small(seed=1), *(RunConfig.for_benchmark("permuted-digits", "sgd", seed=s) for s in (0, 1))]
    configs = [replace(config, tasks=1, epochs=1, hidden=16, batch_size=500) for config in configs]
    together = [
        lane_of(config, stream) for config, stream in zip(configs, make_streams(configs, None, CPU), strict=True)
    ]
    monkeypatch.setattr(train, "that_fit", lambda learner: 1 if isinstance(learner, variational.Variational) else 2)
    assert [[lane.config.method for lane in group] for group in train.in_step(together)] == [
        ["vcl"],
        ["vcl"],
        ["sgd", "sgd"],
    ]


def test_lanes_have_each_a_noise_of_their_own():
    config = small(tasks=1)
    one, other = trained([config] * 2, make_streams([config] * 2, None, CPU))
    assert not torch.equal(one.learner.model.net[1].weight_mean, other.learner.model.net[1].weight_mean)


def test_what_a_lane_starts_from_depends_on_its_own_seed_alone():
    configs = [small(seed=seed) for seed in (1, 2, 3)]
    streams = make_streams(configs, None, CPU)
    lanes_ = [lane_of(config, stream) for config, stream in zip(configs, streams, strict=True)]
    for config, stream, beside in zip(configs, streams, lanes_, strict=True):
        beside.learner.begin_task(0)
        alone = lane_of(config, stream)
        alone.learner.begin_task(0)
        assert torch.equal(beside.learner.model.net[1].weight_mean, alone.learner.model.net[1].weight_mean)


# -- the passes over means and log-variances ------------------------------------------------------------------------


def gaussians(lanes_, count, dtype=double, device="cpu"):
    """Means, log-variances, and their priors."""
    generator = torch.Generator().manual_seed(3)
    mean, prior_mean = (torch.randn(lanes_, count, generator=generator, dtype=double) for _ in range(2))
    logvar, prior_logvar = (-6 * torch.rand(lanes_, count, generator=generator, dtype=double) for _ in range(2))
    logvar[:, : count // 2] = prior_logvar[:, : count // 2]  # as at the beginning of a task
    return [tensor.to(device, dtype) for tensor in (mean, logvar, prior_mean, prior_logvar)]


def test_gradients_of_the_kl_term_are_those_of_autograd():
    mean, logvar, prior_mean, prior_logvar = (tensor[0] for tensor in gaussians(1, 50))
    mean.requires_grad_()
    logvar.requires_grad_()
    (vcl.kl_gaussians(mean, logvar, prior_mean, prior_logvar.exp()) / 300).backward()
    spring = 2 * vcl.kl_stiffness(prior_logvar.exp(), 300) * (mean - prior_mean)
    torch.testing.assert_close(spring, mean.grad, rtol=1e-12, atol=1e-15)
    ours = vcl.kl_grad_by_logvar(logvar, prior_logvar, 0.5 / 300)
    torch.testing.assert_close(ours, logvar.grad, rtol=1e-12, atol=1e-15)


def test_the_passes_are_the_kl_term_by_autograd_and_torchs_adam():
    """Three lanes with rates, sizes of task and ε of their own; the second one makes no step the second time."""
    mean, logvar, prior_mean, prior_logvar = gaussians(3, 40)
    rates, sizes, epsilons = (1e-3, 2e-2, 0.1), (10, 300, 60_000), (1e-8, 1e-8, 1e-3)
    generator = torch.Generator().manual_seed(4)
    gradients = torch.randn(5, 2, 3, 40, generator=generator, dtype=double)
    numbers = (rates, epsilons, [0.5 / n for n in sizes])
    rate, epsilon, half_share = (torch.tensor(of_lanes, dtype=double)[:, None] for of_lanes in numbers)
    stiffness = torch.stack([vcl.kl_stiffness(row.exp(), n) for row, n in zip(prior_logvar, sizes, strict=True)])
    means = slots.EvenSlot(mean.clone(), *(torch.zeros_like(mean) for _ in range(2)), prior_mean, stiffness)
    logvars = slots.LogvarSlot(logvar.clone(), *(torch.zeros_like(mean) for _ in range(2)), prior_logvar, logvar.exp())
    steps = torch.zeros(3, 1)
    for i, (by_mean, by_variance) in enumerate(gradients):
        share = torch.tensor([[1.0], [0.0 if i == 1 else 1.0], [1.0]])
        pace = stack.pace_of_step_(steps, rate, share)
        slots.even_spring_and_adam_(*means, by_mean, *pace, epsilon)
        slots.logvar_and_adam_(*logvars, by_variance, *pace, epsilon, half_share)
    for lane in range(3):
        parameters = [nn.Parameter(tensor[lane].clone()) for tensor in (mean, logvar)]
        adam = torch.optim.Adam(parameters, rates[lane], eps=epsilons[lane])
        for i, of_step in enumerate(gradients):
            if lane == 1 and i == 1:
                continue
            adam.zero_grad()
            term = vcl.kl_gaussians(*parameters, prior_mean[lane], prior_logvar[lane].exp()) / sizes[lane]
            by_mean, by_variance = of_step[:, lane]
            (term + (by_mean * parameters[0]).sum() + (by_variance * parameters[1].exp()).sum()).backward()
            adam.step()
        for slot, parameter in zip((means, logvars), parameters, strict=True):
            state = adam.state[parameter]
            wanted = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
            for got, want in zip(slot[:3], wanted, strict=True):
                torch.testing.assert_close(got[lane], want, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(logvars.variance, logvars.theta.exp(), rtol=1e-12, atol=0)


def test_a_lane_that_is_not_active_stays_as_it_is():
    for kind, arguments, _ in arguments_and_exact_ones("cpu", 7, double):
        before = [tensor.clone() for tensor in arguments]
        slots.PASSES[kind](*arguments)
        for name, new, old in zip(kind._fields, arguments, before, strict=False):
            assert torch.equal(new[1], old[1]), name
            assert torch.equal(new[0], old[0]) == (name in ("anchor", "stiffness")), name


def arguments_and_exact_ones(device, count, dtype=torch.float32):
    """For either pass, its arguments in the middle of a training of three lanes, the second one inactive."""
    mean, logvar, prior_mean, prior_logvar = gaussians(3, count, dtype, device)
    generator = torch.Generator().manual_seed(5)
    m, v, grad = (torch.rand(3, count, generator=generator, dtype=double).to(device, dtype) for _ in range(3))
    numbers = ([1e-3, 2e-3, 3e-3], [0.5, 0.7, 1.0], [True, False, True], [1e-8, 1e-8, 1e-3], [0.05, 0.01, 1e-5])
    step_size, root, active, epsilon, half_share = (
        torch.tensor(n, dtype=torch.bool if n[0] is True else dtype, device=device)[:, None] for n in numbers
    )
    pace = [step_size, root, active, epsilon]
    stiffness = half_share / prior_logvar.exp()
    rows = {
        slots.EvenSlot: [mean, m.clone(), v.clone(), prior_mean, stiffness, grad, *pace],
        slots.LogvarSlot: [logvar, m, v, prior_logvar, logvar.exp(), grad, *pace, half_share],
    }
    for kind, arguments in rows.items():
        exact = [tensor.to("cpu", double) if tensor.is_floating_point() else tensor.cpu() for tensor in arguments]
        yield kind, arguments, exact


# -- what is stacked, and with what ----------------------------------------------------------------------------------


def test_vcl_is_stacked_with_vcl_only():
    configs = [
        small(), RunConfig.for_benchmark("permuted-digits", "sgd", tasks=3, epochs=2, hidden=16, batch_size=500),
        small("vcl-coreset"), small(seed=1, initial_logvar=-3.0), small(train_samples=2), small(hidden=8),
        small(optimizer="sgd"),
    ]  # fmt: skip
    groups = [[c.method for c in group] for group in lanes.grouped(configs, 8)]
    assert groups == [["vcl", "vcl-coreset", "vcl"], ["sgd"], ["vcl"], ["vcl"], ["vcl"]]
    together = train.run_together(configs[:4], device="cpu")
    assert [result.environment["lanes"] for result in together] == [3, 1, 3, 3]


def test_networks_of_vcl_do_not_share_what_is_compiled_with_plain_ones():
    stream = make_stream(small(), None, CPU)
    plain = RunConfig.for_benchmark("permuted-digits", "sgd", tasks=3, hidden=16)
    built_as = [train.make_learner(config, stream, None, CPU).built_as for config in (plain, small(), small(seed=1))]
    assert built_as[0] != built_as[1] == built_as[2]


def test_a_network_with_state_of_its_own_goes_alone():
    def with_batch_norm():
        return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Linear(16, 10))

    configs = [small(tasks=1), small(tasks=1, seed=1)]
    together = train.run_together(configs, model=with_batch_norm, device="cpu")
    assert [result.environment["lanes"] for result in together] == [1, 1]


def test_a_learner_with_coresets_says_what_a_step_takes_before_its_first_task():
    """How many lanes fit into memory is asked before."""
    learner = lane_of(small("vcl-coreset"), make_stream(small(), None, CPU)).learner
    learner.prepare(0)
    assert torch.isfinite(learner.loss(0, learner.epoch_plan(0, 0)[0]))
    learner.begin_task(0)
    learner.prepare(0)
    assert learner.data_size == 1437 - 40 == sum(len(plan.own) for plan in learner.epoch_plan(0, 0))


# -- answers, files, news ----------------------------------------------------------------------------------------------


def test_training_on_coresets_leaves_no_trace_in_a_stack():
    configs = [small("vcl-coreset", tasks=2, seed=seed) for seed in (0, 1)]
    together = trained(configs, make_streams(configs, None, CPU))
    before, state = [copy.deepcopy(everything(lane)) for lane in together], torch.get_rng_state()
    answers = [lane.learner.accuracies(1, []) for lane in together]
    assert answers == [lane.position.accuracy[-1] for lane in together]
    assert torch.equal(torch.get_rng_state(), state)
    for lane, kept in zip(together, before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in everything(lane).items())


def test_a_copy_of_a_lane_holds_that_lane_only():
    configs = [small("vcl-coreset", tasks=1, seed=seed) for seed in range(3)]
    lane = trained(configs, make_streams(configs, None, CPU))[1]
    for tensor in copy.deepcopy(lane.learner.model).state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_a_stack_in_pieces_equals_the_undisturbed_one(tmp_path):
    """With noise of chance: it goes on where it was."""
    configs = [small(tasks=2), small("vcl-coreset", tasks=2, seed=3), small(tasks=2, initial_logvar=-2.0)]
    undisturbed = trained(configs, make_streams(configs, None, CPU), None)
    pieces = trained_in_pieces(configs, tmp_path)
    for got, want in zip(pieces, undisturbed, strict=True):
        assert got.position.accuracy == want.position.accuracy
        expected = everything(want)
        assert all(torch.equal(value, expected[name]) for name, value in everything(got).items())


def test_a_lane_of_a_stack_goes_on_alone_and_back(same_noise, tmp_path):
    """What a stack saved is a checkpoint like any other."""
    configs = [small(tasks=2, seed=0), small("vcl-coreset", tasks=2, seed=1)]
    streams = make_streams(configs, None, CPU)
    lanes_ = gone_on_with_alone_and_back(configs, streams, tmp_path)
    for config, stream, lane in zip(configs, streams, lanes_, strict=True):
        assert largest_difference_from_alone(config, stream, lane) < 1e-9, config.method


class Told(Observer):
    wants_epochs = True

    def __init__(self):
        self.heard = []

    def epoch_done(self, task, epoch, loss, penalty, accuracy, seconds_left):
        self.heard.append((loss, penalty))


def test_loss_and_kl_term_are_told_apart_and_alike_in_a_stack_and_alone(same_noise):
    config = small(tasks=2)
    stream = make_stream(config, None, CPU)

    def told(group):
        observers = [Told() for _ in group]
        for lane, observer in zip(group, observers, strict=True):
            lane.observer = observer
        loop.Trainer(group, 1e9, lambda: False).train()
        return observers[0].heard

    stacked = told([lane_of(config, stream), lane_of(small(tasks=2, seed=1), stream)])
    alone_lane = lane_of(config, stream)
    alone = told([alone_lane])
    np.testing.assert_allclose(stacked, alone, rtol=1e-9)
    learner = lane_of(config, stream).learner
    learner.prepare(0)
    plan = learner.epoch_plan(0, 0)[0]
    x, y = stream.tasks[0].train.batch(plan.own)
    whole = vcl.negative_elbo(learner.model, x, y, data_size=len(stream.tasks[0].train), samples=1)
    apart = learner.loss(0, plan) + learner.penalty()
    torch.testing.assert_close(apart, whole)
    assert not learner.penalty().requires_grad and float(learner.penalty()) > 0


# -- compiled and recorded ---------------------------------------------------------------------------------------------


def test_a_narrow_layer_as_a_sum_is_the_layer(same_noise):
    wide = lane_gradients.NARROW + 1
    network = vcl.convert(nn.Sequential(nn.Linear(7, lane_gradients.NARROW), nn.Linear(16, wide))).double()
    x = torch.randn(4, 7, dtype=double, requires_grad=True)

    def found():
        out = network(x)
        return [out, *torch.autograd.grad(out.pow(3).sum(), [x, *network.parameters()])]

    products = found()
    lane_gradients.make_sums_of_narrow_layers(network)
    assert [type(layer) for layer in network] == [lane_gradients.NarrowBayesLinear, gaussian_layers.BayesLinear]
    for product, weighted_sum in zip(products, found(), strict=True):
        torch.testing.assert_close(weighted_sum, product, rtol=1e-12, atol=1e-12)


class OneLayer(InDouble):
    """Few tensors: each shape is compiled for itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()


@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it compiles
@pytest.mark.parametrize(("count", "small_tensors", "network"), [(1, 1 << 16, InDouble), (2, 1, OneLayer)])
def test_compiled_steps_equal_plain_ones(count, small_tensors, network, same_noise, request, monkeypatch, caplog):
    monkeypatch.setattr(loop, "steps_for", lanes.StackedSteps)
    configs = [small(tasks=2, epochs=1, seed=seed, initial_logvar=-3.0 - seed) for seed in range(count)]
    streams = make_streams(configs, None, CPU)
    plain = trained(configs, streams, network)
    monkeypatch.setattr(stack, "SMALL", small_tensors)
    request.getfixturevalue("compiled_on_a_cpu")
    with caplog.at_level("INFO", "alasso"):
        compiled = trained(configs, streams, network)
    assert "not compiled" not in caplog.text
    for got, want in zip(compiled, plain, strict=True):
        assert_alike(got, want, "compiled")


@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it compiles
@pytest.mark.parametrize("count", [1, 2])
def test_compiled_noise_is_drawn_anew_for_each_lane_and_step(count, compiled_on_a_cpu, caplog):
    """The gradient by the mean of one output's bias, where nothing but the noise changes."""
    config = small(tasks=1)
    learners = [lane_of(config, make_stream(config, None, CPU)).learner for _ in range(count)]
    one = stack.Stack(learners)
    one.adopt()
    with torch.no_grad():
        for learner in learners:
            for name, parameter in learner.model.named_parameters():
                parameter.fill_(-1.0 if name.endswith("logvar") else 0.1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 50, 64, generator=generator).expand(count, -1, -1).contiguous()
    y, share = torch.zeros(count, 50, dtype=torch.long), torch.full((count, 50), 0.02, dtype=double)
    batch = lane_gradients.LaneBatch(x, y, share, torch.arange(10).expand(count, -1))
    one.adopt()
    given = {name: slots.given_to_the_network(slot) for name, slot in one.slots.items()}
    weights = {name: tensor[0] if count == 1 else tensor for name, tensor in given.items()}

    def found(plainly):
        """A number for each lane and step."""
        gradients = (one.gradients(weights, batch, plainly)[0] for _ in range(400 // count))
        return torch.stack([gradient["net.5.bias_mean"][..., 0] for gradient in gradients]).flatten()

    with caplog.at_level("INFO", "alasso"):
        drawn, plain = found(False), found(True)
    assert "not compiled" not in caplog.text
    assert len(drawn.unique()) == 400
    # A mean of 400 strays by σ/20, the difference of two by √2 more; a standard deviation by σ/28.
    assert abs(drawn.mean() - plain.mean()) < 5 * 2**0.5 * plain.std() / 20
    assert 0.7 < drawn.std() / plain.std() < 1.4


@on_gpu
@pytest.mark.parametrize("one_shape", [False, True])
@pytest.mark.parametrize("count", [1, 33, 70_001])
def test_the_compiled_passes_equal_the_plain_ones(count, one_shape):
    for kind, arguments, exact in arguments_and_exact_ones("cuda", count):
        before = [tensor.clone() for tensor in arguments]
        run = compiling.compiled(slots.PASSES[kind], 3, tuple(arguments[0].shape) if one_shape else ())
        run(*arguments)
        assert run.run is not run.plain
        slots.PASSES[kind](*exact)
        for name, new, old, expected in zip(kind._fields, arguments, before, exact, strict=False):
            torch.testing.assert_close(new.cpu().double(), expected, rtol=1e-5, atol=1e-6, msg=name)
            assert torch.equal(new[1], old[1]), f"{name}: a lane that is not active stays as it is"


@on_gpu
@pytest.mark.parametrize("small_tensors", [1, 1 << 16])
@pytest.mark.parametrize("count", [1, 3])
def test_recorded_and_compiled_steps_equal_plain_ones(count, small_tensors, same_noise, monkeypatch):
    """The network of the paper, narrower: recorded and compiled against neither."""
    monkeypatch.setattr(stack, "SMALL", small_tensors)
    configs = [
        small(tasks=2, epochs=4, hidden=128, batch_size=64, seed=seed, precision="float32") for seed in range(count)
    ]
    assert difference_of_recorded_and_compiled_from_plain(configs, monkeypatch) < 0.02


@on_gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "float32"])
def test_on_a_gpu_a_stack_learns_what_its_lanes_learn_alone_on_a_cpu(precision):
    """With noise of chance on either side."""
    changes = {"precision": precision, "epochs": 10, "hidden": 64, "batch_size": 100, "test_samples": 20}
    configs = [small(method, seed=seed, **changes) for method, seed in (("vcl", 0), ("vcl-coreset", 0), ("vcl", 1))]
    for config, stacked in zip(configs, train.run_together(configs, device="cuda"), strict=True):
        alone = train.run(config, device="cpu")
        np.testing.assert_allclose(stacked.accuracy[-1], alone.accuracy[-1], atol=0.1, err_msg=config.method)


@on_gpu
def test_on_a_gpu_a_recorded_point_estimate_is_that_of_steps_one_by_one(monkeypatch):
    config = small(tasks=1, batch_size=100, point_epochs=3, precision="float32")
    device = torch.device("cuda", 0)
    stream = make_stream(config, None, device)

    def start():
        learner = train.begun(config, stream, None, device, None, None, train.Quiet()).learner
        learner.begin_task(0)
        return learner.model[1].weight_mean.detach()

    recorded = start()
    monkeypatch.setattr(variational, "GraphedSteps", variational.DirectSteps)
    direct = start()
    assert (recorded - direct).abs().mean() < 0.01 * direct.abs().mean()


@on_gpu
def test_on_a_gpu_replayed_steps_draw_their_noise_anew():
    """The weights stand still and the batches are the same: what differs from one replay to the next is the noise."""
    config = small(tasks=1, batch_size=100, point_epochs=0, initial_logvar=-1.0, precision="float32")
    device = torch.device("cuda", 0)
    lane = train.begun(config, make_stream(config, None, device), None, device, None, None, train.Quiet())
    steps = loop.Trainer([lane], 1e9, lambda: False).steps
    lane.learner.begin_task(0)
    lane.learner.prepare(0)
    steps.begin(0)
    steps.stack.rate.zero_()
    plans = lane.learner.epoch_plan(0, 0)
    steps.begin_epoch(steps.planned([plans]), [len(plans)])
    for i in range(lanes.WARM_UP):
        steps.step(i)
    assert list(steps.recordings) == [lanes.TOGETHER, 1]

    def losses(recording):
        steps.loss_sum.zero_()
        steps.go_to(0)
        recording.replay()
        return float(steps.loss_sum)

    for recording in steps.recordings.values():
        found = {losses(recording) for _ in range(5)}
        lane.learner.accuracies_on(lane.stream.tasks)  # which leaves no trace in the random numbers
        assert len(found | {losses(recording) for _ in range(5)}) == 10
