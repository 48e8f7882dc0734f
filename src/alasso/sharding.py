"""Where a parameter may be one rank's shard of a larger tensor. All maths is elementwise, so the shard suffices."""

from __future__ import annotations

import sys

from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """The shard that lives on this rank; the tensor itself where nothing is sharded."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor
    # Loading it takes most of a second, and where it is not loaded there are no shards.
    sharding = sys.modules.get("torch.distributed.tensor")
    if sharding is not None and isinstance(tensor, sharding.DTensor):
        shard: Tensor = tensor.to_local()
        return shard
    return tensor
