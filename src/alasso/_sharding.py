"""Where a parameter may be one rank's shard of a larger tensor. All maths is elementwise, so the shard suffices."""

from __future__ import annotations

import sys

from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """The shard that lives on this rank; the tensor itself where nothing is sharded."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor
    if is_sharded(tensor):
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return shard
    return tensor


def is_sharded(tensor: Tensor) -> bool:
    # Loading it takes most of a second, and where it is not loaded there are no shards.
    sharding = sys.modules.get("torch.distributed.tensor")
    return sharding is not None and isinstance(tensor, sharding.DTensor)


def gather_no_more(model: nn.Module) -> None:
    """Have FSDP2 give up the whole parameters that a forward pass without a backward one, an evaluation say, leaves in
    the model: under their names, states are those of shards.
    """
    sharded = sys.modules.get("torch.distributed.fsdp")
    if sharded is None or not hasattr(sharded, "FSDPModule"):
        return
    for module in model.modules():
        if isinstance(module, sharded.FSDPModule):
            module.reshard()
