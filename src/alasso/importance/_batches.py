"""What a loader yields, taken apart: the model's arguments, with a row for each sample, and the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from alasso.errors import AlassoError

Place = int | str  # of an argument: its position or its keyword


@dataclass(frozen=True)
class Inputs:
    """A batch's inputs by their places in the model's call.

    Attributes:
        rows: Tensors with a row for each sample.
        shared: What all samples have in common: None, numbers, words.
    """

    rows: dict[Place, Tensor]
    shared: dict[Place, Any]

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two batches have in common that a model takes alike."""
        shapes = tuple((place, value.shape[1:]) for place, value in self.rows.items())
        return shapes, tuple((place, repr(value)) for place, value in self.shared.items())

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional arguments, in their order, and those with a keyword."""
        everything = {**self.rows, **self.shared}
        positions = sorted(place for place in everything if isinstance(place, int))
        keywords = {place: value for place, value in everything.items() if isinstance(place, str)}
        return tuple(everything[place] for place in positions), keywords

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with every tensor changed."""
        return Inputs({place: change(value) for place, value in self.rows.items()}, self.shared)

    def split(self, size: int) -> Iterator[Inputs]:
        """Yield parts of ``size`` samples."""
        parts = zip(*(value.split(size) for value in self.rows.values()), strict=True)
        return (Inputs(dict(zip(self.rows, part, strict=True)), self.shared) for part in parts)


def batches_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Return the loader's iterator; refuse a loader without batches, or one of single samples."""
    ways = [way for way in ("__iter__", "__getitem__") if hasattr(type(loader), way)]
    of_samples = isinstance(loader, Dataset) and "__iter__" not in ways
    if isinstance(loader, Tensor) or of_samples or not ways:
        raise AlassoError(f"Pass a DataLoader or a list of batches, not {type(loader).__name__}.")
    if is_one_batch(loader):
        raise AlassoError("Pass a DataLoader or a list of batches, [(x, y)], not a single (x, y).")
    return iter(loader)


def is_one_batch(loader: Iterable[Any]) -> bool:
    """Return whether these are inputs and their labels, and not a tuple of two batches of inputs."""
    if not (isinstance(loader, tuple) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader)):
        return False
    x, y = loader
    return x.is_floating_point() and not y.is_floating_point() and len(x) == len(y)


def inputs_and_labels(batch: Any, device: torch.device | None) -> tuple[Inputs, Tensor | None]:
    """Return a batch's inputs, and its labels if it has some, on the model's device.

    Raises:
        AlassoError: The batch is of no form that could be taken apart.
    """
    if isinstance(batch, Mapping):
        x, y = {name: value for name, value in batch.items() if name != "labels"}, batch.get("labels")
    else:
        x, y, *_ = (batch, None) if isinstance(batch, Tensor) else (*batch, None)
    inputs = inputs_of(x, device)
    if not (y is None or isinstance(y, Tensor)):
        raise AlassoError(f"Labels must be a tensor, not {type(y).__name__}: adapt the loader.")
    return inputs, None if y is None else y.to(device)


def inputs_of(x: Any, device: torch.device | None) -> Inputs:
    """Return the arguments for the model: a tensor, several in a tuple or list, or a mapping of keywords."""
    positional = x if isinstance(x, tuple | list) else (x,)
    given: Mapping[Any, Any] = x if isinstance(x, Mapping) else dict(enumerate(positional))
    arguments = {place: v.to(device) if isinstance(v, Tensor) else v for place, v in given.items()}
    rows = {place: value for place, value in arguments.items() if isinstance(value, Tensor) and value.dim() > 0}
    shared = {place: value for place, value in arguments.items() if place not in rows}
    plain = Tensor | str | int | float | None
    if (wrong := [type(v).__name__ for v in shared.values() if not isinstance(v, plain)]) or not rows:
        raise AlassoError(
            f"A batch must be x, (x, y) or a mapping with tensors as x, not {wrong[0] if wrong else 'nothing'}: adapt "
            "the loader. Several arguments of the model go into a tuple, ((x1, x2), y), or a mapping."
        )
    lengths = {place: len(value) for place, value in rows.items()}
    if len(set(lengths.values())) > 1:
        raise AlassoError(f"Every input needs a row for each sample, but they have {lengths} rows: adapt the loader.")
    return Inputs(rows, shared)
