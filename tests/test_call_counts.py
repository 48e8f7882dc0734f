"""One step and one consolidation stay short: Python calls and modules within alasso, counted."""

import runpy
from pathlib import Path

MOST_CALLS_OF_A_STEP = 25
MOST_MODULES_OF_A_STEP = 5
MOST_CALLS_OF_A_CONSOLIDATION = 45

counting = runpy.run_path(str(Path(__file__).parents[1] / "perf" / "calls.py"))


def test_a_step_makes_few_calls():
    calls = counting["in_a_step"]()
    assert calls, "the counter saw no call at all"
    assert len(calls) <= MOST_CALLS_OF_A_STEP, calls
    assert len(counting["modules"](calls)) <= MOST_MODULES_OF_A_STEP, calls


def test_the_end_of_a_task_makes_few_calls():
    calls = counting["in_consolidate"]()
    assert calls, "the counter saw no call at all"
    assert len(calls) <= MOST_CALLS_OF_A_CONSOLIDATION, calls
