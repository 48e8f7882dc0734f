"""The laboratory: benchmarks, runs, results, measures. Built on the library, never the other way round.

>>> from alasso.bench import RunConfig, run
>>> run(RunConfig.for_benchmark("permuted-digits", "sgd", tasks=2, epochs=1, hidden=8), device="cpu").config.tasks
2
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alasso.bench.config import RunConfig
    from alasso.bench.results import Result
    from alasso.bench.streams import Stream
    from alasso.bench.training.run import run
    from alasso.bench.training.search import chosen_settings

__all__ = ["Result", "RunConfig", "Stream", "chosen_settings", "run"]

_HOMES = {
    "Result": "alasso.bench.results",
    "RunConfig": "alasso.bench.config",
    "Stream": "alasso.bench.streams",
    "chosen_settings": "alasso.bench.training.search",
    "run": "alasso.bench.training.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'alasso.bench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)  # at first use: parts of the laboratory do without torch
