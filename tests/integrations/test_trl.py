"""TRL's trainers with the callback, with the real library: `make test-llm` installs it."""

import copy
import warnings

import pytest
import torch

from alasso import ALASSO, AlassoError, KronALASSO

from helpers import weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say when they are imported
    pytest.importorskip("trl", reason="needs the extra 'llm'")
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from alasso.integrations.huggingface import AlassoCallback

disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own
TEXTS = {
    "animals": ["the cat sat on the mat", "a dog ran in the park and back again", "birds sing"],
    "numbers": ["one and two are three", "two and two are four", "ten is more than nine or eight or seven"],
}


@pytest.fixture(scope="module")
def tokenizer():
    """Made on the spot: every word of the texts."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[EOS]"]
    words.train_from_iterator(
        [text for texts in TEXTS.values() for text in texts], trainers.WordLevelTrainer(special_tokens=special)
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]")


def gpt2(tokenizer):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **quiet, **ends))


def options(folder, **others):
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "bf16": False}
    return {
        "output_dir": str(folder),
        "learning_rate": 0.01,
        "adam_epsilon": 1e-4,
        "num_train_epochs": 2,
        **quiet,
        **others,
    }


def sft(model, tokenizer, texts, callbacks, folder, **others):
    data = Dataset.from_dict({"text": texts * 4})
    arguments = SFTConfig(**options(folder, **{"max_length": 16, "per_device_train_batch_size": 3, **others}))
    return SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)


def dpo(model, tokenizer, texts, callbacks, folder, reference=None, **others):
    """Prefers a text's own second half to that of the next."""
    halves = [(" ".join(words[:2]), " " + " ".join(words[2:])) for words in (text.split() for text in texts * 4)]
    prompts, chosen = zip(*halves, strict=True)
    data = Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": chosen[1:] + chosen[:1]})
    arguments = DPOConfig(**options(folder, per_device_train_batch_size=3, **others))
    trained = {"train_dataset": data, "processing_class": tokenizer, "callbacks": callbacks}
    return DPOTrainer(model, ref_model=reference or copy.deepcopy(model), args=arguments, **trained)


METHODS = {"KronALASSO": lambda model: KronALASSO(model, scale="path"), "ALASSO": ALASSO}
methods = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
WAYS = {
    "padded": {},
    "packed": {"packing": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "accumulated": {"gradient_accumulation_steps": 2},
}


@methods
@pytest.mark.parametrize("checkpoints", [False, True])
def test_sft_is_a_loop_of_tasks(make, checkpoints, tokenizer, tmp_path):
    """By hand, with the trainer's own loss on the batches that it used."""
    model = gpt2(tokenizer)
    other = copy.deepcopy(model)
    keep, reg = AlassoCallback(make), make(other)
    for texts in TEXTS.values():
        more = {"gradient_checkpointing": checkpoints, "lr_scheduler_type": "constant", "max_grad_norm": 0.5}
        trainer = sft(model, tokenizer, texts, [keep], tmp_path, **more)
        batches, collate = [], trainer.data_collator

        def recorded(samples, batches=batches, collate=collate):
            batches.append(collate(samples))
            return batches[-1]

        trainer.data_collator = recorded
        trainer.train()
        by_hand = sft(other, tokenizer, texts, [], tmp_path, gradient_checkpointing=False)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.0, eps=1e-4)
        reg.attach(optimizer)
        other.train()
        for batch in batches[:8]:
            optimizer.zero_grad()
            terms = (batch["labels"][:, 1:] != -100).sum()
            by_hand.compute_loss(other, dict(batch), num_items_in_batch=terms).backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            optimizer.step()
        reg.consolidate()
        reg.detach()
    assert keep.regularizer.tasks == 2
    for found, expected in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@methods
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_sft_forgets_less_with_the_callback(make, way, tokenizer, tmp_path):
    assert_forgets_less(sft, make, tokenizer, tmp_path, **way)


@methods
def test_dpo_forgets_less_with_the_callback(make, tokenizer, tmp_path):
    assert_forgets_less(dpo, make, tokenizer, tmp_path)


def assert_forgets_less(trainer_of, make, tokenizer, folder, **way):
    """The first texts' loss rises less."""
    losses = {}
    for name, callbacks in (("plain", []), ("protected", [AlassoCallback(make)])):
        model = gpt2(tokenizer)
        for texts in TEXTS.values():
            trainer = trainer_of(model, tokenizer, texts, callbacks, folder, gradient_checkpointing=False, **way)
            trainer.train()
        first = {"reference": gpt2(tokenizer)} if trainer_of is dpo else {}
        judge = trainer_of(model, tokenizer, TEXTS["animals"], [], folder, **first)
        losses[name] = judge.evaluate(judge.train_dataset)["eval_loss"]
    assert losses["protected"] < losses["plain"]


def test_a_head_that_the_trainer_takes_without_its_layer_is_refused(tokenizer, tmp_path):
    """The layer nearest to the loss would be another, in another unit."""
    trainer = sft(gpt2(tokenizer), tokenizer, TEXTS["animals"], [AlassoCallback(KronALASSO)], tmp_path)
    with pytest.raises(AlassoError, match=r'lm_head.*scale="path"'):
        trainer.train()
