"""What a language model forgets: trained from scratch on prose, then on Python, then on C++.

    python perf/language.py [--size tiny|small --steps 300 --seeds 1 --methods "plain;KronALASSO" --record]

The texts are those that every machine with Python and torch holds: licences and read-me files of the installed
packages, the standard library, torch's headers. Of each domain, a tenth of the files is held out. "small" is GPT-2's
smallest size, 124 M weights, for a GPU; its 50,257 tokens need `tokenizers`. The table tells, of each method, the loss
in nats a token on all three domains at the end, the share of plain training's forgetting on the first domain that it
prevented, and how much higher its loss on the last domain is than plain training's.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _measure import arguments, interleaved, keep, parsed, ratio, spread, table
from torch import Tensor, nn

import alasso

DOMAINS = ("prose", "Python", "C++")
SAMPLES = 256  # sequences on which EWC and a warm start measure
Batches = Iterator[Tensor]


@dataclass(frozen=True)
class Size:
    """Of a model, its batches and its training."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    tokens: int
    lr: float
    megabytes: float  # of text a domain


SIZES = {
    "tiny": Size(layers=2, width=128, heads=4, context=64, batch=16, tokens=256, lr=2e-3, megabytes=2),
    "small": Size(layers=12, width=768, heads=12, context=512, batch=16, tokens=50_257, lr=3e-4, megabytes=16),
}


# -- texts -----------------------------------------------------------------------------------------------------


def files_of(domain: str) -> list[Path]:
    packages, library = (Path(sysconfig.get_paths()[key]) for key in ("purelib", "stdlib"))
    found = {
        "prose": lambda: [p for name in ("METADATA", "LICENSE*", "*.md", "*.rst") for p in packages.rglob(name)],
        "Python": lambda: [p for p in library.rglob("*.py") if "site-packages" not in p.parts],
        "C++": lambda: Path(torch.__file__).parent.glob("include/**/*.h"),
    }
    return sorted(p for p in found[domain]() if p.is_file())


def texts(domain: str, megabytes: float) -> tuple[bytes, bytes]:
    """Returns what to train on, and what is held out; no file's text occurs twice."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    digests, size = set(), 0
    files = files_of(domain)
    random.Random(0).shuffle(files)
    for file in files:
        text = file.read_bytes()
        digest = hashlib.sha256(text).digest()
        if digest not in digests and size < 1e6 * megabytes:
            digests.add(digest)
            parts[digest[0] < 26].append(text)
            size += len(text)
    return b"\n".join(parts[False]), b"\n".join(parts[True])


def tokenized(domains: list[tuple[bytes, bytes]], tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the texts as bytes, or as tokens of an encoding learned on all of them."""
    if tokens == 256:
        return [(torch.frombuffer(bytearray(a), dtype=torch.uint8), torch.frombuffer(bytearray(b), dtype=torch.uint8))
                for a, b in domains]  # fmt: skip
    from tokenizers import ByteLevelBPETokenizer

    words = ByteLevelBPETokenizer()
    words.train_from_iterator((a.decode("utf-8", "replace") for a, _ in domains), vocab_size=tokens)
    return [tuple(torch.tensor(words.encode(t.decode("utf-8", "replace")).ids) for t in both) for both in domains]  # type: ignore[misc]


