"""Elementwise passes over tensors, compiled into one kernel where that pays.

A pass is made of the same functions as all the rest, so that the compiled one and the plain one have one source. It
takes tensors in one dimension, so that one kernel serves every shape, and its numbers as tensors, so that it serves
every setting.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import shlex
import shutil
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from alasso.methods.base import Surrogate, add_to_path_, two_sided_spring_grad
from alasso.optim import _straight as straight

log = logging.getLogger("alasso")

#: Weights from which on a compiled pass is worth its making, which takes 5 to 20 s. On a CPU it saves about 4 ns a
#: weight and step (nothing below 100,000 weights): at this size 2 ms, so that some thousand steps earn it back. On a
#: GPU it saves launches, whatever the size.
WORTH_COMPILING = {"cpu": 1 << 19, "cuda": 0}


# -- the hooks' two passes -----------------------------------------------------------------------------------


def open_pass(total: Tensor, before: Tensor | None, g: Tensor, theta: Tensor, surrogate: Any, state: Any) -> None:
    """total ← g + ∂penalty/∂θ and before ← θ, in one go over memory."""
    total.copy_(g + surrogate.penalty_grad(theta, state))
    if before is not None:
        before.copy_(theta)


def close_pass(omega: Tensor, g: Tensor, theta_before: Tensor, theta: Tensor) -> None:
    """ω −= g·(θ − θ_before)."""
    add_to_path_(omega, g, theta_before, theta)


def add_penalty_(total: Tensor, theta: Tensor, anchor: Tensor, k_minus: Tensor, k_plus: Tensor) -> None:
    """total += ∂penalty/∂θ: :func:`two_sided_spring_grad` with as few passes over memory as torch allows uncompiled."""
    d = theta - anchor
    if total.dtype != d.dtype:  # a gradient in half precision
        total.add_(two_sided_spring_grad(d, k_minus, k_plus))
    elif k_minus is k_plus:
        total.addcmul_(k_plus, d, value=2)
    else:
        total.addcmul_(k_minus, d.clamp(max=0), value=2)
        total.addcmul_(k_plus, d.clamp_(min=0), value=2)


# -- compiling -----------------------------------------------------------------------------------------------


Call = Callable[..., Any]


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function as a piece of code of its own: of each, torch keeps at most eight compiled variants."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


class Compiled:
    """A function that is compiled at its first call, and runs as it is where that fails."""

    def __init__(self, function: Callable[..., None], name: str) -> None:
        self.plain = renamed(function, name)
        self.name = name
        self.kernels: dict[Hashable, Call | None] = {}  # for a CPU, by the form of their arguments
        self._run: Call | None = None

    def __call__(self, *arguments: Any) -> None:
        self._way((), arguments)()

    @property
    def is_compiled(self) -> bool:
        return any(self.kernels.values()) or (self._run is not None and self._run is not self.plain)

    def bound(self, *last: Any) -> Call:
        """The function with its last arguments given, for many calls.

        Its first arguments are tensors or tuples of tensors, in all calls of the same kinds and sizes.
        """
        way: Call | None = None

        def call(*first: Any) -> None:
            nonlocal way
            if way is None:
                way = self._way(first, last)
            way(*first)

        return call

    def _way(self, first: tuple[Any, ...], last: tuple[Any, ...]) -> Call:
        """How calls with such arguments are made."""
        tensors = straight.tensors_in((*first, *last))
        if tensors[0].numel() < 2:
            return lambda *first: self.plain(*first, *last)  # torch compiles another kernel for single numbers
        if tensors[0].is_cpu and (kernel := self._kernel(straight.form_of((*first, *last)), tensors)) is not None:
            kept = straight.tensors_in(last)
            return lambda *first: kernel(
                *(t for part in first for t in (part if isinstance(part, tuple) else (part,))), *kept
            )
        return lambda *first: self._compiled(*first, *last)

    def _kernel(self, form: Hashable, tensors: Sequence[Tensor]) -> Call | None:
        """The kernel that takes the tensors of arguments of this form; None where there is none."""
        if form not in self.kernels:
            try:
                with quiet_compiler():
                    self.kernels[form] = straight.kernel_of(self.plain, form, tensors)
            except Exception as error:
                log.info("%s is not called straight: %s", self.name, first_line(error))
                self.kernels[form] = None
        return self.kernels[form]

    def _compiled(self, *arguments: Any) -> None:
        """By way of torch.compile."""
        if self._run is None:
            self._first_call(arguments)
        else:
            self._run(*arguments)

    def _first_call(self, arguments: Sequence[Any]) -> None:
        run = torch.compile(self.plain, dynamic=True, fullgraph=True)
        try:
            with quiet_compiler():
                run(*arguments)  # what cannot be compiled fails before anything is computed
        except Exception as error:
            log.warning("%s could not be compiled and runs as it is: %s", self.name, first_line(error))
            run = self.plain
            run(*arguments)
        self._run = run


@contextmanager
def quiet_compiler() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself while it is loading its compiler
        yield


_known: dict[Hashable, Compiled] = {}


def compiled(key: Hashable, make: Callable[[], tuple[Callable[..., None], str]]) -> Compiled:
    """The compiled pass known by this key; at first sight, ``make`` gives its function and its name."""
    if key not in _known:
        _known[key] = Compiled(*make())
    return _known[key]


def open_step(surrogate: Surrogate[Any]) -> Compiled:
    """The compiled :func:`open_pass` for this kind of surrogate."""
    kind = type(surrogate)
    return compiled(("open", kind), lambda: (open_pass, f"open_step_{kind.__name__}"))


def close_step() -> Compiled:
    """The compiled :func:`close_pass`."""
    return compiled("close", lambda: (close_pass, "close_step"))


def why_not_compiled(device: str, weights: int) -> str | None:
    """None where compiling a pass over this many weights pays; else the reason why it does not."""
    if weights < WORTH_COMPILING.get(device, 0):
        return f"{weights:,} weights are too few to earn compiling (from {WORTH_COMPILING[device]:,} on)"
    return no_compiler(device)


@cache
def no_compiler(device: str) -> str | None:
    """None where torch can compile for this device; else what is missing."""
    if device == "cuda":
        return "triton is not installed" if importlib.util.find_spec("triton") is None else None
    if device != "cpu":
        return f"nothing is compiled for {device}"
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = named[:1] or ["g++", "clang++", "cl"]
    return None if any(map(shutil.which, candidates)) else "there is no C++ compiler"


# -- arguments -----------------------------------------------------------------------------------------------


def flattened(tensors: Sequence[Tensor], state: Any = None) -> tuple[list[Tensor], Any] | None:
    """The tensors and the state's in one dimension, nothing copied; None where they are of several kinds or layouts."""
    like = tensors[0]
    large = [] if state is None else [name for name in state._fields if getattr(state, name).shape == like.shape]
    everything = [*tensors, *(getattr(state, name) for name in large)]
    if like.dtype not in (torch.float32, torch.float64) or not all(is_alike(t, like) for t in everything):
        return None
    if all(t.is_contiguous() for t in everything):
        flat = [t.view(-1) for t in everything]
    elif all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in everything):
        flat = [t.permute(0, 2, 3, 1).view(-1) for t in everything]
    else:
        return None
    # As a view, each would be compiled anew for the shape of what it is a view of. What .data costs is autograd's note
    # of a change; whoever changes a parameter through it makes that note.
    flat = [t.data for t in flat]
    if state is not None:
        # What is not as large as the weights is a summary, such as EWC's constant; no pass over weights asks for it.
        state = type(state)(**dict.fromkeys(state._fields) | dict(zip(large, flat[len(tensors) :], strict=True)))
    return flat[: len(tensors)], state


def is_alike(tensor: Tensor, like: Tensor) -> bool:
    """Whether both are plain tensors of one shape and device, and of one precision if not of integers."""
    return (
        type(tensor) is Tensor
        and tensor.shape == like.shape
        and tensor.device == like.device
        and tensor.layout is torch.strided
        and (tensor.dtype == like.dtype or not tensor.is_floating_point())
    )


def is_being_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded: what is made now has no content before the graph runs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def with_tensor_settings(surrogate: Surrogate[Any], device: torch.device, dtype: torch.dtype) -> Any:
    """The surrogate with its numbers as tensors: then another value needs no other kernel. None if one is a tensor."""
    twin = copy.copy(surrogate)
    for field in fields(surrogate):  # type: ignore[arg-type]
        value = getattr(surrogate, field.name)
        if isinstance(value, Tensor):
            return None  # a number for each of several runs, say, which has no place in one dimension
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Straight into the frozen object: the values have been checked.
            object.__setattr__(twin, field.name, torch.full((), float(value), device=device, dtype=dtype))
    return twin


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
