"""The virtual world: a clock that jumps, exchanges that take the time their bytes take, and islands that wait for them.

The flows are the real ones (`atoll.sync.flow`). A meeting's bytes start to move when its last member has posted, as
over torch.distributed, and are there together; what is answered then comes from a group that holds the values (REAL),
or says only that it landed (TIMING).
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.sim.faults import Restarts
from atoll.sim.network import Network, Resource, Traffic
from atoll.sim.trace import Trace
from atoll.wire import KEEPER, Fold, Keep, Key, Landed, Lost, Post, Push, Take

Act = Callable[[float], None]
Sizes = Callable[[Post], tuple[Fold, int, int]]
"""What a post stands for: its fold, bits of one wire of the message, and bits of its result."""


class Answers(Protocol):
    """Where the answer of an exchange that has come is taken from."""

    def post(self, me: int, post: Post) -> None: ...

    def take(self, me: int, take: Take) -> Landed | Lost | None: ...


@dataclass
class Meeting:
    """An exchange: what each has posted, who waits for it, and whether all of it has come."""

    posts: dict[int, Post] = field(default_factory=dict[int, Post])
    waiting: list[Act] = field(default_factory=list[Act])
    here: bool = False
    taken: int = 0


class Clock:
    """Jumps from one thing to the next. What is due at one time happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Act]] = []
        self._order = itertools.count()

    def at(self, time: float, act: Act) -> None:
        """Do `act(time)` then."""
        heapq.heappush(self._due, (time, next(self._order), act))

    def run(self, traffic: Traffic, ended: Callable[[float, int], None]) -> None:
        """Go on until nothing is due and nothing moves."""
        while True:
            moving = traffic.next()
            if self._due and (moving is None or self._due[0][0] <= moving[0]):
                self.now, _, act = heapq.heappop(self._due)
                act(self.now)
            elif moving:
                self.now = moving[0]
                traffic.end(self.now, moving[1])
                ended(self.now, moving[1])
            else:
                return


class World:
    """All islands' exchanges on one network.

    Args: network; answers: of exchanges. sizes: what a post stands for. trace: is told what happens. restarts: how
    whole collectives fail and begin again, if they do. keeper_at: the island whose link a keeper shares.
    """

    def __init__(
        self,
        network: Network,
        answers: Answers,
        sizes: Sizes,
        trace: Trace,
        *,
        restarts: Restarts | None = None,
        keeper_at: int = 0,
    ) -> None:
        self.answers, self.sizes, self.trace = answers, sizes, trace
        self.clock, self.traffic = Clock(), Traffic(network)
        self.keeper_at = keeper_at
        self.handed_in: Callable[[float, int, Key], None] = lambda now, me, key: None
        self._restarts = restarts
        self._meetings: dict[tuple[Key, tuple[int, ...]], Meeting] = {}
        self._where: dict[tuple[int, Key], tuple[int, ...]] = {}
        self._ends: dict[int, Act] = {}
        self._whole: dict[tuple[int, ...], dict[Resource, int]] = {}

    def run(self) -> None:
        """Until nothing happens any more."""
        self.clock.run(self.traffic, lambda now, number: self._ends.pop(number)(now))

    def post(self, me: int, post: Post) -> Key:
        """A contribution leaves now."""
        self.answers.post(me, post)
        to = (KEEPER, me) if post.to == (KEEPER,) else post.to
        self._where[me, post.key] = to
        meeting = self._meetings.setdefault((post.key, to), Meeting())
        meeting.posts[me] = post
        if post.to == (KEEPER,):
            _, wire, _ = self.sizes(post)
            self.trace.sent[me] += wire / 8
            self._move(me, self.keeper_at, wire, lambda now: self.handed_in(now, me, post.key))
        elif len(meeting.posts) == len(to):
            self._meet(meeting, to)
        return post.key

    def take(self, me: int, take: Take) -> Landed | Lost | None:
        """The answer, if it is here."""
        place = (take.ticket, self._where[me, take.ticket])
        meeting = self._meetings[place]
        if not meeting.here:
            return None
        answer = self.answers.take(me, take)
        if answer is not None:
            meeting.taken += 1
            del self._where[me, take.ticket]
            if meeting.taken == len(meeting.posts):
                del self._meetings[place]
        return answer

    def wake(self, me: int, ticket: Key, act: Act) -> None:
        """Call when the answer is here."""
        self._meetings[ticket, self._where[me, ticket]].waiting.append(act)

    def reply(self, push: Push) -> None:
        """A keeper's answer leaves now: the anchor, in the width that the push would have."""
        meeting = self._meetings[push.key, (KEEPER, push.worker)]
        _, wire, _ = self.sizes(meeting.posts[push.worker])
        self._move(self.keeper_at, push.worker, wire, lambda now: self._arrived(now, meeting))

    def _move(self, teller: int, hearer: int, bits: float, act: Act) -> None:
        self._begin(self.traffic.uses([(teller, hearer)]), bits, self.traffic.latency((teller, hearer)), act)

    def _meet(self, meeting: Meeting, to: tuple[int, ...]) -> None:
        """All are here: headers go round, then the bytes move."""
        if len(to) == 1:
            self._arrived(self.clock.now, meeting)
            return
        first = meeting.posts[to[0]]
        fold, wire, result = self.sizes(first)
        bits = float(wire) if isinstance(fold, Keep) else (wire + result) / len(to)
        edges = [(me, told) for me, post in meeting.posts.items() if post.edges for told in post.edges.tells]
        for member in to:
            self.trace.sent[member] += bits / 8 * (1 if edges else len(to) - 1)
        if self._restarts and len(to) > 2 and not edges:
            bits *= self._restarts.attempts(first.key, len(to))
        latency = self.traffic.latency(to)
        uses = self.traffic.uses(edges) if edges else self._all(to)
        arrived: Act = lambda now: self._arrived(now, meeting)  # noqa: E731 (a closure for two calls)
        self.clock.at(self.clock.now + latency, lambda now: self._begin(uses, bits, latency, arrived))

    def _all(self, to: tuple[int, ...]) -> dict[Resource, int]:
        if to not in self._whole:
            self._whole[to] = self.traffic.all_to_all(to)
        return self._whole[to]

    def _begin(self, uses: dict[Resource, int], bits: float, latency: float, act: Act) -> None:
        number = self.traffic.begin(self.clock.now, uses, bits)
        self._ends[number] = lambda end: self.clock.at(end + latency, act)

    def _arrived(self, now: float, meeting: Meeting) -> None:
        meeting.here = True
        waiting, meeting.waiting = meeting.waiting, []
        for wake in waiting:
            wake(now)
