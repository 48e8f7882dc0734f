"""Hooks on a model's layers that see what these get and what they are told: the by-products that tell a curvature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import add as plus
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from alasso._distributed import add_over_ranks_, is_distributed, is_sharded, sharded_like, sum_over_shards
from alasso._parameters import weights_of
from alasso.importance._batches import Inputs
from alasso.importance._objectives import Head, Objective
from alasso.importance._pass import ImportancePass
from alasso.importance._signed_gradients import signed_gradient, sizes_of_gradients
from alasso.importance.kronecker import (
    has_inputs_as_rows,
    is_factored,
    matrix_shape,
    pairs_in,
    rank_of,
    rows_told,
    signs_like,
    sketch_of_gradients,
    sketch_of_inputs,
)

if TYPE_CHECKING:
    from alasso.methods.kron import KronALASSO, KronState


class Factors(NamedTuple):
    """What the calls of a layer tell of its weight: sketches of the factors of its curvature.

    Attributes:
        rows: For the rows.
        columns: For the columns.
        positions: How many pairs of an input and an output gradient they are sums over.
        sizes: Of the samples' gradients, and as if their positions had nothing in common; zeros if they need not.
    """

    rows: Tensor
    columns: Tensor
    positions: Tensor
    sizes: Tensor


class Output(NamedTuple):
    """What the calls of the layer nearest to the loss tell of the loss's scale.

    Attributes:
        name: The name of the layer's weight.
        layer: The layer.
        product: T = M S, for the weight's gradient as backward made it, in all layers that have this weight.
        squares: Sum of the squares of the gradient by the layer's outputs.
        terms: At how many positions of all samples that gradient is not zero. Where labels are ignored, it is.
    """

    name: str
    layer: nn.Module
    product: Tensor
    squares: Tensor
    terms: Tensor


class LossScale(NamedTuple):
    """What the layer nearest to the loss tells of a step.

    Attributes:
        factor: Between the gradients that backward told the layers and those that the optimizer has.
        terms: How many terms the loss is a mean of, B.
        unit: B times the root mean square of ∂loss/∂output over the terms: about 1 for a wrong answer's cross-entropy.
    """

    factor: Tensor
    terms: Tensor
    unit: Tensor


def joined(factors: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """Return sketches of L and R of a weight that one layer has, or several.

    A layer's G is a sum over positions, A a mean, and L takes the size of both, tr G tr A, times what positions have in
    common.

    Args:
        factors: Of each layer.

    Returns:
        The sketch of L; that of R, of any size.
    """
    rows, columns = [], []
    for one in factors:
        together, alone = one.sizes
        per_position = torch.where(alone > 0, together / alone, 1.0) / one.positions.clamp(min=1)
        rows.append(one.rows * (one.columns[:, -1].sum() * per_position))
        columns.append(one.columns * (one.rows[:, -1].sum() * per_position))
    return torch.stack(rows).sum(0), torch.stack(columns).sum(0)


def reaching(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    """Return the part of a layer's output gradient that reaches its weight.

    Args:
        layer: One that :func:`is_factored`.
        x: Its input.
        g: The gradient by its output.

    Returns:
        g, with zeros where an embedding's input is padding.
    """
    if not isinstance(layer, nn.Embedding) or layer.padding_idx is None:
        return g
    return g * x.ne(layer.padding_idx)[..., None]


class Kept(torch.autograd.Function):
    """Keeps a layer's input until its output gradient comes, as autograd does: recomputed by activation checkpointing,
    or moved away, where the user asks for it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[None, None]:
        return None, None


