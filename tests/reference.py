"""A slow, obvious implementation of every method, in float64, to compare the fast code with.

Two backward passes a step: one for the task's loss, one for the penalty, which is written as a plain sum over all
tasks and all weights and left to autograd. Loops over tensors, stores whatever it likes, shares no code with `alasso`.
"""

from __future__ import annotations

import copy
import math

import torch


class Reference:
    """Keeps everything by hand for the parameters of one model. ``kind`` is the method, ``h`` its settings."""

    def __init__(self, model, kind, **h):
        self.model, self.kind, self.h = model, kind, h
        self.parameters = list(model.parameters())
        self.path = [torch.zeros_like(p) for p in self.parameters]
        self.start = [p.detach().clone() for p in self.parameters]
        self.memories = []  # one dict a consolidated task; which of them count depends on the method
        self.steps, self.steepest = 0, [0.0 for _ in self.parameters]  # largest ‖g‖² of the steps 1, 2, 4, 8, …

    # -- the penalty, as the papers write it -----------------------------------------------------------------

    def penalty(self):
        if not self.memories:
            return sum((p * 0).sum() for p in self.parameters)
        if self.kind == "EWC":
            return sum(
                0.5 * self.h["lam"] * (F * (p - old) ** 2).sum()
                for memory in self.memories
                for p, F, old in zip(self.parameters, memory["importance"], memory["theta"], strict=True)
            )
        last = self.memories[-1]
        total = 0.0
        for i, p in enumerate(self.parameters):
            Omega, anchor = last["Omega"][i], last["theta"][i]
            if self.kind == "ALASSO":
                a, c, eps = self.h["a"], self.h["c"], self.h["epsilon"]
                total = total + c * self.asymmetric(p, Omega, anchor, last["before"][i], a, eps).sum()
            elif self.kind == "SI":
                total = total + self.h["c"] * (Omega * (p - anchor) ** 2).sum()
            elif self.kind == "OnlineEWC":
                total = total + 0.5 * self.h["lam"] * (Omega * (p - anchor) ** 2).sum()
            elif self.kind == "MAS":
                total = total + self.h["lam"] * (Omega * (p - anchor) ** 2).sum()
        return total

    def asymmetric(self, theta, Omega, anchor, before, a, eps):
        """Eqs. 4 and 5."""
        alpha = (theta - anchor).detach() * (before - anchor)
        if self.h.get("unmoved", "unobserved") != "unobserved":
            alpha = torch.where(before == anchor, -(theta - anchor).detach(), alpha)
        if self.h.get("unmoved") == "sign_of_omega":
            alpha = torch.where(Omega == 0, (theta - anchor).detach(), alpha)  # the side is kept as the sign of Ω
        return torch.where(alpha > 0, Omega, a * Omega + eps) * (theta - anchor) ** 2

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, optimizer, closure=None):
        """Gradients of the task's loss are in p.grad (or come from the closure); adds the penalty's and steps."""
        if closure is not None:
            closure()
        task = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        before = [p.detach().clone() for p in self.parameters]
        if self.steps + 1 in {2**k for k in range(20)}:
            seen = [0.0 if g is None else float((g**2).sum()) for g in task]
            self.steepest = list(map(max, self.steepest, seen))
        self.steps += 1
        extra = torch.autograd.grad(self.penalty(), self.parameters)
        for p, g in zip(self.parameters, extra, strict=True):
            if p.grad is not None:
                p.grad = p.grad + g
        optimizer.step()
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                if task[i] is not None:
                    self.path[i] -= task[i] * (p - before[i])
                    p.grad = task[i]

    # -- the end of a task -----------------------------------------------------------------------------------

    @torch.no_grad()
    def consolidate(self, importance=None):
        """``importance``: list of tensors for the methods that measure it on data."""
        theta = [p.detach().clone() for p in self.parameters]
        memory = {"theta": theta, "before": self.start, "importance": importance}
        last = self.memories[-1] if self.memories else None
        memory["xi"] = [self.xi(i, theta[i], last) for i in range(len(theta))]
        memory["Omega"] = [
            self.new_importance(i, theta[i], last, importance, memory["xi"][i]) for i in range(len(theta))
        ]
        self.memories.append(memory)
        self.start = theta
        self.path, self.steps = [torch.zeros_like(p) for p in self.path], 0
        self.steepest = [0.0 for _ in self.parameters]

    def xi(self, i, theta, last):
        """ξ of a tensor: the setting, or 1.5 mean squared moves a task, more for a noisy path."""
        if self.h.get("xi") != "auto":
            return self.h.get("xi")
        move = float(((theta - self.start[i]) ** 2).sum())
        most = math.sqrt(self.steepest[i] * move)
        noise = max(float(self.path[i].sum()) / most, 1.0) if most else 1.0
        return (last["xi"][i] if last else 0.0) + 1.5 * noise * move / theta.numel()

    def new_importance(self, i, theta, last, importance, xi):
        old = last["Omega"][i] if last else torch.zeros_like(theta)
        if self.kind in ("EWC", "MAS"):
            return old + importance[i]
        if self.kind == "OnlineEWC":
            return self.h["gamma"] * old + importance[i]
        distance = (theta - self.start[i]) ** 2 + xi
        if self.kind == "SI" or self.h.get("omega_rule") == "si":
            return torch.clamp(old + self.path[i] / distance, min=0)
        past = torch.zeros_like(theta)
        if last:
            a, c, eps = self.h["a_prime"], self.h["c_prime"], self.h["epsilon_prime"]
            past = -c * self.asymmetric(theta, old, last["theta"][i], last["before"][i], a, eps)
        new = (self.path[i] + past) / distance
        return torch.maximum(new, old) if self.h["monotone"] else torch.clamp(new, min=0)


def per_sample_squares(model, data):
    """Mean over samples of the squared gradient of log p(y|x), one sample at a time."""
    return _per_sample(model, data, lambda out, y: torch.log_softmax(out, -1)[0, y], torch.square)


def per_sample_output_norm(model, data):
    """Mean over samples of |∂‖f(x)‖²/∂θ|, one sample at a time."""
    return _per_sample(model, data, lambda out, y: out.square().sum(), torch.abs)


def _per_sample(model, data, scalar, reduce):
    model = copy.deepcopy(model).eval()
    parameters = list(model.parameters())
    total, count = [torch.zeros_like(p) for p in parameters], 0
    for xs, ys in data:
        for x, y in zip(xs, ys, strict=True):
            grads = torch.autograd.grad(scalar(model(x[None]), y), parameters)
            total = [t + reduce(g) for t, g in zip(total, grads, strict=True)]
            count += 1
    return [t / count for t in total]
