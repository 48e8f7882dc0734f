"""Stacked runs of IMM with drop-transfer against the same runs one by one, with noise that is the same for both."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from alasso.bench import models
from alasso.bench._make_streams import make_stream, make_streams
from alasso.bench.config import RunConfig
from alasso.bench.stacking import lane_drops, lane_gradients, lanes, slots, stack
from alasso.bench.streams import Stream
from alasso.bench.training import run as train
from alasso.bench.training import trainer as loop
from alasso.errors import AlassoError
from alasso.methods import imm

from lane_helpers import (
    CPU,
    Convolutions,
    InDouble,
    Nine,
    Recorder,
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


def small(method="imm-mean", **changes):
    fields = {"tasks": 3, "epochs": 2, "hidden": 16, "batch_size": 500, "transfer": "drop", **changes}
    return RunConfig.for_benchmark("permuted-digits", method, **fields)


def own(method="imm-mean", **changes):
    return RunConfig.own(method, **{"epochs": 2, "batch_size": 32, "transfer": "drop", **changes})


def varied():
    """Both merges; seeds, settings and rates that differ; with l2 and without."""
    return [
        small(),
        small(seed=1, drop=0.2),
        small("imm-mode", transfer="l2-drop", lam=0.1),
        small("imm-mode", seed=2, drop=0.8, last_weight=0.3),
        small(transfer="l2-drop", lam=3.0, drop=0.35, last_weight=0.6, start="last"),
        small("imm-mode", transfer="l2-drop", lam=0.5, labels="expected", learning_rate=5e-3, adam_eps=1e-4),
        small(drop=0.0),
    ]


def by_place(like):
    """In [0, 1); of a row, the same however many rows stand below it, in a lane or alone."""
    place = torch.arange(like.numel(), dtype=double, device=like.device).view(like.shape)
    return torch.remainder(0.6180339887 * place, 1)


def by_place_and_value(like):
    """Another one for each input and step, too."""
    return torch.remainder(by_place(like) + 3 * like.detach().double(), 1)


@pytest.fixture
def same_noise(monkeypatch):
    """The same for a lane as for the run alone."""
    monkeypatch.setattr(imm, "uniform_noise", by_place_and_value)


# -- steps ------------------------------------------------------------------------------------------------------


def test_every_step_of_a_stack_is_the_step_each_run_would_make_alone(same_noise):
    found = compared_step_by_step(varied())
    assert found.steps == {3 * 2 * 3}
    assert found.difference <= 1, found.where
    for lane, alone in zip(found.together, found.alone, strict=True):
        assert_alike(lane, alone, lane.config, rtol=1e-7)


def test_what_is_dropped_matters_from_the_second_task_on():
    """With noise of chance: in the first task, steps are those without drop-transfer to the last bit."""
    configs = [small(), small(seed=1, drop=0.9)]
    streams = make_streams(configs, None, CPU)
    without = [small(transfer="weight"), small(transfer="weight", seed=1)]

    def weights_after_each_step(configs):
        group = [lane_of(config, stream) for config, stream in zip(configs, streams, strict=True)]
        recorder = Recorder(group)
        loop.Trainer(group, 1e9, recorder).train()
        return [[step["model.net.1.weight"] for step in of_lane] for of_lane in recorder.seen]

    pairs = zip(weights_after_each_step(configs), weights_after_each_step(without), strict=True)
    for dropped, plain in pairs:
        same = [torch.equal(one, other) for one, other in zip(dropped, plain, strict=True)]
        assert same == [True] * 6 + [False] * 12


def test_a_stack_of_one_lane_is_the_run_alone(same_noise, monkeypatch):
    """As it is on a GPU."""
    config = small("imm-mode", transfer="l2-drop", drop=0.3)
    (stream,) = make_streams([config], None, CPU)
    (alone,) = trained([config], [stream])
    monkeypatch.setattr(loop, "steps_for", lanes.StackedSteps)
    (stacked,) = trained([config], [stream])
    assert_alike(stacked, alone, "one lane")


def test_lanes_may_have_tasks_of_different_length_and_heads_of_their_own(same_noise):
    configs = [own(), own("imm-mode", seed=1, drop=0.3), own(transfer="l2-drop", seed=2)]
    streams = [own_stream(sizes, seed) for sizes, seed in (((100, 33, 70), 0), ((64, 90, 40), 1), ((70, 20, 70), 2))]
    together = trained(configs, streams, Nine)
    for config, stream, stacked in zip(configs, streams, together, strict=True):
        assert_alike(stacked, *trained([config], [stream], Nine), config.name)


def test_lanes_with_a_memory_rehearse_what_they_would_alone(same_noise):
    configs = [small(memory=20), small("imm-mode", memory=20, seed=1, drop=0.2)]
    streams = make_streams(configs, None, CPU)
    for config, stream, stacked in zip(configs, streams, trained(configs, streams), strict=True):
        assert_alike(stacked, *trained([config], [stream]), config.name)


def test_convolutions_are_stacked_too(same_noise):
    def images(seed):
        generator = torch.Generator().manual_seed(seed)
        pairs = [(torch.rand(size, 3, 8, 8, generator=generator), torch.arange(size) % 3) for size in (64, 40)]
        return Stream.of([(pair, pair) for pair in pairs], heads="own")

    configs = [own(seed=seed, drop=0.3 + 0.2 * seed) for seed in (0, 1)]
    streams = [images(seed) for seed in (0, 1)]
    for config, stream, stacked in zip(configs, streams, trained(configs, streams, Convolutions), strict=True):
        assert_alike(stacked, *trained([config], [stream], Convolutions), config.name)


class WithoutBias(InDouble):
    """And with a hidden layer that is called by keyword, and twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = (nn.Linear(n, 16, bias=False).double() for n in (64, 16))
        self.net = nn.Linear(16, 10).double()

    def forward(self, x):
        once = self.again(input=self.first(x.double()).relu()).relu()
        return self.net(self.again(once).relu())


