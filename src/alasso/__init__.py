"""Continual learning by asymmetric loss approximation, for any PyTorch model under any optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alasso import importance, optim, vcl
    from alasso._gauge import Gauge
    from alasso._summary import Summary, TensorSummary
    from alasso._tune import Trial, Tuned, tune
    from alasso.errors import AlassoError, DivergedError
    from alasso.methods.alasso import ALASSO
    from alasso.methods.base import Surrogate
    from alasso.methods.ewc import EWC, OnlineEWC
    from alasso.methods.imm import IMM
    from alasso.methods.kron import KronALASSO
    from alasso.methods.mas import MAS
    from alasso.methods.si import SI
    from alasso.regularizer import Regularizer

__version__ = "0.1.0"
__all__ = [
    "ALASSO",
    "EWC",
    "IMM",
    "MAS",
    "SI",
    "AlassoError",
    "DivergedError",
    "Gauge",
    "KronALASSO",
    "OnlineEWC",
    "Regularizer",
    "Summary",
    "Surrogate",
    "TensorSummary",
    "Trial",
    "Tuned",
    "__version__",
    "importance",
    "optim",
    "tune",
    "vcl",
]

_HOME = {
    "ALASSO": "alasso.methods.alasso",
    "AlassoError": "alasso.errors",
    "DivergedError": "alasso.errors",
    "EWC": "alasso.methods.ewc",
    "Gauge": "alasso._gauge",
    "IMM": "alasso.methods.imm",
    "KronALASSO": "alasso.methods.kron",
    "MAS": "alasso.methods.mas",
    "OnlineEWC": "alasso.methods.ewc",
    "Regularizer": "alasso.regularizer",
    "SI": "alasso.methods.si",
    "Summary": "alasso._summary",
    "Surrogate": "alasso.methods.base",
    "TensorSummary": "alasso._summary",
    "Trial": "alasso._tune",
    "Tuned": "alasso._tune",
    "tune": "alasso._tune",
}
_ROOMS = ("importance", "optim", "vcl")


def __getattr__(name: str) -> Any:
    # Loaded at first use: the command line answers --help without waiting for torch.
    if name in _HOME:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
    if name in _ROOMS:
        return import_module(f"alasso.{name}")
    raise AttributeError(f"module 'alasso' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
