"""Steps that a regularizer does not see: those of optimizers that train its model and that it is not attached to.

Torch runs global hooks around every step of every optimizer. They count, and change nothing; weights that are set by
other means (clipped, averaged, restored) are no steps and do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from alasso.shell import Regularizer

_watched: list[ReferenceType[Regularizer]] = []  # a WeakSet takes longer to go through than all the rest
#: Optimizers within a step → the steps that each regularizer had seen, and missed, when it began.
_begun: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Regularizer, tuple[int, int]]] = WeakKeyDictionary()
#: Optimizers of other models → how many parameters each had when none was the regularizer's.
_foreign: WeakKeyDictionary[Optimizer, WeakKeyDictionary[Regularizer, int]] = WeakKeyDictionary()
_hooks: list[Any] = []


def count_unseen_steps(regularizer: Regularizer) -> None:
    """From now on, ``regularizer.unseen_steps`` grows with every step that passes it by."""
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))
    if all(watched() is not regularizer for watched in _watched):
        _watched.append(ref(regularizer, _watched.remove))


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
    own = [p for group in groups for p in group["params"] if regularizer.name_of(p) is not None]
    if not own:
        foreign_to[regularizer] = count
    return any(p.grad is not None for p in own)