def test_layers_may_lack_a_bias_and_be_used_twice(same_noise):
    configs = [small(tasks=2), small("imm-mode", tasks=2, seed=1, drop=0.3)]
    streams = make_streams(configs, None, CPU)
    for config, stream, stacked in zip(configs, streams, trained(configs, streams, WithoutBias), strict=True):
        assert_alike(stacked, *trained([config], [stream], WithoutBias), config.name)


def test_bf16_stays_near_float32(monkeypatch):
    monkeypatch.setattr(imm, "uniform_noise", by_place)

    def weights(precision):
        configs = [small(tasks=2, precision=precision, seed=seed, drop=0.1) for seed in (0, 1)]
        return [everything(lane) for lane in trained(configs, make_streams(configs, None, CPU), None)]

    for low, full in zip(weights("bf16"), weights("tf32"), strict=True):
        for name in (name for name in full if name.startswith("model")):
            assert low[name].dtype == torch.float32 and torch.isfinite(low[name]).all()
            assert (low[name] - full[name]).abs().mean() < 0.1 * full[name].abs().mean() + 1e-3, name
        assert not torch.equal(low["model.1.weight"], full["model.1.weight"])


def test_lanes_have_each_a_noise_of_their_own():
    """Twins, alike to the last bit until nodes are dropped."""
    for tasks in (1, 2):
        config = small(tasks=tasks)
        one, other = trained([config] * 2, make_streams([config] * 2, None, CPU))
        alike = torch.equal(*(lane.learner.model.net[1].weight for lane in (one, other)))
        assert alike == (tasks == 1)


# -- the network ---------------------------------------------------------------------------------------------------


