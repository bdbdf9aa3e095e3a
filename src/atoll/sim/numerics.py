"""What exchanges come to: nothing but shapes (TIMING), or the values that real groups form (REAL)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from atoll.faults import Faults
from atoll.sim.copies import changed, made
from atoll.sim.hollow import Hollow
from atoll.sync.state import SyncState
from atoll.wire import (
    Collect,
    Fold,
    Keep,
    KeeperGroup,
    Landed,
    Lost,
    PeerGroup,
    Post,
    Push,
    Reply,
    Snapshot,
    Take,
)


class Numerics(Protocol):
    """Answers for the world, which decides when they come and whose contributions count."""

    def sizes(self, post: Post) -> tuple[Fold, int, int]:
        """What a post stands for: its fold, bits of one wire of the message, and bits of its result."""
        ...

    def carried(self, state: SyncState) -> float:
        """Bits of what an island fetches from another one to join."""
        ...

    def meet(self, posts: Mapping[int, Post], takes: Mapping[int, Take]) -> Mapping[int, Landed | Lost]:
        """The answers of an exchange whose members have all come, by worker. `takes`: of those that read live."""
        ...

    def hand_in(self, me: int, post: Post) -> Lost | None:
        """A contribution has come to the keeper, or was lost on the way."""
        ...

    def collect(self, collect: Collect) -> Sequence[Push]:
        """What has come to the keeper for one fragment."""
        ...

    def reply(self, reply: Reply) -> None:
        """The keeper answers."""
        ...

    def answer(self, reply: Reply) -> Landed | Lost:
        """What the keeper answered, once it has come, under its own key or that of the push."""
        ...


class Shapes:
    """No arithmetic: every contribution that is heard counts, and nothing is in it."""

    def __init__(self, hollow: Hollow, faults: Faults) -> None:
        self.sizes = hollow.sizes
        self.carried = hollow.carried
        self._faults = faults
        self._pushes = defaultdict[tuple[int, int], list[Push]](list)

    def meet(self, posts: Mapping[int, Post], takes: Mapping[int, Take]) -> Mapping[int, Landed | Lost]:
        """All of them, but for messages that get lost."""
        first = next(iter(posts.values()))
        key, to = first.key, first.to
        lost = self._faults.lost(key, to) if len(to) > 1 else frozenset[int]()
        heard = tuple(worker for worker in to if worker not in lost) if lost else to
        if not len(heard) > first.quorum * len(to):
            return dict.fromkeys(to, Lost(key, f"{len(heard)} of {len(to)} contributions count"))
        landed = Landed(key, heard, len(heard) / len(to), dropped=tuple(sorted(lost)))
        if first.edges is None:
            return dict.fromkeys(to, landed)
        return {me: _heard(landed, post) for me, post in posts.items()}

    def hand_in(self, me: int, post: Post) -> Lost | None:
        """One more, unless its message is lost."""
        if self._faults.loss and self._faults.lost(post.key, (me,)):
            return Lost(post.key, f"worker {me} was not heard")
        key, source = post.key, post.source
        assert isinstance(source, Snapshot)
        push = made(Push, key=key, worker=me, weight=post.weight, norm=1.0, values=source.tree)
        self._pushes[key[:2]].append(push)
        return None

    def collect(self, collect: Collect) -> Sequence[Push]:
        """What has come for one fragment."""
        return self._pushes.pop((collect.rule, collect.fragment), [])

    def reply(self, reply: Reply) -> None:
        """The reply itself has all of it."""

    def answer(self, reply: Reply) -> Landed | Lost:
        """What the reply says."""
        return reply.landed


def _heard(landed: Landed, post: Post) -> Landed | Lost:
    assert post.edges is not None
    peers = tuple(worker for worker in landed.peers if worker in post.edges.hears)
    return changed(landed, peers=peers) if peers else Lost(landed.key, "nothing that was heard counts")


class Real:
    """The arithmetic of real groups in one process: what a run in turns would form.

    Args: groups: of all islands in order of worker numbers, whose `take` may be asked without waiting. keeper: the end
    of a keeper, if the strategy has one.
    """

    def __init__(self, groups: Sequence[PeerGroup], keeper: KeeperGroup | None = None) -> None:
        self._groups, self._keeper = groups, keeper

    def sizes(self, post: Post) -> tuple[Fold, int, int]:
        """Of the message as it is."""
        layout = post.source.layout
        item, lengths, fold = layout.dtype.itemsize, layout.lengths.items(), post.fold
        wire = sum(8 * post.codec.nbytes(length, item) * count for length, count in lengths)
        if isinstance(fold, Keep):
            return fold, wire, 0
        result = getattr(fold, "result", post.codec)
        return fold, wire, sum(8 * result.nbytes(length, item) * count for length, count in lengths)

    def carried(self, state: SyncState) -> float:
        """Anchors (live, where there are none), outer states and what is in flight."""
        live = [fragment.layout for fragment in state.fragments if not fragment.anchor]
        nbytes = sum(layout.numel * layout.dtype.itemsize for layout in live)
        nbytes += sum(tensor.nbytes for name, tensor in state.tensors() if not name.startswith("codec"))
        return 8.0 * nbytes

    def meet(self, posts: Mapping[int, Post], takes: Mapping[int, Take]) -> Mapping[int, Landed | Lost]:
        """Post all, then come for all: the last one's coming forms the values."""
        answers: dict[int, Landed | Lost] = {}
        for me, post in posts.items():
            self._groups[me].post(post)
        for _ in range(2):
            for me, post in posts.items():
                if me not in answers:
                    answer = self._groups[me].take(takes.get(me) or Take(post.key), wait=False)
                    if answer:
                        answers[me] = answer
        return answers

    def hand_in(self, me: int, post: Post) -> Lost | None:
        """As a worker would."""
        self._groups[me].post(post)
        answer = self._groups[me].take(Take(post.key, poll=True), wait=False)
        assert not isinstance(answer, Landed), "a keeper answers when it looks"
        return answer

    def collect(self, collect: Collect) -> Sequence[Push]:
        """As a keeper would."""
        assert self._keeper is not None
        return self._keeper.collect(collect)

    def reply(self, reply: Reply) -> None:
        """As a keeper would."""
        assert self._keeper is not None
        self._keeper.reply(reply)

    def answer(self, reply: Reply) -> Landed | Lost:
        """As a worker would."""
        answer = self._groups[reply.push.worker].take(Take(reply.push.key, poll=True), wait=False)
        assert answer is not None
        return answer
