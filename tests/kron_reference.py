"""KronALASSO by the equations of its docstring: dense matrices in float64, loops over samples and positions.

It shares one thing with `alasso`: the random signs S. What a weight of each layer kind sees is differentiated out of
the layer's own forward, so no convention about strides, padding or groups is repeated here.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from alasso.importance.kronecker import signs

DOUBLE = torch.float64
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


# -- what a layer's weight sees --------------------------------------------------------------------------------


def vectors(layer, x, g):
    """Vectors of a call: one a row, first those of the weight's rows, then those of its columns.

    The curvature of the weight is about Σ r rᵀ ⊗ Σ c cᵀ. Where g is zero, linear layers and embeddings see nothing.
    """
    x, g = x.detach(), g.detach()
    if type(layer) is nn.Linear:
        return paired([(g[place], x[place]) for place in places_of(g) if g[place].any()], g, x)
    if type(layer).__name__ == "Conv1D":
        return paired([(x[place], g[place]) for place in places_of(g) if g[place].any()], x, g)
    if type(layer) is nn.Embedding:
        one_hot = torch.eye(layer.num_embeddings, dtype=g.dtype)
        used = [place for place in places_of(g) if g[place].any() and x[place] != layer.padding_idx]
        return paired([(one_hot[x[place]], g[place]) for place in used], one_hot, g)
    if x.dim() == len(layer.kernel_size) + 1:
        x, g = x[None], g[None]
    if type(layer) in CONVOLUTIONS:
        return at_positions(g), windows(layer, layer.forward(x))
    x.requires_grad_()
    (back,) = torch.autograd.grad(layer.forward(x), x, g, create_graph=True)
    return at_positions(x.detach()), windows(layer, back)


def places_of(values):
    """Where there is a vector in (N, …, C)."""
    return itertools.product(*map(range, values.shape[:-1]))


def paired(pairs, rows, columns):
    """Two matrices, of no rows if there are no pairs."""
    one, other = zip(*pairs, strict=True) if pairs else ((), ())
    shaped = rows.new_zeros(0, rows.shape[-1]), columns.new_zeros(0, columns.shape[-1])
    return tuple(torch.cat([part, *(v[None] for v in seen)]) for part, seen in zip(shaped, (one, other), strict=True))


def at_positions(values):
    """(N, C, …) → all vectors of C channels."""
    return torch.stack([values[(n, slice(None), *place)] for n, place in samples_and_places(values)])


def windows(layer, values):
    """What the weight of each group of channels is multiplied with, at all positions of (N, C, …)."""
    found = []
    for n, place in samples_and_places(values):
        for channel in range(0, values.shape[1], values.shape[1] // layer.groups):
            (of_weight,) = torch.autograd.grad(values[(n, channel, *place)], layer.weight, retain_graph=True)
            found.append(of_weight[channel].flatten())
    return torch.stack(found)


def samples_and_places(values):
    return [(n, place) for n in range(len(values)) for place in itertools.product(*map(range, values.shape[2:]))]


def gradient(layer, x, g):
    """By the layer's weight, of a call."""
    with torch.enable_grad():
        return torch.autograd.grad(layer.forward(x.detach()), layer.weight, g)[0]


def outputs(layer, values):
    """All vectors of a layer's output, or of the gradient by it."""
    if type(layer) in CONVOLUTIONS + TRANSPOSED:
        return at_positions(values if values.dim() == len(layer.kernel_size) + 2 else values[None])
    return values.reshape(-1, values.shape[-1])


def is_known(module):
    kinds = {nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED}
    return type(module) in kinds or type(module).__name__ == "Conv1D"


# -- sketches --------------------------------------------------------------------------------------------------


def gram(rows):
    """Σ x xᵀ, a sample at a time."""
    return sum((torch.outer(x, x) for x in rows), rows.new_zeros(rows.shape[1], rows.shape[1]))


def recovered(M, rank):
    """What is left of M after it has been sketched: Nyström's approximation and the rest of the diagonal."""
    found = torch.zeros_like(M)
    if rank:
        S = signs(len(M), rank, M.dtype, M.device)
        Y = M @ S
        found = Y @ torch.linalg.pinv(S.T @ Y, hermitian=True, rtol=1e-6) @ Y.T
    rest = (M.diagonal() - found.diagonal()).clamp(min=0)
    return found + torch.diag(rest / 2 + rest.mean() / 2)


