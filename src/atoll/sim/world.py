"""The virtual world: exchanges that take the time their bytes take, and islands that wait for them.

The flows are the real ones (`atoll.sync.flow`). A meeting's bytes begin to move when all of its members have come: one
whose message is a snapshot when it posts, one that reads live tensors when it stands still to take. They are there
together, as over torch.distributed. Who cannot be reached is left out by those who can reach one another (`Outages`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from atoll.sim.clock import Act, Clock, Tell, Told, do
from atoll.sim.copies import changed
from atoll.sim.faults import Restarts
from atoll.sim.network import Traffic
from atoll.sim.numerics import Numerics
from atoll.sim.trace import Trace
from atoll.sim.traffic import Load
from atoll.wire import KEEPER, Edges, Keep, Key, Landed, Lost, Post, Reply, Snapshot, Take

HOST = 0
"""The island that a keeper stands beside: they share its link, and need none between them."""
Members = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Move:
    """Bytes under way between members of a meeting.

    Attributes: bits: of each flow. flows: from each member. number: of the traffic, while they move.
    """

    members: Members
    loads: Mapping[Load, int]
    latency: float
    bits: float
    flows: int
    number: int = 0


@dataclass(slots=True)
class Letter:
    """An island's message to a keeper: bits of it and of the answer, who is told of the answer, and that, maybe under
    the keeper's key."""

    me: int
    key: Key
    bits: float
    act: Act | None
    answer: Landed | Lost | None = None


@dataclass(slots=True)
class Meeting:
    """An exchange: what each member has posted, who has come, who waits, what moves, and the answers.

    Attributes: missing: members that have not come. moving: numbers of what is under way, by who takes part in it.
    left: who has not taken its answer. follows: who came in while it was under way, and gets what another one gets.
    """

    key: Key
    to: Members
    missing: int
    left: set[int]
    # plain `dict`: there are many meetings, and `dict[int, Post]()` takes several times as long
    posts: dict[int, Post] = field(default_factory=dict)
    come: dict[int, Take | None] = field(default_factory=dict)
    waiting: dict[int, Act] = field(default_factory=dict)
    moving: dict[Members, Move] = field(default_factory=dict)
    answers: dict[int, Landed | Lost] = field(default_factory=dict)
    follows: dict[int, tuple[int, Snapshot]] = field(default_factory=dict)


