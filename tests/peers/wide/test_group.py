"""The wide group against the conformance suite of groups, on a network of threads."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import count
from pathlib import Path

import pytest

from atoll.peers.wide.account import Account
from atoll.peers.wide.group import DIRECT_S, WideGroup
from atoll.peers.wide.link import Priority
from atoll.peers.wide.messages import COORDINATOR, Message, Promise, read
from atoll.testing.groups import check_peer_group
from atoll.testing.islands import Loopback, Sea, islands, serve
from atoll.wire import PeerGroup


def wide(folder: Path) -> Callable[[int], AbstractContextManager[Sequence[PeerGroup]]]:
    numbers = count()

    @contextmanager
    def make(members: int) -> Generator[Sequence[PeerGroup]]:
        place = folder / str(next(numbers))
        place.mkdir()
        with islands(members, place) as (groups, _):
            yield groups

    return make


def test_a_wide_group_does_what_a_group_must(tmp_path: Path) -> None:
    check_peer_group(wide(tmp_path), members=(2, 3, 4, 5))


@pytest.mark.parametrize(("direct_s", "begins_s"), [(0.5, 0.5), (math.inf, DIRECT_S)])
def test_islands_begin_when_they_have_links_to_each_other_or_seem_to_get_none(
    direct_s: float, begins_s: float, tmp_path: Path
) -> None:
    since = time.monotonic()

    class Far(Loopback):
        def direct(self, who: int) -> bool:
            return time.monotonic() - since > direct_s

    sea = Sea()
    with (
        closing(serve(sea, tmp_path, 2, lambda said: None)),
        closing(WideGroup(Far(sea, 0), "run", "1")) as one,
        closing(WideGroup(Far(sea, 1), "run", "1")) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(lambda group: group.agree("the same"), (one, other)))
        assert begins_s <= time.monotonic() - since < begins_s + 0.5
        assert one.membership.workers == (0, 1)


def test_an_island_gives_account_before_it_lets_anybody_in(tmp_path: Path) -> None:
    """Who comes in by a promise holds what has landed here, though this island be lost the next moment."""
    sea, told = Sea(), list[Message]()

    def passes(sender: int, to: int, frame: bytes) -> bool:
        if (sender, to) == (0, COORDINATOR):
            told.append(read(frame))
        return True

    sea.passes = passes
    with islands(1, tmp_path, sea) as ((group,), _):
        group.agree("same")
        group.units.account(shards=1, next=0, over=0, runs=(), counts=(), leases=())
        group._do(lambda: group.member.send(COORDINATOR, Promise(1, 0), Priority.CONTROL))
        until = time.monotonic() + 10
        while not any(isinstance(message, Promise) for message in told):
            assert time.monotonic() < until
            time.sleep(0.01)
    at = [isinstance(message, Promise) for message in told].index(True)
    assert isinstance(told[at - 1], Account)
    assert isinstance(told[at - 2], Account), "the one before was told when it was given"
