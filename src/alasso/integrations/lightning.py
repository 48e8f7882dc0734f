"""Lightning: a callback that attaches in ``fit`` and consolidates at its end.

keep = AlassoCallback(ALASSO(model))
for task in tasks:
    Trainer(max_epochs=5, callbacks=[keep]).fit(model, task)
"""

from __future__ import annotations

from typing import Any

from alasso._digest import check_digest, with_digest
from alasso._gauge import Gauge
from alasso.importance._objectives import Head
from alasso.integrations._lifecycle import EndOfTask, HasRegularizer, Make, TaskKeeper
from alasso.regularizer import Loader, Regularizer

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("alasso.integrations.lightning needs lightning: pip install 'alasso[lightning]'") from error


class AlassoCallback(HasRegularizer, Callback):
    """Protects what the model has learned during the fits of later tasks.

    The method's state is part of every checkpoint: ``fit(ckpt_path=…)`` continues bit for bit. A checkpoint written
    during a fit is within the task; one written after it holds the consolidated task. A state that was damaged since is
    refused.

    Args:
        regularizer: Any method, such as ``ALASSO(model)``; or the class, called with the LightningModule in ``fit``.
        end_of_task: "fit": every fit is a task; "manual": you call ``callback.regularizer.consolidate()``.
        loader: Data on which EWC and MAS measure importance; the trainer's own training data if None.
        head: Maps the model's output to the task's logits.
        log_penalty: Whether to log ``alasso/penalty`` as often as the trainer logs.
        gauge: Counts the steps; the loggers get what it reports, and its state is part of the checkpoints.

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
        log_penalty: bool = True,
        gauge: Gauge | None = None,
    ) -> None:
        self._keeper = TaskKeeper(regularizer, end_of_task, loader, head)
        self.log_penalty = log_penalty
        self.gauge = gauge
        self._counted = 0  # of the trainer's steps
        self._ended = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._keeper.make(pl_module)
            self._ended = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keeper.begin(trainer.optimizers)
        self._counted = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set when the trainer is made
        if self.log_penalty and trainer.loggers and self.regularizer.tasks > 0 and trainer.global_step % every == 0:
            pl_module.log("alasso/penalty", self.regularizer.penalty().detach())
        if self.gauge is not None and trainer.global_step > self._counted:  # not while gradients accumulate
            self._counted = trainer.global_step
            if found := self.gauge.step():
                for logger in trainer.loggers:
                    logger.log_metrics(found, step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A fit that resumes after its last step runs neither a step nor on_train_end.
        if not self._ended and self.regularizer.steps > 0:
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        self._ended = True
        self._keeper.end(trainer.train_dataloader)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._keeper.is_made:
            self.regularizer.detach()

    def state_dict(self) -> dict[str, Any]:
        if not self._keeper.is_made:
            return {}
        gauge = {} if self.gauge is None else {"gauge": self.gauge.state_dict()}
        return with_digest({**self.regularizer.state_dict(), **gauge})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            check_digest(state_dict, "the regularizer's state in this checkpoint")
            self.regularizer.load_state_dict(state_dict)
            if self.gauge is not None and "gauge" in state_dict:
                self.gauge.load_state_dict(state_dict["gauge"])
