"""A keeper in virtual time: it looks at the end of a tick in which something came, and when a round's grace is over."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, cast

from torch import Tensor

from atoll.sim.clock import Told
from atoll.sim.world import World
from atoll.sync.keeping import Keeping, keep
from atoll.sync.state import Track
from atoll.trees import Tree
from atoll.wire import Collect, Landed, Push, Reply


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
    """

    def __init__(self, world: World, keeping: Keeping, *, tick_s: float) -> None:
        self._world, self._keeping, self._tick_s = world, keeping, tick_s
        self._looks: set[int] = set()
        self._mail = defaultdict[int, list[tuple[float, Told, Any]]](list)
        world.handed_in, world.expect, self._reply = self._handed_in, self._expect, world.reply

    def _tick(self, time: float) -> int:
        # a tick that ends now is not over before all that comes now has come
        return math.ceil(time / self._tick_s * (1 - 1e-12))

    def _handed_in(self, now: float) -> None:
        self._look_at(self._tick(now))

    def _expect(self, time: float, act: Told, what: object) -> None:
        """Do `act(what, time)` when the keeper looks at the end of that tick: nobody sees before that it is done, and a
        place of its own on the clock would cost a message more than all else that the keeper does with it."""
        tick, clock = self._tick(time), self._world.clock
        mail = self._mail[tick]
        if time >= tick * self._tick_s:  # with the look, or after it by rounding
            clock.tell(time, act, what)
        elif mail and time >= mail[0][0]:
            mail.append((time, act, what))
            return
        else:
            mail.insert(0, (time, act, what))
        # not now but when the first is there, as what is due at one time happens in the order in which it was asked for
        clock.at(time, self._handed_in)

    def _look_at(self, tick: int) -> None:
        if tick not in self._looks:
            self._looks.add(tick)
            self._world.clock.tell(max(self._world.clock.now, tick * self._tick_s), self._look, tick)

    def _look(self, tick: int, now: float) -> None:
        for time, act, what in sorted(self._mail.pop(tick, ()), key=itemgetter(0)):
            act(what, time)
        self._looks.discard(tick)
        self._keeping.tick = tick - 1
        flow, answer = keep(self._keeping), None
        # `drive` would ask three other questions of each effect before it finds that it is a reply, as nearly all are
        while True:
            try:
                effect = flow.send(answer)
            except StopIteration:
                break
            answer = self._reply(effect) if isinstance(effect, Reply) else self._collect(cast(Collect, effect))
        for track in self._keeping.tracks:
            if track.joined and track.ready is not None:
                self._look_at(track.ready + track.part.grace)

    def _collect(self, collect: Collect) -> list[Push]:
        return list(self._world.numerics.collect(collect))
