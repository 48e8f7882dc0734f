"""Names of a model's parameters: as the user knows them, and which of them are left out by patterns."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from alasso._frames import users_stacklevel
from alasso.errors import AlassoError

MOST_NAMED = 8  # parameters in one sentence


def named_weights(model: nn.Module, exclude: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """All of real numbers that no pattern leaves out, each once: named_parameters() names a tied parameter once."""
    for name, parameter in not_left_out(model, exclude):
        if parameter.is_floating_point():
            yield name, parameter


def not_left_out(model: nn.Module, exclude: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter by its first name, but for those of which any name, tied ones have several, fits a pattern."""
    left_out = {id(p) for name, p in all_names(model) if any(fnmatch.fnmatchcase(name, one) for one in exclude)}
    for name, parameter in model.named_parameters():
        if id(parameter) not in left_out:
            yield plain_name(name), parameter


def all_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter), a tied parameter under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield plain_name(name), parameter


def some_of(names: Sequence[str]) -> str:
    """
    >>> some_of(["a", "b"]), some_of([str(i) for i in range(10)])
    ('a, b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def patterns_of(exclude: object) -> tuple[str, ...]:
    """One pattern, several, or none."""
    if exclude is None:
        return ()
    if isinstance(exclude, str):
        return (exclude,)
    patterns = tuple(exclude) if isinstance(exclude, Iterable) and not isinstance(exclude, nn.Module) else (exclude,)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise AlassoError(f"exclude takes patterns of names, as 'head.*', not {type(pattern).__name__}")
    return patterns


def check_kinds(model: nn.Module, exclude: Sequence[str]) -> None:
    """Refuse parameters that have no shape yet; say which cannot be protected."""
    left = list(not_left_out(model, exclude))
    for name, parameter in left:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise AlassoError(f"{name} has no shape yet: send a batch through the model first")
    if complex_ones := [name for name, parameter in left if parameter.is_complex()]:
        warnings.warn(f"complex weights are not protected: {some_of(complex_ones)}", stacklevel=users_stacklevel())


def check_patterns(model: nn.Module, exclude: Sequence[str]) -> None:
    """Refuse one that leaves out nothing: it is not what was meant."""
    names = [name for name, _ in all_names(model)]
    if not names:
        raise AlassoError("the model has no parameters to protect")
    for pattern in exclude:
        if not fnmatch.filter(names, pattern):
            below = f"{pattern.rstrip('.')}.*"
            guess = f"did you mean {below!r}, or another of" if fnmatch.filter(names, below) else "the model has"
            raise AlassoError(f"exclude={pattern!r} matches no parameter; {guess} {some_of(names)}")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module the user wrote, inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """Qualified name without the mark torch.compile leaves on submodules: compiled or not, a state fits."""
    return name.replace("_orig_mod.", "")
