"""Drop-transfer in a stack: the network's hidden layers are given, beside their weights, those they are dropped to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from alasso.bench.stacking.lane_gradients import Weights
from alasso.bench.stacking.slots import Slot, anchor_of
from alasso.errors import AlassoError
from alasso.methods.imm import layers_to_drop, with_nodes_dropped

#: Of a layer, by name of its own parameter: where it looks for what that was at the beginning of the task.
BEFORE = {"weight": "weight_before_the_task", "bias": "bias_before_the_task"}
CHANCE = "chance_to_be_dropped"


class LaneDrops:
    """What the network of a stack is given for drop-transfer, by name; its layers are changed in place to use it.

    Weights at the beginning of the task are the springs' anchors, which the stack has already. ``chance``, a number a
    lane, is 0 in the first task, where nothing is dropped: what is recorded and compiled stays the same.
    """

    def __init__(self, network: nn.Module, lanes: int, device: torch.device) -> None:
        own = next(network.parameters()).dtype
        exact = torch.promote_types(own, torch.float32)  # half precision is too coarse for a small chance
        self.chance = torch.zeros(lanes, device=device, dtype=exact)
        self.anchors: dict[str, str] = {}  # name of what is given: name of the parameter whose anchor it is
        self.chances: list[str] = []
        for name, layer in hidden_layers(network).items():
            self.chances.append(f"{name}.{CHANCE}")
            layer.register_buffer(CHANCE, torch.empty((), device="meta"))
            for name_of_own, before in BEFORE.items():
                parameter = getattr(layer, name_of_own)
                layer.register_buffer(before, None if parameter is None else torch.empty_like(parameter, device="meta"))
                if parameter is not None:
                    self.anchors[f"{name}.{before}"] = f"{name}.{name_of_own}"
            layer.register_forward_hook(drop_as_given, with_kwargs=True)

    def given(self, slots: Mapping[str, Slot]) -> Weights:
        anchors = {name: anchor_of(slots[parameter]) for name, parameter in self.anchors.items()}
        return anchors | dict.fromkeys(self.chances, self.chance)


def drop_as_given(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], h: Tensor) -> Tensor:
    """A forward hook, as in :class:`alasso.methods.imm.DropTransfer`."""
    weight, bias = (getattr(layer, name) for name in BEFORE.values())
    return with_nodes_dropped(layer, args, kwargs, h, (weight, bias), getattr(layer, CHANCE))


def hidden_layers(network: nn.Module) -> dict[str, nn.Module]:
    """By name, those that drop-transfer drops nodes of."""
    dropped = layers_to_drop(network, exclude=None)
    return {name: layer for name, layer in network.named_modules() if layer in dropped}


def can_drop(model: nn.Module) -> bool:
    """Whether there are hidden layers, and weight and bias of each are parameters, which anchors are kept of."""
    try:
        layers = hidden_layers(model).values()
    except AlassoError:  # said when the second task begins
        return False
    return all(getattr(layer, own) is layer._parameters.get(own) for layer in layers for own in BEFORE)
