"""Batches of several tasks: an episodic memory that is rehearsed beside new data, or all tasks mixed evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alasso.bench.streams import Examples, Task
from alasso.errors import AlassoError
from alasso.vcl.coresets import random_coreset

POOLED_AT_MOST = 512 << 20  # bytes of images: a second copy of them is made


class Mixture:
    """Training examples of several tasks, by pairs (task, example); of each task all of them, or those ``kept``.

    Tasks that permute the same images are gathered in one go, and so are tasks with like images, from a pool that holds
    a copy of them all; others task by task.
    """

    def __init__(self, tasks: Sequence[Task], kept: Sequence[Tensor] | None = None) -> None:
        self.tasks = tasks
        train = [task.train for task in tasks]
        kept = kept or [torch.arange(len(one)) for one in train]
        self.shared = train[0] if _share_images(train) else None
        self.pool = (
            Pool.of(train, kept) if self.shared is None and _can_be_pooled(train, list(map(len, kept))) else None
        )
        gathered_on = train[0].images.device if self.in_one_go else torch.device("cpu")
        self.heads = torch.tensor([(task.head.start, task.head.stop) for task in tasks], device=gathered_on)
        if self.shared is not None:
            self.pixels = torch.stack([pixels for one in train if (pixels := one.pixels) is not None])

    @property
    def in_one_go(self) -> bool:
        return self.shared is not None or self.pool is not None

    def batch(self, pairs: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs, labels, and for each example the first and last column of its task's head."""
        which, index = pairs.to(self.heads.device).unbind(1)
        if self.pool is not None:
            x, y = self.pool.batch(which, index)
        elif self.shared is not None:
            rows = index if self.shared.rows is None else self.shared.rows[index]
            x = self.shared.images[rows].gather(1, self.pixels[which]).float() / self.shared.scale
            y = self.shared.labels[rows]
        else:
            which, order = which.sort(stable=True)
            x, y = self._task_by_task(which, index[order], device)
        first, last = self.heads[which].unbind(1)
        return x.to(device), y.to(device), first.to(device), last.to(device)

    def _task_by_task(self, which: Tensor, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        counts = torch.bincount(which, minlength=len(self.tasks)).tolist()
        pieces = []
        for task, mine in zip(self.tasks, index.split(counts), strict=True):
            if len(mine):
                pieces.append(task.train.batch(mine.to(task.train.images.device)))
        return torch.cat([x.to(device) for x, _ in pieces]), torch.cat([y.to(device) for _, y in pieces])


@dataclass(frozen=True)
class Pool:
    """Copies of several tasks' examples in one tensor, one task's behind another's."""

    examples: Examples
    starts: Tensor  # of each task, where in ``rows`` its examples begin
    rows: Tensor  # of each example of each task, where it lies; of those that are not kept, anywhere

    @staticmethod
    def of(train: Sequence[Examples], kept: Sequence[Tensor]) -> Pool:
        first, count = train[0], sum(map(len, kept))
        device = first.images.device
        images = torch.empty(count, *first.images.shape[1:], dtype=first.images.dtype, device=device)
        labels = torch.empty(count, dtype=first.labels.dtype, device=device)
        sizes = torch.tensor([len(one) for one in train])
        starts = sizes.cumsum(0) - sizes
        rows = torch.zeros(int(sizes.sum()), dtype=torch.long)
        filled = 0
        for one, of_task, start in zip(train, kept, starts.tolist(), strict=True):
            here = slice(filled, filled + len(of_task))
            picked = of_task.to(device) if one.rows is None else one.rows[of_task.to(device)]
            images[here], labels[here] = one.images[picked], one.labels[picked]
            rows[start + of_task.cpu()] = torch.arange(here.start, here.stop)
            filled = here.stop
        return Pool(Examples(images, labels, scale=first.scale, size=first.size), starts.to(device), rows.to(device))

    def batch(self, which: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.examples.batch(self.rows[self.starts[which] + index])


def mixed_in_one_go(tasks: Sequence[Task], at_most: int | None = None) -> bool:
    """Whether a batch of several of these tasks takes the same few operations whatever it holds.

    ``at_most``: how many examples of a task are kept; None: all.
    """
    train = [task.train for task in tasks]
    counts = [len(one) if at_most is None else min(at_most, len(one)) for one in train]
    return _share_images(train) or _can_be_pooled(train, counts)


def _can_be_pooled(train: Sequence[Examples], counts: Sequence[int]) -> bool:
    def kind(one: Examples) -> tuple[object, ...]:
        return one.images.shape[1:], one.images.dtype, one.images.device, one.scale, one.size

    alike = all(one.pixels is None and kind(one) == kind(train[0]) for one in train)
    return alike and sum(counts) * train[0].images[0].nbytes <= POOLED_AT_MOST


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


# -- batches of all tasks -----------------------------------------------------------------------------------------


def even_mixture(sizes: list[int], seed: int) -> Tensor:
    """As many pairs (task, example) as the last task has examples, each task's turn in an endless round.

    Any run of consecutive pairs, so any batch, holds as many examples of one task as of another, give or take one.

    >>> even_mixture([4, 4], seed=0)[:, 0].tolist()
    [0, 1, 0, 1]
    """
    random = np.random.default_rng(seed)
    tasks = np.arange(sizes[-1]) % len(sizes)
    examples = np.empty_like(tasks)
    for t, size in enumerate(sizes):
        turns = examples[t :: len(sizes)]
        turns[:] = in_rounds(size, len(turns), random)
    return torch.from_numpy(np.stack([tasks, examples], 1))


def in_rounds(size: int, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """So many of the numbers below ``size``, none a second time before all have been there.

    Of a last, unfinished round only that part is drawn: of a hundred tasks, an epoch takes a hundredth of each.
    """
    whole, rest = divmod(count, size)
    rounds = [random.permutation(size) for _ in range(whole)]
    return np.concatenate([*rounds, random.choice(size, rest, replace=False)])