class Taps:
    """The hooks of one regularizer, and what they saw since its last step."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._layers: list[tuple[str, nn.Module]] = []  # with the name of the layer's weight
        self.seen: dict[str, dict[nn.Module, Factors]] = {}  # by weight and layer: several may have the same weight
        self.output: Output | None = None  # of the layer whose output gradients came first
        self._scale: LossScale | None = None  # of the last step that was looked at

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

    @contextmanager
    def set_aside(self, regularizer: KronALASSO) -> Iterator[None]:
        """Leave the layers as they were while the context lasts: what measures importance is no training."""
        were_there = bool(self)
        self.remove()
        try:
            yield
        finally:
            self.remove()
            if were_there:
                self.put(regularizer)

    def see(self, name: str, layer: nn.Module, factors: Factors) -> None:
        """Take note of what one call tells: calls of a layer are added up as its positions are."""
        of_weight = self.seen.setdefault(name, {})
        before = of_weight.get(layer)
        of_weight[layer] = factors if before is None else Factors(*map(plus, before, factors))

    def was_told(self, layer: nn.Module) -> bool:
        """Return whether a layer has told anything since the last step."""
        return any(layer in of_weight for of_weight in self.seen.values())

    def see_output(self, output: Output) -> None:
        """Take note of what one call of the layer nearest to the loss tells."""
        before = self.output
        self.output = output if before is None else Output(*before[:2], *map(plus, before[2:], output[2:]))

    def loss_scale(
        self, gradient_of: Callable[[nn.Parameter], Tensor], states: Mapping[str, Any], like: Tensor
    ) -> LossScale:
        """Return what was seen of the loss's scale since the last step, on all ranks together, and forget it.

        Clipping, a GradScaler and the mean over ranks stand between the layers' gradients and the optimizer's.

        Args:
            gradient_of: Returns this rank's part of the gradient that the optimizer has of a parameter.
            states: The states by parameter, which tell the sketches' sizes.
            like: A tensor of the precision to compute in.

        Returns:
            The last one again where another optimizer of the same step has asked before.
        """
        output, self.output = self.output, None
        if output is not None and output.layer.weight.grad is None:  # it was dropped
            output = None
        if is_distributed():
            output = self._on_all_ranks(output, states, like)
        if output is None:
            if self._scale is None:
                one = like.new_ones(())
                self._scale = LossScale(one, one, torch.zeros_like(one))
            return self._scale
        weight: nn.Parameter = output.layer.weight  # type: ignore[assignment]
        T = sharded_like(output.product, weight) if is_sharded(weight) else output.product
        M = gradient_of(weight).to(T.dtype).reshape(len(T), matrix_shape(weight)[1])
        found, told = ((M @ signs_like(M, M.shape[1], T.shape[1])) * T).sum(), T.square().sum()
        found, told = sum_over_shards(torch.stack([found, told]), weight)
        factor = torch.where(told > 0, found.clamp(min=0) / told, 1.0)
        terms = output.terms.to(factor)
        self._scale = LossScale(factor, terms, factor * (output.squares * terms).sqrt())
        return self._scale

    def _on_all_ranks(self, output: Output | None, states: Mapping[str, Any], like: Tensor) -> Output | None:
        """Return the sum of what the ranks saw of the layer nearest to the loss, at most ranks' if they differ."""
        seen = like.new_zeros(2, len(self._layers))  # positions and squares
        for i, (_, layer) in enumerate(self._layers):
            if output is not None and output.layer is layer:
                seen[0, i], seen[1, i] = output.terms, output.squares
        add_over_ranks_([seen])
        if not seen[0].any():
            return None
        i = int(seen[0].argmax())
        name, layer = self._layers[i]
        rows: int = layer.weight.shape[0]  # type: ignore[index,assignment]
        product = like.new_zeros(rows, rank_of(states[name].columns))
        if output is not None and output.layer is layer:
            product = output.product
        add_over_ranks_([product])
        return Output(name, layer, product, seen[1, i], seen[0, i])

    def take(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, Any]) -> dict[str, list[Factors]]:
        """Return what was seen of these parameters since the last step, on all ranks together, and forget it.

        Args:
            parameters: The parameters by name, the same on all ranks.
            states: Their states, which tell the sketches' sizes.

        Returns:
            The factors that each layer told; none of a parameter of which a layer told nothing, as a tied output's
            where the loss takes its weight alone.
        """
        seen = {name: self.seen.pop(name, {}) for name in parameters}
        if parameters and is_distributed():
            layers = [(name, layer) for name, layer in self._layers if name in parameters]
            none = torch.zeros((), dtype=torch.long, device=next(iter(parameters.values())).device)
            for name, layer in layers:  # which another rank may have called
                rows, columns = torch.zeros_like(states[name].rows), torch.zeros_like(states[name].columns)
                seen[name].setdefault(layer, Factors(rows, columns, none, rows.new_zeros(2)))
            counts = torch.stack([seen[name][layer].positions for name, layer in layers])
            add_over_ranks_([counts])
            for (name, layer), positions, is_told in zip(layers, counts, counts.tolist(), strict=True):
                rows, columns, _, sizes = seen[name].pop(layer)
                if is_told:
                    if not is_sharded(parameters[name]):
                        add_over_ranks_([rows, columns, sizes])
                    seen[name][layer] = Factors(rows, columns, positions, sizes)
        return self.whole(seen)

    def whole(self, seen: Mapping[str, dict[nn.Module, Factors]]) -> dict[str, list[Factors]]:
        """Return what was seen of those parameters of which all layers told something; of others nothing."""
        sharing = Counter(name for name, _ in self._layers)
        return {name: list(told.values()) if len(told) == sharing[name] else [] for name, told in seen.items()}


