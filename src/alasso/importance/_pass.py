"""The pass over data behind :mod:`alasso.importance`: which route each parameter takes, and the sums along it.

For every batch one forward pass records the inputs x and outputs h of the common layers. Then each parameter takes

    directly            if its layer was called once, with a row for each sample: ∂t/∂h follows from one backward pass,
                        and the layer's formula (:mod:`alasso.importance._layers`) gives the per-sample gradients
    sample by sample    if not: ∂t_i/∂θ by `vmap`
    by ordinary         where vmap cannot follow the model, or where the first batch shows that the routes above are
    backward passes     wrong: one for each sample, as in training

Two samples of the first batch go by ordinary backward passes in any case, and must come to what the other routes say.
What these cannot see is then found: parameters that the model keeps in a plain list, in a closure or within a reentrant
checkpoint, and layers whose rows mix samples.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, vjp, vmap

from alasso._distributed import add_over_ranks_
from alasso._parameters import some_of
from alasso.errors import AlassoError
from alasso.importance._batches import Inputs, Place, batches_of, inputs_and_labels
from alasso.importance._layers import CONVOLUTIONS, add_embedding_, by_group, is_direct, normalized, sum_positions
from alasso.importance._objectives import Head, Objective, at_least_single

log = logging.getLogger("alasso")

_ELEMENTS_AT_ONCE = 2**24  # bounds the memory of per-sample gradients, whatever the size of a layer

_TOLERANCE = 0.05  # of what both ways say of a parameter: wrong routes are wrong by far more, TF32 by far less


@dataclass(frozen=True)
class _Call:
    """One call of a layer.

    Attributes:
        x: The layer's input.
        version: Of the input at the time of the call.
        output: The edge, unlike the output, outlives in-place changes made to the output.
    """

    x: Tensor
    version: int
    output: GradientEdge


_Calls = dict[nn.Module, list[_Call]]
_Slots = dict[nn.Module, list[str]]


class ImportancePass:
    """Sums over samples of what each single sample's gradient comes to, and their means.

    Args:
        model: Any model whose samples do not influence one another in evaluation mode.
        objective: What is differentiated, and whether gradients are squared or made absolute.
        parameters: The model's parameters to measure, by the names that the result gives them.
        head: Applied to the model's output; None takes the output, or its attribute `logits`. Of a model without
            forward(), such as a ModuleDict, it is applied to the inputs.
        chunk: How many samples at most have their own gradients in memory at a time.
        tells_steepness: Whether ``steepness`` is measured, too: the mean over samples of Σ_j ‖∂t_ij / ∂output‖².
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        parameters: Mapping[str, nn.Parameter],
        head: Head | None,
        chunk: int,
        tells_steepness: bool = False,
    ) -> None:
        self.has_forward = type(model).forward is not nn.Module.forward
        if not self.has_forward and head is None:
            raise AlassoError(
                f"{type(model).__name__} has no forward() that could be measured: pass a head that maps a batch's "
                "inputs to the logits, such as head=lambda x: model['a'](model['body'](x))"
            )
        if chunk < 1:
            raise AlassoError(f"chunk must be at least 1 sample, not {chunk}.")
        self.model, self.objective, self.head, self.chunk = model, objective, head, chunk
        self.tells_steepness = tells_steepness
        self.own_names = {parameter: name for name, parameter in model.named_parameters()}
        self.parameters = dict(parameters)
        with torch.inference_mode(False):  # else only inference mode could change the sums
            self.sums = {p: torch.zeros_like(at_least_single(p.detach())) for p in parameters.values()}
        self.homes = {
            parameter: (layer, slot)
            for layer in model.modules()
            if is_direct(layer)
            for slot, parameter in layer.named_parameters(recurse=False)
            # Another name stands for what the weight is made from, as where it is pruned.
            if slot in ("weight", "bias") and parameter in self.sums
        }
        self.layers_with_sample_rows: dict[Hashable, set[nn.Module]] = {}
        self.vmap_works = True
        self.missed: set[nn.Parameter] | None = None  # what only ordinary backward passes see; none before any batch

    def mean_over(self, loader: Iterable[Any]) -> dict[str, Tensor]:
        """Return the mean over all samples of the loader, and of those of the other ranks.

        Raises:
            AlassoError: If there are no samples, or the batches do not fit the model.
        """
        total = self.add_all(loader, self._add_batch, self.sums.values())
        return {name: self.sums[parameter] / total for name, parameter in self.parameters.items()}

    def add_all(
        self, loader: Iterable[Any], add: Callable[[Inputs, Tensor | None], None], sums: Iterable[Tensor]
    ) -> Tensor:
        """Add every batch of the loader in evaluation mode, then the other ranks' sums.

        Args:
            loader: The data.
            add: Adds one batch.
            sums: What it adds to.

        Returns:
            The number of samples on all ranks.

        Raises:
            AlassoError: If there are no samples, or the batches do not fit the model.
        """
        device = next((t.device for t in (*self.model.parameters(), *self.model.buffers())), None)
        batches, count = batches_of(loader), 0
        with _differentiable_eval_mode(self.model, self.sums):
            self.steepness = torch.zeros((), dtype=next((s.dtype for s in self.sums.values()), None), device=device)
            for batch in batches:
                x, y = inputs_and_labels(batch, device)
                if len(x) > 0:
                    add(x, y)
                    count += len(x)
            total = torch.tensor(count, device=device)
            add_over_ranks_((*sums, self.steepness, total))
            if total == 0:
                raise AlassoError("The loader yielded no samples: pass a list or DataLoader with some batches.")
            self.objective.check()
        self.steepness = (self.steepness / total).clamp(min=torch.finfo(self.steepness.dtype).tiny)  # it divides
        return total

    def _add_batch(self, x: Inputs, y: Tensor | None) -> None:
        """Add a batch to the sums."""
        output, calls = self._recorded_forward(x)
        terms, targets = self.terms_of(output, x, y)
        is_first, self.missed = self.missed is None, self.missed or set()
        if is_first:
            self.missed = self._found_missed(terms, x, targets)
        direct, others = self._choose_routes(terms, calls, x)
        if direct:
            self._add_directly(direct, terms, calls)
        del output, terms, calls  # frees the activations before the other routes make their own
        if others:
            self._add_sample_by_sample(others, x, targets)
        if is_first:
            self.missed |= self._found_unreached(x, targets)
        if self.missed:
            missed = list(self.missed)
            self._add(missed, self._sum_by_backward(missed, x, targets))

    def terms_of(self, output: Any, x: Inputs, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the objective's terms and targets of a batch, and add to ``steepness`` where it is wanted.

        Raises:
            AlassoError: If the output is no tensor with a row for each sample.
        """
        if not isinstance(output, Tensor):
            raise AlassoError(
                f"The model answers with a {type(output).__name__}, not with a tensor: pass a head that picks it out, "
                f"such as head=lambda output: output[{next(iter(output), 0) if isinstance(output, Mapping) else 0!r}]."
            )
        if output.shape[:1] != (len(x),):
            raise AlassoError(f"The output must have a row for each of {len(x)} samples, not {tuple(output.shape)}.")
        targets = self.objective.targets(output, y)
        terms = self.objective.terms(output, targets)
        for column in terms.unbind(1) if self.tells_steepness and terms.requires_grad else ():
            (by_output,) = torch.autograd.grad(column.sum(), output, retain_graph=True)
            self.steepness += at_least_single(by_output).square().sum()
        return terms, targets

    def _add(self, parameters: Iterable[nn.Parameter], importances: Iterable[Tensor]) -> None:
        for parameter, importance in zip(parameters, importances, strict=True):
            self.sums[parameter] += importance

    def output(self, x: Inputs, values: dict[str, Tensor] | None = None) -> Tensor:
        """Return the head's output, (N, …), with ``values`` in place of the parameters of these names."""
        args, kwargs = x.arguments()
        if self.head is not None and not self.has_forward and values is None:  # vmap cannot follow it
            return self.head(*args, **kwargs)
        output = self.model(*args, **kwargs) if values is None else functional_call(self.model, values, args, kwargs)
        if self.head is not None:
            return self.head(output)
        if isinstance(output, Mapping):
            output = output.get("logits", output)
        found: Tensor = getattr(output, "logits", output)
        return found

    def _recorded_forward(self, x: Inputs) -> tuple[Tensor, _Calls]:
        """Return the head's output, and the calls of all layers that may go directly."""
        calls: _Calls = {}

        def record(layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            if output.requires_grad:
                x = next(iter((*args, *kwargs.values())))
                calls.setdefault(layer, []).append(_Call(x.detach(), x._version, get_gradient_edge(output)))

        with ExitStack() as hooks:
            for layer in {layer for layer, _ in self.homes.values()}:
                # First in line: another hook may replace the output.
                handle = layer.register_forward_hook(record, prepend=True, with_kwargs=True)
                hooks.callback(handle.remove)
            return self.output(x), calls

    def _choose_routes(self, terms: Tensor, calls: _Calls, x: Inputs) -> tuple[_Slots, list[nn.Parameter]]:
        """Split the parameters that have an influence into slots of layers to be done directly, and others.

        The autograd graph is the judge: a weight may be tied, or used by hand besides its layer's call.
        """
        nodes, uses = _walk_graph(terms)
        direct: _Slots = {}
        others: list[nn.Parameter] = []
        for parameter in (p for p in self.sums if uses[p] > 0 and p not in (self.missed or ())):
            layer, slot = self.homes.get(parameter, (None, ""))
            call = calls[layer][0] if layer in calls and len(calls[layer]) == 1 else None
            once = uses[parameter] == 1 and call is not None and call.output.node in nodes
            intact = call is not None and call.x._version == call.version
            if layer and call and once and intact and self._has_a_row_per_sample(layer, call.x, x):
                direct.setdefault(layer, []).append(slot)
            else:
                others.append(parameter)
        return direct, others

    def _has_a_row_per_sample(self, layer: nn.Module, layer_x: Tensor, x: Inputs) -> bool:
        """Return whether row i of the layer's input is sample i's.

        Its length alone cannot tell (N, T, D) from (T, N, D) where T = N; a pass of half a batch can.
        """
        rows, shape = len(x), x.kind
        if len(layer_x) != rows or (isinstance(layer, CONVOLUTIONS) and layer_x.ndim != layer.weight.ndim):
            return False
        if shape not in self.layers_with_sample_rows:
            # A single sample is doubled instead: a table of one row for all samples looks like one sample's row.
            other = next(x.split(rows // 2)) if rows > 1 else x.with_rows(lambda t: torch.cat((t, t)))
            _, calls = self._recorded_forward(other)
            self.layers_with_sample_rows[shape] = {
                called for called, (call, *_) in calls.items() if len(call.x) == len(other)
            }
        return layer in self.layers_with_sample_rows[shape]

    def _add_directly(self, direct: _Slots, terms: Tensor, calls: _Calls) -> None:
        """Add what follows from the gradients by the layers' outputs."""
        for layer, g in self._gradients_by_outputs(direct, terms, calls):
            for slot in direct[layer]:
                self._add_slot(layer, slot, calls[layer][0].x, g)

    def _gradients_by_outputs(self, direct: _Slots, terms: Tensor, calls: _Calls) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield layers and gradients by their outputs, from one backward pass for each column of terms."""
        edges = [calls[layer][0].output for layer in direct]
        # Classes whose probability is 0 (or 1) for every sample have no gradient.
        columns = terms.detach().any(0).nonzero().flatten().tolist() if terms.shape[1] > 1 else [0]
        for column in columns:
            direction = torch.zeros_like(terms)
            direction[:, column] = 1
            gradients = torch.autograd.grad(terms, edges, direction, retain_graph=True, allow_unused=True)
            yield from ((layer, g) for layer, g in zip(direct, gradients, strict=True) if g is not None)

    def _add_slot(self, layer: nn.Module, slot: str, x: Tensor, g: Tensor) -> None:
        """Add one parameter of a layer by its formula, given the layer's input and the gradient by its output."""
        total, magnitude = self.sums[getattr(layer, slot)], self.objective.magnitude
        if isinstance(layer, nn.Embedding):
            add_embedding_(total, layer, x, g.to(total.dtype), magnitude)
            return
        x, g = x.to(total.dtype), g.to(total.dtype)
        if slot == "bias":
            total += magnitude(sum_positions(layer, g, total.shape)).sum(0)
        elif not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
            total += magnitude(sum_positions(layer, g * normalized(layer, x), total.shape)).sum(0)
        elif isinstance(layer, nn.Linear) and x[0].numel() == layer.in_features:
            total.addmm_(magnitude(g.flatten(0, -2)).T, magnitude(x.flatten(0, -2)))
        else:
            inputs_per_sample = total[0].numel() * g[0].numel() // len(total) * getattr(layer, "groups", 1)
            size = self._samples_at_once(max(total.numel(), inputs_per_sample))
            for x_part, g_part in zip(x.split(size), g.split(size), strict=True):
                inputs, gradients = by_group(layer, x_part, g_part)
                total += magnitude(gradients @ inputs.mT).sum(0).view_as(total)

    def _samples_at_once(self, elements_per_sample: int) -> int:
        """Return how many samples fit into the bound on memory."""
        return max(1, min(self.chunk, _ELEMENTS_AT_ONCE // max(1, elements_per_sample)))

    def _add_sample_by_sample(self, parameters: list[nn.Parameter], x: Inputs, y: Tensor) -> None:
        """Add Σ_i of every single sample's gradients, chunk by chunk; y are the objective's targets."""
        size = self._samples_at_once(sum(parameter.numel() for parameter in parameters))
        for x_part, y_part in zip(x.split(size), y.split(size), strict=True):
            self._add(parameters, self._sum_of_samples(parameters, x_part, y_part))

    def _sum_of_samples(self, parameters: list[nn.Parameter], x: Inputs, y: Tensor) -> list[Tensor]:
        """Return Σ_i Σ_j magnitude(∂t_ij / ∂θ) of each parameter, shaped like it."""
        if self.vmap_works:
            try:
                return self._sum_by_vmap(parameters, x, y)
            except Exception:  # control flow on data, for one; the model's own mistakes come up again below
                self.vmap_works = False
        return self._sum_by_backward(parameters, x, y)

    def _sum_by_vmap(self, parameters: list[nn.Parameter], x: Inputs, y: Tensor) -> list[Tensor]:
        values = {self.own_names[parameter]: parameter.detach() for parameter in parameters}

        def importance(rows_i: dict[Place, Tensor], y_i: Tensor) -> list[Tensor]:
            x_i = Inputs({place: row[None] for place, row in rows_i.items()}, x.shared)

            def terms(values: dict[str, Tensor]) -> Tensor:
                return self.objective.terms(self.output(x_i, values), y_i[None])[0]

            primal, pull_back, *_ = vjp(terms, values)
            gradients = (pull_back(unit)[0] for unit in torch.eye(len(primal)).to(primal))
            return _add_up(self._magnitudes(gradient[name] for name in values) for gradient in gradients)

        # no_grad does not bind vjp, but spares a graph for all the other parameters.
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # some operations vmap only loops over
            return [per_sample.sum(0) for per_sample in vmap(importance)(x.rows, y)]

    # -- ordinary backward passes ----------------------------------------------------------------------------

    def _sum_by_backward(self, parameters: list[nn.Parameter], x: Inputs, y: Tensor) -> list[Tensor]:
        """Return what :meth:`_sum_of_samples` does, by a backward pass for each sample and term."""
        sums = [torch.zeros_like(self.sums[parameter]) for parameter in parameters]
        for x_i, y_i in zip(x.split(1), y.split(1), strict=True):
            (terms,) = self.objective.terms(self.output(x_i), y_i)
            for term in terms:
                for total, gradient in zip(sums, self.backward(term, parameters), strict=True):
                    if gradient is not None:
                        total += self.objective.magnitude(at_least_single(gradient))
        return sums

    def backward(self, value: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
        """Return the gradients that backward() gives these parameters; leave those that are there, and all hooks.

        Reentrant checkpoints answer to nothing else.
        """
        leaves = {*self.model.parameters(), *_walk_graph(value)[1]}
        kept = [(leaf, leaf.grad, leaf._backward_hooks, leaf._post_accumulate_grad_hooks) for leaf in leaves]
        try:
            for leaf, _, _, hooks_after in kept:  # a hook would alter the gradients, or make an optimizer's step
                leaf.grad = leaf._backward_hooks = None
                if hooks_after is not None:
                    leaf._post_accumulate_grad_hooks = {}  # None would leave them
            if value.requires_grad:
                value.backward(retain_graph=True)
            return [None if parameter.grad is None else parameter.grad.to_dense() for parameter in parameters]
        finally:
            for leaf, gradient, hooks, hooks_after in kept:
                leaf.grad, leaf._backward_hooks, leaf._post_accumulate_grad_hooks = gradient, hooks, hooks_after

    def _found_missed(self, terms: Tensor, x: Inputs, y: Tensor) -> set[nn.Parameter]:
        """Return the parameters of which two samples show that the other routes are wrong."""
        if any(node.name() == "CheckpointFunctionBackward" for node in _walk_graph(terms)[0]):
            return set(self.sums)  # a reentrant checkpoint hides what is within, and bars the way to what is before
        if not self.sums:
            return set()
        x, y = next(x.split(2)), y[:2]
        if len(x) == 1:  # it cannot be mixed with others
            x, y = x.with_rows(lambda t: torch.cat((t, t))), torch.cat((y, y))
        twin = copy(self)
        twin.sums = {parameter: torch.zeros_like(total) for parameter, total in self.sums.items()}
        twin.layers_with_sample_rows, twin.missed = {}, set()
        output, calls = twin._recorded_forward(x)
        terms = self.objective.terms(output, y)
        direct, others = twin._choose_routes(terms, calls, x)
        if direct:
            twin._add_directly(direct, terms, calls)
        if others:
            twin._add_sample_by_sample(others, x, y)
        exact = dict(zip(self.sums, self._sum_by_backward(list(self.sums), x, y), strict=True))
        apart = {parameter: largest(twin.sums[parameter] - total) for parameter, total in exact.items()}
        # Rounding errors are all that is left of some gradients: those of a bias before a batch norm, say.
        noise = 30 * max(torch.finfo(parameter.dtype).eps for parameter in self.sums)
        floor = self.objective.magnitude(torch.tensor(noise)).item() * max(map(largest, exact.values()))
        missed = {p for p, total in exact.items() if apart[p] > (_TOLERANCE + noise) * largest(total) + floor}
        for i in (0, 1) if direct else ():
            own = terms.masked_fill(torch.arange(2, device=terms.device)[:, None] != i, 0)
            for layer, g in self._gradients_by_outputs(direct, own, calls):
                if g[1 - i].any():  # the row is not the other sample's alone
                    missed.update(getattr(layer, slot) for slot in direct[layer])
        if missed:
            self._check_that_samples_are_apart(terms, x, y, 0.01 + noise)
            names = some_of(sorted(self.own_names[parameter] for parameter in missed))
            log.info("importance of %s takes an ordinary backward pass for each sample, which is slow", names)
        return missed

    def _check_that_samples_are_apart(self, terms: Tensor, x: Inputs, y: Tensor, tolerance: float) -> None:
        """Refuse a model that answers for a sample by itself otherwise than within a batch, and not by chance."""
        each = zip(x.split(1), y.split(1), strict=True)
        alone = torch.cat([self.objective.terms(self.output(x_i), y_i) for x_i, y_i in each])
        is_alike = torch.allclose(alone, terms, tolerance, equal_nan=True)
        if not is_alike and torch.equal(self.objective.terms(self.output(x), y), terms):
            raise AlassoError(
                "The model answers for a sample by itself otherwise than within a batch, so samples have no importance "
                "of their own: in evaluation mode they must not influence one another (as batch statistics do)."
            )

    def _found_unreached(self, x: Inputs, y: Tensor) -> set[nn.Parameter]:
        """Return the parameters without importance that an ordinary backward pass of the batch does reach."""
        zero = [parameter for parameter, total in self.sums.items() if not total.any()]
        if not zero:
            return set()
        gradients = self.backward(self.objective.terms(self.output(x), y).sum(), zero)
        return {p for p, gradient in zip(zero, gradients, strict=True) if gradient is not None and gradient.any()}

    def _magnitudes(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        return [self.objective.magnitude(at_least_single(gradient)) for gradient in gradients]


@contextmanager
def _differentiable_eval_mode(model: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Keep the model in evaluation mode, with gradients for all ``parameters``, while the context lasts."""
    modes = [(module, module.training) for module in model.modules()]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    device_type = next((parameter.device.type for parameter in parameters), "cpu")
    cudnn = torch.backends.cudnn.enabled
    try:
        model.eval()
        if any(isinstance(module, nn.RNNBase) for module, _ in modes):
            torch.backends.cudnn.enabled = False  # it refuses to differentiate recurrent layers in eval mode
        for parameter in frozen:
            parameter.requires_grad_(True)
        # Autocast costs precision, and the casts it shares hide from the graph how often a weight is used.
        # A compiled model would run without the hooks that the pass puts on its layers.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device_type, enabled=False),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        for module, training in modes:
            module.training = training
        for parameter in frozen:
            parameter.requires_grad_(False)


def _walk_graph(root: Tensor) -> tuple[set[Node], Counter[Tensor]]:
    """Return all nodes behind `root`, and how many edges lead to each leaf."""
    pending = [root.grad_fn] if root.grad_fn is not None else []
    nodes, uses = set(pending), Counter[Tensor]()
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is None:
                continue
            if hasattr(node, "variable") and not node.next_functions:
                uses[node.variable] += 1
            elif node not in nodes:
                nodes.add(node)
                pending.append(node)
    return nodes, uses


def largest(values: Tensor) -> float:
    """Return the largest absolute value; zero of none, and of what is NaN, which is found elsewhere."""
    return float(values.abs().max().nan_to_num()) if values.numel() else 0.0


def _add_up(rows: Iterable[list[Tensor]]) -> list[Tensor]:
    """Add up lists of tensors, position by position."""
    return reduce(lambda one, other: [a + b for a, b in zip(one, other, strict=True)], rows)
