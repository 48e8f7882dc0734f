"""``torch.compile`` where the user asks for it: an elementwise pass over flat tensors becomes one kernel."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import shlex
import shutil
import time
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from alasso.methods.base import Surrogate

log = logging.getLogger("alasso")

Pass = Callable[..., None]


class Compiled:
    """A function that works in place, compiled at its first call; it runs as it is where that fails.

    Its first argument is a flat tensor, its numbers are tensors: then one kernel serves every size and setting.
    """

    def __init__(self, function: Pass, name: str) -> None:
        # A piece of code of its own: of each, torch keeps at most eight compiled variants.
        code = function.__code__.replace(co_name=name)
        self.plain: Pass = types.FunctionType(
            code, function.__globals__, name, function.__defaults__, function.__closure__
        )
        self.name = name
        self._run: Pass | None = None

    def __call__(self, *arguments: Any) -> None:
        if arguments[0].numel() < 2:
            self.plain(*arguments)  # torch would compile another kernel for single numbers
        elif self._run is None:
            self._first_call(arguments)
        else:
            try:
                self._run(*arguments)
            except Exception as error:
                if type(error).__name__ != "FailOnRecompileLimitHit":  # raised before anything is computed
                    raise
                log.warning("%s has more variants than torch keeps, and runs as it is from now on", self.name)
                self._run = self.plain
                self.plain(*arguments)

    def _first_call(self, arguments: Sequence[Any]) -> None:
        run: Pass = torch.compile(self.plain, dynamic=True, fullgraph=True)
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of itself while it loads its compiler
                run(*arguments)  # what cannot be compiled fails before anything is computed
        except Exception as error:
            log.warning("%s cannot be compiled and runs as it is: %s", self.name, first_line(error))
            run = self.plain
            run(*arguments)
        else:
            log.warning("compiled %s in %.1f s", self.name, time.perf_counter() - start)
        self._run = run


_compiled: dict[Hashable, Compiled] = {}


def compiled(key: Hashable, function: Pass, name: str) -> Compiled:
    """Return the compiled form of the function known by a key."""
    if key not in _compiled:
        _compiled[key] = Compiled(function, name)
    return _compiled[key]


@cache
def no_compiler(device: str) -> str | None:
    """Return None where torch can compile for a type of device, else what is missing."""
    if device == "cuda":
        return "triton is not installed" if importlib.util.find_spec("triton") is None else None
    if device != "cpu":
        return f"nothing is compiled for {device}"
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = named[:1] or ["g++", "clang++", "cl"]
    return None if any(map(shutil.which, candidates)) else "there is no C++ compiler"


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's numbers in the order in which they lie in memory, nothing copied.

    Detached through ``.data``: a kernel would be compiled anew for the shape of what a view is a view of.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).data


def flat_state(state: Any, shape: torch.Size) -> Any:
    """Return a state with its tensors flat; summaries of the whole tensor, which no pass asks for, are left out."""
    return type(state)(*(flat(t) if t.shape == shape else None for t in state))


def with_tensor_settings(surrogate: Surrogate[Any], like: Tensor) -> Any:
    """Return the surrogate with its numbers as tensors: then another value needs no other kernel."""
    twin = copy.copy(surrogate)
    for field in fields(surrogate):  # type: ignore[arg-type]
        value = getattr(surrogate, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Straight into the frozen object: the values have been checked.
            object.__setattr__(twin, field.name, torch.full((), float(value), device=like.device, dtype=like.dtype))
    return twin


def is_recording(device: torch.device) -> bool:
    """Return whether a CUDA graph is being recorded: what is made now has no content before the graph runs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def first_line(error: Exception) -> str:
    """Return an error's message in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
