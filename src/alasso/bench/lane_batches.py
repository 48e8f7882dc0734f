"""What the lanes of a stack are trained on: plans of all of them as one, and one gather for their examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from alasso.bench.stack import compiled
from alasso.bench.streams import Examples, Stream


class Batch(NamedTuple):
    """What one step is made on: for each lane which examples (and, in mixed batches, of which task), and their share.

    Lanes may have fewer examples, or no step left: what is padded has the share 0.
    """

    example: Tensor  # (lanes, batch)
    task: Tensor  # (lanes, batch)
    share: Tensor  # (lanes, batch); a lane's shares add up to 1, or to 0 if it makes no step

    def at(self, i: int) -> Batch:
        """Of an epoch's steps, the i-th."""
        return Batch(*(part[i] for part in self))

    def to(self, device: torch.device) -> Batch:
        """From pinned memory, so that the host need not wait until the device is done with the epoch before."""
        on_gpu = device.type == "cuda"
        return Batch(*((part.pin_memory() if on_gpu else part).to(device, non_blocking=on_gpu) for part in self))


def padded(lanes: Sequence[tuple[Tensor, Sequence[int]]], dtype: torch.dtype) -> Batch:
    """Steps of all lanes as one, filled up with what has no share. A lane comes as pairs (task, example) of all its
    steps in a row, and how many each step has.

    >>> padded([(torch.tensor([[0, 7], [1, 8], [0, 9]]), [2, 1])], torch.float32).share.tolist()
    [[[0.5, 0.5]], [[1.0, 0.0]]]
    """
    count = max(len(sizes) for _, sizes in lanes)
    width = max(max(sizes) for _, sizes in lanes)
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
            if not shared or one.pixels is None or task.head != streams[0].tasks[0].head:
                return None
        orders = [torch.stack([task.train.pixels for task in stream.tasks]) for stream in streams]  # type: ignore[misc]
        return SharedImages(first, torch.stack(orders))

    recorded_for: int = 0  # one recorded step serves all tasks: which one it is comes with the batch

    def begin(self, t: int) -> None:
        pass

    def gather(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = batch.example if self.examples.rows is None else self.examples.rows[batch.example]
        gather = compiled(permuted_examples) if rows.is_cuda else permuted_examples
        x, y = gather(self.examples.images, self.examples.labels, self.pixels, rows, batch.task)
        return x / self.examples.scale, y


def permuted_examples(
    images: Tensor, labels: Tensor, pixels: Tensor, rows: Tensor, task: Tensor
) -> tuple[Tensor, Tensor]:
    lane = torch.arange(len(rows), device=rows.device)[:, None]
    return images[rows[:, :, None], pixels[lane, task]].float(), labels[rows]


@dataclass
class OwnExamples:
    """Lanes with examples of their own, gathered lane by lane."""

    streams: Sequence[Stream]
    recorded_for: int = 0  # the task: other images, other columns of the head

    def begin(self, t: int) -> None:
        self.recorded_for = t

    def gather(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pairs = [
            s.tasks[self.recorded_for].train.batch(index) for s, index in zip(self.streams, batch.example, strict=True)
        ]
        heads = [stream.tasks[self.recorded_for].head.start for stream in self.streams]
        labels = [y - start for (_, y), start in zip(pairs, heads, strict=True)]
        return torch.stack([x for x, _ in pairs]), torch.stack(labels)


def same_place(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
