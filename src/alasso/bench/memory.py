"""Episodic memory: a few examples of each task, rehearsed beside the new data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alasso.bench.streams import Examples, Task
from alasso.coresets import random_coreset
from alasso.errors import AlassoError

POOLED_AT_MOST = 512 << 20  # bytes of images: a second copy of them is made


class Mixture:
    """Training examples of several tasks, by pairs (task, example).

    Tasks that permute the same images are gathered in one go, and so are tasks with like images, from a pool that holds
    a copy of them all; others task by task.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.first_columns = torch.tensor([task.head.start for task in tasks])
        self.last_columns = torch.tensor([task.head.stop for task in tasks])
        train = [task.train for task in tasks]
        self.shared = train[0] if _share_images(train) else None
        if self.shared is not None:
            device = self.shared.images.device
            self.pixels = torch.stack([pixels for one in train if (pixels := one.pixels) is not None])
            self.first_columns, self.last_columns = self.first_columns.to(device), self.last_columns.to(device)
        self.pool = _pooled(train) if self.shared is None and _can_be_pooled(train) else None
        if self.pool is not None:
            device = self.pool.images.device
            sizes = torch.tensor([len(one) for one in train])
            self.starts = (sizes.cumsum(0) - sizes).to(device)
            self.first_columns, self.last_columns = self.first_columns.to(device), self.last_columns.to(device)

    def batch(self, pairs: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs, labels, and for each example the first and last column of its task's head."""
        which, index = pairs[:, 0], pairs[:, 1]
        if self.shared is not None:
            which, index = which.to(self.pixels.device), index.to(self.pixels.device)
            rows = index if self.shared.rows is None else self.shared.rows[index]
            x = self.shared.images[rows].gather(1, self.pixels[which]).float() / self.shared.scale
            y = self.shared.labels[rows]
            return (*(t.to(device) for t in (x, y, self.first_columns[which], self.last_columns[which])),)  # type: ignore[return-value]
        if self.pool is not None:
            which, index = which.to(self.starts.device), index.to(self.starts.device)
            x, y = self.pool.batch(self.starts[which] + index)
            return (*(t.to(device) for t in (x, y, self.first_columns[which], self.last_columns[which])),)  # type: ignore[return-value]
        order = which.cpu().argsort(stable=True)
        pieces = []
        for t, count in enumerate(torch.bincount(which.cpu(), minlength=len(self.tasks)).tolist()):
            if count:
                mine, order = order[:count], order[count:]
                examples = self.tasks[t].train
                pieces.append(examples.batch(index.cpu()[mine].to(examples.images.device)))
        x, y = (torch.cat([piece[i].to(device) for piece in pieces]) for i in (0, 1))
        by_task = which.cpu().sort(stable=True).values
        return x, y, self.first_columns[by_task].to(device), self.last_columns[by_task].to(device)


def mixed_in_one_go(tasks: Sequence[Task]) -> bool:
    """Whether a batch of several of these tasks takes the same few operations whatever it holds."""
    train = [task.train for task in tasks]
    return _share_images(train) or _can_be_pooled(train)


def _can_be_pooled(train: Sequence[Examples]) -> bool:
    def kind(one: Examples) -> tuple[object, ...]:
        return one.images.shape[1:], one.images.dtype, one.images.device, one.scale, one.size

    alike = all(one.pixels is None and kind(one) == kind(train[0]) for one in train)
    return alike and sum(len(one) * one.images[0].nbytes for one in train) <= POOLED_AT_MOST


def _pooled(train: Sequence[Examples]) -> Examples:
    """All examples, one task's behind another's."""
    images, labels = (
        torch.cat([part if one.rows is None else part[one.rows] for one, part in zip(train, parts, strict=True)])
        for parts in ([one.images for one in train], [one.labels for one in train])
    )
    return Examples(images, labels, scale=train[0].scale, size=train[0].size)


def _share_images(train: Sequence[Examples]) -> bool:
    first = train[0]
    return first.pixels is not None and all(
        one.images is first.images and one.labels is first.labels and one.pixels is not None and _same_rows(one, first)
        for one in train
    )


def _same_rows(one: Examples, other: Examples) -> bool:
    return one.rows is other.rows or (
        one.rows is not None and other.rows is not None and torch.equal(one.rows, other.rows)
    )


def only_own_head(outputs: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Outputs with −∞ outside each example's own columns: a softmax per task in a batch of several tasks."""
    columns = torch.arange(outputs.shape[1], device=outputs.device)
    inside = (columns >= first[:, None]) & (columns < last[:, None])
    return outputs.masked_fill(~inside, float("-inf"))


class EpisodicMemory:
    """Which training examples of each past task are kept; the examples themselves stay in the stream."""

    def __init__(self, size: int, share: float) -> None:
        if not 0 < share < 1:
            raise AlassoError(f"memory_share must lie between 0 and 1, not {share}")
        self.size, self.share = size, share
        self.kept: list[Tensor] = []  # for each task, indices into its training examples

    def remember(self, task: Task, generator: torch.Generator) -> None:
        """Keep examples of a task that has been learned; never of its test examples."""
        count = len(task.train)
        self.kept.append(random_coreset(count, min(self.size, count), generator))

    def beside(self, batch_size: int) -> int:
        """How many rehearsed examples go beside ``batch_size`` new ones, so that they are ``share`` of the whole."""
        return max(1, round(batch_size * self.share / (1 - self.share)))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` pairs (task, example), drawn evenly from all that is kept."""
        pairs = self.pairs()
        return pairs[torch.randint(len(pairs), (count,), generator=generator)]

    def pairs(self) -> Tensor:
        return torch.cat([torch.stack([torch.full_like(kept, t), kept], 1) for t, kept in enumerate(self.kept)])
