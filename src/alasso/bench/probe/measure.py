r"""How a task's loss changes to either side of single weights, measured.

Results hold no weights, so the first task of the result's config is learned again: same config, stream and seed. No
method penalises anything during the first task; an observer beside the learner takes down each weight's path.

Moving weight (i, j) of a linear layer by δ changes one unit alone: its pre-activation grows by δ·x_j. Up to the next
linear layer only that unit's column has to be worked out again, and what it adds there is of rank one,

.. math:: z' = z + W_{:,i} \, (h_i(z_i + \delta x_j) - h_i(z_i)) ,

so that no matrix product of the changed layer or the next is repeated. A bias is a weight whose input is one. Weights
of other layers, and of networks that are not a plain sequence, are measured on stacked copies of their tensor.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.func import functional_call, vmap

from alasso import ALASSO, AlassoError
from alasso.bench import results
from alasso.bench.config import RunConfig, count_of
from alasso.bench.learners.base import Learner, Regularized
from alasso.bench.probe import Measured, Plan
from alasso.bench.registry import METHODS
from alasso.bench.streams import make_stream
from alasso.bench.training import run as train
from alasso.methods.alasso import asymmetric_factors

Loss = Callable[[Tensor], Tensor]  # (…, examples, outputs) → (…): mean over examples
#: Told what goes on, how much of it is done and how much there is in all.
Watch = Callable[[str, float, float], None]


def unwatched(what: str, done: float, total: float) -> None:
    pass


@contextmanager
def progress_bar(console: Console) -> Iterator[Watch]:
    """A :data:`Watch` that draws bars in a terminal, and nothing elsewhere."""
    if not console.is_terminal:
        yield unwatched
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:

        def watch(what: str, done: float, total: float) -> None:
            if not bar.tasks or bar.tasks[-1].description != what:
                bar.add_task(what, total=total)
            bar.update(bar.tasks[-1].id, completed=done)

        yield watch


@dataclass(frozen=True)
class Weight:
    """One number of a network: the parameter's name, and where in it."""

    parameter: str
    index: tuple[int, ...]


def probe_first_task(
    config: RunConfig,
    plan: Plan,
    *,
    data_dir: Path | None,
    device: str,
    say: Callable[[str], None],
    watch: Watch = unwatched,
) -> Measured:
    """Learns the first task of a run again, then measures.

    Args:
        config: The run.
        plan: What to measure.
        data_dir: Where data sets lie.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        say: Prints a line.
        watch: Told how far the work is.

    Returns:
        What was found.

    Raises:
        AlassoError: The run has no single network.
    """
    if config.method.startswith("vcl"):
        raise AlassoError("the probe moves the weights of one network, and vcl learns a distribution of them")
    place = train.torch_device(device)
    environment = results.environment(str(place))  # of the code that is about to train
    stream = make_stream(config, data_dir, place)
    task = stream.tasks[0]
    torch.manual_seed(config.seed)
    learner = train.make_learner(config, stream, None, place)
    say(f"learning the first task: {config.method}, {count_of(config.epochs, 'epoch')}, seed {config.seed}")
    observer, start = learn_first_task(learner, watch)
    (accuracy,) = learner.accuracies_on([task])

    # A single weight among millions moves the loss by a millionth: float32 would show its own rounding.
    model = copy.deepcopy(learner.model).double().eval()
    generator = torch.Generator().manual_seed(config.seed)
    x, y = learner.batch(task.train, torch.randperm(len(task.train), generator=generator)[: plan.examples])
    weights = random_weights(model, plan.weights, generator)
    for there, asked, thing in ((len(weights), plan.weights, "weight"), (len(y), plan.examples, "training example")):
        if there < asked:
            say(f"limited to the {count_of(there, thing)} that there are, not {asked}")
    say(f"moving {count_of(len(weights), 'weight')} to {plan.offsets} places each, on {count_of(len(y), 'example')}")
    offsets = torch.linspace(-plan.span, plan.span, plan.offsets, dtype=torch.float64, device=x.device)
    began = time.monotonic()
    found = losses(model, x.double(), task_loss(y, task.head), weights, offsets, watch)
    seconds = time.monotonic() - began

    ends = dict(learner.model.named_parameters())
    importance, springs = importance_and_springs(observer, weights)
    return Measured(
        config=config.to_json(),
        plan=plan,
        seconds=round(seconds, 2),
        accuracy=accuracy,
        offsets=offsets.tolist(),
        weights=[f"{weight.parameter}[{', '.join(map(str, weight.index))}]" for weight in weights],
        losses=found.tolist(),
        importance=importance,
        came_from=[float(start[w.parameter][w.index] - ends[w.parameter].detach()[w.index]) for w in weights],
        springs=springs,
        environment=environment,
        examples=len(y),
    )


