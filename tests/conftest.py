"""Tests run on one thread: bitwise comparisons must not depend on how many cores a machine has."""

import signal

import pytest
import torch

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that; here some are to be
# interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ctrl_c_as_before():
    """A command that was stopped takes no further Ctrl-C; here the process goes on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
