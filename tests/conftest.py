"""Shared by all tests."""

import signal

import pytest
import torch
from hypothesis import settings

# how long an example takes says something about what else the machine does
settings.register_profile("atoll", deadline=None)
settings.load_profile("atoll")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Bits and timings of tiny tensors should not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _hears_interrupts() -> None:
    """A suite started in the background inherits an ignored SIGINT, and so would the commands that it interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
