"""Which learner carries out which method."""

from __future__ import annotations

from alasso.bench.learners.base import REGULARIZERS, Learner, Merged, Regularized
from alasso.bench.learners.upper_bounds import MultiTask, SingleTask
from alasso.bench.learners.vcl import Variational, VariationalWithCoreset

LEARNERS: dict[str, type[Learner]] = {
    "sgd": Learner,
    "sgd-dropout": Learner,
    **dict.fromkeys(REGULARIZERS, Regularized),
    "imm-mean": Merged,
    "imm-mode": Merged,
    "vcl": Variational,
    "vcl-coreset": VariationalWithCoreset,
    "single-task": SingleTask,
    "multi-task": MultiTask,
}
