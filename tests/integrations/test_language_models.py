"""Language models as people train them: padding, packing, checkpoints, half precision, accelerate, 8-bit optimizers."""

import copy
import warnings

import pytest
import torch
from torch import nn

from alasso import ALASSO, KronALASSO

from helpers import same, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what other libraries say when they are imported
    pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'huggingface'")
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WORDS, PAD, IGNORED = 20, 0, -100
methods = pytest.mark.parametrize("kind", [KronALASSO, ALASSO])


def gpt2(**options):
    """Its output layer has the embedding's weight."""
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32, "attn_implementation": "eager"}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **quiet, **options)).double()


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": PAD}  # its embedding knows the padding
    config = LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, attn_implementation="eager", **sizes, **ends)
    return LlamaForCausalLM(config).double()


def sentences(seed, count=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, WORDS, (length,), generator=generator) for length in range(3, 3 + 2 * count, 2)]


def padded(sentences, side="right"):
    length = max(map(len, sentences))

    def filled(value, rows):
        blank = [row.new_full((length - len(row),), value) for row in rows]
        both = zip(rows, blank, strict=True) if side == "right" else zip(blank, rows, strict=True)
        return torch.stack([torch.cat(parts) for parts in both])

    mask = filled(0, [torch.ones_like(one) for one in sentences])
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return {
        "input_ids": filled(PAD, sentences),
        "attention_mask": mask,
        "position_ids": places,
        "labels": filled(IGNORED, answers_of(sentences)),
    }


def packed(sentences):
    """One row; positions begin again with each sentence."""
    places = torch.cat([torch.arange(len(one)) for one in sentences])
    labels = torch.cat(answers_of(sentences))
    return {"input_ids": torch.cat(sentences)[None], "position_ids": places[None], "labels": labels[None]}


def answers_of(sentences):
    """Labels; nothing predicts a sentence's first word."""
    labels = [one.clone() for one in sentences]
    for one in labels:
        one[0] = IGNORED
    return labels


def trained(model, batches_of, kind=KronALASSO):
    """A regularizer after two tasks; ``batches_of(task)`` gives lists of micro-batches, and a step is on a list."""
    reg = kind(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    reg.attach(optimizer)
    for task in range(2):
        for micro_batches in batches_of(task):
            optimizer.zero_grad()
            terms = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in micro_batches)
            for batch in micro_batches:
                model(**batch, num_items_in_batch=terms, use_cache=False).loss.backward()
            optimizer.step()
        reg.consolidate()
    return reg


def assert_alike(one, other):
    """To the precision of Llama's norms, which compute in float32 whatever the model's."""
    for found, expected in zip(weights(one.model), weights(other.model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for name, expected in other.importance().items():
        scale = float(expected.max())
        torch.testing.assert_close(one.importance()[name] / scale, expected / scale, rtol=1e-3, atol=1e-5)


def one_by_one(task):
    return [[padded([one]) for one in sentences(10 * task + step)] for step in range(3)]


@methods
@pytest.mark.parametrize("make, side", [(gpt2, "right"), (gpt2, "left"), (llama, "right")])
def test_padding_changes_nothing(make, kind, side):
    batches = [[[padded(sentences(10 * task + step), side)] for step in range(3)] for task in range(2)]
    assert_alike(trained(make(), batches.__getitem__, kind), trained(make(), one_by_one, kind))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_packed_sentences_are_those_in_rows_of_their_own(make):
    batches = [[[packed(sentences(10 * task + step))] for step in range(3)] for task in range(2)]
    assert_alike(trained(make(), batches.__getitem__, ALASSO), trained(make(), one_by_one, ALASSO))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_row_of_packed_sentences_is_one_sample_of_as_many_terms(make):
    """What its positions have in common is measured over the row, so strength differs a little; the unit does not."""
    batches = [[[packed(sentences(10 * task + step))] for step in range(3)] for task in range(2)]
    one, other = trained(make(), batches.__getitem__), trained(make(), one_by_one)
    for name, state in one.protected.states.items():
        torch.testing.assert_close(state.below, other.protected.states[name].below, rtol=1e-2, atol=0)
        ratio = float(one.importance()[name].sum() / other.importance()[name].sum())
        assert 0.5 < ratio < 2, (name, ratio)


@methods
def test_prompts_that_the_loss_ignores_need_no_other_strength(kind):
    """Of the same answers, as many prompts: the unit of the loss is that of the answers."""

    def answers(task):
        batches = one_by_one(task)
        for batch in (batch for step in batches for batch in step):
            batch["labels"][:, :2] = IGNORED
        return batches

    reg = trained(gpt2(), answers, kind)
    assert reg.tasks == 2
    if kind is KronALASSO:
        below = {float(state.below) for state in reg.protected.states.values()}
        assert all(1.5 < unit < 2.5 for unit in below)  # of two tasks, each about 1 at first


@methods
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(kind, use_reentrant):
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model.train()
    assert_alike(trained(model, one_by_one, kind), trained(gpt2().train(), one_by_one, kind))


@methods
def test_weights_in_bfloat16_have_a_state_in_float32(kind):
    reg = trained(gpt2().bfloat16(), one_by_one, kind)
    anchors = torch.bfloat16 if kind is KronALASSO else torch.float32
    for state in reg.protected.states.values():
        assert state.anchor.dtype == anchors and {t.dtype for t in state[1:]} <= {torch.float32, torch.int8}
    assert all(omega.isfinite().all() and omega.any() for omega in reg.importance().values())


@methods
def test_a_tied_embedding_is_protected_once_under_its_first_name(kind):
    names = list(kind(gpt2()).importance())
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(list(gpt2().parameters()))


@methods
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_a_loop_with_accelerate(kind):
    batches = [padded(sentences(seed)) for seed in range(6)]

    def in_twos(task):
        return [batches[start : start + 2] for start in (0, 2, 4)]

    model = gpt2()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    reg = kind(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    reg.attach(optimizer)
    for task in range(2):
        for micro_batches in in_twos(task):
            terms = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in micro_batches)
            for batch in micro_batches:
                with accelerator.accumulate(prepared):
                    accelerator.backward(2 * prepared(**batch, num_items_in_batch=terms).loss)
                    optimizer.step()
                    optimizer.zero_grad()
        reg.consolidate()
    assert_alike(reg, trained(gpt2(), in_twos, kind))


@methods
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit", "Lion8bit"])
def test_optimizers_of_bitsandbytes(kind, name):
    """Their state has eight bits; gradient and move are as any optimizer's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bnb = pytest.importorskip("bitsandbytes", reason="needs the extra 'llm'")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 256), nn.Flatten(), nn.Linear(512, 16), nn.Tanh(), nn.Linear(16, WORDS))
    other = copy.deepcopy(model)
    reg = kind(model, c=10.0)
    optimizer, its_optimizer = (getattr(bnb.optim, name)(m.parameters(), lr=0.01) for m in (model, other))
    reg.attach(optimizer)
    x = torch.randint(WORDS, (16, 2), generator=torch.Generator().manual_seed(0))
    before, moved = weights(model), []
    for task in range(2):
        for _ in range(5):
            for m, o in ((model, optimizer), (other, its_optimizer)):
                o.zero_grad()
                nn.functional.cross_entropy(m(x), (x[:, 0] + task) % WORDS).backward()
                o.step()
        if task == 0:
            assert same(weights(model), weights(other))  # nothing has a past
            before = weights(model)
            reg.consolidate()
    for m in (model, other):
        moved.append(sum(float((w - b).square().sum()) for w, b in zip(weights(m), before, strict=True)))
    assert 0 < moved[0] < moved[1]
