"""What the tests of stacked runs share: small runs in float64, and comparisons with the same runs one by one."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from alasso.bench import models
from alasso.bench._make_streams import make_streams
from alasso.bench.learners.base import Regularized
from alasso.bench.stacking import lane_gradients, lanes, stack
from alasso.bench.streams import Stream
from alasso.bench.training import run as train
from alasso.bench.training import trainer as loop

from helpers import StopAt

CPU = torch.device("cpu")


def on_gpu(test):
    """Needs a GPU; there, torch warns of itself while it compiles."""
    quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")
    return pytest.mark.gpu(quiet(test))


class InDouble(nn.Module):
    """The network in float64, where a wrong step cannot hide behind rounding."""

    def __init__(self):
        super().__init__()
        self.net = models.glorot(models.mlp((64,), 10, hidden=16)).double()

    def forward(self, x):
        return self.net(x.double())


def own_stream(sizes, seed):
    """Tasks with classes of their own, and as many examples as ``sizes`` says."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for size in sizes:
        x, y = torch.rand(size, 64, generator=generator), torch.arange(size) % 3
        pairs.append(((x, y), (x[:30], y[:30])))
    return Stream.of(pairs, heads="own")


class Nine(InDouble):
    def __init__(self):
        super().__init__()
        self.net[-1] = models.glorot(nn.Linear(16, 9)).double()


class Convolutions(nn.Module):
    """Split CIFAR's network in float64; without dropout, which would draw from chance."""

    def __init__(self):
        super().__init__()
        net = models.glorot(models.cifar_cnn((3, 8, 8), 6)).double()
        self.net = nn.Sequential(*(layer for layer in net if not isinstance(layer, nn.Dropout)))

    def forward(self, x):
        return self.net(x.double())


def lane_of(config, stream):
    return train.begun(config, stream, InDouble, CPU, None, None, train.Quiet())


def everything(lane):
    """Weights, moments, and the method's whole state."""
    flat = {f"model.{k}": v for k, v in lane.learner.model.state_dict().items()}
    for number, state in lane.learner.optimizer.state_dict()["state"].items():
        flat |= {f"adam.{number}.{k}": torch.as_tensor(v) for k, v in state.items()}
    if isinstance(lane.learner, Regularized):
        for name, state in lane.learner.regularizer.state_dict()["parameters"].items():
            flat |= {f"state.{name}.{k}": v for k, v in state.items()}
    return flat


def assert_alike(stacked, alone, name, rtol=1e-9):
    want = everything(alone)
    got = everything(stacked)
    assert got.keys() == want.keys()
    for part in want:
        torch.testing.assert_close(got[part], want[part], rtol=rtol, atol=1e-12, msg=f"{name}: {part}")
    assert stacked.position.accuracy == alone.position.accuracy
    assert stacked.position.ahead == alone.position.ahead


class Recorder:
    """Keeps everything of every lane after every step."""

    def __init__(self, trained):
        self.trained, self.seen = trained, [[] for _ in trained]

    def __call__(self):
        for lane, kept in zip(self.trained, self.seen, strict=True):
            kept.append({k: v.clone().double() for k, v in everything(lane).items()})
        return False


def trained(configs, streams, model=InDouble, stop=lambda: False):
    group = [
        train.begun(config, stream, model, stream.tasks[0].train.images.device, None, None, train.Quiet())
        for config, stream in zip(configs, streams, strict=True)
    ]
    loop.Trainer(group, 1e9, stop).train()
    return group


def trained_in_pieces(configs, folder):
    """As a stack that is stopped every five steps, and made anew each time from its checkpoints."""
    for _ in range(100):
        streams = make_streams(configs, None, CPU)
        saved = [folder / f"{config.name}.checkpoint" for config in configs]
        lines = zip(configs, streams, saved, strict=True)
        pieces = [train.begun(c, s, None, CPU, f, f, train.Quiet()) for c, s, f in lines]
        (group,) = train.in_step(pieces)
        try:
            loop.Trainer(group, 1e9, StopAt(5)).train()
            return pieces
        except train.Stopped:
            continue
    raise AssertionError("it does not get to its end")


