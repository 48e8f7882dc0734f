"""What the steps of one optimizer work on: gathered once in a :class:`Plan`, and used until something changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alasso._compile import no_compiler
from alasso._distributed import local
from alasso._passes import Batch, CompiledParameter, OddParameter, Piece, Share, Work, batches, is_plain, pieces_of
from alasso._stability import Limits
from alasso.errors import AlassoError, warn

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer

MOST_PLANS = 8  # of one optimizer: which parameters have a gradient may alternate, as with one head for each task


class Plan(NamedTuple):
    """What a step works on, as long as nothing changes."""

    works: list[Work]
    passes: list[Batch | CompiledParameter]
    odd: list[tuple[OddParameter, bool]]  # and whether the optimizer ascends
    seen_by: list[Regularizer]  # whose parameters have gradients


NOTHING = Plan([], [], [], [])


class Plans:
    """The plans of one optimizer, and what they have in common.

    Attributes:
        compile: The regularizers that the optimizer works for, and whether they ask for compiled passes.
        limits: How stiff a penalty may be.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.limits = Limits(optimizer)
        self.compile: dict[Regularizer, bool] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._works: dict[int, tuple[Any, Work, list[Piece]]] = {}  # by id of the parameter
        self._buffers: dict[int, tuple[Any, Tensor, Tensor | None]] = {}  # by id of the parameter
        self._versions: list[int] = []  # of the regularizers when the works were made

    def key_of(self, optimizer: Optimizer) -> tuple[Any, ...]:
        """Return what changes where a step has to work on other things than the one before."""
        key: list[Any] = [(id(one), one.protected.version) for one in self.compile]
        for group in optimizer.param_groups:
            key.append(group.get("maximize"))
            for p in group["params"]:
                if (grad := p.grad) is not None:
                    key += (id(p), p.data_ptr(), None if grad.is_sparse else grad.stride())
        return tuple(key)

    @torch.inference_mode(False)  # whoever takes the first step: others will write to the buffers
    def of(self, optimizer: Optimizer) -> Plan:
        """Return the plan of the step that the optimizer is about to make."""
        if self.limits.is_sgd:
            self.limits.follow(optimizer)
        scaled = is_scaled(optimizer)
        if (plan := self._plans.get((scaled, self.key_of(optimizer)))) is None:
            plan = self._made_plan(optimizer, scaled)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            # Parameters that came up on the way have changed the key.
            self._plans[scaled, self.key_of(optimizer)] = plan
        return plan

    def _made_plan(self, optimizer: Optimizer, scaled: bool) -> Plan:
        plan = Plan([], [], [], [])
        pieces: list[tuple[Piece, int]] = []
        trained = self.trained(optimizer)
        self._keep_up(optimizer)
        index_of = {id(group): index for index, group in enumerate(optimizer.param_groups)}
        for parameter, group in trained:
            if not (owners := self.owners_of(parameter)):
                continue
            plan.seen_by.extend(one for one in owners if one not in plan.seen_by)
            work, of_work = self._work_of(parameter, owners)
            if not any(share.has_past or share.surrogate.observes_path for share in work.shares):
                continue
            plan.works.append(work)
            ascends, grad = bool(group.get("maximize")), parameter.grad
            if scaled or ascends or grad is None or not is_plain(work, grad):
                plan.odd.append((OddParameter(work, self.limits, index_of[id(group)]), ascends))
            elif any(self.compile.values()) and no_compiler(parameter.device.type) is None:
                plan.passes.append(CompiledParameter(work, self.limits, index_of[id(group)]))
            else:
                if not of_work:
                    of_work.extend(pieces_of(work))
                pieces.extend((piece, index_of[id(group)]) for piece in of_work)
        plan.passes.extend(batches(pieces, self.limits))
        return plan

    def trained(self, optimizer: Optimizer) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        """Return the parameters that have gradients, with their groups; look at the models again for unknown ones."""
        found = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for regularizer in self.compile:
            if any(regularizer.protected.name_of(parameter) is None for parameter, _ in found):
                regularizer.look()  # a parameter group was added, or a head replaced, since attach()
        if any(id(p) in self._works and not self.owners_of(p) for p, _ in found):
            warn("the optimizer holds parameters that are no longer in the model: make a new one, and attach() it")
            self._works.clear()
        return found

    def owners_of(self, parameter: nn.Parameter) -> dict[Regularizer, str]:
        """Return the regularizers that protect a parameter, with the name that each knows it by."""
        names = {regularizer: regularizer.protected.name_of(parameter) for regularizer in self.compile}
        return {regularizer: name for regularizer, name in names.items() if name is not None}

    def _keep_up(self, optimizer: Optimizer) -> None:
        """Forget what was made of states, settings and parameters that have changed since."""
        versions = [one.protected.version for one in self.compile]
        if versions != self._versions:
            self._versions = versions
            self._plans.clear()
            self._works.clear()
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._buffers = {place: buffers for place, buffers in self._buffers.items() if place in held}

    def _work_of(self, parameter: nn.Parameter, owners: Mapping[Regularizer, str]) -> tuple[Work, list[Piece]]:
        """Return a parameter's work, and the pieces of it, which are made where they are used."""
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            name = next(iter(owners.values()))
            raise AlassoError(f"{name} has a sparse gradient, which has no place for a penalty; use sparse=False")
        like = (grad.shape, grad.stride(), grad.dtype, grad.device, local(parameter).dtype)
        known = self._works.get(id(parameter))
        if known is None or known[0] != like:
            shares = tuple(Share.of(regularizer, name, parameter) for regularizer, name in owners.items())
            work = Work(parameter, *self._buffers_of(parameter, like, shares), shares)
            known = self._works[id(parameter)] = like, work, []
        return known[1:]

    def _buffers_of(self, parameter: nn.Parameter, like: Any, shares: Sequence[Share]) -> tuple[Tensor, Tensor | None]:
        """Return room for the total gradient and for the weights before a step: fresh memory is slow memory."""
        known = self._buffers.get(id(parameter))
        if known is None or known[0] != like:
            observed = any(share.has_path for share in shares)
            before = torch.empty_like(local(parameter)) if observed else None
            total = torch.empty_like(parameter.grad if parameter.grad is not None else parameter)
            known = self._buffers[id(parameter)] = like, total, before
        return known[1:]

    def release(self) -> None:
        """Give up all memory that steps use."""
        self._plans.clear()
        self._works.clear()
        self._buffers.clear()


def is_scaled(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler has left its scale, or a step to skip, to the optimizer."""
    return getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
