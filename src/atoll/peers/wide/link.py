"""Frames between the members of a run, each addressed by its number, over zenoh under mutual TLS.

    atoll/RUN/alive/WHO/SINCE         a token that ends with WHO's link: it is there, since then
    atoll/RUN/known/WHO/SINCE         the coordinator's token: it sees that one
    atoll/RUN/to/WHO/SINCE/FROM       frames to WHO
    atoll/RUN/pass/WHO/SINCE/FROM     frames that the coordinator is to pass on to WHO

All are zenoh peers. The coordinator tells them of each other, and those that can connect do so directly. zenoh passes
nothing on between peers, so a member that one sees only by the coordinator's token is sent frames through it: large
ones after a while only, for it may be that they are about to connect.

SINCE tells a process from one that had its number before. A member that is started anew counts at once, though the
others may wait for its silent predecessor a while; what was on its way to that one is dropped. The latest counts.

Each (destination, priority) has a queue and a thread, so that a frame waiting for a slow link holds up none of another
priority and none to another member; on the wire zenoh lets an earlier priority pass between the pieces of a frame.
"""

import atexit
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Protocol

import zenoh
from zenoh.handlers import FifoChannel

from atoll.errors import GroupError, UsageError
from atoll.peers.wide.bbr import SILENCE_S, STIR
from atoll.peers.wide.lanes import Lane, Part, Wanted, Way, always, is_large
from atoll.peers.wide.sessions import OPEN_S, follow, open_session
from atoll.peers.wide.sockets import Tuning, cut

COORDINATOR = -2
"""The coordinator's address; an island's is its worker number."""
PASSED = 256
"""Frames that the coordinator holds for a member, per priority, on behalf of others; more are dropped."""
UNHEARD = 64
"""Frames that have come and wait to be heard; then the senders wait."""

Heard = Callable[[int, bytes], None]
Seen = Callable[[int, bool], None]


class Priority(IntEnum):
    """What passes what on the way to the same member: earlier ones pass later ones."""

    CONTROL = 0
    BLOCKING = 1
    OVERLAPPED = 2


_ZENOHS = (zenoh.Priority.REAL_TIME, zenoh.Priority.DATA_HIGH, zenoh.Priority.DATA_LOW)
"""zenoh's name of each priority."""


class Link(Protocol):
    """One member's way to the others."""

    me: int
    sent: int

    def send(self, to: int, parts: Sequence[Part], priority: Priority, wanted: Wanted = always) -> None:
        """Queue one frame, the parts one after another, by reference. Never waits, whoever `to` is. The frame is
        dropped if it is wanted no more when its turn comes."""
        ...

    def drop(self, to: int) -> None:
        """Drop what is queued for a member that takes part no more, though it may seem to be there."""
        ...

    def start(self, heard: Heard, seen: Seen) -> None:
        """From now on call `heard(sender, frame)` and `seen(address, alive)`, from threads of the link's own."""
        ...

    def close(self) -> None:
        """Drop what is queued, and be gone for the others. Calling it again does nothing."""
        ...


