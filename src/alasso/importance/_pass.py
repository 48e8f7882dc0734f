"""The pass over data behind :mod:`alasso.importance`: which route each parameter takes, and the sums along it.

For every batch one forward pass records the inputs x and outputs h of the common layers. Then each parameter takes

    directly            if its layer was called once, with a row for each sample: ∂t/∂h follows from one backward pass,
                        and the layer's formula (:mod:`alasso.importance._layers`) gives the per-sample gradients
    sample by sample    if not: ∂t_i/∂θ by `vmap`, or in a loop where vmap cannot follow the model
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.utils.data import Dataset

from alasso._distributed import add_over_ranks_
from alasso.errors import AlassoError
from alasso.importance._layers import CONVOLUTIONS, add_embedding_, by_group, is_direct, normalized, sum_positions
from alasso.importance._objectives import Objective, at_least_single

_ELEMENTS_AT_ONCE = 2**24  # bounds the memory of per-sample gradients, whatever the size of a layer

Head = Callable[[Any], Tensor]
Inputs = dict[str, Tensor]  # by argument of the model
_POSITIONAL = ""  # stands for the name of an input without one


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
        head: Applied to the model's output; None takes the output, or its attribute `logits`.
        chunk: How many samples at most have their own gradients in memory at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        parameters: Mapping[str, nn.Parameter],
        head: Head | None,
        chunk: int,
    ) -> None:
        if chunk < 1:
            raise AlassoError(f"chunk must be at least 1 sample, not {chunk}.")
        self.model, self.objective, self.head, self.chunk = model, objective, head, chunk
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

    def mean_over(self, loader: Iterable[Any]) -> dict[str, Tensor]:
        """Return the mean over all samples of the loader, and of those of the other ranks.

        Raises:
            AlassoError: If there are no samples, or the batches do not fit the model.
        """
        device = next((t.device for t in (*self.model.parameters(), *self.model.buffers())), None)
        batches, count = _batches_of(loader), 0
        with _differentiable_eval_mode(self.model, self.sums):
            for batch in batches:
                x, y = _inputs_and_labels(batch, device)
                if _rows(x) > 0:
                    self._add_batch(x, y)
                    count += _rows(x)
            total = torch.tensor(count, device=device)
            add_over_ranks_((*self.sums.values(), total))
            if total == 0:
                raise AlassoError("The loader yielded no samples: pass a list or DataLoader with some batches.")
            self.objective.check()
            return {name: self.sums[parameter] / total for name, parameter in self.parameters.items()}

    def _add_batch(self, x: Inputs, y: Tensor | None) -> None:
        """Add a batch to the sums."""
        output, calls = self._recorded_forward(x)
        if not isinstance(output, Tensor):
            raise AlassoError(
                f"The model answers with a {type(output).__name__}, not with a tensor: pass a head that picks it out, "
                "such as head=lambda output: output[0]."
            )
        if output.shape[:1] != (_rows(x),):
            raise AlassoError(f"The output must have a row for each of {_rows(x)} samples, not {output.shape}.")
        targets = self.objective.targets(output, y)
        terms = self.objective.terms(output, targets)
        direct, others = self._choose_routes(terms, calls, x)
        if direct:
            self._add_directly(direct, terms, calls)
        del output, terms, calls  # frees the activations before the other route makes its own
        if others:
            self._add_sample_by_sample(others, x, targets)

    def _output(self, x: Inputs, values: dict[str, Tensor] | None = None) -> Tensor:
        """Return the head's output, (N, …), with ``values`` in place of the parameters of these names."""
        args, kwargs = ((x[_POSITIONAL],), {}) if _POSITIONAL in x else ((), x)
        output = self.model(*args, **kwargs) if values is None else functional_call(self.model, values, args, kwargs)
        found: Tensor = getattr(output, "logits", output) if self.head is None else self.head(output)
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
            return self._output(x), calls

    def _choose_routes(self, terms: Tensor, calls: _Calls, x: Inputs) -> tuple[_Slots, list[nn.Parameter]]:
        """Split the parameters that have an influence into slots of layers to be done directly, and others.

        The autograd graph is the judge: a weight may be tied, or used by hand besides its layer's call.
        """
        nodes, uses = _walk_graph(terms)
        direct: _Slots = {}
        others: list[nn.Parameter] = []
        for parameter in (p for p in self.sums if uses[p] > 0):
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
        rows, shape = _rows(x), tuple((name, value.shape[1:]) for name, value in x.items())
        if len(layer_x) != rows or (isinstance(layer, CONVOLUTIONS) and layer_x.ndim != layer.weight.ndim):
            return False
        if shape not in self.layers_with_sample_rows:
            # A single sample is doubled instead: a table of one row for all samples looks like one sample's row.
            other = next(_split(x, rows // 2)) if rows > 1 else _map(lambda t: torch.cat((t, t)), x)
            _, calls = self._recorded_forward(other)
            self.layers_with_sample_rows[shape] = {
                called for called, (call, *_) in calls.items() if len(call.x) == _rows(other)
            }
        return layer in self.layers_with_sample_rows[shape]

    def _add_directly(self, direct: _Slots, terms: Tensor, calls: _Calls) -> None:
        """Add what follows from the gradients by the layers' outputs, one backward pass for each column of terms."""
        edges = [calls[layer][0].output for layer in direct]
        # Classes whose probability is 0 (or 1) for every sample have no gradient.
        columns = terms.detach().any(0).nonzero().flatten().tolist() if terms.shape[1] > 1 else [0]
        for column in columns:
            direction = torch.zeros_like(terms)
            direction[:, column] = 1
            gradients = torch.autograd.grad(terms, edges, direction, retain_graph=True, allow_unused=True)
            for layer, g in zip(direct, gradients, strict=True):
                for slot in direct[layer] if g is not None else ():
                    self._add_slot(layer, slot, calls[layer][0].x, g)

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
        for x_part, y_part in zip(_split(x, size), y.split(size), strict=True):
            importances = self._sum_of_samples(parameters, x_part, y_part)
            for parameter, importance in zip(parameters, importances, strict=True):
                self.sums[parameter] += importance

    def _sum_of_samples(self, parameters: list[nn.Parameter], x: Inputs, y: Tensor) -> list[Tensor]:
        """Return Σ_i Σ_j magnitude(∂t_ij / ∂θ) of each parameter, shaped like it."""
        if self.vmap_works:
            try:
                return self._sum_by_vmap(parameters, x, y)
            except Exception:  # control flow on data, for one; the model's own mistakes come up again below
                self.vmap_works = False
        samples = zip(_split(x, 1), y.split(1), strict=True)
        return _add_up(self._one_sample(parameters, x_i, y_i) for x_i, y_i in samples)

    def _sum_by_vmap(self, parameters: list[nn.Parameter], x: Inputs, y: Tensor) -> list[Tensor]:
        values = {self.own_names[parameter]: parameter.detach() for parameter in parameters}

        def importance(x_i: Inputs, y_i: Tensor) -> list[Tensor]:
            def terms(values: dict[str, Tensor]) -> Tensor:
                return self.objective.terms(self._output(_map(lambda t: t[None], x_i), values), y_i[None])[0]

            primal, pull_back, *_ = vjp(terms, values)
            gradients = (pull_back(unit)[0] for unit in torch.eye(len(primal)).to(primal))
            return _add_up(self._magnitudes(gradient[name] for name in values) for gradient in gradients)

        # no_grad does not bind vjp, but spares a graph for all the other parameters.
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # some operations vmap only loops over
            return [per_sample.sum(0) for per_sample in vmap(importance)(x, y)]

    def _one_sample(self, parameters: list[nn.Parameter], x: Inputs, y: Tensor) -> list[Tensor]:
        # Copies, because hooks on the parameters themselves would alter the gradients.
        values = {self.own_names[parameter]: parameter.detach().requires_grad_() for parameter in parameters}
        (terms,) = self.objective.terms(self._output(x, values), y)
        copies = list(values.values())
        rows = (torch.autograd.grad(t, copies, retain_graph=True, materialize_grads=True) for t in terms)
        return _add_up(map(self._magnitudes, rows))

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


def _batches_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Return the loader's iterator; refuse a loader without batches, or one of single samples."""
    ways = [way for way in ("__iter__", "__getitem__") if hasattr(type(loader), way)]
    of_samples = isinstance(loader, Dataset) and "__iter__" not in ways
    if isinstance(loader, Tensor) or of_samples or not ways:
        raise AlassoError(f"Pass a DataLoader or a list of batches, not {type(loader).__name__}.")
    if _is_one_batch(loader):
        raise AlassoError("Pass a DataLoader or a list of batches, [(x, y)], not a single (x, y).")
    return iter(loader)


def _is_one_batch(loader: Iterable[Any]) -> bool:
    """Return whether these are inputs and their labels, and not a tuple of two batches of inputs."""
    if not (isinstance(loader, tuple) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader)):
        return False
    x, y = loader
    return x.is_floating_point() and not y.is_floating_point() and len(x) == len(y)


def _inputs_and_labels(batch: Any, device: torch.device | None) -> tuple[Inputs, Tensor | None]:
    """Return a batch's inputs, and its labels if it has some, on the model's device."""
    if isinstance(batch, Mapping):
        x, y = {name: value for name, value in batch.items() if name != "labels"}, batch.get("labels")
    else:
        positional, y, *_ = (batch, None) if isinstance(batch, Tensor) else (*batch, None)
        x = {_POSITIONAL: positional}
    wrong = [type(value).__name__ for value in x.values() if not isinstance(value, Tensor)]
    if wrong or not x:
        found = wrong[0] if wrong else "nothing"
        raise AlassoError(f"A batch must be x, (x, y) or a mapping with tensors as x, not {found}: adapt the loader.")
    return _map(lambda value: value.to(device), x), None if y is None else y.to(device)


def _map(change: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    return {name: change(value) for name, value in x.items()}


def _rows(x: Inputs) -> int:
    return len(next(iter(x.values())))


def _split(x: Inputs, size: int) -> Iterator[Inputs]:
    """Yield parts of ``size`` samples."""
    parts = zip(*(value.split(size) for value in x.values()), strict=True)
    return (dict(zip(x, part, strict=True)) for part in parts)


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


def _add_up(rows: Iterable[list[Tensor]]) -> list[Tensor]:
    """Add up lists of tensors, position by position."""
    return reduce(lambda one, other: [a + b for a, b in zip(one, other, strict=True)], rows)