def importance_and_springs(observer: ALASSO, weights: Sequence[Weight]) -> tuple[list[float], list[list[float]]]:
    """Ω of each weight, and the factors of d² left and right of it."""
    states = observer.state_dict()["parameters"]
    sides = [(states[w.parameter]["omega"][w.index], states[w.parameter]["side"][w.index]) for w in weights]
    springs = [asymmetric_factors(omega, side, observer.a, observer.epsilon) for omega, side in sides]
    return [float(omega) for omega, _ in sides], [[float(k) for k in spring] for spring in springs]


def learn_first_task(learner: Learner, watch: Watch) -> tuple[ALASSO, dict[str, Tensor]]:
    """Trains task 0 as the bench does; beside it, an observer takes ALASSO's path integral from where weights start."""
    config = learner.config
    settings = config.settings if config.method == "alasso" else METHODS["alasso"].settings
    learner.begin_task(0)
    learner.prepare(0)
    observer = ALASSO(learner.model, **settings)
    if isinstance(learner, Regularized):
        learner.regularizer.detach()  # in the first task it adds nothing
    observer.attach(learner.optimizer)
    start = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for epoch in range(config.epochs):
        steps = learner.epoch_plan(0, epoch)
        for number, plan in enumerate(steps, 1):
            learner.step(0, plan)
            watch("learning the first task", epoch + number / len(steps), config.epochs)
    observer.consolidate()
    observer.detach()
    return observer, start


def task_loss(y: Tensor, head: slice) -> Loss:
    """Mean cross-entropy over examples, of one network's outputs or of a stack of them."""

    def loss(outputs: Tensor) -> Tensor:
        logits = outputs[..., head]
        of_label = (y - head.start).expand(logits.shape[:-1]).unsqueeze(-1)
        return (logits.logsumexp(-1) - logits.gather(-1, of_label).squeeze(-1)).mean(-1)

    return loss