class ZenohLink:
    """A link over zenoh; `sent` counts the bytes of frames that zenoh took, passed-on ones included.

    A frame to a member that is not there waits for it, `lanes.HOLD_S` at most; one that is queued when its member goes
    is dropped. Frames of one priority stay in order unless the way changes between direct and passed on. A frame may
    be heard before its sender is seen. `heard` must be quick: while it runs nothing else is heard, and what waits
    fills memory, then the senders' links.

    Args:
        run: the run's name; links of other runs are not seen.
        me: this member's number, or COORDINATOR.
        credentials: the folder of ca.pem, cert.pem and key.pem.
        listen: "host:port" each; none for a member that others cannot reach.
        connect: "host:port" of at least the coordinator; one of them must answer.
        lease_s: silence, in seconds, after which a member counts as gone; half of it while frames wait for it. A dead
            process is noticed at once.
    Raises: UsageError for a name, an address or files that cannot be used; GroupError if none of `connect` answers.
    """

    def __init__(
        self,
        run: str,
        me: int,
        credentials: Path,
        *,
        listen: Sequence[str] = (),
        connect: Sequence[str] = (),
        lease_s: float = 10.0,
    ) -> None:
        if not run or any(sign in run for sign in "/*$#?@ "):
            raise UsageError(f"a run cannot be named {run!r}; give letters, digits, dots and dashes")
        self.me, self.sent = me, 0
        self._root, self._since = f"atoll/{run}", time.time_ns()
        self._lock = threading.Lock()
        self._closed = False
        self._ways: dict[int, set[Way]] = {}
        self._lanes: dict[tuple[int, Priority], Lane] = {}
        self._past = list[threading.Thread]()
        self._put_at = dict[int, float]()
        # a token ends when nobody refers to it
        self._tokens: dict[tuple[int, int], zenoh.LivelinessToken] = {}
        self._session = open_session(credentials, listen, connect, lease_s)
        self._tuning = Tuning(self._session, lease_s / 2, self._hearers)
        self._followers = [*self._tuning.threads]
        self._leaving: threading.Thread | None = None
        atexit.register(self._end)

    def start(self, heard: Heard, seen: Seen) -> None:
        """From now on `heard` and `seen` are called, also for those that are there already."""

        def hears(sample: zenoh.Sample) -> None:
            sender = _numbers(sample, 1)
            # an empty one only pushes those before it through (`lanes.NUDGES_S`)
            if sender and not self._closed and len(sample.payload):
                heard(sender[0], sample.payload.to_bytes())

        def sees(sample: zenoh.Sample) -> None:
            if not (words := _numbers(sample, 2)):
                return
            (who, since), how = words, str(sample.key_expr).split("/")[-3]
            appeared = sample.kind == zenoh.SampleKind.PUT
            if who != self.me and not self._closed:
                if self.me == COORDINATOR:
                    self._make_known(who, since, appeared)
                for alive in self._changes(who, Way(since, how == "alive"), appeared):
                    seen(who, alive)

        def follows(what: str, act: Callable[[zenoh.Sample], None]) -> None:
            frames = self._session.declare_subscriber(f"{self._root}/{what}", FifoChannel(UNHEARD))
            self._followers.append(follow(frames, act))

        # in this order: who sees the token can send
        follows(f"to/{self.me}/{self._since}/*", hears)
        if self.me == COORDINATOR:
            follows("pass/*/*/*", self._pass_on)
        tokens, theirs = self._session.liveliness(), "alive" if self.me == COORDINATOR else "*"
        self._followers.append(follow(tokens.declare_subscriber(f"{self._root}/{theirs}/*/*", history=True), sees))
        self._tokens[self.me, self._since] = tokens.declare_token(f"{self._root}/alive/{self.me}/{self._since}")

    def send(self, to: int, parts: Sequence[Part], priority: Priority, wanted: Wanted = always) -> None:
        """Queue one frame for `to`. Raises: GroupError if the link is closed."""
        lane = self._lane(to, priority)
        if lane is None:
            raise GroupError(f"member {self.me} was to send to {to}, but its link is closed; open another")
        began = not lane.busy and is_large(parts)
        lane.put(self.me, parts, wanted)
        if began:
            self._tuning.share()

    def drop(self, to: int) -> None:
        """Drop what is queued for a member that takes part no more. While a frame waits for its link, zenoh may not say
        that the link has ended: it waits on in a lane that counts no more among those that share this one's speed."""
        with self._lock:
            self._close_lanes(to)
        self._tuning.share()

    def close(self) -> None:
        """Drop what is queued, and be gone for the others."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lanes = list(self._lanes.values())
            threads = [*self._past, *(lane.thread for lane in lanes)]
        self._tuning.stop()
        for lane in lanes:
            lane.close()
        # zenoh must have let go of the last frame before: in the other order both wait for each other
        if not _ended(threads, 0.2):
            cut(self._session.info.links())
            _ended(threads, 0.3)
        self._leaving = threading.Thread(target=self._leave, name="atoll-leaves", daemon=True)
        self._leaving.start()
        _ended([self._leaving, *self._followers], 0.4)

    def _leave(self) -> None:
        """Be gone, then end the session, which waits until attempts to connect that nobody answers are given up."""
        with self._lock:
            tokens = list(self._tokens.values())
        with suppress(zenoh.ZError):
            for token in tokens:
                token.undeclare()
            self._session.close()
        atexit.unregister(self._end)

    def _end(self) -> None:
        """With the process: a thread that comes back from zenoh when Python is gone aborts it."""
        self.close()
        if self._leaving:
            _ended([self._leaving, *self._followers], 2 * OPEN_S)

    def _lane(self, to: int, priority: Priority) -> Lane | None:
        with self._lock:
            if self._closed:
                return None
            if (to, priority) not in self._lanes:
                name, put = f"atoll-to-{to}-{priority.name.lower()}", partial(self._put, to, priority)
                self._lanes[to, priority] = Lane(name, put, self._best(to), self._tuning.unsent)
            return self._lanes[to, priority]

    def _hearers(self) -> tuple[int, int]:
        """To how many members large frames have been on their way lately, and for how many there are some now."""
        lanes = list(self._lanes.items())
        return len({to for (to, _), lane in lanes if lane.busy}), len({to for (to, _), lane in lanes if lane.full})

    def _put(self, to: int, priority: Priority, way: Way, origin: int, parts: Sequence[Part]) -> None:
        """Give a frame to zenoh; waits while the link is full."""
        frame = parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)
        stirs = to != COORDINATOR and frame and time.monotonic() - self._put_at.get(to, 0.0) > SILENCE_S
        with suppress(zenoh.ZError):  # the session was closed in the meantime
            self._session.put(
                f"{self._root}/{'to' if way.direct else 'pass'}/{to}/{way.since}/{origin}",
                frame,
                congestion_control=zenoh.CongestionControl.BLOCK,
                priority=_ZENOHS[priority],
                express=priority == Priority.CONTROL,
                attachment=STIR if stirs else None,
            )
            with self._lock:
                self.sent += len(frame)
                self._put_at[to] = time.monotonic()

    def _pass_on(self, sample: zenoh.Sample) -> None:
        """The coordinator's service to members that cannot reach each other."""
        if not (words := _numbers(sample, 3)):
            return
        to, since, origin = words
        lane = self._lane(to, Priority(_ZENOHS.index(sample.priority)))
        with self._lock:
            best = self._best(to)
        if lane is not None and best is not None and best.since == since and len(lane) < PASSED:
            lane.put(origin, [sample.payload.to_bytes()])

    def _make_known(self, who: int, since: int, there: bool) -> None:
        if there:
            token = self._session.liveliness().declare_token(f"{self._root}/known/{who}/{since}")
            self._tokens[who, since] = token
        elif token := self._tokens.pop((who, since), None):
            token.undeclare()

    def _best(self, who: int) -> Way | None:
        return max(self._ways.get(who, ()), default=None, key=lambda way: (way.since, way.direct))

    def _changes(self, who: int, way: Way, appeared: bool) -> list[bool]:
        """Note a token that appeared or went; returns what there is to say of the member, in order."""
        with self._lock:
            before = self._best(who)
            ways = self._ways.setdefault(who, set())
            (ways.add if appeared else ways.discard)(way)
            now = self._best(who)
            same = bool(before and now and before.since == now.since)
            if before and not same:
                self._close_lanes(who)
            for (to, _), lane in self._lanes.items():
                if to == who:
                    lane.aim(now)
        if same:
            return []
        return [alive for alive, one in ((False, before), (True, now)) if one]

    def _close_lanes(self, who: int) -> None:
        """Under the lock. zenoh may keep the threads for as long as a frame may wait: the next frame gets another."""
        for key in [key for key in self._lanes if key[0] == who]:
            lane = self._lanes.pop(key)
            lane.close()
            self._past = [thread for thread in (*self._past, lane.thread) if thread.is_alive()]


def _numbers(sample: zenoh.Sample, count: int) -> list[int]:
    """The last words of its key; none, if one of them is no number: a member may write to any key."""
    words = str(sample.key_expr).split("/")[-count:]
    return [int(word) for word in words] if all(re.fullmatch(r"-?[0-9]{1,20}", word) for word in words) else []


def _ended(threads: Sequence[threading.Thread], seconds: float) -> bool:
    """Wait for them, but not longer; whether they have come to their end."""
    until = time.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(until - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)