def sequences(text: Tensor, size: Size, seed: int, device: str) -> Batches:
    """Yields random pieces of a text, each one token longer than the context."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - size.context, (size.batch,), generator=generator)
        yield torch.stack([text[i : i + size.context + 1] for i in starts.tolist()]).long().to(device)


# -- the model -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer whose output layer has the words' own weight."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(size.tokens, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*[Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.tokens, bias=False)
        self.head.weight = self.words.weight
        for name, p in self.named_parameters():
            if p.dim() > 1:
                is_last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * size.layers) if is_last else 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """−log p of each sequence, for EWC and warm starts."""
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").sum(1)


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, size: Size, device: str, batches: int = 8) -> float:
    pieces = sequences(text, size, 1, device)
    return statistics.fmean(float(loss_of(model, next(pieces))) for _ in range(batches))


# -- the methods -----------------------------------------------------------------------------------------------

Make = Callable[[nn.Module], alasso.Regularizer]
METHODS: dict[str, Make | None] = {
    "plain": None,
    "KronALASSO": alasso.KronALASSO,
    "KronALASSO, path": lambda model: alasso.KronALASSO(model, scale="path"),
    "ALASSO": alasso.ALASSO,
    "EWC": lambda model: alasso.EWC(model, loss=losses),
    "LoRA": None,
    "LoRA, KronALASSO": alasso.KronALASSO,
}


class Training:
    """One method: a model, its regularizer, and losses on all domains over time."""

    def __init__(self, method: str, options: argparse.Namespace, texts: list[tuple[Tensor, Tensor]], seed: int) -> None:
        self.method, self.size, self.device = method, SIZES[options.size], options.device
        self.options, self.texts, self.seed = options, texts, seed
        torch.manual_seed(seed)
        self.model: nn.Module = GPT(self.size).to(self.device)
        self.is_lora = method.startswith("LoRA")
        make = METHODS[method]
        self.reg = make(self.model) if make is not None and not self.is_lora else None
        self.after: list[list[float]] = []  # losses on all domains, after each
        self.over_time: list[list[float]] = []  # the same, several times a domain

    def pairs(self, domain: int) -> list[tuple[Tensor, Tensor]]:
        """Some sequences of a domain and what follows each of their tokens."""
        pieces = sequences(self.texts[domain][0], self.size, 2, self.device)
        return [(p[:, :-1], p[:, 1:]) for p in (next(pieces) for _ in range(SAMPLES // self.size.batch))]

    def add_adapters(self) -> None:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["qkv", "out", "up", "down"])
        self.model = get_peft_model(self.model, adapters)  # type: ignore[assignment,arg-type]
        if (make := METHODS[self.method]) is not None:
            self.reg = make(self.model)
            self.reg.warm_start(self.pairs(0), loss=losses)

    def learn(self, domain: int) -> None:
        steps, size = self.options.steps, self.size
        if self.is_lora and domain == 1:
            self.add_adapters()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=size.lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.lr, steps, pct_start=0.1)
        if self.reg is not None:
            self.reg.attach(optimizer)
        batches = sequences(self.texts[domain][0], size, 100 * self.seed + domain, self.device)
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.startswith("cuda")):
                loss = loss_of(self.model, next(batches))
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            if step % max(steps // 5, 1) == 0:
                self.over_time.append(self.losses())
        if self.reg is not None:
            if isinstance(self.reg, alasso.EWC):
                self.reg.consolidate(self.pairs(domain))
            else:
                self.reg.consolidate()
            self.reg.detach()
        self.after.append(self.losses())

    def losses(self) -> list[float]:
        return [round(held_out_loss(self.model, text, self.size, self.device), 4) for _, text in self.texts]

    def bytes_a_weight(self) -> float:
        """Of the regularizer's state."""
        if self.reg is None:
            return 0.0
        states = self.reg.protected.states
        held = sum(t.numel() * t.element_size() for state in states.values() for t in state)
        return held / sum(state.anchor.numel() for state in states.values())

    def step(self) -> Callable[[], None]:
        """What one step more on the last domain takes."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.0)
        if self.reg is not None:
            self.reg.attach(optimizer)
        pieces = next(sequences(self.texts[-1][0], self.size, 3, self.device))

        def step() -> None:
            optimizer.zero_grad()
            loss_of(self.model, pieces).backward()
            optimizer.step()

        return step


def summed_up(found: dict[str, list[Training]]) -> dict[str, dict[str, Any]]:
    """Means over seeds of each method's figures, beside plain training's of the same seed."""
    summary: dict[str, dict[str, Any]] = {}
    for method, trainings in found.items():
        kept, price = [], []
        for mine, plain in zip(trainings, found["plain"], strict=True):
            forgot, plain_forgot = (t.after[-1][0] - t.after[0][0] for t in (mine, plain))
            kept.append(1 - forgot / plain_forgot)
            price.append(mine.after[-1][-1] / plain.after[-1][-1] - 1)
        summary[method] = {
            "after": [t.after for t in trainings],
            "over time": [t.over_time for t in trainings],
            "prevented": round(statistics.fmean(kept), 4),
            "price": round(statistics.fmean(price), 4),
            "bytes a weight": round(trainings[0].bytes_a_weight(), 3),
        }
    return summary


def main() -> None:
    parser = arguments(__doc__ or "", rounds=20)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=300, help="a domain")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", default=";".join(METHODS))
    options = parsed(parser)
    methods = ["plain", *(one for one in options.methods.split(";") if one != "plain")]
    size = SIZES[options.size]
    data = tokenized([texts(domain, size.megabytes) for domain in DOMAINS], size.tokens)
    weights = sum(p.numel() for p in GPT(size).parameters())
    print(f"{weights / 1e6:.2f} M weights; held out: {[len(text) for _, text in data]} tokens")
    found: dict[str, list[Training]] = {}
    for method in methods:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            training = Training(method, options, data, seed)
            for domain in range(len(DOMAINS)):
                training.learn(domain)
            print(method, seed, training.after, flush=True)
            found.setdefault(method, []).append(training)
    summary = summed_up(found)
    times = interleaved({method: found[method][0].step() for method in methods}, options.rounds, options.device)
    for method in methods:
        summary[method]["step"] = ratio(times, method, "plain")
    rows = [
        [
            method,
            *(f"{statistics.fmean(after[-1][j] for after in one['after']):.3f}" for j in range(len(DOMAINS))),
            f"{100 * one['prevented']:.0f} %",
            f"{100 * one['price']:+.1f} %",
            f"{one['bytes a weight']:.2f}",
            spread(one["step"]),
        ]
        for method, one in summary.items()
    ]
    columns = ["at the end", *DOMAINS, "prevented", "price", "bytes a weight", "step / plain"]
    table(f"loss of {weights / 1e6:.1f} M weights after {', '.join(DOMAINS)}", columns, rows)
    keep("language", options, {"weights": weights, "summary": summary})


if __name__ == "__main__":
    main()
