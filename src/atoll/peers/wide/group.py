"""A worker's way to the others across the internet: a `PeerGroup` over a link, whose work is done by one thread.

The thread alone touches the `Member`; training hands it exchanges and waits for answers, or does not wait. Messages
come from the link's threads through one queue.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from atoll.errors import AtollError, GroupError, LeftBehind, UsageError
from atoll.peers.wide.entering import Entry, Fetching
from atoll.peers.wide.link import Link, Priority
from atoll.peers.wide.member import Member
from atoll.peers.wide.messages import (
    COORDINATOR,
    STATE,
    BadMessage,
    Beat,
    Bulk,
    Done,
    Fetch,
    Hello,
    Leave,
    Message,
    Ready,
    read,
    write,
)
from atoll.peers.wide.offers import KEPT, Offers
from atoll.wire import KEEPER, Key, Landed, Lost, Membership, Post, Snapshot, Source, Take

BEAT_S = 1.0
"""Seconds between two signs of life."""


Found = TypeVar("Found")
State = tuple[Mapping[str, Any], Sequence[tuple[str, Tensor]]]


@dataclass
class Progress:
    """What an island says of itself in its beats."""

    loss: float = 0.0
    speed: float = 0.0
    training: bool = False


@dataclass
class WideGroup:
    """Worker `link.me` of run `run`.

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
        self.offers = Offers()
        self._fetching = Fetching(self._fetch, self._wait_a_little)
        self._entry: Entry | None = None
        self._took_part = False
        self._hello: Hello | None = None
        self._meets: int | None = None
        self._met: Membership | None = None
        self._posts: dict[Key, Post] = {}
        self._begun: set[Key] = set()
        self._error: AtollError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._loop, name=f"atoll-wide-{self.link.me}", daemon=True)
        self.link.start(self._hears, self._sees)
        self._thread.start()

    # what training asks for

    def agree(self, fingerprint: str) -> None:
        """Say hello, and wait until the coordinator has an epoch with this island in it, to train or to fetch a state.

        Raises: GroupError if the coordinator refuses, with both sides shown.
        """
        self._hello = Hello(self.run, f"{fingerprint} {self.told}".strip(), self.version, self.step, uuid4().hex)
        self._do(lambda: self._tell(self._hello))
        self._wait(lambda: self._admitted() or None)
        newest = self.member.epochs[-1]
        if self.link.me in newest.workers:
            self.membership = Membership(newest.workers, self.link.me, newest.number)

    def _admitted(self) -> bool:
        newest = self.member.newest
        return newest is not None and self.link.me in {*newest.workers, *newest.joining}

    @property
    def joins(self) -> bool:
        """Whether this island has yet to fetch a state before it takes part."""
        newest = self.member.newest
        if not self._took_part:
            return newest is not None and self.link.me in newest.joining
        return self.membership.me != self.link.me

    def enter(self, *, alike: bool) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Fetch a state, and go along with the run: everything posted from now on goes nowhere, and everything taken is
        what a donor got, until `meet` says that this island takes part.

        Args: alike: whether all islands hold the same, so that any of them may answer.
        """
        newest = self.member.newest
        assert newest is not None
        donors = newest.donors if alike else newest.donors[:1]
        self._entry = Entry(self._fetching, newest.number, donors, self._caught_up)
        return self._entry.state()

    def expect(self, key: Key, source: Source) -> Key:
        """An exchange that was in flight in the state that was fetched."""
        assert self._entry is not None
        return self._entry.expect(key, source)

    def begins(self) -> int | None:
        """The step from which this island takes part, once the coordinator has named it."""
        mine = [epoch.step for epoch in self.member.epochs if self.link.me in epoch.workers]
        return mine[0] if mine else None

    def again(self) -> None:
        """Come again after the others went on without this island: everything under way is dropped. `agree` is next."""
        fresh = Member(self.link.me, self._send, self.patience)

        def act() -> None:
            self.member, self._error, self._hello = fresh, None, None

        self._posts.clear()
        self._begun.clear()
        self._entry, self._took_part, self.membership = None, False, Membership((self.link.me,), self.link.me)
        self._do(act)
        self._wait(lambda: self.member is fresh or None, checks=False)

    def offer(self, capture: Callable[[], State]) -> None:
        """Offer this island's state as it is before the boundary that `meet` was called for, if somebody joins."""
        newest = self.member.newest
        if newest is None or newest.step > self.member.step:
            return
        if not newest.joining:
            self.offers.clear()
        elif self.link.me in newest.donors and newest.number not in self.offers.epochs:
            self.offers.state(newest.number, *capture())

    def meet(self, step: int) -> Membership:
        """Who takes part in what is launched at inner step `step`; waits while that is being decided."""
        # in the thread: what is promised to the coordinator and what is launched must not cross
        self._met, self._meets = None, step
        self._do(lambda: None)
        self.membership, self._took_part = self._wait(lambda: self._met), True
        return self.membership

    def post(self, post: Post) -> Key:
        """Begin an exchange of a snapshot; one that reads live tensors begins when it is taken.

        Raises: UsageError for a message to a keeper.
        """
        if post.to == (KEEPER,):
            raise UsageError(
                "a message was to go to a keeper, but islands far apart have none; take a method without a keeper"
            )
        self._check()
        if self._entry and self.joins:
            return self._entry.expect(post.key, post.source)
        if post.key not in self._posts:
            self._posts[post.key] = post
            if isinstance(post.source, Snapshot):
                self._begin(post, None)
        return post.key

    def take(self, take: Take, wait: bool = True) -> Landed | Lost | None:
        """The answer. An exchange that reads live tensors begins now: let them stand still until it has come."""
        key = take.ticket
        post = self._posts.get(key)
        if post is None and self._entry and self._entry.expects(key):
            return self._entry.take(take)
        if post is None:
            self._check()
            raise GroupError(f"worker {self.link.me} asked for {key}, which it has not posted or has taken already")
        kept: list[Tensor] = []
        if key not in self._begun:
            self._begin(post, replace(take, sink=_copying(take.sink, post, kept)) if self.offers.epochs else take)
        if not wait and key not in self.member.answers:
            self._check()
            return None
        answer = self._wait(lambda: self.member.answers.get(key))
        del self._posts[key], self.member.answers[key]
        self._begun.discard(key)
        if self.offers.epochs:
            mean = post.source.tree.flat.clone() if isinstance(post.source, Snapshot) else None
            for asked in self.offers.landed(key, answer, kept[0] if kept else mean):
                self._do(lambda asked=asked: self._give(asked, Fetch(key, 0)))
        return answer

    def tell(self, *, loss: float, speed: float) -> None:
        """Say how training goes, with the next sign of life: nats per token, tokens per second."""
        self.progress = Progress(loss, speed, training=True)

    def leave(self, why: str) -> None:
        """Tell the others that this island takes part in no epoch after this one."""
        self._do(lambda: self._tell(Leave(why)))

    def finish(self, seconds: float = 60.0) -> None:
        """Stay until all others have come to the end too: they may need what this island has. Not for ever, if they
        cannot be heard."""
        end = time.monotonic() + seconds
        while not self.member.over and not self._error and time.monotonic() < end:
            self._do(lambda: self._tell(Done(self.member.step)))
            with self._changed:
                self._changed.wait_for(lambda: self.member.over or self._error, BEAT_S)
            if self.member.home:
                end = time.monotonic() + seconds

    def abort(self) -> None:
        """Answer every `take` of this process with a `GroupError`, now and from now on."""
        me = self.link.me
        self._fail(
            GroupError(f"worker {me} aborted the group, and what was in flight is lost; go on from the last checkpoint")
        )

    def close(self) -> None:
        """End the thread and the link."""
        self._closed = True
        self._do(lambda: None)
        self._thread.join(2.0)
        self.link.close()

    def _begin(self, post: Post, take: Take | None) -> None:
        self._begun.add(post.key)
        self._do(lambda: self.member.post(post, take, time.monotonic()))

    def _wait(self, look: Callable[[], Found | None], *, checks: bool = True) -> Found:
        with self._changed:
            while True:
                if checks:
                    self._check()
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
            if self._entry and newest and newest.number >= self._entry.epoch + KEPT:
                raise LeftBehind(
                    "the others have changed who takes part faster than a state could be fetched; come again"
                )
            self._changed.wait(seconds)

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
            self._jobs.get(block=not busy, timeout=0.2)()
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
        self.member.beat(Beat(self.member.step, newest, self.link.sent, mine.loss, mine.speed, (), mine.training))
        if self._hello and not self._admitted():
            self._tell(self._hello)

    def _send(self, to: int, message: Message, priority: Priority) -> None:
        self.link.send(to, write(message), priority)

    def _tell(self, message: Message | None) -> None:
        if message is not None:
            self._send(COORDINATOR, message, Priority.CONTROL)

    def _give(self, sender: int, fetch: Fetch) -> None:
        """Send what is offered; what is not there yet is said to be none, and follows when it is."""
        payload, count = self.offers.piece(fetch.key, fetch.chunk, sender)
        self._send(sender, Bulk(fetch.key, STATE, count, (), fetch.chunk, payload), Priority.OVERLAPPED)

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
            case Bulk() if message.phase == STATE:
                self._fetching.arrived(sender, message)
            case _:
                self.member.heard(sender, message, time.monotonic())

    def _sees(self, address: int, alive: bool) -> None:
        def act() -> None:
            self.member.seen(address, alive)
            (self._fetching.gone.discard if alive else self._fetching.gone.add)(address)
            if alive and address == COORDINATOR and self._hello and not self._admitted():
                self._tell(self._hello)

        self._do(act)


def _copying(sink: Callable[[Landed, int, Tensor], None] | None, post: Post, kept: list[Tensor]) -> Any:
    """The same sink, and a copy of what it was given, for whoever joins."""
    mean = torch.empty(post.source.layout.numel, dtype=post.source.layout.dtype)
    kept.append(mean)

    def copying(landed: Landed, start: int, values: Tensor) -> None:
        mean[start : start + len(values)] = values
        if sink:
            sink(landed, start, values)

    return copying
