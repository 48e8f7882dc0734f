"""Every public callable of the library has a Google-style docstring that names its parameters and what it returns."""

import importlib
import inspect
import re
import warnings

import pytest

OFFERED = [
    "alasso",
    "alasso.errors",
    "alasso.importance",
    "alasso.integrations.avalanche",
    "alasso.integrations.huggingface",
    "alasso.integrations.lightning",
    "alasso.integrations.lora",
    "alasso.optim",
    "alasso.vcl",
    "alasso.vcl.coresets",
]
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"^    \*{0,2}(\w+):(?: |$)")


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
    return [name for name in names if inspect.isroutine(getattr(cls, name))]


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
    return inspect.signature(function).return_annotation not in (None, "None", "NoReturn", inspect.Signature.empty)


def faults(value):
    """What a docstring lacks."""
    found = sections((value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)) or "")
    if not found:
        return ["no docstring"]
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    expected = [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
    entries = map(ENTRY.match, found.get("Args", []) + found.get("Attributes", []))
    named = [entry[1] for entry in entries if entry]
    wrong = [f"documents {named} but takes {expected}"] if named != expected else []
    if not inspect.isclass(value) and returns_something(value) and not found.keys() & {"Returns", "Yields"}:
        wrong.append("no Returns")
    return wrong


@pytest.mark.parametrize("module", OFFERED)
def test_public_callables_are_documented(module):
    found = [f"{module}.{name}: {fault}" for name, value in public_callables(module) for fault in faults(value)]
    assert not found, "\n".join(found)


def test_what_counts_as_a_fault():
    def documented(x: int, *rest: int, flag: bool = False) -> int:
        """Adds.

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
        """Adds.

        Args:
            y: One.
        """

    def bare() -> None:
        pass

    assert faults(documented) == []
    assert faults(half) == ["documents ['y'] but takes ['x', 'y']", "no Returns"]
    assert faults(bare) == ["no docstring"]
