"""Elementwise passes over tensors of one shape, compiled into one kernel on a GPU.

They are made of the same functions as all the rest, so that the compiled pass and the plain one have one source.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from alasso.methods.surrogate import two_sided_spring_grad

log = logging.getLogger("alasso")


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


def run(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """The kernel over tensors of one shape: compiled on a GPU, plain elsewhere."""
    if tensors[0].is_cuda and all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors):
        # In one dimension, one compiled kernel serves every shape of parameter.
        compiled(kernel)(*(t.view(-1) for t in tensors))
    else:
        kernel(*tensors)


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def compiled(kernel: Callable[..., None]) -> Callable[..., Any]:
    if not has_triton():
        log.info("there is no compiler for GPU kernels here, so %s runs uncompiled", kernel.__name__)
        return kernel
    # What the compiler decided about a softmax over ten classes is not for the user to act on.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    return torch.compile(kernel, dynamic=True, fullgraph=True)