# -- the method ------------------------------------------------------------------------------------------------


class Dense:
    """All that is known of one parameter, as a matrix."""

    def __init__(self, p):
        self.shape = (p.shape[0] if p.dim() else 1, -1)
        self.is_vector = p.dim() < 2
        self.anchor = self.matrix(p).clone()
        m, n = self.anchor.shape
        self.path = self.unit = self.steps = self.tasks = self.above = self.below = 0.0
        self.L, self.R, self.past_L, self.past_R = (torch.zeros(k, k, dtype=DOUBLE) for k in (m, n, m, n))
        self.pull_L, self.pull_R = torch.zeros(m, m, dtype=DOUBLE), torch.zeros(n, n, dtype=DOUBLE)

    def matrix(self, p):
        return p.detach().reshape(self.shape)

    def grow(self, p):
        """The old block stays where it is."""
        new, (m, n) = Dense(p), self.anchor.shape
        for field in ("path", "unit", "steps", "tasks", "above", "below"):
            setattr(new, field, getattr(self, field))
        for field, (i, j) in {"anchor": (m, n), **dict.fromkeys(("L", "past_L", "pull_L"), (m, m))}.items():
            getattr(new, field)[:i, :j] = getattr(self, field)
        for field in ("R", "past_R", "pull_R"):
            getattr(new, field)[:n, :n] = getattr(self, field)
        return new