def test_the_layers_of_a_stack_that_drop_nodes_are_those_of_the_run_alone():
    for model in (models.mlp((64,), 10, hidden=16), models.cifar_cnn((3, 8, 8), 6), WithoutBias()):
        with imm.DropTransfer(model):
            dropping = {name for name, layer in model.named_modules() if layer._forward_hooks}
        drops = lane_drops.LaneDrops(model.to("meta"), 2, CPU)
        assert {name.rpartition(".")[0] for name in drops.anchors} == dropping
        assert {name.rpartition(".")[0] for name in drops.chances} == dropping
        own_names = {name for name, _ in model.named_parameters()}
        assert set(drops.anchors.values()) == {n for n in own_names if n.rpartition(".")[0] in dropping}


class Hidden(nn.Module):
    """Says what its hidden layer puts out."""

    def __init__(self, width):
        super().__init__()
        self.hidden, self.output = nn.Linear(1, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.hidden(x)


def test_each_lane_drops_its_own_share_of_nodes_to_its_own_past():
    """Nodes rise by the lane's number since the task began; they are dropped to nought, or rise by 1/(1 − p) of it."""
    network, chance = Hidden(20_000), torch.tensor([0.0, 0.2, 0.7])
    drops = lane_drops.LaneDrops(network, 3, CPU)
    past = {f"hidden.{name}": torch.randn(3, *p.shape) for name, p in network.hidden.named_parameters()}
    rise = torch.tensor([1.0, 2.0, 3.0])
    weights = {"hidden.weight": past["hidden.weight"], "hidden.bias": past["hidden.bias"] + rise[:, None]}
    beside = {name: past[of] for name, of in drops.anchors.items()} | dict.fromkeys(drops.chances, chance)
    x = torch.ones(3, 1, 1)

    def risen():
        run = vmap(lambda given, inputs: functional_call(network, given, inputs), randomness="different")
        return run({**weights, **beside}, x)[:, 0] - past["hidden.weight"][:, :, 0] - past["hidden.bias"]

    found = risen()
    off = found.abs() < 1e-4
    expected = torch.where(off, 0.0, (rise / (1 - chance))[:, None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    share = off.float().mean(1)
    # Of 20,000 nodes, the share strays by at most √(0.2·0.8 / 20,000) = 0.003 or so; allowed are five of them.
    assert share[0] == 0 and (share - chance).abs().max() < 0.017
    again = risen().abs() < 1e-4
    assert not torch.equal(again[1:], off[1:]) and not torch.equal(off[1], off[2])
    network.eval()
    torch.testing.assert_close(risen(), rise[:, None].expand_as(found), rtol=1e-4, atol=1e-4)


def test_a_lane_holds_no_second_copy_of_its_past_and_evaluation_is_left_alone():
    """What drops nodes is the stack's copy of the network; a lane's own answers as it would anyway."""
    configs = [small(tasks=2), small(tasks=2, seed=1)]
    group = [lane_of(c, s) for c, s in zip(configs, make_streams(configs, None, CPU), strict=True)]
    seen = []

    def look():
        for lane in group:
            learner = lane.learner
            hooks = any(layer._forward_hooks for layer in learner.model.modules())
            seen.append((learner.dropping, learner.drop is None, hooks))
        return False

    trainer = loop.Trainer(group, 1e9, look)
    trainer.train()
    assert seen == [(False, True, False)] * 2 * 6 + [(True, True, False)] * 2 * 6
    assert not any(lane.learner.dropping for lane in group)
    for name, parameter in trainer.steps.stack.drops.anchors.items():
        given, slot = trainer.steps.stack.drops.given(trainer.steps.stack.slots), trainer.steps.stack.slots[parameter]
        assert given[name].data_ptr() == slot.anchor.data_ptr()


# -- what is stacked, and with what ---------------------------------------------------------------------------------


def test_drop_transfer_is_stacked_with_drop_transfer_only():
    configs = [
        small(), small(transfer="l2"), small("imm-mode", transfer="l2-drop", drop=0.2, lam=3.0, seed=4),
        small("imm-mode", transfer="weight"), small(last_weight=0.3), small("imm-mode", labels="sampled"),
        small(hidden=8), small(optimizer="sgd"),
    ]  # fmt: skip
    groups = [[configs.index(c) for c in group] for group in lanes.grouped(configs, 8)]
    assert groups == [[0, 2, 4], [1, 3], [5], [6], [7]]
    together = train.run_together(configs[:3], device="cpu")
    assert [result.environment["lanes"] for result in together] == [2, 1, 2]


def test_networks_that_drop_nodes_do_not_share_what_is_compiled_with_others():
    def built_as(**changes):
        config = small(**changes)
        learner = train.make_learner(config, make_stream(config, None, CPU), None, CPU)
        return stack.Stack([learner]).gradients.built_as

    assert built_as() == built_as(seed=1, drop=0.1, transfer="l2-drop") != built_as(transfer="l2")
    assert built_as(transfer="l2") == train.make_learner(small(), make_stream(small(), None, CPU), None, CPU).built_as
    learner = lane_of(small(), make_stream(small(), None, CPU)).learner
    assert stack.Stack([learner]).gradients.built_as is None  # a network of one's own


class Bounded(nn.Module):
    def forward(self, W):
        return W.tanh()


def bounded():
    layer = nn.utils.parametrize.register_parametrization(nn.Linear(64, 16), "weight", Bounded())
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(16, 10))


def test_a_network_whose_weights_are_no_parameters_goes_alone(same_noise):
    """Their anchors are not what its layers were."""
    configs = [small(tasks=2, seed=seed, epochs=1) for seed in (0, 1)]
    alone = [train.run(config, model=bounded, device="cpu").accuracy for config in configs]
    together = train.run_together(configs, model=bounded, device="cpu")
    assert [result.environment["lanes"] for result in together] == [1, 1]
    assert [result.accuracy for result in together] == alone
    plain = [small(transfer="weight", tasks=1, seed=seed) for seed in (0, 1)]
    assert train.run_together(plain, model=bounded, device="cpu")[0].environment["lanes"] == 2


def test_a_network_without_hidden_layers_is_refused_in_words():
    configs = [small(seed=seed, epochs=1) for seed in (0, 1)]
    with pytest.raises(AlassoError, match="finds no hidden"):
        train.run_together(configs, model=lambda: nn.Linear(64, 10), device="cpu")


@pytest.mark.parametrize("drop", [-0.1, 1.0, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused_before_anything_is_trained(drop):
    with pytest.raises(AlassoError, match=f"drop must lie between 0 and 1, and below 1, not be {drop}"):
        small(drop=drop)


def test_what_a_step_takes_is_asked_of_one_that_drops(monkeypatch):
    """How many lanes fit into memory is asked before the first task, in which nothing is dropped."""
    seen = []
    monkeypatch.setattr(imm, "uniform_noise", lambda like: seen.append(like.shape) or torch.rand_like(like))
    for transfer, expected in (("drop", [(500, 16)] * 2), ("l2", [])):
        learner = lane_of(small(transfer=transfer), make_stream(small(), None, CPU)).learner
        seen.clear()
        assert torch.isfinite(learner.trial_loss()) and seen == expected
        assert learner.drop is None and not any(layer._forward_hooks for layer in learner.model.modules())
        learner.loss(0, learner.epoch_plan(0, 0)[0])
        assert seen == expected


def test_what_a_step_takes_is_asked_of_one_that_rehearses():
    for share, most in ((0.5, 1000), (0.8, 2500)):
        learner = lane_of(small(memory=20, memory_share=share), make_stream(small(), None, CPU)).learner
        seen = []
        learner.model.register_forward_hook(lambda _, args, out, seen=seen: seen.append(len(args[0])))
        learner.trial_loss()
        assert seen == [most]


class Frozen(InDouble):
    def __init__(self):
        super().__init__()
        self.net[1].requires_grad_(False)


def test_a_frozen_layer_goes_alone_and_stays_where_it_is(same_noise):
    configs = [small(tasks=2, seed=seed, epochs=1) for seed in (0, 1)]
    for lane in trained(configs[:1], make_streams(configs[:1], None, CPU), Frozen):
        torch.testing.assert_close(lane.learner.model.net[1].weight, first_weights(Frozen, lane), rtol=0, atol=0)
    together = train.run_together(configs, model=Frozen, device="cpu")
    assert [result.environment["lanes"] for result in together] == [1, 1]


def first_weights(model, lane):
    torch.manual_seed(lane.config.seed)
    return model().net[1].weight


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_stack_in_pieces_equals_the_undisturbed_one(tmp_path):
    """With noise of chance: it goes on where it was."""
    configs = [small(tasks=2), small("imm-mode", tasks=2, seed=3), small(tasks=2, transfer="l2-drop", start="last")]
    undisturbed = trained(configs, make_streams(configs, None, CPU), None)
    pieces = trained_in_pieces(configs, tmp_path)
    for got, want in zip(pieces, undisturbed, strict=True):
        assert got.position.accuracy == want.position.accuracy
        expected = everything(want)
        assert all(torch.equal(value, expected[name]) for name, value in everything(got).items())


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_lane_of_a_stack_goes_on_alone_and_back(epochs, same_noise, tmp_path):
    """Stopped after 4 and 9 steps, of 3 in an epoch: as a stack and alone in the middle of a task that drops nodes."""
    configs = [
        small(seed=0, epochs=epochs),
        small("imm-mode", seed=1, epochs=epochs, drop=0.3, last_weight=0.4),
        small(transfer="l2-drop", lam=1.0, start="last", epochs=epochs),
    ]
    streams = make_streams(configs, None, CPU)
    lanes_ = gone_on_with_alone_and_back(configs, streams, tmp_path)
    for config, stream, lane in zip(configs, streams, lanes_, strict=True):
        assert largest_difference_from_alone(config, stream, lane) < 1e-8, config.method


# -- compiled and recorded ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it compiles
@pytest.mark.parametrize("count", [1, 2])
def test_compiled_steps_equal_plain_ones(count, same_noise, request, monkeypatch, caplog):
    monkeypatch.setattr(loop, "steps_for", lanes.StackedSteps)
    configs = [small(tasks=2, epochs=1, seed=seed, drop=0.4 + 0.2 * seed) for seed in range(count)]
    streams = make_streams(configs, None, CPU)
    plain = trained(configs, streams)
    request.getfixturevalue("compiled_on_a_cpu")
    with caplog.at_level("INFO", "alasso"):
        compiled = trained(configs, streams)
    assert "not compiled" not in caplog.text
    for got, want in zip(compiled, plain, strict=True):
        assert_alike(got, want, "compiled")


@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it compiles
@pytest.mark.parametrize("count", [1, 2])
def test_compiled_noise_is_drawn_anew_for_each_lane_and_step(count, compiled_on_a_cpu, caplog):
    """The gradient by one output's bias, where nothing but the noise changes, which in the first task does nothing."""
    config = small()
    learners = [lane_of(config, make_stream(config, None, CPU)).learner for _ in range(count)]
    one = stack.Stack(learners)
    one.adopt()
    with torch.no_grad():
        for parameter in (p for learner in learners for p in learner.model.parameters()):
            parameter += 0.3
    x = torch.rand(1, 50, 64, generator=torch.Generator().manual_seed(0)).expand(count, -1, -1).contiguous()
    y, share = torch.zeros(count, 50, dtype=torch.long), torch.full((count, 50), 0.02, dtype=double)
    batch = lane_gradients.LaneBatch(x, y, share, torch.arange(10).expand(count, -1))
    weights = one.as_given({name: slots.given_to_the_network(slot) for name, slot in one.slots.items()})

    def found(plainly):
        """A number for each lane and step."""
        beside = one.as_given(one.drops.given(one.slots))
        gradients = (one.gradients(weights, batch, plainly, beside)[0] for _ in range(400 // count))
        return torch.stack([gradient["net.5.bias"][..., 0] for gradient in gradients]).flatten()

    with caplog.at_level("INFO", "alasso"):
        assert found(False).std() < 1e-12
        one.drops.chance.fill_(0.5)
        drawn, plain = found(False), found(True)
    assert "not compiled" not in caplog.text
    assert len(drawn.unique()) == len(plain.unique()) == 400
    # A mean of 400 strays by σ/20, the difference of two by √2 more; a standard deviation by σ/28.
    assert abs(drawn.mean() - plain.mean()) < 5 * 2**0.5 * plain.std() / 20
    assert 0.7 < drawn.std() / plain.std() < 1.4


@on_gpu
@pytest.mark.parametrize("small_tensors", [1, 1 << 16])
@pytest.mark.parametrize("count", [1, 3])
def test_recorded_and_compiled_steps_equal_plain_ones(count, small_tensors, monkeypatch):
    """In float64, for what is dropped adds to what rounding grows to. The first task has no drop-transfer, the others
    have, and nothing is recorded anew.
    """
    monkeypatch.setattr(imm, "uniform_noise", by_place)  # by value, a rounding error might drop another node
    monkeypatch.setattr(stack, "SMALL", small_tensors)
    configs = [
        small(epochs=4, batch_size=64, seed=seed, drop=0.3 + 0.2 * seed, precision="float32") for seed in range(count)
    ]
    made = []
    record = lanes.StackedSteps._recorded
    monkeypatch.setattr(lanes.StackedSteps, "_recorded", lambda *of: made.append(of[1]) or record(*of))
    assert difference_of_recorded_and_compiled_from_plain(configs, monkeypatch, InDouble) < 1e-8
    assert made == [lanes.TOGETHER, 1]


@on_gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "float32"])
def test_on_a_gpu_a_stack_learns_what_its_lanes_learn_alone_on_a_cpu(precision):
    """With noise of chance on either side."""
    changes = {"precision": precision, "epochs": 10, "hidden": 64, "batch_size": 100}
    configs = [
        small(method, seed=seed, **changes) for method, seed in (("imm-mean", 0), ("imm-mode", 0), ("imm-mode", 1))
    ]
    together = train.run_together(configs, device="cuda")
    assert [result.environment["lanes"] for result in together] == [3] * 3
    for config, stacked in zip(configs, together, strict=True):
        alone = train.run(config, device="cpu")
        np.testing.assert_allclose(stacked.accuracy[-1], alone.accuracy[-1], atol=0.1, err_msg=config.method)


@on_gpu
def test_on_a_gpu_replayed_steps_draw_their_noise_anew(caplog):
    """The weights stand still, off their anchors, and the batches are the same: what differs from one replay to the
    next is the noise, once nodes are dropped; before, in the first task, nothing does.
    """
    config = small(tasks=1, batch_size=100, precision="float32")
    device = torch.device("cuda", 0)
    lane = train.begun(config, make_stream(config, None, device), None, device, None, None, train.Quiet())
    steps = loop.Trainer([lane], 1e9, lambda: False).steps
    assert isinstance(steps, lanes.StackedSteps)
    lane.learner.begin_task(0)
    lane.learner.prepare(0)
    steps.begin(0)
    plans = lane.learner.epoch_plan(0, 0)
    with caplog.at_level("INFO", "alasso"):
        steps.begin_epoch(steps.planned([plans]), [len(plans)])
        for i in range(lanes.WARM_UP):  # these move the weights
            steps.step(i)
    assert "not compiled" not in caplog.text
    assert list(steps.recordings) == [lanes.TOGETHER, 1]
    steps.stack.rate.zero_()

    def losses(recording):
        steps.loss_sum.zero_()
        steps.go_to(0)
        recording.replay()
        return float(steps.loss_sum)

    for recording in steps.recordings.values():
        steps.stack.drops.chance.zero_()
        without = [losses(recording) for _ in range(5)]
        rounding = 1e-5 * max(without)
        assert max(without) - min(without) < rounding
        steps.stack.drops.chance.fill_(0.5)
        found = {losses(recording) for _ in range(10)}
        assert len(found) == 10 and max(found) - min(found) > 10 * rounding
