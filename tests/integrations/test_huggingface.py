"""The callback for Hugging Face's Trainer, with the real trainer, against loops written by hand."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from alasso import ALASSO, EWC, MAS, AlassoError, Gauge
from alasso._digest import digest_of
from alasso.importance import fisher

from helpers import same, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say when they are imported
    transformers = pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
    pytest.importorskip("accelerate", reason="needs the extra 'huggingface'")
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from alasso.integrations import huggingface
    from alasso.integrations.huggingface import AlassoCallback, causal_lm_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
]
WORDS, LENGTH = 30, 6


def sentences(domain, count=32):
    """Sentences whose label is the parity of a sum, in another vocabulary for each domain."""
    generator = torch.Generator().manual_seed(domain)
    words = torch.randint(1 + 10 * domain, 11 + 10 * domain, (count, LENGTH), generator=generator)
    masks = torch.ones_like(words)
    masks[::3, -1] = 0
    return [{"input_ids": w, "attention_mask": m, "labels": int(w[0]) % 2} for w, m in zip(words, masks, strict=True)]


def bert():
    config = BertConfig(
        vocab_size=WORDS + 1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def arguments(folder, **options):
    defaults = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": 5e-3,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 2,
        "max_grad_norm": 0.5,
    }
    return TrainingArguments(output_dir=str(folder), **(defaults | options))


def accuracy(predictions):
    return {"accuracy": float(np.mean(predictions.predictions.argmax(1) == predictions.label_ids))}


class Recorder(TrainerCallback):
    """Batches as the model gets them."""

    def __init__(self):
        self.batches = []

    def __call__(self, samples):
        self.batches.append(transformers.default_data_collator(samples))
        return self.batches[-1]


def loop(model, batches, reg, *, accumulate=1, bf16=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reg.attach(optimizer)
    for start in range(0, len(batches), accumulate):
        for batch in batches[start : start + accumulate]:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            loss.backward()  # this trainer leaves it to the model's loss to average over accumulated batches
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    reg.consolidate(batches)
    reg.detach()


@pytest.mark.parametrize("kind", [ALASSO, EWC, MAS])
@pytest.mark.parametrize(
    ("options", "hand"),
    [({}, {}), ({"gradient_accumulation_steps": 2}, {"accumulate": 2}), ({"bf16": True}, {"bf16": True})],
    ids=["plain", "accumulation", "bf16"],
)
def test_trainings_are_tasks_of_a_loop(kind, options, hand, tmp_path):
    if kind is not ALASSO and hand:
        pytest.skip("the step is the same for all methods")
    model = bert()
    other = copy.deepcopy(model)
    keep, reg = AlassoCallback(kind(model)), kind(other)
    for domain in range(3):
        recorder = Recorder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer = Trainer(
            model,
            arguments(tmp_path, **options),
            train_dataset=sentences(domain),
            data_collator=recorder,
            optimizers=(optimizer, constant),
            callbacks=[keep],
        )
        trainer.train()
        assert not optimizer._optimizer_step_pre_hooks
        loop(other, recorder.batches[:4], reg, **hand)
    assert keep.regularizer.tasks == 3
    if kind is ALASSO:
        assert same(weights(model), weights(other))
        assert same(keep.regularizer.importance().values(), reg.importance().values())
    else:  # the pass over the data meets the samples in another order, so sums are rounded otherwise
        for name, omega in keep.regularizer.importance().items():
            torch.testing.assert_close(omega, reg.importance()[name], rtol=1e-3, atol=1e-6)


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_training_that_was_interrupted_goes_on_bit_for_bit(elsewhere, tmp_path):
    def trained(folder, interrupt):
        torch.manual_seed(3)
        model = bert()
        keep = AlassoCallback(ALASSO)
        first = arguments(folder / "first")
        Trainer(model, first, train_dataset=sentences(0), callbacks=[keep]).train()
        second = arguments(folder / "second", save_strategy="steps", save_steps=3, num_train_epochs=3)
        callbacks = [keep, StopAfter(8)] if interrupt else [keep]
        trainer = Trainer(model, second, train_dataset=sentences(1), callbacks=callbacks)
        if interrupt:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            # A new process would find nothing but the checkpoint, at step 6 of 12, in the middle of an epoch.
            torch.manual_seed(99)
            model = bert()
            checkpoint = folder / "second" / "checkpoint-6"
            if elsewhere:
                checkpoint = checkpoint.rename(folder / "moved")
            keep = AlassoCallback(ALASSO, resume_from=checkpoint if elsewhere else None)
            trainer = Trainer(model, second, train_dataset=sentences(1), callbacks=[keep])
            trainer.train(resume_from_checkpoint=str(checkpoint))
        else:
            trainer.train()
        return model, keep.regularizer

    whole, whole_reg = trained(tmp_path / "whole", False)
    resumed, resumed_reg = trained(tmp_path / "resumed", True)
    assert resumed_reg.tasks == whole_reg.tasks == 2
    assert same(weights(whole), weights(resumed))
    assert same(whole_reg.importance().values(), resumed_reg.importance().values())


def test_a_checkpoint_without_a_state_is_refused(tmp_path):
    model = bert()
    options = arguments(tmp_path, save_strategy="steps", save_steps=2)
    Trainer(model, options, train_dataset=sentences(0)).train()
    trainer = Trainer(model, options, train_dataset=sentences(0), callbacks=[AlassoCallback(ALASSO)])
    with pytest.raises(AlassoError, match="checkpoint-2 holds no state of a regularizer"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_penalty_and_forgetting_are_in_the_logs(tmp_path):
    model = bert()
    keep = AlassoCallback(ALASSO(model))
    evaluations = {f"domain{d}": sentences(d) for d in range(2)}
    seen = []
    for domain in range(2):
        trainer = Trainer(
            model,
            arguments(tmp_path, num_train_epochs=4),
            train_dataset=sentences(domain),
            eval_dataset=evaluations,
            compute_metrics=accuracy,
            callbacks=[keep],
        )
        trainer.train()
        seen.append(trainer.evaluate())
    penalties = [entry["alasso_penalty"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(penalties) == 8 and penalties[-1] > 0
    first, second = (metrics["eval_domain0_accuracy"] for metrics in seen)
    assert seen[1]["eval_domain0_forgetting"] == pytest.approx(max(first, second) - second)
    assert seen[1]["eval_domain1_forgetting"] >= 0
    assert any("eval_domain0_forgetting" in entry for entry in trainer.state.log_history)


def test_best_weights_come_with_the_path_that_led_to_them(tmp_path):
    model = bert()
    keep = AlassoCallback(ALASSO(model), end_of_task="manual")
    options = arguments(
        tmp_path,
        num_train_epochs=3,
        learning_rate=0.05,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer = Trainer(model, options, train_dataset=sentences(0), eval_dataset=sentences(1), callbacks=[keep])
    trainer.train()
    best = int(trainer.state.best_model_checkpoint.rsplit("-", 1)[1])
    assert best < trainer.state.global_step, "the test is of use only if the last weights are not the best"
    assert keep.regularizer.steps == best
    keep.regularizer.consolidate()
    assert keep.regularizer.tasks == 1


def test_fisher_of_a_language_model_counts_sequences():
    config = GPT2Config(vocab_size=11, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval().double()
    ids = torch.randint(0, 11, (3, LENGTH))
    found = fisher(model, [{"input_ids": ids, "labels": ids}], loss=causal_lm_loss)
    expected = torch.zeros_like(model.lm_head.weight)
    for row in ids:
        log_p = model(input_ids=row[None]).logits[0, :-1].float().log_softmax(1).gather(1, row[1:, None]).sum()
        expected += torch.autograd.grad(log_p, model.lm_head.weight)[0].square() / 3
    torch.testing.assert_close(found["transformer.wte.weight"], expected, rtol=1e-4, atol=1e-8)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch reads what a damaged file names
def test_a_damaged_state_is_refused_in_one_line_and_nothing_changes(tmp_path):
    keep = AlassoCallback(ALASSO(bert()))
    huggingface._write_state(keep._state(), tmp_path, writes=True)
    path = tmp_path / huggingface.FILE
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    content, before = path.read_bytes(), digest_of(keep.regularizer.state_dict())
    assert huggingface._read_state(tmp_path, like={})["best"] == "{}"
    rng, refused = random.Random(0), 0
    for _ in range(150):
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :])
        try:
            keep._load(tmp_path)  # a zip has bytes that nobody reads
        except AlassoError as error:
            assert "resume from another checkpoint" in str(error) and "\n" not in str(error)
            refused += 1
        assert digest_of(keep.regularizer.state_dict()) == before
    assert refused > 75
    cuts = [content[:size] for size in range(0, len(content), 499)]
    for damaged in (*cuts, content[:-100], content[100:], b"x" * 1000):
        path.write_bytes(damaged)
        with pytest.raises(AlassoError, match="damaged; resume from another checkpoint"):
            keep._load(tmp_path)
    torch.save(keep._state(), path)
    with pytest.raises(AlassoError, match="has no digest: it is damaged, or of an earlier version"):
        keep._load(tmp_path)


def gauged(model, **options):
    gauge = Gauge(model, every=3, report=None, **options)
    return gauge, AlassoCallback(ALASSO(model), gauge=gauge)


def held_out(domain):
    return [transformers.default_data_collator(sentences(domain, 16))]


class Reporter(TrainerCallback):
    """Takes what the trainer's reporters take: what stands in the logs when its turn comes."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


