"""The thread of an island's group: everything that touches its `Member`, and messages in and out.

Training hands it jobs and waits for what it comes to (`atoll.peers.wide.group`); the link's threads hand it what they
hear. Nothing else is shared.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from atoll.errors import AtollError, GroupError, LeftBehind
from atoll.peers.wide.entering import Entry, Fetching
from atoll.peers.wide.handed import Handed
from atoll.peers.wide.lanes import always
from atoll.peers.wide.link import Link, Priority
from atoll.peers.wide.member import Member
from atoll.peers.wide.messages import (
    COORDINATOR,
    MEAN,
    STATE,
    BadMessage,
    Beat,
    Bulk,
    Fetch,
    Hello,
    Lease,
    Message,
    Promise,
    Ready,
    Settle,
    Welcome,
    read,
    write,
)
from atoll.peers.wide.offers import ENTERED, PLACE, SAMPLE, STANDS, Offers
from atoll.peers.wide.samples import Samples
from atoll.wire import Key, Membership, Post

BEAT_S = 1.0
"""Seconds between two signs of life."""


Found = TypeVar("Found")


@dataclass
class Progress:
    """What an island says of itself in its beats."""

    loss: float = 0.0
    speed: float = 0.0


@dataclass
class Engine:
    """The part of a group that works beside training: worker `link.me` of run `run`.

    Args: link: the way to the others, not started yet; the group closes it. version: of the code, alike on all. step:
    from which this island could go on by itself (0: from the first weights). patience: seconds of silence in an
    exchange after which the coordinator is asked.
    told: what all must have in common beside the strategy and the first weights.
    Attributes: progress: what is told of this island; bad: messages that were none.
    """

    link: Link
    run: str
    version: str
    step: int = 0
    patience: float = 10.0
    told: str = ""
    progress: Progress = field(default_factory=Progress)
    bad: int = 0
    membership: Membership = field(init=False)
    member: Member = field(init=False)

    def __post_init__(self) -> None:
        self.membership = Membership((self.link.me,), self.link.me)
        self.member = Member(self.link.me, self._send, self.patience)
        self.offers, self._samples = Offers(self._follow), Samples()
        self.units = Handed(self._tell, self._do)
        self._fetching = Fetching(self._fetch, self._wait_a_little)
        self._entry: Entry | None = None
        self._took_part = False
        self._witness: Future[str] | None = None
        self._written: tuple[Message | None, Sequence[bytes | memoryview]] = (None, ())
        self._hello: Hello | None = None
        self._meets: int | None = None
        self._met: Membership | None = None
        self._posts: dict[Key, Post] = {}
        self._begun: set[Key] = set()
        self._looked, self._at = -1, (-1, -1)
        self._owed: dict[int, Key] = {}
        self._error: AtollError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._loop, name=f"atoll-wide-{self.link.me}", daemon=True)
        self.link.start(self._hears, self._sees)
        self._thread.start()

    # for the training thread

    def _admitted(self) -> bool:
        newest = self.member.newest
        return newest is not None and self.link.me in {*newest.workers, *newest.joining}

    def _wait(self, look: Callable[[], Found | None], *, checks: bool = True) -> Found:
        with self._changed:
            while True:
                if checks:
                    self._check()
                if self._closed:
                    raise GroupError(f"worker {self.link.me} closed the group while something waited in it")
                if (found := look()) is not None:
                    return found
                self._changed.wait(1.0)

    def _check(self) -> None:
        if self._error:
            raise self._error

    def _fail(self, error: AtollError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _fetch(self, donor: int, fetch: Fetch) -> None:
        self._do(lambda: self._send(donor, fetch, Priority.CONTROL))

    def _wait_a_little(self, seconds: float) -> None:
        with self._changed:
            self._check()
            newest = self.member.newest
            if self._entry and newest and self._entry.late(newest.number):
                raise LeftBehind(
                    "the others have changed who takes part faster than a state could be fetched; come again"
                )
            self._changed.wait(min(seconds, BEAT_S))

    def _caught_up(self) -> None:
        self._do(lambda: self._tell(Ready(self.member.step)))

    # the thread

    def _do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)
        beaten = 0.0
        while not self._closed:
            try:
                busy = self.member.work()
                self._act(busy)
                now = time.monotonic()
                if now - beaten >= BEAT_S:
                    beaten = now
                    self._beat(now)
            except AtollError as error:
                self._fail(error)
            except Exception as error:
                wrapped = GroupError(
                    f"an exchange failed with {type(error).__name__}: {error}; the fragment it was writing may be half "
                    "moved, so go on from the last checkpoint"
                )
                wrapped.__cause__ = error
                self._fail(wrapped)

    def _act(self, busy: bool) -> None:
        """Do what is asked for and what came; wait for it a little, if there is nothing else to do."""
        try:
            self._jobs.get(block=not busy, timeout=min(0.2, BEAT_S))()
            for _ in range(64):
                self._jobs.get_nowait()()
        except queue.Empty:
            pass
        member = self.member
        if member.refused:
            self._fail(GroupError(member.refused))
        elif member.error:
            self._fail(GroupError(member.error))
        elif member.out:
            self._fail(LeftBehind(f"{member.out}; come again, and fetch their state"))
        if self._meets is not None and (met := member.meet(self._meets)):
            self._meets, self._met = None, met
        with self._changed:
            self._changed.notify_all()

    def _beat(self, now: float) -> None:
        self.member.tick(now)
        newest = self.member.epochs[-1].number if self.member.epochs else -1
        mine = self.progress
        self.member.beat(Beat(self.member.step, newest, self.link.sent, mine.loss, mine.speed))
        self.units.again()
        if self._hello and not self._admitted():
            self._tell(self._hello)
        for donor, key in self._owed.items():
            self._send(donor, Fetch(key, 0), Priority.CONTROL)

    def _send(self, to: int, message: Message, priority: Priority) -> None:
        if isinstance(message, Promise):
            # who comes in by it holds what has landed here: that must be known, should this island be lost
            self.units.again()
        # the same message goes to many: it is written once
        if message is not self._written[0]:
            self._written = (message, write(message))
        wanted = always
        if isinstance(message, Bulk) and message.phase == MEAN:
            wanted = partial(self.member.wants, message)
        self.link.send(to, self._written[1], priority, wanted)

    def _tell(self, message: Message | None) -> None:
        if message is not None:
            self._send(COORDINATOR, message, Priority.CONTROL)

    def _give(self, sender: int, fetch: Fetch) -> None:
        """Send what is offered; what is not there yet is said to be none, and follows when it is."""
        if fetch.key.rule == ENTERED:
            self.offers.entered(sender, fetch.key.round)
            payload, count = memoryview(b""), 1
        elif fetch.key.rule == STANDS:
            payload, count = memoryview(PLACE.pack(*self._at)), 1
        elif fetch.key.rule == SAMPLE:
            payload, count = self._samples.take(fetch.chunk)
        else:
            payload, count = self.offers.piece(fetch.key, fetch.chunk, sender)
        priority = Priority.OVERLAPPED if len(payload) else Priority.CONTROL
        self._send(sender, Bulk(fetch.key, STATE, count, (), fetch.chunk, payload), priority)

    def _follow(self, key: Key, asked: Collection[tuple[int, int]]) -> None:
        """What was asked for is there now."""
        for sender, chunk in asked:
            self._do(lambda sender=sender, chunk=chunk: self._give(sender, Fetch(key, chunk)))

    def _hears(self, sender: int, frame: bytes) -> None:
        self._do(lambda: self._read(sender, frame))

    def _read(self, sender: int, frame: bytes) -> None:
        try:
            message = read(frame)
        except BadMessage:
            self.bad += 1
            return
        match message:
            case Fetch():
                self._give(sender, message)
            case Bulk() if message.phase == STATE and message.key.rule == ENTERED:
                self._owed.pop(sender, None)
            case Bulk() if message.phase == STATE:
                self._fetching.arrived(sender, message)
            case Lease() if sender == COORDINATOR:
                self.units.handed(message)
            case _:
                if isinstance(message, Welcome) and sender == COORDINATOR and message.life == self.member.life:
                    self.units.welcomed(message)
                self.member.heard(sender, message, time.monotonic())
                if isinstance(message, Settle) and sender == COORDINATOR:
                    for worker in {worker for workers, _ in message.out for worker in workers} - {self.link.me}:
                        self.link.drop(worker)  # only now nothing more of this exchange is sent to it

    def _sees(self, address: int, alive: bool) -> None:
        def act() -> None:
            self.member.seen(address, alive)
            (self._fetching.gone.discard if alive else self._fetching.gone.add)(address)
            if not alive:
                self._owed.pop(address, None)
            if alive and address == COORDINATOR and self._hello and not self._admitted():
                self._tell(self._hello)

        self._do(act)
