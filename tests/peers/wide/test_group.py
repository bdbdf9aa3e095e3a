"""The wide group against the conformance suite of groups, on a network of threads."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path

from atoll.testing.groups import check_peer_group
from atoll.testing.islands import islands
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
