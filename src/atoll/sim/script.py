"""A strategy's flow worked out once for all islands, where nothing can make one differ from another.

If all that is asked for lands, what a flow posts and takes at each step is the same on every island, but for whom it
meets. So one flow is carried out, and every island goes through what it asked for, with its own clock and partners.
Not for a keeper, whose answers come when they come (see `atoll.sim.arrivals`), nor where messages get lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from atoll.faults import Faults
from atoll.parts.landings import OnArrival
from atoll.parts.mixers import Situation, Work
from atoll.sim.copies import changed
from atoll.sync.carry import Carry
from atoll.sync.flow import Answer, Flow, boundary, drain
from atoll.sync.rule import Strategy
from atoll.sync.state import SyncState
from atoll.wire import Event, Landed, Membership, Post, Take


def alike(strategy: Strategy, faults: Faults) -> bool:
    """Whether all islands ask for the same at the same steps, whatever happens on the network."""
    looks = any(isinstance(rule.landing, OnArrival) for rule in strategy.rules)
    averages = any(rule.carry is Carry.GRADIENT for rule in strategy.rules)
    return not (strategy.kept or looks or averages or faults.loss or faults.events)


@dataclass(frozen=True)
class Boundary:
    """One boundary: the step it is at, what is asked for, and what it comes to."""

    step: int
    effects: Sequence[Post | Take]
    events: Sequence[Event]


class Script:
    """All boundaries up to the last step, and the end of the run.

    Args: state: of any island; it is used up. steps: inner steps of the run.
    """

    def __init__(self, state: SyncState, steps: int) -> None:
        self.workers = state.membership.workers
        self.boundaries: list[Boundary] = []
        self.sent = {
            (track.rule_index, track.fragment.index): (track.rule.mixer, track.rule.codec, track.message)
            for track in state.tracks
        }
        while state.due <= steps:
            at = state.due
            state.work = Work(at, at, 1.0)
            self.boundaries.append(_carried_out(at, boundary(state)))
        state.work = Work(steps, steps, 1.0)
        self.end = _carried_out(steps, drain(state))


def _carried_out(step: int, flow: Flow) -> Boundary:
    effects: list[Post | Take] = []
    answer: Answer = None
    while True:
        try:
            effect = cast(Post | Take, flow.send(answer))
        except StopIteration as done:
            return Boundary(step, effects, done.value)
        effects.append(effect)
        posts = effect if isinstance(effect, Post) else None
        answer = posts.key if posts else Landed(cast(Take, effect).ticket, (), 1.0)


class Scripted:
    """One island's way through a script."""

    kept, gradients = False, False

    def __init__(self, script: Script, me: int) -> None:
        self._script, self._membership, self._next = script, Membership(script.workers, me), 0
        self.step = 0

    @property
    def awaited(self) -> int:
        """The step of the next boundary."""
        boundaries = self._script.boundaries
        return boundaries[self._next].step if self._next < len(boundaries) else self._script.end.step + 1

    def train(self, steps: int, since: float, now: float) -> None:
        """Count them."""
        self.step += steps

    def boundary(self) -> Flow:
        """What is asked for at this step."""
        self._next += 1
        return self._through(self._script.boundaries[self._next - 1])

    def drain(self) -> Flow:
        """What is still to be taken."""
        return self._through(self._script.end)

    def told(self, now: float, events: Sequence[Event]) -> None:
        """The trace has it."""

    def _through(self, boundary: Boundary) -> Flow:
        for effect in boundary.effects:
            yield self._own(effect) if isinstance(effect, Post) else effect
        return list(boundary.events)

    def _own(self, post: Post) -> Post:
        if post.to is self._script.workers and post.edges is None:
            return post
        key = post.key
        mixer, codec, message = self._script.sent[key.rule, key.fragment]
        exchange = mixer.exchange(Situation(self._membership, key.round, _WORK, _NO_SIGNALS, codec, message))
        return changed(post, to=exchange.to, edges=exchange.edges)


_WORK = Work(1, 1)
_NO_SIGNALS: dict[str, float] = {}
