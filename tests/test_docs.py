"""The documents say what is there: code runs, functions exist, links lead somewhere, the site builds unwarned."""

import importlib
import re
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from alasso import ALASSO, KronALASSO

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHOD = (DOCS / "method.md").read_text(encoding="utf-8")


@pytest.fixture
def site_libraries():
    for library in ("mkdocs", "mkdocstrings", "latex2mathml", "griffe"):
        pytest.importorskip(library, reason=f"the site is built with {library}: pip install '.[docs]'")


def named(path):
    """The object of this full name."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {path}")


def test_the_quick_start_runs_as_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.S)
    names = {}
    exec(compile(blocks[1], "index.md", "exec"), names)
    assert names["reg"].tasks == 4 and (tmp_path / "saved.pt").exists()
    # The three lines are those of the README, and they work with what the second block made.
    assert blocks[0] in (ROOT / "README.md").read_text(encoding="utf-8")
    trained = []
    names["reg"].detach()

    def train(model, optimizer, task):
        torch.nn.functional.cross_entropy(model(torch.ones(8, 64)), torch.zeros(8, dtype=torch.long)).backward()
        optimizer.step()
        trained.append(task)

    names |= {"tasks": ["only"], "train": train}
    exec(compile(blocks[0], "index.md", "exec"), names)
    assert trained and names["reg"].tasks == 1


def test_the_quick_start_goes_on_another_day_as_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.S)
    names = {}
    exec(compile(blocks[1], "index.md", "exec"), names)
    penalties = {}
    for day in ("first", "other"):
        if day == "other":
            torch.nn.init.ones_(names["model"][0].weight)
            names["optimizer"] = torch.optim.Adam(names["model"].parameters())
            names["reg"] = KronALASSO(names["model"])
            exec(compile(blocks[2], "index.md", "exec"), names)
        names["model"].zero_grad()
        names["model"](torch.ones(1, 64)).sum().backward()
        names["optimizer"].step()
        penalties[day] = float(names["reg"].penalty())
    assert penalties["first"] == penalties["other"] > 0 and names["reg"].tasks == 4


def test_heads_begin_anew_as_it_is_printed():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.S)
    excluded, forgotten = blocks[3:5]
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 200), "head": torch.nn.Linear(200, 4)})
    names = {"model": model, "ALASSO": ALASSO, "torch": torch, "nn": torch.nn}
    exec(compile(excluded, "index.md", "exec"), names)
    assert list(names["reg"].importance()) == ["body.weight", "body.bias"]
    names["reg"] = ALASSO(model, c=1e9)
    names["reg"].attach(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    model["head"](model["body"](torch.ones(2, 3))).sum().backward()
    optimizer.step()
    names["reg"].consolidate()
    exec(compile(forgotten, "index.md", "exec"), names)  # a warning would be an error
    assert float(names["reg"].penalty()) == 0 and len(names["reg"]._attached) == 1


def test_every_equation_of_the_paper_has_its_function():
    assert sorted(map(int, re.findall(r"\\tag\{(\d+)\}", METHOD))) == list(range(1, 13))
    shown = re.findall(r"<!-- function: (.*?) -->", METHOD)
    listed = re.findall(r"^\| [\d, ]+ \|.*`methods/(\w+)\.py`: `([\w.]+)` \|$", METHOD, re.M)
    assert len(listed) >= 8
    assert {f"alasso.methods.{module}.{name}" for module, name in listed} <= set(shown)
    assert all(callable(named(path)) for path in shown)


def test_the_readme_is_short_and_its_numbers_are_those_of_the_reproduction():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 700
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) < 60
    document = (ROOT / "paper" / "REPRODUCTION.md").read_text(encoding="utf-8")
    columns = ["alasso", "si", "ewc", "sgd", "single-task"]
    for shown, section in (
        ("permuted MNIST", "Permuted MNIST, 30 tasks"),
        ("split CIFAR-10/100", "Split CIFAR-10/100"),
        ("split Tiny ImageNet", "Split Tiny ImageNet"),
    ):
        table = document.partition(f"## {section} (")[2].partition("## ")[0]
        rows = re.findall(r"^\| ([\w-]+) \| (.*?) \|.* (\d+) \|$", table, re.M)
        found = {name: f"{accuracy} ({seeds})" for name, accuracy, seeds in rows}
        cells = re.findall(rf"^\| {shown} \| [\d.]+ \| (.*) \|$", text, re.M)[0].replace("\\*", "").split(" | ")
        starred = ["online-ewc" if name == "ewc" and "MNIST" in shown else name for name in columns]
        assert cells == [found[name] for name in starred]
    tally = re.search(r"Of (\d+) claims: (\d+) hold, (\d+) do not hold, (\d+) undecided", document)
    claims = "paper's {} claims {} hold, {} do not hold and {} are undecided"
    assert claims.format(*tally.groups()) in " ".join(text.split())


def test_the_paper_about_the_library_has_the_numbers_of_the_readme_and_no_dangling_reference():
    paper = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\*", "")
    figures = re.findall(r"\d\.\d{3} ± \d\.\d{3} \(\d+\)", paper)
    assert len(figures) == 8 and all(figure in readme for figure in figures)
    shares = r"(\d+) %.*?ALASSO\D*?(\d+) %, SI\D*?(\d+) %\D*?EWC\D*?(\d+) %"
    assert re.search(shares, paper, re.S).groups() == re.search(shares, readme, re.S).groups()
    known = set(re.findall(r"^@\w+\{(\w+),", (ROOT / "paper" / "paper.bib").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"@(\w+)", paper)) == known


PAGES = [*sorted(DOCS.rglob("*.md")), *sorted((ROOT / "paper").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


# -- how the site is made ------------------------------------------------------------------------------------


def test_docstrings_become_markdown(site_libraries):
    as_markdown = importlib.import_module("site_docstrings").as_markdown
    text = as_markdown(
        "Title with :math:`a_1` and :func:`f`.\n\n"
        ".. math::\n\n    x &= 1  && (4)\n\n    y &= 2\n\n"
        ".. math:: z = \\begin{cases} 1 & a \\\\ 2 & b \\end{cases}\n\n"
        ">>> 1 + 1\n2\n"
    )
    assert "with $a_1$ and `f`." in text
    assert "$$\n\\begin{aligned}\nx &= 1  && (4) \\\\\ny &= 2\n\\end{aligned}\n$$" in text
    assert "$$\nz = \\begin{cases} 1 & a \\\\ 2 & b \\end{cases}\n$$" in text
    assert text.endswith("```pycon\n>>> 1 + 1\n2\n```")


def test_every_equation_is_drawn_whole(site_libraries):
    """MathML is well-formed, and no LaTeX is left in it."""
    mathml = importlib.import_module("site_equations").mathml
    as_markdown = importlib.import_module("site_docstrings").as_markdown
    sources = [METHOD]
    for module in (*(f"methods.{name}" for name in ("base", "alasso", "si", "ewc", "mas", "imm")), "vcl"):
        found = importlib.import_module(f"alasso.{module}")
        own = [value for value in vars(found).values() if getattr(value, "__module__", "") == found.__name__]
        sources += [as_markdown(value.__doc__) for value in (found, *own) if value.__doc__]
    equations = [latex for text in sources for latex in re.findall(r"\$\$\n(.*?)\n\$\$", text, re.S)]
    assert len(equations) > 25
    for latex in equations:
        drawn = ET.fromstring(mathml(latex, display=True))
        texts = "".join(drawn.itertext())
        assert not re.search(r"[\\&{}]", texts.replace("{", "", latex.count(r"\begin{cases}"))), f"{latex}: {texts}"


def test_rows_and_columns_of_aligned_equations(site_libraries):
    table = ET.fromstring(importlib.import_module("site_equations").mathml(r"\begin{aligned} a &= \begin{cases} 1 & x \\ 2 & y \end{cases} \\ b &= {c \\ d} \end{aligned}", True))  # noqa: E501  # fmt: skip
    space = "{http://www.w3.org/1998/Math/MathML}"
    rows = table.findall(f"./div/{space}math/{space}mtable/{space}mtr")
    assert [len(row.findall(f"{space}mtd")) for row in rows] == [2, 2]


def test_every_public_name_is_listed_with_a_sentence(site_libraries):
    text = importlib.import_module("site_names").listing(DOCS / "api", ROOT / "src")
    rows = re.findall(r"^\| \[`(.*?)`\]\[.*?\] \| (.*) \|$", text, re.M)
    listed = {name for name, _ in rows}
    assert len(listed) == len(rows) > 100
    assert [name for name, sentence in rows if not sentence.endswith(".")] == []
    for module in ("alasso", "alasso.bench", "alasso.importance", "alasso.optim", "alasso.vcl"):
        offered = [f"{module}.{name}" for name in importlib.import_module(module).__all__]
        pages = {name for name in offered if any(other.startswith(f"{name}.") for other in listed)}
        assert set(offered) - pages <= listed | {"alasso.__version__"}
    assert {"Regularizer.warm_start", "Tuned.best", "alasso.integrations.lightning.AlassoCallback"} <= listed


def test_the_site_builds_without_a_warning_and_fetches_nothing(site_libraries, tmp_path, monkeypatch):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other libraries; mkdocs itself is strict about the documents
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert {"index.html", "method.html", "add_a_method.html", "methods.html"} <= set(pages)
    for name, text in pages.items():
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", text)
        assert not fetched, f"{name} fetches {fetched}"
        assert "arithmatex" not in text and "<p>.. math" not in text, f"{name} has an equation that was not drawn"
    assert "<math" in pages["method.html"] and "def accurate_omega" in re.sub("<[^>]+>", "", pages["method.html"])
    assert "as_the_paper_states_it" in pages["methods.html"]
    assert "0.935" in pages["which_method.html"] and "planned" not in pages["which_method.html"]
