"""Continual learning by asymmetric loss approximation, for any PyTorch model under any optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alasso import optim
    from alasso._gauge import Gauge
    from alasso._tune import Tuned, tune
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
    "Surrogate",
    "Tuned",
    "__version__",
    "optim",
    "tune",
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
    "Surrogate": "alasso.methods.base",
    "Tuned": "alasso._tune",
    "tune": "alasso._tune",
}


def __getattr__(name: str) -> Any:
    # Loaded at first use: the command line answers --help without waiting for torch.
    if name in _HOME:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
    if name == "optim":
        return import_module("alasso.optim")
    raise AttributeError(f"module 'alasso' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