class KronReference:
    """Keeps everything by hand for the parameters of one model, which it watches from now on."""

    def __init__(self, model, c=1.0, rank=32, every=4, scale="fisher", gamma=1.0):
        self.model, self.c, self.rank, self.every, self.scale, self.gamma = model, c, rank, every, scale, gamma
        self.calls, self.step_number, self.known = [], 0, {}
        self.factor, self.terms, self.unit = 1.0, 1.0, 0.0  # of the last step that was looked at
        for name, p in self.trained():
            self.known[name] = Dense(p)
        for layer in model.modules():
            if is_known(layer):
                layer.register_forward_hook(self.watch)

    def trained(self):
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def watch(self, layer, args, output):
        if output.requires_grad and layer.weight.requires_grad:
            output.register_hook(lambda g: self.calls.append((layer, args[0], g.clone())))

    def dense(self, name, p):
        """What is known of a parameter, which may be new or may have grown."""
        known = self.known.setdefault(name, Dense(p))
        if known.anchor.numel() < p.numel():
            known = self.known[name] = known.grow(p)
        return known

    def of(self, name, p):
        known = self.dense(name, p)
        return known, known.matrix(p) - known.anchor

    def penalty(self):
        total = 0.0
        for name, p in self.trained():
            known = self.dense(name, p)
            D = p.reshape(known.shape) - known.anchor
            total = total + self.c / 2 * ((known.pull_L @ D @ known.pull_R) * D).sum()
        return total

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, optimizer, closure=None):
        """Gradients of the task's loss are in p.grad (or come from the closure); adds the penalty's and steps."""
        if closure is not None:
            closure()
        trained = [(name, p) for name, p in self.trained() if p.grad is not None]
        self.add_factors({name: p.grad.detach().clone() for name, p in trained})
        task = [p.grad.clone() for _, p in trained]
        before = [p.detach().clone() for _, p in trained]
        extra = torch.autograd.grad(self.penalty(), [p for _, p in trained])
        for (_, p), g in zip(trained, extra, strict=True):
            p.grad = p.grad + g
        optimizer.step()
        for (name, p), g, old in zip(trained, task, before, strict=True):
            if self.scale == "path":
                self.known[name].path -= float((g * (p.detach() - old)).sum())
            p.grad = g
        self.step_number += 1

    def add_factors(self, gradients):
        """Add a step's L and R."""
        weight = 1
        if self.step_number >= 100:
            weight = self.every if self.step_number % self.every == 0 else 0
        calls, self.calls = self.calls, []
        if not weight:
            return
        if calls:
            self.look_at_output(calls, gradients)
        for name, M in gradients.items():
            known = self.dense(name, self.model.get_parameter(name))
            M = known.matrix(M)
            rows, columns = self.factors_of(self.model.get_parameter(name), M, calls)
            if known.is_vector:
                rows, columns = torch.diag(M.flatten() ** 2), torch.ones(1, 1, dtype=DOUBLE)
            if M.any():
                known.L += weight * self.terms * rows
                known.R += weight * columns / columns.trace()
                known.steps += weight
                known.unit = max(known.unit, self.unit)

    def look_at_output(self, calls, gradients):
        """The layer that backward came to first tells B, f and u."""
        output = calls[0][0]
        T = sum(gradient(layer, x, g) for layer, x, g in calls if layer.weight is output.weight)
        M = next(M for name, M in gradients.items() if self.model.get_parameter(name) is output.weight)
        T, M = (one.reshape(len(one), -1) for one in (T, M))
        S = signs(T.shape[1], self.rank, DOUBLE, T.device)
        self.factor = float(((M @ S) * (T @ S)).sum() / ((T @ S) ** 2).sum())
        lengths = [float(one.norm()) for layer, _, g in calls if layer is output for one in outputs(layer, g)]
        self.terms = sum(length > 0 for length in lengths)  # without those that the loss ignores
        self.unit = self.factor * self.terms * (sum(length**2 for length in lengths) / self.terms) ** 0.5

    def factors_of(self, parameter, M, calls):
        """Of each layer that has this weight, sums over its calls: Σ g gᵀ times the mean of ‖a‖², and so by columns."""
        rows = columns = 0.0
        for layer in {layer: None for layer, *_ in calls if layer.weight is parameter}:
            of_layer = [(x, g) for other, x, g in calls if other is layer]
            found = [vectors(layer, x, g) for x, g in of_layer]
            count = max(sum(len(seen) for _, seen in found), 1)
            G, A = (sum(gram(part) for part in parts) for parts in zip(*found, strict=True))
            common = self.in_common(layer, of_layer)
            rows, columns = rows + common * G * A.trace() / count, columns + common * A * G.trace() / count
        if isinstance(rows, float) or (rows.shape[0], columns.shape[0]) != M.shape:
            return M @ M.T, M.T @ M
        return self.factor**2 * rows, columns

    def in_common(self, layer, calls):
        """‖Σ_p g aᵀ S‖² over Σ_p ‖g aᵀ S‖², for all samples of a layer's calls; each group of channels is a sample."""
        together, alone, groups = 0.0, 0.0, getattr(layer, "groups", 1)
        if type(layer) is nn.Embedding or (type(layer) is nn.Linear and calls[0][0].dim() < 3):
            return 1.0
        for x, g in calls:
            for one_x, one_g in zip(x, g, strict=True):
                rows, columns = vectors(layer, one_x[None], one_g[None])
                columns = columns @ signs(columns.shape[1], self.rank, DOUBLE, columns.device)
                for group, r in enumerate(rows.chunk(groups, 1)):
                    c = columns[group::groups]
                    together += float((r.T @ c).square().sum())
                    alone += float((r.square().sum(1) * c.square().sum(1)).sum())
        return together / alone if alone else 1.0

    # -- the end of a task -----------------------------------------------------------------------------------

    @torch.no_grad()
    def consolidate(self):
        for name, p in self.trained():
            known, D = self.of(name, p)
            if known.steps:
                self.end_task(known, D)
            known.anchor, known.path, known.steps = known.matrix(p).clone(), 0.0, 0.0
            known.unit = 0.0
            known.L, known.R = torch.zeros_like(known.L), torch.zeros_like(known.R)
        self.step_number = 0

    def end_task(self, known, D):
        ranks = (0, 0) if known.is_vector else (self.rank, self.rank)
        L, R = known.L / known.steps, known.R / known.steps
        above, below = 25.0, known.unit
        if self.scale == "path":
            above, below = (
                max(known.path, 0.0),
                float(((recovered(L, ranks[0]) @ D @ recovered(R, ranks[1])) * D).sum() / 2),
            )
        known.past_L, known.past_R = self.gamma * known.past_L + L, self.gamma * known.past_R + R
        known.tasks = self.gamma * known.tasks + 1
        known.above, known.below = self.gamma * known.above + above, self.gamma * known.below + below
        kappa = known.above / known.below if known.below > 0 else 1.0
        known.pull_L = kappa * recovered(known.past_L, ranks[0])  # N κ L̄
        known.pull_R = recovered(known.past_R / known.tasks, ranks[1])
