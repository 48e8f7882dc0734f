"""A method's settings: attributes that act from the next step on, and what is refused of them."""

from __future__ import annotations

import math
from dataclasses import replace
from difflib import get_close_matches
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import torch
from torch import Tensor

from alasso.errors import AlassoError

if TYPE_CHECKING:
    from alasso.regularizer import Regularizer

#: The largest setting. No use comes near it, and products of two still leave room in single precision.
MOST = 1e15

T = TypeVar("T")


class Setting(Generic[T]):
    """A setting of the surrogate as an attribute of its regularizer: ``reg.c = 3.0`` acts from the next step on."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, reg: Regularizer, owner: type) -> T:
        if reg is None:
            return self  # type: ignore[unreachable]
        value: T = getattr(reg.surrogate, self.name)
        return value

    def __set__(self, reg: Regularizer, value: T) -> None:
        reg.surrogate = replace(reg.surrogate, **{self.name: value})  # type: ignore[type-var]


def check_non_negative(**settings: Any) -> None:
    """Refuse a negative, infinite or NaN setting by its name, and one so large that single precision overflows.

    Args:
        **settings: The settings by name.

    Raises:
        AlassoError: One is not a number, or is out of range.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            given = type(value).__name__ if isinstance(value, Tensor | torch.optim.Optimizer) else repr(value)
            hint = "; optimizers go to attach()" if isinstance(value, torch.optim.Optimizer) else ""
            raise AlassoError(f"{name} must be a number, not {given:.60}{hint}")
        if not 0 <= value < math.inf:  # type: ignore[operator]  # NaN is not either
            raise AlassoError(f"{name} must be a finite number, zero or more, not {value!s:.60}")
        if value > MOST:  # type: ignore[operator]
            raise AlassoError(f"{name} must be at most {MOST:g}, so that no product overflows, not {value!s:.60}")


def check_spelling(regularizer: Regularizer, name: str) -> None:
    """Refuse a new attribute that looks like a misspelled setting: ``reg.Xi``, ``reg.epsilon_prim``.

    Args:
        regularizer: Whose attribute it is to be.
        name: Its name.

    Raises:
        AlassoError: It is close to a setting's, or the setting's own and undeclared.
    """
    method, known = type(regularizer).__name__, vars(regularizer.surrogate)
    if name in known:
        raise AlassoError(f"{method} does not declare {name}: add {name} = Setting() to the class")
    if meant := get_close_matches(name.lower(), known, 1, 0.85):
        raise AlassoError(f"{method} has no setting {name!r}; did you mean {meant[0]}?")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of a ``Literal``'s.

    Args:
        name: The setting's name.
        value: Its value.
        choices: The ``Literal``.

    Raises:
        AlassoError: The ``Literal`` does not hold the value.
    """
    if not isinstance(value, str) or value not in get_args(choices):
        raise AlassoError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r:.60}")
