"""Avalanche: a plugin for any supervised strategy.

strategy = Naive(model=model, optimizer=optimizer, plugins=[AlassoPlugin(ALASSO(model))], ...)
for experience in benchmark.train_stream:
    strategy.train(experience)
"""

from __future__ import annotations

from typing import Any

from alasso.integrations._lifecycle import EndOfTask, HasRegularizer, Make, TaskKeeper
from alasso.regularizer import Head, Loader, Regularizer

try:
    from avalanche.training.plugins import SupervisedPlugin
except ImportError as error:
    raise ImportError(
        "alasso.integrations.avalanche needs avalanche-lib (and torchvision): pip install 'alasso[avalanche]'"
    ) from error


class AlassoPlugin(HasRegularizer, SupervisedPlugin):
    """Keeps what the model knew while it is trained on the next experience; an experience is a task.

    ``regularizer``  any method, such as ``ALASSO(model)``; or the class, to be made from the strategy's model
    ``end_of_task``  "fit": every experience is a task; "manual": you call ``plugin.regularizer.consolidate()``
    ``loader``, ``head``  what EWC and MAS measure importance on; the experience's own training data if None. Models
    that take task labels beside the inputs need a loader and a head of their own.

    Avalanche's own plugins add their penalty to ``strategy.loss``; this one works at the optimizer's step, so that the
    path integral sees the gradient of the task alone. Growing classifiers and new optimizers are followed.
    """

    def __init__(
        self,
        regularizer: Regularizer | Make,
        *,
        end_of_task: EndOfTask = "fit",
        loader: Loader | None = None,
        head: Head | None = None,
    ) -> None:
        super().__init__()
        self._keeper = TaskKeeper(regularizer, end_of_task, loader, head)

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """The strategy has adapted its model and optimizer to the experience by now."""
        super().before_training_exp(strategy, *args, **kwargs)
        self._keeper.make(strategy.model)
        self._keeper.begin([strategy.optimizer])

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        super().after_training_exp(strategy, *args, **kwargs)
        self._keeper.end(strategy.dataloader)