class World:
    """All islands' exchanges on one network.

    Args: traffic: on the network. numerics: what exchanges come to. trace: is told what happens. restarts: how whole
    collectives fail and begin again, if they do.
    Attributes: closing: whether nobody begins another step. handed_in: is called when something has come to a keeper.
    expect: as `Clock.tell`, but for what comes to a keeper and is not seen before it looks.
    review: decides about a meeting when a member has come, where islands may be out of reach; left_out: is told when
    some have gone on without others.
    """

    def __init__(self, traffic: Traffic, numerics: Numerics, trace: Trace, restarts: Restarts | None = None) -> None:
        self.numerics, self.trace, self.traffic = numerics, trace, traffic
        self.clock = Clock()
        self.closing = False
        self.handed_in: Act = lambda now: None
        self.expect: Tell = self.clock.tell
        self.review: Callable[[Meeting], None] | None = None
        self.left_out: Callable[[Meeting, Members, Mapping[int, Landed | Lost]], None] = lambda *_: None
        self._restarts = restarts
        self._meetings: dict[tuple[Key, Members], Meeting] = {}
        self._where: dict[tuple[int, Key], Meeting] = {}
        self._letters: list[dict[Key, Letter]] = [{} for _ in traffic.network.islands]
        self._ends: dict[int, tuple[float, Tell, Told, Any]] = {}
        self._all = lru_cache(1 << 8)(lambda members: traffic.loads(traffic.all_to_all(members)))
        self._way = cache(self._loads_and_latency)

    def run(self) -> None:
        """Until nothing happens any more."""
        self.clock.run(self.traffic, self._ends)

    @property
    def meetings(self) -> list[Meeting]:
        """All between islands that are not over."""
        return list(self._meetings.values())

    def post(self, me: int, post: Post, told: Act) -> Key:
        """A contribution leaves now, if it is a snapshot; else when its worker stands still.

        Args: told: is called when a keeper's answer is here, if nobody waits for it.
        """
        if post.to == (KEEPER,):
            return self._push(me, post, told)
        meeting = self._meetings.get((post.key, post.to))
        if meeting is None:
            meeting = self._meetings[post.key, post.to] = Meeting(post.key, post.to, len(post.to), set(post.to))
        if me in meeting.posts:
            self._again(meeting, me)
        meeting.posts[me] = post
        meeting.left.add(me)
        self._where[me, post.key] = meeting
        if isinstance(post.source, Snapshot):
            self._comes(meeting, me, None)
        return post.key

    def _again(self, meeting: Meeting, me: int) -> None:
        """An island that took another one's place comes once more: what it was told before holds no longer."""
        if me in meeting.come:
            del meeting.come[me]
            meeting.missing += 1
        meeting.answers.pop(me, None)

    def take(self, me: int, take: Take) -> Landed | Lost | None:
        """The answer, if it is here."""
        if letter := self._letters[me].get(take.ticket):
            if letter.answer is None:
                return None
            self.close(letter)
            return changed(letter.answer, key=letter.key)
        meeting = self._where[me, take.ticket]
        # whoever follows another one has posted nothing, and nobody waits for it
        if me in meeting.posts and me not in meeting.answers and me not in meeting.come and not take.poll:
            self._comes(meeting, me, take)
        answer = meeting.answers.get(me)
        if answer is not None:
            self.leave(meeting, me)
        return answer

    def wake(self, me: int, ticket: Key, act: Act) -> None:
        """Call when the answer is here."""
        if letter := self._letters[me].get(ticket):
            letter.act = act
        else:
            self._where[me, ticket].waiting[me] = act

    def leave(self, meeting: Meeting, me: int) -> None:
        """An island has nothing more to do with a meeting."""
        self._where.pop((me, meeting.key), None)
        meeting.left.discard(me)
        if not meeting.left:
            self._meetings.pop((meeting.key, meeting.to), None)

    def follow(self, me: int, key: Key, other: int, snapshot: Snapshot) -> None:
        """An island that came in as another one gets what the other one gets from an exchange that is under way."""
        meeting = self._where[other, key]
        other, _ = meeting.follows.get(other, (other, snapshot))
        meeting.left.add(me)
        self._where[me, key] = meeting
        if other in meeting.answers:
            meeting.answers[me] = meeting.answers[other]
        else:
            meeting.follows[me] = (other, snapshot)

    def _comes(self, meeting: Meeting, me: int, take: Take | None) -> None:
        meeting.come[me] = take
        meeting.missing -= 1
        if self.review:
            if meeting.answers:
                self.trace.add(self.clock.now, me, "late", meeting.key)
            self.review(meeting)
        elif not meeting.missing:
            self.start(meeting, meeting.to)

    def start(self, meeting: Meeting, members: Members) -> None:
        """Those members are here and go on: headers go round, then the bytes move."""
        first = meeting.posts[members[0]]
        if len(members) == 1 or not len(members) > first.quorum * len(meeting.to):
            self._answer(meeting, members)
            return
        fold, wire, result = self.numerics.sizes(first)
        bits = float(wire) if isinstance(fold, Keep) else (wire + result) / len(members)
        edges = _edges(meeting, members) if first.edges else []
        if self._restarts and len(members) > 2 and not edges:
            bits *= self._restarts.attempts(first.key, len(members))
        latency = self.traffic.latency(members)
        loads = self.traffic.loads(self.traffic.uses(edges)) if edges else self._all(members)
        move = Move(members, loads, latency, bits, 1 if edges else len(members) - 1)
        meeting.moving[members] = move
        self.clock.tell(self.clock.now + latency, self._go_round, (meeting, move))

    def _go_round(self, what: tuple[Meeting, Move], now: float) -> None:
        """Headers have gone round."""
        meeting, move = what
        if meeting.moving.get(move.members) is move:
            move.number = self.traffic.start(now, move.loads, move.bits)
            self._ends[move.number] = move.latency, self.clock.tell, self._gone_round, what

    def _gone_round(self, what: tuple[Meeting, Move], now: float) -> None:
        meeting, move = what
        members = move.members
        if meeting.moving.get(members) is move:
            del meeting.moving[members]
            for member in members:
                self.trace.sent[member] += move.bits / 8 * move.flows
            self._answer(meeting, members)

    def stop(self, meeting: Meeting, members: Members) -> None:
        """What is under way between them is given up."""
        move = meeting.moving.pop(members)
        if move.number in self._ends:
            self.traffic.end(self.clock.now, move.number)
            del self._ends[move.number]

    def _answer(self, meeting: Meeting, members: Members) -> None:
        """All that these members sent one another has come."""
        whole, quorum = len(members) == len(meeting.to), meeting.posts[members[0]].quorum
        posts = meeting.posts if whole else _among(meeting, members)
        if len(members) > quorum * len(meeting.to):
            takes = {me: take for me in members if (take := meeting.come[me])}
            answers = self.numerics.meet(posts, takes)
        else:
            why = f"{len(members)} of {len(meeting.to)} can be reached, the quorum is more than {quorum:g} of them"
            answers = dict.fromkeys(members, Lost(meeting.key, why))
        if not whole:
            answers = {me: _as_asked(answer, meeting.to, members) for me, answer in answers.items()}
            self.left_out(meeting, members, answers)
        meeting.answers.update(answers)
        for me, (other, snapshot) in list(meeting.follows.items()):
            if other in answers:
                source = meeting.posts[other].source
                assert isinstance(source, Snapshot)
                snapshot.tree.flat.copy_(source.tree.flat)
                meeting.answers[me] = answers[other]
                del meeting.follows[me]
        self.tell(meeting)

    def tell(self, meeting: Meeting) -> None:
        """Wake whoever waits for an answer that is here."""
        now = self.clock.now
        for me in [me for me in meeting.waiting if me in meeting.answers]:
            # whoever goes on may make others go on
            if act := meeting.waiting.pop(me, None):
                act(now)

    def _push(self, me: int, post: Post, told: Act) -> Key:
        letter = self._letters[me].get(post.key)
        if letter is None:
            letter = self._letters[me][post.key] = Letter(me, post.key, self.numerics.sizes(post)[1], told)
        letter.act, letter.answer = told, None  # an island that took another one's place comes once more
        self._move(me, HOST, letter.bits, self.clock.tell, self._pushed, (letter, post))
        return post.key

    def _pushed(self, what: tuple[Letter, Post], now: float) -> None:
        """All of a message has come to the keeper."""
        letter, post = what
        self.trace.sent[letter.me] += letter.bits / 8 * (letter.me != HOST)
        if self._letters[letter.me].get(letter.key) is not letter:
            return  # its island died meanwhile, and the message with it
        if lost := self.numerics.hand_in(letter.me, post):
            self._answered(letter, lost)
        else:
            self.handed_in(now)

    def push(self, me: int, post: Post, told: Act) -> Letter:
        """A message of a new key, which nothing can stop, leaves for the keeper now.

        Args: told: is called when its answer is here.
        """
        letter = self._letters[me][post.key] = Letter(me, post.key, self.numerics.sizes(post)[1], told)
        self._move(me, HOST, letter.bits, self.expect, self._came, (letter, post))
        return letter

    def _came(self, what: tuple[Letter, Post], now: float) -> None:
        """The keeper looks, and finds that all of a message has come."""
        letter, post = what
        self.trace.sent[letter.me] += letter.bits / 8 * (letter.me != HOST)
        self.numerics.hand_in(letter.me, post)

    def reply(self, reply: Reply) -> None:
        """A keeper's answer leaves now: the anchor, in the width that the push would have."""
        self.numerics.reply(reply)
        worker = reply.push.worker
        if letter := self._letters[worker].get(reply.push.key):
            self._move(HOST, worker, letter.bits, self.clock.tell, self._replied, reply)
        else:
            self.numerics.answer(reply)  # whoever asked is gone

    def _replied(self, reply: Reply, now: float) -> None:
        """What a keeper answered has come."""
        answer = self.numerics.answer(reply)
        if letter := self._letters[reply.push.worker].get(reply.push.key):
            self._answered(letter, answer)

    def _answered(self, letter: Letter, answer: Landed | Lost) -> None:
        letter.answer, act = answer, letter.act
        if act:
            letter.act = None
            act(self.clock.now)

    def close(self, letter: Letter) -> None:
        """Its answer has been taken."""
        del self._letters[letter.me][letter.key]

    def forget(self, me: int) -> None:
        """A keeper's answers to an island are no longer waited for."""
        self._letters[me].clear()

    def fetch(self, me: int, other: int, bits: float, act: Act) -> None:
        """Bits of its state move from one island to another; then `act`."""
        self._move(other, me, bits, self.clock.tell, do, act)

    def _move(self, teller: int, hearer: int, bits: float, tell: Tell, act: Told, what: object) -> None:
        now = self.clock.now
        if teller == hearer:
            tell(now, act, what)
        else:
            loads, latency = self._way(teller, hearer)
            self._ends[self.traffic.start(now, loads, bits)] = latency, tell, act, what

    def _loads_and_latency(self, teller: int, hearer: int) -> tuple[Mapping[Load, int], float]:
        way = teller, hearer
        return self.traffic.loads(self.traffic.uses([way])), self.traffic.latency(way)


def _edges(meeting: Meeting, members: Members) -> list[tuple[int, int]]:
    return [
        (me, told) for me in members if (edges := meeting.posts[me].edges) for told in edges.tells if told in members
    ]


def _among(meeting: Meeting, members: Members) -> dict[int, Post]:
    """What a part of the members post to one another: the quorum stays a part of all."""
    found = dict[int, Post]()
    for me in members:
        post = meeting.posts[me]
        edges = post.edges
        if edges:
            hears, tells = (tuple(each for each in way if each in members) for way in (edges.hears, edges.tells))
            edges = Edges(hears, tells)
        quorum = post.quorum * len(meeting.to) / len(members)
        found[me] = replace(post, to=members, edges=edges, quorum=quorum)
    return found


def _as_asked(answer: Landed | Lost, to: Members, members: Members) -> Landed | Lost:
    """The answer of a part of the members, of all that were asked."""
    if isinstance(answer, Lost):
        return answer
    missing = set(to) - set(members)
    share = answer.share * len(members) / len(to)
    return replace(answer, share=share, dropped=tuple(sorted(missing.union(answer.dropped))))
