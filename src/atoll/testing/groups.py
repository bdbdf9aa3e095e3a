"""The conformance suite of peer groups: what every way to the others must do, bit for bit like a plain loop.

Each check is a script that yields the effects of a flow for one member and asserts on the answers. What the others sent
is known from a seed, so every member judges for itself, in whatever process it lives.
"""

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from atoll.errors import GroupError
from atoll.parts.codecs import exact
from atoll.sync.drive import drive
from atoll.sync.flow import Answer, Effect, Flow
from atoll.testing.exchanges import HALF, Case, Held, Member
from atoll.trees import CHUNK, Tree
from atoll.wire import (
    Keep,
    Key,
    Landed,
    Lost,
    PeerGroup,
    Post,
    Reduce,
    Snapshot,
    Sum,
    Take,
    bytes_sent,
)

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
            _agree(groups)
            scripts = [*SCRIPTS, _long] if count == members[len(members) // 2] else SCRIPTS
            for rule, script in enumerate(scripts):
                advance([script(Member(group.membership, rule)) for group in groups], groups)
            _refuses_unknown_tickets(groups)
        with make_groups(count) as groups:
            _disagree(groups)
    with make_groups(2) as groups:
        _abort_wakes_a_take(groups)


def _is_mean(
    member: Member, case: Case, answer: tuple[Landed | Lost, Tensor], peers: tuple[int, ...], asked: int
) -> None:
    outcome, got = answer
    assert isinstance(outcome, Landed), f"{case} of {asked} members was lost: {outcome.why}"
    assert outcome.peers == peers, f"{case}: the contributions of {outcome.peers} counted, not those of {peers}"
    assert outcome.share == len(peers) / asked
    want = case.mean(peers)
    if isinstance(case.fold, Sum):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (
            f"{case}: the sum is wrong by {(got - want).abs().max()}"
        )
    else:
        assert torch.equal(got, want), (
            f"{case} of {asked}: {int((got != want).sum())} values differ from a plain loop's"
        )
    norm = torch.linalg.vector_norm(want, dtype=torch.float64).item()
    assert math.isclose(outcome.mean_norm, norm, rel_tol=1e-3), f"{case}: mean_norm is {outcome.mean_norm}, not {norm}"
    for worker, seen in zip(peers, outcome.norms, strict=True):
        sent = torch.linalg.vector_norm(case.values(worker), dtype=torch.float64).item()
        assert math.isclose(seen, sent, rel_tol=1e-2), f"{case}: the norm of worker {worker} is {seen}, not {sent}"
    assert outcome.weights == tuple(case.weights.get(worker, 1.0) for worker in peers)


def _means(member: Member) -> Flow:
    """The mean is a plain loop's in worker order, for every fold, codec, dtype and size, and bytes are as announced."""
    folds = [
        (Keep(), exact()),
        (Reduce(exact()), exact()),
        (Keep(), HALF),
        (Reduce(HALF), HALF),
        (Reduce(exact()), HALF),
    ]
    for fold, codec in folds:
        for overlapped in (False, True):
            yield from _counted(member, Case(3, fold, codec, torch.float64, overlapped))
            yield from _counted(member, Case(1001, fold, codec, torch.float32, overlapped))
    yield from _counted(member, Case(1, Reduce(exact())))
    yield from _counted(member, Case(CHUNK, Reduce(exact())))
    yield from _counted(member, Case(1001, Sum()))
    return []


def _long(member: Member) -> Flow:
    """Many chunks, with a remainder smaller than the number of members."""
    yield from _counted(member, Case(2 * CHUNK + 1, Keep()))
    yield from _counted(member, Case(2 * CHUNK + 1, Sum(), overlapped=True))
    yield from _counted(member, Case(6 * CHUNK + 3, Reduce(exact()), overlapped=True))
    yield from _counted(member, Case(5 * CHUNK + 3, Keep(), HALF, overlapped=True))
    yield from _counted(member, Case(3 * CHUNK + 70_001, Reduce(HALF), HALF))
    return []


def _counted(member: Member, case: Case) -> Generator[Effect, Answer, None]:
    everyone = member.everyone
    post, source = member.post(case)
    yield post
    outcome, got = yield from member.taken(post, source)
    _is_mean(member, case, (outcome, got), everyone, len(everyone))
    assert isinstance(outcome, Landed)
    _sent(member, case, outcome)
    if isinstance(source, Held):
        assert torch.equal(source.flat, case.values(member.me)), f"{case}: the source was written to"


def _sent(member: Member, case: Case, landed: Landed) -> None:
    """The bytes of an exchange with everyone are as announced."""
    everyone, refused = member.everyone, member.me not in landed.peers
    index = everyone.index(member.me)
    counted = bytes_sent(case.fold, case.codec, case.layout, len(everyone), index, refused=refused)
    assert landed.sent == counted, f"{case}: {landed.sent} bytes were sent, but {counted} were announced"


def _weights(member: Member) -> Flow:
    """Contributions are weighted, and the sum is divided by the weights of those that count."""
    weights = {worker: 0.25 + worker for worker in member.everyone}
    for fold in (Keep(), Reduce(exact()), Sum()):
        for case in (
            Case(1001, fold, weights=weights),
            Case(1002, fold, weights={**weights, 0: 0.0}, overlapped=True),
        ):
            _is_mean(member, case, (yield from member.exchange(case)), member.everyone, len(member.everyone))
    return []


def _refusals(member: Member) -> Flow:
    """What is not finite, on the wire too, and an absurd norm among four or more, is refused everywhere, and named; it
    is not sent."""
    everyone = member.everyone
    good = tuple(worker for worker in everyone if worker != 1)
    bad = [
        Case(1001, fold, scale={1: scale}, quorum=0.3)
        for scale in (math.nan, math.inf)
        for fold in (Keep(), Reduce(exact()), Sum())
    ]
    bad += [Case(CHUNK + 5, Reduce(HALF), HALF, scale={1: 1e6}, quorum=0.3, overlapped=True)]
    bad += [Case(1001, scale={1: 1e3})] if len(everyone) >= 4 else []
    for case in bad:
        outcome, got = yield from member.exchange(case)
        _is_mean(member, case, (outcome, got), good, len(everyone))
        assert isinstance(outcome, Landed)
        assert len(outcome.refused) == 1, f"one contribution was bad, but {outcome.refused} were refused"
        assert "worker 1 " in outcome.refused[0], f"the refusal does not name worker 1: {outcome.refused[0]}"
        _sent(member, case, outcome)
    return []


def _quorum(member: Member) -> Flow:
    """Without a quorum nothing is written, and the reasons are given."""
    for overlapped in (False, True):
        bad = {worker: math.nan for worker in member.everyone if worker}
        case = Case(1001, scale=bad, overlapped=overlapped)
        outcome, got = yield from member.exchange(case)
        assert isinstance(outcome, Lost), "half of the contributions, or fewer, made a round"
        assert "worker 1 " in outcome.why
        assert torch.equal(got.nan_to_num(7.0), case.values(member.me).nan_to_num(7.0)), "a lost round was written"
    return []


def _signals(member: Member) -> Flow:
    """Signals come back as their means over the members."""
    outcome, _ = yield from member.exchange(Case(7, signals={"speed": 1.0, "distance": 10.0}))
    assert isinstance(outcome, Landed)
    mean = sum(member.everyone) / len(member.everyone)
    assert set(outcome.signals) == {"speed", "distance"}
    assert math.isclose(outcome.signals["speed"], 1.0 + mean)
    assert math.isclose(outcome.signals["distance"], 10.0 + mean)
    return []


def _in_flight(member: Member) -> Flow:
    """Several overlapped exchanges at once, a blocking one in between, taken in another order than they were posted."""
    cases = [Case(CHUNK + 11, overlapped=True), Case(900, Keep(), HALF, overlapped=True), Case(901, overlapped=True)]
    flying: list[tuple[Post, Held | Snapshot]] = []
    for case in cases:
        flying.append(member.post(case))
        yield flying[-1][0]
    blocking = Case(1003)
    _is_mean(member, blocking, (yield from member.exchange(blocking)), member.everyone, len(member.everyone))
    for index in (2, 0, 1):
        answer = yield from member.taken(*flying[index])
        _is_mean(member, cases[index], answer, member.everyone, len(member.everyone))
    return []


def _two_blocking(member: Member) -> Flow:
    """Two blocking exchanges are posted before the first is taken."""
    cases = [Case(1004), Case(CHUNK + 1, Keep(), HALF)]
    posted: list[tuple[Post, Held | Snapshot]] = []
    for case in cases:
        posted.append(member.post(case))
        yield posted[-1][0]
    for case, (post, source) in zip(cases, posted, strict=True):
        _is_mean(member, case, (yield from member.taken(post, source)), member.everyone, len(member.everyone))
    return []


def _idempotent(member: Member) -> Flow:
    """A post that is repeated counts once, and gets the same ticket."""
    case = Case(1005, overlapped=True)
    post, source = member.post(case)
    first = yield post
    again = yield replace(post, source=Snapshot(Tree(source.layout, case.values(member.me))))
    assert first == again == post.key
    _is_mean(member, case, (yield from member.taken(post, source)), member.everyone, len(member.everyone))
    return []


def _subsets(member: Member) -> Flow:
    """Any of the members can meet without the others; so can one alone, which sends nothing."""
    workers = member.everyone
    for to in [workers[index : index + 2] for index in range(0, len(workers) - 1, 2)] + [workers[1:]]:
        for case in (Case(1006, overlapped=True), Case(CHUNK + 9, Keep(), HALF), Case(1007, Sum())):
            post, source = member.post(case, to)  # by all, so that exchanges are numbered alike
            if member.me in to:
                yield post
                _is_mean(member, case, (yield from member.taken(post, source)), to, len(to))
    alone = Case(1008, Keep())
    outcome, got = yield from member.exchange(alone, (member.me,))
    _is_mean(member, alone, (outcome, got), (member.me,), 1)
    assert isinstance(outcome, Landed)
    assert outcome.sent == 0
    return []


SCRIPTS: Sequence[Callable[[Member], Flow]] = (
    _means,
    _weights,
    _refusals,
    _quorum,
    _signals,
    _in_flight,
    _two_blocking,
    _idempotent,
    _subsets,
)


def _each(groups: Sequence[PeerGroup], act: Callable[[PeerGroup], object]) -> list[BaseException | None]:
    """Do `act` with every local group at the same time; what each raised."""
    if not groups:
        return []
    with ThreadPoolExecutor(len(groups)) as pool:
        return [done.exception() for done in [pool.submit(act, group) for group in groups]]


def _agree(groups: Sequence[PeerGroup]) -> None:
    for fingerprint in ("a", "another, longer one"):
        for error in _each(groups, lambda group, text=fingerprint: group.agree(text)):
            assert error is None, f"members with the same fingerprint did not agree: {error}"


def _disagree(groups: Sequence[PeerGroup]) -> None:
    errors = _each(groups, lambda group: group.agree("odd" if group.membership.me == 1 else "even"))
    raised = [error for error in errors if error]
    assert raised or not groups, "members with different fingerprints agreed"
    for error in raised:
        assert isinstance(error, GroupError)
        for side in ("odd", "even"):
            assert side in str(error), f"both sides should be shown: {error}"


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
