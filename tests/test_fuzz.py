"""`make fuzz` in a few seconds: every reader with some of its inputs, and what it counts."""

import sys

import pytest

from alasso.errors import AlassoError

import fuzz
import fuzz_readers

#: Their strictness is checked by tests of their own; a whole run of `make fuzz` reads them, too.
STATES = {name for name in fuzz_readers.READERS if name.startswith("state of") or name == "checkpoint"}
INPUTS = {"result: report": 20, "result: compare": 30, "result: reproduce": 40, "picture": 60, "archive": 60}


@pytest.fixture
def inline(monkeypatch):
    """Without the bound on the memory of this process."""
    monkeypatch.setattr(fuzz.resource, "setrlimit", lambda *_: None)


@pytest.mark.parametrize("name", [name for name in fuzz_readers.READERS if name not in STATES])
def test_no_reader_stumbles(name, inline, tmp_path):
    (tmp_path / "progress").write_bytes(bytes(8))
    found = fuzz.work(name, 1, 0, INPUTS.get(name, 200), tmp_path / "progress")
    assert found["inputs"] == INPUTS.get(name, 200) and not found["tracebacks"] and not found["hangs"]
    assert found["taken"] > 0  # some changes do no harm: inputs reach what comes after the first check


def test_tracebacks_hangs_and_crashes_are_counted(inline, tmp_path, monkeypatch):
    def bad(folder):
        def read(number):
            if number % 4 == 1:
                raise AlassoError("one line")
            if number % 4 == 2:
                raise KeyError("traceback")
            while number % 4 == 3:
                pass

        return lambda chance: next(numbers), read

    numbers = iter([0, *range(8)])  # the first one warms up
    monkeypatch.setitem(fuzz_readers.READERS, "bad", fuzz_readers.Reader(bad, 8))
    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    (tmp_path / "progress").write_bytes(bytes(8))
    found = fuzz.work("bad", 0, 0, 8, tmp_path / "progress")
    assert (found["inputs"], found["taken"], sum(found["tracebacks"].values())) == (8, 2, 2) and found["hangs"] == [
        3,
        7,
    ]


def test_an_input_that_ends_the_process_is_a_crash_and_the_rest_goes_on(monkeypatch, tmp_path):
    script = tmp_path / "fuzz_bad.py"
    script.write_text(
        f"""
import os, sys, types
sys.path[:0] = {[str(place) for place in sys.path[:2]] + fuzz.FOLDERS!r}
ends = lambda folder: (lambda chance: chance.random(), lambda given: os.abort() if given < 0.1 else None)
sys.modules["fuzz_readers"] = types.SimpleNamespace(READERS={{"bad": types.SimpleNamespace(ready=ends)}})
import fuzz
sys.exit(fuzz.main())
"""
    )
    monkeypatch.setattr(fuzz, "__file__", str(script))
    found = fuzz.in_children("bad", 0, 20)
    assert len(found["crashes"]) >= 1 and found["inputs"] == 20 and not found["tracebacks"]
