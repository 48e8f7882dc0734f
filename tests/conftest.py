"""Tests run on one thread: bitwise comparisons must not depend on how many cores a machine has."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
