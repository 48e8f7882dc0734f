"""The Lightning callback, with the real trainer, against loops written by hand."""

import copy
import warnings

import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, IMM, MAS, SI, AlassoError, Gauge
from alasso._digest import digest_of

from helpers import mlp, run, same, toy_tasks, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say when they are imported
    L = pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
    from lightning.pytorch.plugins.precision import MixedPrecision

    from alasso.integrations.lightning import AlassoCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
TASKS = toy_tasks(3)


class Lit(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


class ByHand(Lit):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def trainer(*callbacks, epochs=1, **options):
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(max_epochs=epochs, callbacks=list(callbacks), **(defaults | options))


def data(task):
    return torch.utils.data.DataLoader(task, batch_size=None)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3)


def loop(net, task, reg, *, accumulate=1, clip=None, dtype=None, scaler=None):
    """What the trainer is expected to do in one fit, by hand."""
    optimizer = adam(net)
    reg.attach(optimizer)
    for start in range(0, len(task), accumulate):
        optimizer.zero_grad()
        for x, y in task[start : start + accumulate]:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(net(x), y) / accumulate
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
    reg.consolidate(task)
    reg.detach()


def half_precision():
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))


@pytest.mark.parametrize(
    ("module", "options", "hand"),
    [
        (Lit, {}, {}),
        (ByHand, {}, {}),
        (Lit, {"accumulate_grad_batches": 2}, {"accumulate": 2}),
        (Lit, {"gradient_clip_val": 0.1}, {"clip": 0.1}),
        (Lit, {"precision": "bf16-mixed"}, {"dtype": torch.bfloat16}),
        (Lit, {"plugins": "16-mixed", "gradient_clip_val": 0.5}, {"dtype": torch.float16, "clip": 0.5}),
    ],
    ids=["automatic", "manual", "accumulation", "clipping", "bf16-mixed", "16-mixed"],
)
def test_three_fits_are_bitwise_three_tasks_of_a_loop(module, options, hand):
    net = mlp(6, 12, 4)
    other = copy.deepcopy(net)
    keep, reg = AlassoCallback(ALASSO(net, c=5.0)), ALASSO(other, c=5.0)
    lit = module(net)
    for task in TASKS:
        scaled = {"plugins": half_precision()} if "plugins" in options else {}
        trainer(keep, **(options | scaled)).fit(lit, data(task))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        loop(other, task, reg, scaler=scaler, **hand)
    assert keep.regularizer.tasks == 3
    assert same(weights(net), weights(other))
    assert same(keep.regularizer.importance().values(), reg.importance().values())


@pytest.mark.parametrize("kind", [SI, EWC, MAS, IMM])
def test_other_methods_measure_on_the_trainers_own_data(kind):
    net = mlp(6, 12, 4)
    other = copy.deepcopy(net)
    keep, reg = AlassoCallback(kind(net)), kind(other)
    lit = Lit(net)
    for task in TASKS[:2]:
        trainer(keep).fit(lit, data(task))
        loop(other, task, reg)
    assert same(weights(net), weights(other))
    assert same(keep.regularizer.importance().values(), reg.importance().values())