def largest_difference_from_alone(config, stream, lane):
    """Between all that a lane holds at its end and the same run by itself: relative, but for values below 0.001."""
    alone = lane_of(config, stream)
    loop.Trainer([alone], 1e9, lambda: False).train()
    want, got = everything(alone), everything(lane)
    assert got.keys() == want.keys()
    return max(float(((got[name] - want[name]).abs() / (want[name].abs() + 1e-3)).max()) for name in want)


def gone_on_with_alone_and_back(configs, streams, folder):
    """Stopped as a stack, then each lane for a while by itself, then as a stack again, to the end."""
    files = [folder / f"{config.name}.checkpoint" for config in configs]
    numbers = range(len(configs))

    def saved(some):
        return [train.begun(configs[i], streams[i], InDouble, CPU, files[i], files[i], train.Quiet()) for i in some]

    for some, steps in ((numbers, 4), *(([i], 5) for i in numbers)):
        with pytest.raises(train.Stopped):
            loop.Trainer(saved(some), 1e9, StopAt(steps)).train()
    together = saved(numbers)
    loop.Trainer(together, 1e9, lambda: False).train()
    return together


class Compared(NamedTuple):
    """A stack against its lanes one by one: how many steps each made, and the largest difference in any of them, as a
    multiple of what rounding may be (1e-7 of a value and 1e-12), with the place where it is.
    """

    together: list[loop.Lane]
    alone: list[loop.Lane]
    steps: set[int]
    difference: float
    where: str
    kinds: set[type]  # of the stack's slots


def compared_step_by_step(configs):
    streams = make_streams(configs, None, CPU)
    together = [lane_of(config, stream) for config, stream in zip(configs, streams, strict=True)]
    recorder = Recorder(together)
    (group,) = train.in_step(together)
    trainer = loop.Trainer(group, 1e9, recorder)
    assert isinstance(trainer.steps, lanes.StackedSteps)
    trainer.train()
    one_by_one, steps, worst = [], set(), (0.0, "")
    for config, stream, stacked in zip(configs, streams, recorder.seen, strict=True):
        one_by_one.append(lane_of(config, stream))
        alone = Recorder(one_by_one[-1:])
        loop.Trainer(one_by_one[-1:], 1e9, alone).train()
        (expected,) = alone.seen
        steps |= {len(stacked), len(expected)}
        for step, (got, want) in enumerate(zip(stacked, expected, strict=True)):
            assert got.keys() == want.keys()
            for name in want:
                apart = (got[name] - want[name]).abs() / (1e-12 + 1e-7 * want[name].abs())
                # What is no number is as far off as can be, and not less than everything.
                largest = float(apart.nan_to_num(nan=torch.inf).max())
                worst = max(worst, (largest, f"{config}, step {step}: {name}"))
    return Compared(together, one_by_one, steps, *worst, {type(slot) for slot in trainer.steps.stack.slots.values()})


def difference_of_recorded_and_compiled_from_plain(configs, monkeypatch, model=None):
    """On a GPU, at the end of training, of whichever tensor it is the largest: mean difference by mean size."""
    device = torch.device("cuda", 0)

    def found():
        return [everything(lane) for lane in trained(configs, make_streams(configs, None, device), model)]

    fast = found()
    monkeypatch.setattr(lanes, "WARM_UP", 10**9)
    for module in (stack, lane_gradients):
        monkeypatch.setattr(module, "compiles_on", lambda device: False)
    apart = [
        (got[name].double() - want[name].double()).abs().mean() / (want[name].double().abs().mean() + 1e-12)
        for got, want in zip(fast, found(), strict=True)
        for name in want
    ]
    return float(torch.stack(apart).max())  # no number, if one of them is none
