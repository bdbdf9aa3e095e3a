"""The wide group against the conformance suite of groups, on a network of threads."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path

from atoll.peers.wide.account import Account
from atoll.peers.wide.link import Priority
from atoll.peers.wide.messages import COORDINATOR, Message, Promise, read
from atoll.testing.groups import check_peer_group
from atoll.testing.islands import Sea, islands
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
        group.units.account(shards=1, next=0, over=0, loads=(), runs=(), counts=(), leases=())
        group._do(lambda: group.member.send(COORDINATOR, Promise(1, 0), Priority.CONTROL))
        until = time.monotonic() + 10
        while not any(isinstance(message, Promise) for message in told):
            assert time.monotonic() < until
            time.sleep(0.01)
    at = [isinstance(message, Promise) for message in told].index(True)
    assert isinstance(told[at - 1], Account)
    assert isinstance(told[at - 2], Account), "the one before was told when it was given"
