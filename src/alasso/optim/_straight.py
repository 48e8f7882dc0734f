"""Kernels for a CPU that are called straight: nothing about their arguments is asked anew at every call.

``torch.compile`` looks at all arguments, and at much else, before each call, which takes longer than a pass over some
ten thousand weights. Here arguments are taken apart once into tensors and a form, which holds all that a kernel may
depend on (constants, types, precisions, numbers of dimensions); a kernel then serves all tensors of its form, of
whatever size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Kernel = Callable[..., Any]


#: As many threads as torch has at the call; without this, the first tensor's size decides for all. Sizes are the
#: caller's care.
OPTIONS = {"cpp.dynamic_threads": True, "size_asserts": False}


class Place(NamedTuple):
    """Where a tensor was."""

    dtype: torch.dtype
    dimensions: int


class Parts(NamedTuple):
    """A tuple, a NamedTuple or a dataclass."""

    kind: Any
    forms: tuple[Hashable, ...]


def form_of(thing: Any) -> Hashable:
    if isinstance(thing, Tensor):
        return Place(thing.dtype, thing.dim())
    if (parts := parts_of(thing)) is not None:
        return Parts(type(thing), tuple(form_of(part) for part in parts))
    constant: Hashable = thing
    return constant


def tensors_in(thing: Any) -> list[Tensor]:
    """All tensors of an argument, in the order of its form's places."""
    if isinstance(thing, Tensor):
        return [thing]
    return [tensor for part in parts_of(thing) or () for tensor in tensors_in(part)]


def parts_of(thing: Any) -> Sequence[Any] | None:
    if isinstance(thing, tuple):
        return thing
    return [getattr(thing, field.name) for field in fields(thing)] if is_dataclass(thing) else None


def filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """The argument of this form with these tensors."""
    if isinstance(form, Place):
        return next(tensors)
    if not isinstance(form, Parts):
        return form
    parts = [filled(part, tensors) for part in form.forms]
    if issubclass(form.kind, tuple):
        return form.kind(*parts) if hasattr(form.kind, "_fields") else tuple(parts)
    made = object.__new__(form.kind)
    for field, part in zip(fields(form.kind), parts, strict=True):
        object.__setattr__(made, field.name, part)  # straight into the frozen object: the values have been checked
    return made


def kernel_of(function: Callable[..., None], form: Hashable, tensors: Sequence[Tensor]) -> Kernel:
    """``function``, elementwise and in place, as a kernel that takes the tensors of arguments of this form.

    All tensors with a dimension must have one and the same size, here and in every call, and be laid out densely.
    """
    from torch._inductor import compile as compile_graph
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def flat(*tensors: Tensor) -> tuple[()]:
        function(*filled(form, iter(tensors)))
        return ()

    sizes = ShapeEnv()
    with torch.no_grad(), FakeTensorMode(shape_env=sizes) as fake:
        # A number is not made from the real one, whose value torch might take for part of the function.
        examples = [fake.from_tensor(t) if t.dim() else torch.empty((), dtype=t.dtype) for t in tensors]
        graph = make_fx(flat)(*examples)
    with torch.no_grad():
        kernel: Kernel = compile_graph(graph, list(examples), options=OPTIONS)
    if sizes.guards:
        raise RuntimeError(f"the kernel would serve only some sizes: {sizes.guards[0].expr}")
    return kernel