def factors_of_samples(
    regularizer: KronALASSO, loader: Iterable[Any], objective: Objective, head: Head | None
) -> tuple[dict[str, KronState], Tensor]:
    """Return states with the factors of an objective's squared gradients, summed over samples, at the present weights.

    Every term has a sign of its own, drawn at random, so that one backward pass of a batch tells all of them apart.

    Args:
        regularizer: The method, whose taps look on.
        loader: The data.
        objective: What is differentiated.
        head: Maps the model's output to logits.

    Returns:
        The states by parameter name; the mean over samples of Σ ‖∂term / ∂output‖².

    Raises:
        AlassoError: Loader, labels and outputs do not fit together, or there are no samples.
    """
    parameters, surrogate, taps = dict(regularizer.protected), regularizer.surrogate, regularizer.taps
    states = {name: surrogate.init(weights_of(p)) for name, p in parameters.items()}
    measure = ImportancePass(regularizer.model, objective, parameters, head, 1, tells_steepness=True)
    generator = torch.Generator().manual_seed(0)

    def add(x: Inputs, y: Tensor | None) -> None:
        terms, _ = measure.terms_of(measure.output(x), x, y)
        taps.seen.clear()  # by the output's slope
        signs = torch.randint(2, terms.shape, generator=generator).to(terms) * 2 - 1
        gradients = measure.backward((terms * signs).sum() / len(x), parameters.values())
        seen = taps.whole({name: taps.seen.pop(name, {}) for name in states})
        for (name, s), g in zip(states.items(), gradients, strict=True):
            if g is not None:
                told, count = joined(seen[name]) if seen[name] else None, torch.full_like(s.unit, len(x))
                scale = LossScale(torch.ones_like(count), count, count)
                surrogate.add_factors_(s, g.to(s.anchor.dtype), scale, told, len(x))
        taps.output = None

    taps.put(regularizer)
    sums = (total for s in states.values() for total in (s.rows, s.columns, s.steps))
    measure.add_all(loader, add, sums)
    return states, measure.steepness


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
        # Not a decorator: that would load the compiler with this module, for a second.
        self._look = None if regularizer is None else torch.compiler.disable(Tap.look)

    def __reduce__(self) -> Any:
        return Tap, ()

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._look is not None:
            self._look(self, layer, args, kwargs, output)

    def look(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Sketches, unseen by the compiler."""
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return
        regularizer = None if self._regularizer is None else self._regularizer()
        if regularizer is None or not regularizer.step_kind:
            return
        weight: nn.Parameter = layer.weight  # type: ignore[assignment]
        if not (output.requires_grad and weight.requires_grad and isinstance(weight, nn.Parameter)):
            return  # frozen, or functional_call() has put another tensor in its place
        taps, name = regularizer.taps, self._name
        if weight.grad is None:  # what was seen belongs to a gradient that was dropped
            taps.seen.pop(name, None)
            if taps.output is not None and taps.output.name == name:
                taps.output = None
        state = regularizer.protected.states.get(name)
        if state is None:  # it has just been thawed
            state = regularizer.protected.state_of(name, weight)
        rank_of_rows, rank_of_columns, dtype = rank_of(state.rows), rank_of(state.columns), state.rows.dtype
        if is_transposed := has_inputs_as_rows(layer):
            rank_of_rows, rank_of_columns = rank_of_columns, rank_of_rows
        x = next(iter((*args, *kwargs.values())))
        # Autocast keeps a copy of its own, and others may write to x.
        kept = Kept.apply(weight, x.to(output.dtype) if x.is_floating_point() else x)

        def see(g: Tensor) -> None:
            (x,) = kept.grad_fn.saved_tensors
            with torch.no_grad(), torch.autocast(g.device.type, enabled=False):
                x, g = x.to(dtype) if x.is_floating_point() else x, reaching(layer, x, g).to(dtype)
                told = rows_told(layer, g)
                nearest = taps.output  # backward comes to it before all others
                if nearest is None or nearest.name == name:
                    product = signed_gradient(layer, x, g, rank_of(state.columns), dtype)
                    squares, terms = torch.linalg.vector_norm(g).square(), told.sum()
                    if nearest is not None and nearest.layer is not layer:  # it has the same weight
                        squares, terms = torch.zeros_like(squares), torch.zeros_like(terms)
                    taps.see_output(Output(name, layer, product, squares, terms))
                A = sketch_of_inputs(layer, x, told, rank_of_columns, dtype)
                G = sketch_of_gradients(layer, g, rank_of_rows, dtype)
                rows, columns = (A, G) if is_transposed else (G, A)
                sizes = sizes_of_gradients(layer, x, g, rank_of(state.columns), dtype)
                taps.see(name, layer, Factors(rows, columns, pairs_in(layer, x, told), sizes))

        output.register_hook(see)
