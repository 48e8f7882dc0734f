"""Which few examples of a task to keep: coresets, as variational continual learning uses them.

The functions return indices without repeats. ``x[index]`` is the coreset; the other examples remain for training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alasso.errors import AlassoError


def random_coreset(count: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Return the indices of a random subset; all subsets are equally likely.

    Args:
        count: Number of examples.
        size: Number of examples to choose.
        generator: Source of randomness; None for torch's own.

    Returns:
        Indices (size,), on the CPU.

    Raises:
        AlassoError: ``size`` does not lie between 1 and ``count``.

    >>> len(random_coreset(100, 5))
    5
    """
    _check_size(size, count)
    device = None if generator is None else generator.device
    return torch.randperm(count, generator=generator, device=device)[:size].cpu()


def k_center_coreset(
    x: Tensor, size: int, *, first: int | None = 0, generator: torch.Generator | None = None
) -> Tensor:
    """Return the indices of examples spread over x: each next one is the farthest from all chosen before.

    No choice of ``size`` centres has less than half this one's largest distance to the nearest centre (Gonzalez, 1985).
    Time is O(size · N), memory O(N) besides x.

    Args:
        x: Examples (N, …); distances are Euclidean over the flattened examples.
        size: Number of examples to choose.
        first: Index of the first one; None for a random example.
        generator: Source of randomness for ``first=None``.

    Returns:
        Indices (size,), on x's device.

    Raises:
        AlassoError: ``size`` does not lie between 1 and N, or ``first`` is no index of x.

    >>> k_center_coreset(torch.tensor([[0.0], [1.0], [10.0], [4.0]]), 3)
    tensor([0, 2, 3])
    """
    _check_size(size, len(x))
    if first is None:
        first = int(random_coreset(len(x), 1, generator))
    elif not 0 <= first < len(x):
        raise AlassoError(f"first must be an index of the {len(x)} examples, not {first}")
    points = x.detach().reshape(len(x), -1)
    points = points if points.dtype in (torch.float32, torch.float64) else points.float()
    index = torch.empty(size, dtype=torch.long, device=x.device)
    index[0] = first
    nearest = _distances_to(points, index[0])
    for i in range(1, size):
        # Never choose an example twice, even if all others are copies of chosen ones.
        nearest[index[i - 1]] = -1.0
        index[i] = nearest.argmax()
        nearest = torch.minimum(nearest, _distances_to(points, index[i]))
    return index


def _distances_to(points: Tensor, i: Tensor) -> Tensor:
    """Return the Euclidean distance of every point (N, D) to point i, (N,)."""
    # By differences: the matrix product form loses small distances to cancellation.
    return torch.cdist(points, points[i][None], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]


def _check_size(size: int, count: int) -> None:
    """Refuse a coreset that is empty or larger than what it is chosen from."""
    if not 1 <= size <= count:
        raise AlassoError(f"a coreset's size must lie between 1 and the {count} examples there are, not {size}")