@pytest.mark.parametrize("kind", [ALASSO, EWC])
def test_a_fit_that_was_interrupted_goes_on_bit_for_bit(kind, tmp_path):
    class Stop(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                raise KeyboardInterrupt

    def make(lit):
        return kind(lit.net)

    def fitted(path, *interruption):
        torch.manual_seed(1)
        lit = Lit(mlp(6, 12, 4))
        keep = AlassoCallback(make)
        trainer(keep).fit(lit, data(TASKS[0]))
        checkpoints = L.callbacks.ModelCheckpoint(dirpath=path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        second = trainer(keep, checkpoints, *interruption, epochs=4, enable_checkpointing=True)
        if interruption:
            with pytest.raises((SystemExit, KeyboardInterrupt)):
                second.fit(lit, data(TASKS[1]))
            assert not keep.regularizer.is_attached and keep.regularizer.tasks == 1
            # A new process would find nothing but the checkpoint.
            torch.manual_seed(99)
            lit = Lit(mlp(6, 12, 4))
            keep = AlassoCallback(make)
            trainer(keep, epochs=4).fit(lit, data(TASKS[1]), ckpt_path=path / "epoch=1.ckpt")
        else:
            second.fit(lit, data(TASKS[1]))
        trainer(keep).fit(lit, data(TASKS[2]))
        return lit, keep.regularizer

    whole, whole_reg = fitted(tmp_path / "whole")
    resumed, resumed_reg = fitted(tmp_path / "resumed", Stop())
    assert resumed_reg.tasks == whole_reg.tasks == 3
    assert same(weights(whole), weights(resumed))
    assert same(whole_reg.importance().values(), resumed_reg.importance().values())
    # Training was over when this was saved, but the task not yet consolidated: the fit makes up for it.
    late = Lit(mlp(6, 12, 4))
    keep = AlassoCallback(make)
    trainer(keep, epochs=4).fit(late, data(TASKS[1]), ckpt_path=tmp_path / "whole" / "epoch=3.ckpt")
    assert keep.regularizer.tasks == 2 and not keep.regularizer.is_attached


def test_a_fit_with_an_error_leaves_the_optimizer_as_it_was():
    class Broken(Lit):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("out of memory, say")
            return super().training_step(batch, batch_idx)

    lit = Broken(mlp(6, 12, 4))
    keep = AlassoCallback(ALASSO(lit))
    fit = trainer(keep)
    with pytest.raises(RuntimeError, match="say"):
        fit.fit(lit, data(TASKS[0]))
    assert not fit.optimizers[0]._optimizer_step_pre_hooks
    assert keep.regularizer.tasks == 0 and keep.regularizer.steps == 3


def test_the_user_may_say_when_a_task_ends():
    lit = Lit(mlp(6, 12, 4))
    keep = AlassoCallback(ALASSO(lit), end_of_task="manual")
    for task in TASKS[:2]:
        trainer(keep).fit(lit, data(task))
    assert keep.regularizer.tasks == 0 and keep.regularizer.steps == 16
    keep.regularizer.consolidate()
    assert keep.regularizer.tasks == 1


def test_an_optimizer_of_other_parameters_is_left_alone():
    class Two(Lit):
        automatic_optimization = False

        def __init__(self, net, critic):
            super().__init__(net)
            self.critic = critic

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx) + self.critic(batch[0]).square().mean()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return adam(self.net), adam(self.critic)

    lit = Two(mlp(6, 12, 4), mlp(6, 1))
    keep = AlassoCallback(ALASSO(lit, exclude="critic.*"))
    trainer(keep).fit(lit, data(TASKS[0]))
    assert keep.regularizer.tasks == 1 and set(keep.regularizer.importance()) == {
        f"net.{layer}.{slot}" for layer in (0, 2) for slot in ("weight", "bias")
    }
    with pytest.raises(AlassoError, match="none of the model's protected parameters"):
        trainer(AlassoCallback(ALASSO(mlp(6, 4)))).fit(Lit(mlp(6, 4)), data(TASKS[0]))


def test_the_penalty_is_logged(tmp_path):
    lit = Lit(mlp(6, 12, 4))
    keep = AlassoCallback(ALASSO(lit))
    for task in TASKS[:2]:
        fit = trainer(keep, logger=L.loggers.CSVLogger(tmp_path), log_every_n_steps=2)
        fit.fit(lit, data(task))
    assert float(fit.callback_metrics["alasso/penalty"]) > 0


def test_mistakes_are_named():
    with pytest.raises(AlassoError, match="end_of_task must be one of fit, manual, not 'epoch'"):
        AlassoCallback(ALASSO, end_of_task="epoch")
    for wrong in ("alasso", mlp(6, 4)):
        with pytest.raises(AlassoError, match="needs a regularizer such as ALASSO"):
            AlassoCallback(wrong)
    with pytest.raises(AlassoError, match="made when training begins"):
        _ = AlassoCallback(ALASSO).regularizer


def test_the_helper_loop_is_plain_training():
    """The reference of this file against that of the others."""
    net = mlp(6, 12, 4)
    other = copy.deepcopy(net)
    reg, other_reg = ALASSO(net), ALASSO(other)
    loop(net, TASKS[0], reg)
    optimizer = adam(other)
    other_reg.attach(optimizer)
    run(other, optimizer, TASKS[0])
    assert same(weights(net), weights(other))


def test_a_state_that_was_damaged_in_a_checkpoint_is_refused_and_nothing_changes():
    """Lightning writes the file and compares nothing when it reads it."""
    net = mlp(6, 12, 4)
    keep = AlassoCallback(ALASSO(net))
    trainer(keep).fit(Lit(net), data(TASKS[0]))
    saved, before = keep.state_dict(), digest_of(keep.regularizer.state_dict())
    keep.load_state_dict(copy.deepcopy(saved))
    for change in (
        lambda state: state["parameters"]["0.weight"]["omega"].view(-1)[3].add_(1e-3),
        lambda state: state.update(tasks=2),
        lambda state: state["settings"].update(c=1.5),
        lambda state: state["parameters"]["0.bias"].update(path=torch.zeros(3)),
    ):
        damaged = copy.deepcopy(saved)
        change(damaged)
        with pytest.raises(AlassoError, match="is damaged: it is not what was saved"):
            keep.load_state_dict(damaged)
    del damaged["digest"]
    with pytest.raises(AlassoError, match="has no digest"):
        keep.load_state_dict(damaged)
    assert digest_of(keep.regularizer.state_dict()) == before


class Numbers(L.loggers.logger.DummyLogger):
    """Keeps what a logger gets."""

    def __init__(self):
        super().__init__()
        self.got = []

    def log_metrics(self, metrics, step=None):
        self.got.append((step, metrics))


def test_the_loggers_get_a_gauges_values_and_the_training_stays_as_it_was():
    def trained(has_gauge):
        torch.manual_seed(0)
        net, numbers = mlp(6, 12, 4), Numbers()
        gauge = Gauge(net, every=2, report=None)
        keep = AlassoCallback(ALASSO(net), log_penalty=False, gauge=gauge if has_gauge else None)
        for i, task in enumerate(TASKS[:2]):
            trainer(keep, accumulate_grad_batches=2, logger=numbers, log_every_n_steps=1).fit(Lit(net), data(task))
            gauge.add(f"task{i}", task[:2])
        return weights(net), gauge, numbers.got

    plain, _, nothing = trained(False)
    gauged, gauge, told = trained(True)
    assert same(plain, gauged)
    assert gauge.steps == 8 and not any("gap/task0" in one for _, one in nothing)
    assert [(step, list(one)) for step, one in told if "gap/task0" in one] == [
        (step, ["loss/task0", "forgetting/task0", "gap/task0"]) for step in (2, 4)
    ]


def test_a_gauge_is_part_of_the_checkpoint(tmp_path):
    net = mlp(6, 12, 4)
    gauge = Gauge(net, every=2, report=None)
    keep = AlassoCallback(ALASSO(net), gauge=gauge)
    gauge.add("old", TASKS[0])
    lit = trainer(keep)
    lit.fit(Lit(net), data(TASKS[1]))
    lit.save_checkpoint(tmp_path / "one.ckpt")
    net = mlp(6, 12, 4)
    resumed = Gauge(net, every=2, report=None)
    keep = AlassoCallback(ALASSO(net), gauge=resumed)
    resumed.add("old", TASKS[0])
    trainer(keep, epochs=2).fit(Lit(net), data(TASKS[1]), ckpt_path=str(tmp_path / "one.ckpt"))
    assert resumed.steps == 16
    assert resumed._marks["old"].ended == gauge._marks["old"].ended
