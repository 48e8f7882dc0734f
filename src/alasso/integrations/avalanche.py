"""Avalanche: a plugin for any supervised strategy.

strategy = Naive(model=model, optimizer=optimizer, plugins=[AlassoPlugin(ALASSO(model))], ...)
for experience in benchmark.train_stream:
    strategy.train(experience)
"""

from __future__ import annotations

from typing import Any

from alasso.importance._objectives import Head
from alasso.integrations._lifecycle import EndOfTask, HasRegularizer, Make, TaskKeeper
from alasso.regularizer import Loader, Regularizer

try:
    from avalanche.training.plugins import SupervisedPlugin
except ImportError as error:
    raise ImportError(
        "alasso.integrations.avalanche needs avalanche-lib (and torchvision): pip install 'alasso[avalanche]'"
    ) from error


class AlassoPlugin(HasRegularizer, SupervisedPlugin):
    """Protects what the model has learned during the training on later experiences.

    Avalanche's own plugins add their penalty to ``strategy.loss``; this one works at the optimizer's step, so that the
    path integral sees the gradient of the task alone. It follows growing classifiers and new optimizers.

    Args:
        regularizer: Any method, such as ``ALASSO(model)``; or the class, called with the strategy's model.
        end_of_task: "fit": every experience is a task; "manual": you call ``plugin.regularizer.consolidate()``.
        loader: Data on which EWC and MAS measure importance; the experience's own training data if None. Models that
            take task labels beside the inputs need a loader and a head.
        head: Maps the model's output to the task's logits.

    Raises:
        AlassoError: ``end_of_task`` is unknown, or ``regularizer`` is no regularizer and cannot make one.
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
        """Attach. The strategy has adapted its model and optimizer to the experience by now.

        Args:
            strategy: The strategy.
            *args: Avalanche's own.
            **kwargs: Avalanche's own.
        """
        super().before_training_exp(strategy, *args, **kwargs)
        self._keeper.make(strategy.model)
        self._keeper.begin([strategy.optimizer])

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Consolidate and detach.

        Args:
            strategy: The strategy.
            *args: Avalanche's own.
            **kwargs: Avalanche's own.
        """
        super().after_training_exp(strategy, *args, **kwargs)
        self._keeper.end(strategy.dataloader)
