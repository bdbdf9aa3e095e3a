"""A keeper in virtual time: it looks when something arrives, and when a round's grace is over."""

import math
from dataclasses import dataclass, field, replace
from typing import cast

from atoll.sim.world import World
from atoll.sync.drive import drive
from atoll.sync.keeping import Keeping, keep
from atoll.trees import Tree
from atoll.wire import Collect, KeeperGroup, Key, Landed, Post, Push, Reply


@dataclass
class Desk:
    """What has been handed in, what of it has arrived, and what was answered."""

    _pushes: dict[tuple[int, Key], Push] = field(default_factory=dict[tuple[int, Key], Push])
    _arrived: list[tuple[int, Key]] = field(default_factory=list[tuple[int, Key]])
    _answers: dict[tuple[int, Key], Landed] = field(default_factory=dict[tuple[int, Key], Landed])

    def hand_in(self, me: int, post: Post) -> None:
        """It is on its way."""
        self._pushes[me, post.key] = Push(post.key, me, post.weight, 1.0, Tree(post.source.layout))

    def arrive(self, me: int, key: Key) -> None:
        """It is here."""
        self._arrived.append((me, key))

    def collect(self, collect: Collect) -> list[Push]:
        """What is here for one fragment."""
        asked = (collect.rule, collect.fragment)
        wanted = [(me, key) for me, key in self._arrived if (key.rule, key.fragment) == asked]
        self._arrived = [each for each in self._arrived if each not in wanted]
        return [self._pushes.pop(each) for each in wanted]

    def reply(self, reply: Reply) -> None:
        """Keep an answer for when it has come."""
        self._answers[reply.push.worker, reply.push.key] = replace(reply.landed, key=reply.push.key)

    def answer(self, me: int, key: Key) -> Landed | None:
        """The answer, once."""
        return self._answers.pop((me, key), None)


class KeeperRunner:
    """A keeper beside island `world.keeper_at`; its tick is an inner step of the fastest island, `tick_s` seconds."""

    def __init__(self, world: World, keeping: Keeping, desk: Desk, *, tick_s: float) -> None:
        self._world, self._keeping, self._desk, self._tick_s = world, keeping, desk, tick_s
        world.handed_in = self._arrived

    def _arrived(self, now: float, me: int, key: Key) -> None:
        self._desk.arrive(me, key)
        self._look(now)

    def _look(self, now: float) -> None:
        self._keeping.tick = math.floor(now / self._tick_s)
        drive(keep(self._keeping), cast(KeeperGroup, self))
        for track in self._keeping.tracks:
            if track.joined and track.ready is not None:
                self._world.clock.at((track.ready + track.part.grace) * self._tick_s, self._look)

    def collect(self, collect: Collect) -> list[Push]:
        """What has arrived."""
        return self._desk.collect(collect)

    def reply(self, reply: Reply) -> None:
        """Send the anchor back, as wide as it is."""
        self._desk.reply(reply)
        self._world.reply(reply.push)
