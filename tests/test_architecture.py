"""The shape of the code: who imports whom, and how large it may be. `tools/measure_code.py` prints the same figures."""

import ast
import shutil
import subprocess
import sys
from functools import cache

import pytest

import measure_code

#: The house was built within 12,000 lines, 4,200 in the core, and 85 modules. What has been added since has its room:
#: KronALASSO, the summary, tuning, the gauge; checks of files and states.
LIMITS = {
    "code lines": 14_000,
    "code lines of the core": 5_250,
    "modules": 105,
    "lines of a module": 500,
    "imports inside functions": 25,
    "deepest inheritance": 3,
}
DOCS_SHARE_OF_THE_CORE = 0.25
TRACKED_FILES = 450

#: The command `alasso`: the one way from the library into the laboratory.
DOOR = "__main__.py"
#: The libraries that the integrations adapt to.
ADAPTED = {"lightning", "transformers", "peft", "avalanche"}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
IMPORT = ast.Import | ast.ImportFrom


@cache
def modules():
    """Text and tree of every module, by its path below src/alasso."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(measure_code.SOURCE.rglob("*.py"))}
    return {path.relative_to(measure_code.SOURCE).as_posix(): (text, ast.parse(text)) for path, text in texts.items()}


def core():
    return {name: parsed for name, parsed in modules().items() if not name.startswith("bench/")}


def below(tree, kind):
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def names(statement):
    """What an import statement names: ``from a.b import c`` → ``a.b.c``."""
    if isinstance(statement, ast.Import):
        return {alias.name for alias in statement.names}
    assert statement.level == 0, "imports are absolute"
    return {f"{statement.module}.{alias.name}" for alias in statement.names}


def libraries(statements):
    return {name.partition(".")[0] for statement in statements for name in names(statement)}


def late(tree):
    """Import statements inside functions."""
    return {node for function in below(tree, FUNCTION) for node in below(function, IMPORT)}


def for_types(tree):
    """Import statements that only a type checker reads."""
    blocks = (node for node in below(tree, ast.If) if getattr(node.test, "id", "") == "TYPE_CHECKING")
    return {node for block in blocks for node in below(block, IMPORT)}


def test_only_the_command_leads_from_the_library_into_the_laboratory():
    for module, (_, tree) in core().items():
        reached = late(tree) if module == DOOR else set()
        into = [node for node in set(below(tree, IMPORT)) - reached if any("alasso.bench" in n for n in names(node))]
        assert not into, module


def test_the_core_imports_torch_and_the_standard_library_alone():
    for module, (_, tree) in core().items():
        own = ADAPTED if module.startswith("integrations/") else set()
        assert libraries(set(below(tree, IMPORT)) - for_types(tree)) <= {
            "alasso",
            "torch",
            *sys.stdlib_module_names,
            *own,
        }


def test_imports_inside_functions_are_of_libraries():
    """A function that imports a module of the package hides who needs whom."""
    ours = {m: own for m, (_, tree) in modules().items() if (own := libraries(late(tree)) & {"alasso"})}
    assert ours.keys() <= {DOOR}


@cache
def measured():
    trees = {module: tree for module, (_, tree) in modules().items()}
    code = {module: measure_code.line_kinds(text, tree)["code"] for module, (text, tree) in modules().items()}
    return {
        "code lines": sum(code.values()),
        "code lines of the core": sum(code[module] for module in core()),
        "modules": len(trees),
        "lines of a module": max(len(text.splitlines()) for text, _ in modules().values()),
        "imports inside functions": sum(map(measure_code.late_imports, trees.values())),
        "deepest inheritance": measure_code.deepest_inheritance(list(trees.values()))[0],
    }


@pytest.mark.parametrize("what", LIMITS)
def test_the_code_keeps_its_size(what):
    assert measured()[what] <= LIMITS[what]


def test_the_core_is_documented():
    kinds = [measure_code.line_kinds(text, tree) for text, tree in core().values()]
    docs, code = (sum(one[kind] for one in kinds) for kind in ("docs", "code"))
    assert docs / (docs + code) >= DOCS_SHARE_OF_THE_CORE


@pytest.mark.skipif(not (measure_code.ROOT / ".git").exists() or not shutil.which("git"), reason="no repository")
def test_few_files_are_tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=measure_code.ROOT, capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) <= TRACKED_FILES