def test_a_gauge_is_in_the_logs_and_after_join_the_reporters_see_it(tmp_path):
    model = bert()
    gauge, keep = gauged(model)
    reporters = []
    for domain in range(2):
        reporters.append(Reporter())
        options = arguments(tmp_path, num_train_epochs=2, logging_steps=100)
        trainer = Trainer(model, options, train_dataset=sentences(domain), callbacks=[reporters[-1]])
        keep.join(trainer)
        trainer.train()
        gauge.add(f"domain{domain}", held_out(domain))
    assert gauge.steps == 16
    told = {step: logs for step, logs in reporters[1].logs if "loss/domain0" in logs}
    assert list(told) == [1, 4, 7]  # steps 9, 12 and 15 of all
    for step, logs in told.items():
        assert {"loss", "alasso_penalty", "loss/domain0", "forgetting/domain0", "gap/domain0"} <= logs.keys()
        assert any(entry["step"] == step and "gap/domain0" in entry for entry in trainer.state.log_history)
    assert not any("loss/domain0" in logs for _, logs in reporters[0].logs)
    assert trainer.callback_handler.callbacks[0] is keep
    keep.join(trainer)
    assert trainer.callback_handler.callbacks.count(keep) == 1


def test_a_training_with_a_gauge_is_bitwise_one_without(tmp_path):
    def trained(has_gauge):
        torch.manual_seed(3)
        model = bert()
        gauge, keep = gauged(model)
        keep.gauge = gauge if has_gauge else None
        for domain in range(2):
            trainer = Trainer(model, arguments(tmp_path), train_dataset=sentences(domain), callbacks=[keep])
            trainer.train()
            gauge.add("any", held_out(domain))
        return weights(model)

    assert same(trained(True), trained(False))