def random_weights(model: nn.Module, count: int, generator: torch.Generator) -> list[Weight]:
    """Every number of the network is as likely as any other; none is drawn twice."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    total = sum(sizes.values())
    numbers = np.random.default_rng(generator.initial_seed())
    chosen = np.sort(numbers.choice(total, min(count, total), replace=False))
    weights = []
    for name, size in sizes.items():
        inside, chosen = chosen[chosen < size], chosen[chosen >= size] - size
        for index in zip(*np.unravel_index(inside, tuple(model.get_parameter(name).shape)), strict=True):
            weights.append(Weight(name, tuple(int(i) for i in index)))
    return weights


# -- lines of weights ------------------------------------------------------------------------------------------------

#: Numbers worked on at once: large enough to keep cores busy, small enough for a cache.
CHUNK = 1 << 22

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Identity, nn.Dropout)


@torch.no_grad()
def losses(
    model: nn.Module, x: Tensor, loss: Loss, weights: Sequence[Weight], offsets: Tensor, watch: Watch = unwatched
) -> Tensor:
    """Moves each weight by each offset.

    Args:
        model: In evaluation mode; it is left as it is.
        x: Inputs.
        loss: From outputs, of one network or of a stack of them, to the mean loss over examples.
        weights: Which to move.
        offsets: How far.
        watch: Told how many losses are found, of how many.

    Returns:
        (weights, offsets) losses.
    """
    found = torch.empty(len(weights), len(offsets), dtype=offsets.dtype, device=x.device)
    done = 0
    for parameter in dict.fromkeys(weight.parameter for weight in weights):
        numbers = [number for number, weight in enumerate(weights) if weight.parameter == parameter]
        measure = _by_copies if _linear_layer(model, parameter) is None else _by_unit
        index = torch.tensor([weights[number].index for number in numbers], device=x.device)
        of_parameter = []
        for some in measure(model, x, loss, parameter, index, offsets):
            of_parameter.append(some)
            done += len(some)
            watch("moving weights", done, found.numel())
        found[numbers] = torch.cat(of_parameter).view(len(numbers), len(offsets))
    return found


def _linear_layer(model: nn.Module, parameter: str) -> int | None:
    """Place of the linear layer in a plain sequence that the parameter belongs to, None if there is no such."""
    if not isinstance(model, nn.Sequential) or parameter.count(".") != 1:
        return None
    names = [name for name, _ in model.named_children()]
    place = names.index(parameter.partition(".")[0])
    return place if isinstance(model[place], nn.Linear) else None


def _by_unit(
    model: nn.Module, x: Tensor, loss: Loss, parameter: str, index: Tensor, offsets: Tensor
) -> Iterator[Tensor]:
    place = _linear_layer(model, parameter)
    assert isinstance(model, nn.Sequential) and place is not None
    layers = list(model)
    entering = nn.Sequential(*layers[:place])(x)
    before = layers[place](entering)
    until = next((n for n in range(place + 1, len(layers)) if not isinstance(layers[n], ELEMENTWISE)), len(layers))
    between = nn.Sequential(*layers[place + 1 : until])
    after = between(before)
    following = layers[until] if until < len(layers) else None
    if following is not None and not isinstance(following, nn.Linear):
        yield from _by_copies(model, x, loss, parameter, index, offsets)
        return
    base = following(after) if following is not None else after
    rest = nn.Sequential(*layers[until + 1 :])
    for pair in _chunks(len(index) * len(offsets), base.numel(), x.device):
        unit, *incoming = index[pair // len(offsets)].unbind(1)
        slope = entering.T[incoming[0]] if incoming else torch.ones_like(entering[:, 0])
        column = before.T[unit] + offsets[pair % len(offsets), None] * slope  # (pairs, examples)
        change = between(column) - after.T[unit]
        yield loss(rest(_with_change(base, change, unit, following)))


def _with_change(base: Tensor, change: Tensor, unit: Tensor, following: nn.Linear | None) -> Tensor:
    """(pairs, examples, width): what leaves the following layer, or the last one's own outputs."""
    if following is not None:
        return torch.baddbmm(base.unsqueeze(0), change.unsqueeze(2), following.weight.T[unit].unsqueeze(1))
    moved = base.expand(len(unit), *base.shape).clone()
    pairs = torch.arange(len(unit), device=unit.device)
    moved[pairs, :, unit] += change
    return moved


def _by_copies(
    model: nn.Module, x: Tensor, loss: Loss, parameter: str, index: Tensor, offsets: Tensor
) -> Iterator[Tensor]:
    weights = model.get_parameter(parameter)
    flat = index @ torch.tensor(weights.stride(), device=index.device)
    answer = vmap(lambda copy: functional_call(model, {parameter: copy}, (x,)))
    for pair in _chunks(len(index) * len(offsets), max(weights.numel(), x.numel()), x.device):
        copies = weights.reshape(1, -1).repeat(len(pair), 1)
        copies[torch.arange(len(pair)), flat[pair // len(offsets)]] += offsets[pair % len(offsets)]
        yield loss(answer(copies.view(-1, *weights.shape)))


def _chunks(count: int, size: int, device: torch.device) -> Sequence[Tensor]:
    """The numbers below ``count`` in pieces, where each of them needs ``size`` numbers of memory."""
    pieces: Sequence[Tensor] = torch.arange(count, device=device).split(max(1, CHUNK // size))
    return pieces
