"""A few schedules of faults on every change; many more by `python -m tests.peers.wide.chaos`."""

import pytest

from tests.peers.wide.chaos import weather
from tests.peers.wide.schedules import METHODS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_whatever_happens_nobody_hangs_and_all_hold_the_same(method: str, seed: int) -> None:
    outcome = weather(1000 + seed, method)
    assert outcome.wrong == [], outcome.schedule
    assert outcome.rounds > 10
