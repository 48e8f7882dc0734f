"""What of a stack's step is compiled: once for each kind and shape, however many stacks are made."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

import torch

from alasso.optim import _compile as kernels

log = logging.getLogger("alasso")

#: By timing, the compiler would choose how sums are taken: on another day they would be rounded otherwise.
CHOSEN_WITHOUT_TIMING = {"deterministic": True}

_NUMBERS = itertools.count()
_made: dict[Hashable, OrPlain] = {}


def compiles_on(device: torch.device) -> bool:
    """On a GPU, each kernel saved is a launch saved; a CPU gains nothing from stacks, compiled or not."""
    return device.type == "cuda" and kernels.no_compiler("cuda") is None


class OrPlain:
    """A function compiled under a name of its own; from the compiler's first refusal on, ``plain`` in its place."""

    def __init__(
        self,
        function: Callable[..., Any],
        plain: Callable[..., Any],
        name: str,
        *,
        dynamic: bool,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.plain, self.name = plain, name
        wishes = CHOSEN_WITHOUT_TIMING | dict(options or {})
        known = {option: value for option, value in wishes.items() if hasattr(inductor_config(), option)}
        renamed = kernels.renamed(function, name)
        self.run = torch.compile(renamed, dynamic=dynamic, fullgraph=True, options=known or None)

    def __call__(self, *arguments: Any) -> Any:
        if self.run is not self.plain:
            try:
                with kernels.quiet_compiler():
                    return self.run(*arguments)
            except Exception as refusal:  # before anything is computed
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise
                log.info("%s is not compiled: %s", self.name, kernels.first_line(refusal))
                self.run = self.plain
        return self.plain(*arguments)


@cache
def compiled(function: Callable[..., Any], lanes: int, shape: tuple[int, ...] = ()) -> OrPlain:
    """The function compiled for so many lanes, and for all shapes of tensors or for one.

    For one ``shape`` alone, a pass over weights finds out sooner which lane a weight is of.
    """
    name = "_".join(map(str, (function.__name__, lanes, *shape)))
    return OrPlain(function, function, name, dynamic=not shape)


def keep_compiling_processes() -> None:
    """Keep the compiler's processes, which torch would dismiss after a minute and start again for the next stack.

    Torch 2.11 once waited for them for ever, where a stack came to be compiled in the moment of their dismissal. To be
    called before anything is compiled: torch looks when it starts the first ones. It holds for the whole process.
    """
    config = inductor_config()
    if hasattr(config, "quiesce_async_compile_pool"):
        config.quiesce_async_compile_pool = False


def inductor_config() -> Any:
    import torch._inductor.config  # only where something is compiled

    return torch._inductor.config


def compiled_once(
    make: Callable[[], Callable[..., Any]],
    plain: Callable[..., Any],
    key: Hashable,
    options: Mapping[str, Any] | None = None,
) -> OrPlain:
    """What ``make`` makes, compiled, or else ``plain``; made but once for each key that is not None."""
    if key is not None and key in _made:
        return _made[key]
    function = make()
    run = OrPlain(function, plain, f"{function.__name__}_{next(_NUMBERS)}", dynamic=False, options=options)
    if key is not None:
        _made[key] = run
    return run
