"""What `make fuzz` reads, and how it changes good files; see ``fuzz.py``. Inputs depend on a seed alone."""

from __future__ import annotations

import copy
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alasso.bench import probe, results
from alasso.bench.config import RunConfig, from_toml
from alasso.errors import AlassoError

from made_up import CLAIMS, EXPERIMENT, PROBE, small_paper
from report_helpers import LOG, made_up, measured

Ready = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # makes an input from randomness; reads it


@dataclass(frozen=True)
class Reader:
    """A reader: how it is made ready in a folder, and how many inputs a whole run gives it."""

    ready: Callable[[Path], Ready]
    inputs: int


# -- odd values -----------------------------------------------------------------------------------------------------

DEEP: list[Any] = []
for _ in range(40):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1.5, 1e-320, 1e38, 1e300, -1e300, 2**31, 2**32, 2**63, -(2**63) - 1,
    10**30, 10**400, "", "x", "0.5", "\x00", "a/b", "../../etc", "\u202e", "é" * 50, "x" * 2000, "1" * 5000,
    "$\\frac{", "<b>", "%s", [], {}, [[]], [None], [0.5], [0.5, "x"], [[0.5]], {"a": 1}, {"": {}},
    {"a": {"a": {"a": []}}}, DEEP, [0] * 300,
    "si", "alasso", "permuted-digits", "split-folder", "module:function",
)  # fmt: skip
RAW = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 400, "1" + "0" * 6000, "[" * 100_000,
    "[" * 3000 + "]" * 3000, '{"a":' * 2000, '"\\ud800"', '"\\u0000"', "0x1", "01", "--1", "1.", "'x'", "", ",",
    "}", "]", '"',
)  # fmt: skip
NAMES = (
    "settings",
    "config",
    "metrics",
    "schema",
    "a",
    "c",
    "tasks",
    "seed",
    "path",
    "model",
    "",
    "__class__",
    "I",
    "A",
    "é",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all parts of a nesting, a few of each long list."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for key in range(min(len(value), 4)):
            found += places(value[key], (*path, key))
    return found


def changed(good: Any, chance: Any, odd: tuple[Any, ...] = ODD) -> Any:
    """A copy with one to three changes of its structure."""
    found = copy.deepcopy(good)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        path = chance.choice(places(found))
        if not path:
            if chance.random() < 0.02:
                found = copy.deepcopy(chance.choice(odd))
            continue
        holder = found
        for key in path[:-1]:
            holder = holder[key]
        change(holder, path[-1], found, chance, odd)
    return found


def change(holder: Any, key: Any, whole: Any, chance: Any, odd: tuple[Any, ...]) -> None:
    """One change of one part."""
    kind = chance.randrange(8)
    if kind <= 3:
        holder[key] = copy.deepcopy(chance.choice(odd))
    elif kind == 4:
        del holder[key]
    elif kind == 5:
        part = whole
        for step in chance.choice(places(whole)):
            part = part[step]
        holder[key] = copy.deepcopy(part)
    elif isinstance(holder, dict):
        holder[chance.choice(NAMES)] = holder[key] if kind == 6 else copy.deepcopy(chance.choice(odd))
    elif kind == 6:
        holder.insert(key, copy.deepcopy(chance.choice(odd)))
    else:
        del holder[chance.randrange(len(holder)) :]


def scrambled(content: bytes, chance: Any) -> bytes:
    """A copy with a few bytes changed, put in, taken out, moved or cut off."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(found) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif kind == 2:
            found[at:at] = chance.randbytes(chance.choice((1, 2, 4, 16)))
        elif kind == 3:
            del found[at : at + chance.choice((1, 2, 4, 16, 200))]
        elif kind == 4:
            other = chance.randrange(len(found) + 1)
            found[at:at] = found[other : other + chance.choice((4, 16, 64))]
        elif chance.random() < 0.3:
            del found[at:]
    return bytes(found)


def as_json(value: Any, chance: Any) -> bytes:
    """JSON that may be none: odd words for a value, something twice, bytes changed."""
    text = json.dumps(value)
    draw = chance.random()
    if draw < 0.12:
        spots = [spot.span() for spot in re.finditer(r"-?\d[\d.e+-]*|\"[^\"]*\"|null", text)]
        if spots:
            start, end = chance.choice(spots)
            text = text[:start] + chance.choice(RAW) + text[end:]
    elif draw < 0.18:
        text = re.sub(r'("\w+": )', r"\1 0, \1", text, count=1 + chance.randrange(3))
    content = text.encode(errors="surrogatepass")
    return scrambled(content, chance) if draw > 0.85 else content


TOML_ODD = (
    "1" + "0" * 400, "1" + "0" * 6000, "-1", "0", "1e400", "inf", "nan", "-inf", "true", '""', '"x"', "[]", "{}",
    "[[1]]", "1979-05-27", "07:32:00", "[1, 2, 3]", '["si", "sgd"]', "[" * 3000 + "]" * 3000, "{a = {a = {}}}", "a.b",
    "0x7fffffffffffffff",
    "9" * 30, '"\\u0000"', "'''x'''", '"x/y"', "a" + ".a" * 20_000 + " = 1", "1.5", "10", '"' + "x" * 5000 + '"',
)  # fmt: skip


def toml_changed(text: str, chance: Any) -> bytes:
    """A TOML file with odd values, lines lost, twice or elsewhere, and bytes changed."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        lines = text.split("\n")
        at = chance.randrange(len(lines))
        kind = chance.randrange(8)
        if kind <= 3:
            spots = [
                s.span() for s in re.finditer(r"(?<=[=\[, ])\s*(\"[^\"]*\"|[\d.]+|true|\{[^}]*\}|\[[^\]]*\])", text)
            ]
            if spots:
                start, end = chance.choice(spots)
                text = text[:start] + " " + chance.choice(TOML_ODD) + text[end:]
                continue
        elif kind == 4:
            del lines[at]
        elif kind == 5:
            lines.insert(at, chance.choice(lines))
        elif kind == 6:
            lines.insert(at, f"{chance.choice(NAMES) or 'x'} = {chance.choice(TOML_ODD)}")
        else:
            lines[at] = re.sub(r"\w+", lambda word: chance.choice(NAMES) or word[0], lines[at], count=1)
        text = "\n".join(lines)
    content = text.encode(errors="surrogatepass")
    return scrambled(content, chance) if chance.random() < 0.2 else content


# -- results, notes, probes, searches, logs ----------------------------------------------------------------------------


def file_reader(name: str, good: list[Any], read: Callable[[Path], Any]) -> Callable[[Path], Ready]:
    """A reader of one JSON file by its path."""

    def ready(folder: Path) -> Ready:
        path = folder / name

        def make(chance: Any) -> bytes:
            content = as_json(changed(chance.choice(good), chance), chance)
            return (
                (scrambled if chance.random() < 0.1 else lambda same, _: same)(lzma.compress(content, preset=0), chance)
                if (name.endswith(".xz"))
                else content
            )

        def reader(content: bytes) -> Any:
            path.write_bytes(content)
            return read(path)

        return make, reader

    return ready


def some_results() -> list[Any]:
    return [
        made_up("si", tasks=2).to_json(),
        made_up(tasks=3).to_json(),
        made_up("alasso-memory", tasks=2, memory=3).to_json(),
    ]


def read_again(path: Path) -> None:
    """What is taken can be written, and is the same when it is read again."""
    first = results.read(path)
    again = results.read(results.write(first, path.parent / "again"))
    if again != first:
        raise AssertionError("it is another result when it is read again")


def on_a_page(path: Path) -> None:
    from alasso.bench.report import page
    from alasso.bench.report.sections import collect

    results.write(made_up("sgd", tasks=2), path.parent)
    page.build(collect([path.parent])).encode()
    if len(results.read_file(path)) == 1:
        results.read(path)


def compared(path: Path) -> None:
    from rich.console import Console

    from alasso.bench.report import compare

    other = results.write(made_up("sgd", tasks=2), path.parent / "other")
    columns, _ = compare.columns_of([path, other])
    console = Console(file=io.StringIO(), width=100)
    for one in compare.comparisons(columns):
        console.print(compare.table(one))
        console.print(compare.explanation(one), markup=False)


def reproduced(name: str, good: list[Any]) -> Callable[[Path], Ready]:
    """The reader of a folder of results, and the verdicts on what it finds."""

    def ready(folder: Path) -> Ready:
        from alasso.bench.reproduce.claims import judge_all, read_claims
        from alasso.bench.reproduce.experiments import Evidence, read_experiments
        from alasso.bench.reproduce.plan import make_plan

        paper = small_paper(folder / "paper")
        experiments = read_experiments(paper)
        claims, _ = read_claims(paper, experiments)

        def read(path: Path) -> None:
            found = Evidence.of_folder(experiments, path.parent)
            judge_all(claims, found)
            make_plan(experiments.values(), found)

        own = [{**one, "config": experiments["small"].config("si").to_json()} for one in good] if good else []
        make, reader = file_reader(name, own or good, read)(folder)
        return make, reader

    return ready


def some_notes() -> list[Any]:
    return [
        {
            "config": made_up("si", tasks=2).config.to_json(),
            "task": 2,
            "why": "it grew",
            "environment": {"cpu": "abacus"},
        }
    ]


def some_probes() -> list[Any]:
    one = measured([[1.5, 1.0, 3.0], [1.0, 1.0, 1.0]], config=made_up(tasks=2).config.to_json())
    return [asdict(one)]


def probe_drawn(path: Path) -> None:
    found = probe.read(path)
    found.statement()
    for method in probe.SURROGATES:
        found.surrogate(method)


def some_searches() -> list[Any]:
    row = {"c": 1.0, "xi": 0.1, "A": 0.9, "A_of_seeds": [0.9]}
    searched = {
        "space": {"c": [1.0, 3.0], "xi": [0.1]},
        "tried": [row, {**row, "c": 3.0, "A": 0.8}],
        "run": {"tasks": 2},
        "seeds": [0],
        "environment": {},
        "earlier": [{}],
    }
    chosen = {"si": {"c": 1.0, "xi": 0.1}}
    return [
        {"schema": 1, "benchmark": "permuted-digits", "measured_on": "x", "chosen": chosen, "methods": {"si": searched}}
    ]


def searched(path: Path) -> None:
    from alasso.bench.training import search, sweep

    chosen = search.chosen_settings(path, "permuted-digits")
    outcome = search._read(path, "permuted-digits")
    for method in outcome["chosen"]:
        if method in outcome["methods"] and outcome["methods"][method]["tried"]:
            before = outcome["methods"][method]
            again = copy.deepcopy(some_searches()[0]["methods"]["si"])
            if search._alike(before, again):
                search._with_earlier(before, again)
    sweep.combinations("permuted-digits", ["si", "alasso"], [0], {}, {}, chosen)


def log(folder: Path) -> Ready:
    from alasso.bench.report.watch import running

    path = folder / "permuted-digits_si_0123456789_s2.csv"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for progress in running(folder):
            json.dumps(asdict(progress), allow_nan=False)

    return lambda chance: scrambled(LOG.encode(), chance), read


# -- TOML --------------------------------------------------------------------------------------------------------------

RUN = """benchmark = "permuted-digits"
method = ["si", "alasso"]
seed = [0, 1]
tasks = 3
epochs = 1
learning_rate = 0.001
hidden = 8
optimizer = "adam"
[settings]
c = [0.5, 1.0]
xi = 0.1
"""


def toml_run(folder: Path) -> Ready:
    from alasso.bench.cli.run import asked_for

    path = folder / "run.toml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        from_toml(path)
        asked_for("permuted-digits", path, None, None, {}, {}, {})

    return lambda chance: toml_changed(RUN, chance), read


def toml_experiment(folder: Path) -> Ready:
    from alasso.bench.reproduce.experiments import read_experiments

    (folder / "experiments").mkdir()

    def read(content: bytes) -> None:
        (folder / "experiments" / "small.toml").write_bytes(content)
        for one in read_experiments(folder).values():
            one.configs()

    return lambda chance: toml_changed(chance.choice((EXPERIMENT, PROBE)), chance), read


def toml_claims(folder: Path) -> Ready:
    from alasso.bench.reproduce.claims import judge_all, read_claims
    from alasso.bench.reproduce.experiments import Evidence, read_experiments

    paper = small_paper(folder / "paper")
    experiments = read_experiments(paper)
    evidence = Evidence.of_folder(experiments, folder / "nothing")

    def read(content: bytes) -> None:
        (paper / "claims.toml").write_bytes(content)
        claims, _ = read_claims(paper, experiments)
        for one in judge_all(claims, evidence):
            one.claim.bar()
            one.claim.of_paper()

    return lambda chance: toml_changed(CLAIMS, chance), read


# -- states and checkpoints --------------------------------------------------------------------------------------------


def odd_tensors() -> tuple[Any, ...]:
    import torch

    ordinary = (
        torch.tensor(0.5), torch.zeros(0), torch.zeros(3), -torch.ones(4, 6), torch.full((4, 6), torch.nan),
        torch.full((4,), torch.inf), torch.ones(4, 6, dtype=torch.complex64), torch.ones(4, 6, dtype=torch.bool),
        torch.ones(4, 6, dtype=torch.int64),
        torch.ones(4, 6, dtype=torch.float64), torch.ones(6, 4).T, torch.ones(1, 1).expand(4, 6),
        torch.full((4, 6), 3e38),
        torch.ones(4, 6, device="meta"), torch.ones(4, 6).to_sparse(),
        torch.quantize_per_tensor(torch.ones(4, 6), 0.1, 0, torch.quint8),
        torch.ones(4, 6).half(), torch.ones(4).bfloat16(), torch.full((4,), -1.0),
    )  # fmt: skip
    return (*ODD, *ordinary, *ordinary)


def state(method: str) -> Callable[[Path], Ready]:
    """The reader of one method's states: refused without a change, or taken, with a penalty that is a number."""

    def ready(folder: Path) -> Ready:
        import torch

        import alasso

        from helpers import mlp, run, toy_tasks

        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = mlp(6, 4, 4)
        regularizer = getattr(alasso, method)(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = toy_tasks(1, batches=3)[0]
        with regularizer.attach(optimizer):
            run(model, optimizer, batches)
        takes_data = method in ("EWC", "OnlineEWC", "MAS") or (
            method == "IMM" and "mode" in str(regularizer.settings())
        )
        regularizer.consolidate(batches) if takes_data else regularizer.consolidate()
        good, odd = regularizer.state_dict(), odd_tensors()

        def read(saved: Any) -> None:
            try:
                regularizer.load_state_dict(saved)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.01)
                    penalty = float(regularizer.penalty())
                    for parameter in model.parameters():
                        parameter.sub_(0.01)
                if not 0 <= penalty < float("inf"):
                    raise AssertionError(f"taken, with a penalty that is {'negative' if penalty < 0 else 'not finite'}")
            finally:
                regularizer.load_state_dict(copy.deepcopy(good))

        return lambda chance: changed(good, chance, odd), read

    return ready


def checkpoint(folder: Path) -> Ready:
    """Checkpoints of other structure, written whole; what is taken is trained on for two steps."""
    import torch

    from alasso.bench.training import checkpoint as saving
    from alasso.bench.training import run as train
    from alasso.bench.training.progress import Observer

    from helpers import StopAt
    from run_helpers import CPU, begun, small

    torch.set_num_threads(1)
    config = small("si", epochs=1, hidden=4, tasks=2)
    path = folder / "x.checkpoint"
    learner = begun(config)
    with_steps = train.Trainer(learner, saving.Position(), Observer(), path, 1e9, StopAt(3))
    with suppress(train.Stopped):
        with_steps.train()
    good = {"learner": saving.copied_to_host(learner.state_dict()), "position": asdict(with_steps.at)}
    stream, odd = learner.stream, odd_tensors()

    class Saved:
        def __init__(self, state: Any) -> None:
            self.config, self.stream, self.device, self.state = config, stream, CPU, state

        def state_dict(self) -> Any:
            return self.state

    def read(content: Any) -> None:
        for old in folder.glob("*x.checkpoint*"):
            old.unlink()
        writer = saving.Writer()
        try:
            writer.save(path, saving.Position(**content["position"]), Saved(content["learner"]))  # type: ignore[arg-type]
            writer.finish()
        except Exception as error:  # it cannot be written: no input
            raise AlassoError("no file") from error
        fresh = begun(config, stream)
        if hasattr(saving, "restore"):
            position = saving.restore(path, fresh)
        else:
            position, state = saving.load(path, config, CPU, dict(stream.editions))
            fresh.load_state_dict(state)
        with suppress(train.Stopped):
            train.Trainer(fresh, position, Observer(), path, 1e9, StopAt(2)).train()

    return lambda chance: changed(good, chance, odd), read


# -- data --------------------------------------------------------------------------------------------------------------


def packed_data(folder: Path) -> Ready:
    from alasso.bench.data import files

    from data_helpers import IDX_FILES, data_file

    content = IDX_FILES["train-images"]
    entry = data_file("images", content)
    good = (
        content,
        gzip.compress(content, mtime=0),
        gzip.compress(content[:40], mtime=0) + gzip.compress(content[40:], mtime=0),
    )

    def read(given: bytes) -> None:
        path = folder / "images.gz"
        path.write_bytes(given)
        report, found = files.inspect(entry, folder)
        if report.status == "ok":
            files._parse_idx(found)
            if found != content:
                raise AssertionError("other content was taken for the published one")

    return lambda chance: scrambled(chance.choice(good), chance), read


def archive(folder: Path) -> Ready:
    import shutil

    from alasso.bench.data import files

    def tarred(**more: Any) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", **more) as opened:
            for name in ("data/a", "data/" + "b" * 150):
                one = tarfile.TarInfo(name)
                one.size = 40
                one.pax_headers = {"comment": "x"}
                opened.addfile(one, io.BytesIO(bytes(40)))
        return stream.getvalue()

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("data/a", bytes(100))
        opened.writestr("data/b", b"b")
    plain = [tarred(format=tarfile.PAX_FORMAT), tarred(format=tarfile.GNU_FORMAT)]
    inside, place = folder / "deep" / "inside", folder / "deep" / "x"
    (folder / "deep").mkdir()

    def make(chance: Any) -> bytes:
        if chance.random() < 0.4:
            return scrambled(stream.getvalue(), chance)
        content = chance.choice(plain)
        if chance.random() < 0.2:
            return scrambled(gzip.compress(content, 1, mtime=0), chance)
        return gzip.compress(scrambled(content, chance), 1, mtime=0)

    def read(content: bytes) -> None:
        place.write_bytes(content)
        try:
            files.unpack(place, "data", inside)
        finally:
            shutil.rmtree(inside, ignore_errors=True)
            if escaped := [
                one.name for one in (*folder.iterdir(), *(folder / "deep").iterdir()) if one.name not in ("deep", "x")
            ]:
                raise AssertionError(f"files outside: {escaped}")

    return make, read


def picture(folder: Path) -> Ready:
    from PIL import Image

    from alasso.bench.data import images

    pixels = np.arange(12 * 9 * 3, dtype=np.uint8).reshape(9, 12, 3)
    good = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "PCX", "ICO", "JPEG2000"):
        stream = io.BytesIO()
        try:
            Image.fromarray(pixels).save(stream, format=kind)
        except OSError:  # this Pillow cannot
            continue
        good.append(stream.getvalue())

    def read(content: bytes) -> None:
        path = folder / "x.png"
        path.write_bytes(content)
        images.decode_all([path], lambda one: images.ImageOps.fit(images.to_rgb(one), (8, 8)), (3, 8, 8))

    return lambda chance: scrambled(chance.choice(good), chance), read


