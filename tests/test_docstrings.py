"""Every public callable of the library has a Google-style docstring that names its parameters and what it returns."""

import importlib
import inspect
import re
import sys
import warnings

import pytest

OFFERED = [
    "alasso",
    "alasso._gauge",
    "alasso.errors",
    "alasso.importance",
    "alasso.integrations.avalanche",
    "alasso.integrations.huggingface",
    "alasso.integrations.lightning",
    "alasso.integrations.lora",
    "alasso.methods.alasso",
    "alasso.methods.base",
    "alasso.methods.ewc",
    "alasso.methods.imm",
    "alasso.methods.kron",
    "alasso.methods.mas",
    "alasso.methods.si",
    "alasso.optim",
    "alasso.regularizer",
    "alasso.vcl",
    "alasso.vcl.coresets",
    "alasso.vcl.layers",
    "alasso.vcl.objective",
]
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"^    \*{0,2}(\w+):(?: |$)")
ELSEWHERE = re.compile(r":class:`(\w+)` explains the (settings|arguments)")


def public_callables(module):
    """(name, callable) of what a module offers: its functions, its classes and their methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional libraries
        try:
            offered = importlib.import_module(module)
        except ImportError as error:
            pytest.skip(str(error))
    own = [name for name, value in vars(offered).items() if getattr(value, "__module__", None) == module]
    for name in getattr(offered, "__all__", own):
        value = getattr(offered, name)
        if name.startswith("_"):
            continue
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            yield name, value
            for method in public_methods(value):
                yield f"{name}.{method}", getattr(value, method)


def public_methods(cls):
    """Names of a class's methods, without those that a class of another library declares."""
    others = {name for base in cls.__mro__ if not base.__module__.startswith("alasso") for name in vars(base)}
    names = [name for name in dir(cls) if not name.startswith("_") and name not in others]
    return [name for name in names if inspect.isfunction(getattr(cls, name)) or inspect.ismethod(getattr(cls, name))]


def sections(text):
    """The lines below each heading of a docstring."""
    found, lines = {}, []
    for line in text.splitlines():
        heading = SECTION.match(line)
        if heading or line.strip() == line != "":
            lines = found.setdefault(heading[1] if heading else "", [])
        lines.append(line)
    return found


def returns_something(function):
    nothing = (None, "None", "NoReturn", "Iterator[None]", inspect.Signature.empty)
    return inspect.signature(function).return_annotation not in nothing


def documented(value):
    """The sections of a callable's own docstring; a method may inherit it from the one it overrides."""
    return sections(inspect.cleandoc((value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)) or ""))


def entries(lines):
    return [entry[1] for entry in map(ENTRY.match, lines) if entry]


def arguments(value, found, expected):
    """Names of the documented arguments; a class may leave them to another class that it names."""
    if "Args" in found or not expected:
        return entries(found.get("Args", []))
    if other := ELSEWHERE.search("\n".join(found.get("", []))):
        public = getattr(sys.modules[value.__module__], other[1])
        return [name for name in entries(documented(public)["Args"]) if name in expected]
    return entries(found.get("Attributes", []))


def faults(value):
    """What a docstring lacks."""
    found = documented(value)
    if not found:
        return ["no docstring"]
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    expected = [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
    named = arguments(value, found, expected)
    wrong = [f"documents {named} but takes {expected}"] if named != expected else []
    if not inspect.isclass(value) and returns_something(value) and not found.keys() & {"Returns", "Yields"}:
        wrong.append("no Returns")
    return wrong


@pytest.mark.parametrize("module", OFFERED)
def test_public_callables_are_documented(module):
    found = [f"{module}.{name}: {fault}" for name, value in public_callables(module) for fault in faults(value)]
    assert not found, "\n".join(found)


def test_what_counts_as_a_fault():
    def whole(x: int, *rest: int, flag: bool = False) -> int:
        """Add.

        Args:
            x: The first summand,
                on two lines.
            *rest: The others.
            flag: Nothing.

        Returns:
            The sum.

        Raises:
            ValueError: Never.
        """

    def half(x: int, y: int) -> int:
        """Add.

        Args:
            y: One.
        """

    class Pair:
        """Two numbers.

        Attributes:
            x: The first.
            y: The second.
        """

        def __init__(self, x: int, y: int, z: int) -> None:
            pass

    def bare() -> None:
        pass

    assert faults(whole) == []
    assert faults(half) == ["documents ['y'] but takes ['x', 'y']", "no Returns"]
    assert faults(Pair) == ["documents ['x', 'y'] but takes ['x', 'y', 'z']"]
    assert faults(bare) == ["no docstring"]
