"""The conformance suite of peer groups: what every way to the others must do, bit for bit like a plain loop.

Exchanges are checked by `atoll.testing.scripts`; here are agreement, unknown tickets and aborts.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from atoll.errors import GroupError
from atoll.sync.drive import drive
from atoll.sync.flow import Flow
from atoll.testing.exchanges import Case, Member
from atoll.testing.scripts import LONG, SCRIPTS
from atoll.wire import Key, PeerGroup, Take

MakeGroups = Callable[[int], AbstractContextManager[Sequence[PeerGroup]]]
Advance = Callable[[Sequence[Flow], Sequence[PeerGroup]], object]


def in_threads(flows: Sequence[Flow], groups: Sequence[PeerGroup]) -> None:
    """Advance each flow in a thread of its own; the first error ends them all."""

    def run(flow: Flow, group: PeerGroup) -> None:
        try:
            drive(flow, group)
        except BaseException:
            group.abort()
            raise

    if flows:
        with ThreadPoolExecutor(len(flows)) as pool:
            results = [pool.submit(run, flow, group) for flow, group in zip(flows, groups, strict=True)]
        errors = [error for result in results if (error := result.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, GroupError)):
            raise error


def check_peer_group(
    make_groups: MakeGroups, members: Sequence[int] = (2, 3, 4, 5), advance: Advance = in_threads
) -> None:
    """Assert that a kind of group does what every group must.

    Args:
        make_groups: `make_groups(M)` lends the ends of a fresh group of M workers that live in this process: all of
            them, or one of several processes that run this check together, or none in a process that has no part.
        members: the numbers of workers to try; more than two, because two hide the order of sums.
        advance: how flows of several workers in one process are run: in threads, or in turns.
    Raises: AssertionError.

    Example:
        >>> from contextlib import nullcontext
        >>> from atoll.peers.memory import Hub
        >>> def make(members):
        ...     hub = Hub(members)
        ...     return nullcontext([hub.group(worker) for worker in range(members)])
        >>> check_peer_group(make, members=(2, 4))
    """
    for count in members:
        with make_groups(count) as groups:
            _agree(groups, "a")
            scripts = [*SCRIPTS, *LONG] if count == members[len(members) // 2] else SCRIPTS
            for rule, script in enumerate(scripts):
                advance([script(Member(group.membership, rule)) for group in groups], groups)
            _refuses_unknown_tickets(groups)
        with make_groups(count) as groups:
            _disagree(groups)
    with make_groups(2) as groups:
        _agree(groups, "another, longer one")
        _abort_wakes_a_take(groups)


def _each(groups: Sequence[PeerGroup], act: Callable[[PeerGroup], object]) -> list[BaseException | None]:
    """Do `act` with every local group at the same time; what each raised."""
    if not groups:
        return []
    with ThreadPoolExecutor(len(groups)) as pool:
        return [done.exception() for done in [pool.submit(act, group) for group in groups]]


def _agree(groups: Sequence[PeerGroup], fingerprint: str) -> None:
    for error in _each(groups, lambda group: group.agree(fingerprint)):
        assert error is None, f"members with the same fingerprint did not agree: {error}"


def _disagree(groups: Sequence[PeerGroup]) -> None:
    """Whoever is told is told both sides. Where only one side is refused, the other may wait until it is aborted."""

    def agrees(group: PeerGroup) -> None:
        try:
            group.agree("odd" if group.membership.me == 1 else "even")
        except GroupError:
            for other in groups:
                other.abort()
            raise

    raised = [error for error in _each(groups, agrees) if error]
    assert raised or not groups, "members with different fingerprints agreed"
    assert all(isinstance(error, GroupError) for error in raised)
    told = [error for error in raised if all(side in str(error) for side in ("odd", "even"))]
    assert told or not groups, f"both sides should be shown: {raised}"


def _refuses_unknown_tickets(groups: Sequence[PeerGroup]) -> None:
    for error in _each(groups, lambda group: group.take(Take(Key(99, 0, 0)))):
        assert isinstance(error, GroupError), f"a ticket that was never posted was answered with {error!r}"


def _abort_wakes_a_take(groups: Sequence[PeerGroup]) -> None:
    """Worker 0 waits for a contribution that never comes; worker 1 stays until that is over."""

    def waits(group: PeerGroup) -> float:
        post, _ = Member(group.membership, 0).post(Case(5, overlapped=True))
        group.post(post)
        threading.Timer(0.2, group.abort).start()
        began = time.monotonic()
        try:
            group.take(Take(post.key))
        except GroupError:
            return time.monotonic() - began
        raise AssertionError("an exchange with a missing member was answered")

    for group in groups:
        if group.membership.me == 0:
            seconds = waits(group)
            assert 0.1 < seconds < 1.2, f"an abort after 0.2 s ended a take after {seconds:.2f} s"
        elif len(groups) == 1:
            time.sleep(1.5)
