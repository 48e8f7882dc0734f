"""Hugging Face Trainer: a callback that attaches in ``train`` and consolidates at its end.

keep = AlassoCallback(ALASSO(model))
for domain in domains:
    Trainer(model, arguments, train_dataset=domain, callbacks=[keep]).train()
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

from alasso._digest import UNREADABLE, Sink, check_digest, with_digest
from alasso._files import whole_file
from alasso._gauge import Gauge
from alasso.errors import AlassoError
from alasso.importance._objectives import Head
from alasso.integrations._lifecycle import EndOfTask, HasRegularizer, Make, TaskKeeper
from alasso.methods.kron import KronALASSO
from alasso.regularizer import Loader, Regularizer

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    needed = "alasso.integrations.huggingface needs transformers: pip install 'alasso[huggingface]'"
    raise ImportError(needed) from error

if TYPE_CHECKING:
    from transformers import Trainer

FILE = "alasso.pt"  # beside the trainer's checkpoint
FOLDER = "alasso"  # instead of the file if the state is sharded: a part from each rank
IGNORED = -100  # label of positions that the loss ignores


class AlassoCallback(HasRegularizer, TrainerCallback):
    """Protects what the model has learned during the training on later domains.

    The callback saves the method's state into every checkpoint folder and loads it when training resumes from one, so
    that training continues bit for bit. It adds ``alasso_penalty`` and a gauge's values to the training logs, and
    ``…_forgetting`` to the results of evaluations. The trainer calls its reporters first: they see these only after
    :meth:`join`.

    Args:
        regularizer: Any method, such as ``ALASSO(model)``; or the class, called with the trainer's model.
        end_of_task: "fit": every ``train()`` is a task; "manual": you call ``callback.regularizer.consolidate()``.
        loader: Data on which EWC and MAS measure importance; the trainer's own training data if None.
        head: Maps the model's output to the task's logits.
        metric: Name of the evaluation metric (larger is better) whose distance from its best so far is the forgetting.
        resume_from: The checkpoint folder to resume from, if it is not in the output folder.
        gauge: Counts the steps; what it reports is logged, and its state is part of the checkpoints.

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
        metric: str = "accuracy",
        resume_from: str | Path | None = None,
        gauge: Gauge | None = None,
    ) -> None:
        self._keeper = TaskKeeper(regularizer, end_of_task, loader, head)
        self.metric = metric
        self.resume_from = resume_from
        self.gauge = gauge
        self._gauged: dict[str, float] = {}  # what was read since the last log
        self.best: dict[str, float] = {}  # each evaluation's metric at its best, over all tasks so far

    def join(self, trainer: Trainer) -> None:
        """Become the first of a trainer's callbacks, so that W&B, TensorBoard and others see what this one logs.

        Args:
            trainer: The trainer; this is in place of ``callbacks=[…]``.
        """
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(one for one in callbacks if one is not self)]

    # -- events ----------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._keeper.make(kwargs["model"])
        if state.global_step > 0:
            self._load(self._resumed_folder(args, state))
        self._keeper.begin([kwargs["optimizer"]])

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if isinstance(self.regularizer, KronALASSO):
            _check_head_told(self.regularizer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.gauge is not None and (found := self.gauge.step()):
            self._gauged = found
            control.should_log = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = _checkpoint_folder(args, state)
        if folder.is_dir() or not args.should_save:
            _write_state(self._state(), folder, writes=args.should_save)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The trainer restored the best weights; restore the path as it was there.
            self._load(Path(state.best_model_checkpoint))
        self._keeper.end(kwargs["train_dataloader"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, float] | None = kwargs.get("logs")
        if logs is None or not self._keeper.is_made:
            return
        added = self._forgetting(logs)
        if "loss" in logs and self.regularizer.tasks > 0:
            added["alasso_penalty"] = float(self.regularizer.penalty().detach())
        if "loss" in logs:
            added, self._gauged = added | self._gauged, {}
        logs.update(added)
        if state.log_history:  # it already holds a copy of the logs
            state.log_history[-1].update(added)

    # -- parts -----------------------------------------------------------------------------------------------

    def _forgetting(self, logs: dict[str, float]) -> dict[str, float]:
        """Return how far each evaluation's metric lies below its best so far."""
        found = {}
        for name, value in logs.items():
            if name.startswith("eval") and name.endswith(f"_{self.metric}"):
                self.best[name] = max(value, self.best.get(name, value))
                found[name.removesuffix(self.metric) + "forgetting"] = self.best[name] - value
        return found

    def _resumed_folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        """Return the folder to resume from, which the trainer does not pass to callbacks."""
        named = self.resume_from or getattr(args, "resume_from_checkpoint", None)
        return Path(named) if isinstance(named, str | Path) else _checkpoint_folder(args, state)

    def _load(self, folder: Path) -> None:
        if not _holds_state(folder):
            raise AlassoError(
                f"training resumes from a checkpoint, but {folder} holds no state of a regularizer; "
                "name the folder with resume_from=, or start again"
            )
        saved = _read_state(folder, like=self._state())
        if saved["weights"] != _fingerprint(self.regularizer):
            raise AlassoError(
                f"{folder} holds the state of a regularizer for other weights than training resumes with; "
                "name the right folder with resume_from="
            )
        self.regularizer.load_state_dict(saved["regularizer"])
        self.best = json.loads(saved["best"])
        if self.gauge is not None and (gauge := json.loads(saved.get("gauge", "null"))):
            self.gauge.load_state_dict(gauge)

    def _state(self) -> dict[str, Any]:
        return {
            "best": json.dumps(self.best),
            "gauge": json.dumps(None if self.gauge is None else self.gauge.state_dict()),
            "weights": _fingerprint(self.regularizer),
            "regularizer": self.regularizer.state_dict(),
        }


def _check_head_told(regularizer: KronALASSO) -> None:
    """Refuse to take the loss's unit from an inner layer of a language model, where it is another."""
    find = getattr(regularizer.model, "get_output_embeddings", None)
    head = None if find is None else find()
    if head is None or regularizer.scale != "fisher" or not regularizer.step_kind or regularizer.taps.was_told(head):
        return
    name = next((name for name, module in regularizer.model.named_modules() if module is head), "the output layer")
    raise AlassoError(
        f"{name} tells nothing of the loss's scale: it is frozen (LoRA), excluded, or a fused loss takes its weight "
        'alone (TRL, Liger, Unsloth); use KronALASSO(model, scale="path")'
    )


def _fingerprint(regularizer: Regularizer) -> str:
    """Return a text that differs if a protected weight differs in a bit; the same on every rank and device."""
    return " ".join(f"{_sum_of_bits(_full(parameter.detach())):x}" for _, parameter in regularizer.protected)


def _sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of all numbers read as integers, which, unlike a sum of floats, is the same in any order."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.contiguous().view(as_integers).sum(dtype=torch.int64))


def _full(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor; any other as it is."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint after the last step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return −log p of each sequence, where position t predicts token t + 1: ``warm_start(…, loss=causal_lm_loss)``.

    Args:
        logits: The language model's logits, (N, T, vocabulary).
        labels: Tokens, (N, T); the loss ignores -100.

    Returns:
        The losses, (N,).
    """
    tokens = F.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), labels[:, 1:], reduction="none", ignore_index=IGNORED
    )
    return tokens.sum(1)


def _write_state(state: dict[str, Any], folder: Path, *, writes: bool) -> None:
    """All ranks call this; those that ``writes`` is true for write what is not sharded."""
    if _any_sharded(state):
        save_shards(state, checkpoint_id=folder / FOLDER)
    elif writes:
        with whole_file(folder / FILE) as stream:
            Sink(stream).save(with_digest(state))


def _holds_state(folder: Path) -> bool:
    return (folder / FILE).is_file() or (folder / FOLDER).is_dir()


def _read_state(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What was saved; ``like`` has its structure, and is overwritten where the state was saved in shards."""
    if (folder / FILE).is_file():
        try:
            loaded: dict[str, Any] = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        except (OSError, *UNREADABLE) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # the disk's word, not the unzipper's
                raise
            raise AlassoError(f"{folder / FILE} is damaged; resume from another checkpoint") from error
        check_digest(loaded, str(folder / FILE))
        return loaded
    load_shards(like, checkpoint_id=folder / FOLDER)
    return like


def _any_sharded(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(_any_sharded(value) for value in state.values())
    return isinstance(state, DTensor)