def test_a_gauge_goes_on_with_a_training_that_resumes(tmp_path):
    def trained(model, keep, resume):
        options = arguments(tmp_path, num_train_epochs=3, save_strategy="steps", save_steps=5, seed=1)
        trainer = Trainer(model, options, train_dataset=sentences(1), callbacks=[keep])
        trainer.train(resume_from_checkpoint=resume)
        return [{k: v for k, v in one.items() if "/" in k} for one in trainer.state.log_history if "gap/any" in one]

    model = bert()
    gauge, keep = gauged(model)
    gauge.add("any", held_out(0))
    whole = trained(model, keep, None)
    assert len(whole) == 4
    model = bert()  # other weights, which the gauge compares with nothing
    gauge, keep = gauged(model)
    gauge.add("any", held_out(0))
    assert trained(model, keep, str(tmp_path / "checkpoint-5")) == whole
    assert gauge.steps == 12


def test_tensorboard_gets_the_gauge(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tensorboard", reason="needs the extra 'tensorboard'")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    model = bert()
    gauge, keep = gauged(model)
    gauge.add("old", held_out(0))
    trainer = Trainer(model, arguments(tmp_path, report_to="tensorboard"), train_dataset=sentences(1))
    keep.join(trainer)
    trainer.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert [event.step for event in events.Scalars("train/forgetting/old")] == [3]
