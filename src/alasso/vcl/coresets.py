"""Which few examples to keep of a task: index functions, as variational continual learning uses them.

Both return indices without repeats, on the CPU for :func:`random_coreset` and on x's device for
:func:`k_center_coreset`; with ``index`` chosen, ``x[index]`` is the coreset and the other examples remain for training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from alasso.errors import AlassoError


def random_coreset(count: int, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Indices of ``size`` out of ``count`` examples, all subsets alike.

    >>> len(random_coreset(100, 5))
    5
    """
    check_size(size, count)
    device = None if generator is None else generator.device
    return torch.randperm(count, generator=generator, device=device)[:size].cpu()


def k_center_coreset(
    x: Tensor, size: int, *, first: int | None = 0, generator: torch.Generator | None = None
) -> Tensor:
    """Indices of ``size`` examples spread over x: greedily, the next one is the farthest from all chosen so far.

    No choice of ``size`` centres has less than half this one's largest distance to the nearest centre (Gonzalez, 1985).
    ``first`` is where to begin, None for an example drawn with ``generator``. x is (N, …), distances are Euclidean over
    the flattened examples; time is O(size · N), memory O(N) besides x.

    >>> k_center_coreset(torch.tensor([[0.0], [1.0], [10.0], [4.0]]), 3)
    tensor([0, 2, 3])
    """
    check_size(size, len(x))
    if first is None:
        first = int(random_coreset(len(x), 1, generator))
    elif not 0 <= first < len(x):
        raise AlassoError(f"first must be an index of the {len(x)} examples, not {first}")
    points = x.detach().reshape(len(x), -1)
    points = points if points.dtype in (torch.float32, torch.float64) else points.float()
    index = torch.empty(size, dtype=torch.long, device=x.device)
    index[0] = first
    nearest = distances_to(points, index[0])
    for i in range(1, size):
        # A chosen example is never the farthest again, not even where all that remain are copies of chosen ones.
        nearest[index[i - 1]] = -1.0
        index[i] = nearest.argmax()
        nearest = torch.minimum(nearest, distances_to(points, index[i]))
    return index


def distances_to(points: Tensor, i: Tensor) -> Tensor:
    """Euclidean distance of every point to point i."""
    # By differences: the matrix-product form loses small distances to cancellation.
    return torch.cdist(points, points[i][None], compute_mode="donot_use_mm_for_euclid_dist")[:, 0]


def check_size(size: int, count: int) -> None:
    """Refuse a coreset that is empty or larger than what it is chosen from."""
    if not 1 <= size <= count:
        raise AlassoError(f"a coreset's size must lie between 1 and the {count} examples there are, not {size}")
