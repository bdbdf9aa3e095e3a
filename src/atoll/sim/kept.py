"""A keeper in virtual time: it looks when something arrives, and when a round's grace is over."""

import math
from typing import cast

from atoll.sim.world import World
from atoll.sync.drive import drive
from atoll.sync.keeping import Keeping, keep
from atoll.trees import Tree
from atoll.wire import Collect, KeeperGroup, Post, Push, Reply


class KeeperRunner:
    """A keeper beside the first island; its tick is an inner step of the fastest island, `tick_s` seconds."""

    def __init__(self, world: World, keeping: Keeping, *, tick_s: float) -> None:
        self._world, self._keeping, self._tick_s = world, keeping, tick_s
        self._arrived: list[Push] = []
        world.handed_in = self._handed_in

    def _handed_in(self, now: float, me: int, post: Post) -> None:
        self._arrived.append(Push(post.key, me, post.weight, 1.0, Tree(post.source.layout)))
        self._look(now)

    def _look(self, now: float) -> None:
        self._keeping.tick = math.floor(now / self._tick_s)
        drive(keep(self._keeping), cast(KeeperGroup, self))
        for track in self._keeping.tracks:
            if track.joined and track.ready is not None:
                self._world.clock.at((track.ready + track.part.grace) * self._tick_s, self._look)

    def collect(self, collect: Collect) -> list[Push]:
        """What has arrived for one fragment."""
        wanted = [push for push in self._arrived if push.key[:2] == (collect.rule, collect.fragment)]
        self._arrived = [push for push in self._arrived if push.key[:2] != (collect.rule, collect.fragment)]
        return wanted

    def reply(self, reply: Reply) -> None:
        """Send the anchor back."""
        self._world.reply(reply)
