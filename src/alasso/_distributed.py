"""What has to cross ranks: sums over the ranks' data, totals over shards, and states for another number of ranks.

Nothing here loads distributed tensors, which takes most of a second, until there are some.
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

from alasso._sharding import local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed over ranks."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def sharded_like(values: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of ``values``, which are whole or themselves sharded, cut as ``parameter`` is. A copy."""
    if is_sharded(values):
        if is_sharded(parameter) and same_layout(values, parameter):
            return values.to_local().clone()
        values = values.full_tensor()
    if not is_sharded(parameter):
        return values.clone()
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    # Every rank has all of it, so cutting needs no communication.
    whole = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, parameter.placements).to_local().clone()


def same_layout(one: DTensor, other: DTensor) -> bool:
    return one.device_mesh == other.device_mesh and one.placements == other.placements and one.shape == other.shape


def as_sharded(shard: Tensor, parameter: Tensor | None) -> Tensor:
    """A shard as a part of the whole, cut as ``parameter`` is; a copy."""
    if not is_sharded(parameter):
        return shard.clone()
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def is_first_shard(parameter: Tensor) -> bool:
    """True where the first shard of a parameter lives, which stands for all of them."""
    if not is_sharded(parameter):
        return True
    place: list[int] = list(parameter.device_mesh.get_coordinate() or ())
    return not any(index for index, cut in zip(place, parameter.placements, strict=True) if cut.is_shard())


def sum_over_shards(values: Tensor, parameter: Tensor | None) -> Tensor:
    """Sum over the ranks that hold different shards of ``parameter``; ``values`` itself where it is whole."""
    if not is_sharded(parameter):
        return values
    total = values.detach().clone()
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            dist.all_reduce(total, group=parameter.device_mesh.get_group(dim))
    return total


def total_of(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum of (term, parameter it came from) over all shards. The gradient is that of this rank's own shards."""
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
    """Each flag's largest value over all ranks, if any of the parameters is sharded: ranks must decide alike."""
    sharded = next((p for p in parameters if is_sharded(p)), None)
    if sharded is None:
        return list(flags)
    largest = torch.tensor(flags, device=local(sharded).device)
    for dim in range(sharded.device_mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(dim))
    return [int(flag) for flag in largest]


def add_over_ranks_(tensors: Iterable[Tensor]) -> None:
    """Sums of what each rank saw of the data, in place; nothing outside a distributed run."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


@contextmanager
def whole(model: nn.Module) -> Iterator[Callable[[nn.Parameter], nn.Parameter]]:
    """While within, a sharded model has whole parameters and runs like a plain one, on every rank by itself.

    Yields a function from a parameter to the one that stands in for it. Takes memory for the whole model on each rank.
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
            others = OrderedDict((key, hook) for key, hook in present.items() if not of_fsdp(hook))
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


def of_fsdp(hook: Any) -> bool:
    """Whether a hook gathers or frees shards, which a whole model must not do."""
    owner = getattr(hook, "__self__", None)
    return type(owner).__module__.startswith("torch.distributed.fsdp")
