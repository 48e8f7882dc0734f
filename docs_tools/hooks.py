"""What mkdocs does not do by itself: pages of the API, figures from generated files, equations, links out of docs/.

Marks in the documents are HTML comments, so that the files read well without being built:

    <!-- function: alasso.methods.si.accumulated_omega -->   the function's docstring and source
    <!-- figures: Permuted MNIST, 30 tasks -->               that section's table in reproduction.md, what was run of it
    <!-- benchmarks -->                                      the commands in benchmarks/ and what they measure
    <!-- records -->                                         the tables that they left in records/
"""

from __future__ import annotations

import ast
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from equations import drawn

#: Pages of the API: title, then the modules on it. A module that is not there is left out.
API = {
    "Methods": ["alasso.methods._classes"],
    "What all methods share": ["alasso.regularizer.Regularizer", "alasso.errors"],
    "Importance from data": ["alasso.importance"],
    "Optimizers in one pass": ["alasso.optim"],
    "Lightning": ["alasso.integrations.lightning"],
    "Hugging Face": ["alasso.integrations.huggingface"],
    "LoRA": ["alasso.integrations.lora"],
    "Avalanche": ["alasso.integrations.avalanche"],
    "The maths": [
        f"alasso.{name}"
        for name in ("methods.base", "methods.alasso", "methods.si", "methods.ewc", "methods.mas", "methods.imm", "vcl")
    ],
    "Coresets": ["alasso.vcl.coresets"],
    "Benchmarks from Python": [
        f"alasso.bench.{name}"
        for name in ("config", "streams", "training.run", "metrics", "results", "training.search")
    ],
}
WIDE = "reproduction.md"  # whose tables have many columns
MARK = re.compile(r"^<!-- (function|figures|benchmarks|records):? ?(.*?) -->$", re.M)
#: How a function is shown beside its equation: the source says the rest.
SOURCE_ALONE = (
    "heading_level: 4",
    "show_source: true",
    "show_signature: false",
    "separate_signature: false",
    "show_docstring_description: false",
)
LINK_OUT = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:src|tests|results|records|benchmarks|examples)\b[^)#]*)[^)]*\)")


def root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


# -- the API -------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{title: api_path(title)} for title, modules in API.items() if there(config, modules)]
    assert config.nav is not None
    config.nav.append({"API": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for title, modules in API.items():
        known = there(config, modules)
        if known:
            content = f"# {title}\n\n" + "\n\n".join(map(shown, known))
            files.append(File.generated(config, api_path(title), content=content + "\n"))
    return files


def shown(name: str) -> str:
    """A module, or a class with all it has from those it is made of."""
    is_class = name.rpartition(".")[2][0].isupper()
    return f"::: {name}" + ("\n    options:\n      inherited_members: true" if is_class else "")


def api_path(title: str) -> str:
    return f"api/{re.sub('[^a-z]+', '-', title.lower())}.md"


def there(config: MkDocsConfig, modules: list[str]) -> list[str]:
    """Those that lie in src/; a name with a capital is a class, its module is what comes before."""
    source = root(config) / "src"
    modules_of = {name: re.sub(r"\.[A-Z]\w*$", "", name).replace(".", "/") for name in modules}
    return [name for name, path in modules_of.items() if (source / f"{path}.py").exists()]


# -- marks ---------------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    if page.file.src_path == WIDE:
        page.meta["hide"] = ["toc"]  # it has links of its own to what is in it, and needs the room

    def replaced(match: re.Match[str]) -> str:
        kind, argument = match.groups()
        if kind == "function":
            return f"::: {argument}\n    options:\n" + "".join(f"      {option}\n" for option in SOURCE_ALONE)
        if kind == "figures":
            return figures(config, argument)
        return benchmarks(config) if kind == "benchmarks" else records(config)

    # What lies outside docs/ is not on the site: its name will do.
    return LINK_OUT.sub(r"\1 (`\2`)", MARK.sub(replaced, markdown))


def figures(config: MkDocsConfig, section: str) -> str:
    """The first table of a section of reproduction.md, without the rows of what has not been run."""
    document = (Path(config.docs_dir) / "reproduction.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(section)}\b.*?^(\|.*?)\n\n", document, re.M | re.S)
    if not found:
        raise PluginError(f"docs/reproduction.md has no section {section!r} with a table")
    rows = [row for row in found.group(1).splitlines() if "| not run |" not in row]
    return "\n".join(rows) if len(rows) > 2 else "*Not run yet.*"


def benchmarks(config: MkDocsConfig) -> str:
    """Every script whose docstring says how it is run, with its first sentence."""
    items = []
    for script in sorted((root(config) / "benchmarks").glob("*.py")):
        described = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        usage = re.search(rf"^\s*(python benchmarks/{script.name}.*)$", described, re.M)
        if usage:
            items.append(f"{described.splitlines()[0]}\n\n    {usage.group(1)}\n")
    return "\n".join(items)


def records(config: MkDocsConfig) -> str:
    """Every log in records/, the latest first."""
    logs = sorted((root(config) / "records").glob("*.log"), reverse=True)
    if not logs:
        return "*There is no record yet.*"
    return "\n\n".join(
        f"`records/{log.name}`\n\n```text\n{log.read_text(encoding='utf-8').rstrip()}\n```" for log in logs
    )


# -- the finished page ---------------------------------------------------------------------------------------


#: Words in a column of numbers, which is not to be as wide as they are.
WORDS = re.compile(r'<td style="text-align: right;">(?=[^<]*[a-z]{3} [^<]*</td>)')
#: A row that is a heading, in a kind of table that has no other way to say so: one bold cell, and then empty ones.
HEADING = re.compile(r"<tr>\s*<td>(<strong>[^<]*</strong>)</td>((?:\s*<td[^>]*></td>)+)\s*</tr>")


def on_page_content(html: str, **_: Any) -> str:
    def whole_row(match: re.Match[str]) -> str:
        return f'<tr><td colspan="{1 + match.group(2).count("<td")}">{match.group(1)}</td></tr>'

    # Source is shown where a document asks for it, and there it is the point.
    html = html.replace('<details class="mkdocstrings-source"', '<details open class="mkdocstrings-source"')
    html = WORDS.sub('<td class="words" style="text-align: right;">', HEADING.sub(whole_row, html))
    return drawn(html)


def on_post_build(config: MkDocsConfig) -> None:
    """A font for the equations, which most systems lack or have a poor one of: that of the package ziamath (OFL)."""
    package = find_spec("ziamath")
    assert package is not None and package.origin is not None
    font = Path(package.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    shutil.copyfile(font, Path(config.site_dir) / "assets" / font.name)
