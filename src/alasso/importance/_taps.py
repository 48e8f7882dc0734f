"""Hooks on a model's layers that see what these get and what they are told: the by-products that tell a curvature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from alasso._distributed import add_over_ranks_, is_distributed, is_sharded
from alasso.importance.kronecker import (
    has_inputs_as_rows,
    is_factored,
    rank_of,
    samples_in,
    sketch_of_gradients,
    sketch_of_inputs,
)

if TYPE_CHECKING:
    from alasso.methods.kron import KronALASSO


class Factors(NamedTuple):
    """What the calls of a layer tell of its weight: sketches of the factors of its curvature.

    Attributes:
        rows: For the rows.
        columns: For the columns.
        samples: Number of samples in the calls.
    """

    rows: Tensor
    columns: Tensor
    samples: int


def joined(factors: Sequence[Factors]) -> Factors:
    """Return the factors of a weight that several layers have: those of Σ G ⊗ A, each summed over the other's axis."""
    if len(factors) == 1:
        return factors[0]
    rows = torch.stack([one.rows * one.columns[:, -1].sum() for one in factors]).sum(0)
    columns = torch.stack([one.columns * one.rows[:, -1].sum() for one in factors]).sum(0)
    return Factors(rows, columns, max(one.samples for one in factors))


class Taps:
    """The hooks of one regularizer, and what they saw since its last step."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._layers: list[tuple[str, nn.Module]] = []  # with the name of the layer's weight
        self.seen: dict[str, dict[nn.Module, Factors]] = {}  # by weight and layer: several may have the same weight

    def __bool__(self) -> bool:
        return bool(self._handles)

    def __reduce__(self) -> Any:
        """Copy nothing: a copy has to be attached again."""
        return Taps, ()

    def put(self, regularizer: KronALASSO) -> None:
        """Put hooks on all layers whose factors follow from inputs and output gradients, in place of earlier ones."""
        self.remove()
        for layer in regularizer.model.modules():
            if is_factored(layer) and (name := regularizer.protected.name_of(layer.weight)) is not None:  # type: ignore[arg-type]
                self._layers.append((name, layer))
                self._handles.append(layer.register_forward_hook(Tap(regularizer, name), with_kwargs=True))

    def remove(self) -> None:
        """Leave the layers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._layers.clear()

    def see(self, name: str, layer: nn.Module, factors: Factors) -> None:
        """Take note of what one call tells: calls of a layer are added up as its positions are."""
        of_weight = self.seen.setdefault(name, {})
        before = of_weight.get(layer)
        of_weight[layer] = factors if before is None else Factors(*map(add, before, factors))

    def take(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, Any]) -> dict[str, list[Factors]]:
        """Return what was seen of these parameters since the last step, on all ranks together, and forget it.

        Args:
            parameters: The parameters by name, the same on all ranks.
            states: Their states, which tell the sketches' sizes.

        Returns:
            The factors that each layer told; none of a parameter that no layer told anything of.
        """
        seen = {name: self.seen.pop(name, {}) for name in parameters}
        if parameters and is_distributed():
            layers = [(name, layer) for name, layer in self._layers if name in parameters]
            for name, layer in layers:  # which another rank may have called
                nothing = torch.zeros_like(states[name].rows), torch.zeros_like(states[name].columns)
                seen[name].setdefault(layer, Factors(*nothing, 0))
            device = next(iter(parameters.values())).device
            counts = torch.tensor([seen[name][layer].samples for name, layer in layers], device=device)
            add_over_ranks_([counts])
            for (name, layer), samples in zip(layers, counts.tolist(), strict=True):
                rows, columns, _ = seen[name].pop(layer)
                if samples:
                    if not is_sharded(parameters[name]):
                        add_over_ranks_([rows, columns])
                    seen[name][layer] = Factors(rows, columns, samples)
        return {name: list(of_weight.values()) for name, of_weight in seen.items()}


class Tap:
    """A forward hook on one layer: sketches its inputs, and its output gradients when they come.

    A copy of the layer gets a hook that does nothing: it is another model's.

    Args:
        regularizer: Whose layer it is; held weakly.
        name: The name of the layer's weight.
    """

    def __init__(self, regularizer: KronALASSO | None = None, name: str = "") -> None:
        self._regularizer = None if regularizer is None else ref(regularizer)
        self._name = name

    def __reduce__(self) -> Any:
        return Tap, ()

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        regularizer = None if self._regularizer is None else self._regularizer()
        if regularizer is None or not regularizer.step_kind:
            return
        weight: nn.Parameter = layer.weight  # type: ignore[assignment]
        if not output.requires_grad or not weight.requires_grad:
            return
        taps, name = regularizer.taps, self._name
        if weight.grad is None:  # what was seen belongs to a gradient that was dropped
            taps.seen.pop(name, None)
        state = regularizer.protected.states.get(name)
        if state is None:  # it has just been thawed
            state = regularizer.protected.state_of(name, weight)
        rank_of_rows, rank_of_columns, dtype = rank_of(state.rows), rank_of(state.columns), state.anchor.dtype
        if is_transposed := has_inputs_as_rows(layer):
            rank_of_rows, rank_of_columns = rank_of_columns, rank_of_rows
        x = next(iter((*args, *kwargs.values())))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            A = sketch_of_inputs(layer, x.detach(), rank_of_columns, dtype)
        samples, tokens = samples_in(layer, x), x if isinstance(layer, nn.Embedding) else None

        def see(g: Tensor) -> None:
            with torch.no_grad():
                G = sketch_of_gradients(layer, g, rank_of_rows, dtype, tokens)
                rows, columns = (A, G) if is_transposed else (G, A)
                taps.see(name, layer, Factors(rows, columns, samples))

        output.register_hook(see)
