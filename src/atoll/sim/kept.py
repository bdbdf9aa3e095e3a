"""A keeper in virtual time: it looks at the end of a tick in which something came, and when a round's grace is over."""

import math
from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor

from atoll.sim.world import World
from atoll.sync.drive import drive
from atoll.sync.keeping import Keeping, keep
from atoll.sync.state import Track
from atoll.trees import Tree
from atoll.wire import Collect, KeeperGroup, Landed, Push


class Formless:
    """Closing a round of a hollow fragment: nothing is in it, and the norm of nothing is 0."""

    def __init__(self, track: Track) -> None:
        self.anchor = Tree(track.message)

    def norms(self, pushes: Sequence[Push]) -> list[float]:
        """0 for each."""
        return [0.0] * len(pushes)

    def step(self, counted: Sequence[Push], landed: Landed) -> None:
        """Nothing moves."""

    def tensors(self, place: str) -> Iterator[tuple[str, Tensor]]:
        """None."""
        return iter(())


class KeeperRunner:
    """A keeper beside the first island; its tick is an inner step of the fastest island, `tick_s` seconds. All that
    comes within a tick is answered alike, as in a run in turns.

    Attributes: reply: send an anchor back.
    """

    def __init__(self, world: World, keeping: Keeping, *, tick_s: float) -> None:
        self._world, self._keeping, self._tick_s = world, keeping, tick_s
        self._looks: set[int] = set()
        world.handed_in, self.reply = self._handed_in, world.reply

    def _handed_in(self, now: float) -> None:
        # a tick that ends now is not over before all that comes now has come
        self._look_at(math.ceil(now / self._tick_s * (1 - 1e-12)))

    def _look_at(self, tick: int) -> None:
        if tick not in self._looks:
            self._looks.add(tick)
            self._world.clock.at(max(self._world.clock.now, tick * self._tick_s), lambda now: self._look(tick))

    def _look(self, tick: int) -> None:
        self._looks.discard(tick)
        self._keeping.tick = tick - 1
        drive(keep(self._keeping), cast(KeeperGroup, self))
        for track in self._keeping.tracks:
            if track.joined and track.ready is not None:
                self._look_at(track.ready + track.part.grace)

    def collect(self, collect: Collect) -> list[Push]:
        """What has arrived for one fragment."""
        return list(self._world.numerics.collect(collect))