def config_of(content: Any) -> None:
    RunConfig.from_json(content)


METHODS = ("ALASSO", "KronALASSO", "SI", "EWC", "OnlineEWC", "MAS", "IMM")
READERS: dict[str, Reader] = {
    "result": Reader(file_reader("x.json", some_results(), read_again), 200_000),
    "result .xz": Reader(file_reader("x.json.xz", some_results(), results.read), 20_000),
    "result: report": Reader(file_reader("x.json", some_results(), on_a_page), 3_000),
    "result: compare": Reader(file_reader("x.json", some_results(), compared), 10_000),
    "result: reproduce": Reader(reproduced("x.json", some_results()), 20_000),
    "config": Reader(
        lambda folder: (lambda chance: changed(made_up(tasks=2).config.to_json(), chance), config_of), 150_000
    ),
    ".diverged": Reader(file_reader("x.diverged", some_notes(), results.read_note), 150_000),
    "probe.json": Reader(file_reader("x.probe.json", some_probes(), probe_drawn), 60_000),
    "search outcome": Reader(file_reader("x.json", some_searches(), searched), 60_000),
    "CSV log": Reader(log, 60_000),
    "TOML run": Reader(toml_run, 40_000),
    "TOML experiment": Reader(toml_experiment, 20_000),
    "TOML claims": Reader(toml_claims, 20_000),
    **{f"state of {method}": Reader(state(method), 5_000) for method in METHODS},
    "checkpoint": Reader(checkpoint, 2_000),
    "idx and gzip": Reader(packed_data, 150_000),
    "archive": Reader(archive, 40_000),
    "picture": Reader(picture, 20_000),
}
