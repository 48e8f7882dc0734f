r"""The loss along single weights' lines: many weights and offsets at once.

Moving weight (i, j) of a linear layer by δ changes one unit alone: its pre-activation grows by δ·x_j. Up to the next
linear layer only that unit's column has to be worked out again, and what it adds there is of rank one,

.. math:: z' = z + W_{:,i} \, (h_i(z_i + \delta x_j) - h_i(z_i)) ,

so that no matrix product of the changed layer or the next is repeated. A bias is a weight whose input is one. Weights
of other layers, and of networks that are not a plain sequence, are measured on stacked copies of their tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Numbers worked on at once: large enough to keep cores busy, small enough for a cache.
CHUNK = 1 << 22

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.LeakyReLU, nn.SiLU, nn.Identity, nn.Dropout)

Loss = Callable[[Tensor], Tensor]  # (…, examples, outputs) → (…): mean over examples


@dataclass(frozen=True)
class Weight:
    """One number of a network: the parameter's name, and where in it."""

    parameter: str
    index: tuple[int, ...]


@torch.no_grad()
def losses(
    model: nn.Module,
    x: Tensor,
    loss: Loss,
    weights: Sequence[Weight],
    offsets: Tensor,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """(weights, offsets): the loss with one weight moved by one offset. Takes a model in evaluation mode.

    ``watch`` is told how many of them are found, of how many.
    """
    found = torch.empty(len(weights), len(offsets), dtype=offsets.dtype, device=x.device)
    done = 0
    by_parameter: dict[str, list[int]] = {}
    for number, weight in enumerate(weights):
        by_parameter.setdefault(weight.parameter, []).append(number)
    for parameter, numbers in by_parameter.items():
        layer = linear_layer(model, parameter)
        measure = _by_unit if layer is not None else _by_copies
        index = torch.tensor([weights[number].index for number in numbers], device=x.device)
        of_parameter = []
        for some in measure(model, x, loss, parameter, index, offsets):
            of_parameter.append(some)
            done += len(some)
            watch(done, found.numel())
        found[numbers] = torch.cat(of_parameter).view(len(numbers), len(offsets))
    return found


def linear_layer(model: nn.Module, parameter: str) -> int | None:
    """Place of the linear layer in a plain sequence that the parameter belongs to, None if there is no such."""
    if not isinstance(model, nn.Sequential) or parameter.count(".") != 1:
        return None
    names = [name for name, _ in model.named_children()]
    place = names.index(parameter.partition(".")[0])
    return place if isinstance(model[place], nn.Linear) else None


def _by_unit(
    model: nn.Module, x: Tensor, loss: Loss, parameter: str, index: Tensor, offsets: Tensor
) -> Iterator[Tensor]:
    place = linear_layer(model, parameter)
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
    for pair in chunks(len(index) * len(offsets), base.numel(), x.device):
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
    from torch.func import functional_call, vmap

    weights = model.get_parameter(parameter)
    flat = index @ torch.tensor(weights.stride(), device=index.device)
    answer = vmap(lambda copy: functional_call(model, {parameter: copy}, (x,)))
    for pair in chunks(len(index) * len(offsets), max(weights.numel(), x.numel()), x.device):
        copies = weights.reshape(1, -1).repeat(len(pair), 1)
        copies[torch.arange(len(pair)), flat[pair // len(offsets)]] += offsets[pair % len(offsets)]
        yield loss(answer(copies.view(-1, *weights.shape)))


def chunks(count: int, size: int, device: torch.device) -> Sequence[Tensor]:
    """The numbers below ``count`` in pieces, where each of them needs ``size`` numbers of memory."""
    pieces: Sequence[Tensor] = torch.arange(count, device=device).split(max(1, CHUNK // size))
    return pieces


@torch.no_grad()
def losses_one_by_one(model: nn.Module, x: Tensor, loss: Loss, weights: Sequence[Weight], offsets: Tensor) -> Tensor:
    """The slow and obvious way, for tests: write the weight, run the network, write it back."""
    found = torch.empty(len(weights), len(offsets), dtype=offsets.dtype)
    for row, weight in enumerate(weights):
        tensor = model.get_parameter(weight.parameter)
        before = tensor[weight.index].clone()
        for column, offset in enumerate(offsets):
            tensor[weight.index] = before + offset
            found[row, column] = loss(model(x))
        tensor[weight.index] = before
    return found
