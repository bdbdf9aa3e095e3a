"""Fetching from several donors of unequal speed, on a clock of the test's own."""

import math
import time
from collections import deque
from hashlib import sha256

import pytest

from atoll.peers.wide import entering
from atoll.peers.wide.entering import Fetching
from atoll.peers.wide.messages import STATE, Bulk, Fetch
from atoll.wire import Key

KEY = Key(0, 0, 0)


class Donors:
    """Each gives what it is asked for, one chunk behind the other, so many seconds each: parts of a power of two, as
    is the moment when it begins, so that no sum of them is rounded and what comes when is the same at any time of day.
    """

    def __init__(self, seconds: dict[int, float], chunks: list[bytes]) -> None:
        self.seconds, self.chunks, self.began = seconds, chunks, math.floor(time.monotonic())
        self.now = float(self.began)
        self.asked: dict[int, deque[tuple[float, int]]] = {donor: deque() for donor in seconds}
        self.asks: list[tuple[int, int]] = []
        self._free = dict.fromkeys(seconds, 0.0)
        self.fetching = Fetching(self._send, self._wait)

    def _send(self, donor: int, fetch: Fetch) -> None:
        self._free[donor] = max(self.now, self._free[donor]) + self.seconds[donor]
        self.asked[donor].append((self._free[donor], fetch.chunk))
        self.asks.append((donor, fetch.chunk))

    def _wait(self, seconds: float) -> None:
        coming = [owed[0][0] for owed in self.asked.values() if owed]
        self.now = min([self.now + seconds, *coming])
        for donor, owed in self.asked.items():
            while owed and owed[0][0] <= self.now:
                chunk = owed.popleft()[1]
                self.fetching.arrived(donor, Bulk(KEY, STATE, len(self.chunks), (), chunk, self.chunks[chunk]))


def fetched(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], count: int) -> Donors:
    chunks = [b"%d" % chunk for chunk in range(count)]
    donors = Donors(seconds, chunks)
    monkeypatch.setattr(entering.time, "monotonic", lambda: donors.now)
    sums = [sha256(chunk).hexdigest() for chunk in chunks]
    assert donors.fetching.whole(KEY, tuple(seconds), sums if count > 1 else None) == b"".join(chunks)
    return donors


def test_the_end_of_a_state_does_not_wait_for_a_slow_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = fetched(monkeypatch, {0: 0.125, 1: 3.0}, 40)
    assert donors.now - donors.began < 40 * 0.125 + 0.2, "no later than from the fast one alone"
    assert len(donors.asks) <= 40 + 3, "the slow one owes two at a time, and a third for a while after it has given one"


def test_all_donors_give_as_fast_as_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = fetched(monkeypatch, {0: 0.125, 1: 0.125, 2: 0.0625}, 120)
    assert donors.now - donors.began == pytest.approx(120 / (8 + 8 + 16), rel=0.1)


def test_what_is_one_chunk_is_asked_of_one_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(monkeypatch, {0: 3.0, 1: 0.125}, 1).asks == [(0, 0)]
