"""Lists every public name with the first sentence of its docstring: all that the API pages show, page by page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import griffe
import yaml

from site_docstrings import as_markdown

_SHOWN = re.compile(r"^::: (\S+)\n((?: {4}.*\n| *\n)*)", re.M)
_TITLE = re.compile(r"^# (.*)", re.M)
_SENTENCE = re.compile(r".*?(?<!Eqs)\.(?=\s|$)", re.S)


class Name(NamedTuple):
    """A public name.

    Attributes:
        path: Where it is defined, in full.
        shown: What to import it as; a method with its class alone.
        sentence: What it is.
    """

    path: str
    shown: str
    sentence: str


def names_of(page: str, package: griffe.Module) -> list[Name]:
    """Lists what one API page shows.

    Args:
        page: The page's Markdown, with its ``:::`` marks.
        package: The package ``alasso``, as griffe read it.

    Returns:
        The names, in the page's order.
    """
    names = []
    for path, block in _SHOWN.findall(page):
        options = (yaml.safe_load(block) or {}).get("options", {})
        for name in _below(package[path.removeprefix("alasso.")], options.get("members")):
            names.append(name if "." in name.shown else name._replace(shown=_imported_as(name, path, package)))
    return names


def listing(folder: Path, source: Path) -> str:
    """Makes the tables of all API pages.

    Args:
        folder: That of the API pages.
        source: The folder that holds the package.

    Returns:
        Markdown: a heading and a table for each page, every name a link.
    """
    package = griffe.load("alasso", search_paths=[str(source)])
    assert isinstance(package, griffe.Module)
    parts = []
    for path in sorted(folder.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        rows = [f"| [`{name.shown}`][{name.path}] | {name.sentence} |" for name in names_of(page, package)]
        title = _TITLE.search(page)
        if title and rows:
            parts.append("\n".join([f"## {title[1]}", "", "| name | |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _imported_as(name: Name, page_of: str, package: griffe.Module) -> str:
    """The shortest path: from the package, from the laboratory, or from the module that its page is about."""
    for module in (package, package["bench"]):
        if name.shown in map(str, module.exports or ()):
            return f"{module.path}.{name.shown}"
    return page_of if page_of.endswith(f".{name.shown}") else f"{page_of}.{name.shown}"


def _below(item: griffe.Object | griffe.Alias, members: list[str] | bool | None) -> Iterator[Name]:
    """A class or function with its methods; of a module, what it offers."""
    if members is False:
        return
    if item.is_module:
        own = [name for name, member in item.members.items() if not member.is_alias]
        for member in map(item.members.__getitem__, map(str, members or item.exports or own)):
            if _is_shown(member):
                yield from _below(member, None)
        return
    yield Name(item.canonical_path, item.name, _sentence(item))
    if item.is_class:
        for name, member in item.members.items():
            if _is_shown(member):
                yield Name(member.canonical_path, f"{item.name}.{name}", _sentence(member))


def _is_shown(member: griffe.Object | griffe.Alias) -> bool:
    is_callable = member.is_class or member.is_function or "property" in member.labels
    return is_callable and member.docstring is not None and not member.name.startswith("_")


def _sentence(item: griffe.Object | griffe.Alias) -> str:
    text = as_markdown(item.docstring.value) if item.docstring else ""
    found = _SENTENCE.match(text)
    return " ".join((found[0] if found else text).split()).replace("|", "\\|")
