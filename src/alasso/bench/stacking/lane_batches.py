"""What the lanes of a stack are trained on: plans of all of them as one, and one gather for their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alasso.bench.stacking.lane_gradients import LaneBatch
from alasso.bench.stacking.resizing import brought_to_size
from alasso.bench.streams import Examples, Stream, same_place

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class Batch(NamedTuple):
    """What one step is made on: for each lane which examples (and, in mixed batches, of which task), and their share.

    Lanes may have fewer examples, or no step left: what is padded has the share 0.
    """

    example: Tensor  # (lanes, batch)
    task: Tensor  # (lanes, batch)
    share: Tensor  # (lanes, batch); a lane's shares add up to 1, or to 0 if it makes no step

    def pinned(self) -> Batch:
        """In pinned memory, so that the host need not wait while the device takes it over."""
        return Batch(*(part.pin_memory() for part in self))


def at(cursor: Tensor, of_epoch: Tensor) -> Tensor:
    """Of an epoch's steps, the one the cursor stands at; behind the last one, that one again."""
    return of_epoch.index_select(0, cursor.clamp(max=len(of_epoch) - 1)).squeeze(0)


def padded(lanes: Sequence[tuple[Tensor, Sequence[int]]], dtype: torch.dtype, at_least: int = 0) -> Batch:
    """Steps of all lanes as one, ``at_least`` so wide, filled up with what has no share. A lane comes as pairs
    (task, example) of all its steps in a row, and how many each step has.

    >>> padded([(torch.tensor([[0, 7], [1, 8], [0, 9]]), [2, 1])], torch.float32).share.tolist()
    [[[0.5, 0.5]], [[1.0, 0.0]]]
    """
    count = max(len(sizes) for _, sizes in lanes)
    width = max(at_least, *(max(sizes) for _, sizes in lanes))
    task, example = (torch.zeros(count, len(lanes), width, dtype=torch.long) for _ in range(2))
    share = torch.zeros(count, len(lanes), width, dtype=dtype)
    for lane, (pairs, sizes) in enumerate(lanes):
        counts = torch.tensor(sizes)[:, None]
        filled = torch.arange(width) < counts
        for part, column in ((task, 0), (example, 1)):
            part[: len(sizes), lane] = torch.zeros(len(sizes), width, dtype=torch.long).masked_scatter(
                filled, pairs[:, column]
            )
        share[: len(sizes), lane] = filled.to(dtype) / counts
    return Batch(example, task, share)


@dataclass
class SharedImages:
    """Lanes that permute the same images: one gather, with an order of pixels for each lane and task."""

    examples: Examples
    pixels: Tensor  # (lanes, tasks, pixels)

    @staticmethod
    def of(streams: Sequence[Stream]) -> SharedImages | None:
        first = streams[0].tasks[0].train
        for task in (task for stream in streams for task in stream.tasks):
            one = task.train
            shared = all(same_place(getattr(one, part), getattr(first, part)) for part in ("images", "labels", "rows"))
            if not shared or one.pixels is None or task.head != streams[0].tasks[0].head or task.head.start != 0:
                return None
        orders = [torch.stack([task.train.pixels for task in stream.tasks]) for stream in streams]  # type: ignore[misc]
        return SharedImages(first, torch.stack(orders))

    recorded_for: int = 0  # one recorded step serves all tasks: which one it is comes with the batch

    def begin(self, t: int) -> None:
        pass

    def room_for(self, epoch: Batch, columns: Tensor) -> LaneBatch:
        """Where the steps of such an epoch will lie, one after another."""
        x = torch.empty(*epoch.example[0].shape, self.pixels.shape[2], device=columns.device)
        return LaneBatch(x, torch.empty_like(epoch.example[0]), torch.empty_like(epoch.share[0]), columns)

    def fetch(self, ready: LaneBatch, cursor: Tensor, epoch: Batch, compiling: Compile) -> None:
        of_images = (self.examples.images, self.examples.labels, self.examples.rows, self.pixels, self.examples.scale)
        compiling(fetch_permuted_)(ready.x, ready.y, ready.share, cursor, *epoch, *of_images)


def fetch_permuted_(
    x: Tensor,
    y: Tensor,
    share: Tensor,
    cursor: Tensor,
    examples: Tensor,
    tasks: Tensor,
    shares: Tensor,
    images: Tensor,
    labels: Tensor,
    rows: Tensor | None,
    pixels: Tensor,
    scale: float,
) -> None:
    """The step at the cursor: x, y and share are written, from images whose pixels come in the task's order."""
    example, task = at(cursor, examples), at(cursor, tasks)
    row = example if rows is None else rows[example]
    lane = torch.arange(len(row), device=row.device)[:, None]
    x.copy_(images[row[:, :, None], pixels[lane, task]].float() / scale)
    y.copy_(labels[row])
    share.copy_(at(cursor, shares))


@dataclass
class OwnExamples:
    """Lanes with examples of their own, gathered lane by lane."""

    streams: Sequence[Stream]
    recorded_for: int = 0  # the task: other images, other columns of the head
    examples: Sequence[Examples] = ()  # of the task

    def begin(self, t: int) -> None:
        self.recorded_for = t
        self.examples = ()  # what the last task had makes room
        self.examples = brought_to_size([stream.tasks[t].train for stream in self.streams])

    def room_for(self, epoch: Batch, columns: Tensor) -> LaneBatch:
        """Where the steps of such an epoch will lie, one after another."""
        x, y = self.gathered(torch.zeros_like(epoch.example[0]))
        return LaneBatch(x, y, torch.empty_like(epoch.share[0]), columns)

    def fetch(self, ready: LaneBatch, cursor: Tensor, epoch: Batch, compiling: Compile) -> None:
        x, y = self.gathered(at(cursor, epoch.example))
        for here, part in ((ready.x, x), (ready.y, y), (ready.share, at(cursor, epoch.share))):
            here.copy_(part)

    def gathered(self, example: Tensor) -> tuple[Tensor, Tensor]:
        heads = [stream.tasks[self.recorded_for].head for stream in self.streams]
        pairs = [of_lane.batch(index) for of_lane, index in zip(self.examples, example, strict=True)]
        labels = [y - head.start for head, (_, y) in zip(heads, pairs, strict=True)]
        return torch.stack([x for x, _ in pairs]), torch.stack(labels)
