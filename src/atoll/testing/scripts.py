"""Scripts of the conformance suite of peer groups: what one member does, and what it must be answered.

Each yields the effects of a flow and asserts on the answers. What the others sent is known from a seed, so every member
judges for itself, in whatever process it lives.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.parts.codecs import error_feedback, exact, random_mask
from atoll.sync.flow import Answer, Effect, Flow
from atoll.testing.exchanges import HALF, Case, Held, Member
from atoll.trees import CHUNK, Tree
from atoll.wire import Edges, Keep, Landed, Lost, Post, Reduce, Snapshot, Sum, Take, bytes_sent


def _is_mean(case: Case, answer: tuple[Landed | Lost, Tensor], peers: tuple[int, ...], share: float = 1.0) -> None:
    """Args: peers: whose mean it is. share: the part of those asked that count, heard by this member or not."""
    outcome, got = answer
    assert isinstance(outcome, Landed), f"{case}, of which {peers} should count, was lost: {outcome.why}"
    assert outcome.peers == peers, f"{case}: the contributions of {outcome.peers} counted, not those of {peers}"
    assert outcome.share == share
    want = case.mean(peers)
    if isinstance(case.fold, Sum):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6), (
            f"{case}: the sum is wrong by {(got - want).abs().max()}"
        )
    else:
        assert torch.equal(got, want), (
            f"{case} of {peers}: {int((got != want).sum())} values differ from a plain loop's"
        )
    norm = torch.linalg.vector_norm(want, dtype=torch.float64).item()
    assert math.isclose(outcome.mean_norm, norm, rel_tol=1e-3), f"{case}: mean_norm is {outcome.mean_norm}, not {norm}"
    for worker, seen in zip(peers, outcome.norms, strict=True):
        sent = torch.linalg.vector_norm(case.seen(worker), dtype=torch.float64).item()
        assert math.isclose(seen, sent, rel_tol=1e-3), f"{case}: the norm of worker {worker} is {seen}, not {sent}"
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
    for fold in (Keep(), Reduce(exact())):
        yield from _counted(member, Case(1001, fold, random_mask(0.25, seed=7).at(3)))
    return []


def _long(member: Member) -> Flow:
    """Many chunks, with a remainder smaller than the number of members."""
    yield from _counted(member, Case(2 * CHUNK + 1, Keep()))
    yield from _counted(member, Case(2 * CHUNK + 1, Sum(), overlapped=True))
    yield from _counted(member, Case(6 * CHUNK + 3, Reduce(exact()), overlapped=True))
    yield from _counted(member, Case(5 * CHUNK + 3, Keep(), HALF, overlapped=True))
    yield from _counted(member, Case(3 * CHUNK + 70_001, Reduce(HALF), HALF))
    for fold, overlapped in ((Keep(), False), (Reduce(exact()), False), (Keep(), True)):
        yield from _counted(member, Case(CHUNK + 3, fold, parts=2, overlapped=overlapped))
    return []


def _counted(member: Member, case: Case) -> Generator[Effect, Answer, None]:
    everyone = member.everyone
    post, source = member.post(case)
    yield post
    outcome, got = yield from member.taken(post, source)
    _is_mean(case, (outcome, got), everyone)
    assert isinstance(outcome, Landed)
    _sent(member, case, outcome)
    if isinstance(source, Held):
        assert torch.equal(source.flat, case.values(member.me)), f"{case}: the source was written to"


def _sent(member: Member, case: Case, landed: Landed, told: int | None = None) -> None:
    """The bytes of an exchange with everyone are as announced; who has no all-reduce sums from point to point."""
    everyone, refused = member.everyone, member.me not in landed.peers
    index = everyone.index(member.me)
    folds = [case.fold, Reduce(exact())] if isinstance(case.fold, Sum) else [case.fold]
    counted = [
        bytes_sent(fold, case.codec, case.layout, len(everyone), index, refused=refused, told=told) for fold in folds
    ]
    assert landed.sent in counted, f"{case}: {landed.sent} bytes were sent, but {counted} were announced"


def _weights(member: Member) -> Flow:
    """Contributions are weighted, and the sum is divided by the weights of those that count."""
    weights = {worker: 0.25 + worker for worker in member.everyone}
    for fold in (Keep(), Reduce(exact()), Sum()):
        for case in (
            Case(1001, fold, weights=weights),
            Case(1002, fold, weights={**weights, 0: 0.0}, overlapped=True),
        ):
            _is_mean(case, (yield from member.exchange(case)), member.everyone)
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
        _is_mean(case, (outcome, got), good, len(good) / len(everyone))
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
    _is_mean(blocking, (yield from member.exchange(blocking)), member.everyone)
    for index in (2, 0, 1):
        answer = yield from member.taken(*flying[index])
        _is_mean(cases[index], answer, member.everyone)
    return []


def _two_blocking(member: Member) -> Flow:
    """Two blocking exchanges are posted before the first is taken."""
    cases = [Case(1004), Case(CHUNK + 1, Keep(), HALF)]
    posted: list[tuple[Post, Held | Snapshot]] = []
    for case in cases:
        posted.append(member.post(case))
        yield posted[-1][0]
    for case, (post, source) in zip(cases, posted, strict=True):
        _is_mean(case, (yield from member.taken(post, source)), member.everyone)
    return []


def _idempotent(member: Member) -> Flow:
    """A post that is repeated counts once, and gets the same ticket."""
    case = Case(1005, overlapped=True)
    post, source = member.post(case)
    first = yield post
    again = yield replace(post, source=Snapshot(Tree(source.layout, case.values(member.me))))
    assert first == again == post.key
    _is_mean(case, (yield from member.taken(post, source)), member.everyone)
    return []


def _subsets(member: Member) -> Flow:
    """Any of the members can meet without the others; so can one alone, which sends nothing."""
    workers = member.everyone
    for to in [workers[index : index + 2] for index in range(0, len(workers) - 1, 2)] + [workers[1:]]:
        for case in (Case(1006, overlapped=True), Case(CHUNK + 9, Keep(), HALF), Case(1007, Sum())):
            post, source = member.post(case, to)  # by all, so that exchanges are numbered alike
            if member.me in to:
                yield post
                _is_mean(case, (yield from member.taken(post, source)), to)
    alone = Case(1008, Keep())
    outcome, got = yield from member.exchange(alone, (member.me,))
    _is_mean(alone, (outcome, got), (member.me,))
    assert isinstance(outcome, Landed)
    assert outcome.sent == 0
    return []


def _edges(member: Member, hops: Sequence[int]) -> Edges:
    """On a ring of the members: each tells those that are `hops` ahead, and hears those that are as far behind."""
    workers, me = member.everyone, member.everyone.index(member.me)
    heard, told = ({workers[(me + sign * hop) % len(workers)] for hop in hops} for sign in (-1, 1))
    return Edges(hears=tuple(sorted({member.me, *heard})), tells=tuple(sorted(told)))


def _directed(member: Member) -> Flow:
    """Who hears only some gets the mean of these, and sends to those only that hear it; one that is refused is in
    nobody's mean."""
    everyone = member.everyone
    weights = {worker: 0.25 + worker for worker in everyone}
    cases = [
        Case(1001, Keep()),
        Case(1005, Keep(), HALF, overlapped=True),
        Case(1002, Keep(), parts=2, weights=weights),
        Case(1003, Keep(), HALF, scale={1: math.nan}, quorum=0.3),
        Case(1004, Keep(), scale={1: math.inf}, quorum=0.3, overlapped=True, weights=weights),
    ]
    for hops in ([1], [len(everyone) - 1], [1, len(everyone) // 2]):
        edges = _edges(member, hops)
        for case in cases:
            good = tuple(worker for worker in everyone if worker not in case.scale)
            post, source = member.post(case)
            yield replace(post, edges=edges)
            answer = yield from member.taken(post, source)
            heard = tuple(worker for worker in good if worker in edges.hears)
            _is_mean(case, answer, heard, len(good) / len(everyone))
            assert isinstance(answer[0], Landed)
            _sent(member, case, answer[0], len(edges.tells))
    return []


def _deaf(member: Member) -> Flow:
    """A member that hears nobody who counts, or nobody who weighs anything, loses the round alone: nothing is
    written."""
    everyone = member.everyone
    edges = _edges(member, [1])
    for overlapped in (False, True):
        for case in (
            Case(1010, Keep(), scale=dict.fromkeys(everyone[1:], math.nan), quorum=0.1, overlapped=overlapped),
            Case(1011, Keep(), weights=dict.fromkeys(everyone[1:], 0.0), overlapped=overlapped),
        ):
            good = tuple(worker for worker in everyone if worker not in case.scale)
            post, source = member.post(case)
            yield replace(post, edges=edges)
            outcome, got = yield from member.taken(post, source)
            if everyone[0] in edges.hears:
                heard = tuple(worker for worker in good if worker in edges.hears)
                _is_mean(case, (outcome, got), heard, len(good) / len(everyone))
            else:
                assert isinstance(outcome, Lost), f"{case}: the mean of nothing was handed out"
                assert f"nothing that worker {member.me} hears counts" in outcome.why
                assert torch.equal(got.nan_to_num(7.0), case.values(member.me).nan_to_num(7.0))
    return []


def _remembering(member: Member) -> Flow:
    """A codec's memory moves with what was sent only: a contribution that is refused leaves it."""
    codec = error_feedback(HALF, decay=1.0)
    shape = Case(1001, Keep(), codec, quorum=0.3, overlapped=True)
    state = codec.init(shape.layout)
    left = {worker: torch.zeros(shape.layout.numel) for worker in member.everyone}
    for scale in (1.0, math.nan, 1.0):
        case, seen = replace(shape, scale={1: scale}), dict[int, Tensor]()
        for worker in member.everyone:
            if worker != 1 or math.isfinite(scale):
                wanted = left[worker] + case.values(worker)
                seen[worker] = wanted.half().float()
                left[worker] = wanted - seen[worker]
        post, source = member.post(case)
        yield replace(post, codec_state=state)
        outcome, got = yield from member.taken(post, source)
        assert isinstance(outcome, Landed)
        assert outcome.peers == tuple(seen)
        assert torch.equal(got, sum(seen.values(), start=torch.zeros_like(got)) / len(seen))
        assert torch.equal(state["residual"], left[member.me])
    return []


def _looks(member: Member) -> Flow:
    """A look is answered with the round, or with nothing, and then the round is still there."""
    for to in (member.everyone, (member.me,)):
        case = Case(1009, Keep(), overlapped=True)
        post, source = member.post(case, to)
        yield post
        outcome = yield Take(post.key, poll=True)
        if outcome is None:
            outcome = yield Take(post.key)
        assert isinstance(outcome, Landed)
        assert isinstance(source, Snapshot)
        _is_mean(case, (outcome, source.tree.flat), to)
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
    _directed,
    _deaf,
    _remembering,
    _looks,
)
LONG: Sequence[Callable[[Member], Flow]] = (_long,)
"""Of many chunks: for one number of members."""
