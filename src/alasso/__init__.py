"""Continual learning by asymmetric loss approximation, for any PyTorch model under any optimizer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alasso import optim
    from alasso.errors import AlassoError
    from alasso.methods._classes import ALASSO, EWC, IMM, MAS, SI, OnlineEWC

__version__ = "0.1.0"
__all__ = ["ALASSO", "EWC", "IMM", "MAS", "SI", "AlassoError", "OnlineEWC", "__version__", "optim"]

_HOME = {name: "alasso.methods._classes" for name in __all__ if name not in ("AlassoError", "__version__", "optim")}
_HOME["AlassoError"] = "alasso.errors"


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
