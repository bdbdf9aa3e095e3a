"""Fetching from several donors of unequal speed, on a clock of the test's own."""

import math
import time
from collections import Counter
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
    Before `there_s` it says that it has nothing, and follows with what it was asked for when it has.
    """

    def __init__(self, seconds: dict[int, float], chunks: list[bytes], there_s: float = 0.0) -> None:
        self.seconds, self.chunks, self.began = seconds, chunks, math.floor(time.monotonic())
        self.now, self.there = float(self.began), self.began + there_s
        self.owed: list[tuple[float, Bulk, int]] = []
        self.asks: list[tuple[int, int]] = []
        self.twice: list[tuple[int, set[int]]] = []
        self._free = dict.fromkeys(seconds, 0.0)
        self.fetching = Fetching(self._send, self._wait)

    def _send(self, donor: int, fetch: Fetch) -> None:
        again = (donor, fetch.chunk) in self.asks
        if fetch.chunk in (others := {bulk.chunk for _, bulk, other in self.owed if other != donor}):
            self.twice.append((fetch.chunk, others))
        self.asks.append((donor, fetch.chunk))
        if self.now < self.there:
            self.owed.append((self.now, Bulk(KEY, STATE, 0, (), fetch.chunk, b""), donor))
            if again:
                return
        self._free[donor] = max(self.now, self.there, self._free[donor]) + self.seconds[donor]
        payload = self.chunks[fetch.chunk] if fetch.chunk < len(self.chunks) else b""
        self.owed.append((self._free[donor], Bulk(KEY, STATE, len(self.chunks), (), fetch.chunk, payload), donor))

    def _wait(self, seconds: float) -> None:
        self.now = min([self.now + seconds, *(when for when, _, _ in self.owed)])
        for when, bulk, donor in self.owed:
            if when <= self.now:
                self.fetching.arrived(donor, bulk)
        self.owed = [each for each in self.owed if each[0] > self.now]


def fetched(
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[int, float],
    count: int,
    there_s: float = 0.0,
    ahead_s: float = 0.0,
) -> Donors:
    """Args: ahead_s: so long before the sums are known the first chunks are asked for."""
    chunks = [b"%03d" % chunk for chunk in range(count - 1)] + [b"."]
    monkeypatch.setattr(entering, "PIECE", 3)
    donors = Donors(seconds, chunks, there_s)
    monkeypatch.setattr(entering.time, "monotonic", lambda: donors.now)
    sums = [sha256(chunk).hexdigest() for chunk in chunks]
    if ahead_s:
        donors.fetching.ahead(KEY, tuple(seconds))
        while donors.now < donors.began + ahead_s:
            donors._wait(donors.began + ahead_s - donors.now)
    assert donors.fetching.whole(KEY, tuple(seconds), sums if count > 1 else None) == b"".join(chunks)
    return donors


def test_the_end_of_a_state_does_not_wait_for_a_slow_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = fetched(monkeypatch, {0: 0.125, 1: 3.0}, 40)
    assert donors.now - donors.began < 40 * 0.125 + 0.2, "no later than from the fast one alone"
    assert len(donors.asks) <= 40 + 2, "the slow one owes two in the beginning, then one at a time"


def test_what_a_slow_donor_owes_is_asked_of_one_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They all come over the joiner's own link, which may be what is slow."""
    donors = fetched(monkeypatch, {0: 0.125, 1: 0.125, 2: 3.0}, 60)
    owed = {chunk for donor, chunk in donors.asks if donor == 2}
    assert max(Counter(chunk for _, chunk in donors.asks if chunk in owed).values()) == 2
    assert donors.now - donors.began < 60 * 0.125 / 2 + 0.3


def test_all_donors_give_as_fast_as_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = fetched(monkeypatch, {0: 0.125, 1: 0.125, 2: 0.0625}, 120)
    assert donors.now - donors.began == pytest.approx(120 / (8 + 8 + 16), rel=0.1)


def test_what_is_one_chunk_is_asked_of_one_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(monkeypatch, {0: 3.0, 1: 0.125}, 1).asks == [(0, 0)]


@pytest.mark.parametrize("ahead_s", [0.0625, 0.5])
def test_what_is_asked_for_ahead_comes_once_and_before_its_sums(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    donors = fetched(monkeypatch, {0: 0.125, 1: 0.125}, 40, there_s=0.25, ahead_s=ahead_s)
    assert sorted(donors.asks[:4]) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert len(donors.asks) <= 40 + 1, "but for one of the last two, perhaps"
    assert donors.now - donors.began <= 0.25 + 20 * 0.125 + 0.2


def test_what_is_known_to_be_one_chunk_is_asked_for_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = Donors({0: 0.125}, [b"."], 0.0)
    monkeypatch.setattr(entering.time, "monotonic", lambda: donors.now)
    donors.fetching.ahead(KEY, (0,), 1)
    donors._wait(0.125)
    donors.chunks = [b"!"]
    donors.fetching.ahead(KEY, (0,), 1)
    assert donors.fetching.whole(KEY, (0,)) == b"!", "what came of the first time is old"
    assert donors.asks == [(0, 0)] * 2


def test_what_is_not_there_for_long_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = fetched(monkeypatch, {0: 0.125}, 2, there_s=1.0)
    assert donors.asks.count((0, 0)) == 5, "every quarter of a second"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_state_of_fewer_chunks_than_are_asked_for_ahead(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    donors = fetched(monkeypatch, {0: 0.125, 1: 0.125, 2: 0.125}, count, ahead_s=0.0625)
    assert len(donors.asks) == 6
    assert donors.now - donors.began <= 0.25


def test_of_what_is_owed_last_the_others_give_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    donors = fetched(monkeypatch, {0: 0.0625, 1: 0.375}, 42)
    owed = donors.twice[0][1]
    assert [chunk for chunk, _ in donors.twice] == sorted(owed, reverse=True)[: len(owed) - 1]
    assert len(owed) == 3, "the slow one gives the first meanwhile"
