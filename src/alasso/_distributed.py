"""Sharded tensors and sums over ranks: DDP adds up what the ranks saw, FSDP2 gives each rank a shard of a parameter.

All maths of the core is elementwise, so a rank works on its own shard, :func:`local`; only totals and saved states need
the other ranks. Importing ``torch.distributed.tensor`` takes most of a second. Where nobody has imported it, nothing is
sharded, so this module never imports it: it checks whether somebody has.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TENSORS = "torch.distributed.tensor"


# -- shards --------------------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Return whether a tensor is distributed over ranks."""
    loaded = sys.modules.get(_TENSORS)
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the shard on this rank; the tensor itself where nothing is sharded."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:  # the usual case, asked for in every step
        return tensor
    return tensor.to_local() if is_sharded(tensor) else tensor


def sharded_like(values: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy of this rank's shard of ``values`` (whole or sharded), cut as ``parameter`` is."""
    if is_sharded(values):
        if is_sharded(parameter) and _same_layout(values, parameter):
            return values.to_local().clone()
        values = values.full_tensor()
    if not is_sharded(parameter):
        return values.clone()
    tensors, mesh = sys.modules[_TENSORS], parameter.device_mesh
    # Every rank has all of it, so cutting needs no communication.
    everywhere = tensors.DTensor.from_local(values, mesh, [tensors.Replicate()] * mesh.ndim, run_check=False)
    shard: Tensor = everywhere.redistribute(mesh, parameter.placements).to_local()
    return shard.clone()


def as_sharded(shard: Tensor, parameter: Tensor | None) -> Tensor:
    """Return a copy of a rank's shard as a sharded tensor, cut as ``parameter`` is."""
    if not is_sharded(parameter):
        return shard.clone()
    sharded: Tensor = sys.modules[_TENSORS].DTensor.from_local(
        shard.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded


def is_first_shard(parameter: Tensor) -> bool:
    """Return whether this rank holds a parameter's first shard, the one that speaks for all of them."""
    if not is_sharded(parameter):
        return True
    place: list[int] = list(parameter.device_mesh.get_coordinate() or ())
    return not any(index for index, cut in zip(place, parameter.placements, strict=True) if cut.is_shard())


def _same_layout(one: DTensor, other: DTensor) -> bool:
    return one.device_mesh == other.device_mesh and one.placements == other.placements and one.shape == other.shape


# -- sums over ranks -----------------------------------------------------------------------------------------


def sum_over_shards(values: Tensor, parameter: Tensor | None) -> Tensor:
    """Return the sum over the ranks that hold different shards of ``parameter``; ``values`` itself if it is whole."""
    if not is_sharded(parameter):
        return values
    total = values.detach().clone()
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            dist.all_reduce(total, group=parameter.device_mesh.get_group(dim))
    return total


def total_of(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of scalar terms over all shards; its gradient is that of this rank's own shards.

    Args:
        terms: (term, parameter it came from).
    """
    device = terms[0][0].device
    own = torch.stack([term.to(device) for term, _ in terms]).sum()
    layouts: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for term, parameter in terms:
        if is_sharded(parameter):
            layouts.setdefault((parameter.device_mesh, parameter.placements), []).append((term, parameter))
    for group in layouts.values():
        share = torch.stack([term.detach().to(device) for term, _ in group]).sum()
        own = own + (sum_over_shards(share, group[0][1]) - share)
    return own


def agreed(flags: Sequence[int], parameters: Iterable[Tensor]) -> list[int]:
    """Return each flag's maximum over all ranks if a parameter is sharded, so that all ranks decide alike."""
    sharded = next(filter(is_sharded, parameters), None)
    if sharded is None:
        return list(flags)
    largest = torch.tensor(flags, device=local(sharded).device)
    for dim in range(sharded.device_mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(dim))
    return [int(flag) for flag in largest]


def is_distributed() -> bool:
    """Return whether several ranks take part in this run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def add_over_ranks_(tensors: Iterable[Tensor]) -> None:
    """Add up in place what each rank saw of the data; do nothing outside a distributed run."""
    if is_distributed():
        for tensor in tensors:
            dist.all_reduce(tensor)


# -- sharded models ------------------------------------------------------------------------------------------


def reshard(model: nn.Module) -> None:
    """Replace whole parameters, which FSDP2 leaves in the model after an evaluation, by the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextmanager
def whole(model: nn.Module) -> Iterator[Callable[[nn.Parameter], nn.Parameter]]:
    """Make a sharded model whole on every rank while the context lasts, so that it runs like a plain one.

    It takes memory for the whole model on each rank. A model that is not sharded stays as it is.

    Yields:
        A function from a parameter to the one that stands in for it.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    changed: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter | None]]] = []
    hooks: list[tuple[nn.Module, str, Mapping[int, Any]]] = []
    for module in model.modules():
        changed.append((module._parameters, dict(module._parameters)))
        for slot, parameter in changed[-1][1].items():
            if parameter is None or not is_sharded(values := parameter.detach()):
                continue
            if parameter not in stand_ins:
                stand_ins[parameter] = nn.Parameter(values.full_tensor(), parameter.requires_grad)
            module._parameters[slot] = stand_ins[parameter]
        for table in ("_forward_pre_hooks", "_forward_hooks"):
            present = getattr(module, table)
            others = OrderedDict((key, hook) for key, hook in present.items() if not _belongs_to_fsdp(hook))
            if len(others) < len(present):
                hooks.append((module, table, present))
                setattr(module, table, others)
    try:
        yield lambda parameter: stand_ins.get(parameter, parameter)
    finally:
        for slots, before in changed:
            slots.update(before)
        for module, table, present in hooks:
            setattr(module, table, present)


def _belongs_to_fsdp(hook: Any) -> bool:
    """Return whether a hook gathers or frees shards, which a whole model must not do."""
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.startswith("torch.distributed.fsdp")
