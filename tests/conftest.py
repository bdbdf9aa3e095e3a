"""Shared by all tests: one intra-op thread, because bits and timings of tiny tensors should not depend on the
machine's cores."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
