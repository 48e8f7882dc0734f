"""Adam and SGD that know a regularizer: the penalty is part of their own pass over memory, which is compiled."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alasso.optim._optimizers import SGD, Adam

__all__ = ["SGD", "Adam"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded at first use: the step hooks import the engines beside them
        return getattr(import_module("alasso.optim._optimizers"), name)
    raise AttributeError(f"module 'alasso.optim' has no attribute {name!r}")
