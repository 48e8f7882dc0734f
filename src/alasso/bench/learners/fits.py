"""What a checkpoint may hold of a run: everything is compared with the run itself before an optimizer gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alasso.bench.config import RunConfig
from alasso.bench.streams import Stream
from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.bench.training.checkpoint import Position


def is_like(saved: object, own: Tensor) -> bool:
    """Whether it is a plain tensor of another one's shape and type."""
    return (
        isinstance(saved, Tensor)
        and saved.layout == torch.strided
        and not (saved.is_meta or saved.is_quantized)
        and saved.shape == own.shape
        and saved.dtype == own.dtype
    )


def check_tensors(saved: object, own: Mapping[str, Tensor]) -> None:
    """Refuses tensors that differ from a run's own in name, shape or type.

    Args:
        saved: What was read.
        own: What the run has in its place.

    Raises:
        AlassoError: They differ.
    """
    if not isinstance(saved, Mapping) or saved.keys() != own.keys():
        raise AlassoError("its tensors are not those of this network")
    for name, tensor in own.items():
        if not is_like(saved[name], tensor):
            raise AlassoError(f"{name} is not a tensor of shape {tuple(tensor.shape)} in {tensor.dtype}")


def optimizer_state(saved: object, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """Copies an optimizer's state into tensors laid out like its own parameters: fused kernels look at no shape.

    Args:
        saved: What its ``state_dict`` returned; its settings are not used, they follow from the run's config.
        optimizer: The run's own.

    Returns:
        The state of each parameter that has one, by its number.

    Raises:
        AlassoError: It holds anything but the moments of these parameters.
    """
    state = saved["state"] if isinstance(saved, Mapping) and "state" in saved else None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = ("step", "exp_avg", "exp_avg_sq") if isinstance(optimizer, torch.optim.Adam) else ("momentum_buffer",)
    if not isinstance(state, Mapping) or not all(type(i) is int and 0 <= i < len(parameters) for i in state):
        raise AlassoError("its optimizer's state is not of these parameters")
    found = {}
    for i, moments in state.items():
        if not isinstance(moments, Mapping) or not set(moments) <= set(names):
            raise AlassoError("its optimizer's state is of another optimizer")
        if all(value is None for value in moments.values()):  # as SGD notes that it has none
            continue
        like = torch.empty_like(parameters[i], requires_grad=False)
        own = {name: like.new_zeros((), dtype=torch.float32) if name == "step" else like for name in names}
        check_tensors(moments, own)
        if any(bool((moments[name] < 0).any()) for name in own.keys() & {"step", "exp_avg_sq"}):
            raise AlassoError("its optimizer's state has a negative number of steps, or squares below zero")
        found[i] = {name: torch.empty_like(own[name]).copy_(moments[name]) for name in own}
    return found


def indices(saved: object, sizes: Sequence[int]) -> list[Tensor]:
    """Returns, of each task so far, which of its examples were kept.

    Args:
        saved: What was read.
        sizes: How many examples each task has.

    Returns:
        The indices, on the host.

    Raises:
        AlassoError: They are no indices, or of examples that are not there.
    """
    if not isinstance(saved, list) or len(saved) > len(sizes):
        raise AlassoError("its memory is not of these tasks")
    for kept, size in zip(saved, sizes, strict=False):
        if not isinstance(kept, Tensor) or not is_like(kept, torch.empty(kept.numel(), dtype=torch.int64)):
            raise AlassoError("its memory holds no indices of examples")
        if not len(kept) or int(kept.min()) < 0 or int(kept.max()) >= size:
            raise AlassoError("its memory is of examples that are not there")
    return [kept.cpu().clone() for kept in saved]


def check_counts(state: Mapping[str, Any], position: Position) -> None:
    """Refuses memories of another number of tasks than the run has learned."""
    has_begun = position.epoch > 0 or position.step > 0
    for name, count in (("memory", position.task), ("coresets", position.task + has_begun)):
        if name in state and len(state[name]) != count:
            raise AlassoError(f"its {name} is of {len(state[name])} tasks, not {count}")


def check_position(at: Position, config: RunConfig, stream: Stream) -> None:
    """Refuses a place where the run cannot stand, and accuracies that it cannot have found.

    Args:
        at: Where the run is said to stand.
        config: The run.
        stream: Its tasks.

    Raises:
        AlassoError: There is no such place in this run.
    """
    tasks = len(stream)
    if not _is_count(at.task, tasks) or not _is_count(at.epoch, config.epochs - 1):
        raise AlassoError(f"it stands at task {at.task!r}, epoch {at.epoch!r}")
    at_end = at.task == tasks
    steps = 0 if at_end else -(-len(stream.tasks[at.task].train) // config.batch_size)
    if not _is_count(at.step, steps) or (at_end and at.epoch):
        raise AlassoError(f"it stands at step {at.step!r} of an epoch of {steps}")
    if not all(type(number) in (int, float) for number in (at.loss_sum, at.seconds)) or not isfinite(at.seconds):
        raise AlassoError("its loss and seconds are no numbers")
    rows = at.accuracy if isinstance(at.accuracy, list) else []
    lengths = [len(row) if isinstance(row, list) else -1 for row in [*rows, at.ahead, at.untrained]]
    has_begun = at.task or at.epoch or at.step
    if lengths != [*range(1, at.task + 1), min(at.task, tasks - 1), tasks if has_begun else len(at.untrained)]:
        raise AlassoError("its accuracies are not of the tasks so far")
    shares = [share for row in [*rows, at.ahead, at.untrained] for share in row]
    if not all(type(share) in (int, float) and 0 <= share <= 1 for share in shares):
        raise AlassoError("its accuracies are not between 0 and 1")
    if not isinstance(at.commits, list) or not all(one is None or isinstance(one, str) for one in at.commits):
        raise AlassoError("its commits are no names")


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
