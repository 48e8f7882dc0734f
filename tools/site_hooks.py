"""What the documentation site needs beyond mkdocs: tables of the reproduction, sources of functions, equations.

Documents mark a place with an HTML comment, so that they read well without being built:

    <!-- function: alasso.methods.si.accumulated_omega -->   the function's source
    <!-- table: Permuted MNIST, 30 tasks -->                 the first table of that section of the reproduction
    <!-- names -->                                           every public name, with its first sentence
"""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from site_equations import drawn
from site_names import listing

REPRODUCTION = "REPRODUCTION.md"
WIDE = (REPRODUCTION, "method.md", "others.md")
#: Its folder, and how other pages link to it.
_ROOT = Path(__file__).parent.parent
_PAPER = _ROOT / "paper"
_TO_REPRODUCTION = re.compile(r"\(((?:\.\./)*)\.\./paper/REPRODUCTION\.md")
_MARK = re.compile(r"^<!-- (function|table): (.*?) -->$", re.M)
#: How a function looks below its equation: the source alone.
_SOURCE_ALONE = (
    "heading_level: 4",
    "show_source: true",
    "show_signature: false",
    "separate_signature: false",
    "show_docstring_description: false",
    "show_docstring_parameters: false",
    "show_docstring_returns: false",
    "show_docstring_raises: false",
)
#: Links to files that are not on the site.
_LINK_OUT = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:src|tests|perf|paper|examples)\b[^)#]*)[^)]*\)")
#: Words in a column of numbers; the column must not become as wide as they are.
_WORDS = re.compile(r'<td style="text-align: right;">(?=[^<]*[a-z]{3} [^<]*</td>)')
#: A row that serves as a heading: one bold cell, then empty ones.
_HEADING = re.compile(r"<tr>\s*<td>(<strong>[^<]*</strong>)</td>((?:\s*<td[^>]*></td>)+)\s*</tr>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reproduction, which lies beside its results, with its figures.

    Args:
        files: The files below docs/.
        config: The site's configuration.

    Returns:
        The files of the site.
    """
    for path in (_PAPER / REPRODUCTION, *sorted((_PAPER / "figures").glob("*.svg"))):
        name = path.relative_to(_PAPER).as_posix()
        files.append(File(name, str(_PAPER), config.site_dir, use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fills the marks of a page, and turns links to files outside the site into their names.

    Args:
        markdown: The page as it is written.
        page: The page; those of WIDE lose their table of contents, because their tables and sources need the room.

    Returns:
        The page as mkdocs shall read it.
    """
    if page.file.src_path in WIDE:
        page.meta["hide"] = ["toc"]

    def filled(match: re.Match[str]) -> str:
        kind, argument = match.groups()
        if kind == "table":
            return _table_of_the_reproduction(argument)
        return f"::: {argument}\n    options:\n" + "".join(f"      {option}\n" for option in _SOURCE_ALONE)

    if "<!-- names -->" in markdown:
        markdown = markdown.replace("<!-- names -->", listing(_ROOT / "docs" / "api", _ROOT / "src"))
    markdown = _TO_REPRODUCTION.sub(rf"(\1{REPRODUCTION}", _MARK.sub(filled, markdown))
    return _LINK_OUT.sub(r"\1 (`\2`)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Opens the shown sources, mends wide tables and draws equations.

    Args:
        html: The page's content.

    Returns:
        The content as readers see it.
    """

    def whole_row(match: re.Match[str]) -> str:
        return f'<tr><td colspan="{1 + match.group(2).count("<td")}">{match.group(1)}</td></tr>'

    html = html.replace('<details class="mkdocstrings-source"', '<details open class="mkdocstrings-source"')
    html = _WORDS.sub('<td class="words" style="text-align: right;">', _HEADING.sub(whole_row, html))
    return drawn(html)


def on_post_build(config: MkDocsConfig) -> None:
    """Copies a font for equations, which most systems lack, from the package ziamath (OFL) into the site.

    Args:
        config: The site's configuration.
    """
    package = find_spec("ziamath")
    assert package is not None and package.origin is not None
    font = Path(package.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    shutil.copyfile(font, Path(config.site_dir) / "assets" / font.name)


def _table_of_the_reproduction(section: str) -> str:
    """The first table of a section, without the rows that have not been run."""
    document = (_PAPER / REPRODUCTION).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(section)}\b.*?^(\|.*?)\n\n", document, re.M | re.S)
    if not found:
        raise PluginError(f"{REPRODUCTION} has no section {section!r} with a table")
    return "\n".join(row for row in found.group(1).splitlines() if "| not run |" not in row)
