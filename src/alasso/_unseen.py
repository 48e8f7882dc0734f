"""Steps that a regularizer does not see: those of optimizers that train its model and that it is not attached to.

Torch runs global hooks around every step of every optimizer. They count, and change nothing; weights that are set by
other means (clipped, averaged, restored) are no steps and do not count. What no optimizer holds, neither one that was
attached nor any that was seen to step, is found by the same means.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from alasso._frames import users_stacklevel
from alasso._parameters import some_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from alasso._exchange import Exchange
    from alasso.regularizer import Regularizer

_watched: list[ReferenceType[Regularizer]] = []  # a WeakSet takes longer to go through than all the rest
#: Optimizers within a step → the steps that each regularizer had seen, and missed, when it began.
_begun: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Regularizer, tuple[int, int]]] = WeakKeyDictionary()
#: Optimizers of other models → how many parameters each had when none was the regularizer's.
_foreign: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Regularizer, int]] = WeakKeyDictionary()
#: Parameters that were in an attached optimizer, or in one that was seen to step, by where they lie.
_held: WeakKeyDictionary[Regularizer, dict[int, ReferenceType[Tensor]]] = WeakKeyDictionary()
#: Optimizers → how many parameters each had when that was noted.
_noted: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Regularizer, int]] = WeakKeyDictionary()
_hooks: list[Any] = []


def count_unseen_steps(regularizer: Regularizer) -> None:
    """From now on, ``regularizer.unseen_steps`` grows with every step that passes it by."""
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))
    if not _is_watched(regularizer):
        _watched.append(ref(regularizer, _watched.remove))


def _is_watched(regularizer: Regularizer) -> bool:
    return any(watched() is regularizer for watched in _watched)


def note_held(regularizer: Regularizer, parameters: Iterable[Tensor]) -> None:
    """Of an optimizer that is attached, or steps: what it holds is not left untrained."""
    known = _held.setdefault(regularizer, {})
    new = [p for p in parameters if not was_held(regularizer, p)]
    if new:
        for gone in [place for place, reference in known.items() if reference() is None]:
            del known[gone]
        known.update({id(p): ref(p) for p in new})


def was_held(regularizer: Regularizer, parameter: Tensor) -> bool:
    reference = _held.get(regularizer, {}).get(id(parameter))
    return reference is not None and reference() is parameter  # and not one that came to lie where it was


def warn_of_untrained(regularizer: Regularizer, attachments: Iterable[Exchange], added: Container[str]) -> None:
    """Warn of new parameters, of a head say, that nobody trains: the attached optimizers hold those from before.

    Of those in the place of others, and of ``added`` ones that have a gradient. A parameter that is in no optimizer
    from the beginning may be meant to stay as it is.
    """
    attachments = list(attachments)
    if not attachments:
        return
    replaced: set[str] = set()
    for attachment in attachments:
        note_held(regularizer, attachment.parameters())  # which may have grown
        replaced |= attachment.take_replaced()
    names = [
        name
        for name, parameter in regularizer.protected()
        if (name in replaced or (name in added and parameter.grad is not None))
        and parameter.requires_grad
        and not was_held(regularizer, parameter)
    ]
    if names:
        warnings.warn(
            "new in the model since attach(), and held by no optimizer that was seen to step: "
            f"{some_of(names)}; the attached one holds what was there before. Make a new optimizer, and attach() it",
            stacklevel=users_stacklevel(),
        )


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    strangers = [one for watched in _watched if (one := watched()) and not one.is_attached_to(optimizer)]
    if strangers:
        _begun[optimizer] = WeakKeyDictionary({one: (one.steps, one.unseen_steps) for one in strangers})


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _begun or torch.compiler.is_compiling():
        return
    # Where the step() of a subclass calls its parent's, the hooks run twice; the step counts once.
    for regularizer, before in _begun.pop(optimizer, {}).items():
        # A wrapper around another optimizer, or within one: its moves are part of a step that has been counted.
        counted = (regularizer.steps, regularizer.unseen_steps) != before or regularizer.is_within_a_step
        if not counted and _moves(optimizer, regularizer):
            regularizer.unseen_steps += 1


def _moves(optimizer: Optimizer, regularizer: Regularizer) -> bool:
    groups = optimizer.param_groups
    count = sum(len(group["params"]) for group in groups)
    foreign_to = _foreign.setdefault(optimizer, WeakKeyDictionary())
    if foreign_to.get(regularizer) == count:
        return False
    held = [p for group in groups for p in group["params"]]
    noted = _noted.setdefault(optimizer, WeakKeyDictionary())
    if noted.get(regularizer) != count:  # else they are those from before
        note_held(regularizer, held)
        noted[regularizer] = count
    own = [p for p in held if regularizer.name_of(p) is not None]
    if not own:
        foreign_to[regularizer] = count
    return any(p.grad is not None for p in own)
