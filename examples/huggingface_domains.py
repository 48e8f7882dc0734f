"""Hugging Face Trainer: a small transformer learns three domains, one after the other, with and without ALASSO.

The texts are made up: a domain has some words of its own for each topic, and uses the words that all domains share in
its own sense. A text of 12 words has one of the former and 11 of the latter; the topic is to be told.
In a clone: pip install '.[huggingface]' && python examples/huggingface_domains.py [--seeds 0 1 2] [--out figures.json]
"""

import argparse
import json
import os
import random
import tempfile
from pathlib import Path

import transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from alasso import ALASSO
from alasso.integrations.huggingface import AlassoCallback

DOMAINS, TOPICS, SHARED, OWN, LENGTH = ("films", "food", "travel"), 6, 120, 5, 12


def texts(domain: int, seed: int, train: int = 1000, test: int = 500) -> tuple[list[dict], list[dict]]:
    chance = random.Random(1000 * seed + domain)
    sense = [chance.randrange(TOPICS) for _ in range(SHARED)]  # what a shared word is about in this domain
    first_own = 1 + SHARED + domain * TOPICS * OWN

    def text() -> dict:
        topic = chance.randrange(TOPICS)
        own = first_own + topic * OWN + chance.randrange(OWN)
        words = [own, *chance.choices([1 + w for w in range(SHARED) if sense[w] == topic], k=LENGTH - 1)]
        return {"input_ids": chance.sample(words, LENGTH), "labels": topic}

    return [text() for _ in range(train)], [text() for _ in range(test)]


def accuracy(outcome):
    return {"accuracy": float((outcome.predictions.argmax(1) == outcome.label_ids).mean())}


def learn_three_domains(seed: int, protect: bool) -> list[float]:
    """Accuracy on each domain after the last one."""
    set_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    words = 1 + SHARED + len(DOMAINS) * TOPICS * OWN
    model = BertForSequenceClassification(BertConfig(vocab_size=words, num_labels=TOPICS, **sizes))
    data = {name: texts(number, seed) for number, name in enumerate(DOMAINS)}
    callbacks = [AlassoCallback(ALASSO(model, c=3.0, xi=1e-3))] if protect else []
    with tempfile.TemporaryDirectory() as folder:
        options = {"learning_rate": 2e-3, "lr_scheduler_type": "constant", "num_train_epochs": 4, "seed": seed}
        quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}
        batch = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 500}
        arguments = TrainingArguments(folder, use_cpu=True, **options, **quiet, **batch)
        trainer = Trainer(model, arguments, compute_metrics=accuracy, callbacks=callbacks)
        for train, _ in data.values():
            trainer.train_dataset = train
            trainer.train()
        return [trainer.evaluate(test)["eval_accuracy"] for _, test in data.values()]


def main(seeds: list[int]) -> dict:
    figures: dict = {"transformers": transformers.__version__, "seeds": seeds, "plain": [], "alasso": []}
    for seed in seeds:
        for name in ("plain", "alasso"):
            figures[name].append(learn_three_domains(seed, protect=name == "alasso"))
            print(f"seed {seed}  {name:7}" + "  ".join(f"{a:.3f}" for a in figures[name][-1]), flush=True)
    for name in ("plain", "alasso"):
        figures[f"mean_{name}"] = sum(map(sum, figures[name])) / len(DOMAINS) / len(seeds)
    print(f"mean over domains: plain {figures['mean_plain']:.3f}, ALASSO {figures['mean_alasso']:.3f}")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    chosen = parser.parse_args()
    chosen.out.write_text(json.dumps(main(chosen.seeds), indent=1) + "\n")
