"""A worker's way to the others across the internet: a `PeerGroup` over a link, whose work is done by one thread.

The thread alone touches the `Member`; training hands it exchanges and waits for answers, or does not wait. Messages
come from the link's threads through one queue.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from atoll.errors import GroupError, LeftBehind, UsageError
from atoll.peers.wide.engine import BEAT_S, Engine, Progress
from atoll.peers.wide.entering import Entry
from atoll.peers.wide.member import Member
from atoll.peers.wide.messages import (
    Done,
    Hello,
    Leave,
)
from atoll.peers.wide.offers import entered_key, view
from atoll.sync.elastic import State
from atoll.wire import KEEPER, Key, Landed, Lost, Membership, Post, Snapshot, Source, Take

READY_S = 0.5
"""How long a joiner waits for the others to name the step at which it begins, before it looks whether they have gone
on."""
_HASHING = ThreadPoolExecutor(1, "atoll-digests")


class WideGroup(Engine):
    """Worker `link.me` of run `run`: what training asks of it. Arguments as of `Engine`."""

    def agree(self, fingerprint: str) -> None:
        """Say hello, and wait until the coordinator has an epoch with this island in it, to train or to fetch a state.

        Raises: GroupError if the coordinator refuses, with both sides shown.
        """
        hello = Hello(self.run, f"{fingerprint} {self.told}".strip(), self.version, self.step, uuid4().hex)

        def act() -> None:
            self.member.life, self._hello = hello.life, hello
            self._tell(hello)

        self._do(act)
        try:
            newest = self._wait(lambda: self.member.newest if self._admitted() else None)
        except LeftBehind:
            self.again()
            return self.agree(fingerprint)
        if self.link.me in newest.workers:
            self.membership = Membership(newest.workers, self.link.me, newest.number)

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
        newest = [epoch for epoch in self.member.epochs if self.link.me in epoch.joining][-1]
        donors = newest.donors if alike else newest.donors[:1]
        self._entry = Entry(self._fetching, newest.number, donors, self._caught_up)
        return self._entry.state()

    def expect(self, key: Key, source: Source) -> Key:
        """An exchange that was in flight in the state that was fetched."""
        assert self._entry is not None
        return self._entry.expect(key, source)

    def stands(self) -> tuple[int, int]:
        """The step of the next boundary of the donor that this island goes along with, and the last it has done."""
        assert self._entry is not None
        return self._entry.stands()

    def ready(self) -> None:
        """Tell that this island has gone along with all that has landed; waits a little for the others to know."""
        assert self._entry is not None
        self._caught_up()
        until, looked = time.monotonic() + READY_S, False
        while self.begins() is None and (left := until - time.monotonic()) > 0:
            if self.member.promised and not looked:
                # the step is on its way now: with it comes where the others are
                self._entry.looks()
                looked = True
            self._wait_a_little(left)

    def begins(self) -> int | None:
        """The step from which this island takes part, once the coordinator has named it."""
        mine = [epoch.step for epoch in self.member.epochs if self.link.me in epoch.workers]
        return mine[0] if mine else None

    def again(self) -> None:
        """Come again after the others went on without this island: everything under way is dropped. `agree` is next."""
        fresh = Member(self.link.me, self._send, self.patience)

        def act() -> None:
            fresh.home = self.member.home
            self.member, self._error, self._hello, self._meets = fresh, None, None, None
            self._owed.clear()

        self._posts.clear()
        self._witness = None
        self._begun.clear()
        self.offers.clear()
        self._looked = -1
        self._entry, self._took_part, self.membership = None, False, Membership((self.link.me,), self.link.me)
        self._do(act)
        self._wait(lambda: self.member is fresh or None, checks=False)

    def offer(self, capture: Callable[[], State], due: int, step: int) -> None:
        """Offer this island's state as it is before the boundary at step `due`, if somebody joins."""
        self._at = due, step
        epochs = [epoch for epoch in self.member.epochs if epoch.step <= due]
        for epoch in epochs:
            if epoch.number > self._looked and epoch.joining and self.link.me in epoch.donors:
                self.offers.state(epoch.number, epoch.joining, *capture())
        if epochs:
            self._looked = epochs[-1].number
            self.offers.only({*epochs[-1].workers, *epochs[-1].joining})

    def meet(self, step: int) -> Membership:
        """Who takes part in what is launched at inner step `step`; waits while that is being decided."""
        if self._witness:
            witness, self._witness = self._witness.result(), None
            self._do(lambda: setattr(self.member, "witness", witness))
        # in the thread: what is promised to the coordinator and what is launched must not cross
        self._met, self._meets = None, step
        self._do(lambda: None)
        met = self._wait(lambda: self._met)
        entry, self._took_part = self._entry, True
        if entry and met.me != self.link.me:
            met = replace(met, me=entry.donors[0])
        elif entry and not entry.awaits:
            self._entry = None
            self._do(lambda: self._owed.update(dict.fromkeys(entry.donors, entered_key(met.epoch))))
        self.membership = met
        return met

    def witness(self, held: Sequence[Tensor]) -> None:
        """Compare, along with the next exchanges, what all should hold alike: its digest is formed beside training, so
        it must stand still until `meet` is called again."""
        self._witness = _HASHING.submit(_digest, [tensor.detach() for tensor in held])

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
            self._begin(post, replace(take, sink=_copying(take.sink, post, kept)) if self.offers.goers else take)
        if not wait and key not in self.member.answers:
            self._check()
            return None
        answer = self._wait(lambda: self.member.answers.get(key))
        del self._posts[key], self.member.answers[key]
        self._begun.discard(key)
        if self.offers.goers:
            mean = post.source.tree.flat.clone() if isinstance(post.source, Snapshot) else None
            self.offers.landed(key, answer, kept[0] if kept else mean)
        return answer

    def tell(self, *, loss: float, speed: float) -> None:
        """Say how training goes, with the next sign of life: nats per token, tokens per second."""
        self.progress = Progress(loss, speed)

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


def _digest(held: Sequence[Tensor]) -> str:
    """Of tensors on the host, in order."""
    hashed = sha256()
    for tensor in held:
        hashed.update(view(tensor.reshape(-1).view(torch.uint8).cpu()))
    return hashed.hexdigest()


def _copying(sink: Callable[[Landed, int, Tensor], None] | None, post: Post, kept: list[Tensor]) -> Any:
    """The same sink, and a copy of what it was given, for whoever joins."""
    mean = torch.empty(post.source.layout.numel, dtype=post.source.layout.dtype)
    kept.append(mean)

    def copying(landed: Landed, start: int, values: Tensor) -> None:
        mean[start : start + len(values)] = values
        if sink:
            sink(landed, start, values)

    return copying
