"""The virtual world: a clock that jumps, exchanges that take the time their bytes take, and islands that wait for them.

The flows are the real ones (`atoll.sync.flow`). A meeting's bytes start to move when its last member has posted, as
over torch.distributed, and are there together; what is answered then is only that it landed.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from atoll.sim.faults import Restarts
from atoll.sim.network import Network, Resource, Traffic
from atoll.sim.trace import Trace
from atoll.wire import KEEPER, Fold, Keep, Key, Landed, Post, Reply

HOST = 0
"""The island whose link a keeper shares."""
Act = Callable[[float], None]
Sizes = Callable[[Post], tuple[Fold, int, int]]
"""What a post stands for: its fold, bits of one wire of the message, and bits of its result."""


@dataclass
class Meeting:
    """An exchange: what each has posted, who waits for it, whether all of it has come, and what a keeper answered."""

    posts: dict[int, Post] = field(default_factory=dict[int, Post])
    waiting: list[Act] = field(default_factory=list[Act])
    here: bool = False
    answer: Landed | None = None
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

    Args: network; sizes: what a post stands for. trace: is told what happens. restarts: how whole collectives fail and
    begin again, if they do.
    Attributes: handed_in: is called with what arrives at a keeper, and by whom.
    """

    def __init__(self, network: Network, sizes: Sizes, trace: Trace, restarts: Restarts | None = None) -> None:
        self.sizes, self.trace = sizes, trace
        self.clock, self.traffic = Clock(), Traffic(network)
        self.handed_in: Callable[[float, int, Post], None] = lambda now, me, post: None
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
        to = (KEEPER, me) if post.to == (KEEPER,) else post.to
        self._where[me, post.key] = to
        meeting = self._meetings.setdefault((post.key, to), Meeting())
        meeting.posts[me] = post
        if post.to == (KEEPER,):
            _, wire, _ = self.sizes(post)
            self.trace.sent[me] += wire / 8
            self._move(me, HOST, wire, lambda now: self.handed_in(now, me, post))
        elif len(meeting.posts) == len(to):
            self._meet(meeting, to)
        return post.key

    def take(self, me: int, ticket: Key) -> Landed | None:
        """The answer, if it is here."""
        place = (ticket, self._where[me, ticket])
        meeting = self._meetings[place]
        if not meeting.here:
            return None
        meeting.taken += 1
        del self._where[me, ticket]
        if meeting.taken == len(meeting.posts):
            del self._meetings[place]
        post = meeting.posts[me]
        return meeting.answer or Landed(ticket, post.edges.hears if post.edges else post.to, 1.0)

    def wake(self, me: int, ticket: Key, act: Act) -> None:
        """Call when the answer is here."""
        self._meetings[ticket, self._where[me, ticket]].waiting.append(act)

    def reply(self, reply: Reply) -> None:
        """A keeper's answer leaves now: the anchor, in the width that the push would have."""
        worker, key = reply.push.worker, reply.push.key
        meeting = self._meetings[key, (KEEPER, worker)]
        meeting.answer = replace(reply.landed, key=key)
        _, wire, _ = self.sizes(meeting.posts[worker])
        self._move(HOST, worker, wire, lambda now: self._arrived(now, meeting))

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
        self.clock.at(
            self.clock.now + latency,
            lambda now: self._begin(uses, bits, latency, lambda then: self._arrived(then, meeting)),
        )

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
