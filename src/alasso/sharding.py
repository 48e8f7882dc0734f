"""Where a parameter may be one rank's shard of a larger tensor. All maths is elementwise, so the shard suffices."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The shard that lives on this rank; the tensor itself where nothing is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
