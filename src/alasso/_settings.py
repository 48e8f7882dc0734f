"""A regularizer's constants: attributes by their own names, which can be changed between tasks, and are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from alasso.errors import AlassoError
from alasso.methods.base import Surrogate


class WithSettings:
    """``reg.c`` is the surrogate's, and ``reg.c = 3.0`` holds from the next step on: checked as at the beginning."""

    surrogate: Surrogate[Any]

    def settings(self) -> dict[str, Any]:
        """The constants it works with, by name."""
        return asdict(self.surrogate)  # type: ignore[call-overload,no-any-return]

    def take_settings(self, saved: Mapping[str, Any]) -> None:
        """Those of a saved state; the surrogate's alone are expected to be there."""
        names = asdict(self.surrogate)  # type: ignore[call-overload]
        self.surrogate = replace(self.surrogate, **{name: saved[name] for name in names})  # type: ignore[type-var]
        self.settings_changed()

    def settings_changed(self) -> None:
        """Give up what was worked out from the old ones."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (known := fields_of(self)):
            self.take_settings({**self.settings(), name: value})
            return
        if known and not hasattr(self, name) and is_ours(type(self)):
            check_is_no_slip(type(self).__name__, name, list(asdict(self.surrogate)))  # type: ignore[call-overload]
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # or every slip in a name would be an attribute

        def __getattr__(self, name: str) -> Any:
            if name in fields_of(self):
                return getattr(self.surrogate, name)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def check_is_no_slip(method: str, name: str, constants: list[str]) -> None:
    """Refuse a new attribute that was to be a constant: ``reg.Xi``, ``reg.epsilon_prim``, another method's ``lam``."""
    meant = get_close_matches(name.lower(), constants, 1, 0.85)
    if meant or name.lower() in SLIPS or (len(name) <= 3 and not name.startswith("_")):
        guess = f"; did you mean {meant[0]}? It has" if meant else "; it has"
        raise AlassoError(f"{method} has no constant {name!r}{guess} {', '.join(constants)}")


def is_ours(kind: type) -> bool:
    """Whoever derives a class from a method may name what it keeps as they like."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


#: Constants that not every method has, and other spellings of them; those of up to three letters are all refused.
SLIPS = frozenset({"gamma", "epsilon", "lambda_", "lambd", "lamda", "lmbda", "strength"})


def fields_of(owner: object) -> Mapping[str, Any]:
    """Names of the surrogate's constants; none before it is there, as while a copy is being made."""
    surrogate = owner.__dict__.get("surrogate")
    return getattr(surrogate, "__dataclass_fields__", {})
