"""Measures the size and shape of the code: lines, documentation, modules, inheritance, late imports, tracked files.

    python tools/measure_code.py            # the working tree
    python tools/measure_code.py --rooms    # and a line for each room

A *code line* holds code: not blank, not only a comment, not part of a docstring. The *documentation share* is
docstring and comment lines over all lines that are not blank. *Late imports* are import statements inside functions.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "alasso"


def line_kinds(text: str, tree: ast.Module) -> Counter[str]:
    """Counts code, documentation and blank lines of one module."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    kinds: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        kind = "blank" if not line.strip() else "docs" if number in documented | comments else "code"
        kinds[kind] += 1
    return kinds


def late_imports(tree: ast.Module) -> int:
    """Counts import statements inside functions."""
    found: set[int] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= {id(node) for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)}
    return len(found)


def deepest_inheritance(trees: list[ast.Module]) -> tuple[int, list[str]]:
    """Finds the longest chain of classes that are all defined in the package."""
    bases: dict[str, list[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                bases[node.name] = [n.id if isinstance(n, ast.Name) else getattr(n, "attr", "") for n in names]

    def chain(name: str, seen: tuple[str, ...] = ()) -> list[str]:
        if name not in bases or name in seen:
            return []
        return [name, *max((chain(base, (*seen, name)) for base in bases[name]), key=len, default=[])]

    longest = max((chain(name) for name in bases), key=len)
    return len(longest), longest


def main() -> None:
    """Prints the table."""
    modules = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in modules.items()}
    rooms: dict[str, Counter[str]] = {}
    for path, text in modules.items():
        parts = path.relative_to(SOURCE).parts
        room = "/".join(parts[: 2 if parts[0] == "bench" and len(parts) > 2 else 1]) if len(parts) > 1 else "."
        kinds = line_kinds(text, trees[path]) + Counter(modules=1, late=late_imports(trees[path]))
        for name in ("all", "bench" if parts[0] == "bench" else "core", f"  {room}"):
            rooms[name] = rooms.get(name, Counter()) + kinds
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    depth, chain = deepest_inheritance(list(trees.values()))
    print(f"{'':24}{'code lines':>11}{'docs share':>12}{'modules':>9}{'late imports':>14}")
    for name, kinds in rooms.items():
        if "--rooms" in sys.argv or not name.startswith(" "):
            share = kinds["docs"] / max(1, kinds["docs"] + kinds["code"])
            print(f"{name:24}{kinds['code']:>11,}{share:>12.1%}{kinds['modules']:>9}{kinds['late']:>14}")
    print(f"deepest inheritance     {depth:>11}   {' → '.join(chain)}")
    print(f"tracked files           {len(tracked.splitlines()):>11,}")


if __name__ == "__main__":
    main()
